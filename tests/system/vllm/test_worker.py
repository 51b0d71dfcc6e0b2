"""A rank whose blocks are a GPU's, on the fake CUDA driver: what becomes of rows and jobs when the GPU fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import GPULoadStoreSpec, TransferResult

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.swap import kernels
from nixl_tiers.swap.cuda import CudaSwap
from nixl_tiers.swap.driver import Device
from nixl_tiers.swap.plan import CopyPlan, Segment, Share
from nixl_tiers.vllm.copy_jobs import PolledJobs, RowsSpec
from nixl_tiers.vllm.worker import NixlTiersWorker
from tests.swap.fake_gpu import FakeGpu

BLOCKS, ROWS, PAGE, LAYERS, SUB_BLOCKS = 12, 6, 2048, 3, 2
OUT_OF_MEMORY = 2
STRATEGIES = ("copy_engine", "staged")


class Rank:
    """One rank with LAYERS tensors of BLOCKS pages, all in the fake GPU's memory."""

    def __init__(self, library: Path, *strategies: str, own_stream: bool = False) -> None:
        """`strategies`: of each KV group; all are over the same tensors. `own_stream`: the engine computes on
        `compute`, and not on the default stream."""
        self.fake = FakeGpu(library, 5)
        self.compute = 0
        if own_stream:
            with Device(self.fake.driver, 0).current() as driver:
                self.compute = driver.stream(urgent=False)
        rng = np.random.default_rng(5)
        self.caches = [rng.integers(0, 256, (BLOCKS, PAGE), dtype=np.uint8) for _ in range(LAYERS)]
        for cache in self.caches:
            self.fake.own_bytes(cache.reshape(-1))
        segments = [
            Segment(cache.ctypes.data, PAGE, PAGE, layer * PAGE, BLOCKS) for layer, cache in enumerate(self.caches)
        ]
        geometry = Geometry(1, LAYERS * PAGE * SUB_BLOCKS, SUB_BLOCKS)
        self.region = HostRegion.create(geometry, ROWS)
        plan = CopyPlan([segments] * len(strategies), geometry, Share(0), self.region.address, ROWS)
        swap = CudaSwap(plan, compute_stream=lambda: self.compute, driver=self.fake.driver, strategies=strategies)
        self.region.at_close(swap.close)
        self.worker = NixlTiersWorker(self.region, plan, swap, 0, jobs=PolledJobs())
        self.worker.keep_failed_loads()
        self.jobs = 0

    def store(self, blocks: list[int], rows: list[int], store_seq: int) -> TransferResult:
        self.jobs += 1
        self.worker.submit_store(self.jobs, engine(blocks), RowsSpec(np.array(rows), (len(rows),), store_seq))
        return self._ended()

    def load(self, rows: list[int], blocks: list[int]) -> TransferResult:
        self.jobs += 1
        self.worker.submit_load(self.jobs, RowsSpec(np.array(rows), (len(rows),)), engine(blocks))
        return self._ended()

    def _ended(self) -> TransferResult:
        self.worker.wait({self.jobs})
        (result,) = self.worker.get_finished()
        return result

    def block(self, block: int) -> bytes:
        return b"".join(cache[block].tobytes() for cache in self.caches)


def engine(blocks: list[int]) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(blocks, [len(blocks)], [0])


@pytest.fixture
def rank(fake_library: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    monkeypatch.setattr(kernels, "images", lambda *_: iter([("here", lambda: b"image\0")]))
    rank = Rank(fake_library, request.param)
    yield rank
    rank.worker.shutdown()


@pytest.mark.parametrize("rank", STRATEGIES, indirect=True)
def test_a_store_and_a_load_round_trip_on_the_gpu(rank: Rank) -> None:
    before = [rank.block(block) for block in range(BLOCKS)]
    result = rank.store([3, 9, 0, 7], [4, 1], store_seq=1)
    assert result.success
    assert result.transfer_size == 4 * LAYERS * PAGE
    assert result.transfer_time > 0
    assert rank.region.written([4, 1], 1).all()
    assert rank.region.rows_view[1, : LAYERS * PAGE].tobytes() == before[0]
    for cache in rank.caches:
        cache[:] = 0
    assert rank.load([1, 4], [5, 6, 2, 1]).success
    assert [rank.block(block) for block in (5, 6, 2, 1)] == [before[block] for block in (0, 7, 3, 9)]
    assert rank.worker.take_failed_loads() == set()
    rank.worker.shutdown()
    rank.fake.check()
    assert not any(rank.fake.live().values())


@pytest.mark.parametrize("rank", STRATEGIES, indirect=True)
@pytest.mark.parametrize("call", ["cuEventRecord", "cuStreamWaitEvent", "cuCtxPushCurrent_v2", "the strategy's own"])
def test_a_copy_that_does_not_start_is_marked_in_the_rows_only(rank: Rank, call: str) -> None:
    strategy = rank.worker._swap._strategies[0]  # type: ignore[attr-defined]
    own = {"copy_engine": "cuMemcpyBatchAsync"}.get(strategy, "cuLaunchKernel")
    assert rank.store([0, 1], [0], store_seq=1).success  # strategies are created on first use
    rank.fake.fail(own if call == "the strategy's own" else call, OUT_OF_MEMORY)
    assert rank.store([2, 3], [1], store_seq=2).success
    assert not rank.region.written([1], 2).any()
    before = [rank.block(block) for block in range(BLOCKS)]
    rank.fake.fail(own if call == "the strategy's own" else call, OUT_OF_MEMORY)
    assert rank.load([0], [4, 5]).success
    assert rank.worker.take_failed_loads() == {3}
    after = [rank.block(block) for block in range(BLOCKS)]
    assert [n for n in range(BLOCKS) if before[n] != after[n] and n not in (4, 5)] == []
    assert rank.store([2, 3], [1], store_seq=3).success
    assert rank.region.written([1], 3).all()
    assert rank.load([1], [4, 5]).success
    assert rank.worker.take_failed_loads() == set()
    assert [rank.block(4), rank.block(5)] == before[2:4]


@pytest.mark.parametrize("rank", STRATEGIES, indirect=True)
@pytest.mark.parametrize("after", [0, 3])
def test_a_gpu_that_fails_while_copying_writes_no_row_and_ends_with_the_worker(rank: Rank, after: int) -> None:
    assert rank.store([0, 1], [0], store_seq=1).success
    rank.fake.fail_running(after)
    assert rank.store([2, 3, 4, 5], [1, 2], store_seq=2).success, "vLLM would end the engine"
    assert not rank.region.written([1, 2], 2).any()
    assert rank.load([0], [6, 7]).success
    assert rank.worker.take_failed_loads() == {3}
    rank.worker.shutdown()
