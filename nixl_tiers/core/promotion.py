"""Promotion (prefetch): which rows come up from storage tiers, and how long requests wait for them.

`RequestIndex` has the requests by name, and ends their waits.
"""

from __future__ import annotations

from typing import Final

from nixl_tiers.base.chunk import Key
from nixl_tiers.core.deferred_free import DeferredFree
from nixl_tiers.core.existence import ExistenceChecks
from nixl_tiers.core.host import HostTier
from nixl_tiers.core.prefetch_queue import PrefetchQueue
from nixl_tiers.core.requests import GAVE_UP, NO_WISHES, OPEN, RUNNING, WAITING, Request, RequestWishes
from nixl_tiers.core.rows import LOADING, READY
from nixl_tiers.core.state import CascadeState
from nixl_tiers.core.stats import Savings
from nixl_tiers.core.tier import Tier
from nixl_tiers.core.types import TierState

PINS_PER_ROW: Final = 8  # that are released, or withdrawn, in the time that other work on one row takes
EXPIRE_EVERY_S: Final = 1.0
MAX_ARRIVED: Final = 1024  # rows that have come for one request; for more, it looks all of them up again


class Promotion:
    """Queues keys for the tiers that hold them (`enqueue`), and keeps the waits of requests: `wait` and `expire_if_due`
    their deadline, `release` their end. `PromotionJobs` loads what is queued.
    """

    def __init__(self, state: CascadeState, checks: ExistenceChecks) -> None:
        self._state = state
        self._host = state.host
        self._checks = checks
        self.prefetch_queue = PrefetchQueue(state, checks)
        self._waiting: dict[str, Request] = {}  # requests that wait, or for which rows were promoted and pinned
        self._look_again_s = float("-inf")  # for requests that never came back
        self.host_full = False  # promotions wait for others to unpin rows of a full host

    @property
    def busy(self) -> bool:
        """Whether a request waits, or has pinned rows."""
        return bool(self._waiting or self.prefetch_queue.busy)

    @property
    def waiting(self) -> list[Request]:
        return [request for request in self._waiting.values() if request.waiting]

    # --- for requests ------------------------------------------------------------------------------------------

    def enqueue(self, key: Key, request: Request) -> bool:
        """Queue a stored key for promotion on the request's behalf; False if no tier can load it now."""
        if request.gave_up or key in request.refused:
            return False
        for tier in self._state.tiers:
            if (request.wishes.allowed is None or tier.number in request.wishes.allowed) and tier.can_load(key):
                tier.queue_loads(request, (key,))
                return True
            self._note_refused(tier, key)
        request.withdraw((key,))
        request.forget_dead((key,))
        return False

    def note_refused(self, key: Key) -> None:
        """A request would load this row, which no tier can load now: that is what is tried first."""
        for tier in self._state.tiers:
            self._note_refused(tier, key)

    def wait(self, request: Request, now: float) -> None:
        """The request waits: arm its deadline if none runs, and pin the hits of this scan."""
        if request.deadline_s is None:
            request.deadline_s = now + self._state.limits.wait_s
        if request.waited.since_s is None:
            request.waited.since_s = now
        if not request.waiting:
            request.become(WAITING)
            self._waiting[request.name] = request
            for row in request.scan.hits:
                if not row.invalidated:
                    request.pin(row)

    def first_looked_up(self, request: Request, now: float) -> None:
        """A request of the line is looked up for the first time: what came up for it is kept as for any that waits."""
        self.prefetch_queue.leave(request)
        if request.waiting:
            request.deadline_s = now + self._state.limits.wait_s
            self._waiting[request.name] = request

    def expire_if_due(self, request: Request, now: float) -> bool:
        """End the request's wait if its deadline has passed. Whether it gets nothing more, for whatever reason. What is
        pinned for it stays so: it may load that."""
        if not request.gave_up and request.deadline_s is not None and now > request.deadline_s:
            self._end_wait(request)
            self._blame_slow_tiers(request, now)
        return request.gave_up

    def give_up_waiting(self, request: Request) -> None:
        """To compute what the request still waits for is quicker than to wait on: it loads what has come. What is
        queued for it is not promoted any more. No tier is to blame, so no breaker records it."""
        self._end_wait(request)

    def still_waits(self, request: Request, position: int | None, first: int, now: float) -> bool:
        """Whether the request, whose scan begins at `position`, would find that some of what it waits for is missing.
        Then it need not look up all that is there at every step. What has come meanwhile is judged once.
        """
        for _ in range(min(len(request.missing), MAX_ARRIVED)):
            place, key = request.missing[0]
            row = self._host.index.get(key)
            if row is not None and row.state is READY:
                if row.missing > first:
                    return False
                request.pin(row)
            elif place is None or position is None or place >= position:
                known = key in request.unknown
                return not self.expire_if_due(request, now) and (
                    row is not None or key in request.wanted or (known and self._checks.should_wait(key, request, now))
                )
            request.missing.popleft()
        return False

    def may_be_listed(self, key: Key, request: Request, now: float) -> bool:
        """Whether a tier that is still being listed may turn out to hold `key`."""
        return any(
            tier.state is TierState.LISTING
            and tier.readable
            and key not in tier.index
            and (request.wishes.allowed is None or tier.number in request.wishes.allowed)
            and not self._checks.known_absent(tier.number, key, now)
            for tier in self._state.tiers
        )

    def release(self, request: Request) -> None:
        """The request waits no longer (`Request.release`)."""
        request.release()
        self._waiting.pop(request.name, None)

    def observe_wait(self, request: Request, *, loaded: bool) -> tuple[str, float] | None:
        """The request's wait, if there was one, has ended: `loaded`, or it computes all. Returns the lowest tier that
        it asked, and the seconds."""
        waited: tuple[str, float] | None = None
        if request.waited.since_s is not None and self._state.tiers:
            outcome = "vain" if not loaded else "partial" if request.gave_up else "loaded"
            tier = self._state.tiers[request.waited.lowest]
            waited = tier.spec.name, request.waited.seen_s - request.waited.since_s
            self._state.samples.observe(waited[0], f"wait_{outcome}", waited[1])
            tier.counters.lost_vain_s += 0.0 if loaded else waited[1]
        request.waited.since_s, request.waited.lowest = None, 0
        return waited

    def reset(self, garbage: DeferredFree) -> None:
        """Requests go on, keep their deadlines, and wait for nothing (`Request.belongs_to`)."""
        garbage.add(self._waiting)
        self._waiting = {}
        self.prefetch_queue.clear()

    def expire(self, now: float) -> None:
        """Unpin rows that were promoted for requests that never came back for them. Looks for such requests once in a
        while, as it is called at every turn, and many may wait."""
        if now < self._look_again_s:
            return
        limit = now - self._state.limits.pin_s
        for request in [r for r in self._waiting.values() if r.deadline_s is None or r.deadline_s < limit]:
            if not self._state.take(1 + len(request.pinned) // PINS_PER_ROW):
                return
            request.become(GAVE_UP)
            self.release(request)
        self._look_again_s = now + EXPIRE_EVERY_S

    # --- inside ------------------------------------------------------------------------------------------------

    def _note_refused(self, tier: Tier, key: Key) -> None:
        is_open = not all(each.loads.closed for each in tier.members)
        if is_open and key in tier.index.rows and not tier.member_of(key).loads.closed:  # seldom: that takes longest
            tier.last_refused = key

    def _end_wait(self, request: Request) -> None:
        """It keeps what has come, and gets nothing more."""
        request.become(GAVE_UP)
        self._count_late(request)

    def _count_late(self, request: Request) -> None:
        """What the request waited for has not come in time."""
        rows = self._host.index
        late = [key for _, key in request.missing if (row := rows.get(key)) is None or row.state is not READY]
        for tier in self._state.tiers:
            here = tier.index.has_many(late) if late else []
            tier.counters.missed_late += sum(here)
            late = [key for key, held in zip(late, here, strict=True) if not held]

    def _blame_slow_tiers(self, request: Request, now: float) -> None:
        """A request has expired: a failure for the breaker of each tier that it waited for, even if none of that tier's
        jobs is late."""
        loading = [(key, row.source) for key, row in request.pinned.items() if row.state is LOADING and not row.removed]
        queued = request.wanted and not self.host_full  # then it waited for room, and not for a tier
        for tier in self._state.tiers:
            keys = {key for key, source in loading if source == tier.spec.name}
            slow = self._state.movers_that_move(tier, keys)
            if not loading and queued and tier.to_load:
                first = next(iter(request.wanted))
                key = next((key for key in request.wanted if tier.index.member_place_of(key) is not None), first)
                slow = [tier.member_of(key)]
            for member in slow:
                member.loads.record(False, now)


class RequestIndex:
    """The requests that have looked up, loaded or stored and have not ended, by name.

    It makes a request's state at its first use, and lets go of all that it holds at its end.
    """

    def __init__(self, host: HostTier, promotion: Promotion, savings: Savings) -> None:
        self._host = host
        self._promotion = promotion
        self._savings = savings
        self.by_name: dict[str, Request] = {}
        self.wishes: dict[str, RequestWishes] = {}  # of those that have any
        self.before_turn: set[str] = set()  # requests that wait for their turn, whether or not they are in line

    def get(self, name: str) -> Request:
        request = self.by_name.get(name)
        if request is None:
            wishes = self.wishes.get(name, NO_WISHES)
            request = self.by_name[name] = Request(name, self._host.generation, wishes)
        request.belongs_to(self._host.generation)
        return request

    def looked_up(self, name: str, now: float) -> Request:
        """The request, whose turn has come if it was in line."""
        self.before_turn.discard(name)
        request = self.get(name)
        if request.queued:
            self._promotion.first_looked_up(request, now)
        elif request.state is RUNNING:
            request.become(OPEN)
        if not request.gave_up:
            request.waited.seen_s = now
        return request

    def finish(self, name: str) -> None:
        """The request has ended: unpin its rows."""
        self.wishes.pop(name, None)
        self.before_turn.discard(name)
        self._savings.forget(name)
        request = self.by_name.pop(name, None)
        if request is not None:
            if request.queued:
                self._promotion.prefetch_queue.leave(request)
            self._promotion.observe_wait(request, loaded=False)
            request.become(GAVE_UP)
            self._promotion.release(request)
