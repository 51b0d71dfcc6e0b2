"""Throughput of the file tier, compared with plain threads that move the same bytes: GB/s, medians, interleaved.

    python -m bench.file_tier [--path DIR] [--chunks 65536,262144,2949120] [--megabytes 512] [--rounds 5] [--json FILE]

Both use the same region and O_DIRECT files that are allocated and written before the first measured round.
The tier seals every row that it stores and verifies every row that it loads; the threads do neither. Only the ratios
of one run are comparable: a disk's speed changes from minute to minute.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from nixl_tiers.chunk import Geometry, Outcome
from nixl_tiers.mover.protocol import MAX_MOVES, Load, Store
from nixl_tiers.tiers.base import Move
from tests.mover.harness import MoverProcess, key_of

THREADS = 4


class Tier:
    """Rows through a mover, MAX_MOVES per job, all jobs submitted at once."""

    def __init__(self, mover: MoverProcess) -> None:
        self.mover = mover
        self.rows = mover.region.rows

    def store(self) -> None:
        self._move(Store)

    def load(self) -> None:
        self._move(Load)

    def _move(self, kind: type[Store | Load]) -> None:
        jobs = []
        for start in range(0, self.rows, MAX_MOVES):
            rows = range(start, min(start + MAX_MOVES, self.rows))
            jobs.append(self.mover.begin(kind, [Move(row, row, key_of(row), seal=kind is Store) for row in rows]))
        for job in jobs:
            outcomes = self.mover.finished(job)
            if set(outcomes) != {Outcome.OK}:  # a fast failure must not look like a fast disk
                raise SystemExit(f"{kind.__name__} failed: {outcomes}\n")


class Threads:
    """The same rows with pwritev and preadv on a few threads, one call per row."""

    def __init__(self, mover: MoverProcess, path: Path) -> None:
        self.rows = mover.region.rows_view
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        ctypes.CDLL(None).fallocate(self.descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(self.rows.nbytes))
        self.pool = ThreadPoolExecutor(THREADS)

    def store(self) -> None:
        self._each(os.pwritev)

    def load(self) -> None:
        self._each(os.preadv)

    def _each(self, call: Callable[..., int]) -> None:
        size = self.rows.shape[1]

        def some(first: int) -> None:
            for row in range(first, len(self.rows), THREADS):
                if call(self.descriptor, [self.rows[row]], row * size) != size:
                    raise SystemExit("a short transfer")

        list(self.pool.map(some, range(THREADS)))


def seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(path: Path, chunk_bytes: int, total_bytes: int, rounds: int) -> dict[str, float]:
    geometry = Geometry(1, chunk_bytes)
    rows = max(4, total_bytes // geometry.row_bytes)
    tier = {"type": "file", "path": str(path / "tier"), "capacity": 2 * rows * geometry.row_bytes + (64 << 20)}
    with MoverProcess(tier, geometry, rows) as mover:
        mover.region.prefault().wait()
        rng = np.random.default_rng(0)
        for row in mover.region.rows_view:
            row[:] = rng.integers(0, 256, 4096, np.uint8).repeat(-(-len(row) // 4096))[: len(row)]
        mover.open()
        sides: dict[str, Tier | Threads] = {"tier": Tier(mover), "threads": Threads(mover, path / "plain")}
        taken: dict[str, list[float]] = {}
        for number in range(rounds + 1):
            for what in ("store", "load"):
                # In turns: the second one finds the disk's cache as the first has left it.
                for name in sorted(sides, reverse=bool(number % 2)):
                    duration = seconds(getattr(sides[name], what))
                    if number:
                        taken.setdefault(f"{name}_{what}", []).append(duration)
        mover.stop()
    (path / "plain").unlink()
    return {name: rows * geometry.row_bytes / 1e9 / statistics.median(times) for name, times in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, help="a directory on the disk to measure (default: a temporary one)")
    parser.add_argument("--chunks", default="65536,262144,2949120", help="bytes, comma-separated")
    parser.add_argument("--megabytes", type=int, default=512, help="moved in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = {}
    side = f"{'threads':>7}  {'ratio':>5}"
    print(f"{'chunk':>10}  {'store: tier':>11}  {side}  {'load: tier':>10}  {side}")
    for chunk in map(int, arguments.chunks.split(",")):
        with tempfile.TemporaryDirectory(dir=arguments.path) as folder:
            found = measure(Path(folder), chunk, arguments.megabytes << 20, arguments.rounds)
        results[chunk] = found
        store, load = (found[f"tier_{what}"] / found[f"threads_{what}"] for what in ("store", "load"))
        print(
            f"{chunk:>10}  {found['tier_store']:>11.2f}  {found['threads_store']:>7.2f}  {store:>5.2f}"
            f"  {found['tier_load']:>10.2f}  {found['threads_load']:>7.2f}  {load:>5.2f}",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
