"""The bytes of a row table: header, columns, and the memory that they are in.

Rows are in order of their bucket. A word a bucket says where it starts, and is a Bloom filter of its keys: a look-up of
a key that is not there reads that one word. Another list has the order of use. All integers are little-endian.
docs/internals/row-tables.md has the reasons.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from xxhash import xxh3_64_intdigest

from nixl_tiers.base.chunk import PAGE, Key, align
from nixl_tiers.base.zeroed import zeroed
from nixl_tiers.memory.key_hash import KeyHash
from nixl_tiers.memory.memfd import CHECK, header_of, memfd

if TYPE_CHECKING:
    from numpy.typing import NDArray

REMOVED: Final = 0xFFFFFFFF
"""The slot of a row that has been removed; what slots and ticks are masked with."""
FILTER_WIDTH: Final = 28
"""Bits a bucket; above them, a word has where the bucket's rows start."""
FILTER_BITS: Final = tuple(1 << n % FILTER_WIDTH | 1 << n // FILTER_WIDTH % FILTER_WIDTH for n in range(1024))
"""By the lowest bits of a key's hash: its bits in the filter of its bucket, which has zeros there."""
FILTER_MASK: Final = len(FILTER_BITS) - 1
LENGTHS: Final = tuple(bytes((length,)) for length in range(256))
"""The first byte of a key's record, by the key's length."""

ENTRY: Final = struct.Struct("<II")  # slot and tick of last use, before the row's record
_ENTRY_AND_LENGTH: Final = struct.Struct("<IIB")
_MAGIC: Final = b"nixlrows"
_VERSION: Final = 2
_HEADER: Final = struct.Struct("<8sQQQQQ")  # magic, version, rows, removed, record bytes, seed of the hash
_MAX_RECORD: Final = 256
_MAX_TOTAL: Final = 1 << 64 - FILTER_WIDTH
_ROWS_A_BUCKET: Final = 4  # on average


class RowTableError(RuntimeError):
    """The table cannot be built, or the descriptor holds none. One sentence that says why."""


class Layout:
    """Where the parts are, in bytes from the start: a function of the header, so that it can be checked."""

    def __init__(self, rows: int, record_bytes: int) -> None:
        self.rows, self.record_bytes = rows, record_bytes
        self.buckets = rows // _ROWS_A_BUCKET | 1  # odd: a key's bucket says nothing about the lowest bits of its hash
        self.words = PAGE  # uint64 (buckets + 1,): filter, and at which byte the record of the bucket's first row is
        self.order = self.words + 8 * (self.buckets + 1)  # uint32 (rows,): which row is the coldest, the next, ...
        self.rows_at = self.order + 4 * rows  # `row_type` (rows,)
        self.records = self.rows_at + ENTRY.size  # of the first row
        self.row_bytes = ENTRY.size + record_bytes
        self.total = align(self.rows_at + self.row_bytes * rows)

    def check(self) -> None:
        """RowTableError if a table cannot be as large as this one."""
        if self.rows >= REMOVED or self.total >= _MAX_TOTAL:
            raise RowTableError(f"a table has room for {REMOVED - 1} rows and {_MAX_TOTAL} bytes, not for {self.rows}")


def row_type(record_bytes: int) -> np.dtype[np.void]:
    """A row: slot, tick of last use, and a record: the length of the key in a byte, the key, padding with zeros."""
    return np.dtype([("slot", "<u4"), ("tick", "<u4"), ("record", "u1", (record_bytes,))])


def column(of: mmap.mmap, at: int, count: int, dtype: type[Any] = np.uint32) -> NDArray[Any]:
    """The numbers from byte `at` on, not copied."""
    return np.frombuffer(of, dtype, count, at)


def rows_of(memory: mmap.mmap, layout: Layout) -> NDArray[np.void]:
    """`row_type` (rows,): all rows, not copied."""
    return np.frombuffer(memory, row_type(layout.record_bytes), layout.rows, layout.rows_at)


def row_at(memory: mmap.mmap, layout: Layout, row: int) -> tuple[int, int, Key]:
    """(slot, tick of last use, key) of a row by its number."""
    at = layout.rows_at + layout.row_bytes * row
    slot, tick, key_bytes = _ENTRY_AND_LENGTH.unpack_from(memory, at)
    at += _ENTRY_AND_LENGTH.size
    return slot, tick, memory[at : min(at + key_bytes, at + layout.record_bytes - 1)]


def allocate(nbytes: int, *, shared: bool) -> tuple[int, mmap.mmap]:
    """Zeroed memory, and its descriptor if it is to be `shared`, else -1. RowTableError if there is none."""
    try:
        if not shared:
            memory = zeroed(nbytes)
            with contextlib.suppress(OSError):  # a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)
            return -1, memory
        fd = memfd("nixl_tiers_rows")
        try:
            os.posix_fallocate(fd, 0, nbytes)  # fail here: a page that cannot be allocated later would be a SIGBUS
            return fd, mmap.mmap(fd, nbytes)
        except OSError:
            os.close(fd)
            raise
    except OSError as error:
        raise RowTableError(f"the kernel gives no {nbytes} bytes for a row table: {error.strerror}") from error


def write_header(memory: mmap.mmap, layout: Layout, key_hash: KeyHash, removed: int) -> None:
    header = _HEADER.pack(_MAGIC, _VERSION, layout.rows, removed, layout.record_bytes, key_hash.seed)
    memory[: _HEADER.size + CHECK.size] = header + CHECK.pack(xxh3_64_intdigest(header))


def read_header(fd: int) -> tuple[Layout, KeyHash, int]:
    """Layout, hash and number of removed rows of the table behind `fd`. RowTableError names what is wrong with it."""
    try:
        _, _, rows, removed, record_bytes, seed = header_of(fd, _HEADER, _MAGIC, _VERSION, "row table")
    except ValueError as error:
        raise RowTableError(str(error)) from error
    size = os.fstat(fd).st_size
    layout = Layout(rows, record_bytes)
    if not (2 <= record_bytes <= _MAX_RECORD and removed <= rows < REMOVED) or size != layout.total:
        raise RowTableError(f"the table behind descriptor {fd} has {size} bytes, which is not what its header says")
    return layout, KeyHash(seed), removed
