"""Promotion (prefetch): how rows come up from storage tiers, for requests that wait for them up to one deadline."""

from __future__ import annotations

from collections import deque
from typing import Final

from nixl_tiers.cascade.existence import ExistenceChecks
from nixl_tiers.cascade.garbage import Garbage
from nixl_tiers.cascade.host import Row, RowState
from nixl_tiers.cascade.requests import Request
from nixl_tiers.cascade.state import CascadeState
from nixl_tiers.cascade.tier_index import TierIndex
from nixl_tiers.cascade.types import Direction, Job, PlannedMove, TierState
from nixl_tiers.cascade.writeback import WriteBack
from nixl_tiers.chunk import Key, Outcome

PINS_PER_ROW: Final = 8  # that are released in the time that other work on one row takes
MAX_ARRIVED: Final = 1024  # rows that have come for one request; for more, it looks all of them up again


class Promotion:
    """Queues keys for the tiers that hold them, plans their loads, and makes them hits or retries elsewhere.

    A key's way: `enqueue` queues it, `plan` starts its load into a host row in state LOADING, and `load_ended` makes
    the row READY, or has its requests ask the next tier. `wait` and `has_expired` keep the request's deadline.
    """

    def __init__(self, state: CascadeState, checks: ExistenceChecks, writeback: WriteBack) -> None:
        self._state = state
        self._host = state.host
        self._checks = checks
        self._writeback = writeback
        self._waiting: dict[str, Request] = {}  # requests that wait, or for which rows were promoted and pinned
        self._loading_for: dict[int, list[Request]] = {}  # by Row.order, of rows in state LOADING
        self._retries: deque[tuple[Row, list[Request]]] = deque()  # rows that failed, and who waited for them
        self._host_full_since_s: float | None = None  # when promotions began to wait for a write-back

    @property
    def busy(self) -> bool:
        """Whether a request waits, or has pinned rows."""
        return bool(self._waiting or self._retries)

    # --- for requests ------------------------------------------------------------------------------------------

    def enqueue(self, key: Key, request: Request, now: float) -> bool:
        """Queue a stored key for promotion on the request's behalf; False if no tier can load it now."""
        if request.expired or (key in request.asked and not request.asked[key]):
            return False
        for tier in self._state.tiers:
            if (request.allowed is None or tier.number in request.allowed) and tier.can_load(key, now):
                tier.to_load.append((request, key))
                request.asked[key] = True
                return True
            if key in tier:
                if tier.denylist.trial_due(key, now):
                    tier.trials[key] = None
                elif not tier.breakers[Direction.LOAD].closed:
                    tier.last_refused = key
        request.asked.pop(key, None)
        return False

    def wait(self, request: Request, now: float) -> None:
        """The request waits: arm its deadline if none runs, and pin the hits of this scan."""
        if request.deadline_s is None:
            request.deadline_s = now + self._state.limits.wait_s
        if not request.pending:
            request.pending = True
            self._waiting[request.name] = request
            for row in request.scan_hits:
                if not row.invalidated:
                    request.pin(row)
        request.stopped = not request.first_scan and request.ascending

    def has_expired(self, request: Request, now: float) -> bool:
        """Whether the request's deadline has passed. What is pinned for it stays so: it may load that."""
        if not request.expired and request.deadline_s is not None and now > request.deadline_s:
            request.expired = True
            self._blame_slow_tiers(request, now)
        return request.expired

    def still_waits(self, request: Request, position: int | None, first: int, now: float) -> bool:
        """Whether the request, whose scan begins at `position`, would find that some of what it waits for is missing.
        Then it need not look up all that is there at every step. What has come meanwhile is judged once.
        """
        for _ in range(min(len(request.missing), MAX_ARRIVED)):
            place, key = request.missing[0]
            row = self._host.index.get(key)
            if row is not None and row.state is RowState.READY:
                if row.missing > first:
                    return False
                request.pin(row)
            elif place is None or position is None or place >= position:
                known = key in request.unknown
                return not self.has_expired(request, now) and (
                    row is not None
                    or request.asked.get(key, False)
                    or (known and self._checks.should_wait(key, request, now))
                )
            request.missing.popleft()
        return False

    def may_be_listed(self, key: Key, request: Request, now: float) -> bool:
        """Whether a tier that is still being listed may turn out to hold `key`."""
        return any(
            tier.state is TierState.LISTING
            and tier.readable
            and key not in tier
            and (request.allowed is None or tier.number in request.allowed)
            and not self._checks.known_absent(tier.number, key, now)
            for tier in self._state.tiers
        )

    def release(self, request: Request) -> None:
        """The request waits no longer: unpin its rows, forget what it asked for."""
        request.release()
        self._waiting.pop(request.name, None)

    def reset(self, garbage: Garbage) -> None:
        """Requests go on, keep their deadlines, and wait for nothing (`Request.belongs_to`)."""
        garbage.add(self._retries, self._waiting)
        self._retries, self._waiting = deque(), {}

    def expire(self, now: float) -> None:
        """Unpin rows that were promoted for requests that never came back for them."""
        limit = now - self._state.limits.pin_s
        for request in [r for r in self._waiting.values() if r.deadline_s is None or r.deadline_s < limit]:
            if not self._state.take(1 + len(request.pinned) // PINS_PER_ROW):
                return
            request.expired = True
            self.release(request)

    # --- jobs --------------------------------------------------------------------------------------------------

    def plan(self, tier: TierIndex, now: float) -> list[Job]:
        """Load jobs for the keys at the front of the tier's queue, as many as its window, mover and the host take."""
        wanted: dict[Key, list[Request]] = {}
        most = min(self._state.load_window - tier.rows_loading, tier.send_credits * self._state.rows_per_job)
        if self._waits_for_writeback(now):
            most = min(most, self._host.free)
        while tier.to_load and len(wanted) < most and self._state.take():
            request, key = tier.to_load.popleft()
            if not (request.waiting and request.asked.get(key)):
                continue  # it has loaded, expired or ended since it asked
            row = self._host.index.get(key)
            if row is not None:
                request.pin(row)
                if row.state is RowState.LOADING:
                    self._loading_for.setdefault(row.order, []).append(request)
            elif tier.open_for_load(key, now) is not None:
                wanted.setdefault(key, []).append(request)
            else:
                request.asked.pop(key, None)
        room = self._state.make_room(len(wanted))
        moves: list[PlannedMove] = []
        put_off: list[tuple[Request, Key]] = []
        for key, requests in wanted.items():
            if len(moves) == room:
                if self._host.searching:
                    put_off += ((request, key) for request in requests)
                    continue
                # The host is full of pinned rows: this prefix ends here.
                for request in requests:
                    request.asked[key] = False
                continue
            tick = self._state.tick_of(requests[0])
            row = self._host.insert(key, RowState.LOADING, tick)
            row.source = tier.spec.name
            self._loading_for[row.order] = requests
            for request in requests:
                request.pin(row)
            moves.append(tier.start_load(row))
        tier.to_load.extendleft(reversed(put_off))
        return self._state.start_jobs(tier, Direction.LOAD, moves, now, min(len(tier.to_load), most - len(wanted)))

    def load_ended(self, tier: TierIndex, move: PlannedMove, outcome: Outcome, now: float) -> None:
        """A mover is done with this load: its row is a hit, or its requests ask the next tier."""
        row = move.row
        tier.end_load(move)
        if outcome is Outcome.OK:
            tier.counters.bytes_read += self._state.row_bytes
            if not row.invalidated:
                row.state = RowState.READY
                row.sealed = True
                self._host.counters.promoted += 1
                if tier.staged.get(move.key) is row:
                    self._writeback.demotion_loaded(tier, move.key)
                else:
                    self._writeback.write_through((row,), self._state.tiers[: tier.number])
        else:
            if outcome in (Outcome.FAILED, Outcome.NO_SPACE):
                tier.counters.failed += 1
                if tier.index.get(move.key) is move.entry:
                    tier.cancel_eviction(move.key, self._state.tick)
            elif tier.invalidate(move.key, move.entry):
                tier.counters.corrupt += outcome is Outcome.CORRUPT
                tier.counters.missing += outcome is Outcome.MISSING
                self._checks.mark_absent(tier.number, move.key, now)
            self.give_up(tier, row)
        self._loading_for.pop(row.order, None)
        self._host.reclaim(row)

    def give_up(self, tier: TierIndex, row: Row) -> None:
        """A row's load has failed, or is late: invalidate the row; its requests ask the next tier."""
        if row.invalidated:
            return
        self._host.invalidate(row)
        self._retry(tier, row)

    def requeue(self, tier: TierIndex, now: float) -> None:
        """Nothing can be loaded from this tier now: its victims stay, and requests in its queue ask the next tier; as
        many as the slice has room for."""
        tier.trials.clear()
        self._writeback.drop_demotions(tier)
        while tier.to_load and self._state.take():
            request, key = tier.to_load.popleft()
            if request.waiting and request.asked.get(key):
                self.enqueue(key, request, now)

    def retry(self, now: float) -> None:
        """Have the requests that waited for rows which failed ask the next tier, as many as the slice has room for."""
        while self._retries:
            row, requests = self._retries[0]
            while requests:
                if not self._state.take():
                    return
                request = requests.pop()
                if request.pinned.get(row.key) is row:
                    request.unpin(row)
                    request.asked.pop(row.key, None)
                    self.enqueue(row.key, request, now)
            self._retries.popleft()

    # --- inside ------------------------------------------------------------------------------------------------

    def _retry(self, tier: TierIndex, row: Row) -> None:
        key = row.key
        if tier.staged.get(key) is row:
            del tier.staged[key]
        if requests := self._loading_for.pop(row.order, None):
            requests.reverse()
            self._retries.append((row, requests))

    def _waits_for_writeback(self, now: float) -> bool:
        """Whether promotions wait for host rows that write-back frees, rather than evict unwritten ones. Only for
        clean_wait_s, so that a slow or hanging tier below delays no request much."""
        if self._state.below_host is None or not (self._host.free or self._host.evicting):
            return False
        if self._host.free:
            self._host_full_since_s = None
            return True
        if self._host_full_since_s is None:
            self._host_full_since_s = now
        return now - self._host_full_since_s < self._state.limits.clean_wait_s

    def _blame_slow_tiers(self, request: Request, now: float) -> None:
        """A request has expired: a failure for the breaker of each tier that it waited for, even if none of that tier's
        jobs is late."""
        sources = {row.source for row in request.pinned.values() if row.state is RowState.LOADING}
        queued = any(request.asked.values())
        for tier in self._state.tiers:
            if tier.spec.name in sources or (queued and not sources and tier.to_load):
                tier.breakers[Direction.LOAD].record(False, now)
