from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    TransferResult,
)

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.swap.step import Pairs
from nixl_tiers.vllm.copier import Submitted
from nixl_tiers.vllm.copy_jobs import PolledJobs, RowsSpec
from nixl_tiers.vllm.worker import NixlTiersWorker, segments_of, worker_over

BLOCKS = 12
ROWS = 6


def caches_of(pages: list[list[int]], stride: int | None = None) -> CanonicalKVCaches:
    """One group a list: each number is a layer's page in bytes, in a tensor of its own, all filled at random."""
    generator = torch.Generator().manual_seed(7)
    tensors, groups = [], []
    for group in pages:
        refs = []
        for page in group:
            backing = torch.randint(-128, 128, (BLOCKS, stride or page), dtype=torch.int8, generator=generator)
            refs.append(CanonicalKVCacheRef(len(tensors), page))
            tensors.append(CanonicalKVCacheTensor(backing[:, :page], page))
        groups.append(refs)
    return CanonicalKVCaches(tensors, groups)


class Rank:
    def __init__(
        self,
        pages: list[list[int]],
        blocks_per_chunk: int = 1,
        cells: int = 1,
        cell: int = 0,
        last_block_only: tuple[int, ...] = (),
        *,
        region: HostRegion | None = None,
    ) -> None:
        block_bytes = max(sum(group) for group in pages)
        geometry = Geometry(cells, block_bytes * blocks_per_chunk, blocks_per_chunk)
        self.region = region or HostRegion.create(geometry, ROWS)
        if region is None:
            self.region.rows_view[:] = 0xEE
        self.caches = caches_of(pages)
        self.worker = worker_over(self.region, self.caches, cell, last_block_only)
        self.jobs = 0

    def store(self, rows: RowsSpec, engine: GPULoadStoreSpec) -> TransferResult:
        self.jobs += 1
        assert self.worker.submit_store(self.jobs, engine, rows)
        return self.ended()

    def load(self, rows: RowsSpec, engine: GPULoadStoreSpec) -> TransferResult:
        self.jobs += 1
        assert self.worker.submit_load(self.jobs, rows, engine)
        return self.ended()

    def ended(self) -> TransferResult:
        self.worker.wait({self.jobs})
        (result,) = self.worker.get_finished()
        assert result.job_id == self.jobs
        return result

    def bytes_of(self, group: int, block: int) -> bytes:
        refs = self.caches.group_data_refs[group]
        return b"".join(self.caches.tensors[ref.tensor_idx].tensor[block].numpy().tobytes() for ref in refs)

    def clear(self) -> None:
        for tensor in self.caches.tensors:
            tensor.tensor.zero_()


def rows_of(*rows: int, counts: tuple[int, ...], store_seq: int = 1) -> RowsSpec:
    return RowsSpec(np.array(rows, np.int64), counts, store_seq)


class CallsAtOnce:
    """In the place of an executor's thread: a copy ends before its submission returns."""

    def __init__(self, name: str) -> None:
        pass

    def put(self, call: Callable[[], None]) -> None:
        call()

    def stop(self, timeout_s: float) -> bool:
        return True


@pytest.fixture(autouse=True)
def copies_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nixl_tiers.vllm.copy_jobs._SerialExecutor", CallsAtOnce)


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> Iterator[Rank]:
    rank = Rank(**getattr(request, "param", {"pages": [[512, 256]]}))
    yield rank
    rank.worker.shutdown()


@pytest.mark.parametrize("rank", [{"pages": [[512], [256, 64]], "blocks_per_chunk": 2}], indirect=True)
def test_several_groups_in_one_job_and_the_smaller_one_leaves_zeros(rank: Rank) -> None:
    before = [[rank.bytes_of(group, block) for block in range(BLOCKS)] for group in (0, 1)]
    rank.store(rows_of(3, 5, counts=(1, 1)), GPULoadStoreSpec([1, 2, 6, 4], [2, 2], [0, 8]))
    assert rank.region.written([3, 5], 1).all()
    row = rank.region.rows_view[5]
    assert row[:320].tobytes() == before[1][6]
    assert row[512:832].tobytes() == before[1][4]
    assert not row[320:512].any()
    assert not row[832:1024].any()
    rank.clear()
    rank.load(rows_of(3, 5, counts=(1, 1)), GPULoadStoreSpec([10, 11, 0], [2, 1], [0, 1]))
    assert [rank.bytes_of(0, block) for block in (10, 11)] == before[0][1:3]
    assert rank.bytes_of(1, 0) == before[1][4]


@pytest.mark.parametrize("rank", [{"pages": [[128, 64, 64]], "blocks_per_chunk": 3}], indirect=True)
def test_a_load_may_begin_and_end_inside_a_chunk(rank: Rank) -> None:
    before = [rank.bytes_of(0, block) for block in range(BLOCKS)]
    rank.store(rows_of(2, 0, 4, counts=(3,)), GPULoadStoreSpec(list(range(9)), [9], [0]))
    rank.clear()
    result = rank.load(rows_of(2, 0, 4, counts=(3,)), GPULoadStoreSpec([9, 10, 11, 0, 1], [5], [2]))
    assert result.success
    assert [rank.bytes_of(0, block) for block in (9, 10, 11, 0, 1)] == before[2:7]
    assert rank.bytes_of(0, 2) == bytes(256)


@pytest.mark.parametrize("rank", [{"pages": [[4096]], "cells": 3, "cell": 2}], indirect=True)
def test_a_rank_touches_its_own_cell_only(rank: Rank) -> None:
    rank.store(rows_of(1, counts=(1,)), GPULoadStoreSpec([3], [1], [0]))
    row = rank.region.rows_view[1]
    assert row[2 * 4096 : 3 * 4096].tobytes() == rank.bytes_of(0, 3)
    assert (row[: 2 * 4096] == 0xEE).all()
    assert not rank.region.written([1], 1).any(), "the other cells are not written yet"
    for cell in (0, 1):
        rank.region.mark(np.array([1]), cell, 1, True)
    assert rank.region.written([1], 1).all()


@st.composite
def stores(draw: st.DrawFn, rows: Sequence[int] = (), store_seq: int = 1) -> tuple[RowsSpec, GPULoadStoreSpec]:
    """A job of two groups of chunks of four blocks: of the first group the first chunk's beginning may be missing, of
    the second, a recurrent layer's, all but the last block of each. `rows`: where to; any by default."""
    rows = rows or draw(st.permutations(range(ROWS)))
    attending = draw(st.integers(0, min(3, len(rows))))
    recurrent = draw(st.integers(0, len(rows) - attending))
    first = draw(st.integers(0, 3)) if attending else 0
    alone = draw(st.booleans()) and recurrent
    sizes = [attending * 4 - first, recurrent if alone else recurrent * 4]
    blocks = [draw(st.integers(0, BLOCKS - 1)) for _ in range(sum(sizes))]
    spec = RowsSpec(np.array(rows[: attending + recurrent], np.int64), (attending, recurrent), store_seq)
    return spec, GPULoadStoreSpec(blocks, sizes, [first, 3 if alone else 0])


@settings(max_examples=60, deadline=None)
@given(store=stores(), copies=st.integers(2, 4))
def test_ranks_that_hold_the_same_bytes_store_what_one_would(
    store: tuple[RowsSpec, GPULoadStoreSpec], copies: int
) -> None:
    """Bytes and control words; each writes the rows whose turn is its own and no others; and all load all of them."""
    rows, engine = store
    pages = [[256], [192]]
    one = Rank(pages, 4, last_block_only=(1,))
    one.store(rows, engine)
    region = HostRegion.create(one.region.geometry, ROWS, copies=copies)
    region.rows_view[:] = 0xEE
    for number in range(copies):
        rank = Rank(pages, 4, cell=number, last_block_only=(1,), region=HostRegion.attach(os.dup(region.fd)))
        before = region.rows_view.copy()
        assert rank.store(rows, engine).success
        changed = np.flatnonzero((region.rows_view != before).any(axis=1))
        assert set(changed % copies) <= {number}
        rank.worker.shutdown()
    assert np.array_equal(region.rows_view, one.region.rows_view)
    assert np.array_equal(region.control, one.region.control)
    whole = one.region.written(rows.rows[: rows.counts[0]], 1) & (one.region.missing(rows.rows[: rows.counts[0]]) == 0)
    if whole.any():
        loaded = rows.rows[: rows.counts[0]][whole]
        blocks = GPULoadStoreSpec(list(range(4 * len(loaded))), [4 * len(loaded), 0], [0, 0])
        one.clear()
        one.load(RowsSpec(loaded, (len(loaded), 0)), blocks)
        for number in range(copies):
            rank = Rank(pages, 4, cell=number, last_block_only=(1,), region=HostRegion.attach(os.dup(region.fd)))
            rank.clear()
            assert rank.load(RowsSpec(loaded, (len(loaded), 0)), blocks).success
            assert [rank.bytes_of(0, block) for block in range(BLOCKS)] == [
                one.bytes_of(0, block) for block in range(BLOCKS)
            ]
            rank.worker.shutdown()
    region.close()
    one.worker.shutdown()


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[RowsSpec, GPULoadStoreSpec]]:
    """The stores of a step, to rows of their own. Some have a block that is not there."""
    rows, made = draw(st.permutations(range(ROWS))), []
    for number in range(draw(st.integers(1, 3))):
        spec, engine = draw(stores(rows[2 * number : 2 * number + 2], store_seq=number + 1))
        if len(engine.block_ids) and draw(st.integers(0, 3)) == 0:
            engine.block_ids[-1] = BLOCKS
        made.append((spec, engine))
    return made


@settings(max_examples=60, deadline=None)
@given(step=steps(), copies=st.integers(1, 2))
def test_stores_that_begin_together_write_what_they_would_one_by_one(
    step: list[tuple[RowsSpec, GPULoadStoreSpec]], copies: int
) -> None:
    """Bytes, control words, and the results of each; what is wrong with one is not with the others."""
    together, single = (
        Rank(
            [[256], [192]],
            4,
            last_block_only=(1,),
            region=HostRegion.create(Geometry(1, 4 * 256, 4), ROWS, copies=copies),
        )
        for _ in range(2)
    )
    together.region.rows_view[:] = single.region.rows_view[:] = 0xEE
    together.worker.collect()
    for number, (rows, engine) in enumerate(step):
        assert together.worker.submit_store(number, engine, rows)
    together.worker.flush()
    together.worker.wait(set(range(len(step))))
    results = {result.job_id: result for result in together.worker.get_finished()}
    for number, (rows, engine) in enumerate(step):
        alone = single.store(rows, engine)
        assert (results[number].success, results[number].transfer_size) == (True, alone.transfer_size)
    assert np.array_equal(together.region.rows_view, single.region.rows_view)
    assert np.array_equal(together.region.control, single.region.control)
    for rank in (together, single):
        rank.worker.shutdown()


@pytest.mark.parametrize("rank", [{"pages": [[256]], "blocks_per_chunk": 4}], indirect=True)
def test_a_chunk_with_null_blocks_is_stored_as_failed_and_its_neighbours_are_not(rank: Rank) -> None:
    fourth = rank.bytes_of(0, 4)
    result = rank.store(rows_of(3, 5, counts=(2,)), GPULoadStoreSpec([1, 2, 3, 4, 5], [5], [7]))
    assert result.success, "vLLM would end the engine"
    assert rank.region.written([3, 5], 1).tolist() == [False, True]
    assert rank.region.rows_view[5, 512:768].tobytes() == fourth
    result = rank.store(rows_of(3, 5, counts=(2,), store_seq=2), GPULoadStoreSpec([1, 2, 3, 4, 5], [5], [0]))
    assert result.success
    assert not rank.region.written([3, 5], 2).any()
    assert rank.region.copied([3, 5], 2).all(), "it is no failure that the engine has not all of a chunk"


@pytest.mark.parametrize(
    "rank", [{"pages": [[256], [192]], "blocks_per_chunk": 4, "last_block_only": (1,)}], indirect=True
)
def test_a_chunk_whose_last_block_suffices_is_stored_with_its_missing_blocks(rank: Rank) -> None:
    state = rank.bytes_of(1, 6)
    rank.store(rows_of(3, 5, counts=(1, 1)), GPULoadStoreSpec([1, 2, 6], [2, 1], [2, 7]))
    assert rank.region.written([3, 5], 1).tolist() == [False, True]
    assert rank.region.missing([5]).tolist() == [3]
    assert rank.region.rows_view[5, 768 : 768 + 192].tobytes() == state
    rank.clear()
    loaded = RowsSpec(np.array([5]), (0, 1), missing={0: 3})
    assert rank.load(loaded, GPULoadStoreSpec([9], [0, 1], [0, 11])).success
    assert rank.bytes_of(1, 9) == state
    assert not rank.load(loaded, GPULoadStoreSpec([9, 8], [0, 2], [0, 10])).success


@pytest.mark.parametrize(
    "engine",
    [
        GPULoadStoreSpec([1, BLOCKS], [2], [0]),
        GPULoadStoreSpec([1, 2], [1, 1], [0, 0]),
    ],
    ids=["a block that is not there", "groups that are not there"],
)
def test_a_failed_store_is_reported_to_the_scheduler_and_not_to_vllm(rank: Rank, engine: Any) -> None:
    result = rank.store(rows_of(0, 1, counts=(2,)), engine)
    assert result.success
    assert not rank.region.written([0, 1], 1).any()
    assert (rank.region.rows_view[:2] == 0xEE).all()


@pytest.mark.parametrize(
    ("rows", "engine"),
    [
        (rows_of(0, counts=(1,)), GPULoadStoreSpec([BLOCKS], [1], [0])),
        (rows_of(ROWS, counts=(1,)), GPULoadStoreSpec([0], [1], [0])),
        (rows_of(0, counts=(1,)), GPULoadStoreSpec([0, 1], [2], [0])),
    ],
)
def test_a_failed_load_is_reported_as_failed(
    rank: Rank, rows: RowsSpec, engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    before = [rank.bytes_of(0, block) for block in range(BLOCKS)]
    assert not rank.load(rows, engine).success
    assert "with kv_connector NixlTiersConnector and kv_load_failure_policy recompute" in caplog.text
    assert [rank.bytes_of(0, block) for block in range(BLOCKS)] == before


def test_failed_loads_can_be_collected(rank: Rank) -> None:
    rank.worker.keep_failed_loads()
    result = rank.load(rows_of(0, counts=(1,)), GPULoadStoreSpec([BLOCKS], [1], [0]))
    assert (result.success, result.transfer_size) == (True, None)
    assert rank.load(rows_of(0, counts=(1,)), GPULoadStoreSpec([1], [1], [0])).success
    assert rank.worker.take_failed_loads() == {1}
    assert rank.worker.take_failed_loads() == set()


@pytest.mark.parametrize("kept", [False, True], ids=["stock connector", "NixlTiersConnector"])
@pytest.mark.parametrize(
    "engine", [GPULoadStoreSpec([1], [1], [0]), GPULoadStoreSpec([BLOCKS], [1], [0])], ids=["copied", "not copied"]
)
def test_a_store_that_cannot_be_marked_is_not_a_failed_load(
    rank: Rank, kept: bool, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kept:
        rank.worker.keep_failed_loads()

    def broken(*_: object) -> None:
        raise OSError("broken by the test")

    with monkeypatch.context() as patch:
        patch.setattr(rank.worker._copier._steps, "mark", broken)
        assert rank.store(rows_of(0, counts=(1,)), engine).success, "vLLM would end the engine"
    assert rank.worker.take_failed_loads() == set()
    assert not rank.region.written([0], 1).any()


def test_a_spec_survives_pickling_and_is_small() -> None:
    spec = RowsSpec(np.arange(1000), (600, 400), (1 << 40) - 1, {7: 3})
    raw = pickle.dumps(spec)
    again = pickle.loads(raw)
    assert again.rows.tolist() == list(range(1000))
    assert again.rows.dtype == np.int64
    assert (again.counts, again.store_seq, again.missing) == ((600, 400), (1 << 40) - 1, {7: 3})
    assert len(raw) < 4 * 1000 + 300


class Slow:
    """A swap on a device: starts copies, and ends them when the test does."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.started: list[tuple[str, str]] = []

    def copy(self, group: int, pairs: Pairs, *, to_host: bool) -> Any:
        self.started.append(("store" if to_host else "load", threading.current_thread().name))
        return self

    def done(self) -> bool:
        return self.go.is_set()

    def elapsed_s(self) -> float:
        assert self.go.wait(120)
        return 0.25


@contextmanager
def on_device(swap: Any, pages: Sequence[int] = (512,), **settings: float) -> Iterator[NixlTiersWorker]:
    """A worker whose copies are started at their submission and polled."""
    region = HostRegion.create(Geometry(1, 512), ROWS)
    host = worker_over(region, caches_of([[page] for page in pages]), 0)
    worker = NixlTiersWorker(region, host._plan, swap, 0, jobs=PolledJobs(**settings))
    yield worker
    worker.shutdown()
    host.shutdown()


def test_stores_of_a_step_are_one_copy_on_a_device_and_have_results_of_their_own() -> None:
    slow = Slow()
    with on_device(slow) as worker:
        worker.collect()
        for job in (1, 2):
            rows = range(job * 2 - 2, job * 3 - 2)
            spec = rows_of(*rows, counts=(len(rows),), store_seq=job)
            worker.submit_store(job, GPULoadStoreSpec([*rows], [len(rows)], [0]), spec)
        assert slow.started == []
        worker.flush()
        worker.flush()
        assert slow.started == [("store", threading.current_thread().name)]
        assert worker.get_finished() == []
        written = worker._region.written
        assert not written([0], 1).any()
        slow.go.set()
        results = worker.get_finished()
        shown = [(each.job_id, each.success, each.transfer_size) for each in results]
        assert shown == [(1, True, 512), (2, True, 1024)]
        took_s = sum(each.transfer_time or 0.0 for each in results)
        assert took_s == pytest.approx(0.25), "the device's time of one copy, by their bytes"
        assert written([0], 1).all()
        assert written([2, 3], 2).all()


@pytest.mark.parametrize("how", ["wait", "flush, wait", "get_finished", "load, flush"])
def test_collected_stores_have_read_their_blocks_before_the_engine_may_write_to_them(rank: Rank, how: str) -> None:
    """It waits for those whose blocks it gives to others, in the step that preempts a request or begins another."""
    before = rank.bytes_of(0, 3)
    rank.worker.collect()
    rank.worker.submit_store(1, GPULoadStoreSpec([3], [1], [0]), rows_of(4, counts=(1,)))
    assert not rank.region.written([4], 1).any()
    if how == "get_finished":
        rank.worker.get_finished()
    elif how == "load, flush":
        rank.worker.submit_load(2, rows_of(1, counts=(1,)), GPULoadStoreSpec([7], [1], [0]))
        assert rank.worker._loads, "loads are collected too"
        rank.worker.flush()
    elif how == "flush, wait":
        rank.worker.flush()
    assert rank.worker._stores == [] or how == "wait"
    assert rank.worker._loads == []
    rank.worker.wait({1})
    assert rank.region.written([4], 1).all()
    rank.clear()
    assert rank.region.rows_view[4, :768].tobytes() == before


class HalfBroken(Slow):
    """Loads of group 0 do not start, and of group 1 they end with an error; those of group 2 are as they should be."""

    def copy(self, group: int, pairs: Pairs, *, to_host: bool) -> Any:
        if group == 0:
            raise OSError("does not start")
        super().copy(group, pairs, to_host=to_host)
        return Failing() if group == 1 else self


class Failing(Slow):
    def done(self) -> bool:
        raise OSError("does not end well")

    def elapsed_s(self) -> float:
        raise OSError("does not end well")


def test_a_failed_load_is_reported_after_all_started_copies_have_ended() -> None:
    """Its blocks are given to others then."""
    swap = HalfBroken()
    with on_device(swap, (512, 512, 512)) as worker:
        worker.submit_load(1, rows_of(0, 1, 2, counts=(1, 1, 1)), GPULoadStoreSpec([0, 1, 2], [1, 1, 1], [0, 0, 0]))
        worker.submit_load(2, rows_of(3, counts=(0, 0, 1)), GPULoadStoreSpec([3], [0, 0, 1], [0, 0, 0]))
        assert [direction for direction, _ in swap.started] == ["load"] * 3
        assert worker.get_finished() == []
        swap.go.set()
        worker.wait({1, 2})
        assert [(result.job_id, result.success) for result in worker.get_finished()] == [(1, False), (2, True)]


def test_a_store_whose_copy_does_not_start_or_fails_marks_no_row() -> None:
    """Of three stores that are copied together only the one whose group was copied becomes a hit."""
    region = HostRegion.create(Geometry(1, 512), ROWS)
    swap = HalfBroken()
    host = worker_over(region, caches_of([[512], [512], [512]]), 0)
    worker = NixlTiersWorker(region, host._plan, swap, 0, jobs=PolledJobs())
    worker.collect()
    for job, counts in enumerate([(1, 0, 0), (0, 1, 0), (0, 0, 1)]):
        worker.submit_store(job, GPULoadStoreSpec([job], counts, (0, 0, 0)), rows_of(job, counts=counts))
    worker.flush()
    swap.go.set()
    worker.wait({0, 1, 2})
    results = sorted(worker.get_finished(), key=lambda result: result.job_id)
    assert [(each.job_id, each.success, each.transfer_size) for each in results] == [
        (0, True, 0),
        (1, True, 0),
        (2, True, 512),
    ]
    assert region.written([0, 1, 2], 1).tolist() == [False, False, True]
    worker.shutdown()
    host.shutdown()


def test_a_wait_on_a_device_ends_when_the_copies_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of these stores are written to next."""
    region = HostRegion.create(Geometry(1, 512), ROWS)
    slow = Slow()
    host = worker_over(region, caches_of([[512]]), 0)
    worker = NixlTiersWorker(region, host._plan, slow, 0, jobs=PolledJobs())
    worker.submit_store(1, GPULoadStoreSpec([0], [1], [0]), rows_of(0, counts=(1,)))
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            slow.go.set()

    monkeypatch.setattr("nixl_tiers.vllm.copy_jobs.time.sleep", nap)
    worker.wait({1})
    assert len(naps) == 3
    assert region.written([0], 1).all()
    worker.shutdown()
    host.shutdown()


def test_no_row_is_marked_once_the_region_is_closed(rank: Rank) -> None:
    """C has the address of the control words, which are unmapped then."""
    engine, rows = GPULoadStoreSpec([1], [1], [0]), rows_of(0, counts=(1,))
    copier = rank.worker._copier
    step = copier.plan([Submitted(1, engine, rows)], to_host=True)
    words = rank.region.control  # which keeps the mapping
    rank.region.close()
    copier._steps.mark(step)
    assert not words.any()


def test_a_group_that_is_larger_than_announced_is_refused() -> None:
    with pytest.raises(ValueError, match="KV group 1 has 96 bytes a block, but vLLM announced 64"):
        segments_of(caches_of([[64], [48, 48]]), 64)


def test_pages_may_have_gaps_in_vllms_memory() -> None:
    segments = segments_of(caches_of([[48, 16]], stride=64), 64)
    assert [(s.block_stride, s.nbytes, s.offset, s.blocks) for s in segments[0]] == [
        (64, 48, 0, BLOCKS),
        (64, 16, 48, BLOCKS),
    ]
