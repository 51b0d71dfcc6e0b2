"""Fair shares of one path: a shard that has more than its fair share gives room to one that has less, while both serve.

A shard that finds no room and has less than its fair share requests some through the quota. One that has more lowers
the number of slots that its core may use, reports the rows beyond as gone, and frees the tail of its slabs once no row
stands there. Fair shares are equal among the shards in use, so none gives what it would have to request again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.tiers.base import GONE, MAX_ENTRIES, Entry
from nixl_tiers.tiers.slab.quota import SlabQuota
from nixl_tiers.tiers.slab.shard import Shard
from nixl_tiers.tiers.slab.slabs import NoSpace

REBALANCE_S: Final = 1.0
RETRY_S: Final = 2.0  # between two tries to grow, when there was no room
_SEARCH_SLOTS: Final = 1 << 16
_SPARE_EXTENTS: Final = 2  # an empty tail of fewer is kept: it would soon be allocated again


class Rebalancer:
    """How many slots of a shard may be used now, and the release of those that may not."""

    def __init__(self, shard: Shard, quota: SlabQuota, allocator: ThreadPoolExecutor) -> None:
        """`allocator`: the one thread on which slabs grow and are cut."""
        self.slots = shard.slabs.layout.slots
        self._shard = shard
        self._quota = quota
        self._allocator = allocator
        self._request_ns = quota.last_request_ns()
        self._retry_at_s = 0.0

    def growth_failed(self) -> None:
        """There was no room to grow: only what is allocated may be used, and the core must evict to store more."""
        self.slots = min(self.slots, self._shard.slabs.end)
        self._retry_at_s = time.monotonic() + RETRY_S

    def rebalance(self, in_use: Callable[[], set[int]], growing: Callable[[], bool]) -> Iterator[list[Entry]]:
        """Try to grow, or give room. Yields the keys that lose their slots, as entries of slot GONE.

        `in_use`: slots that jobs read or write; `growing`: whether the slabs are growing now.
        """
        slabs, layout = self._shard.slabs, self._shard.slabs.layout
        limited = self.slots < layout.slots
        if limited and self.slots >= slabs.end and time.monotonic() >= self._retry_at_s:
            self._retry_at_s = time.monotonic() + RETRY_S
            trying = self._allocator.submit(slabs.grow, slabs.end)
            while not trying.done():
                yield []
            with suppress(NoSpace, OSError):
                trying.result()
                self.slots = layout.slots
        if not self._shard.journal.complete:
            return  # what is in the tail is not known yet
        if (request_ns := self._quota.last_request_ns()) != self._request_ns:
            self._request_ns = request_ns
            reading = self._allocator.submit(self._requested_slots)
            while not reading.done():
                yield []
            with suppress(OSError):
                give = reading.result()
                if give:
                    self.slots = min(self.slots, slabs.end - give)
                    self._retry_at_s = time.monotonic() + RETRY_S
                    yield []  # the core learns its new limit before it learns of the rows
        if self.slots < slabs.end:
            yield from self._evict_from(self.slots)
        if not growing():
            yield from self._free_tail(in_use())

    def _requested_slots(self) -> int:
        """On the allocator's thread: slots that this shard has to give."""
        with self._quota.locked():
            nbytes = self._quota.requested_bytes(self._shard.path)
        return nbytes // self._shard.slabs.layout.row_bytes

    def _evict_from(self, end: int) -> Iterator[list[Entry]]:
        """The rows from slot `end` on. Rows that are pinned by a job stay for now, and are reported again."""
        journal = self._shard.journal
        slots = (np.flatnonzero(journal.tags[end:]) + end).tolist()
        for start in range(0, len(slots), MAX_ENTRIES):
            part = slots[start : start + MAX_ENTRIES]
            before = journal.tags[part].tolist()
            reading = self._allocator.submit(self._shard.read_seals, part)
            while not reading.done():
                yield []
            try:
                keys = {row.slot: row.key for row in reading.result()}
            except OSError:
                return
            gone = []
            for slot, tag in zip(part, before, strict=True):
                if slot in keys and journal.holds(slot, keys[slot]):
                    gone.append(Entry(GONE, keys[slot], 0))
                elif journal.tags[slot] == tag:
                    journal.mark_garbage(slot, int(journal.sealed_at[slot]))  # without a valid seal: a miss anyway
            yield gone

    def _free_tail(self, in_use: set[int]) -> Iterator[list[Entry]]:
        """Free the allocated slots behind the last row."""
        slabs, journal = self._shard.slabs, self._shard.journal
        extent = slabs.layout.extent_slots
        end = max(_last_held(journal.tags, slabs.end), max(in_use, default=-1)) + 1
        if self.slots >= slabs.end:  # no shard has requested it
            end = (-(-end // extent) + 1) * extent
            if slabs.end - end < _SPARE_EXTENTS * extent:
                return
        else:
            end = max(end, self.slots)
        if end < slabs.end:
            journal.sealed_at[end:] = 0
            freeing = self._allocator.submit(slabs.free, slabs.truncate(end))
            while not freeing.done():
                yield []
            with suppress(OSError):
                freeing.result()


def _last_held(tags: NDArray[np.uint32], end: int) -> int:
    """The last slot below `end` that holds a key, or -1."""
    while end > 0:
        start = max(0, end - _SEARCH_SLOTS)
        held = np.flatnonzero(tags[start:end])
        if len(held):
            return start + int(held[-1])
        end = start
    return -1
