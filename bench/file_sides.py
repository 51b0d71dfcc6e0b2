"""Ways to move rows between a host region and files: the file tier, and what else there is. All use O_DIRECT.

Slabs overwrite their slots, as they do once they are full. All others have a new file for each row and round (vLLM and
the file tier leave out rows whose file is there), in directories that are removed at the end.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.pages import Unavailable
from bench.rounds import Direction, Side, Took
from nixl_tiers.base.chunk import Outcome
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover.protocol import Load, Store
from nixl_tiers.tiers.base import Move
from tests.mover.harness import MoverProcess, key_of
from tests.support.file_tier import LAYOUTS

THREADS: Final = 4
TRIES: Final = 2
JOB_ROWS: Final = 256
MANY_ROUNDS: Final = 4096  # of a directory of row files, which is counted anew after a 64th


class FileTier(Side):
    """Rows through a mover, JOB_ROWS per job, all jobs submitted at once; every row is sealed and verified."""

    def __init__(
        self, folder: Path, region: HostRegion, layout: str, movers: int = 1, *, direct: bool = False, **fields: str
    ) -> None:
        """`movers`: of the tier, which share the cores; `direct`: no row is staged; `fields`: more of its
        configuration."""
        self.region = region
        decided = {"type": "tests.mover.stub_tiers:DecidedConfig", "staged": False} if direct else {}
        self._names_change, self._round = layout == "files", 0
        held = MANY_ROUNDS if self._names_change else 2
        tier = LAYOUTS[layout](folder / "tier", held * region.nbytes + (64 << 20), **fields, **decided)
        self._mover = MoverProcess(tier, region.geometry, region.rows, region, movers=movers)
        self.pids = [self._mover.process.pid]
        self._mover.open()
        self._mover.listed_rows()

    def store(self) -> None:
        self.wait(self.begin(Store))

    def load(self) -> None:
        self.wait(self.begin(Load))

    def close(self) -> None:
        with self._mover:
            self._mover.stop()

    def begin(self, kind: type[Store | Load]) -> list[int]:
        """Submit all rows; returns the jobs."""
        jobs = []
        self._round += kind is Store and self._names_change
        first = self._round * self.region.rows
        for start in range(0, self.region.rows, JOB_ROWS):
            rows = range(start, min(start + JOB_ROWS, self.region.rows))
            moves = [Move(row, row, key_of(first + row), seal=kind is Store) for row in rows]
            jobs.append(self._mover.begin(kind, moves))
        return jobs

    def wait(self, jobs: list[int]) -> None:
        for job in jobs:
            outcomes = self._mover.finished(job)
            if set(outcomes) != {Outcome.OK}:  # a fast failure must not look like a fast disk
                raise SystemExit(f"rows failed: {outcomes}")


class Threads(Side):
    """One file, written and read with one call a row on a few threads."""

    def __init__(self, folder: Path, region: HostRegion, payload_bytes: int) -> None:
        self._rows = [row[:payload_bytes] for row in region.rows_view]
        self._fd = _allocated(folder / "rows", region.rows * payload_bytes)
        self._pool = ThreadPoolExecutor(THREADS)

    def store(self) -> None:
        self._each(os.pwritev)

    def load(self) -> None:
        self._each(os.preadv)

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._fd)

    def _each(self, call: Callable[..., int]) -> None:
        def some(first: int) -> None:
            for number in range(first, len(self._rows), THREADS):
                row = self._rows[number]
                if call(self._fd, [row], number * len(row)) != len(row):
                    raise SystemExit("a short transfer")

        list(self._pool.map(some, range(THREADS)))


class Vllm(Side):
    """vLLM's functions for its fs tier, on its own thread pool, with its names of files and directories.

    `jobs`: how many tasks the rows are split in. vLLM makes one of what a request needs, which one thread moves.
    """

    def __init__(self, folder: Path, region: HostRegion, payload_bytes: int, jobs: int) -> None:
        """Raises Unavailable."""
        try:
            from vllm.v1.kv_offload.tiering.fs import io, thread_pool
        except ImportError as error:
            raise Unavailable(f"vLLM's fs tier cannot be imported: {error}") from error
        if not io._HAS_FSIO_C:
            raise Unavailable("this vLLM was built without its C functions for files")
        self._io = io
        self._pool = thread_pool.DualQueueThreadPool(16, 16)  # its default
        self._folder = folder
        self._view = memoryview(region.rows_view)
        self._payload_bytes = payload_bytes
        self._row_bytes = region.geometry.row_bytes
        self._parts = [part.tolist() for part in np.array_split(np.arange(region.rows), jobs)]
        self._round = 0

    def store(self) -> None:
        self._round += 1
        self._run(self._io.batch_store_block, self._pool.enqueue_store)

    def load(self) -> None:
        self._run(self._io.batch_load_block, self._pool.enqueue_load)

    def close(self) -> None:
        self._pool.shutdown()
        shutil.rmtree(self._folder)

    def _run(self, call: Callable[..., None], enqueue: Callable[..., None]) -> None:
        def task(rows: list[int]) -> Callable[[], None]:
            offsets = [row * self._row_bytes for row in rows]
            return lambda: call([self._file(row) for row in rows], self._view, offsets, self._payload_bytes, True)

        enqueue(self._round, len(self._parts), [task(part) for part in self._parts])
        self._pool.wait_idle()
        ((_, ok, _),) = self._pool.get_finished()
        if not ok:
            raise SystemExit("vLLM's functions failed; its log line says why")

    def _file(self, row: int) -> str:
        digest = hashlib.sha256(b"%d %d" % (self._round, row)).hexdigest()
        return f"{self._folder}/model_r0/{digest[:3]}/{digest[3:5]}_g0/{digest}.bin"


class FileEach(Side):
    """vLLM's way where vLLM is not installed: a file a row on 16 threads, one call each, written beside its name and
    renamed. Of Python, which at rows of 64 KiB costs more than vLLM's C functions."""

    def __init__(self, folder: Path, region: HostRegion, payload_bytes: int, threads: int) -> None:
        self._folder = folder
        self._rows = [row[:payload_bytes] for row in region.rows_view]
        self._pool = ThreadPoolExecutor(threads)
        self._threads = threads
        self._round = 0

    def store(self) -> None:
        self._round += 1
        self._each(self._store_one)

    def load(self) -> None:
        self._each(self._load_one)

    def close(self) -> None:
        self._pool.shutdown()
        shutil.rmtree(self._folder)

    def _each(self, call: Callable[[Path, NDArray[np.uint8]], None]) -> None:
        folder = self._folder / str(self._round)
        folder.mkdir(exist_ok=True)

        def some(first: int) -> None:
            for number in range(first, len(self._rows), self._threads):
                call(folder / str(number), self._rows[number])

        list(self._pool.map(some, range(self._threads)))

    def _store_one(self, file: Path, row: NDArray[np.uint8]) -> None:
        beside = f"{file}.tmp"
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
        self._whole(os.pwritev(fd, [row], 0), row)
        os.close(fd)
        Path(beside).rename(file)

    def _load_one(self, file: Path, row: NDArray[np.uint8]) -> None:
        fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
        self._whole(os.preadv(fd, [row], 0), row)
        os.close(fd)

    def _whole(self, moved: int, row: NDArray[np.uint8]) -> None:
        if moved != len(row):
            raise SystemExit("a short transfer")


class FioWay(NamedTuple):
    engine: Literal["libaio", "io_uring"]
    depth: int

    def __str__(self) -> str:
        return f"{self.engine}, depth {self.depth}"


class Fio(Side):
    """fio with requests of one row, one after the other in one file, from private memory with huge pages where the
    kernel allows madvise: as fast as this disk gets. Its first store and load try several ways, and the best stays.

    One job each: fio gives the time of the longest job, each from its own start. 16 jobs, which start one after the
    other, seemed to write 256 MB in 100 ms where the disk was busy for 160 (/proc/diskstats).
    """

    WAYS: Final = (FioWay("libaio", 16), FioWay("libaio", 4), FioWay("io_uring", 16))

    def __init__(self, folder: Path, rows: int, payload_bytes: int) -> None:
        """Raises Unavailable."""
        self._program = shutil.which("fio")
        if self._program is None:
            raise Unavailable("fio is not installed")
        self._file = folder / "fio"
        self._rows, self._payload_bytes = rows, payload_bytes
        os.close(_allocated(self._file, rows * payload_bytes))
        self.ways: dict[Direction, FioWay] = {}

    def store(self) -> Took:
        return self._move("store")

    def load(self) -> Took:
        return self._move("load")

    def _move(self, what: Direction) -> Took:
        if what not in self.ways:
            tried = [(took, way) for _ in range(TRIES) for way in self.WAYS if (took := self._run(what, way))]
            if not tried:
                raise SystemExit("fio can use none of its engines here")
            self.ways[what] = min(tried)[1]
        took = self._run(what, self.ways[what])
        if took is None:
            raise SystemExit("fio failed")
        return took

    def _run(self, what: Direction, way: FioWay) -> Took | None:
        """As fio says, without its start; None if it failed."""
        assert self._program is not None
        kind = "write" if what == "store" else "read"
        command = [
            self._program, "--name=rows", f"--filename={self._file}", f"--rw={kind}", f"--bs={self._payload_bytes}",
            f"--size={self._rows * self._payload_bytes}", f"--iodepth={way.depth}", f"--ioengine={way.engine}",
            "--direct=1", "--overwrite=1", "--thread", "--output-format=json",
        ]  # fmt: skip
        environment = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  # glibc 2.35: malloc calls madvise
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            return None
        (job,) = json.loads(done.stdout)["jobs"]
        found = job[kind]
        assert found["io_bytes"] == self._rows * self._payload_bytes, "fio moved something else"
        cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3
        return Took(max(float(found["runtime"]), 1.0) / 1e3, cpu_s)


def _allocated(path: Path, nbytes: int) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    os.posix_fallocate(fd, 0, nbytes)
    return fd
