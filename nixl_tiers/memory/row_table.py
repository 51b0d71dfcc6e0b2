"""Row tables: rows of a storage tier (key, slot, tick of last use) in a packed table, 51 bytes each for keys of 36.

As Python objects a row costs over 300 bytes. Here it can be that small because a table only ever shrinks: rows are
found, removed, and taken out coldest first. What is new goes into a dict, and from time to time into another table that
is built of it and of older ones. So rows are packed, in order of their bucket, instead of having empty places, and
another list gives them in order of use: exact LRU, without links. docs/internals/row-tables.md has the layout and the
measurements.

A table lies in memory of this process, or in a memfd that another process maps.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, Self

import numpy as np
from xxhash import xxh3_64_intdigest

from nixl_tiers.base.chunk import Key
from nixl_tiers.memory import row_lookup
from nixl_tiers.memory.key_hash import KeyHash
from nixl_tiers.memory.memfd import SIZE_SEALS
from nixl_tiers.memory.row_table_build import Rows, Source, fill
from nixl_tiers.memory.row_table_format import (
    ENTRY,
    FILTER_BITS,
    FILTER_MASK,
    FILTER_WIDTH,
    LENGTHS,
    REMOVED,
    Layout,
    RowTableError,
    allocate,
    column,
    read_header,
    row_at,
    rows_of,
    write_header,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["RowTable", "RowTableError", "Rows"]

_REFILL: Final = 1024  # rows that are read in order of use at once,
_REFILLS: Final = 4  # and how often at most by one call
_PIECE: Final = 1 << 15  # rows that are looked at in one go, so that others are not kept from memory for long
_FREED_AT_ONCE: Final = 4 << 20  # bytes: unmapping a large table in one go would take as long as building it
_SLOT: Final = struct.Struct("<I")
_entry_at: Final = ENTRY.unpack_from
_FEW: Final = 8  # keys that are found sooner one by one
_NO_BUCKETS: Final = memoryview(array("Q", [REMOVED]))  # one bucket, whose filter has no key


class RowTable:
    """Find, remove, take out the coldest. Nothing is ever added: `build` makes another table of it and of new rows.

    One thread at a time, but that another one may `build` of it: each row that is removed meanwhile must be removed
    from the new table too. What is mapped from another process is checked only as far as memory safety needs it: a row
    that is not what its entry says fails verification when it is loaded.
    """

    def __init__(self, memory: mmap.mmap, layout: Layout, key_hash: KeyHash, removed: int, *, shared: bool) -> None:
        """Not for callers: use `build` or `attach`."""
        self._advice = mmap.MADV_REMOVE if shared else mmap.MADV_DONTNEED
        self.nbytes = layout.total
        self.key_hash = key_hash
        self._map = memory
        self._search = memory.find
        self._layout = layout
        whole = memoryview(memory)
        part = whole[layout.words : layout.words + 8 * (layout.buckets + 1)]
        self._words = part.cast("Q")
        self._views = [self._words, part, whole]
        self._buckets = layout.buckets
        self._seed = key_hash.seed
        self._entries = layout.rows_at
        self._records = layout.records
        self._row_bytes = layout.row_bytes
        self._left = layout.rows - removed
        self._coldest: list[int] = []  # the next rows in order of use, the coldest last
        self._cursor = 0  # how much of that order has been read,
        self._reached = 0  # and the tick of a row there
        self._slot_map: NDArray[np.uint8] | None = None
        self._table = row_lookup.Table.of(np.frombuffer(memory, np.uint8, 1).ctypes.data, layout, key_hash.seed)

    @classmethod
    def build(
        cls, rows: Rows, tables: Sequence[RowTable] = (), *, key_hash: KeyHash, slots_limit: int | None = None
    ) -> RowTable:
        """A table of `rows` and of what is left in `tables`, which stay as they are. Empties `rows`.

        Among equal ticks, those of `tables` are colder, in the order given. Of two rows with one key, the one used
        later is kept; with `slots_limit`, where a slot is a place on the medium, so it is of two rows with one slot,
        and no row with a slot of `slots_limit` or above is kept. Holds the interpreter lock for a few ms at a time
        only. RowTableError if there is no memory.
        """
        return cls._built(rows, tables, key_hash, slots_limit, shared=False)[0]

    @classmethod
    def build_shared(
        cls, rows: Rows, *, key_hash: KeyHash, slots_limit: int | None = None
    ) -> tuple[int, list[tuple[int, Key]]]:
        """The same in a new memfd, its size sealed, for another process to `attach`: its descriptor, which the caller
        sends and closes, and (slot, key) of the rows that are not in it."""
        table, fd, left_out = cls._built(rows, (), key_hash, slots_limit, shared=True)
        table.unmap()
        return fd, left_out

    @classmethod
    def _built(
        cls, rows: Rows, tables: Sequence[RowTable], key_hash: KeyHash, slots_limit: int | None, *, shared: bool
    ) -> tuple[RowTable, int, list[tuple[int, Key]]]:
        sources = [*(table.left() for table in tables), *rows.take()]
        layout = Layout(
            sum(source.count for source in sources), max((source.record_bytes for source in sources), default=2)
        )
        layout.check()
        fd, memory = allocate(layout.total, shared=shared)
        try:
            surplus = fill(memory, layout, sources, key_hash, slots_limit)
            left_out = [(slot, key) for slot, _, key in (row_at(memory, layout, row) for row in surplus)]
            rows_of(memory, layout)["slot"][surplus] = REMOVED
            write_header(memory, layout, key_hash, len(surplus))
            if shared:
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_SEALS | fcntl.F_SEAL_SEAL)
        except BaseException:
            if shared:
                os.close(fd)
            raise
        return cls(memory, layout, key_hash, len(surplus), shared=shared), fd, left_out

    @classmethod
    def attach(cls, fd: int) -> RowTable:
        """Map the table behind `fd`, and close `fd`. Takes the same time for any number of rows.

        RowTableError unless it is a memfd whose size is sealed and is what its header says: a file that could shrink
        would turn any access into a SIGBUS.
        """
        try:
            layout, key_hash, removed = read_header(fd)
            return cls(mmap.mmap(fd, layout.total), layout, key_hash, removed, shared=True)
        except OSError as error:
            raise RowTableError(f"cannot map the row table behind descriptor {fd}: {error.strerror}") from error
        finally:
            with contextlib.suppress(OSError):
                os.close(fd)

    def __len__(self) -> int:
        return max(0, self._left)

    @property
    def built_rows(self) -> int:
        """How many rows it was built with: what its memory is proportional to."""
        return self._layout.rows

    def find(self, key: Key) -> tuple[int, int] | None:
        """(slot, tick) of the key's row, or None."""
        hashed = xxh3_64_intdigest(key, self._seed)  # KeyHash.of_key; this function is the one called most of all
        bucket = hashed % self._buckets
        word = self._words[bucket]
        if word & FILTER_BITS[hashed & FILTER_MASK]:
            return None
        found = self._search_bucket(key, bucket, word)
        return None if found is None else found[:2]

    def has_many(self, keys: Sequence[Key]) -> list[bool]:
        """Of each key, whether it has a row: many together cost a tenth of what they cost one by one."""
        found = row_lookup.has_many(self._table, keys) if self._left and len(keys) >= _FEW else None
        return [self.find(key) is not None for key in keys] if found is None else found

    def remove(self, key: Key) -> tuple[int, int] | None:
        """As find, and the row is removed: the caller keeps its slot, or frees it."""
        hashed = xxh3_64_intdigest(key, self._seed)
        bucket = hashed % self._buckets
        word = self._words[bucket]
        if word & FILTER_BITS[hashed & FILTER_MASK]:
            return None
        found = self._search_bucket(key, bucket, word)
        if found is None:
            return None
        slot, tick, at = found
        self._remove(at)
        return slot, tick

    def coldest_tick(self) -> int | None:
        """When the least recently used row was used; None if the table is empty. An earlier tick where so many rows
        have been removed that a call cannot pass over all of them: each one goes on from there."""
        row = self._next_coldest()
        if row is not None:
            return self._row_entry(row)[1]
        return self._reached if self._left and self._cursor < self._layout.rows else None

    def coldest(self, count: int, before: int | None = None) -> list[tuple[Key, int]]:
        """Remove up to `count` rows, the least recently used first: (key, slot). With `before`: only those that were
        last used at that tick or earlier. Fewer where so many rows have been removed that a call cannot pass over all
        of them: each one goes on from there."""
        victims: list[tuple[Key, int]] = []
        while len(victims) < count and (row := self._next_coldest()) is not None:
            slot, tick, key = row_at(self._map, self._layout, row)
            if before is not None and tick > before:
                break
            self._remove(self._entries + self._row_bytes * row)
            victims.append((key, slot))
        return victims

    def keys(self) -> Iterator[Key]:
        """The keys of its rows, in no particular order. Nothing may be removed meanwhile."""
        for row in range(self._layout.rows):
            slot, _, key = row_at(self._map, self._layout, row)
            if slot != REMOVED:
                yield key

    def prepare_slots(self) -> None:
        """Find out which slots its rows are in, for `claim` and `release`: milliseconds per million rows, without any
        lock that look-ups need. No row may be removed between this and the last `claim` or `release`."""
        slots = rows_of(self._map, self._layout)["slot"].copy()
        slots = slots[slots != REMOVED]
        slot_map = np.zeros(int(slots.max()) + 1 if len(slots) else 0, np.uint8)
        for at in range(0, len(slots), _PIECE):
            slot_map[slots[at : at + _PIECE]] = 1
        self._slot_map = slot_map

    @property
    def slots_end(self) -> int:
        """One more than its highest slot, after `prepare_slots`."""
        return 0 if self._slot_map is None else len(self._slot_map)

    def claim(self, taken: memoryview | bytearray, start: int, stop: int) -> int:
        """Mark the slots of its rows from `start` to `stop` in a map of one byte a slot; returns how many. Those that
        are marked already, or beyond the map, are left out."""
        assert self._slot_map is not None, "claim without prepare_slots"
        theirs, mine = np.frombuffer(taken, np.uint8)[start:stop], self._slot_map[start:stop]
        both = min(len(theirs), len(mine))
        mine[:both] &= theirs[:both] ^ 1
        mine[both:] = 0
        theirs[:both] |= mine[:both]
        return int(np.count_nonzero(mine))

    def release(self, taken: memoryview | bytearray, start: int, stop: int) -> int:
        """Unmark the slots of its rows from `start` to `stop`; returns how many."""
        assert self._slot_map is not None, "release without prepare_slots"
        theirs, mine = np.frombuffer(taken, np.uint8)[start:stop], self._slot_map[start:stop]
        both = min(len(theirs), len(mine))
        theirs[:both] &= mine[:both] ^ 1
        return int(np.count_nonzero(mine))

    def drop_unclaimed(self, limit: int) -> None:
        """Remove the rows whose slots `claim` has left out, or are not below `limit`. Takes milliseconds per million
        rows: call it without a lock."""
        assert self._slot_map is not None, "drop_unclaimed without prepare_slots"
        self._slot_map[limit:] = 0
        slots = rows_of(self._map, self._layout)["slot"]
        for at in range(0, len(slots), _PIECE):
            piece = slots[at : at + _PIECE]
            rows = np.flatnonzero(piece != REMOVED)
            lost = rows[self._slot_map[piece[rows]] == 0]
            piece[lost] = REMOVED
            self._left -= len(lost)
        self._slot_map = None

    def close(self) -> None:
        """Free the memory, for all processes that have mapped it, a few MB at a time. May be called again; the table is
        empty from then on."""
        self._left = 0
        self._layout = Layout(0, self._layout.record_bytes)
        self._words, self._buckets = _NO_BUCKETS, 1
        self._coldest, self._cursor, self._slot_map = [], 0, None
        if not self._map.closed:
            with contextlib.suppress(OSError):
                for at in range(0, self.nbytes, _FREED_AT_ONCE):
                    self._map.madvise(self._advice, at, min(_FREED_AT_ONCE, self.nbytes - at))
            self.unmap()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _search_bucket(self, key: Key, bucket: int, word: int) -> tuple[int, int, int] | None:
        """(slot, tick, where both are in the memory) of the key's row, or None."""
        record = LENGTHS[len(key)] + key
        at = word >> FILTER_WIDTH
        end = self._words[bucket + 1] >> FILTER_WIDTH
        while (at := self._search(record, at, end)) >= 0:
            if not (at - self._records) % self._row_bytes:  # else it was found across two rows
                slot, tick = _entry_at(self._map, at - ENTRY.size)
                if slot != REMOVED:
                    return slot, tick, at - ENTRY.size
            at += 1
        return None

    def _remove(self, at: int) -> None:
        _SLOT.pack_into(self._map, at, REMOVED)
        self._left -= 1

    def _row_entry(self, row: int) -> tuple[int, int]:
        """(slot, tick) of a row by its number."""
        slot, tick = _entry_at(self._map, self._entries + self._row_bytes * row)
        return slot, tick

    def _next_coldest(self) -> int | None:
        """The first row in the order of use that is still here. None also if it is not among the next ones: passing
        over millions that have been removed would take long."""
        for _ in range(_REFILLS + 1):
            while self._coldest:
                if self._row_entry(self._coldest[-1])[0] != REMOVED:
                    return self._coldest[-1]
                self._coldest.pop()
            if not self._left or self._cursor >= self._layout.rows:
                break
            self._refill()
        return None

    def _refill(self) -> None:
        """Read on in the order of use."""
        slots = rows_of(self._map, self._layout)["slot"]
        count = min(_REFILL, self._layout.rows - self._cursor)
        rows = column(self._map, self._layout.order + 4 * self._cursor, count)
        self._cursor += count
        rows = rows[rows < len(slots)]  # all are, unless another process has damaged it
        if len(rows):
            self._reached = self._row_entry(int(rows[0]))[1]
        self._coldest = rows[slots[rows] != REMOVED][::-1].tolist()

    def left(self) -> Source:
        """The rows that are left, as a part of another table."""
        return Source(rows_of(self._map, self._layout), column(self._map, self._layout.order, self._layout.rows))

    def unmap(self) -> None:
        """Give up the memory here only; other processes may have mapped it."""
        self._left = 0  # nothing is looked up in it any more
        for view in self._views:
            view.release()
        self._views = []
        self._map.close()
