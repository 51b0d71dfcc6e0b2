"""Which rows have arrived, in C (csrc/arrive.c): numpy orders a word behind the bytes that it speaks of on x86 only."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.base import native
from nixl_tiers.memory.seal import ABI


@cache
def _library() -> ctypes.CDLL | None:
    """Its call takes microseconds, and keeps the interpreter's lock."""
    library = native.opened(
        native.location("nixl_tiers.memory._hash_copy"), "nixl_tiers_hash_copy_abi", ABI, keeps_lock=True
    )
    if library is not None:
        pointer = ctypes.c_void_p
        library.nixl_tiers_arrive.argtypes = [pointer, pointer, ctypes.c_size_t, pointer]
        library.nixl_tiers_arrive.restype = None
    return library


def built() -> bool:
    return _library() is not None


def arrive(words: NDArray[np.uint32], rows: Sequence[int], bell: NDArray[np.uint32]) -> None:
    """Store ARRIVED into the words of these rows, whose bytes are in memory, and wake who waits for the bell. Nothing
    where the library was not built: there are no streams. IndexError for a row without a word."""
    library = _library()
    if library is None or not rows:
        return
    numbers = np.array(rows, np.uint32)
    if numbers.max() >= len(words):
        raise IndexError(f"row {numbers.max()} has no word: there are {len(words)}")
    library.nixl_tiers_arrive(words.ctypes.data, numbers.ctypes.data, len(numbers), bell.ctypes.data)
