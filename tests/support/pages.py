"""Which pages this process has in its page tables (see the kernel's Documentation/admin-guide/mm/pagemap.rst)."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

_PRESENT = np.uint64(1 << 63)


def mapped(address: int, nbytes: int) -> list[bool]:
    """Of each page, whether this process can use it without a page fault."""
    first, last = address // mmap.PAGESIZE, -(-(address + nbytes) // mmap.PAGESIZE)
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        pagemap.seek(8 * first)
        entries = np.frombuffer(pagemap.read(8 * (last - first)), np.uint64)
    assert len(entries) == last - first
    return [bool(entry) for entry in entries & _PRESENT]
