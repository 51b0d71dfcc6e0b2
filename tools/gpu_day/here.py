"""What sections are made of: the GPU, or in a rehearsal the fake driver of the tests, and blocks to copy."""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.swap.cuda import CudaSwap
from nixl_tiers.swap.driver import Device, open_driver
from nixl_tiers.swap.plan import CopyPlan, Segment, Share
from tools.gpu_day.report import FAKE, OUT

SUB_BLOCKS: Final = 8  # blocks of a row
WEIGHTS: Final = 8
CALIBRATION: Final = 10**8  # cycles
POISON: Final = 0x77
T = TypeVar("T")


class Skip(Exception):
    """A section cannot run. One sentence."""


class Here:
    """What a section tells, and how long it may take."""

    def __init__(self, descriptor: int, limit_s: float) -> None:
        self._descriptor = descriptor
        self._end_s = time.monotonic() + limit_s - 4  # what was begun has some seconds to end
        self.out = Path(os.environ[OUT])
        self.rehearsed = FAKE in os.environ

    def say(self, kind: str, name: str, value: object) -> None:
        line = memoryview(f"{json.dumps([kind, name, value])}\n".encode())
        while line:
            line = line[os.write(self._descriptor, line) :]

    def tell(self, name: str, value: object) -> None:
        """A figure: it is in the report from now on."""
        rounded = float(f"{value:.4g}") if isinstance(value, float) else value
        print(name, rounded, flush=True)
        self.say("figure", name, rounded)

    def left_out(self, what: str) -> None:
        """In a rehearsal: what did not run, or means nothing."""
        if self.rehearsed:
            self.say("left out", "", what)

    def size(self, real: T, rehearsed: T) -> T:
        return rehearsed if self.rehearsed else real

    def blocks(self, real: tuple[int, int, int], rehearsed: tuple[int, int, int]) -> Blocks:
        """(blocks, bytes of a page, layers)"""
        return Blocks(self.gpu, *self.size(real, rehearsed))

    @property
    def left_s(self) -> float:
        return self._end_s - time.monotonic()

    @cached_property
    def gpu(self) -> Gpu:
        return Gpu(rehearsed=self.rehearsed)


class Gpu:
    """The first GPU. Kernels, streams, events and graphs are torch's; in a rehearsal a stand-in of torch.cuda has the
    last three, and tensors are the CPU's."""

    def __init__(self, *, rehearsed: bool) -> None:
        self._rehearsed = rehearsed
        self._kept: list[Any] = []
        if rehearsed:
            from tools.gpu_day.rehearsal import fresh

            self._fake = fresh()
        self.driver = open_driver()
        self.device = Device(self.driver, 0)

    @cached_property
    def cuda(self) -> Any:
        if self._rehearsed:
            from tools.gpu_day.rehearsal import Cuda

            return Cuda(self._fake, self.driver, self.device)
        import torch

        if not torch.cuda.is_available():
            raise Skip("torch finds no CUDA device")
        return torch.cuda

    def check(self) -> None:
        """In a rehearsal: nothing was done that CUDA forbids."""
        if self._rehearsed:
            self._fake.check()

    def stream(self) -> int:
        return int(self.cuda.current_stream().cuda_stream)

    def small_kernel(self) -> Callable[[], object]:
        """A function that launches one."""
        tensor = self._tensor(1024)
        return lambda: tensor.add_(1)

    def after(self) -> Any:
        """An event behind all that was launched so far: `query()`, `synchronize()`."""
        event = self.cuda.Event()
        event.record()
        return event

    def busy(self, seconds: float) -> Any:
        """One kernel of so many seconds; the event behind it."""
        self.cuda._sleep(max(1, int(seconds / self._s_per_cycle)))
        return self.after()

    @cached_property
    def _s_per_cycle(self) -> float:
        for _ in range(2):  # the first has the GPU's clock rise
            begin_s = time.perf_counter()
            self.cuda._sleep(CALIBRATION)
            event = self.after()
            while not event.query():
                time.sleep(1e-4)
        return (time.perf_counter() - begin_s) / CALIBRATION

    def chain(self, step_s: float) -> Any:
        """A graph like a decode step of about so many seconds: products of 32 rows with matrices no cache holds."""
        width, probe = (8, 2) if self._rehearsed else (4096, 64)
        weights = [self._tensor(width, width) for _ in range(WEIGHTS)]
        rows = self._tensor(32, width)
        self._kept += [*weights, rows]  # a graph knows addresses only

        def layers(count: int) -> None:
            state = rows
            for number in range(count):
                state = (state @ weights[number % WEIGHTS]).tanh()

        layers(WEIGHTS)  # libraries are loaded before a capture
        self.after().synchronize()
        short = self.graph(lambda: layers(probe))
        for _ in range(3):
            short.replay()
        self.after().synchronize()
        begin_s = time.perf_counter()
        for _ in range(10):
            short.replay()
        self.after().synchronize()
        return self.graph(lambda: layers(max(1, round(probe * step_s * 10 / (time.perf_counter() - begin_s)))))

    def graph(self, work: Callable[[], object]) -> Any:
        """What `work` launches, captured in the mode that vLLM captures in."""
        graph = self.cuda.CUDAGraph()
        with self.cuda.graph(graph, capture_error_mode="global"):
            work()
        return graph

    def _tensor(self, *shape: int) -> Any:
        import torch

        on = "cpu" if self._rehearsed else "cuda"
        return torch.randn(shape, dtype=torch.bfloat16, device=on) / shape[0] ** 0.5


class Blocks:
    """KV blocks on the GPU, of `layers` pages each, rows of host memory for as many, and the plan between them.

    ids   the blocks in the order of their places
    """

    def __init__(self, gpu: Gpu, blocks: int, page: int, layers: int, base: int = 0) -> None:
        """`base`: memory of the GPU for them, by default new."""
        self._gpu, self._page = gpu, page
        self.layers, self.count, self.block_bytes = layers, blocks, layers * page
        self.nbytes = blocks * self.block_bytes
        with gpu.device.current() as driver:
            self._base = base or driver.allocate(self.nbytes)
        self.geometry = Geometry(1, self.block_bytes * SUB_BLOCKS, SUB_BLOCKS)
        self.n_rows = -(-blocks // SUB_BLOCKS)
        self._mapping = mmap.mmap(-1, self.n_rows * self.geometry.row_bytes)
        self.rows = np.frombuffer(self._mapping, np.uint8).reshape(self.n_rows, -1)
        stride = blocks * page
        segments = [Segment(self._base + n * stride, page, page, n * page, blocks) for n in range(layers)]
        self.plan = CopyPlan([segments], self.geometry, Share(0), self.rows.ctypes.data, self.n_rows)
        self.ids = np.random.default_rng(0).permutation(blocks)
        self._wanted = np.zeros(0, np.uint8)

    def swap(self, strategy: str) -> CudaSwap:
        return CudaSwap(self.plan, 0, self._gpu.stream, strategies=(strategy,))

    def fill(self) -> None:
        """Random bytes for all blocks."""
        self._wanted = np.random.default_rng().integers(0, 1 << 63, self.nbytes // 8, np.uint64).view(np.uint8)
        with self._gpu.device.current() as driver:
            driver.upload(self._base, self._wanted)

    def poison(self) -> None:
        """Other bytes in all blocks; `right` still expects those of `fill`."""
        with self._gpu.device.current() as driver:
            driver.fill(self._base, POISON, self.nbytes)

    def right(self) -> bool:
        """Whether all blocks hold what `fill` gave them."""
        found = np.empty(self.nbytes, np.uint8)
        with self._gpu.device.current() as driver:
            driver.download(self._base, found)
        return np.array_equal(found, self._wanted)

    def stored(self) -> bool:
        """Whether the rows hold all blocks, each in its place."""
        cells = self.rows[:, : self.geometry.cell_payload].reshape(-1, self.layers, self._page)[: self.count]
        blocks = self._wanted.reshape(self.layers, self.count, self._page)
        return all(np.array_equal(cells[:, layer], blocks[layer, self.ids]) for layer in range(self.layers))

    def round_trip(self, swap: CudaSwap) -> str:
        """All blocks to the rows and back, every byte compared; what was wrong."""
        places = np.arange(self.count)
        self.fill()
        self.rows[:] = POISON
        swap.store(0, self.ids, places).wait()
        if not self.stored():
            return "WRONG BYTES STORED"
        self.poison()
        swap.load(0, self.ids, places).wait()
        return "right" if self.right() else "WRONG BYTES LOADED"
