"""IndexSpill: a thread beside the supervisor's that spills cold rows into tables, and frees what is not used any more.

It runs only while there is something to do. The lock is taken for one step at a time, and nothing here holds the
interpreter's lock for more than a few milliseconds: tables are built by numpy, which releases it, and in pieces.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from nixl_tiers.core.cold_rows import ColdTable, SomeRows, Steps
from nixl_tiers.core.spill import cancel_steps, spill_steps
from nixl_tiers.core.tier import TierIndex
from nixl_tiers.memory.key_hash import KeyHash
from nixl_tiers.memory.row_table import Rows, RowTable, RowTableError

log = logging.getLogger(__name__)

REST_S: Final = 1.0  # after each spill of a tier: one that finds all rows pinned must not be tried again at once
FAILED_REST_S: Final = 60.0
PAUSE_S: Final = 0.0002  # between two steps, so that a thread that waits for the lock gets it


class IndexSpill:
    """One for a coordinator, whose core and lock it shares."""

    def __init__(self, tiers: Sequence[TierIndex], key_hash: KeyHash, lock: threading.Condition) -> None:
        self.key_hash = key_hash
        self._tiers = tiers
        self._lock = lock
        self._running = False
        self._rest_until_s = [0.0] * len(tiers)

    def wake(self) -> None:
        """Start the thread if there is something to do. Call it with the lock held."""
        if not self._running and any(tier.cold.has_retired or self._spills(tier) for tier in self._tiers):
            with contextlib.suppress(RuntimeError):  # no more threads are allowed now: the next call tries again
                threading.Thread(target=self._run, name="nixl_tiers index", daemon=True).start()
                self._running = True  # it ends with the lock held, so not before this

    def _spills(self, tier: TierIndex) -> bool:
        return tier.needs_spill and time.monotonic() >= self._rest_until_s[tier.number]

    def _run(self) -> None:
        try:
            for tier in self._tiers:
                with self._lock:
                    spills = self._spills(tier)
                if spills:
                    self._spill(tier)
                with self._lock:
                    retired = tier.cold.take_retired()
                for each in retired:
                    each.close()
        finally:
            with self._lock:
                self._running = False

    def _spill(self, tier: TierIndex) -> None:
        rest_s = REST_S
        try:
            take_steps(spill_steps(tier, self._build), self._lock)
        except Exception as error:  # the index works without it, and only grows
            expected = isinstance(error, MemoryError | RowTableError)
            log.warning("nixl_tiers: no table for the rows of %s: %r", tier.spec.name, error, exc_info=not expected)
            rest_s = FAILED_REST_S
            take_steps(cancel_steps(tier), self._lock)
        self._rest_until_s[tier.number] = time.monotonic() + rest_s

    def _build(self, parts: Iterable[SomeRows], sources: Sequence[ColdTable]) -> RowTable:
        rows = Rows()
        for part in parts:
            rows.add(*part)
        tables = [table for table in sources if isinstance(table, RowTable)]
        return RowTable.build(rows, tables, key_hash=self.key_hash)


def take_steps(steps: Steps, lock: threading.Condition) -> None:
    """Take the lock for one step at a time."""
    while True:
        work: Callable[[], object] | None = None
        with lock:
            try:
                work = next(steps)
            except StopIteration:
                lock.notify_all()
                return
        if work is None:
            time.sleep(PAUSE_S)
        else:
            work()
