"""The rows that a tier holds when it is opened, as the coordinator gets them: a few one by one, all others in row
tables.

One by one, four million rows would cost the coordinator's interpreter half a minute. In a table (memory/row_table.py)
they cost it very little.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from nixl_tiers.base.chunk import Key
from nixl_tiers.memory.key_hash import KeyHash
from nixl_tiers.memory.row_table import Rows, RowTable
from nixl_tiers.tiers.base import Entry, PackedEntries

SINGLE_ROWS: Final = 4096
"""How many rows are sent one by one: most tiers of small stores hold fewer."""

_PACKED_BATCHES: Final = 16  # that are joined: a part of a table should not be small


@dataclass(frozen=True)
class BuiltTable:
    """A row table to be sent to the coordinator: the caller owns `fd`, and closes it. `newest`: its highest tick."""

    fd: int
    newest: int
    left_out: list[tuple[int, Key]]  # (slot, key) of rows without a free slot in it, and of duplicates


class IndexBuilder:
    """The first listing of a tier, oldest row first. `slots`: how many it has, if they are places on the medium."""

    def __init__(self, key_hash: KeyHash, slots: int | None) -> None:
        self._key_hash = key_hash
        self._slots = slots
        self._single = 0
        self._pending = Rows()
        self._packed: list[PackedEntries] = []  # the last of the pending rows
        self._newest = 0
        self._built = 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="row-table")
        self._building: Future[BuiltTable] | None = None

    @property
    def tables(self) -> int:
        """How many tables there are, including one that is being built."""
        return self._built + self.building

    @property
    def pending(self) -> int:
        """How many rows are collected for the next table."""
        return len(self._pending) + sum(map(len, self._packed))

    @property
    def building(self) -> bool:
        return self._building is not None

    def add(self, entries: Sequence[Entry]) -> list[Entry]:
        """The next rows of the listing. Returns those to be sent one by one, now."""
        if self._single < SINGLE_ROWS:
            self._single += len(entries)
            return list(entries)
        if isinstance(entries, PackedEntries):
            self._packed.append(entries)
            if len(self._packed) == _PACKED_BATCHES:
                self._join_packed()
            return []
        self._join_packed()
        gone = [entry for entry in entries if entry.slot < 0]
        held = [entry for entry in entries if entry.slot >= 0] if gone else entries
        ticks = [entry.tick for entry in held]
        self._pending.add([entry.key for entry in held], [entry.slot for entry in held], ticks)
        self._newest = max(self._newest, *ticks, 0)
        return gone

    def _join_packed(self) -> None:
        if self._packed:
            rows, self._packed = PackedEntries.joined(self._packed), []
            self._pending.add_records(rows.records, rows.slots, rows.ticks)
            self._newest = max(self._newest, int(rows.ticks.max(initial=0)))

    def build(self) -> None:
        """Start to build a table of the pending rows, on a thread; see `built`."""
        self._join_packed()
        rows, self._pending = self._pending, Rows()
        newest, self._newest = self._newest, 0
        self._building = self._worker.submit(self._build, rows, newest)

    def built(self) -> BuiltTable | None:
        """The table, once; None while it is being built. Raises RowTableError or MemoryError."""
        if self._building is None or not self._building.done():
            return None
        future, self._building = self._building, None
        self._built += 1
        return future.result()

    def close(self) -> None:
        """Release everything; a table that is still being built is closed when it is done."""
        if self._building is not None:
            self._building.add_done_callback(_discard)
            self._building = None
        self._worker.shutdown(wait=False)
        self._pending = Rows()

    def _build(self, rows: Rows, newest: int) -> BuiltTable:
        fd, left_out = RowTable.build_shared(rows, key_hash=self._key_hash, slots_limit=self._slots)
        return BuiltTable(fd, newest, left_out)


def _discard(future: Future[BuiltTable]) -> None:
    if future.exception() is None:
        os.close(future.result().fd)
