"""Bytes hashed and copied in one pass: a small C function, xxhash and numpy where that was not built."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Final

import numpy as np
from xxhash import xxh3_64_digest

from nixl_tiers.base import native

if TYPE_CHECKING:
    from numpy.typing import NDArray

ABI: Final = 1  # HASH_COPY_ABI of csrc/hash_copy.c


@cache
def _library() -> ctypes.CDLL | None:
    """The compiled function, or None where it was not built, is for another machine, or is older than this file."""
    return _open(native.location("nixl_tiers.memory._hash_copy"))


def _open(path: str | None) -> ctypes.CDLL | None:
    library = native.opened(path, "nixl_tiers_hash_copy_abi", ABI)
    if library is not None:
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        library.nixl_tiers_hash_copy.argtypes = [pointer, pointer, size, size, pointer]
        library.nixl_tiers_hash_copy.restype = size
    return library


def compiled() -> bool:
    """Whether the C function is used in this process."""
    return _library() is not None


def hash_copy(target: NDArray[np.uint8], source: NDArray[np.uint8], piece_bytes: int) -> bytes:
    """Copy `source` to `target` (contiguous, of one length, not overlapping) and return the XXH3-64 digests of its
    pieces, one after the other, each 8 bytes, big-endian; the last piece may be short.

    The digests are those of the copy, even if `source` is written to meanwhile.
    """
    nbytes = len(source)
    digests = np.empty(-(-nbytes // piece_bytes), np.uint64)
    library = _library()
    done = 0
    if library is not None:
        done = library.nixl_tiers_hash_copy(
            target.ctypes.data, source.ctypes.data, nbytes, piece_bytes, digests.ctypes.data
        )
    whole = -(-done // piece_bytes)
    rest = []
    for at in range(done, nbytes, piece_bytes):
        piece = slice(at, min(at + piece_bytes, nbytes))
        target[piece] = source[piece]
        rest.append(xxh3_64_digest(target[piece].data))
    return digests[:whole].tobytes() + b"".join(rest)
