"""Listings of the objects below a private prefix, page by page, on the control thread.

Names come in order, and so does PrefixQuota hold them: each page is compared with what is known of its part of the
names, and only the differences are handed to the mover's loop.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple, Protocol

import numpy as np
from botocore.exceptions import BotoCoreError
from botocore.parsers import ResponseParserError

from nixl_tiers.base.chunk import Key
from nixl_tiers.tiers.base import GONE, MAX_ENTRIES, Entry
from nixl_tiers.tiers.s3.answers import answered_at_s
from nixl_tiers.tiers.s3.names import LEAF_KEYS, KeySet, Place, RowNames, pack, place_in, place_of, unpack
from nixl_tiers.tiers.s3.quota import Group, Kind, PrefixQuota

MAX_WAITING: Final = 4096  # differences that the loop has not taken yet; beyond that a listing pauses
PAUSE_S: Final = 0.05  # of a listing that waits for the loop
MAX_EMPTY_PAGES: Final = 1000  # in a row, before a listing counts as one that has failed


class EndlessListing(BotoCoreError):  # type: ignore[misc]
    """The server goes on with empty pages, each of which says that there are more."""

    fmt = "listings get empty pages without an end: rows stored earlier, or by others, are not found"


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


class Deleter(Protocol):
    """Deletes objects in the background."""

    @property
    def has_room(self) -> bool:
        """Whether more deletes may be queued. If not, expired objects are left to a later sweep."""

    def delete(self, names: Sequence[str]) -> None: ...


class ListedRow(NamedTuple):
    namespace: str
    key: Key
    nbytes: int
    modified_s: float
    expired: bool


@dataclass(frozen=True)
class Page:
    """At most 1000 objects, in the order of their names; those that are no rows are left out."""

    rows: Sequence[ListedRow]
    last: str | None  # the name behind which the next page begins; None: the listing ends here


class Listing(ABC):
    """A listing in progress: the control thread calls `step`, the loop iterates over `entries`.

    An object's age is its Last-Modified compared with the Date of the answer, both by the server's clock. The seal in
    it may be older than that; then a load finds the row expired.
    """

    asks_on: ClassVar[bool] = False
    """Whether it ends with a page without rows, since some servers end a listing too early."""

    def __init__(self, quota: PrefixQuota, names: RowNames, *, max_age_s: float | None, pause_s: float = 0.0) -> None:
        """`pause_s`: at least this long between the requests of two pages."""
        self.done = threading.Event()
        self.comparing = False  # left true by an exception: a page was compared in part, and cannot be again
        self._quota = quota
        self._names = names
        self._max_age_s = max_age_s
        self._pause_s = pause_s
        self._requested_s = float("-inf")
        self._after = ""
        self._token: str | None = None  # of the request after an empty page
        self._empty = EmptyPages()
        self._differences: deque[Key] = deque()  # rows that are gone

    def next_step_s(self, now: float) -> float:
        """When `step` may be called (monotonic)."""
        if len(self._differences) >= MAX_WAITING:
            return now + PAUSE_S
        return now if self._token is not None else self._requested_s + self._pause_s

    def step(self, client: Any, bucket: str) -> None:
        """Request the next page, and compare it. Raises what boto3 raises; then call it again later."""
        self._requested_s = time.monotonic()
        if self._token is None:
            self._before_page()
        page = self._fetch(client, bucket)
        if page is None:
            return
        self.comparing = True
        self._after = page.last or ""
        self._compare(page)
        self.comparing = False
        if page.last is None:
            self.done.set()

    def entries(self, tick: Callable[[], int]) -> Iterator[list[Entry]]:
        """What has changed, in batches; an empty one: nothing yet. `tick`: above those of all rows known by then."""
        while True:
            ended = self.done.is_set()
            some = [self._differences.popleft() for _ in range(min(MAX_ENTRIES, len(self._differences)))]
            # The loop may have stored the row since then: it knows better.
            batch = [Entry(GONE, key, tick()) for key in some if key not in self._quota]
            if batch or not (ended or some):
                yield batch
            elif not some:
                return

    def _before_page(self) -> None:
        self._quota.watch()

    @abstractmethod
    def _compare(self, page: Page) -> None:
        """Compare a page, which may be the last."""

    def _fetch(self, client: Any, bucket: str) -> Page | None:
        """None: an empty page, which is not the end of the listing. After too many of them each raises EndlessListing,
        so that the next is requested after a pause."""
        position = {"StartAfter": self._after} if self._after else {}
        if self._token is not None:
            position = {"ContinuationToken": self._token}
        self._token = None  # if this request fails, the next begins behind the last page
        answer = client.list_objects_v2(Bucket=bucket, Prefix=self._names.root, **position)
        if answer.get("IsTruncated") and not answer.get("Contents"):
            self._token = answer["NextContinuationToken"]
            if self._empty.too_many(answer):
                raise EndlessListing
            return None
        self._empty = EmptyPages()
        oldest_s = float("-inf")
        if self._max_age_s is not None and (now_s := answered_at_s(answer)) is not None:
            oldest_s = now_s - self._max_age_s
        found = [each for each in answer.get("Contents", ()) if each["Key"] != self._after]  # some include that name
        rows = []
        before = self._after if self._names.parse(self._after) else ""
        for each in found:
            row = self._names.parse(each["Key"])
            if row is not None:
                if each["Key"] <= before:  # damaged on its way: what follows needs names that ascend
                    raise ResponseParserError("the names of a page are not in order")
                before = each["Key"]
                modified_s = each["LastModified"].timestamp()
                rows.append(ListedRow(*row, each["Size"], modified_s, modified_s < oldest_s))
        goes_on = bool(found) and found[-1]["Key"] > self._after
        if not (found and answer.get("IsTruncated")) and not (goes_on and self.asks_on):
            return Page(rows, None)
        # From the last row on, not from an object behind it: a name that was damaged would skip rows, or repeat them.
        return Page(rows, before if rows else found[-1]["Key"])


class FullListing(Listing):
    """After an open: the rows of one namespace, oldest first; what else is below the prefix is counted. Expired rows
    are deleted at once, or left out."""

    asks_on = True

    def __init__(
        self,
        quota: PrefixQuota,
        names: RowNames,
        served: Kind,
        *,
        max_age_s: float | None,
        deleter: Deleter | None,
        differences_only: bool = False,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        """`deleter`: of expired objects; None: they are only left out.
        `differences_only`: the tier has listed its rows before; hand over what is new, and what is gone.
        `begin`: called on the control thread before the first page is requested, again if that fails."""
        super().__init__(quota, names, max_age_s=max_age_s)
        self._served = served
        self._deleter = deleter
        self._differences_only = differences_only
        self._begin = begin
        self._runs: dict[Kind, Run] = {served: Run()}
        self._modified_s = array("d")
        self._order: np.ndarray[Any, np.dtype[np.intp]] = np.empty(0, np.intp)
        self._known = 0  # how many of the rows listed were known before
        self._gone: set[Key] = set()  # handed over when the quota does not hold them any more

    def entries(self, tick: Callable[[], int]) -> Iterator[list[Entry]]:
        yield from super().entries(tick)
        leaves = self._runs[self._served].leaves
        now, modified_s = tick() - 1, float("-inf")
        for start in range(0, len(self._order), MAX_ENTRIES):
            batch = []
            for number in self._order[start : start + MAX_ENTRIES].tolist():
                key = place_in(leaves[number // LEAF_KEYS], number % LEAF_KEYS)[1:]
                if self._modified_s[number] > modified_s:
                    now, modified_s = max(now + 1, tick()), self._modified_s[number]
                if not self._quota.is_left_alone(key):
                    batch.append(Entry(number, key, now))
            if batch:
                yield batch

    def _before_page(self) -> None:
        if not self._after:
            self._begin()
            super()._before_page()

    def _compare(self, page: Page) -> None:
        for row in page.rows:
            if row.expired and self._expired(row):
                continue
            kind = (row.namespace, row.nbytes)
            run = self._runs.setdefault(kind, Run())
            run.add(place_of(row.key), row.modified_s)
            if kind == self._served:
                self._modified_s.append(row.modified_s)
        if page.last is None:
            self._end()

    def _end(self) -> None:
        for run in self._runs.values():
            run.end()
        groups = {kind: Group(KeySet(run.leaves), run.newest_s) for kind, run in self._runs.items()}
        if self._differences_only:
            self._leave_out_known()
        self._quota.adopt(groups)
        self._differences.extend(self._gone)
        order = np.argsort(np.frombuffer(self._modified_s, np.float64), kind="stable")  # with NaN last
        self._order = order[: len(order) - self._known]

    def _leave_out_known(self) -> None:
        """Find out which of the rows listed are new to the quota, and which of its rows are gone."""
        number, compared = 0, b""
        leaves = self._runs[self._served].leaves
        for leaf in [*leaves, None]:
            places = [] if leaf is None else unpack(leaf)
            upto = places[-1] if places else None
            found: set[Place] = set()
            while upto is None or compared < upto:
                rest = [place for place in places if place > compared]
                some, gone, reached = self._quota.compare(compared, upto, rest)
                found.update(some)
                self._gone.update(place[1:] for place in gone)
                if reached is None:
                    break
                compared = reached
            for place in places:
                if place not in found:
                    self._modified_s[number] = float("nan")
                    self._known += 1
                number += 1

    def _expired(self, row: ListedRow) -> bool:
        """Whether an expired object is dealt with; else it is held like any other until the next sweep."""
        served = (row.namespace, row.nbytes) == self._served
        if self._deleter is not None:
            if not self._deleter.has_room:
                return False
            if (name := self._quota.expire_unknown(row.namespace, row.key, row.nbytes)) is not None:
                self._deleter.delete([name])
        elif not served:
            return False
        if served and row.key in self._quota:
            self._gone.add(row.key)
        return True


class Run:
    """Places of one kind, in order, as the leaves of a KeySet, all full but the last."""

    def __init__(self) -> None:
        self.leaves: list[bytes] = []
        self.newest_s = float("-inf")
        self._last: list[Place] = []

    def add(self, place: Place, modified_s: float) -> None:
        self.newest_s = max(self.newest_s, modified_s)
        self._last.append(place)
        if len(self._last) == LEAF_KEYS:
            self.end()

    def end(self) -> None:
        if self._last:
            self.leaves.append(pack(self._last))
            self._last = []


class ExpirySweep(Listing):
    """Expired objects, which are deleted."""

    def __init__(
        self,
        quota: PrefixQuota,
        names: RowNames,
        served: Kind,
        *,
        max_age_s: float,
        pause_s: float,
        deleter: Deleter | None,
    ) -> None:
        """`deleter`: None: expired rows of the namespace served are only forgotten."""
        super().__init__(quota, names, max_age_s=max_age_s, pause_s=pause_s)
        self._served = served
        self._deleter = deleter

    def _compare(self, page: Page) -> None:
        for row in page.rows:
            served = (row.namespace, row.nbytes) == self._served
            if row.expired and (served or self._deleter is not None) and self._expire(row) and served:
                self._differences.append(row.key)

    def _expire(self, row: ListedRow) -> bool:
        if self._deleter is not None and not self._deleter.has_room:
            return False
        name = self._quota.expire(row.namespace, row.key, row.nbytes, delete=self._deleter is not None)
        if name is not None and self._deleter is not None:
            self._deleter.delete([name])
        return name is not None
