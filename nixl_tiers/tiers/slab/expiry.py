"""`max_age` of an open shard: rows that are too old are misses, and their bytes are erased."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.tiers.base import GONE, MAX_ENTRIES, Entry, expire_if_due, expired, sweep_s
from nixl_tiers.tiers.disk import describe
from nixl_tiers.tiers.move_queue import T
from nixl_tiers.tiers.slab.journal import EMPTY
from nixl_tiers.tiers.slab.shards import Shards
from nixl_tiers.tiers.slab.slabs import SealedRow

if TYPE_CHECKING:
    from nixl_tiers.tiers.slab.shard import Shard

logger = logging.getLogger(__name__)

_CLAMP_SLOTS: Final = 1 << 16  # in one step


def until(work: Future[T]) -> Generator[list[Entry], None, T]:
    """As a step of upkeep, wait for this, and return its result or raise its error."""
    while not work.done():
        yield []
    return work.result()


class Expiry:
    """For the mover's own thread."""

    def __init__(self, shard: Shard, quota: Shards, max_age_s: float | None, clock: Callable[[], float]) -> None:
        """`clock`: Unix seconds."""
        self._shard = shard
        self._journal = shard.journal
        self._quota = quota
        self._max_age_s = max_age_s
        self._clock = clock
        self.erasing: frozenset[int] = frozenset()
        """Slots that are being erased: nothing may be stored into them or loaded from them."""
        self._expired_at_s = 0.0
        self._eraser = ThreadPoolExecutor(1, thread_name_prefix="eraser")
        self._closing = False
        self._log_once = LogOnce(logger)

    def expire_if_due(self, slot: int, sealed_at: int) -> bool:
        """Whether the row in that slot, sealed then by its seal, is too old."""
        now = self._clock()
        if sealed_at > now:  # counts from when it was first seen, if an expiry round has seen it
            sealed_at = int(self._journal.sealed_at[slot]) or sealed_at
        return expire_if_due(sealed_at, now, self._max_age_s)

    def expire(self, in_use: Callable[[], set[int]]) -> Iterator[list[Entry]]:
        """If it is due: erase the bytes of rows that are too old, and delete expired shards that no process holds.

        Yields the keys that are gone, as entries of slot GONE. `in_use`: slots that jobs read or write, which are left
        for the next round.
        """
        if self._max_age_s is None or abs(self._clock() - self._expired_at_s) < sweep_s(self._max_age_s):
            return
        now, max_age_s = self._clock(), self._max_age_s
        sealed_at = self._journal.sealed_at

        def expired_ones(slots: NDArray[np.int64]) -> NDArray[np.int64]:
            return slots[(sealed_at[slots] > 0) & expired(sealed_at[slots], now, max_age_s)]

        self._expired_at_s = now
        ahead = yield from until(self._eraser.submit(lambda: np.flatnonzero(sealed_at > now)))
        old = yield from until(self._eraser.submit(lambda: expired_ones(np.flatnonzero(sealed_at))))
        for start in range(0, len(ahead), _CLAMP_SLOTS):
            self._journal.clamp_times(ahead[start : start + _CLAMP_SLOTS], int(now))
            yield []
        shards_deleted = self._eraser.submit(self._quota.delete_expired, max_age_s, now)
        for start in range(0, len(old), MAX_ENTRIES):
            busy = in_use()
            # Checked again: a slot may hold a new row by now.
            found = expired_ones(old[start : start + MAX_ENTRIES]).tolist()
            slots = [slot for slot in found if slot not in busy]
            if len(slots) < len(found):
                self._expired_at_s = 0.0  # another round soon
            self.erasing = frozenset(slot for slot in slots if self._shard.slabs.is_allocated(slot))
            self._journal.mark_erased([*self.erasing.symmetric_difference(slots)])
            erased = yield from until(self._eraser.submit(self._erase, sorted(self.erasing), now))
            if erased is not None:
                rows, young = erased
                # The slot may hold bytes of a row that was deleted, and its key be in another slot.
                gone = [Entry(GONE, row.key, 0) for row in rows if self._journal.holds(row.slot, row.key)]
                self._journal.mark_erased([*self.erasing.difference(row.slot for row in young)])
                for row in young:  # the clock has caught up with their seals
                    self._journal.sealed_at[row.slot] = row.sealed_at
                yield gone
            self.erasing = frozenset()
        yield from until(shards_deleted)

    def _erase(self, slots: list[int], now_s: float) -> tuple[list[SealedRow], list[SealedRow]] | None:
        """On the eraser's thread: the rows that were erased, and those that were kept, because their seals were ahead
        of the clock when they were first seen and are not too old; None if nothing was erased for certain."""
        try:
            rows, young = list[SealedRow](), list[SealedRow]()
            for row in self._shard.read_seals(slots):
                keep = row.sealed_at <= now_s and not expire_if_due(row.sealed_at, now_s, self._max_age_s)
                (young if keep else rows).append(row)
            if not self._closing:
                old = sorted({*slots}.difference(row.slot for row in young))
                if (error := self._journal.forget(old)) < 0:  # another round tries again
                    raise OSError(-error, os.strerror(-error), str(self._shard.path))
                self._shard.slabs.erase(old)
                self._journal.forget(old, EMPTY)  # where that fails, `mark_erased` has it tried again
                return rows, young
        except OSError as error:
            self._log_once.report("erase", f"{self._shard.path}: old rows cannot be erased ({describe(error)})")
            self._shard.health.check_soon()
        return None

    def close(self) -> None:
        """Erase nothing more."""
        self._closing = True
        self._eraser.shutdown(cancel_futures=True)
