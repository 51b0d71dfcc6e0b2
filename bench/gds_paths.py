"""Two ways from a file to a GPU's memory, each in a process of its own: started by `bench.gds`, which see.

    host      the file tier's mover (POSIX) to rows of the page-locked host region, verified; then the scatter to blocks
    direct    NIXL's GDS_MT plugin to a ring of slots in GPU memory, neither verified nor scattered

A load is of `depth` rows, chosen at random, all outstanding at once; it ends when all of its bytes are there. Before
anything is timed, the bytes of one load are compared with what was stored, behind poisoned memory.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from bench.engine_process import answer_requests, claim_stdout
from nixl_tiers.base.chunk import Geometry, Outcome, align
from nixl_tiers.mover.protocol import Load, Store
from nixl_tiers.swap.cuda import CudaSwap
from nixl_tiers.swap.driver import CudaError, Device, NoDriver, open_driver
from nixl_tiers.swap.plan import CopyPlan, Segment, Share
from nixl_tiers.tiers.base import Move
from nixl_tiers.tiers.nixl_agent import Agent, AgentError, Registration
from tests.mover.harness import MoverProcess, key_of, payload

LAYERS: Final = 16
SUB_BLOCKS: Final = 8  # blocks of vLLM in a row
GPU_PAGE: Final = 64 << 10  # GPU memory is pinned for other devices in pages of this size
POLL_S: Final = 1e-4
MIN_LOADS: Final = 5


class Unavailable(Exception):
    """One sentence."""


@dataclass(frozen=True)
class Setup:
    """`payload_bytes` of a row, without its seal; `depth`: the most rows of one load; `gpu`: -1 without one."""

    directory: str
    payload_bytes: int
    rows: int
    depth: int
    gpu: int

    @property
    def geometry(self) -> Geometry:
        return Geometry(1, self.payload_bytes, SUB_BLOCKS)


class HostPath:
    def __init__(self, setup: Setup, stack: ExitStack) -> None:
        self.geometry = setup.geometry
        capacity = 2 * setup.rows * self.geometry.row_bytes + (64 << 20)
        tier = {"type": "file", "path": setup.directory, "capacity": capacity, "backend": "posix", "min_free": 0}
        self._mover = stack.enter_context(MoverProcess(tier, self.geometry, setup.depth))
        self._mover.region.prefault().wait()
        if self._mover.open() < setup.rows:
            raise Unavailable("the tier offers too few slots")
        self._mover.listed_rows()
        for first in range(0, setup.rows, setup.depth):
            self._store(range(first, min(first + setup.depth, setup.rows)))
        self._gpu = Blocks(setup, self._mover, stack) if setup.gpu >= 0 else None
        row = "page-locked row" if self._gpu and self._gpu.pinned else "row of host memory"
        self.label = f"POSIX -> {row} -> GPU blocks" if self._gpu else f"POSIX -> {row}, no GPU"

    def load(self, rows: NDArray[np.int64]) -> None:
        self._run(Load, [Move(place, int(row), key_of(int(row))) for place, row in enumerate(rows)])
        if self._gpu:
            self._gpu.load(len(rows))

    def poison(self) -> None:
        self._mover.region.rows_view[:] = 0xEE
        if self._gpu:
            self._gpu.poison()

    def holds(self, place: int, row: int) -> bool:
        wanted = payload(row, self.geometry)[: self.geometry.cell_payload]
        found = self._mover.region.rows_view[place][: self.geometry.cell_payload]
        return np.array_equal(found, wanted) and (self._gpu is None or self._gpu.holds(place, wanted))

    def cpu_s(self) -> float:
        words = Path(f"/proc/{self._mover.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK") + own_cpu_s()

    def _store(self, rows: range) -> None:
        for place, row in enumerate(rows):
            self._mover.region.rows_view[place] = payload(row, self.geometry)
        self._run(Store, [Move(place, row, key_of(row), seal=True) for place, row in enumerate(rows)])

    def _run(self, kind: type[Store | Load], moves: list[Move]) -> None:
        outcomes = set(self._mover.finished(self._mover.begin(kind, moves)))
        if outcomes != {Outcome.OK}:  # a fast failure must not look like a fast disk
            raise SystemExit(f"{kind.__name__} failed: {outcomes}")


class Blocks:
    """Blocks of one KV group on the GPU, one page a layer, into which rows are scattered."""

    def __init__(self, setup: Setup, mover: MoverProcess, stack: ExitStack) -> None:
        self._driver = open_driver()
        self._device = Device(self._driver, setup.gpu)
        stack.callback(self._device.close)
        self._count = setup.depth * SUB_BLOCKS
        self._page = setup.payload_bytes // LAYERS // SUB_BLOCKS
        self._stride = self._count * self._page
        with self._device.current():
            self._base = self._driver.allocate(LAYERS * self._stride)
        segments = [
            Segment(self._base + layer * self._stride, self._page, self._page, layer * self._page, self._count)
            for layer in range(LAYERS)
        ]
        plan = CopyPlan([segments], setup.geometry, Share(0), mover.region.address, setup.depth)
        self._swap = CudaSwap(plan, setup.gpu, lambda: 0, driver=self._driver)
        stack.callback(self._swap.close)
        self.pinned = self._swap.pinned
        self._ids = np.random.default_rng(1).permutation(self._count)

    def load(self, rows: int) -> None:
        count = rows * SUB_BLOCKS
        self._swap.load(0, self._ids[:count], np.arange(count)).wait()

    def poison(self) -> None:
        with self._device.current() as driver:
            driver.fill(self._base, 0x77, LAYERS * self._stride)

    def holds(self, place: int, wanted: NDArray[np.uint8]) -> bool:
        parts = wanted.reshape(SUB_BLOCKS, LAYERS, self._page)
        page = np.empty(self._page, np.uint8)
        for sub_block, layer in np.ndindex(SUB_BLOCKS, LAYERS):
            block = int(self._ids[place * SUB_BLOCKS + sub_block])
            with self._device.current() as driver:
                driver.download(self._base + layer * self._stride + block * self._page, page)
            if not np.array_equal(page, parts[sub_block, layer]):
                return False
        return True


class DirectPath:
    """Each slot of the ring is registered by itself, since the plugin passes an address inside a registration to cuFile
    as if it were the beginning of one (nixl#2032)."""

    label = "GDS_MT -> GPU memory"

    def __init__(self, setup: Setup, stack: ExitStack) -> None:
        if setup.gpu < 0:
            raise Unavailable("there is no GPU")
        self.geometry, self._gpu = setup.geometry, setup.gpu
        self._driver = open_driver()
        device = Device(self._driver, setup.gpu)
        stack.enter_context(device.current())  # for good: cuFile registers memory of the current context
        size = self.geometry.row_bytes
        stride = align(size, GPU_PAGE)
        base = self._driver.allocate((setup.depth + 1) * stride)
        self._slots = [align(base, GPU_PAGE) + slot * stride for slot in range(setup.depth)]
        file = Path(setup.directory) / "rows"
        with file.open("wb") as out:
            for row in range(setup.rows):
                out.write(payload(row, self.geometry))
            out.flush()
            os.fsync(out.fileno())
            os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self._agent = Agent.gds_mt()
        self._memory = [
            Registration(self._agent._register([(slot, size, setup.gpu, "")], "VRAM"), (setup.gpu,))
            for slot in self._slots
        ]
        self._file = self._agent.register_file(str(file), setup.rows * size, direct=True)

    def load(self, rows: NDArray[np.int64]) -> None:
        size, api = self.geometry.row_bytes, self._agent._api
        local = np.array([[slot, size, self._gpu] for slot in self._slots[: len(rows)]], np.uint64)
        remote = np.array([[int(row) * size, size, self._file.devices[0]] for row in rows], np.uint64)
        handle = api.initialize_xfer(
            "READ", api.get_xfer_descs(local, "VRAM"), api.get_xfer_descs(remote, "FILE"), "mover", backends=["GDS_MT"]
        )
        state = api.transfer(handle)
        while state == "PROC":
            time.sleep(POLL_S)
            state = api.check_xfer_state(handle)
        handle.release()
        if state != "DONE":
            raise SystemExit(f"a transfer of GDS_MT ended as {state}")

    def poison(self) -> None:
        for slot in self._slots:
            self._driver.fill(slot, 0x77, self.geometry.row_bytes)

    def holds(self, place: int, row: int) -> bool:
        found = np.empty(self.geometry.row_bytes, np.uint8)
        self._driver.download(self._slots[place], found)
        return np.array_equal(found, payload(row, self.geometry))

    def cpu_s(self) -> float:
        return own_cpu_s()


PATHS: Final = {"host": HostPath, "direct": DirectPath}


def own_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def check(path: HostPath | DirectPath, setup: Setup) -> None:
    """SystemExit where a load delivers other bytes than were stored."""
    rows = np.random.default_rng(2).permutation(setup.rows)[: min(4, setup.depth)]
    path.poison()
    path.load(rows)
    for place, row in enumerate(rows):
        if not path.holds(place, int(row)):
            raise SystemExit(f"wrong bytes: {path.label}, row {row}")


def measure(path: HostPath | DirectPath, rows: int, depth: int, seconds: float) -> dict[str, float]:
    rng = np.random.default_rng(depth)
    times: list[float] = []
    cpu, begin = path.cpu_s(), time.perf_counter()
    while time.perf_counter() - begin < seconds or len(times) < MIN_LOADS:
        chosen = rng.permutation(rows)[:depth]
        start = time.perf_counter()
        path.load(chosen)
        times.append(time.perf_counter() - start)
    gigabytes = len(times) * depth * path.geometry.cell_payload / 1e9
    p50, p99 = np.percentile(times, (50, 99)) * 1e3
    return {
        "gb_per_s": gigabytes / sum(times),
        "cpu_s_per_gb": (path.cpu_s() - cpu) / gigabytes,
        "p50_ms": float(p50),
        "p99_ms": float(p99),
        "loads": len(times),
    }


def main() -> None:
    """Arguments: host or direct, and a Setup as JSON. A request is [depth, seconds]."""
    answers = claim_stdout()
    setup = Setup(**json.loads(sys.argv[2]))
    with ExitStack() as stack:
        try:
            path = PATHS[sys.argv[1]](setup, stack)
        except (Unavailable, AgentError, NoDriver, CudaError) as error:
            print(json.dumps({"unavailable": str(error)}), file=answers, flush=True)
            return
        check(path, setup)
        ready = {"label": path.label}
        answer_requests(answers, ready, lambda request: measure(path, setup.rows, request[0], request[1]))
        answers.flush()
        if isinstance(path, DirectPath):
            os._exit(0)  # destructors of cuFile and its threads have crashed


if __name__ == "__main__":
    main()
