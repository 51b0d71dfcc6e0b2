"""The rows that a tier holds when it is opened, on their way to the engine: a few one by one, all others in tables.

One by one, four million rows would cost the engine's interpreter half a minute. In a table (memory/table.py) they
cost it next to nothing, but then only this side knows their keys: `keys` finds them again.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from nixl_tiers.chunk import Key
from nixl_tiers.memory.cold_index import ColdIndexBuilder, SharedColdIndex, key_digest, key_digests
from nixl_tiers.tiers.base import Entry

if TYPE_CHECKING:
    from numpy.typing import NDArray

TOLD_ROWS: Final = 4096
"""So many rows are told one by one: most tiers of small engines hold fewer."""
_MOST: Final = 0xFFFFFFFF  # a table's slots and ticks have 32 bits


@dataclass(frozen=True)
class PublishedIndex:
    """A table for the engine: `fd` is the caller's to send and to close. `newest`: the highest tick in it."""

    fd: int
    newest: int
    left_out: list[tuple[int, Key]]  # (slot, key) of rows that it has no room for, or that are there twice


class IndexBuilder:
    """What one opening of a tier with `slots` slots finds, oldest first. `named`: tables must tell keys."""

    def __init__(self, slots: int, *, named: bool) -> None:
        self._slots = slots
        self._named = named
        self._told = 0
        self._batch = _Batch()
        self._kept: list[tuple[SharedColdIndex, NDArray[np.uint32], _Keys]] = []
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="table")
        self._building: Future[PublishedIndex] | None = None

    @property
    def tables(self) -> int:
        """How many tables there are, one that is being built included."""
        return len(self._kept) + self.building

    @property
    def collected(self) -> int:
        """How many rows wait for the next table."""
        return len(self._batch.keys)

    @property
    def building(self) -> bool:
        return self._building is not None

    def take(self, entries: list[Entry]) -> list[Entry]:
        """The next rows of the listing. Returns those to be told one by one, now."""
        if self._told < TOLD_ROWS:
            self._told += len(entries)
            return entries
        gone = [entry for entry in entries if entry.slot < 0]
        self._batch.add([entry for entry in entries if entry.slot >= 0] if gone else entries)
        return gone

    def build(self) -> None:
        """Begin to make a table of what was collected; see `built`."""
        batch, self._batch = self._batch, _Batch()
        self._building = self._worker.submit(self._build, batch)

    def built(self) -> PublishedIndex | None:
        """The table, once; None while it is being built. Raises TableError, and MemoryError."""
        if self._building is None or not self._building.done():
            return None
        future, self._building = self._building, None
        return future.result()

    def keys(self, dropped: Sequence[tuple[int, bytes]]) -> list[tuple[int, Key]]:
        """(slot, key) for (slot, digest), without those that no table of this opening told of."""
        return [(slot, key) for slot, digest in dropped if (key := self._key_of(digest)) is not None]

    def close(self) -> None:
        """Let go of everything; a table that is still being built is closed when it is done."""
        if self._building is not None:
            self._building.add_done_callback(_discard)
            self._building = None
        self._worker.shutdown(wait=False)
        self._batch = _Batch()
        kept, self._kept = self._kept, []
        for table, _, _ in kept:
            table.close()

    def _build(self, batch: _Batch) -> PublishedIndex:
        builder = ColdIndexBuilder()
        for digests, slots, ticks in batch.columns:
            builder.add_many(digests, slots, ticks)
        fd = builder.build(self._slots, batch.keys.column() if self._named else None)
        left_out = [(batch.slot_of(number), batch.keys[number]) for number in builder.left_out.tolist()]
        if not self._named:
            self._kept.append((SharedColdIndex.attach(os.dup(fd)), builder.order, batch.keys))
        return PublishedIndex(fd, batch.newest, left_out)

    def _key_of(self, digest: bytes) -> Key | None:
        for table, order, keys in self._kept:
            row = table.built(digest)
            if row >= 0:
                key = keys[int(order[row])]
                return key if key_digest(key) == digest else None
        return None


class _Batch:
    """Rows as they are collected: a few arrays for every batch of a listing."""

    def __init__(self) -> None:
        self.columns: list[tuple[NDArray[np.uint8], NDArray[np.uint32], NDArray[np.uint32]]] = []
        self.keys = _Keys()
        self.newest = 0

    def add(self, entries: list[Entry]) -> None:
        if not entries:
            return
        keys = [entry.key for entry in entries]
        slots = np.array([min(entry.slot, _MOST) for entry in entries], np.uint32)
        ticks = np.array([min(max(entry.tick, 0), _MOST) for entry in entries], np.uint32)
        self.columns.append((key_digests(keys), slots, ticks))
        self.keys.add(keys)
        self.newest = max(self.newest, *(entry.tick for entry in entries))

    def slot_of(self, number: int) -> int:
        for _, slots, _ in self.columns:
            if number < len(slots):
                return int(slots[number])
            number -= len(slots)
        raise IndexError(number)


class _Keys:
    """Keys by number, in little more memory than they have bytes."""

    def __init__(self) -> None:
        self._parts: list[tuple[bytes, bytes]] = []  # the keys of a batch one after the other, and their lengths
        self._firsts: list[int] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Key:
        part = bisect_right(self._firsts, number) - 1
        raw, lengths = self._parts[part]
        place = number - self._firsts[part]
        at = sum(lengths[:place])
        return raw[at : at + lengths[place]]

    def __iter__(self) -> Iterator[Key]:
        for raw, lengths in self._parts:
            at = 0
            for length in lengths:
                yield raw[at : at + length]
                at += length

    def add(self, keys: Sequence[Key]) -> None:
        self._firsts.append(self._count)
        self._parts.append((b"".join(keys), bytes(map(len, keys))))
        self._count += len(keys)

    def column(self) -> NDArray[np.uint8]:
        """As TableBuilder.build takes them: uint8 (n, 1 + longest)."""
        longest = max((max(lengths) for _, lengths in self._parts), default=0)
        raw = b"".join(bytes((len(key),)) + key.ljust(longest, b"\0") for key in self)
        return np.frombuffer(raw, np.uint8).reshape(-1, 1 + longest)


def _discard(future: Future[PublishedIndex]) -> None:
    if future.exception() is None:
        os.close(future.result().fd)
