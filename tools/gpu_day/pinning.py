"""How long page-locking takes: by piece, by page size, and by two processes at once that share a region.

As a program it is the second process: `python -m tools.gpu_day.pinning DESCRIPTOR NBYTES PIECE_BYTES`.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from nixl_tiers.memory.cgroup import rooms
from nixl_tiers.memory.memfd import memfd
from nixl_tiers.memory.pages import populate_part, transparent_setting
from nixl_tiers.swap.driver import CudaError, Device, open_driver
from tools.gpu_day.here import Here
from tools.gpu_day.report import ROOT

GIB = 1 << 30
GIVES_HUGE = ("advise", "always", "within_size", "force")


def run(here: Here) -> None:
    device = here.gpu.device
    free_bytes = min(room.free_bytes for room in rooms())
    total = here.size(min(32 * GIB, max(GIB, free_bytes // 2 // GIB * GIB)), 8 << 20)
    small, large = here.size((GIB, 16 * GIB), (1 << 20, 4 << 20))
    here.tell("gib", total / GIB)
    here.left_out("times, page sizes: 8 MiB in pieces of 1 and 4, which the fake driver only notes")
    setting = transparent_setting()
    for kind, advice in (("4_kib", mmap.MADV_NOHUGEPAGE), ("huge", mmap.MADV_HUGEPAGE)):
        shared = kind == "4_kib" or setting in GIVES_HUGE
        file = memfd("gpu-day") if shared else -1
        if shared:
            os.ftruncate(file, total)
        memory = mmap.mmap(file, total, mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(advice)
        address, begin_s = np.frombuffer(memory, np.uint8).ctypes.data, time.perf_counter()
        _touch(address, total)
        here.tell(f"{kind}_touched_s", time.perf_counter() - begin_s)
        here.tell(f"{kind}_memory", f"{'a memfd' if shared else 'private'}, {_huge_bytes() / GIB:.1f} GiB huge")
        for piece in (small, large, total):
            if here.left_s < here.size(12, 1):
                here.tell(f"{kind}_by_{piece >> 20}_mib", "no time was left")
                continue
            here.tell(f"{kind}_by_{piece >> 20}_mib", _pin(device, address, total, piece))
            if kind == "4_kib" and piece == small:
                here.tell("two_processes", _two(device, file, address, total, piece))
        if shared:
            os.close(file)
        memory.close()


def _pin(device: Device, address: int, nbytes: int, piece: int) -> dict[str, float | str]:
    """Seconds to lock and to unlock it all; or the driver's error."""
    done: list[int] = []
    found: dict[str, float | str] = {}
    with device.current() as driver:
        begin_s = time.perf_counter()
        try:
            for at in range(0, nbytes, piece):
                driver.register(address + at, min(piece, nbytes - at))
                done.append(address + at)
            found["s_per_gib"] = round((time.perf_counter() - begin_s) / nbytes * GIB, 4)
        except CudaError as error:
            found["failed"] = f"{error}, behind {len(done)} pieces"
        begin_s = time.perf_counter()
        for one in done:
            driver.unregister(one)
        found["unlock_s_per_gib"] = round((time.perf_counter() - begin_s) / nbytes * GIB, 4)
    return found


def _two(device: Device, file: int, address: int, nbytes: int, piece: int) -> dict[str, object]:
    """Both begin when both have all pages mapped."""
    command = [sys.executable, "-m", "tools.gpu_day.pinning", str(file), str(nbytes), str(piece)]
    with subprocess.Popen(
        command, cwd=ROOT, pass_fds=[file], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin
        assert other.stdout
        other.stdout.readline()
        print("begin", file=other.stdin, flush=True)
        ours = _pin(device, address, nbytes, piece)
        theirs = other.stdout.readline()
        return {"first": ours, "second": json.loads(theirs) if theirs else "it has ended early"}


def _touch(address: int, nbytes: int) -> None:
    part = 64 << 20
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        sizes = (min(part, nbytes - at) for at in range(0, nbytes, part))
        errors = set(threads.map(populate_part, range(address, address + nbytes, part), sizes)) - {0}
    if errors:
        raise OSError(errors.pop(), "memory cannot be allocated")


def _huge_bytes() -> int:
    """Of this process, in either kind of memory."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("ShmemPmdMapped:", "AnonHugePages:")))


def main() -> None:
    file, nbytes, piece = map(int, sys.argv[1:])
    memory = mmap.mmap(file, nbytes)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    _touch(address, nbytes)
    device = Device(open_driver(), 0)
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(_pin(device, address, nbytes, piece)), flush=True)


if __name__ == "__main__":
    main()
