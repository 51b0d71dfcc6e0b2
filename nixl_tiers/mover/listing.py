"""Sends the coordinator the rows that a tier holds: all of them once it is open, then what others and upkeep change.

Of the first listing a few rows go one by one, all others in row tables: one by one, four million rows would cost the
coordinator's interpreter half a minute. In a table (memory/row_table.py) they cost it very little.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from nixl_tiers.base.chunk import Key
from nixl_tiers.memory.key_hash import KeyHash
from nixl_tiers.memory.row_table import Rows, RowTable
from nixl_tiers.mover.protocol import Listed, ListedTable
from nixl_tiers.tiers.base import MAX_ENTRIES, Entry, PackedEntries

if TYPE_CHECKING:
    from nixl_tiers.mover.protocol import SendQueue
    from nixl_tiers.tiers.base import StorageTier


POLL_S: Final = 0.05  # while the listing has nothing new
IDLE_S: Final = 1.0  # a table is built of the pending rows when the listing has had nothing new for this long
MAX_TABLES: Final = 3  # a lookup searches each of them; the last one waits for the end of the listing
STEP_S: Final = 0.002  # the longest that one step collects rows for a table


class IndexPublisher:
    """Listings and upkeep of one opening, one at a time. `step` never waits for the medium."""

    def __init__(
        self,
        tier: StorageTier,
        send_queue: SendQueue,
        epoch: int,
        builder: IndexBuilder,
        send_heartbeat: Callable[[], None],
    ) -> None:
        """`send_heartbeat`: called at the end of the first listing, for only then the bytes in use may be known."""
        self._tier = tier
        self._send_queue = send_queue
        self._epoch = epoch
        self._builder = builder
        self._send_heartbeat = send_heartbeat
        self._listing: Iterator[Sequence[Entry]] | None = tier.list_rows()
        self._first = True
        self.listed = 0
        """How many rows the first listing has found so far."""
        self._poll_at_s = 0.0
        self._relist_at_s = self._maintain_at_s = float("inf")
        self._added_s: float | None = None  # when the listing last brought rows for a table

    @property
    def next_at_s(self) -> float:
        """When to call `step` again."""
        if self._listing is None:
            return min(self._relist_at_s, self._maintain_at_s)
        return float("inf") if self._send_queue else self._poll_at_s

    def step(self, now: float) -> None:
        """Send at most one packet, and none while the send queue is not empty: results of jobs go first."""
        if self._listing is None:
            self._begin_round(now)
        if self._listing is None or now < self._poll_at_s or self._send_queue:
            return
        if self._builder.building:
            self._send_table(now)
            return
        until = now + STEP_S
        while (batch := next(self._listing, None)) is not None:
            if not batch:
                self._poll_at_s = now + POLL_S
                self._build_if_idle(now)
                return
            self.listed += len(batch) if self._first else 0
            single = self._builder.add(batch) if self._first else list(batch)
            if single:
                self._send_queue.send(Listed(self._epoch, single, last=False))
                return
            self._added_s = now
            if time.monotonic() >= until:
                return
        if self._builder.pending:
            self._builder.build()  # the listing is asked again, and ends, when this is built and sent
            return
        self._listing = None
        if self._first:
            self._first = False
            self._send_heartbeat()
            self._send_queue.send(Listed(self._epoch, [], last=True))
        if self._relist_at_s == float("inf"):
            self._relist_at_s = now + _or_never(self._tier.relist_s)
        if self._maintain_at_s == float("inf"):
            self._maintain_at_s = now + _or_never(self._tier.maintain_s)

    def close(self) -> None:
        self._listing = None
        self._builder.close()

    def _begin_round(self, now: float) -> None:
        """List again, or do upkeep, whichever is due: both yield what has changed. One at a time."""
        if now >= self._relist_at_s:
            self._listing, self._relist_at_s = self._tier.list_rows(), float("inf")
        elif now >= self._maintain_at_s:
            self._listing, self._maintain_at_s = self._tier.maintain(), float("inf")
        self._poll_at_s = now

    def _build_if_idle(self, now: float) -> None:
        if self._added_s is None or now - self._added_s < IDLE_S:
            return
        if self._builder.pending and self._builder.tables < MAX_TABLES - 1:
            self._builder.build()

    def _send_table(self, now: float) -> None:
        table = self._builder.built()
        if table is None:
            self._poll_at_s = now + POLL_S
            return
        self._send_queue.send(ListedTable(self._epoch, table.newest), table.fd)
        for start in range(0, len(table.left_out), MAX_ENTRIES):
            self._tier.delete(table.left_out[start : start + MAX_ENTRIES])


def _or_never(interval_s: float | None) -> float:
    return float("inf") if interval_s is None else interval_s


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
