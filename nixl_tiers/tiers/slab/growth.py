"""Growth: how many slots of an open shard may be used now, and an empty tail of its slabs that is given back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.tiers.base import Entry
from nixl_tiers.tiers.disk import describe
from nixl_tiers.tiers.slab.expiry import until
from nixl_tiers.tiers.slab.shard import Shard

logger = logging.getLogger(__name__)

GROWTH_S: Final = 1.0
_SEARCH_SLOTS: Final = 1 << 16
_SPARE_EXTENTS: Final = 2  # an empty tail of fewer is kept: it would soon be allocated again


class Growth:
    """Of one open shard. A refused growth lowers the number of slots to what is allocated, so that the core evicts to
    store more; from time to time growing is tried again."""

    def __init__(self, shard: Shard, allocator: ThreadPoolExecutor, retry_s: float) -> None:
        """`allocator`: the one thread on which slabs grow and are cut. `retry_s`: between two tries to grow."""
        self._retry_s = retry_s
        self.slots = shard.slabs.layout.slots
        self._shard = shard
        self._allocator = allocator
        self._retry_at_s = 0.0
        self._log_once = LogOnce(logger)

    def refused(self) -> None:
        """There was no room to grow: only what is allocated may be used, and the core must evict to store more."""
        self.slots = min(self.slots, self._shard.slabs.end)
        self._retry_at_s = time.monotonic() + self._retry_s

    def maintain(self, in_use: Callable[[], set[int]], growing: Callable[[], bool]) -> Iterator[list[Entry]]:
        """Try again to grow, and free an empty tail; see StorageTier.maintain. `in_use`: slots that jobs read or write;
        `growing`: whether the slabs are growing now."""
        slabs, file = self._shard.slabs, self._shard.journal.file
        fewer, unrecorded = self.slots < slabs.layout.slots, file.records < slabs.end  # as there was no room at open
        if (fewer or unrecorded) and time.monotonic() >= self._retry_at_s and not growing():
            self._retry_at_s = time.monotonic() + self._retry_s
            with suppress(OSError):
                if unrecorded:
                    yield from until(self._allocator.submit(file.grow, slabs.end))
                if fewer:
                    yield from until(self._allocator.submit(self._shard.grow, slabs.end))
                    self.slots = slabs.layout.slots
        # Before the journal is complete, what is in the tail is not known; and a growth that hangs may still end.
        if self._shard.journal.complete and not growing():
            yield from self._free_tail(in_use())

    def _free_tail(self, in_use: set[int]) -> Iterator[list[Entry]]:
        """Free the allocated slots behind the last row, but for an extent."""
        slabs, journal = self._shard.slabs, self._shard.journal
        extent = slabs.layout.extent_slots
        end = max(_last_held(journal.tags, slabs.end), max(in_use, default=-1)) + 1
        end = (-(-end // extent) + 1) * extent
        if slabs.end - end >= _SPARE_EXTENTS * extent:
            journal.sealed_at[end:] = 0
            try:
                yield from until(self._allocator.submit(slabs.free, slabs.truncate(end)))
            except OSError as error:
                self._log_once.report("free", f"{self._shard.path}: empty slabs cannot be freed ({describe(error)})")


def _last_held(tags: NDArray[np.uint64], end: int) -> int:
    """The last slot below `end` that holds a key, or -1."""
    while end > 0:
        start = max(0, end - _SEARCH_SLOTS)
        if len(held := np.flatnonzero(tags[start:end])):
            return start + int(held[-1])
        end = start
    return -1
