"""Building a row table of new rows and of what is left in older tables: two sorts in numpy, and one copy of the keys.

It holds the interpreter lock for a few ms at a time: numpy releases it for what is large, and what does not release it
is done in pieces.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from nixl_tiers.base.chunk import Key
from nixl_tiers.memory.key_hash import KeyHash
from nixl_tiers.memory.packed_sort import sorted_with_places
from nixl_tiers.memory.row_table_format import (
    FILTER_BITS,
    FILTER_MASK,
    FILTER_WIDTH,
    REMOVED,
    Layout,
    column,
    row_at,
    row_type,
    rows_of,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Numbers = Sequence[int] | NDArray[np.integer[Any]]

_PIECE: Final = 1 << 12  # rows that are hashed or copied at once
_HIGH: Final = np.uint64(32)  # by which the upper half of a word is shifted


class Rows:
    """Rows to build a table of, in little more memory than they take there: (key, slot, tick of last use)."""

    def __init__(self) -> None:
        self._sources: list[Source] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, keys: Sequence[Key], slots: Numbers, ticks: Numbers) -> None:
        """Add rows. Among equal ticks, what is added first is the colder. Slots and ticks have 32 bits: larger ticks
        count as 2**32 - 1, and a row with a slot of 2**32 - 1 or above will be left out."""
        for at in range(0, len(keys), _PIECE):
            some = keys[at : at + _PIECE]
            lengths = np.fromiter(map(len, some), np.uint8, len(some))
            width = max(1, int(lengths.max()))
            rows = np.empty(len(some), row_type(1 + width))
            rows["slot"] = _32_bits(slots[at : at + _PIECE])
            rows["tick"] = _32_bits(ticks[at : at + _PIECE])
            rows["record"][:, 0] = lengths
            rows["record"][:, 1:] = np.array(some, f"S{width}").view(np.uint8).reshape(-1, width)
            self._sources.append(Source(rows))
        self._count += len(keys)

    def add_records(self, records: NDArray[np.uint8], slots: Numbers, ticks: Numbers) -> None:
        """As `add`. `records`: (n, width): a byte of length, the key, padding with zeros."""
        rows = np.empty(len(records), row_type(records.shape[1]))
        rows["slot"] = _32_bits(slots)
        rows["tick"] = _32_bits(ticks)
        rows["record"] = records
        self._sources.append(Source(rows))
        self._count += len(records)

    def take(self) -> list[Source]:
        """The rows as parts of a table, which are no longer kept here."""
        sources, self._sources, self._count = self._sources, [], 0
        return sources


class Source:
    """Rows that a table is built of: from `Rows`, or what is left in another table now, while others may remove more
    of it. `order` (None: as they are) names all rows, the coldest first."""

    def __init__(self, rows: NDArray[np.void], order: NDArray[np.uint32] | None = None) -> None:
        self._rows = rows
        self._left: NDArray[np.bool_] | None = None
        self._order = order
        self.ticks = rows["tick"]
        if order is not None:
            self._left = rows["slot"] != REMOVED
            self.ticks = self.ticks[self._left]
            # Of another type than its result, cumsum would hold the interpreter lock for the whole column.
            numbers = np.cumsum(self._left.astype(np.uint32), dtype=np.uint32) - np.uint32(1)
            intact = not len(order) or order.max() < len(rows)  # else another process has damaged it
            inside = order[self._left[order]] if intact else order[:0]
            self._order = numbers[inside] if len(inside) == len(self.ticks) else None
        self.count = len(self.ticks)
        self.record_bytes = rows.dtype["record"].itemsize

    def pieces(self) -> Iterator[NDArray[np.void]]:
        """Its rows; the slot of one that has been removed meanwhile says so, and `fill` leaves it out."""
        for at in range(0, len(self._rows), _PIECE):
            piece = self._rows[at : at + _PIECE]
            yield piece if self._left is None else _raw(piece)[self._left[at : at + _PIECE]].view(self._rows.dtype)

    def by_use(self, first: int) -> NDArray[np.uint32]:
        """The numbers of its rows, the coldest first, if the number of the first one is `first`."""
        order = np.arange(self.count, dtype=np.uint32) if self._order is None else self._order
        return order + np.uint32(first)


def fill(
    memory: mmap.mmap, layout: Layout, sources: Sequence[Source], key_hash: KeyHash, slots_limit: int | None
) -> list[int]:
    """Write the rows of all sources into a table's memory. Returns the rows that must go, so that each key, and below
    `slots_limit` each slot, occurs once: they are not marked as removed yet."""
    hashes = _joined(
        (key_hash.of_records(piece["record"]) for source in sources for piece in source.pieces()), np.uint64
    )
    # Here a row's number is its place in all sources, one after another; `places` says what it is in the table.
    places = _place(memory, layout, hashes)
    twice = places[_repeated(hashes)]
    del hashes
    _write_order(memory, layout, sources, places)
    _write_rows(memory, layout, sources, places)
    return _surplus(memory, layout, twice, slots_limit)


def _place(memory: mmap.mmap, layout: Layout, hashes: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """Write the words of the buckets. Returns the rows' numbers in the table."""
    in_bucket = sorted_with_places(hashes % np.uint64(layout.buckets))
    firsts = np.searchsorted(in_bucket, np.arange(layout.buckets + 1, dtype=np.uint64) << _HIGH)
    numbers = in_bucket.astype(np.uint32)
    del in_bucket
    bits = np.array((*FILTER_BITS, 0), np.uint32)[
        np.append((hashes & np.uint64(FILTER_MASK)).astype(np.uint16)[numbers], np.uint16(len(FILTER_BITS)))
    ]
    filters = np.bitwise_or.reduceat(bits, firsts[:-1])  # an empty bucket gets the bits of the next row: no harm
    words = column(memory, layout.words, layout.buckets + 1, np.uint64)
    words[:] = firsts
    words *= np.uint64(layout.row_bytes)
    words += np.uint64(layout.records)
    words <<= np.uint64(FILTER_WIDTH)
    words[:-1] |= filters ^ np.uint32((1 << FILTER_WIDTH) - 1)
    places = np.empty(layout.rows, np.uint32)
    places[numbers] = np.arange(layout.rows, dtype=np.uint32)
    return places


def _repeated(hashes: NDArray[np.uint64]) -> NDArray[np.intp]:
    """The rows whose hash another row has too: those that may have the same key."""
    ordered = np.sort(hashes)
    values = ordered[1:][ordered[1:] == ordered[:-1]]
    return np.flatnonzero(np.isin(hashes, values)) if len(values) else np.zeros(0, np.intp)


def _write_order(memory: mmap.mmap, layout: Layout, sources: Sequence[Source], places: NDArray[np.uint32]) -> None:
    ticks = _joined((source.ticks for source in sources), np.uint32)
    firsts = np.cumsum([0, *(source.count for source in sources)])
    by_use = _joined((source.by_use(first) for source, first in zip(sources, firsts, strict=False)), np.uint32)
    again = sorted_with_places(ticks[by_use].astype(np.uint64)).astype(np.uint32)
    column(memory, layout.order, layout.rows)[:] = places[by_use[again]]


def _write_rows(memory: mmap.mmap, layout: Layout, sources: Sequence[Source], places: NDArray[np.uint32]) -> None:
    rows = rows_of(memory, layout)
    at = 0
    for source in sources:
        for piece in source.pieces():
            padded = np.zeros(len(piece), rows.dtype)
            padded["slot"] = piece["slot"]
            padded["tick"] = piece["tick"]
            padded["record"][:, : source.record_bytes] = piece["record"]
            _raw(rows)[places[at : at + len(piece)]] = _raw(padded)
            at += len(piece)


def _surplus(memory: mmap.mmap, layout: Layout, twice: NDArray[np.uint32], slots_limit: int | None) -> list[int]:
    """The rows that must go, so that each key, and each slot where these are places, occurs once. `twice`: those that
    may share their key with another one."""
    slots = rows_of(memory, layout)["slot"].copy()
    order = column(memory, layout.order, layout.rows)
    gone = slots >= np.uint32(REMOVED if slots_limit is None else min(slots_limit, REMOVED))
    if len(twice):
        used = np.empty(layout.rows, np.uint32)
        used[order] = np.arange(layout.rows, dtype=np.uint32)
        newest: dict[Key, int] = {}
        for row in twice[np.argsort(used[twice])].tolist():
            if not gone[row]:
                key = row_at(memory, layout, row)[2]
                if key in newest:
                    gone[newest[key]] = True
                newest[key] = row
    if slots_limit is not None:
        rows = order[~gone[order]]  # the coldest first
        by_slot = sorted_with_places(slots[rows].astype(np.uint64))
        again = by_slot[1:] >> _HIGH == by_slot[:-1] >> _HIGH
        gone[rows[by_slot[:-1][again].astype(np.uint32)]] = True
    surplus: list[int] = np.flatnonzero(gone).tolist()
    return surplus


def _32_bits(numbers: Numbers) -> NDArray[np.uint64]:
    return np.clip(np.asarray(numbers, np.int64), 0, REMOVED).astype(np.uint64)


def _raw(rows: NDArray[np.void]) -> NDArray[np.void]:
    """The same rows as single items: copied four times as fast as field by field."""
    return rows.view(f"V{rows.dtype.itemsize}")


def _joined(parts: Iterable[NDArray[Any]], dtype: type[Any]) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *parts])
