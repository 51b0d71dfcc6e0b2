"""The rows of a job, and how a job is split into parts: pure index arithmetic between vLLM's lists and ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.vllm.compat import GPULoadStoreSpec, LoadStoreSpec


class RowsSpec(LoadStoreSpec):
    """The host side of a job: region rows, ordered by KV group, sent from the scheduler to every worker.

    `rows`: int64 (n,). `counts`: rows of each KV group, in the order of OffloadingConfig.groups; they add up to n.
    `store_seq`: what a store's rows are marked with; 0 for loads. `missing`: of a load's rows, those that lack
    sub-blocks: place in `rows` -> how many at the row's beginning.
    """

    def __init__(
        self,
        rows: NDArray[np.int64],
        counts: Sequence[int],
        store_seq: int = 0,
        missing: Mapping[int, int] | None = None,
    ) -> None:
        self.rows = rows
        self.counts = tuple(counts)
        self.store_seq = store_seq
        self.missing = dict(missing or {})

    def __reduce__(self) -> tuple[Callable[..., RowsSpec], tuple[bytes, tuple[int, ...], int, dict[int, int]]]:
        return _unpack, (self.rows.astype("<u4").tobytes(), self.counts, self.store_seq, self.missing)

    def __repr__(self) -> str:
        return f"RowsSpec(rows={self.rows.tolist()}, counts={self.counts}, store_seq={self.store_seq})"


def _unpack(rows: bytes, counts: tuple[int, ...], store_seq: int, missing: dict[int, int]) -> RowsSpec:
    return RowsSpec(np.frombuffer(rows, "<u4").astype(np.int64), counts, store_seq, missing)


class Part(NamedTuple):
    """One KV group's share of a job: block i of `blocks` belongs to sub-block `first` + i of all `rows` in order.

    `known`: False if vLLM does not say which of a store's blocks belongs where.
    """

    group: int
    blocks: NDArray[np.int64]
    rows: NDArray[np.int64]
    first: int
    known: bool = True


def split_load(rows: RowsSpec, engine: GPULoadStoreSpec, blocks_per_chunk: int) -> list[Part]:
    """The parts of a load: the first and the last row of a part may be needed in part only.

    Raises ValueError if the two sides do not match.
    """
    parts = []
    place = 0
    for group, (mine, blocks, index) in enumerate(_by_group(rows, engine)):
        first = index % blocks_per_chunk
        lacking = [rows.missing.get(place + number, 0) for number in range(len(mine))] if rows.missing else []
        place += len(mine)
        if any(count > (first if number == 0 else 0) for number, count in enumerate(lacking)):
            raise ValueError(f"group {group}: blocks are requested that their rows do not hold")
        if len(mine) != -(-(first + len(blocks)) // blocks_per_chunk) * bool(len(blocks)):
            raise ValueError(f"group {group}: {len(blocks)} blocks from {index} on do not lie in {len(mine)} rows")
        if len(blocks):
            parts.append(Part(group, blocks, mine, first))
    return parts


def split_store(rows: RowsSpec, engine: GPULoadStoreSpec, blocks_per_chunk: int) -> list[Part]:
    """The parts of a store. vLLM leaves null blocks out of its list without their positions.

    It lists a chunk only if the chunk's last block is there, and gives the position of the first block. So the other
    positions are known if only the beginning of the first chunk is missing, or all but the last block of every chunk.
    """
    parts = []
    for group, (mine, blocks, index) in enumerate(_by_group(rows, engine)):
        if not len(mine):
            continue
        first = index % blocks_per_chunk
        if len(blocks) == len(mine) > 1 and first == blocks_per_chunk - 1 > 0:
            parts += [Part(group, blocks[i : i + 1], mine[i : i + 1], blocks_per_chunk - 1) for i in range(len(mine))]
        else:
            parts.append(Part(group, blocks, mine, first, len(blocks) + first == len(mine) * blocks_per_chunk))
    return parts


def _by_group(rows: RowsSpec, engine: GPULoadStoreSpec) -> list[tuple[NDArray[np.int64], NDArray[np.int64], int]]:
    """Rows, blocks and the first block's index in its request, for each KV group."""
    sizes = engine.group_sizes
    if len(sizes) != len(rows.counts) or sum(rows.counts) != len(rows.rows):
        raise ValueError(f"{len(rows.counts)} groups of rows for {len(sizes)} groups of blocks")
    mine = np.split(rows.rows, np.cumsum(rows.counts)[:-1])
    blocks = np.split(np.asarray(engine.block_ids, np.int64), np.cumsum(sizes)[:-1])
    return list(zip(mine, blocks, map(int, engine.block_indices), strict=True))
