"""A storage tier in plain memory: for tests, and the shortest tier that keeps the whole contract.

In a configuration: ``{"type": "nixl_tiers.testing.config:MemoryConfig", "capacity": "64MiB"}``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from nixl_tiers.base.chunk import Geometry, Key, Outcome
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.seal import Sealer, Verdict
from nixl_tiers.testing.config import MemoryConfig
from nixl_tiers.tiers.base import MAX_ENTRIES, Entry, FinishedBatch, Move, StorageTier, TierRefused, seal_row


@dataclass
class StoredRow:
    """What a slot holds."""

    key: Key
    tick: int
    row: bytearray


@dataclass
class MemoryMedium:
    """What outlives a MemoryTier: pass it to the next one, which then finds the rows of the first."""

    namespaces: dict[bytes, dict[int, StoredRow]] = field(default_factory=dict)  # slot -> row, the oldest opened first

    @property
    def used_bytes(self) -> int:
        return sum(len(stored.row) for rows in self.namespaces.values() for stored in rows.values())


class MemoryTier(StorageTier):
    """Rows in dictionaries, `capacity` bytes of them over all namespaces. Every move has ended before the next poll."""

    def __init__(
        self, config: MemoryConfig, geometry: Geometry, region: HostRegion, medium: MemoryMedium | None = None
    ) -> None:
        self._capacity_bytes = config.capacity
        self._geometry = geometry
        self._region = region
        self._medium = medium or MemoryMedium()
        self._rows: dict[int, StoredRow] = {}
        self._slots = 0
        self._sealer: Sealer | None = None
        self._last_id = 0
        self._ended: list[FinishedBatch] = []

    def open(self, namespace: bytes, epoch: int) -> int:
        slots = self._slots = self._capacity_bytes // self._geometry.row_bytes
        if slots < 1:
            raise TierRefused(f"capacity: {self._capacity_bytes} bytes hold no row of {self._geometry.row_bytes} bytes")
        self._sealer = Sealer(self._geometry, namespace, epoch)
        self._rows = self._medium.namespaces.pop(namespace, {})
        self._medium.namespaces[namespace] = self._rows  # last: it is the newest now
        for slot in [slot for slot in self._rows if slot >= slots]:  # the capacity may be smaller than last time
            del self._rows[slot]
        self._make_room(0)
        return slots

    def list_rows(self) -> Iterator[list[Entry]]:
        entries = sorted((Entry(slot, s.key, s.tick) for slot, s in self._rows.items()), key=lambda entry: entry.tick)
        for start in range(0, len(entries), MAX_ENTRIES):
            yield entries[start : start + MAX_ENTRIES]

    def store(self, moves: Sequence[Move]) -> int:
        return self._end([self._store(move) for move in moves])

    def load(self, moves: Sequence[Move]) -> int:
        return self._end([self._load(move) for move in moves])

    def poll(self) -> list[FinishedBatch]:
        ended, self._ended = self._ended, []
        return ended

    def delete(self, entries: Sequence[tuple[int, bytes]]) -> None:
        for slot, key in entries:
            stored = self._rows.get(slot)
            if stored is not None and stored.key == key:  # the slot may have gone to another key by now
                del self._rows[slot]

    def touch(self, slots: Sequence[int], ticks: Sequence[int]) -> None:
        for slot, tick in zip(slots, ticks, strict=True):
            if slot in self._rows:
                self._rows[slot].tick = tick

    @property
    def busy(self) -> bool:
        return bool(self._ended)

    @property
    def used_bytes(self) -> int:
        return self._medium.used_bytes

    def close(self) -> None:
        self._sealer = None

    def _store(self, move: Move) -> Outcome:
        if not 0 <= move.slot < self._slots:
            return Outcome.NO_SPACE
        self._rows.pop(move.slot, None)
        self._make_room(self._geometry.row_bytes)
        row = self._region.rows_view[move.row]
        if move.seal:
            seal_row(self._open_sealer, self._region, move, time.time())
        self._rows[move.slot] = StoredRow(move.key, move.tick, bytearray(row.data))
        return Outcome.OK

    def _load(self, move: Move) -> Outcome:
        stored = self._rows.get(move.slot)
        if stored is None:
            return Outcome.MISSING
        # Only the seal proves that these are the right bytes: neither their length nor the key stored beside them does.
        row = np.frombuffer(stored.row, np.uint8)
        if self._open_sealer.verify(row, move.key) is not Verdict.OK:
            return Outcome.CORRUPT
        self._region.rows_view[move.row] = row
        return Outcome.OK

    @property
    def _open_sealer(self) -> Sealer:
        if self._sealer is None:
            raise RuntimeError("the tier is not open")
        return self._sealer

    def _make_room(self, need_bytes: int) -> None:
        """Delete namespaces that are not served, the least recently opened first. The served one keeps to its slots."""
        namespaces = self._medium.namespaces
        while len(namespaces) > 1 and self._medium.used_bytes + need_bytes > self._capacity_bytes:
            del namespaces[next(iter(namespaces))]

    def _end(self, outcomes: list[Outcome]) -> int:
        self._last_id += 1
        self._ended.append(FinishedBatch(self._last_id, outcomes))
        return self._last_id
