"""The worker's threads, which copy where a copy blocks its caller; `tests/vllm/test_worker.py` has the rest."""

from __future__ import annotations

import gc
import threading

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import GPULoadStoreSpec

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.swap.step import Pairs
from nixl_tiers.vllm.copy_jobs import ThreadedJobs
from nixl_tiers.vllm.worker import NixlTiersWorker, worker_over
from tests.vllm.test_worker import ROWS, Slow, caches_of, rank, rows_of

__all__ = ["rank"]  # a fixture


class Blocking(Slow):
    """A swap in host memory whose copies take their time on the caller's thread."""

    def __init__(self) -> None:
        super().__init__()
        self.began = threading.Event()

    def copy(self, group: int, pairs: Pairs, *, to_host: bool) -> None:
        if to_host:
            self.began.set()
            self.elapsed_s()


def test_neither_submission_nor_a_load_waits_for_a_running_store() -> None:
    region = HostRegion.create(Geometry(1, 512), ROWS)
    blocking = Blocking()
    host = worker_over(region, caches_of([[512]]), 0)
    worker = NixlTiersWorker(region, host._plan, blocking, 0, jobs=ThreadedJobs())
    worker.submit_store(1, GPULoadStoreSpec([0], [1], [0]), rows_of(0, counts=(1,)))
    worker.submit_load(2, rows_of(1, counts=(1,)), GPULoadStoreSpec([1], [1], [0]))
    worker.wait({2})
    assert [result.job_id for result in worker.get_finished()] == [2]
    waiter = threading.Thread(target=worker.wait, args=({1},))
    waiter.start()
    assert waiter.is_alive()
    blocking.go.set()
    waiter.join(120)
    assert not waiter.is_alive()
    assert [result.job_id for result in worker.get_finished()] == [1]
    worker.shutdown()
    host.shutdown()


def test_worker_that_is_collected_while_it_copies_closes_its_region() -> None:
    """The running job has the last reference to it, on the thread that copies."""
    region = HostRegion.create(Geometry(1, 512), ROWS)
    closed = threading.Event()
    region.at_close(closed.set)
    blocking = Blocking()
    host = worker_over(HostRegion.create(Geometry(1, 512), ROWS), caches_of([[512]]), 0)
    worker = NixlTiersWorker(region, host._plan, blocking, 0, jobs=ThreadedJobs())
    worker.submit_store(1, GPULoadStoreSpec([0], [1], [0]), rows_of(0, counts=(1,)))
    assert blocking.began.wait(120)
    del worker
    gc.collect()
    assert not closed.is_set(), "the job copies"
    blocking.go.set()
    assert closed.wait(120)
    host.shutdown()
