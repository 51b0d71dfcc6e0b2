"""One replica of one namespace, being served: its claim, its journal, its slabs, and what a look at them finds."""

from __future__ import annotations

import fnmatch
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.chunk import PAGE, Geometry
from nixl_tiers.memory.seal import Sealer
from nixl_tiers.tiers.base import GONE, MAX_ENTRIES, Entry, TierDown
from nixl_tiers.tiers.disk import HealthMonitor, describe
from nixl_tiers.tiers.expiry import expired, has_expired, sweep_s
from nixl_tiers.tiers.folder import Folder
from nixl_tiers.tiers.log_once import LogOnce
from nixl_tiers.tiers.nixl_agent import Agent
from nixl_tiers.tiers.slab.journal import Journal, journal_bytes
from nixl_tiers.tiers.slab.quota import Claim, SlabQuota
from nixl_tiers.tiers.slab.recovery import Found, Scan, seals
from nixl_tiers.tiers.slab.slabs import Plan, Slabs, guess_plan

logger = logging.getLogger(__name__)

_FORMAT: Final = 1
_FIRST_BYTES: Final = 256 << 20  # that a newcomer asks of others, beside its journal's
_MARGIN_BYTES: Final = 256 << 10  # directories, locks, extent trees: what is on the disk beside rows and journal


class Shard:
    """All that belongs to the namespace being served. Made inside the ledger's lock."""

    def __init__(
        self,
        claim: Claim,
        slots: int,
        sealer: Sealer,
        agent: Agent,
        ledger: SlabQuota,
        *,
        max_age_s: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` tells the time of day, in Unix seconds. Raises OSError, and TierDown if there is no room for one more
        journal."""
        self.sealer = sealer
        self._claim = claim
        self.directory = claim.directory
        self._quota = ledger
        self._max_age_s = max_age_s
        self._clock = clock
        plan = _plan(claim, sealer.geometry, slots)
        if not claim.about:
            plan = guess_plan(claim.folder, sealer, slots)
            if plan is not None:
                logger.warning("%s had lost its description: going by its rows' seals", claim.directory)
                # Its slot numbers may be those of another plan.
                _unlink_all(claim.folder, "manifest.*")
            elif not ledger.make_room(journal_bytes(slots)):
                ledger.ask(None, journal_bytes(slots) + _FIRST_BYTES)
                raise TierDown(f"{ledger.path} is full: what live movers hold leaves no room for one more")
        if plan is None:
            # Nothing in it can be ours: rows of another shape, or a directory whose description is lost.
            _unlink_all(claim.folder, "[sm]*.*")
            plan = Plan.of(sealer.geometry.row_bytes, slots)
        about = _about(sealer.geometry, plan)
        if claim.about != about:  # a full medium must not keep the tier from serving what it holds
            claim.describe(about)
        self.slabs = Slabs(claim.folder, plan, agent, ledger)
        self.journal = Journal(claim.directory, slots)
        self.listed = False
        """Whether `adopt` has told of all that was there, as far as it can be known."""
        self.erasing: frozenset[int] = frozenset()
        """Slots that must be left alone, because their bytes are being erased."""
        self._swept_at_s = 0.0
        self._eraser = ThreadPoolExecutor(1, thread_name_prefix="eraser")
        self._closing = False
        self._scan: Scan | None = None
        self._log_once = LogOnce(logger)
        self._stores_fail = False
        self.health = HealthMonitor(self._look)

    def adopt(self) -> Iterator[list[Entry]]:
        """The rows in it; see StorageTier.adopt."""
        last = 0
        for batch in self.journal.adopt():
            last = max([last, *(entry.tick for entry in batch)])
            yield [entry for entry in batch if self.slabs.has_room(entry.slot)]
        if not self.journal.whole:
            yield from self._rebuilt(last)
        else:
            self.journal.complete()
        self.listed = True

    def has_expired(self, slot: int, sealed_at: int) -> bool:
        """Whether the row in that slot, whose seal tells that time, is too old."""
        now = self._clock()
        if sealed_at > now:  # it counts from when it was first seen, once a sweep has seen it
            sealed_at = int(self.journal.sealed_at[slot]) or sealed_at
        return has_expired(sealed_at, now, self._max_age_s)

    def sweep(self, in_use: Callable[[], set[int]]) -> Iterator[list[Entry]]:
        """When it is time: erase what is too old, and whole replicas that nobody serves. Yields the keys that are gone
        thereby, as entries of slot GONE. `in_use`: slots that a job reads or writes: those wait for the next time. For
        `adopt`."""
        if self._max_age_s is None or abs(self._clock() - self._swept_at_s) < sweep_s(self._max_age_s):
            return
        now, max_age_s = self._clock(), self._max_age_s
        self.journal.limit_times(int(now))
        sealed_at = self.journal.sealed_at

        def old_ones(slots: NDArray[np.int64]) -> list[int]:
            ages: list[int] = slots[(sealed_at[slots] > 0) & expired(sealed_at[slots], now, max_age_s)].tolist()
            return ages

        old = old_ones(np.arange(len(sealed_at)))
        self._swept_at_s = now
        swept = self._eraser.submit(self._forget_others, max_age_s)
        for start in range(0, len(old), MAX_ENTRIES):
            busy = in_use()
            if not busy.isdisjoint(old):
                self._swept_at_s = 0.0  # again soon
            # Those of them that still are: a slot may have got a new row since.
            slots = [slot for slot in old_ones(np.array(old[start : start + MAX_ENTRIES])) if slot not in busy]
            self.erasing = frozenset(slot for slot in slots if self.slabs.has_room(slot))
            for slot in self.erasing.symmetric_difference(slots):
                self.journal.erase(slot)
            erasing = self._eraser.submit(self._erase, sorted(self.erasing), now, max_age_s)
            while not erasing.done():
                yield []
            erased = erasing.result()
            if erased is not None:
                found, young = erased
                # Bytes of a row that the engine has dropped before may bear a key that it holds elsewhere.
                gone = [Entry(GONE, row.key, 0) for row in found if self.journal.holds(row.slot, row.key)]
                for slot in self.erasing.difference(row.slot for row in young):
                    self.journal.erase(slot)
                for row in young:
                    self.journal.date(row.slot, row.sealed_at)
                yield gone
            self.erasing = frozenset()
        while not swept.done():
            yield []

    def read_seals(self, slots: list[int]) -> list[Found]:
        """What stands in these slots. On a thread that may wait. Raises OSError."""
        wanted = np.zeros(self.slabs.plan.slots, dtype=np.bool_)
        wanted[slots] = True
        return [row for stretch in self.slabs.stretches(wanted) for row in seals(stretch, self.sealer)]

    def store_failed(self) -> None:
        """Not for want of space. The next look, which is due now, finds out why."""
        self._stores_fail = True
        self.health.check_soon()

    def load_failed(self) -> None:
        self._log_once.about("load", f"{self._claim.directory}: rows cannot be read; the kernel's log may tell why")
        self.health.check_soon()

    def spoilt(self, slot: int, verdict: str) -> None:
        """A row's seal says that it is not the row, or not whole."""
        self._log_once.about(
            "spoilt", f"{self._claim.directory}: slot {slot} is not the row that it should be ({verdict})"
        )

    def close(self) -> None:
        """Write what is pending, as far as that is possible, and let go."""
        self._closing = True
        self._eraser.shutdown(cancel_futures=True)
        self.health.close()
        if self._scan is not None:
            self._scan.stop()
        self.journal.close()
        self.slabs.close()
        self._claim.release()

    def _rebuilt(self, last: int) -> Iterator[list[Entry]]:
        """The rows that the journal did not tell of, by their seals; used later than `last`, as they lack there."""
        unknown = self.journal.unknown()
        scan = self._scan = Scan(self.slabs.stretches(unknown), self.sealer)
        while not scan.done:
            yield []
        for start in range(0, len(scan.found), MAX_ENTRIES):
            batch = []
            for place, row in enumerate(scan.found[start : start + MAX_ENTRIES]):
                if not self.journal.was_stored(row.slot):
                    entry = Entry(row.slot, row.key, last + 1 + start + place)
                    self.journal.put(entry.slot, entry.key, entry.tick, row.sealed_at)
                    batch.append(entry)
            yield batch
        if scan.found:
            logger.info("%s: found %d rows by their seals", self._claim.directory, len(scan.found))
        if not scan.failed:
            # What has no seal may be part of a row all the same: it ages from now on.
            for slot in np.flatnonzero(unknown & (self.journal.sealed_at == 0)).tolist():
                if self.slabs.has_room(slot) and not self.journal.was_stored(slot):
                    self.journal.sealed_at[slot] = int(self._clock())
            self.journal.complete()

    def _erase(self, slots: list[int], now_s: float, max_age_s: float) -> tuple[list[Found], list[Found]] | None:
        """On the eraser's thread: the rows that stood there, and those that were left, because the clock has caught up
        with their seals since they were first seen; None if all may stand there still."""
        try:
            found = self.read_seals(slots)
            young = {
                row.slot: row
                for row in found
                if row.sealed_at <= now_s and not has_expired(row.sealed_at, now_s, max_age_s)
            }
            if not self._closing:
                self.slabs.erase([slot for slot in slots if slot not in young])
                return [row for row in found if row.slot not in young], list(young.values())
        except OSError as error:
            self._log_once.about("erase", f"{self._claim.directory}: old rows cannot be erased ({describe(error)})")
            self.health.check_soon()
        return None

    def _forget_others(self, max_age_s: float) -> None:
        with suppress(OSError), self._quota.locked():
            self._quota.forget_expired(max_age_s, self._clock())

    def _look(self) -> str:
        """On the watch's thread: what has happened to what we stand on, or ""."""
        problem = self._claim.problem() or self.journal.problem() or self.slabs.problem()
        if self._stores_fail and not problem:
            self._stores_fail = False
            reason = _why_not_written(self._claim.folder)
            self._log_once.about("store", f"{self._claim.directory}: rows cannot be written ({reason})")
        return problem


def slots_within(capacity_bytes: int, row_bytes: int) -> int:
    """How many rows fit beside their journal and what else a namespace takes."""
    return (capacity_bytes - journal_bytes(0) - _MARGIN_BYTES) // (row_bytes + journal_bytes(1) - journal_bytes(0))


def _about(geometry: Geometry, plan: Plan) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        **asdict(geometry),
        "row_bytes": plan.row_bytes,
        "slots": plan.slots,
        "slots_per_slab": plan.slots_per_slab,
        "journal_bytes": journal_bytes(plan.slots),
    }


def _plan(claim: Claim, geometry: Geometry, slots: int) -> Plan | None:
    """The plan by which the namespace was laid out, for `slots` slots now; None if it cannot be used."""
    about = claim.about
    try:
        plan = Plan(int(about["row_bytes"]), slots, int(about["slots_per_slab"]))
    except (KeyError, TypeError, ValueError):
        return None
    same = _about(geometry, plan) | {"slots": about.get("slots"), "journal_bytes": about.get("journal_bytes")} == about
    return plan if same and plan.row_bytes == geometry.row_bytes and plan.slots_per_slab > 0 else None


def _unlink_all(folder: Folder, pattern: str) -> None:
    for name in fnmatch.filter(folder.names(), pattern):
        folder.unlink(name)


def _why_not_written(folder: Folder) -> str:
    """NIXL does not tell: what happens to a page that is written here."""
    name = f"probe-{secrets.token_hex(8)}.tmp"
    try:
        with os.fdopen(folder.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(bytes(PAGE))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return describe(error)
    finally:
        with suppress(OSError):
            folder.unlink(name)
    return "though other files can; the kernel's log may tell why"
