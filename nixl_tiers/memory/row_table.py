"""Row tables: rows of a storage tier (key, slot, tick of last use) in a packed table, 50 bytes each for keys of 36.

As Python objects a row costs over 300 bytes. Here it can be that small because a table only ever shrinks: rows are
found, removed, and taken out coldest first. What is new goes into a dict, and from time to time into another table that
is built of it and of older ones. So rows are packed, sorted by hash, with a list of where each bucket starts instead of
empty places, and another list gives them in order of use: exact LRU, without links. docs/internals/row-tables.md has
the layout and the measurements.

A table lies in memory of this process, or in a memfd that another process maps.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
from xxhash import xxh3_64_intdigest

from nixl_tiers.chunk import PAGE, Key, align
from nixl_tiers.memory.key_hash import KeyHash
from nixl_tiers.memory.memfd import CHECK, SIZE_SEALS, header_of, memfd

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = Sequence[int] | NDArray[np.uint32]

_MAGIC: Final = b"nixlrows"
_VERSION: Final = 1
_HEADER: Final = struct.Struct("<8sQQQQQQQ")  # magic, version, rows, removed, log2 of buckets, record bytes, hash
_REMOVED: Final = 0xFFFFFFFF  # the slot of a row that has been removed
_MAX_UINT32: Final = 0xFFFFFFFF
_MAX_RECORD: Final = 256
_ROWS_A_BUCKET: Final = 4  # at most, on average
_REFILL: Final = 256
_PIECE: Final = 1 << 15  # rows that are copied at once: what does not release the interpreter lock ends within 5 ms
_KEYS_AT_ONCE: Final = 4096
_FREED_AT_ONCE: Final = 4 << 20  # bytes: unmapping a large table in one go would take as long as building it


class RowTableError(RuntimeError):
    """The table cannot be built, or the descriptor holds none. One sentence that says why."""


class Rows:
    """Rows to build a table of, in little more memory than they take there: (key, slot, tick of last use)."""

    def __init__(self) -> None:
        self._records: list[NDArray[np.uint8]] = []
        self._slots: list[NDArray[np.uint32]] = []
        self._ticks: list[NDArray[np.uint32]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, keys: Sequence[Key], slots: Numbers, ticks: Numbers) -> None:
        """Add rows. Among equal ticks, what is added first is the colder. Slots and ticks have 32 bits: larger ticks
        count as 2**32 - 1, and a row with a slot of 2**32 - 1 or above will be left out."""
        for at in range(0, len(keys), _KEYS_AT_ONCE):
            some = keys[at : at + _KEYS_AT_ONCE]
            lengths = np.fromiter(map(len, some), np.uint8, len(some))
            width = max(1, int(lengths.max()))
            records = np.empty((len(some), 1 + width), np.uint8)
            records[:, 0] = lengths
            records[:, 1:] = np.array(some, f"S{width}").view(np.uint8).reshape(-1, width)
            self._records.append(records)
            self._slots.append(_uint32(slots[at : at + _KEYS_AT_ONCE]))
            self._ticks.append(_uint32(ticks[at : at + _KEYS_AT_ONCE]))
        self._count += len(keys)

    def take(self) -> Iterator[_Source]:
        """The rows as parts of a table, which are no longer kept here."""
        parts = list(zip(self._records, self._slots, self._ticks, strict=True))
        self._records, self._slots, self._ticks, self._count = [], [], [], 0
        return (_Source(records, slots, ticks, None) for records, slots, ticks in parts)


class _Source:
    """Rows that a table is built of, and which of them are left: from `Rows`, or from another table."""

    def __init__(
        self,
        records: NDArray[np.uint8],
        slots: NDArray[np.uint32],
        ticks: NDArray[np.uint32],
        order: NDArray[np.uint32] | None,
    ) -> None:
        self.records = records
        self.here = np.ones(len(slots), np.bool_) if order is None else slots != _REMOVED
        self.slots, self.ticks = slots[self.here], ticks[self.here]
        self.count = len(self.slots)
        if order is None:
            self.order = np.arange(self.count, dtype=np.uint32)
        else:
            numbers = np.cumsum(self.here, dtype=np.uint32) - np.uint32(1)
            self.order = numbers[order[self.here[order]]]

    def pieces(self) -> Iterator[NDArray[np.uint8]]:
        for at in range(0, len(self.records), _PIECE):
            yield self.records[at : at + _PIECE][self.here[at : at + _PIECE]]


class _Layout:
    """Where the parts are, in bytes from the start: a function of the header, so that it can be checked."""

    def __init__(self, rows: int, bucket_bits: int, record_bytes: int) -> None:
        self.rows, self.bucket_bits, self.record_bytes = rows, bucket_bits, record_bytes
        self.slots = PAGE  # uint32 (rows,), in order of hash, as all columns
        self.ticks = self.slots + 4 * rows  # uint32 (rows,)
        self.order = self.ticks + 4 * rows  # uint32 (rows,): which row is the coldest, the next, ...
        self.starts = self.order + 4 * rows  # uint32 (buckets + 1,): the first row of each bucket, then `rows`
        self.records = self.starts + 4 * ((1 << bucket_bits) + 1)  # uint8 (rows, record_bytes): length, key, padding
        self.total = align(self.records + record_bytes * rows)


class RowTable:
    """Find, remove, take out the coldest. Nothing is ever added: `build` makes another table of it and of new rows.

    One thread at a time, but that another one may `build` of it: each row that is removed meanwhile must be removed
    from the new table too. What is mapped from another process is checked only as far as memory safety needs it: a row
    that is not what its entry says fails verification when it is loaded.
    """

    def __init__(self, memory: mmap.mmap, layout: _Layout, key_hash: KeyHash, removed: int, *, shared: bool) -> None:
        """Not for callers: use `build` or `attach`."""
        self._advice = mmap.MADV_REMOVE if shared else mmap.MADV_DONTNEED
        self.nbytes = layout.total
        self.key_hash = key_hash
        self._map = memory
        self._search = memory.find
        self._layout = layout
        self._views: list[memoryview] = []
        self._slots = self._view(layout.slots, layout.rows)
        self._ticks = self._view(layout.ticks, layout.rows)
        self._starts = self._view(layout.starts, (1 << layout.bucket_bits) + 1)
        self._shift = 32 - layout.bucket_bits
        self._records = layout.records
        self._record_bytes = layout.record_bytes
        self._left = layout.rows - removed
        self._coldest: list[int] = []  # the next rows in order of use, the coldest last
        self._cursor = 0  # how much of that order has been read
        self._slot_map: NDArray[np.uint8] | None = None

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
        count = sum(source.count for source in sources)
        if count >= _REMOVED:
            raise RowTableError(f"a table has room for {_REMOVED - 1} rows, not for {count}")
        bucket_bits = max(1, (-(-count // _ROWS_A_BUCKET) - 1).bit_length())
        record_bytes = max((source.records.shape[1] for source in sources), default=2)
        layout = _Layout(count, bucket_bits, record_bytes)
        fd, memory = _allocate(layout.total, shared=shared)
        try:
            alike = _fill(memory, layout, sources, key_hash)
            dropped = _doubles(memory, layout, alike, slots_limit)
            left_out = [_row_at(memory, layout, row) for row in dropped.tolist()]
            _column(memory, layout.slots, count)[dropped] = _REMOVED
            hashing = key_hash.prime, key_hash.multiplier
            header = _HEADER.pack(_MAGIC, _VERSION, count, len(dropped), bucket_bits, record_bytes, *hashing)
            memory[: _HEADER.size + CHECK.size] = header + CHECK.pack(xxh3_64_intdigest(header))
            if shared:
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_SEALS | fcntl.F_SEAL_SEAL)
        except BaseException:
            if shared:
                os.close(fd)
            raise
        return cls(memory, layout, key_hash, len(dropped), shared=shared), fd, left_out

    @classmethod
    def attach(cls, fd: int) -> RowTable:
        """Map the table behind `fd`, and close `fd`. Takes the same time for any number of rows.

        RowTableError unless it is a memfd whose size is sealed and is what its header says: a file that could shrink
        would turn any access into a SIGBUS.
        """
        try:
            layout, key_hash, removed = _checked(fd)
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
        row = self._find(key)
        return None if row < 0 else (self._slots[row], self._ticks[row])

    def remove(self, key: Key) -> tuple[int, int] | None:
        """As find, and the row is removed: the caller keeps its slot, or frees it."""
        row = self._find(key)
        return None if row < 0 else (self._remove(row), self._ticks[row])

    def coldest_tick(self) -> int | None:
        """When the least recently used row was used; None if the table is empty."""
        row = self._next_coldest()
        return None if row is None else self._ticks[row]

    def coldest(self, count: int, before: int | None = None) -> list[tuple[Key, int]]:
        """Remove up to `count` rows, the least recently used first: (key, slot). With `before`: only those that were
        last used at that tick or earlier."""
        victims: list[tuple[Key, int]] = []
        while len(victims) < count and (row := self._next_coldest()) is not None:
            if before is not None and self._ticks[row] > before:
                break
            slot, key = _row_at(self._map, self._layout, row)
            self._remove(row)
            victims.append((key, slot))
        return victims

    def keys(self) -> Iterator[Key]:
        """The keys of its rows, in no particular order. Nothing may be removed meanwhile."""
        for row in range(self._layout.rows):
            if self._slots[row] != _REMOVED:
                yield _row_at(self._map, self._layout, row)[1]

    def prepare_slots(self) -> None:
        """Find out which slots its rows are in, for `claim` and `release`: milliseconds per million rows, without any
        lock that look-ups need. No row may be removed between this and the last `claim` or `release`."""
        slots = self._column(self._layout.slots)
        slots = slots[slots != _REMOVED]
        slot_map = np.zeros(int(slots.max()) + 1 if len(slots) else 0, np.uint8)
        for at in range(0, len(slots), _PIECE):
            slot_map[slots[at : at + _PIECE]] = 1
        self._slot_map = slot_map

    @property
    def slots_end(self) -> int:
        """One more than its highest slot, after `prepare_slots`."""
        return 0 if self._slot_map is None else len(self._slot_map)

    def claim(self, taken: bytearray, start: int, stop: int) -> int:
        """Mark the slots of its rows from `start` to `stop` in a map of one byte a slot; returns how many. Those that
        are marked already, or beyond the map, are left out."""
        assert self._slot_map is not None, "claim without prepare_slots"
        theirs, mine = np.frombuffer(taken, np.uint8)[start:stop], self._slot_map[start:stop]
        both = min(len(theirs), len(mine))
        mine[:both] &= theirs[:both] ^ 1
        mine[both:] = 0
        theirs[:both] |= mine[:both]
        return int(np.count_nonzero(mine))

    def release(self, taken: bytearray, start: int, stop: int) -> int:
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
        slots = self._column(self._layout.slots)
        for at in range(0, len(slots), _PIECE):
            piece = slots[at : at + _PIECE]
            rows = np.flatnonzero(piece != _REMOVED)
            lost = rows[self._slot_map[piece[rows]] == 0]
            piece[lost] = _REMOVED
            self._left -= len(lost)
        self._slot_map = None

    def close(self) -> None:
        """Free the memory, for all processes that have mapped it, a few MB at a time. May be called again; the table is
        empty from then on."""
        self._left = 0
        self._layout = _Layout(0, self._layout.bucket_bits, self._layout.record_bytes)
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

    def _find(self, key: Key) -> int:
        """The number of the key's row, -1 if it is not here (any more)."""
        if not self._left:
            return -1
        last, (record, hashed) = self.key_hash.last
        if last is not key:
            record, hashed = self.key_hash.of_key(key)
        bucket = hashed >> self._shift
        width, base, starts = self._record_bytes, self._records, self._starts
        end = base + width * starts[bucket + 1]
        at = self._search(record, base + width * starts[bucket], end)
        while at >= 0:
            row, rest = divmod(at - base, width)
            if not rest and self._slots[row] != _REMOVED:
                return row
            at = self._search(record, at + 1, end)  # it was found across two records, or was removed
        return -1

    def _remove(self, row: int) -> int:
        slot = self._slots[row]
        self._slots[row] = _REMOVED
        self._left -= 1
        return slot

    def _next_coldest(self) -> int | None:
        while self._left:
            while self._coldest:
                if self._slots[self._coldest[-1]] != _REMOVED:
                    return self._coldest[-1]
                self._coldest.pop()
            if self._cursor >= self._layout.rows:
                return None
            self._refill()
        return None

    def _refill(self) -> None:
        """Read on in the order of use, up to a row that is still here."""
        slots = self._column(self._layout.slots)
        count = _REFILL
        while not self._coldest and self._cursor < self._layout.rows:
            count = min(count, self._layout.rows - self._cursor)
            rows = _column(self._map, self._layout.order + 4 * self._cursor, count)
            self._cursor += count
            self._coldest = rows[slots[rows] != _REMOVED][::-1].tolist()
            count = min(2 * count, _PIECE)  # most of this part has been removed

    def left(self) -> _Source:
        """The rows that are left, as a part of another table."""
        rows, width = self._layout.rows, self._layout.record_bytes
        records = _column(self._map, self._layout.records, rows * width, np.uint8).reshape(rows, width)
        order = self._column(self._layout.order)
        return _Source(records, self._column(self._layout.slots), self._column(self._layout.ticks), order)

    def _column(self, at: int) -> NDArray[np.uint32]:
        return _column(self._map, at, self._layout.rows)

    def _view(self, at: int, count: int) -> memoryview:
        whole = memoryview(self._map)
        part = whole[at : at + 4 * count]
        view = part.cast("I")
        self._views += [view, part, whole]
        return view

    def unmap(self) -> None:
        """Give up the memory here only; other processes may have mapped it."""
        for view in self._views:
            view.release()
        self._views = []
        self._map.close()


def _fill(memory: mmap.mmap, layout: _Layout, sources: Sequence[_Source], key_hash: KeyHash) -> NDArray[np.intp]:
    """Write the rows of all sources in order of hash; returns those whose hash is that of the row after them. A row's
    number is its place in all sources, one after another."""
    hashes = _joined((key_hash.of_records(piece) for source in sources for piece in source.pieces()), np.uint32)
    by_hash = np.argsort(hashes, kind="stable")
    places = np.empty(layout.rows, np.uint32)
    places[by_hash] = np.arange(layout.rows, dtype=np.uint32)
    starts = _column(memory, layout.starts, (1 << layout.bucket_bits) + 1)
    firsts = np.arange(1 << layout.bucket_bits, dtype=np.uint64) << np.uint64(32 - layout.bucket_bits)
    hashes = hashes[by_hash]
    starts[:-1] = np.searchsorted(hashes, firsts.astype(np.uint32))
    starts[-1] = layout.rows
    alike = np.flatnonzero(hashes[1:] == hashes[:-1])
    del hashes

    _column(memory, layout.slots, layout.rows)[:] = _joined((source.slots for source in sources), np.uint32)[by_hash]
    ticks = _joined((source.ticks for source in sources), np.uint32)
    _column(memory, layout.ticks, layout.rows)[:] = ticks[by_hash]
    del by_hash
    firsts_of = np.cumsum([0, *(source.count for source in sources)], dtype=np.uint32)
    by_use = _joined((source.order + first for source, first in zip(sources, firsts_of, strict=False)), np.uint32)
    by_use = by_use[np.argsort(ticks[by_use], kind="stable")]
    _column(memory, layout.order, layout.rows)[:] = places[by_use]
    del ticks, by_use

    width = layout.record_bytes
    records = _column(memory, layout.records, layout.rows * width, np.uint8).reshape(layout.rows, width)
    at = 0
    for source in sources:
        for piece in source.pieces():
            records[places[at : at + len(piece)], : piece.shape[1]] = piece
            at += len(piece)
    return alike


def _doubles(memory: mmap.mmap, layout: _Layout, alike: NDArray[np.intp], slots_limit: int | None) -> NDArray[np.intp]:
    """The rows that must go, so that each key, and each slot where these are places, occurs once. `alike`: those whose
    hash is that of the row after them."""
    slots = _column(memory, layout.slots, layout.rows)
    order = _column(memory, layout.order, layout.rows)
    gone = slots >= np.uint32(_REMOVED if slots_limit is None else min(slots_limit, _REMOVED))
    if len(alike):
        used = np.empty(layout.rows, np.uint32)
        used[order] = np.arange(layout.rows, dtype=np.uint32)
        newest: dict[Key, int] = {}
        for row in _runs(alike):
            if row < 0:
                newest = {}
            elif not gone[row]:
                key = _row_at(memory, layout, row)[1]
                other = newest.get(key, row)
                newest[key] = row if used[row] > used[other] else other
                gone[row] = newest[key] != row
                gone[other] = newest[key] != other
    if slots_limit is not None:
        rows = order[~gone[order]]  # the coldest first
        by_slot = rows[np.argsort(slots[rows], kind="stable")]
        taken = slots[by_slot]
        gone[by_slot[:-1][taken[1:] == taken[:-1]]] = True
    return np.flatnonzero(gone)


def _runs(alike: NDArray[np.intp]) -> Iterator[int]:
    """The rows of each run of one hash, with -1 before each run."""
    last = -1
    for row in alike.tolist():
        if row != last:
            yield -1
            yield row
        last = row + 1
        yield last


def _row_at(memory: mmap.mmap, layout: _Layout, row: int) -> tuple[int, Key]:
    """(slot, key) of a row by its number."""
    at = layout.records + layout.record_bytes * row
    slot = int.from_bytes(memory[layout.slots + 4 * row : layout.slots + 4 * row + 4], "little")
    return slot, memory[at + 1 : at + 1 + min(memory[at], layout.record_bytes - 1)]


def _uint32(numbers: Numbers) -> NDArray[np.uint32]:
    if isinstance(numbers, np.ndarray):
        return numbers
    return np.fromiter((min(max(number, 0), _MAX_UINT32) for number in numbers), np.uint32, len(numbers))


def _joined(parts: Iterable[NDArray[Any]], dtype: type[Any]) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *parts])


def _column(of: mmap.mmap, at: int, count: int, dtype: type[Any] = np.uint32) -> NDArray[Any]:
    return np.frombuffer(of, dtype, count, at)


def _allocate(nbytes: int, *, shared: bool) -> tuple[int, mmap.mmap]:
    """Zeroed memory, and its descriptor if it is to be `shared`, else -1."""
    try:
        if not shared:
            return -1, mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        fd = memfd("nixl_tiers_rows")
        try:
            os.posix_fallocate(fd, 0, nbytes)  # fail here: a page that cannot be allocated later would be a SIGBUS
            return fd, mmap.mmap(fd, nbytes)
        except OSError:
            os.close(fd)
            raise
    except OSError as error:
        raise RowTableError(f"the kernel gives no {nbytes} bytes for a row table: {error.strerror}") from error


def _checked(fd: int) -> tuple[_Layout, KeyHash, int]:
    """Layout, hash and number of removed rows of the table behind `fd`. RowTableError names what is wrong with it."""
    try:
        fields = header_of(fd, _HEADER, _MAGIC, _VERSION, "row table")
        _, _, rows, removed, bucket_bits, record_bytes, prime, multiplier = fields
        key_hash = KeyHash.of(prime, multiplier)
    except ValueError as error:
        raise RowTableError(str(error)) from error
    size = os.fstat(fd).st_size
    layout = _Layout(rows, bucket_bits, record_bytes)
    sound = 1 <= bucket_bits <= 30 and 2 <= record_bytes <= _MAX_RECORD and removed <= rows < _REMOVED
    if not sound or size != layout.total:
        raise RowTableError(f"the table behind descriptor {fd} has {size} bytes, which is not what its header says")
    return layout, key_hash, removed
