"""Sends the coordinator the rows that a tier holds: all of them once it is open, then what upkeep takes away.

Of the first listing rows go in columns (memory/columns.py), by the ten thousand: one by one, five million would cost
the coordinator's interpreter most of a minute. What changes later is little, and goes one by one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from nixl_tiers.memory import columns
from nixl_tiers.mover.protocol import Listed, ListedColumns
from nixl_tiers.tiers.base import Entry, PackedEntries

if TYPE_CHECKING:
    from nixl_tiers.mover.protocol import SendQueue
    from nixl_tiers.tiers.base import StorageTier


POLL_S: Final = 0.05  # while the listing has nothing new
IDLE_S: Final = 0.1  # collected rows are sent when the listing has had nothing new for this long,
ROWS_AT_ONCE: Final = 1 << 16  # or when there are so many
STEP_S: Final = 0.002  # the longest that one step collects rows


class IndexPublisher:
    """The listing of one opening, and then rounds of upkeep. `step` never waits for the medium."""

    def __init__(
        self, tier: StorageTier, send_queue: SendQueue, epoch: int, send_heartbeat: Callable[[], None]
    ) -> None:
        """`send_heartbeat`: called at the end of the first listing, for only then the bytes in use may be known."""
        self._tier = tier
        self._send_queue = send_queue
        self._epoch = epoch
        self._send_heartbeat = send_heartbeat
        self._listing: Iterator[Sequence[Entry]] | None = tier.list_rows()
        self._first = True
        self.listed = 0
        """How many rows the first listing has found so far."""
        self._poll_at_s = 0.0
        self._maintain_at_s = float("inf")
        self._collected: list[PackedEntries] = []  # of the first listing, and not sent yet
        self._collected_s = 0.0  # when the last of them came

    @property
    def next_at_s(self) -> float:
        """When to call `step` again."""
        if self._listing is None:
            return self._maintain_at_s
        return float("inf") if self._send_queue else self._poll_at_s

    def step(self, now: float) -> None:
        """Send at most one packet, and none while the send queue is not empty: results of jobs go first."""
        if self._listing is None and now >= self._maintain_at_s:
            self._listing, self._maintain_at_s, self._poll_at_s = self._tier.maintain(), float("inf"), now
        if self._listing is None or now < self._poll_at_s or self._send_queue:
            return
        until = now + STEP_S
        while (batch := next(self._listing, None)) is not None:
            if not batch:
                self._poll_at_s = now + POLL_S
                if self._collected and now - self._collected_s >= IDLE_S:
                    self._send_collected()
                return
            self.listed += len(batch) if self._first else 0
            single = self._collect(batch, now) if self._first else list(batch)
            if single:
                self._send_queue.send(Listed(self._epoch, single, last=False))
                return
            if sum(map(len, self._collected)) >= ROWS_AT_ONCE:
                self._send_collected()
                return
            if time.monotonic() >= until:
                return
        if self._collected:
            self._send_collected()  # the listing is asked again, and ends, when this is sent
            return
        self._listing = None
        if self._first:
            self._first = False
            self._send_heartbeat()
            self._send_queue.send(Listed(self._epoch, [], last=True))
        maintain_s = self._tier.maintain_s
        self._maintain_at_s = float("inf") if maintain_s is None else now + maintain_s

    def close(self) -> None:
        self._listing = None
        self._collected = []

    def _collect(self, batch: Sequence[Entry], now: float) -> list[Entry]:
        """The next rows of the first listing. Returns those that are gone, which columns cannot say."""
        gone: list[Entry] = []
        if not isinstance(batch, PackedEntries):
            gone = [entry for entry in batch if entry.slot < 0]
            batch = PackedEntries.of([entry for entry in batch if entry.slot >= 0])
        if batch:
            self._collected.append(batch)
            self._collected_s = now
        return gone

    def _send_collected(self) -> None:
        rows, self._collected = PackedEntries.joined(self._collected), []
        slots = np.clip(rows.slots, 0, np.iinfo(np.uint32).max).astype(np.uint32)
        ticks = np.clip(rows.ticks, 0, None).astype(np.uint64)
        self._send_queue.send(ListedColumns(self._epoch), columns.write(slots, ticks, rows.records))
