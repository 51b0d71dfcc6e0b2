"""Prefetch queue: requests that wait for their turn, whose rows come up before it (prefetch).

A scheduler looks a request up when its turn comes, so without this the time for storage would follow the time in the
queue. Promotions for the line are a second class. They are queued only while few rows are under way, so that a request
whose turn has come waits about `ahead_s` for them at most; and the rows that they pin in host memory are given back,
those of the last in line first, when a request before them needs the room. And nothing is promoted for a request before
a step has passed it over: the turn of one that finds an idle engine comes at once, and then its load is weighed first.

Where a tier is asked, a chain does not end at the first key that is not known: it is asked for first (existence.py).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Final

from nixl_tiers.base.chunk import Key
from nixl_tiers.core.existence import ExistenceChecks
from nixl_tiers.core.requests import OPEN, QUEUED, Request, RequestWishes
from nixl_tiers.core.rows import LOADING
from nixl_tiers.core.state import CascadeState
from nixl_tiers.core.tier import Tier
from nixl_tiers.core.types import Direction

Rank = tuple[float, ...]
AFTER_ALL: Final[Rank] = (float("inf"),)  # of keys for which no request waits yet
MAX_PREFETCHES: Final = 64  # places of such keys: of more, the last would evict the first


class QueuedPrefetch:
    """A request's place in the line.

    `keys`: of its chain, from the first that the engine lacks, of which `at` are dealt with; `held`: so many of them
    are in host memory, or on their way there, and pinned for it; `queued`: where in the chain those are that were
    queued; the first `arrived` of the chain have come. `asked`: of what is before this place of its chain, tiers were
    asked whether they hold it. `step`: in which it joined, and `full_step` in which it last found no room. A `prefetch`
    is no request: it ends when its rows have come.
    """

    __slots__ = (
        "arrived", "asked", "at", "full_step", "held", "keys", "order", "prefetch", "queued", "request", "step",
    )  # fmt: skip

    def __init__(self, request: Request, keys: Sequence[Key], rank: Rank, number: int, step: int) -> None:
        self.request = request
        self.keys = keys
        self.step = step
        self.order = (rank, number)
        self.prefetch = rank is AFTER_ALL
        self.at = self.held = self.arrived = self.asked = 0
        self.full_step = -1
        self.queued: dict[Key, int] = {}

    def __lt__(self, other: QueuedPrefetch) -> bool:
        return self.order < other.order


class PrefetchQueue:
    """Requests in the order of their turns. `feed` queues promotions for those that are next."""

    def __init__(self, state: CascadeState, checks: ExistenceChecks) -> None:
        self._state = state
        self._checks = checks
        self._host = state.host
        self._places: list[QueuedPrefetch] = []
        self._holding: list[QueuedPrefetch] = []  # those that hold rows, in the same order
        self._of: dict[str, QueuedPrefetch] = {}
        self._joined = 0

    @property
    def _share(self) -> int:
        """How many rows all of them may hold."""
        return int(self._host.limit * self._state.limits.line_share)

    @property
    def busy(self) -> bool:
        """Whether rows may have to be promoted without any other event."""
        first = self._places[: self._state.limits.line_requests]
        return any(place.prefetch or (place.at < len(place.keys) and self._is_waiting(place)) for place in first)

    def has_room(self, rank: Rank) -> bool:
        """Whether a request of this rank would be one of the next."""
        last = self._state.limits.line_requests - 1
        return len(self._places) <= last or rank < self._places[last].order[0]

    def join(self, request: Request, keys: Sequence[Key], rank: Rank) -> None:
        """A new request waits for its turn; the lower its `rank`, the sooner that comes. Nobody may change `keys`."""
        self._joined += 1
        place = self._of[request.name] = QueuedPrefetch(request, keys, rank, self._joined, self._host.step)
        request.become(QUEUED)
        insort(self._places, place)

    def prefetch(self, keys: Sequence[Key], tenant: int = 0) -> None:
        """Keys of this tenant for which no request waits yet. Calls for which nothing was promoted yet are one place,
        as far as the share has room for all of them; of calls beyond a number of places nothing is promoted."""
        last = self._places[-1] if self._places else None
        few = last is not None and last.prefetch and not last.at and len(last.keys) + len(keys) <= self._share
        if last is not None and few and isinstance(last.keys, list) and last.request.wishes.tenant == tenant:
            last.keys += keys
        elif len(self._places) < MAX_PREFETCHES or not self._places[-MAX_PREFETCHES].prefetch:
            request = Request(f"prefetch {self._joined}", self._host.generation, RequestWishes(tenant))
            request.scan.ascending = False
            self.join(request, list(keys), AFTER_ALL)

    def find_no_room(self, request: Request, key: Key) -> None:
        """The host has no room for a row that was queued for a request in line. The next steps try again from there, as
        without this row those behind it are worth nothing. A prefetch goes on without it."""
        request.withdraw((key,))
        place = self._of[request.name]
        if (at := place.queued.pop(key, None)) is None or place.prefetch:
            return
        place.at = min(place.at, at)
        place.step = place.full_step = self._host.step
        self._hold_less(place)

    def leave(self, request: Request) -> None:
        """Its turn has come, or it has ended. What it holds stays pinned."""
        request.leave_line()
        place = self._of.pop(request.name)
        del self._places[bisect_left(self._places, place)]
        if place.held:
            del self._holding[bisect_left(self._holding, place)]

    def clear(self) -> None:
        """After a reset there is nothing to promote, and what was pinned ends with its generation."""
        for place in self._places:
            place.request.become(OPEN)
        self._places, self._holding, self._of = [], [], {}

    def feed(self, now: float) -> list[Tier]:
        """Queue what may be promoted now for the requests that are next, as much as the slice has room for, and again
        what has not come. Returns the tiers that it comes from."""
        queued = [tier.rows_to_load for tier in self._state.tiers]
        self._feed(now)
        return [tier for tier, before in zip(self._state.tiers, queued, strict=True) if tier.rows_to_load > before]

    def give_way(self, count: int) -> bool:
        """A request whose turn has come finds the host full: the last in line unpin `count` rows or more, as far as
        there are so many. They get them back at their turn, as far as they are still there then."""
        given = 0
        while given < count and (freed := self._last_gives(None)):
            given += freed
        return given > 0

    # --- inside ------------------------------------------------------------------------------------------------

    def _feed(self, now: float) -> None:
        limits = self._state.limits
        for place in self._places[: limits.line_requests]:
            self._find_lost(place)
        room = self._share - sum(place.held for place in self._holding)
        number = 0
        while number < min(len(self._places), limits.line_requests):
            place = self._places[number]
            if place.full_step == self._host.step:
                break  # its room is not for those behind it, who would give it back, unused, in the next step
            while place.at < len(place.keys) and self._is_waiting(place):
                if room <= 0 and (freed := self._last_gives(place)) == 0:
                    break
                if room <= 0:
                    room += freed
                if self._state.slice_used_up:
                    return
                before = place.held
                if not self._advance(place, now):
                    break  # which is no work that is left: nothing can be done before some load has ended
                self._state.take()
                room -= place.held - before
            if not (place.prefetch and self._has_ended(place)):
                number += 1
                continue
            room += place.held
            place.request.release()
            self.leave(place.request)
            if not self._state.take():
                return

    def _find_lost(self, place: QueuedPrefetch) -> None:
        """Whether the first row that was queued for it, and has not come, will not, as its load has failed: it goes
        back there; a prefetch comes to what it lacks again at its end."""
        request = place.request
        while place.arrived < min(place.at, len(place.keys)):
            key = place.keys[place.arrived]
            row = request.pinned.get(key)
            if key in request.wanted or (row is not None and row.state is LOADING and not row.removed):
                return
            if key in place.queued and (row is None or row.removed):
                self._go_back(place)
                if not place.prefetch:
                    return
            place.arrived += 1

    def _go_back(self, place: QueuedPrefetch) -> None:
        request, pinned = place.request, place.request.pinned
        queued = [key for key in place.queued if key not in request.wanted]
        lost = [key for key in queued if (row := pinned.get(key)) is None or row.removed]
        request.forget_dead(lost)
        for key in lost:
            del place.queued[key]
            self._hold_less(place)
        if not place.prefetch:
            place.at = place.arrived
        elif isinstance(place.keys, list):
            place.keys += lost

    def _hold_less(self, place: QueuedPrefetch) -> None:
        place.held -= 1
        if not place.held:
            del self._holding[bisect_left(self._holding, place)]

    def _is_waiting(self, place: QueuedPrefetch) -> bool:
        """Whether a step has passed it over: its turn was not to come at once, or there may be room again."""
        return place.prefetch or place.step != self._host.step

    def _advance(self, place: QueuedPrefetch, now: float) -> bool:
        """Keep the next row of its chain, or queue it to be promoted; False: not now."""
        request, key = place.request, place.keys[place.at]
        if request.lost is not None:
            place.keys = ()  # a tier lacked a row of its chain
            return True
        row = self._host.index.get(key)
        if key in request.wanted or (row is not None and request.pinned.get(key) is row):
            place.at += 1  # it has this one already, or it is queued
            return True
        if row is not None and place.prefetch:
            self._host.touch((row,), self._state.tick_of(request))
        elif row is not None:
            request.pin(row)
        else:
            tier = self._tier_of(request, key)
            if tier is None and self._ask(place, key, now):
                return False
            if tier is None:
                if not place.prefetch:
                    place.keys = ()  # a chain ends at its first hole
                place.at += 1
                return True
            if not self._has_time(tier):
                return False
            tier.queue_loads(request, (key,))
            place.queued[key] = place.at
        place.at += 1
        if not place.held:
            insort(self._holding, place)
        place.held += 1
        return True

    def _tier_of(self, request: Request, key: Key) -> Tier | None:
        for tier in self._state.tiers:
            if (request.wishes.allowed is None or tier.number in request.wishes.allowed) and tier.can_load(key):
                return tier
        return None

    def _ask(self, place: QueuedPrefetch, key: Key, now: float) -> bool:
        """Whether a tier may turn out to hold its next key, which none is known to."""
        if self._checks.is_asked(place.request, key):
            return True
        if place.at < place.asked:
            return False
        keys = place.keys[place.at : place.at + self._state.limits.keys_per_check]
        if place.prefetch:  # no chain: each of them is asked for
            keys = [each for each in keys if each not in self._host.index]
        asked = self._checks.ask_ahead(place.request, keys, now)
        if asked:
            place.asked = place.at + self._state.limits.keys_per_check
        return asked is not None

    def _has_time(self, tier: Tier) -> bool:
        """Whether one row more keeps a request whose turn comes now waiting no longer than about `ahead_s`."""
        bytes_per_s = sum(member.throughput[Direction.LOAD].bytes_per_s for member in tier.members)
        ahead = int(bytes_per_s * self._state.limits.ahead_s) // self._state.row_bytes
        return tier.rows_to_load + tier.rows_loading < min(self._state.window(tier, Direction.LOAD), max(1, ahead))

    def _last_gives(self, before: QueuedPrefetch | None) -> int:
        """The last that holds rows, if it comes after `before`, unpins them, and gets no others: how many."""
        if not self._holding or (before is not None and not before < self._holding[-1]):
            return 0
        last = self._holding.pop()
        given, last.held, last.keys, last.queued = last.held, 0, (), {}
        last.request.release()
        return given

    def _has_ended(self, place: QueuedPrefetch) -> bool:
        """Whether nothing more is promoted for this prefetch, and what was has come, or will not."""
        self._find_lost(place)
        if place.at < len(place.keys) and place.held < self._share:
            return False
        return place.arrived >= min(place.at, len(place.keys))
