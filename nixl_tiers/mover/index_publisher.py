"""Sends the coordinator the rows that a tier holds: all of them once it is open, then what others and upkeep change."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from nixl_tiers.mover.index_builder import IndexBuilder
from nixl_tiers.mover.protocol import Listed, ListedTable
from nixl_tiers.tiers.base import MAX_ENTRIES, Entry

if TYPE_CHECKING:
    from nixl_tiers.mover.send_queue import SendQueue
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
