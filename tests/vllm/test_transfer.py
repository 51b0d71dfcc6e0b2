from __future__ import annotations

import pickle

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import GPULoadStoreSpec

from nixl_tiers.vllm.copy_jobs import RowsSpec, split_load, split_store


def rows_of(*rows: int, counts: tuple[int, ...], store_seq: int = 0) -> RowsSpec:
    return RowsSpec(np.array(rows, np.int64), counts, store_seq)


def test_a_spec_survives_pickling_and_is_small() -> None:
    spec = RowsSpec(np.arange(1000), (600, 400), (1 << 40) - 1, {7: 3})
    raw = pickle.dumps(spec)
    again = pickle.loads(raw)
    assert again.rows.tolist() == list(range(1000))
    assert again.rows.dtype == np.int64
    assert (again.counts, again.store_seq, again.missing) == ((600, 400), (1 << 40) - 1, {7: 3})
    assert len(raw) < 4 * 1000 + 300


def test_a_load_may_begin_and_end_inside_a_row() -> None:
    engine = GPULoadStoreSpec([10, 11, 12, 13, 14, 15], group_sizes=[6], block_indices=[7])
    (part,) = split_load(rows_of(3, 5, 9, counts=(3,)), engine, blocks_per_chunk=4)
    assert part.first == 3
    assert part.rows.tolist() == [3, 5, 9]
    assert part.blocks.tolist() == [10, 11, 12, 13, 14, 15]


def test_groups_are_separated_by_counts_and_sizes() -> None:
    engine = GPULoadStoreSpec([1, 2, 7, 8, 9], group_sizes=[2, 0, 3], block_indices=[0, 0, 5])
    parts = split_load(rows_of(0, 4, 6, counts=(1, 0, 2)), engine, blocks_per_chunk=2)
    assert [(p.group, p.rows.tolist(), p.blocks.tolist(), p.first) for p in parts] == [
        (0, [0], [1, 2], 0),
        (2, [4, 6], [7, 8, 9], 1),
    ]


@pytest.mark.parametrize(
    ("rows", "counts", "sizes", "indices"),
    [
        ((1, 2), (2,), [3], [0]),  # three blocks of one a row in two rows
        ((1, 2, 3), (3,), [2], [0]),
        ((1,), (1,), [0], [0]),
        ((1,), (1, 0), [1], [0]),
        ((1, 2), (1,), [1], [0]),
    ],
)
def test_a_load_whose_sides_do_not_match_is_refused(
    rows: tuple[int, ...], counts: tuple[int, ...], sizes: list[int], indices: list[int]
) -> None:
    engine = GPULoadStoreSpec(list(range(sum(sizes))), group_sizes=sizes, block_indices=indices)
    with pytest.raises(ValueError, match="group"):
        split_load(rows_of(*rows, counts=counts), engine, blocks_per_chunk=1)


def test_a_store_of_whole_chunks_is_complete() -> None:
    engine = GPULoadStoreSpec([1, 2, 3, 4, 5, 6], group_sizes=[4, 2], block_indices=[6, 0])
    first, second = split_store(rows_of(7, 8, 9, counts=(2, 1)), engine, blocks_per_chunk=2)
    assert first.known
    assert second.known
    assert (first.first, second.first) == (0, 0)


def test_null_blocks_before_a_window_make_only_the_first_row_partial() -> None:
    # Chunks of 4 blocks, the first three of them null: vLLM lists 5 blocks from block 11 on.
    engine = GPULoadStoreSpec([1, 2, 3, 4, 5], group_sizes=[5], block_indices=[11])
    (part,) = split_store(rows_of(7, 8, counts=(2,)), engine, blocks_per_chunk=4)
    assert (part.first, part.known) == (3, True)


def test_last_blocks_alone_have_known_positions() -> None:
    # As older versions store the states of recurrent layers: of each chunk nothing else is there.
    engine = GPULoadStoreSpec([5, 6, 7], group_sizes=[3], block_indices=[3])
    parts = split_store(rows_of(7, 8, 9, counts=(3,)), engine, blocks_per_chunk=4)
    assert [(p.rows.tolist(), p.blocks.tolist(), p.first, p.known) for p in parts] == [
        ([7], [5], 3, True),
        ([8], [6], 3, True),
        ([9], [7], 3, True),
    ]


@pytest.mark.parametrize(("blocks", "index"), [(6, 0), (6, 1), (3, 11), (9, 0), (2, 0)])
def test_blocks_missing_anywhere_else_have_unknown_positions(blocks: int, index: int) -> None:
    engine = GPULoadStoreSpec(list(range(blocks)), group_sizes=[blocks], block_indices=[index])
    (part,) = split_store(rows_of(7, 8, counts=(2,)), engine, blocks_per_chunk=4)
    assert not part.known


def test_a_load_of_missing_sub_blocks_is_refused() -> None:
    spec = RowsSpec(np.array([3, 4, 6]), (2, 1), missing={0: 1, 2: 3})
    good = GPULoadStoreSpec([1, 2, 3, 4, 5, 9], group_sizes=[5, 1], block_indices=[1, 3])
    assert [part.first for part in split_load(spec, good, blocks_per_chunk=4)] == [1, 3]
    for sizes, indices in (([6, 1], [0, 3]), ([5, 2], [1, 2])):
        bad = GPULoadStoreSpec(list(range(sum(sizes))), group_sizes=sizes, block_indices=indices)
        with pytest.raises(ValueError, match="blocks are requested that their rows do not hold"):
            split_load(spec, bad, blocks_per_chunk=4)
    late = RowsSpec(np.array([3, 4]), (2,), missing={1: 1})
    with pytest.raises(ValueError, match="do not hold"):
        split_load(late, GPULoadStoreSpec([1, 2], group_sizes=[2], block_indices=[3]), blocks_per_chunk=4)
