"""Listings of a prefix and deletes of its oldest rows, by the mover that writes the usage record (takeover.py). No I/O
here either: `Sweeper` yields what is to be asked of the server.

A sweep lists the whole prefix, counts, and keeps the names of the oldest eighth, which are deleted between it and the
next. It takes minutes where there are millions of rows, so it is interrupted to renew the record, and goes on behind
the last row after a request that failed. A mover that has just taken the record over has no names: where the prefix is
full, it deletes what its first sweep finds among the oldest.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from nixl_tiers.base.chunk import NAMESPACE_BYTES
from nixl_tiers.tiers.s3.deletes import most_names
from nixl_tiers.tiers.s3.names import RowNames
from nixl_tiers.tiers.s3.record import Account
from nixl_tiers.tiers.s3.takeover import Ask, Steps, Takeover

VICTIM_SHARE: Final = 8  # the names of one row of so many are kept, the oldest
MIN_VICTIMS: Final = 1 << 16
SWEEP_AGE_S: Final = 3600.0  # a sweep at least so often
SWEEPS_PER_AGE: Final = 8  # and so often in `max_age`

BEGIN: Final = "begin"  # a listing behind this name
PAGE: Final = "page"  # -> the next page's (name, Last-Modified, bytes); None: it is complete
DELETE: Final = "delete"  # names -> those whose delete was confirmed


class Replaced(Exception):
    """Another mover may write the record, so nothing of what this one has listed counts."""


def whole_listing(
    client: Any, bucket: str, prefix: str, after: str = "", *, versions: bool = False
) -> Iterator[dict[str, Any]]:
    """The pages of a listing behind the name `after`. Some servers end a listing too early, so that each is asked once
    more behind its last name; and some begin with that name again."""
    request, content, position = "list_objects_v2", "Contents", "StartAfter"
    if versions:
        request, content, position = "list_object_versions", "Versions", "KeyMarker"
    asked_behind: str | None = None
    while asked_behind != after:
        asked_behind = after
        behind = {position: after} if after else {}
        for page in client.get_paginator(request).paginate(Bucket=bucket, Prefix=prefix, **behind):
            found = [each for each in page.get(content, ()) if each["Key"] > asked_behind]
            after = max([after, *(each["Key"] for each in found[-1:])])
            yield page | {content: found}


class Listed(NamedTuple):
    """One object of a page."""

    name: str
    modified_s: float
    nbytes: int


class Victims:
    """The oldest rows of one listing, to be deleted between it and the next. No row that is left out is older."""

    def __init__(self, expected_rows: int) -> None:
        """`expected_rows`: about how many the listing will find."""
        self._limit = max(MIN_VICTIMS, expected_rows // VICTIM_SHARE)
        self._cut_s = float("inf")  # of rows written at this time or later, some were left out
        self._oldest_s = float("inf")
        self._taken_s = 0.0  # when that was written which was taken last
        self._names: list[bytes] = []
        self._modified_s = array("d")
        self._nbytes = array("q")
        self._sorted = True  # the oldest are the last

    def __len__(self) -> int:
        """How many are left."""
        return len(self._names)

    def add(self, modified_s: float, name: bytes, nbytes: int) -> None:
        if modified_s >= self._cut_s:
            return
        self._oldest_s = min(self._oldest_s, modified_s)
        self._names.append(name)
        self._modified_s.append(modified_s)
        self._nbytes.append(nbytes)
        self._sorted = False
        if len(self._names) >= 2 * self._limit:
            times = np.frombuffer(self._modified_s, np.float64)
            kept = np.argpartition(times, self._limit)[: self._limit + 1]
            self._cut_s = float(times[kept[-1]])
            self._keep(kept[:-1])

    def take(self, nbytes: float, before_s: float, most: int) -> list[tuple[float, bytes, int]]:
        """Up to `most` of them, the oldest first: until they have `nbytes`, and all written before `before_s`. One that
        is added again is the first to be taken again."""
        if nbytes <= 0 and self._oldest_s >= before_s:
            return []
        self._sort()
        taken: list[tuple[float, bytes, int]] = []
        while self._names and len(taken) < most and (nbytes > 0 or self._modified_s[-1] < before_s):
            taken.append((self._modified_s.pop(), self._names.pop(), self._nbytes.pop()))
            self._taken_s, _, row_bytes = taken[-1]
            nbytes -= row_bytes
        self._oldest_s = self._modified_s[-1] if self._names else float("inf")
        return taken

    @property
    def oldest(self) -> int:
        """All that the listing has found of before was taken (Unix seconds); 0 if it has found nothing."""
        self._sort()
        if self._names:
            return int(self._modified_s[-1])
        return int(self._taken_s if self._cut_s == float("inf") else self._cut_s)

    def _sort(self) -> None:
        if not self._sorted:
            self._keep(np.argsort(-np.frombuffer(self._modified_s, np.float64), kind="stable"))
            self._sorted = True

    def _keep(self, numbers: np.ndarray[Any, np.dtype[np.intp]]) -> None:
        self._names = [self._names[number] for number in numbers.tolist()]
        self._modified_s = array("d", np.frombuffer(self._modified_s, np.float64)[numbers].tobytes())
        self._nbytes = array("q", np.frombuffer(self._nbytes, np.int64)[numbers].tobytes())


@dataclass
class _Running:
    """A sweep that has not ended yet."""

    victims: Victims
    early_s: float  # rows written before are among the oldest, and may be deleted at once
    took_s: float = 0.0  # without the time in which this process stood still
    rows: int = 0
    complete: bool = False  # everything was listed
    last: str = ""  # the last row listed; no other object, whose name may be damaged: rows behind it would be skipped


class Sweeper:
    """Of one mover, while it writes the record."""

    def __init__(
        self, takeover: Takeover, names: RowNames, server_s: Callable[[], float], max_age_s: float | None
    ) -> None:
        """`server_s`: Unix time by the server's clock. `max_age_s`: rows that were last written longer ago are deleted
        even if there is room."""
        self._takeover = takeover
        self._names = names
        self._server_s = server_s
        self._max_age_s = float("inf") if max_age_s is None else max_age_s
        self._account: Account | None = None  # of the tenure that all else belongs to
        self._reset(0.0)

    def _reset(self, now: float) -> None:
        """A tenure begins."""
        self._running: _Running | None = None
        self._victims = Victims(sys.maxsize)  # of the last sweep; before, all early ones of the first
        self._kept = 0  # names, when that ended
        self._rows: int | None = None  # found by it; None: the first one has not ended
        self._pause_until_s = now
        self._sweep_due = False  # there are no more names, but the next listing finds some

    def work(self, now: float) -> Steps[float]:
        """After a turn of the takeover: make room, and sweep if that is due. Returns the time."""
        if self._takeover.account is not self._account:
            self._account = self._takeover.account
            self._reset(now)
        if self._account is None:
            return now
        self._swap()
        try:
            now = yield from self._make_room(now)
            if self._running is not None or (now >= self._pause_until_s and self._is_due()):
                now = yield from self._sweep(now)
                now = yield from self._make_room(now)
        except Replaced:
            pass
        return now

    def _is_due(self) -> bool:
        account, quota = self._account, self._takeover.quota
        assert account is not None
        if account.sweep_first or account.has_uncounted or self._sweep_due:
            return True
        if 2 * len(self._victims) <= self._kept > 0:
            return True
        if self._rows is None and account.nbytes + 3 * quota.window_bytes > quota.capacity_bytes:
            return True  # room will be needed soon, and there are no names
        age_s = self._server_s() - account.swept
        return not 0 <= age_s < min(SWEEP_AGE_S, self._max_age_s / SWEEPS_PER_AGE)  # a clock may have been wrong

    def _renew(self, steps: Steps[float]) -> Steps[float]:
        """A turn of the takeover, between two requests."""
        now = yield from steps
        if self._takeover.account is not self._account:
            raise Replaced
        self._swap()
        return now

    def _sweep(self, now: float) -> Steps[float]:
        account, running = self._account, self._running
        assert account is not None
        if running is None:
            server_s = self._server_s()
            account.begin_sweep(int(server_s))
            quota = self._takeover.quota  # room is made for two windows, of a prefix that was written evenly
            early_s = account.oldest + (server_s - account.oldest) * 2 * quota.window_bytes / quota.capacity_bytes
            # Rows that are deleted by the last sweep's names may be found again. They are deleted once more, and first.
            early_s = early_s if account.oldest and self._rows is None else 0.0
            running = self._running = _Running(Victims(self._rows or 0), early_s)
        if not running.complete:
            now, _ = yield Ask(BEGIN, running.last)
        while not running.complete:
            asked_s = now
            now, page = yield Ask(PAGE)
            running.took_s += min(now - asked_s, self._takeover.terms.take_s)
            running.complete = page is None
            for each in page or ():
                self._found(each)
            if now >= self._takeover.next_s:
                now = yield from self._renew(self._takeover.turn(now))
            now = yield from self._make_room(now)
        if account.ended is None:
            if self._rows is None:
                for left in self._victims.take(float("inf"), 0.0, running.rows):
                    running.victims.add(*left)
            self._pause_until_s = now + max(self._takeover.terms.sweep_s, running.took_s)
            account.ended = running.victims.oldest
        return (yield from self._renew(self._takeover.renew(now)))

    def _found(self, each: Listed) -> None:
        account, running, row = self._account, self._running, self._names.parse(each.name)
        assert account is not None
        assert running is not None
        if row is not None:
            account.found(each.nbytes)
            running.rows += 1
            running.last = each.name
            early = each.modified_s < running.early_s and len(self._victims) < MIN_VICTIMS
            victims = self._victims if early else running.victims
            victims.add(each.modified_s, bytes.fromhex(row[0]) + row[1], each.nbytes)

    def _swap(self) -> None:
        """The names of a sweep serve once its account does, and no sooner nor later: some of those rows may have been
        deleted by the last sweep's names, or be in both, and each is subtracted once from an account."""
        assert self._account is not None
        if self._running is not None and self._account.sweep is None:
            self._victims, self._rows, self._running = self._running.victims, self._running.rows, None
            self._kept, self._sweep_due = len(self._victims), False

    def _make_room(self, now: float) -> Steps[float]:
        """Delete expired rows, and if less than a window is free the oldest others until two are."""
        account, quota = self._account, self._takeover.quota
        assert account is not None
        window, capacity, goal = quota.window_bytes, quota.capacity_bytes, math.inf
        freed = False
        while self._takeover.may_delete(now):
            if account.sweep_first:  # by counters that were read meanwhile
                goal = math.inf
            elif account.nbytes + window > capacity:
                # A window more than necessary, or there would be room for one row at a time.
                goal = max(0, capacity - 2 * window)
            victims, early = self._victims, self._rows is None
            taken = victims.take(account.nbytes - goal, self._server_s() - self._max_age_s, most_names())
            if not taken:
                break
            names = [self._names.name(name[:NAMESPACE_BYTES].hex(), name[NAMESPACE_BYTES:]) for _, name, _ in taken]
            try:
                now, gone = yield Ask(DELETE, names)
            except Exception:
                for each in taken:
                    victims.add(*each)  # perhaps deleted: they are deleted once more before others
                raise
            if not gone:  # as they may be locked for ever, they are not tried again before the next sweep
                self._kept -= len(taken)
                return now
            account.deleted(
                sum(each[2] for name, each in zip(names, taken, strict=True) if name in gone), by_running=early
            )
            for name, each in zip(names, taken, strict=True):
                if name not in gone:
                    victims.add(*each)
            if not early:
                account.oldest = victims.oldest
            freed = True
            if now >= self._takeover.next_s:
                now = yield from self._renew(self._takeover.turn(now))
        if freed:
            now = yield from self._renew(self._takeover.renew(now))
        if account.nbytes > goal and not self._victims:
            self._sweep_due = True
        return now
