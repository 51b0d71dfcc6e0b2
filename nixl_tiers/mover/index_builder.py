"""The rows that a tier holds when it is opened, as the coordinator gets them: a few one by one, all others in cold
indexes.

One by one, four million rows would cost the coordinator's interpreter half a minute. In a cold index
(memory/cold_index.py) they cost it very little, but then only the mover knows their keys: `keys` looks them up.
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

SINGLE_ROWS: Final = 4096
"""How many rows are sent one by one: most tiers of small stores hold fewer."""
_MAX_UINT32: Final = 0xFFFFFFFF  # an index's slots and ticks have 32 bits


@dataclass(frozen=True)
class BuiltIndex:
    """A cold index to be sent to the coordinator: the caller owns `fd`, and closes it. `newest`: its highest tick."""

    fd: int
    newest: int
    left_out: list[tuple[int, Key]]  # (slot, key) of rows without a free slot in it, and of duplicates


class IndexBuilder:
    """The first listing of a tier with `slots` slots, oldest row first. `named`: see Configure."""

    def __init__(self, slots: int, *, named: bool) -> None:
        self._slots = slots
        self._named = named
        self._single = 0
        self._pending = _Batch()
        self._built: list[tuple[SharedColdIndex, NDArray[np.uint32], _Keys]] = []
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="cold-index")
        self._building: Future[BuiltIndex] | None = None

    @property
    def indexes(self) -> int:
        """How many cold indexes there are, including one that is being built."""
        return len(self._built) + self.building

    @property
    def pending(self) -> int:
        """How many rows are collected for the next cold index."""
        return len(self._pending.keys)

    @property
    def building(self) -> bool:
        return self._building is not None

    def add(self, entries: list[Entry]) -> list[Entry]:
        """The next rows of the listing. Returns those to be sent one by one, now."""
        if self._single < SINGLE_ROWS:
            self._single += len(entries)
            return entries
        gone = [entry for entry in entries if entry.slot < 0]
        self._pending.add([entry for entry in entries if entry.slot >= 0] if gone else entries)
        return gone

    def build(self) -> None:
        """Start to build a cold index of the pending rows, on a thread; see `built`."""
        batch, self._pending = self._pending, _Batch()
        self._building = self._worker.submit(self._build, batch)

    def built(self) -> BuiltIndex | None:
        """The cold index, once; None while it is being built. Raises ColdIndexError or MemoryError."""
        if self._building is None or not self._building.done():
            return None
        future, self._building = self._building, None
        return future.result()

    def keys(self, rows: Sequence[tuple[int, bytes]]) -> list[tuple[int, Key]]:
        """(slot, key) for (slot, digest) of rows in the cold indexes; rows that are in none are left out."""
        return [(slot, key) for slot, digest in rows if (key := self._key_of(digest)) is not None]

    def close(self) -> None:
        """Release everything; a cold index that is still being built is closed when it is done."""
        if self._building is not None:
            self._building.add_done_callback(_discard)
            self._building = None
        self._worker.shutdown(wait=False)
        self._pending = _Batch()
        built, self._built = self._built, []
        for index, _, _ in built:
            index.close()

    def _build(self, batch: _Batch) -> BuiltIndex:
        builder = ColdIndexBuilder()
        for digests, slots, ticks in batch.columns:
            builder.add_many(digests, slots, ticks)
        fd = builder.build(self._slots, batch.keys.column() if self._named else None)
        left_out = [(batch.slot_of(number), batch.keys[number]) for number in builder.left_out.tolist()]
        if not self._named:
            self._built.append((SharedColdIndex.attach(os.dup(fd)), builder.order, batch.keys))
        return BuiltIndex(fd, batch.newest, left_out)

    def _key_of(self, digest: bytes) -> Key | None:
        for index, order, keys in self._built:
            row = index.built(digest)
            if row >= 0:
                key = keys[int(order[row])]
                return key if key_digest(key) == digest else None
        return None


class _Batch:
    """Rows as they are collected: a few arrays per batch of the listing."""

    def __init__(self) -> None:
        self.columns: list[tuple[NDArray[np.uint8], NDArray[np.uint32], NDArray[np.uint32]]] = []
        self.keys = _Keys()
        self.newest = 0

    def add(self, entries: list[Entry]) -> None:
        if not entries:
            return
        keys = [entry.key for entry in entries]
        slots = np.array([min(entry.slot, _MAX_UINT32) for entry in entries], np.uint32)
        ticks = np.array([min(max(entry.tick, 0), _MAX_UINT32) for entry in entries], np.uint32)
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
        """As ColdIndexBuilder.build takes them: uint8 (n, 1 + longest)."""
        longest = max((max(lengths) for _, lengths in self._parts), default=0)
        raw = b"".join(bytes((len(key),)) + key.ljust(longest, b"\0") for key in self)
        return np.frombuffer(raw, np.uint8).reshape(-1, 1 + longest)


def _discard(future: Future[BuiltIndex]) -> None:
    if future.exception() is None:
        os.close(future.result().fd)
