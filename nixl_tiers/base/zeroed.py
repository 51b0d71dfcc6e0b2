"""Zeroed memory that costs no time to make: the kernel gives its pages when they are first touched."""

from __future__ import annotations

import mmap
from typing import Final

FREED_AT_ONCE: Final = 256 << 10
"""Bytes: to give back the pages of a large map takes milliseconds, and keeps the interpreter's lock."""


class Zeroed(mmap.mmap):
    """It can be given back in parts."""

    def free(self, parts: int, /) -> bool:
        """Give back so many parts of it, from its end; whether any is left."""
        left = len(self) - parts * FREED_AT_ONCE
        if left > 0:
            self.resize(left)
        else:
            self.close()
        return left > 0


def zeroed(size: int) -> Zeroed:
    """`size` bytes, at least one, private to this process."""
    return Zeroed(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
