"""Tells the engine what a tier holds: all of it once after it was opened, and changes where others write to it too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from nixl_tiers.chunk import Key
from nixl_tiers.mover.index_builder import IndexBuilder
from nixl_tiers.mover.protocol import Listed, ListedIndex
from nixl_tiers.tiers.base import MAX_ENTRIES, Entry

if TYPE_CHECKING:
    from nixl_tiers.mover.send_queue import SendQueue
    from nixl_tiers.tiers.base import StorageTier

LOOK_S: Final = 0.05  # how soon an empty listing is asked again
PAUSE_S: Final = 1.0  # what a listing has brought is told when it has brought nothing more for so long
MAX_TABLES: Final = 4  # an engine looks into each of them; the last one waits for the end of the listing
STEP_S: Final = 0.002  # rows for a table are collected for so long at a time


class IndexPublisher:
    """The listings of one opening. `step` does what can be done now, and never waits for the medium."""

    def __init__(
        self, tier: StorageTier, outbox: SendQueue, epoch: int, adoption: IndexBuilder, beat: Callable[[], None]
    ) -> None:
        """`beat` tells the engine what the tier takes: what that is may be known only when all is listed."""
        self._tier = tier
        self._outbox = outbox
        self._epoch = epoch
        self._adoption = adoption
        self._beat = beat
        self._listing: Iterator[list[Entry]] | None = tier.list_rows()
        self._first = True
        self.listed = 0
        """How many rows the first listing has found so far."""
        self._look_at_s = 0.0
        self._relist_at_s = self._maintain_at_s = float("inf")
        self._heard_s: float | None = None  # when the listing last brought rows for a table

    @property
    def next_at_s(self) -> float:
        """When step is worth calling again."""
        if self._listing is None:
            return min(self._relist_at_s, self._maintain_at_s)
        return float("inf") if self._outbox else self._look_at_s

    def keys(self, dropped: Sequence[tuple[int, bytes]]) -> list[tuple[int, Key]]:
        """(slot, key) for (slot, digest) of rows that a table told of."""
        return self._adoption.keys(dropped)

    def step(self, now: float) -> None:
        """At most one packet a step, and none while the engine is behind: jobs go first."""
        if self._listing is None:
            self._begin_round(now)
        if self._listing is None or now < self._look_at_s or self._outbox:
            return
        if self._adoption.building:
            self._tell_table(now)
            return
        until = now + STEP_S
        while (batch := next(self._listing, None)) is not None:
            if not batch:
                self._look_at_s = now + LOOK_S
                self._pause(now)
                return
            self.listed += len(batch) if self._first else 0
            told = self._adoption.take(batch) if self._first else batch
            if told:
                self._outbox.send(Listed(self._epoch, told, last=False))
                return
            self._heard_s = now
            if time.monotonic() >= until:
                return
        if self._adoption.collected:
            self._adoption.build()  # and then the listing is asked once more whether it has ended
            return
        self._listing = None
        if self._first:
            self._first = False
            self._beat()
            self._outbox.send(Listed(self._epoch, [], last=True))
        if self._relist_at_s == float("inf"):
            self._relist_at_s = now + _or_never(self._tier.relist_s)
        if self._maintain_at_s == float("inf"):
            self._maintain_at_s = now + _or_never(self._tier.maintain_s)

    def close(self) -> None:
        self._listing = None
        self._adoption.close()

    def _begin_round(self, now: float) -> None:
        """List again, or do upkeep, whichever is due: both yield what has changed. One at a time."""
        if now >= self._relist_at_s:
            self._listing, self._relist_at_s = self._tier.list_rows(), float("inf")
        elif now >= self._maintain_at_s:
            self._listing, self._maintain_at_s = self._tier.maintain(), float("inf")
        self._look_at_s = now

    def _pause(self, now: float) -> None:
        since = self._heard_s
        adoption = self._adoption
        if since is not None and now - since >= PAUSE_S and adoption.collected and adoption.tables < MAX_TABLES - 1:
            adoption.build()

    def _tell_table(self, now: float) -> None:
        table = self._adoption.built()
        if table is None:
            self._look_at_s = now + LOOK_S
            return
        self._outbox.send(ListedIndex(self._epoch, table.newest), table.fd)
        for start in range(0, len(table.left_out), MAX_ENTRIES):
            self._tier.delete(table.left_out[start : start + MAX_ENTRIES])


def _or_never(interval_s: float | None) -> float:
    return float("inf") if interval_s is None else interval_s
