"""What copy jobs cost a worker's step thread, in us of thread CPU time a step, over the fake GPU of the tests.

    python -m bench.worker_jobs [REPEATS] [--rows 62] [--cold]

A step submits jobs, as NixlTiersConnector does, and a later one takes their results; the copies themselves are made by
the fake driver's threads, and not counted. Steps of one store, of seven stores (of a prefill step), and of one load of
437 rows. `--cold`: before each call the processor's caches are emptied, as a forward pass does (`bench/cold.py`). The
least of all repeats, since a busy machine only adds to that, and the median.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from bench.cold import Cold, warm
from nixl_tiers.base.chunk import Geometry
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.swap import kernels
from nixl_tiers.swap.cuda import CudaSwap
from nixl_tiers.swap.plan import CopyPlan, Segment, Share
from nixl_tiers.vllm.copy_jobs import PolledJobs, RowsSpec
from nixl_tiers.vllm.worker import NixlTiersWorker
from tests.swap.fake_gpu import FakeGpu, build

PAGE: Final = 512  # bytes: the fake GPU copies them one by one
LAYERS: Final = 2
LOADED: Final = 437
STORES: Final = 7


class Bench:
    def __init__(self, folder: Path, rows: int) -> None:
        library = build(folder)
        if library is None:
            raise SystemExit("the fake GPU needs a C++ compiler")
        self._fake = FakeGpu(library, 1)
        kernels.images = lambda *_: iter(())  # type: ignore[assignment]
        self.rows = rows
        blocks = region_rows = max(LOADED, STORES * rows)
        self._caches = [np.ones((blocks, PAGE), np.uint8) for _ in range(LAYERS)]
        for cache in self._caches:
            self._fake.own_bytes(cache.reshape(-1))
        segments = [Segment(each.ctypes.data, PAGE, PAGE, i * PAGE, blocks) for i, each in enumerate(self._caches)]
        geometry = Geometry(1, LAYERS * PAGE)
        self.region = HostRegion.create(geometry, region_rows)
        plan = CopyPlan([segments], geometry, Share(0), self.region.address, region_rows)
        swap = CudaSwap(plan, compute_stream=lambda: 0, driver=self._fake.driver, strategies=("copy_engine",))
        self.worker: Any = NixlTiersWorker(self.region, plan, swap, 0, jobs=PolledJobs())
        self.worker.keep_failed_loads()
        self.worker.collect()
        self._jobs = self._store_seq = 0

    def stores(self, jobs: int) -> tuple[list[Any], list[Any]]:
        made = []
        for number in range(jobs):
            self._store_seq += 1
            rows = range(number * self.rows, (number + 1) * self.rows)
            made.append((RowsSpec(np.array(rows), (self.rows,), self._store_seq), self._engine(rows)))
        return made, []

    def loads(self, _: int) -> tuple[list[Any], list[Any]]:
        return [], [(RowsSpec(np.arange(LOADED), (LOADED,)), self._engine(range(LOADED)))]

    @staticmethod
    def _engine(blocks: range) -> GPULoadStoreSpec:
        return GPULoadStoreSpec(list(blocks), [len(blocks)], [0])

    def step(self, jobs: tuple[list[Any], list[Any]], before: Callable[[], object]) -> list[float]:
        """us of the submission, and of taking the results."""
        stores, loads = jobs
        flush = self.worker.flush
        before()
        began = time.thread_time_ns()
        for rows, engine in stores:
            self._jobs += 1
            self.worker.submit_store(self._jobs, engine, rows)
        flush()
        for rows, engine in loads:
            self._jobs += 1
            self.worker.submit_load(self._jobs, rows, engine)
        flush()
        submitted = time.thread_time_ns()
        self.worker._swap.drain()
        before()
        asked = time.thread_time_ns()
        results = self.worker.get_finished()
        took = [(submitted - began) / 1000, (time.thread_time_ns() - asked) / 1000]
        assert len(results) == len(stores) + len(loads)
        assert all(result.success for result in results)
        for rows, _ in stores:
            assert self.region.written(rows.rows, rows.store_seq).all()
        return took


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("repeats", nargs="?", type=int, default=100)
    parser.add_argument("--rows", type=int, default=62, help="of a store")
    parser.add_argument("--cold", action="store_true", help="empty the processor's caches before each call")
    given = parser.parse_args()
    before = Cold() if given.cold else warm
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), given.rows)
        print(f"us a step, least and median; load {os.getloadavg()[0]:.1f}")
        for name, make, jobs in (
            ("1 store", bench.stores, 1),
            ("7 stores", bench.stores, 7),
            ("1 load", bench.loads, 1),
        ):
            took = [bench.step(make(jobs), before) for _ in range(given.repeats)]
            for part, each in zip(("submitted", "ended"), zip(*took, strict=True), strict=True):
                print(f"{name:8} {part:9} | {min(each):7.0f} | {median(each):7.0f}")
        bench.worker.shutdown()


if __name__ == "__main__":
    main()
