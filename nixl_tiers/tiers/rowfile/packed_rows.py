"""The rows of one fan-out directory, packed: 54 bytes a row at keys of 36 bytes, 75 with all around them.

A sorted array of keys with columns beside it, and a short unsorted tail of new rows, which is merged when it is full.
A dict of the same rows costs nine times as much.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from nixl_tiers.base.chunk import Key, align
from nixl_tiers.base.zeroed import zeroed

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    Keys = NDArray[np.bytes_]
    """Encoded keys: a byte with the length, the key, and zeroes."""
    Columns = NDArray[np.void]
    Flags = NDArray[np.uint8]
    Places = NDArray[np.intp]

PRESENT: Final = 1  # the file is there
INDEXED: Final = 2  # the core's index has it: listed to the core or stored by it, and not deleted by it since
SERVABLE: Final = 4  # it may be listed: it has the size of a row
WAS_INDEXED: Final = 8  # INDEXED before the tier was opened again

COLUMNS: Final = np.dtype([("mtime_ns", "<i8"), ("blocks", "<u4"), ("age_from", "<u4")])
BLOCK_BYTES: Final = 512  # of `blocks`, the space that a file takes
MAX_AGE_FROM: Final = (1 << 32) - 1  # Unix seconds
_MAX_BLOCKS: Final = (1 << 32) - 1
_MAX_MTIME_NS: Final = (1 << 63) - 2  # one more has room too
_KEPT: Final = PRESENT | INDEXED | WAS_INDEXED  # without any of these, a row is dropped at the next merge
_MAPPED_BYTES: Final = 32 << 10
_MIN_TAIL: Final = 8
_TAIL_SHARE: Final = 64  # the tail has room for this fraction of the rows


class KnownRow(NamedTuple):
    """A row file when this process first saw it, or last wrote or touched it."""

    mtime_ns: int
    disk_bytes: int
    age_from: int  # Unix seconds (see `quota.age_from`); 0: its seal has not been read yet

    @classmethod
    def of(cls, status: os.stat_result, age_from: int = 0) -> KnownRow:
        """Within what COLUMNS can hold: anybody can give a file a time or size beyond it."""
        nbytes = max(allocated_bytes(status), align(status.st_size))
        mtime_ns = max(-_MAX_MTIME_NS, min(status.st_mtime_ns, _MAX_MTIME_NS))
        return cls(mtime_ns, min(nbytes, BLOCK_BYTES * _MAX_BLOCKS), age_from)


def allocated_bytes(status: os.stat_result) -> int:
    return status.st_blocks * BLOCK_BYTES


def encoded(key: Key) -> bytes:
    return bytes((len(key),)) + key


def decoded(raw: bytes) -> Key:
    """The inverse; `raw` may lack trailing zeroes, as items of an array do."""
    return raw[1:].ljust(raw[0], b"\0")


def key_array(keys: Iterable[bytes]) -> Keys:
    """Encoded keys, sorted."""
    raw = list(keys)
    width = max(map(len, raw), default=1)
    array = np.frombuffer(b"".join([key.ljust(width, b"\0") for key in raw]), f"S{width}")
    return np.sort(array)


def without(keys: Keys, others: Keys) -> NDArray[np.bool_]:
    """bool (keys,): which of `keys` are not among `others`. Both are sorted."""
    if not len(others):
        return np.ones(len(keys), np.bool_)
    places = np.minimum(others.searchsorted(keys), len(others) - 1)
    absent: NDArray[np.bool_] = others[places] != keys
    return absent


def _array(rows: int, dtype: DTypeLike) -> NDArray[Any]:
    """Not initialized. Arrays that all grow in step fragment the heap: all but small ones are mapped."""
    nbytes = rows * np.dtype(dtype).itemsize
    if nbytes < _MAPPED_BYTES:
        return np.empty(rows, dtype)
    return np.frombuffer(zeroed(nbytes), dtype, rows)


class PackedRows:
    """Not thread-safe. Numbers of rows hold until the next row is added."""

    def __init__(self) -> None:
        self._keys: Keys = np.empty(0, "S1")
        self._columns: Columns = np.empty(0, COLUMNS)
        self._flags: Flags = np.empty(0, np.uint8)
        self._tail: dict[bytes, int] = {}
        self._sorted = 0
        self._count = 0
        self.present = 0
        """How many rows are PRESENT, ..."""
        self.indexed = 0
        """INDEXED, ..."""
        self.disk_bytes = 0
        """and what those that are PRESENT take."""

    # --- all rows ---------------------------------------------------------------------------------------------------

    @property
    def keys(self) -> Keys:
        return self._keys[: self._count]

    @property
    def columns(self) -> Columns:
        """COLUMNS (rows,)"""
        return self._columns[: self._count]

    @property
    def flags(self) -> Flags:
        """uint8 (rows,). After writing to them call `recount`."""
        return self._flags[: self._count]

    @property
    def empty(self) -> bool:
        """Whether no row is worth keeping."""
        return not (self.flags & _KEPT).any()

    def recount(self) -> None:
        present = self.flags & PRESENT != 0
        self.present = int(np.count_nonzero(present))
        self.indexed = int(np.count_nonzero(self.flags & INDEXED))
        self.disk_bytes = BLOCK_BYTES * int(self.columns["blocks"][present].sum(dtype=np.int64))

    def present_keys(self) -> Keys:
        """Sorted; a copy."""
        self._merge()
        present: Keys = self.keys[self.flags & PRESENT != 0]
        return present

    # --- one row ----------------------------------------------------------------------------------------------------

    def get(self, key: Key) -> KnownRow | None:
        """None unless it is PRESENT."""
        row = self._find(encoded(key))
        if row < 0 or not self._flags[row] & PRESENT:
            return None
        mtime_ns, blocks, age_from = self._columns[row].item()
        return KnownRow(mtime_ns, BLOCK_BYTES * blocks, age_from)

    def put(self, key: Key, row: KnownRow, flags: int = 0) -> None:
        """The file is there; `flags` are set beside those that the row has. Without an `age_from`, what was known of
        it stays."""
        at = self._find(encoded(key), add=True)
        columns = (row.mtime_ns, -(-row.disk_bytes // BLOCK_BYTES), row.age_from or int(self._columns["age_from"][at]))
        if self._flags[at] & PRESENT:
            self.disk_bytes -= BLOCK_BYTES * int(self._columns["blocks"][at])
        self._columns[at] = columns
        self.disk_bytes += BLOCK_BYTES * columns[1]
        self._set_flags(at, int(self._flags[at]) & ~SERVABLE | PRESENT | flags)

    def remove(self, key: Key) -> None:
        """The file is gone."""
        row = self._find(encoded(key))
        if row >= 0 and self._flags[row] & PRESENT:
            self.disk_bytes -= BLOCK_BYTES * int(self._columns["blocks"][row])
            self._columns["age_from"][row] = 0
            self._set_flags(row, int(self._flags[row]) & ~(PRESENT | SERVABLE))

    def set_indexed(self, key: Key, indexed: bool) -> bool:
        """Whether it was INDEXED before. A row that is not known is added if it is to be INDEXED."""
        row = self._find(encoded(key), add=indexed)
        if row < 0:
            return False
        before = int(self._flags[row])
        self._set_flags(row, before | INDEXED if indexed else before & ~INDEXED)
        return bool(before & INDEXED)

    def set_age(self, key: Key, age_from: int) -> None:
        """When the age of a row begins, in Unix seconds. Without effect unless it is PRESENT: a file that comes later
        has an age of its own."""
        row = self._find(encoded(key))
        if row >= 0 and self._flags[row] & PRESENT:
            self._columns["age_from"][row] = age_from

    # --- many rows --------------------------------------------------------------------------------------------------

    def add_many(self, keys: Keys, columns: Columns, flags: Flags) -> None:
        """Files that were found. `keys` are sorted, and none is PRESENT."""
        self._merge()
        fresh = without(keys, self.keys)
        known = self.keys.searchsorted(keys[~fresh])
        self._columns[known] = columns[~fresh]
        self._flags[known] |= flags[~fresh] | PRESENT
        self._insert(keys[fresh], columns[fresh], flags[fresh] | np.uint8(PRESENT))
        self.recount()

    def remove_many(self, keys: Keys) -> None:
        """Files that are gone. `keys` are sorted."""
        self._merge()
        keys = keys[~without(keys, self.keys)]
        rows = self.keys.searchsorted(keys)
        self._columns["age_from"][rows] = 0
        self._flags[rows] &= ~np.uint8(PRESENT | SERVABLE)
        self.recount()

    # --- inside -----------------------------------------------------------------------------------------------------

    def _find(self, raw: bytes, *, add: bool = False) -> int:
        """The row's number; -1 if it is not known, unless it is to be added, without flags."""
        row = self._tail.get(raw, -1)
        if row < 0 and len(raw) <= self._keys.itemsize:
            ordered = self._keys[: self._sorted]
            at = int(ordered.searchsorted(raw))
            if at < self._sorted and ordered[at] == raw.rstrip(b"\0"):
                row = at
        if row >= 0 or not add:
            return row
        if self._count == len(self._keys) or len(raw) > self._keys.itemsize:
            self._merge(len(raw))
        row, self._count = self._count, self._count + 1
        self._keys[row], self._columns[row], self._flags[row] = raw, (0, 0, 0), 0
        self._tail[raw] = row
        return row

    def _set_flags(self, row: int, flags: int) -> None:
        before = int(self._flags[row])
        self.present += (flags & PRESENT) - (before & PRESENT)
        self.indexed += (flags & INDEXED) // INDEXED - (before & INDEXED) // INDEXED
        self._flags[row] = flags

    def _merge(self, width: int | None = None) -> None:
        """Sort the tail in and drop rows that are not kept. `width`: make room for a new tail, of keys of that size."""
        start, end = self._sorted, self._count
        if width is None and start == end and (self.flags & _KEPT).all():
            return
        kept = self.flags & _KEPT != 0
        order = start + np.argsort(self._keys[start:end])
        order = order[kept[order]]
        keys, columns, flags = self._keys[order], self._columns[order], self._flags[order]
        rest = np.flatnonzero(kept[:start])
        self._keys, self._columns, self._flags = self._keys[rest], self._columns[rest], self._flags[rest]
        self._count = len(rest)
        self._insert(keys, columns, flags, width or 1)

    def _insert(self, keys: Keys, columns: Columns, flags: Flags, width: int = 1) -> None:
        """Sorted new rows, into rows that are all sorted."""
        count = self._count + len(keys)
        size = count + max(_MIN_TAIL, count // _TAIL_SHARE)
        width = max(width, keys.itemsize if len(keys) else 1, self._keys.itemsize if self._count else 1)
        places = self.keys.searchsorted(keys) + np.arange(len(keys))
        others = np.ones(count, np.bool_)
        others[places] = False
        new_keys, new_columns, new_flags = (_array(size, of) for of in (f"S{width}", COLUMNS, np.uint8))
        for new, old, added in (
            (new_keys, self.keys, keys),
            (new_columns, self.columns, columns),
            (new_flags, self.flags, flags),
        ):
            new[:count][others] = old
            new[places] = added
        self._keys, self._columns, self._flags = new_keys, new_columns, new_flags
        self._count = self._sorted = count
        self._tail = {}
