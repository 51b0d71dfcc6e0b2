"""A replica's share of its path: who has more than a fair part gives way to who has less, without anybody waiting.

Whoever is refused room and has less than its part says so in the ledger. Whoever has more lowers the number of slots
that its engine may use, tells it that the rows beyond have gone, and gives the tail of its slabs back once nothing
stands there. Parts are equal among those that live, so nobody gives what it would have to ask for again.
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

TEND_S: Final = 1.0
RETRY_S: Final = 2.0  # between two tries to grow, when there was no room
_LOOKED_AT_ONCE: Final = 1 << 16
_SPARE_STEPS: Final = 2  # an empty tail is kept up to here: it would soon be allocated again


class Rebalancer:
    """How many slots the engine may use now, and what becomes of those that it may not."""

    def __init__(self, replica: Shard, ledger: SlabQuota, allocator: ThreadPoolExecutor) -> None:
        """`allocator`: the one thread on which slabs grow and shrink."""
        self.slots = replica.slabs.plan.slots
        self._replica = replica
        self._quota = ledger
        self._allocator = allocator
        self._asked_ns = ledger.asked_ns()
        self._retry_at_s = 0.0

    def refused(self) -> None:
        """There was no room to grow: the engine has what is allocated, and must evict to store more."""
        self.slots = min(self.slots, self._replica.slabs.end)
        self._retry_at_s = time.monotonic() + RETRY_S

    def tend(self, in_use: Callable[[], set[int]], growing: Callable[[], bool]) -> Iterator[list[Entry]]:
        """Look for room, or give some; keys that lose their places, as entries of slot GONE. For `adopt`.

        `in_use`: slots that a job reads or writes; `growing`: whether the slabs grow right now.
        """
        slabs, plan = self._replica.slabs, self._replica.slabs.plan
        limited = self.slots < plan.slots
        if limited and self.slots >= slabs.end and time.monotonic() >= self._retry_at_s:
            self._retry_at_s = time.monotonic() + RETRY_S
            trying = self._allocator.submit(slabs.grow, slabs.end)
            while not trying.done():
                yield []
            with suppress(NoSpace, OSError):
                trying.result()
                self.slots = plan.slots
        if not self._replica.journal.whole:
            return  # nobody knows yet what stands in the tail
        if (asked_ns := self._quota.asked_ns()) != self._asked_ns:
            self._asked_ns = asked_ns
            looking = self._allocator.submit(self._to_give)
            while not looking.done():
                yield []
            with suppress(OSError):
                give = looking.result()
                if give:
                    self.slots = min(self.slots, slabs.end - give)
                    self._retry_at_s = time.monotonic() + RETRY_S
                    yield []  # the engine hears of its new limit before it hears of the rows
        if self.slots < slabs.end:
            yield from self._vacate(self.slots)
        if not growing():
            yield from self._cut(in_use())

    def _to_give(self) -> int:
        """On the allocator's thread: slots that somebody else should have."""
        with self._quota.locked():
            nbytes = self._quota.asked_bytes(self._replica.directory)
        return nbytes // self._replica.slabs.plan.row_bytes

    def _vacate(self, end: int) -> Iterator[list[Entry]]:
        """The rows beyond `end`. Those that a job has hands on stay for now; they are told of again."""
        manifest = self._replica.journal
        slots = (np.flatnonzero(manifest.tags[end:]) + end).tolist()
        for start in range(0, len(slots), MAX_ENTRIES):
            part = slots[start : start + MAX_ENTRIES]
            before = manifest.tags[part].tolist()
            reading = self._allocator.submit(self._replica.read_seals, part)
            while not reading.done():
                yield []
            try:
                found = {row.slot: row.key for row in reading.result()}
            except OSError:
                return
            gone = []
            for slot, tag in zip(part, before, strict=True):
                if slot in found and manifest.holds(slot, found[slot]):
                    gone.append(Entry(GONE, found[slot], 0))
                elif manifest.tags[slot] == tag:
                    manifest.spoil(slot, int(manifest.sealed_at[slot]))  # it would have been a miss
            yield gone

    def _cut(self, in_use: set[int]) -> Iterator[list[Entry]]:
        """Give back the tail in which nothing stands."""
        slabs, manifest = self._replica.slabs, self._replica.journal
        end = max(_last(manifest.tags, slabs.end), max(in_use, default=-1)) + 1
        if self.slots >= slabs.end:  # nobody asked for it
            end = (-(-end // slabs.plan.step_slots) + 1) * slabs.plan.step_slots
            if slabs.end - end < _SPARE_STEPS * slabs.plan.step_slots:
                return
        else:
            end = max(end, self.slots)
        if end < slabs.end:
            manifest.sealed_at[end:] = 0
            cutting = self._allocator.submit(slabs.give_back, slabs.lower(end))
            while not cutting.done():
                yield []
            with suppress(OSError):
                cutting.result()


def _last(tags: NDArray[np.uint32], end: int) -> int:
    """The last slot below `end` that holds a key, or -1."""
    while end > 0:
        start = max(0, end - _LOOKED_AT_ONCE)
        held = np.flatnonzero(tags[start:end])
        if len(held):
            return start + int(held[-1])
        end = start
    return -1
