"""The fake CUDA driver of fake_cuda.cpp, from Python."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.swap.driver import Driver
from tests.swap.conftest import ROOT
from tests.swap.scenario import CopyScenario

HERE = Path(__file__).parent
KINDS = ("streams", "events", "registrations", "contexts", "modules", "allocations")


def build(folder: Path) -> Path | None:
    """The fake driver as a library, or None where there is no C++ compiler."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return None
    library = folder / "libfakecuda.so"
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-I{HERE}"]
    subprocess.run([compiler, *flags, "-o", str(library), str(HERE / "fake_cuda.cpp")], check=True, cwd=ROOT)
    return library


def as_cuda(library: Path, folder: Path, runtime: str = "libcudart.so.12") -> Path:
    """`folder`, with the fake driver as libcuda.so.1, and with the calls of NIXL's GDS plugins as `runtime`."""
    (folder / "libcuda.so.1").symlink_to(library)
    # NIXL asks for symbols whose version is the library's own name.
    flags = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{runtime}", "-Wl,--default-symver"]
    compiler = shutil.which("gcc") or shutil.which("clang") or "cc"
    subprocess.run([compiler, *flags, "-o", str(folder / runtime), str(HERE / "fake_cudart.c"), "-ldl"], check=True)
    return folder


def build_submit(folder: Path) -> Path:
    """csrc/swap_submit.c as it is now, whatever is installed. There is a compiler: `build` found one."""
    library = folder / "swap_submit.so"
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O2", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-lpthread"]
    compiler = shutil.which("gcc") or shutil.which("clang") or "cc"
    subprocess.run([compiler, *flags, "-o", str(library), str(ROOT / "csrc" / "swap_submit.c")], check=True)
    return library


class FakeGpu:
    """One machine with one GPU: what a test does to it, and what it has seen."""

    def __init__(self, library: Path, seed: int = 0, version: int = 13000) -> None:
        self._library = ctypes.CDLL(str(library))
        for name in ("fake_live", "fake_fail_running"):
            getattr(self._library, name).restype = ctypes.c_long
        self._library.fake_deepest.restype = ctypes.c_size_t
        self._library.fake_why.restype = ctypes.c_char_p
        self._library.fake_reset(seed, version)
        self._scenarios: list[CopyScenario] = []
        self.driver = Driver(self._library)

    def own(self, scenario: CopyScenario) -> None:
        """Make the engine's memory of a scenario the GPU's."""
        self._scenarios.append(scenario)  # a plan knows addresses only: something must keep the memory alive
        for tensor in scenario.memory:
            self.own_bytes(tensor)

    def own_bytes(self, memory: NDArray[np.uint8]) -> None:
        self._library.fake_device_memory(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes))

    def fail(self, call: str, code: int, after: int = 0) -> None:
        """The call fails once, after it succeeded `after` times more."""
        self._library.fake_fail(call.encode(), after, code)

    def fail_running(self, after: int) -> None:
        """What the GPU does after so much more work fails, and everything from then on."""
        self._library.fake_fail_running(ctypes.c_long(after))

    def leave(self) -> None:
        """The driver leaves, as at the process's end: no call works any more."""
        self._library.fake_leave()

    def calls(self, name: str) -> int:
        return int(self._library.fake_calls(name.encode()))

    def write(self, stream: int, memory: NDArray[np.uint8], value: int) -> None:
        """Give `stream` something to compute: all of `memory` becomes `value`."""
        self._library.fake_write(
            ctypes.c_void_p(stream), ctypes.c_void_p(memory.ctypes.data), value, ctypes.c_size_t(memory.nbytes)
        )

    def read(self, stream: int, memory: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
        """Give `stream` something to compute: `memory` as it is then goes to `out`."""
        size = ctypes.c_size_t(memory.nbytes)
        data = (ctypes.c_void_p(array.ctypes.data) for array in (memory, out))
        self._library.fake_read(ctypes.c_void_p(stream), *data, size)

    def hold(self, stream: int, *, held: bool) -> None:
        """Have `stream` do nothing for as long as it is held, as behind a long kernel."""
        self._library.fake_hold(ctypes.c_void_p(stream), int(held))

    def limit_queues(self, operations: int) -> None:
        """More than so many operations pending on a stream block their caller, as a real driver does at about 1000."""
        self._library.fake_queue_limit(ctypes.c_size_t(operations))

    def deepest_queue(self) -> int:
        """The most operations that were pending on a stream; every copy of a batch counts."""
        return int(self._library.fake_deepest())

    def finish(self) -> None:
        """Let every stream end."""
        self._library.fake_finish()

    def live(self) -> dict[str, int]:
        """What is left of each kind of resource that a program must release."""
        return {kind: int(self._library.fake_live(kind.encode())) for kind in KINDS}

    def check(self) -> None:
        """Nothing was done that CUDA forbids without always noticing, and no context stayed current."""
        assert not self._library.fake_violations(), self._library.fake_why().decode()
        assert self._library.fake_depth() == 0


def leftovers(fake: FakeGpu) -> Iterator[str]:
    """Resources that were not released."""
    return (f"{n} {kind}" for kind, n in fake.live().items() if n)
