"""Listings of a prefix and deletes of its oldest rows, by the mover that writes the usage record (takeover.py). No I/O
here either: `Sweeper` yields what is to be asked of the server.

A sweep lists the whole prefix, counts, and keeps the names of the oldest eighth, which are deleted between it and the
next. It takes minutes where there are millions of rows, so it is interrupted to renew the record, and goes on behind
the last row after a request that failed. A mover that has just taken the record over has no names: where the prefix is
full, it deletes what its first sweep finds among the oldest.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from botocore.exceptions import BotoCoreError

from nixl_tiers.base.chunk import NAMESPACE_BYTES
from nixl_tiers.tiers.s3.deletes import most_names
from nixl_tiers.tiers.s3.names import RowNames
from nixl_tiers.tiers.s3.record import Account
from nixl_tiers.tiers.s3.takeover import Ask, Steps, Takeover

VICTIM_SHARE: Final = 8  # the names of one row of so many are kept, the oldest
MIN_VICTIMS: Final = 1 << 16
MAX_EMPTY_PAGES: Final = 1000  # in a row, before a listing counts as one that has failed
SWEEP_AGE_S: Final = 3600.0  # a sweep at least so often
SWEEPS_PER_AGE: Final = 8  # and so often in `max_age`

BEGIN: Final = "begin"  # a listing behind this name
PAGE: Final = "page"  # -> the next page's (name, Last-Modified, bytes); None: it is complete
DELETE: Final = "delete"  # names -> those whose delete was confirmed


class EndlessListing(BotoCoreError):  # type: ignore[misc]
    """The server goes on with empty pages, each of which says that there are more."""

    fmt = "listings get empty pages without an end"


class EmptyPages:
    """Counts the empty pages in a row of one listing."""

    def __init__(self) -> None:
        self._count = 0

    def too_many(self, page: Mapping[str, Any]) -> bool:
        """Whether there were more than MAX_EMPTY_PAGES, with this next page."""
        self._count = 0 if page.get("Contents") else self._count + 1
        return self._count > MAX_EMPTY_PAGES


def limited(pages: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The same pages of a listing. Raises EndlessListing."""
    empty = EmptyPages()
    for page in pages:
        if empty.too_many(page):
            raise EndlessListing
        yield page


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
        self._names: list[bytes] = []
        self._modified_s = array("d")
        self._nbytes = array("q")
        self._order: np.ndarray[Any, np.dtype[np.intp]] | None = None
        self._next = 0
        self._taken_from = 0  # `_next` before the last `take`

    def add(self, modified_s: float, name: bytes, nbytes: int) -> None:
        if modified_s >= self._cut_s:
            return
        self._names.append(name)
        self._modified_s.append(modified_s)
        self._nbytes.append(nbytes)
        if len(self._names) >= 2 * self._limit:
            self._prune()

    def take(self, nbytes: int, before_s: float, most: int) -> dict[bytes, int]:
        """Up to `most` more of them, the oldest first: until they have `nbytes`, and all written before `before_s`."""
        order = self._sorted()
        taken: dict[bytes, int] = {}
        self._taken_from = self._next
        while self._next < len(order) and len(taken) < most:
            number = int(order[self._next])
            if nbytes <= 0 and self._modified_s[number] >= before_s:
                break
            taken[self._names[number]] = self._nbytes[number]
            nbytes -= self._nbytes[number]
            self._next += 1
        return taken

    def put_back(self) -> None:
        """What `take` has returned last is the first to be taken again."""
        self._next = self._taken_from

    @property
    def half_used(self) -> bool:
        return self._next > 0 and 2 * self._next >= len(self._names)

    @property
    def used_up(self) -> bool:
        return self._next >= len(self._names)

    @property
    def oldest(self) -> int:
        """All that the listing has found of before was taken (Unix seconds); 0 if it has found nothing."""
        order = self._sorted()
        if not len(order):
            return 0
        if self._next == len(order) and self._cut_s < float("inf"):
            return int(self._cut_s)
        return int(self._modified_s[int(order[min(self._next, len(order) - 1)])])

    def _sorted(self) -> np.ndarray[Any, np.dtype[np.intp]]:
        if self._order is None:
            self._order = np.argsort(np.frombuffer(self._modified_s, np.float64), kind="stable")
        return self._order

    def _prune(self) -> None:
        modified_s = np.frombuffer(self._modified_s, np.float64)
        kept = np.argpartition(modified_s, self._limit)[: self._limit + 1]
        self._cut_s = float(modified_s[kept[-1]])
        numbers = kept[:-1].tolist()
        self._names = [self._names[number] for number in numbers]
        self._modified_s = array("d", [self._modified_s[number] for number in numbers])
        self._nbytes = array("q", [self._nbytes[number] for number in numbers])


@dataclass
class _Running:
    """A sweep that has not ended yet."""

    victims: Victims
    early_s: float  # rows written before are among the oldest, and may be deleted at once
    early: dict[bytes, Listed] = field(default_factory=dict)
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
        self._running: _Running | None = None
        self._victims: Victims | None = None  # of the last sweep
        self._rows = 0  # found by it
        self._pause_until_s = 0.0
        self._sweep_due = False  # there are no more names, but the next listing finds some

    def work(self, now: float) -> Steps[float]:
        """After a turn of the takeover: make room, and sweep if that is due. Returns the time."""
        if self._takeover.account is not self._account:
            self._account, self._running, self._victims = self._takeover.account, None, None
            self._pause_until_s, self._sweep_due = now, False
        if self._account is None:
            return now
        self._swap()
        now = yield from self._make_room(now)
        if self._running is not None or (now >= self._pause_until_s and self._is_due()):
            now = yield from self._sweep(now)
            now = yield from self._make_room(now)
        return now

    def _is_due(self) -> bool:
        account, victims = self._account, self._victims
        assert account is not None
        quota = self._takeover.quota
        if account.sweep_first or self._sweep_due or (victims is not None and victims.half_used):
            return True
        if victims is None and account.nbytes + 3 * quota.window_bytes > quota.capacity_bytes:
            return True  # room will be needed soon, and there are no names
        return self._server_s() - account.swept >= min(SWEEP_AGE_S, self._max_age_s / SWEEPS_PER_AGE)

    def _holds(self) -> bool:
        return self._account is not None and self._takeover.account is self._account

    def _renew(self, now: float) -> Steps[float]:
        """Between two requests, if that is due."""
        if now >= self._takeover.next_s:
            now = yield from self._takeover.turn(now)
            if self._holds():
                self._swap()
        return now

    def _sweep(self, now: float) -> Steps[float]:
        account = self._account
        assert account is not None
        if self._running is None:
            server_s = self._server_s()
            account.begin_sweep(int(server_s))
            quota = self._takeover.quota  # room is made for two windows, of a prefix that was written evenly
            early_s = account.oldest + (server_s - account.oldest) * 2 * quota.window_bytes / quota.capacity_bytes
            self._running = _Running(Victims(self._rows), early_s if account.oldest else 0.0)
        running = self._running
        if not running.complete:
            now, _ = yield Ask(BEGIN, running.last)
        while not running.complete:
            asked_s = now
            now, page = yield Ask(PAGE)
            running.took_s += min(now - asked_s, self._takeover.terms.take_s)
            running.complete = page is None
            for each in page or ():
                self._found(each)
            now = yield from self._renew(now)
            if self._holds():
                now = yield from self._make_room(now)
            if not self._holds():
                return now
        if self._takeover.ended is None:
            for name, each in running.early.items():
                running.victims.add(each.modified_s, name, each.nbytes)
            running.early.clear()
            self._pause_until_s = now + max(self._takeover.terms.sweep_s, running.took_s)
            self._takeover.ended = running.victims.oldest
        now = yield from self._takeover.renew(now)
        if self._holds():
            self._swap()
        return now

    def _swap(self) -> None:
        """The names of a sweep serve once its account does, and no sooner nor later: some of those rows may have been
        deleted by the last sweep's names, or be in both, and each is subtracted once from an account."""
        assert self._account is not None
        if self._running is not None and self._account.sweep is None:
            self._victims, self._rows, self._running = self._running.victims, self._running.rows, None
            self._sweep_due = False

    def _found(self, each: Listed) -> None:
        running, row = self._running, self._names.parse(each.name)
        assert running is not None
        if row is None:
            return
        assert self._account is not None
        self._account.found(each.nbytes)
        running.rows += 1
        running.last = each.name
        name = bytes.fromhex(row[0]) + row[1]
        # Rows that are deleted by the last sweep's names may be here again. They are deleted once more before others.
        if self._victims is None and each.modified_s < running.early_s:
            running.early[name] = each
        else:
            running.victims.add(each.modified_s, name, each.nbytes)

    def _make_room(self, now: float) -> Steps[float]:
        """Delete expired rows, and if less than a window is free the oldest others until two are."""
        account, quota = self._account, self._takeover.quota
        assert account is not None
        window, capacity, goal = quota.window_bytes, quota.capacity_bytes, account.nbytes
        if account.nbytes + window > capacity and not account.sweep_first:
            # A window more than necessary, or there would be room for one row at a time.
            goal = max(0, capacity - 2 * window)
        freed = False
        while self._holds() and self._takeover.may_delete(now):
            victims, names = self._victims, self._take(account.nbytes - goal)
            if not names:
                break
            try:
                now, gone = yield Ask(DELETE, [self._row_name(name) for name in names])
            except Exception:
                if victims is not None:
                    victims.put_back()  # perhaps deleted: they are deleted once more before others
                raise
            gone_names = [name for name in names if self._row_name(name) in gone]
            if not gone_names:
                return now
            if victims is None:
                assert self._running is not None
                for name in gone_names:
                    del self._running.early[name]
            else:
                account.oldest = victims.oldest
            account.deleted(sum(names[name] for name in gone_names), by_running=victims is None)
            freed = True
            now = yield from self._renew(now)
        if not self._holds():
            return now
        if freed:
            now = yield from self._takeover.renew(now)
        if account.nbytes > goal and self._victims is not None and self._victims.used_up:
            self._sweep_due = True
        return now

    def _take(self, nbytes: int) -> dict[bytes, int]:
        """Names of rows to be deleted now, with their bytes."""
        if self._victims is not None:
            return self._victims.take(nbytes, self._server_s() - self._max_age_s, most_names())
        taken: dict[bytes, int] = {}
        for name, each in () if self._running is None else self._running.early.items():
            if nbytes <= 0 or len(taken) == most_names():
                break
            taken[name] = each.nbytes
            nbytes -= each.nbytes
        return taken

    def _row_name(self, packed: bytes) -> str:
        return self._names.name(packed[:NAMESPACE_BYTES].hex(), packed[NAMESPACE_BYTES:])
