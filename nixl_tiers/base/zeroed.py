"""Zeroed memory that costs no time to make: the kernel gives its pages when they are first touched."""

from __future__ import annotations

import mmap


def zeroed(size: int) -> mmap.mmap:
    """`size` bytes, at least one, private to this process."""
    return mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
