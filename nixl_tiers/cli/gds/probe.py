"""The child that calls libcuda and libcufile: `python -m nixl_tiers.cli.gds.probe STEP ...`.

    gpus                          GPUs of the CUDA driver
    library PATH ...              the first libcufile that can be loaded, and its version
    driver LIBRARY GPU            opens cuFile's driver (GPU: ordinal, or -1 for none)
    io LIBRARY GPU KIND FILE      writes, reads and verifies FILE with memory of a KIND
    plugin                        opens NIXL's GDS_MT plugin, which opens cuFile's driver too

A step may hang, crash or abort in these libraries, and the parent kills it after a deadline (cli/children.py).
"""

from __future__ import annotations

import ctypes
import os
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from nixl_tiers.cli.children import ProbeFailed, run_step, say
from nixl_tiers.cli.gds.libcuda import MAX_IO_BYTES, Cuda, GpuMemory, MappedGpuMemory, Memory
from nixl_tiers.cli.gds.libcufile import CuFile, version_of

MIN_IO_BYTES: Final = 4 << 10
FILE_BYTES: Final = 2 * MAX_IO_BYTES
SIZES: Final = tuple(MIN_IO_BYTES << i for i in range((MAX_IO_BYTES // MIN_IO_BYTES).bit_length()))


def find_gpus() -> None:
    cuda = Cuda()
    say(cuda=cuda.number("cuDriverGetVersion"))
    for ordinal in range(cuda.number("cuDeviceGetCount")):
        say(gpu=ordinal, **cuda.describe(ordinal))


def load_library(paths: Sequence[str]) -> None:
    reasons = []
    for path in paths:
        say(at=f"loading {path}")
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            reasons.append(str(error))
            continue
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        mapped = next((line.split(maxsplit=5)[-1] for line in maps if "libcufile" in line), path)
        say(library=mapped, by_loader="/" not in path, version=version_of(library))
        return
    raise ProbeFailed(reasons[0] if reasons else "there is none")


def open_driver(library: str, gpu: int) -> None:
    if gpu >= 0:
        Cuda().enter(gpu)
    cufile = CuFile(library)
    say(driver=cufile.properties())
    if gpu >= 0 and (size := cufile.bar1_bytes(gpu)) is not None:
        say(bar1_bytes=size)
    cufile.close()


def open_plugin() -> None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        say(nixl=version("nixl"))
    except PackageNotFoundError as error:
        raise ProbeFailed("NIXL is not installed") from error
    from nixl_tiers.tiers.nixl_agent import Agent, AgentError

    say(at="opening the plugin GDS_MT")
    try:
        Agent.gds_mt()
    except AgentError as error:
        raise ProbeFailed(str(error)) from error
    say(plugin="GDS_MT")


# --- write, read, verify ------------------------------------------------------------------------------------------


def verify(library: str, gpu: int, kind: str, file: str) -> None:
    """Every size written from memory and compared in the file, then read into poisoned memory and compared there."""
    cuda = Cuda() if gpu >= 0 else None
    if cuda:
        cuda.enter(gpu)
    say(at=f"allocating memory ({kind})")
    on_gpu = cuda is not None and kind != "host"
    if cuda is None or kind == "host":
        memory = Memory()
    else:
        memory = (MappedGpuMemory if kind == "cuMemCreate" else GpuMemory)(cuda, gpu)
    cufile = CuFile(library)
    uuid = cuda.uuid(gpu) if cuda and on_gpu else None
    with _opened(file) as descriptor, _registered(cufile, memory, descriptor) as handle:
        before = _counters(cufile, uuid)
        for size in SIZES:
            _verify_size(cufile, memory, descriptor, handle, size)
        say(transfers=len(SIZES), before=before, after=_counters(cufile, uuid))
    cufile.close()


def _verify_size(cufile: CuFile, memory: Memory, descriptor: int, handle: int, size: int) -> None:
    data = random.Random(size).randbytes(size)
    memory.put(data)
    cufile.transfer("cuFileWrite", handle, memory.address, size, size)
    reader = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
    try:
        os.posix_fadvise(reader, 0, 0, os.POSIX_FADV_DONTNEED)
        if os.pread(reader, size, size) != data:
            raise ProbeFailed(f"wrong bytes in the file after a write of {size} bytes")
    finally:
        os.close(reader)
    memory.put(b"\xee" * size)
    cufile.transfer("cuFileRead", handle, memory.address, size, size)
    if memory.get(size) != data:
        raise ProbeFailed(f"wrong bytes in memory after a read of {size} bytes")
    say(size=size)


@contextmanager
def _opened(file: str) -> Iterator[int]:
    try:
        descriptor, direct = os.open(file, os.O_RDWR | os.O_DIRECT), True
    except OSError:
        descriptor, direct = os.open(file, os.O_RDWR), False
    say(direct=direct)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _registered(cufile: CuFile, memory: Memory, descriptor: int) -> Iterator[int]:
    """The file, which must be registered, and the memory, which need not be: cuFile then copies through its own.

    After a failure nothing is deregistered: the process ends, which releases all of it, and a call might not return.
    """
    handle = cufile.register_file(descriptor)
    try:
        cufile.register_memory(memory.address, MAX_IO_BYTES)
    except ProbeFailed as error:
        say(registered=False, why=str(error))
        yield handle
    else:
        say(registered=True)
        yield handle
        cufile.deregister_memory(memory.address)
    cufile.deregister_file(handle)


def _counters(cufile: CuFile, uuid: bytes | None) -> dict[str, Any]:
    """cuFile's own of the GPU in this process, and nvidia-fs's of the machine; None where there are none."""
    return {"cufile": cufile.counters(uuid) if uuid else None, "nvidia_fs": nvidia_fs(Path("/"))}


def nvidia_fs(root: Path) -> dict[str, int | None] | None:
    """Reads and writes of the whole machine that have succeeded since the module nvidia-fs was loaded. None where it is
    not loaded; without counts where it keeps none (`rw_stats_enabled=0`, its default)."""
    try:
        stats = (root / "proc/driver/nvidia-fs/stats").read_text(errors="replace")
    except OSError:
        return None
    found = {kind: re.search(rf"^{kind}\s*:\s*n=\d+\s+ok=(\d+)", stats, re.MULTILINE) for kind in ("Reads", "Writes")}
    return {kind.lower(): int(match[1]) if match else None for kind, match in found.items()}


STEPS: Final[dict[str, Callable[[list[str]], None]]] = {
    "gpus": lambda _: find_gpus(),
    "library": load_library,
    "driver": lambda given: open_driver(given[0], int(given[1])),
    "io": lambda given: verify(given[0], int(given[1]), given[2], given[3]),
    "plugin": lambda _: open_plugin(),
}


if __name__ == "__main__":
    run_step(STEPS, sys.argv[1:])
