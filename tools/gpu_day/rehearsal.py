"""Without a GPU: the fake CUDA driver of the tests as libcuda.so.1, and a stand-in of torch.cuda over it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from nixl_tiers.swap import kernels
from nixl_tiers.swap.driver import Device, Driver
from tests.swap.fake_gpu import FakeGpu, as_cuda, build
from tools.gpu_day.report import FAKE

CYCLES_PER_S: Final = 2e9
LEGACY: Final = 0  # the stream


def make(folder: Path) -> None:
    """The fake driver in `folder`, for LD_LIBRARY_PATH."""
    library = build(folder)
    if library is None:
        sys.exit("a rehearsal needs a C++ compiler, for the fake driver")
    as_cuda(library, folder, "libcudart.so.13")
    (folder / "libcuda.so.1").unlink()
    as_cuda(library, folder)


def fresh() -> FakeGpu:
    """The fake GPU of this process. Its kernels are the real ones, compiled for a CPU."""
    kernels.images = lambda *_: iter([("the fake driver", lambda: b"image\0")])
    return FakeGpu(Path(os.environ[FAKE]) / "libfakecuda.so")


class Cuda:
    """What sections use of torch.cuda. What a graph captures is done at once; a replay gives the stream one thing to
    do. A kernel of some length is a stream that is held meanwhile."""

    def __init__(self, fake: FakeGpu, driver: Driver, device: Device) -> None:
        self._fake = fake
        self._memory = np.zeros(64, np.uint8)
        self._asleep: list[threading.Timer] = []
        memory = self._memory

        class Event:
            def __init__(self) -> None:
                with device.current():
                    self._event = driver.event()

            def record(self) -> None:
                with device.current():
                    driver._call("cuEventRecord", self._event, LEGACY)

            def query(self) -> bool:
                with device.current():
                    return bool(driver._functions["cuEventQuery"](self._event) == 0)

            def synchronize(self) -> None:
                with device.current():
                    driver.wait(self._event)

        class CUDAGraph:
            def replay(self) -> None:
                fake.write(LEGACY, memory, 1)

        self.Event, self.CUDAGraph = Event, CUDAGraph

    def current_stream(self) -> Any:
        return SimpleNamespace(cuda_stream=LEGACY)

    @contextmanager
    def graph(self, graph: object, capture_error_mode: str) -> Iterator[None]:
        """As a driver does: a registration by a thread of another mode breaks the capture."""
        before = self._fake.calls("a capture broken")
        yield
        if capture_error_mode == "global" and self._fake.calls("a capture broken") > before:
            raise RuntimeError("the capture is broken")

    def synchronize(self) -> None:
        for timer in self._asleep:
            timer.join()
        self._fake.finish()

    def _sleep(self, cycles: int) -> None:
        self._fake.finish()  # what was launched before
        self._fake.hold(LEGACY, held=True)
        timer = threading.Timer(cycles / CYCLES_PER_S, lambda: self._fake.hold(LEGACY, held=False))
        timer.start()
        self._asleep.append(timer)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
