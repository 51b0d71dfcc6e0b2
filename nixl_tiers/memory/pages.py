"""Pages of shared memory: huge ones where the machine has them, allocated before they are needed, near the GPUs.

- Huge pages: an explicit pool (hugetlbfs), or what the kernel gives transparently (THP). O_DIRECT pins a row page by
  page, and a disk request has a bounded number of segments: with scattered 4 KiB pages a row of some MB becomes several
  requests. With 2 MiB pages it is one. See the kernel's Documentation/admin-guide/mm/hugetlbpage.rst and transhuge.rst,
  and cgroup-v2.rst for `hugetlb.2MB.*`.
- Prefaulting, on threads of its own: one page fault for each page runs at a fraction of memory speed, and the first
  requests that are offloaded would pay it.
- NUMA: a copy across sockets is slower, and takes bandwidth from others.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Final

import numpy as np

from nixl_tiers.base.chunk import PAGE
from nixl_tiers.memory.cgroup import Room, gib, levels, limit_of, number
from nixl_tiers.memory.memfd import memfd

HUGE_PAGE_BYTES: Final = 2 << 20
_MFD_HUGETLB_2MB: Final = 0x4 | 21 << 26  # MFD_HUGETLB with the page size's logarithm: never the machine's default size

_POOL: Final = Path("sys/kernel/mm/hugepages/hugepages-2048kB")
_SHMEM_ENABLED: Final = Path("sys/kernel/mm/transparent_hugepage/shmem_enabled")
_SLICE_BYTES: Final = 1 << 30
_THREADS: Final = 4
_MOSTLY: Final = 0.9
_GAIN: Final = (
    "file tiers need no staging buffer, and for large rows about a fifth less CPU time per byte, or half of it with "
    "native threads"
)


def hugetlb_rooms(root: Path = Path("/")) -> list[Room]:
    """Every bound on explicit 2 MiB pages for this process: the pool's free pages that nobody has reserved, with those
    that it may still grow by, and the hugetlb cgroups. They are not charged to `memory.max`.

    `root`: the file system to read proc and sys from.
    """
    return [_pool(root), *_cgroups(root)]


def hugetlb_memfd(name: str, nbytes: int) -> int:
    """A memfd of `nbytes` (a multiple of 2 MiB) in explicit huge pages that can be sealed.

    All pages are allocated now: one that is missing later is a SIGBUS at its first use. OSError if the pool, a limit or
    the kernel does not allow it.
    """
    fd = memfd(name, _MFD_HUGETLB_2MB)
    try:
        os.ftruncate(fd, nbytes)
        with mmap.mmap(fd, nbytes) as memory:
            _take_all(fd, memory)
    except OSError:
        os.close(fd)
        raise
    return fd


def _take_all(fd: int, memory: mmap.mmap) -> None:
    """Allocate all pages of the memfd mapped here. By faults on a few threads (`fallocate` holds the file's lock, and
    is the way of kernels before 5.14), and with errors instead of signals."""
    nbytes = len(memory)

    def take(start: int) -> None:
        size = min(_SLICE_BYTES, nbytes - start)
        error = populate(memory, start, size)
        if error == errno.EINVAL:
            os.posix_fallocate(fd, start, size)
        elif error:
            raise OSError(error, os.strerror(error))

    with ThreadPoolExecutor(min(_THREADS, len(os.sched_getaffinity(0)))) as threads:
        list(threads.map(take, range(0, nbytes, _SLICE_BYTES)))


def is_hugetlb(fd: int) -> bool:
    """Whether the memfd behind `fd` lies in explicit 2 MiB pages.

    By its file system: `st_blksize` of an ordinary memfd is 2 MiB too where `shmem_enabled` is `always`, `within_size`
    or `force` (before Linux 5.15 also with `advise`).
    """
    return os.fstatvfs(fd).f_bsize == HUGE_PAGE_BYTES


def transparent_bytes(address: int, nbytes: int, smaps: Path = Path("/proc/self/smaps")) -> int:
    """How many bytes of the `nbytes` mapped from `address` on this process has mapped as transparent huge pages.

    The kernel may list them in parts: NUMA policies (`memory/pages.py`) and advice for some pages split a mapping.
    The kernel walks the page tables for it: seconds for a terabyte. Not for a thread that others wait for.
    """
    inside = False
    total = 0
    with contextlib.suppress(OSError), smaps.open() as lines:
        for line in lines:
            name, *rest = line.split(None, 2)
            if not name.endswith(":"):  # the first line of a mapping: "7f00-7f80 rw-s ..."
                start = int(name.partition("-")[0], 16)
                if start >= address + nbytes:
                    break
                inside = start >= address
            elif inside and name == "ShmemPmdMapped:":
                total += int(rest[0]) << 10
    return total


def transparent_setting(root: Path = Path("/")) -> str:
    """The word that is chosen in `shmem_enabled`, such as never or advise; "" on a kernel without it."""
    with contextlib.suppress(OSError):
        words = (root / _SHMEM_ENABLED).read_text().split()
        return next((word.strip("[]") for word in words if word.startswith("[")), "")
    return ""


def advice(root: Path = Path("/")) -> str:
    """What gives shared memory huge pages on this machine, in words; "" where the kernel gives them already.

    They save CPU time: file tiers reach the same speed through a buffer of their own
    that has huge pages (docs/internals/performance.md).
    """
    setting = transparent_setting(root)
    if setting in ("advise", "always", "within_size", "force"):
        return ""
    pool = "a pool of 2 MiB pages (vm.nr_hugepages) with `huge_pages: hugetlb` on the cpu tier"
    if not setting:
        return f"with {pool}, {_GAIN}"
    return (
        f"with huge pages {_GAIN}: before the start, write `advise` to /{_SHMEM_ENABLED} (it is `{setting}`), or use "
        f"{pool}"
    )


def mostly_huge(nbytes: int, huge_bytes: int) -> bool:
    """Whether a region of `nbytes`, of which `huge_bytes` lie in 2 MiB pages, counts as one in huge pages."""
    return huge_bytes >= nbytes * _MOSTLY


def found(nbytes: int, huge_bytes: int, advice: str) -> str:
    """One sentence: how much of a region of `nbytes` lies in 2 MiB pages, and what to do about the rest."""
    share = f"{gib(huge_bytes)} of {gib(nbytes)} lie in pages of 2 MiB"
    if mostly_huge(nbytes, huge_bytes):
        return share
    return f"{share}; {advice or 'the kernel found no more free memory in one piece'}"


def _pool(root: Path) -> Room:
    def count(name: str) -> int:
        return number(root / _POOL / name) or 0

    free = count("free_hugepages") - count("resv_hugepages")
    growth = max(0, count("nr_overcommit_hugepages") - count("surplus_hugepages"))
    return Room("the pool of 2 MiB pages", max(0, free + growth) * HUGE_PAGE_BYTES)


def _cgroups(root: Path) -> Iterator[Room]:
    for version, mount, level in levels(root, "hugetlb"):
        limit, usage = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
        for kind in ("hugetlb.2MB", "hugetlb.2MB.rsvd"):
            bound = limit_of(mount / level, f"{kind}.{limit}", f"{kind}.{usage}")
            if bound is not None:
                limit_bytes, used_bytes = bound
                free_bytes = max(0, limit_bytes - used_bytes)
                yield Room(f"{kind} of the cgroup {PurePosixPath('/') / level}", free_bytes, limit_bytes)


_libc: Final = ctypes.CDLL(None, use_errno=True)
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14


def populate(memory: mmap.mmap, start: int, size: int) -> int:
    """Allocate the pages of a part of a mapping, whatever their contents; returns 0 or an errno: EINVAL on kernels
    before 5.14. Releases the GIL."""
    first = ctypes.c_char.from_buffer(memory)
    try:
        return _madvise(ctypes.addressof(first) + start, size)
    finally:
        del first  # a buffer that is exported cannot be unmapped


def _madvise(address: int, size: int) -> int:
    if not _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _MADV_POPULATE_WRITE):
        return 0
    return ctypes.get_errno()


def populate_part(address: int, size: int) -> int:
    """Allocate and map these pages, on any kernel, never changing a byte: others may use the memory meanwhile. Returns
    0 or an errno."""
    error = _madvise(address, size)
    if error != errno.EINVAL:
        return error
    # An older kernel. Reading is enough to make a shared mapping's page exist, and cannot undo what others write.
    np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(address))[::PAGE].max()
    return 0


_SYSFS: Final = Path("/sys/bus/pci/devices")
_NODES: Final = Path("/sys/devices/system/node")


def node_of(pci_address: str, sysfs: Path = _SYSFS) -> int | None:
    """The NUMA node of a PCI device, or None if the machine has one node only, or does not report it."""
    try:
        node = int((sysfs / pci_address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def cpus_of(node: int | None, nodes: Path = _NODES) -> set[int]:
    """The processors of a NUMA node that this process may use; none if the node is not known, or has none of them."""
    if node is None:
        return set()
    found: set[int] = set()
    with contextlib.suppress(OSError, ValueError):
        for part in (nodes / f"node{node}" / "cpulist").read_text().strip().split(","):
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    return found & os.sched_getaffinity(0)
