"""Loads of a worker whose rows are still to come: how they end, and what vLLM is told. The test writes their words."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import GPULoadStoreSpec, TransferResult

from nixl_tiers.base.row_words import ARRIVED, WAITING
from nixl_tiers.swap import streams
from nixl_tiers.vllm.copy_jobs import RowsSpec, StreamSpec
from tests.support.waiting import until
from tests.vllm.test_worker import ROWS, Rank, rows_of

PAGE = 512
SUB_BLOCKS = 2


class Streaming(Rank):
    """A rank whose rows hold their number, and that reports failed loads to NixlTiersConnector."""

    def __init__(self, **how: object) -> None:
        super().__init__([[PAGE]], SUB_BLOCKS, **how)  # type: ignore[arg-type]
        self.clear()
        self.worker.keep_failed_loads()
        for row in range(ROWS):
            self.region.rows_view[row] = row + 1

    def stream(
        self, rows: list[int], coming: tuple[int, ...], blocks: list[int], first: int = 0, wait_s: float = 1000.0
    ) -> int:
        """Begin to load these blocks from index `first` on of these rows; returns the job."""
        self.jobs += 1
        self.region.words[[rows[place] for place in coming if place < len(rows)]] = WAITING
        self.region.limits[self.jobs] = self.jobs << 32 | len(rows)
        stream = StreamSpec(self.jobs, self.jobs, coming, time.monotonic() + wait_s)
        spec = RowsSpec(np.array(rows, np.int64), (len(rows),), stream=stream)
        spec = pickle.loads(pickle.dumps(spec))
        assert self.worker.submit_load(self.jobs, spec, GPULoadStoreSpec(blocks, [len(blocks)], [first]))
        assert not self.worker.take_invalid_blocks()
        return self.jobs

    def result(self) -> TransferResult:
        results: list[TransferResult] = []
        until(lambda: results.extend(self.worker.get_finished()) or results, "a job ends")
        (result,) = results
        return result

    def holds(self, block: int) -> int:
        (byte,) = set(self.bytes_of(0, block))
        return byte


@pytest.fixture
def rank() -> Iterator[Streaming]:
    rank = Streaming()
    yield rank
    rank.worker.shutdown()


def test_it_ends_like_any_load_once_all_rows_have_come(rank: Streaming) -> None:
    job = rank.stream([3, 1], (0, 1), [5, 6, 7, 8])
    assert rank.worker.get_finished() == []
    rank.region.arrive([1, 3])
    result = rank.result()
    assert (result.job_id, result.success, result.transfer_size) == (job, True, 4 * PAGE)
    assert result.transfer_time > 0
    assert not rank.worker.take_invalid_blocks()
    assert [rank.holds(block) for block in (5, 6, 7, 8, 4, 9)] == [4, 4, 2, 2, 0, 0]


def test_blocks_from_the_gap_on_are_invalid_once(rank: Streaming) -> None:
    rank.stream([3, 1, 4], (1,), [5, 6, 7, 8, 9], first=7)
    until(lambda: rank.holds(8) == 5, "what is there was copied, the last row too")
    rank.region.limits[1] = 1 << 32 | 1
    result = rank.result()
    assert (result.success, result.transfer_size) == (True, 3 * PAGE)
    assert rank.worker.take_invalid_blocks() == {6, 7, 8, 9}
    assert not rank.worker.take_invalid_blocks()
    assert not rank.worker.take_failed_loads()


def test_a_gap_at_the_first_row_leaves_nothing(rank: Streaming) -> None:
    rank.stream([3, 1], (0, 1), [5, 6, 7], first=1)
    rank.region.limits[1] = 1 << 32
    assert rank.result().success
    assert rank.worker.take_invalid_blocks() == {5, 6, 7}


def test_the_deadline_ends_it(rank: Streaming) -> None:
    rank.stream([3, 1], (1,), [5, 6, 7, 8], wait_s=0.0)
    assert rank.result().success
    assert rank.worker.take_invalid_blocks() == {5, 6, 7, 8}


def test_a_flush_does_not_wait_for_storage(rank: Streaming) -> None:
    flushed, other = rank.stream([3, 1], (0, 1), [5, 6, 7, 8]), rank.stream([2], (0,), [1, 2])
    rank.worker.wait({flushed})
    rank.region.words[[3, 1, 2]] = ARRIVED
    assert rank.result().job_id == flushed
    assert rank.worker.take_invalid_blocks() == {5, 6, 7, 8}
    assert rank.result().job_id == other
    assert not rank.worker.take_invalid_blocks()
    assert rank.holds(5) == rank.holds(7) == 0


def test_ordinary_loads_and_stores_pass_it(rank: Streaming) -> None:
    job = rank.stream([3, 1], (0,), [5, 6, 7, 8])
    assert rank.load(rows_of(2, counts=(1,), store_seq=0), GPULoadStoreSpec([1, 2], [2], [0])).success
    assert rank.holds(1) == 3
    assert rank.store(rows_of(4, counts=(1,)), GPULoadStoreSpec([1, 2], [2], [0])).success
    rank.region.arrive([3])
    assert rank.result().job_id == job


def test_loads_that_are_collected_begin_together(rank: Streaming) -> None:
    rank.worker.collect()
    rank.stream([3], (), [5, 6])
    rank.stream([1], (0,), [7, 8])
    assert not rank.holds(5)
    rank.worker.flush()
    rank.region.arrive([1])
    until(lambda: rank.holds(5) == 4 and rank.holds(8) == 2, "both were copied")


def test_a_load_that_is_not_as_it_should_be_fails_and_copies_nothing(rank: Streaming) -> None:
    outside_the_region = rank.stream([ROWS + 3], (), [5, 6])
    too_many_rows = rank.stream([1, 2], (), [5, 6])
    no_such_place = rank.stream([1], (1,), [5, 6])
    results: list[TransferResult] = []
    until(lambda: results.extend(rank.worker.get_finished()) or len(results) == 3, "all end")
    assert rank.worker.take_failed_loads() == {outside_the_region, too_many_rows, no_such_place}
    assert not rank.worker.take_invalid_blocks()
    assert not rank.holds(5)


def test_a_rank_that_cannot_stream_never_publishes_that_it_does(
    rank: Streaming, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.worker.publish_recompute()
    assert rank.region.ranks.all_recompute
    monkeypatch.setattr(streams, "_library", lambda: None)
    other = Streaming()
    other.worker.publish_recompute()
    assert not other.region.ranks.all_recompute
    other.stream([1], (), [5, 6])
    assert other.result().success
    assert other.worker.take_failed_loads() == {1}
    other.worker.shutdown()
