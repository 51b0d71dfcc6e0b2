"""Promotion (prefetch): how rows come up from storage tiers, for requests that wait for them up to one deadline."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Final

from nixl_tiers.cascade.existence import ExistenceChecks
from nixl_tiers.cascade.garbage import Garbage
from nixl_tiers.cascade.gone_keys import Gone, tag_of
from nixl_tiers.cascade.host import Row, RowState
from nixl_tiers.cascade.line import Line
from nixl_tiers.cascade.requests import Request
from nixl_tiers.cascade.state import CascadeState
from nixl_tiers.cascade.tier_index import TierIndex
from nixl_tiers.cascade.types import Direction, Job, PlannedMove, TierState
from nixl_tiers.cascade.writeback import WriteBack
from nixl_tiers.chunk import Key, Outcome

PINS_PER_ROW: Final = 8  # that are released in the time that other work on one row takes
FRONT: Final = 64  # keys of a queue that are looked at for whose they are
BYTES_TO_LATENCY: Final = 2  # of a measurement's time: what the bytes take at least, in latencies
EXPIRE_EVERY_S: Final = 1.0
MAX_DOUBLED: Final = 6
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
        self.line = Line(state)
        self._waiting: dict[str, Request] = {}  # requests that wait, or for which rows were promoted and pinned
        self._overdue: set[str] = set()  # those of them that have waited too long, and only keep what has come
        self._loading_for: dict[int, list[Request]] = {}  # by Row.order, of rows in state LOADING
        self._retries: deque[tuple[Row, list[Request]]] = deque()  # rows that failed, and who waited for them
        self._host_full_since_s: float | None = None  # when promotions began to wait for a write-back
        self._look_again_s = float("-inf")  # for requests that never came back
        self._crowded = False  # promotions wait for others to unpin rows of a full host

    @property
    def busy(self) -> bool:
        """Whether a request waits, or has pinned rows."""
        return bool(self._waiting or self._retries or self.line.busy)

    @property
    def under_way(self) -> bool:
        """Whether rows are queued to be promoted, or are being loaded, for requests."""
        return bool(self._loading_for or self._retries or any(tier.to_load for tier in self._state.tiers))

    # --- for requests ------------------------------------------------------------------------------------------

    def enqueue(self, key: Key, request: Request, now: float) -> bool:
        """Queue a stored key for promotion on the request's behalf; False if no tier can load it now."""
        if request.expired or (key in request.asked and not request.asked[key]):
            return False
        for tier in self._state.tiers:
            if (request.allowed is None or tier.number in request.allowed) and tier.can_load(key, now):
                tier.queue_load(request, key)
                if not request.asked.get(key):
                    request.ask((key,))
                request.lowest = max(request.lowest, tier.number)
                return True
            if key in tier:
                if tier.denylist.trial_due(key, now):
                    tier.trials[key] = None
                elif not tier.breakers[Direction.LOAD].closed:
                    tier.last_refused = key
        request.withdraw(key)
        return False

    def wait(self, request: Request, now: float) -> None:
        """The request waits: arm its deadline if none runs, and pin the hits of this scan."""
        if request.in_line:
            self.turn_comes(request, now)
        if request.deadline_s is None:
            request.deadline_s = now + self._state.limits.wait_s
        if request.waited_since_s is None:
            request.waited_since_s = now
        if not request.pending:
            request.begin_wait()
            self._waiting[request.name] = request
            for row in request.scan_hits:
                if not row.invalidated:
                    request.pin(row)
        request.stopped = not request.first_scan and request.ascending

    def turn_comes(self, request: Request, now: float) -> None:
        """A request of the line is looked up for the first time: what came up for it is kept as for any that waits."""
        self.line.leave(request)
        if request.pending:
            request.deadline_s = now + self._state.limits.wait_s
            self._waiting[request.name] = request

    def has_expired(self, request: Request, now: float) -> bool:
        """Whether the request's deadline has passed. What is pinned for it stays so: it may load that."""
        if not request.expired and request.deadline_s is not None and now > request.deadline_s:
            self._end_wait(request)
            self._blame_slow_tiers(request, now)
        return request.expired

    def give_up_waiting(self, request: Request) -> None:
        """To compute what the request still waits for is quicker than to wait on: it loads what has come. What is
        queued for it is not promoted any more. No tier is to blame, so no breaker records it."""
        self._end_wait(request)

    def measure(self, tier: TierIndex, keys: Sequence[Key], now: float) -> None:
        """Promote some of these rows, which were declined because the tier is slow, if its speed was not measured for a
        while: no request waits for them, and without it nobody would find out that the tier has become faster."""
        limits, last_s = self._state.limits, tier.loads.last_s
        doubts = tier.loads.contradictions
        rows = self._rows_to_measure(tier) << min(doubts, MAX_DOUBLED)
        rows = min(rows, self._state.rows_per_job)
        expected_s = tier.loads.seconds(rows * self._state.row_bytes)
        pause_s = limits.measure_again_s if doubts else max(limits.measure_s, expected_s / limits.measure_time)
        if now >= max(last_s or 0.0, tier.measured_s) + pause_s and not tier.to_load:
            tier.measured_s = now
            for key in keys[:rows]:
                tier.queue_load(None, key)

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
        self._overdue.discard(request.name)

    def observe_wait(self, request: Request, *, loaded: bool) -> tuple[str, float] | None:
        """The request's wait, if there was one, has ended: `loaded`, or it computes all. Returns the lowest tier that
        it asked, and the seconds."""
        waited: tuple[str, float] | None = None
        if request.waited_since_s is not None and self._state.tiers:
            outcome = "vain" if not loaded else "partial" if request.expired else "loaded"
            tier = self._state.tiers[request.lowest]
            waited = tier.spec.name, request.seen_s - request.waited_since_s
            self._state.samples.observe(waited[0], f"wait_{outcome}", waited[1])
            tier.counters.lost_vain_s += 0.0 if loaded else waited[1]
        request.waited_since_s, request.lowest = None, 0
        return waited

    def waited_since(self, job: Job) -> float | None:
        """When the first of the requests that wait for the job's first row began to; None if there is none."""
        requests = self._loading_for.get(job.moves[0].row.order, ())
        since = [request.waited_since_s for request in requests if request.waited_since_s is not None]
        return min(since, default=None)

    @property
    def waiting_count(self) -> int:
        """How many requests wait. O(1): it is asked at each step, whatever the length of the queue."""
        return len(self._waiting) - len(self._overdue)

    def reset(self, garbage: Garbage) -> None:
        """Requests go on, keep their deadlines, and wait for nothing (`Request.belongs_to`)."""
        garbage.add(self._retries, self._waiting, self._overdue)
        self._retries, self._waiting, self._overdue = deque(), {}, set()
        self.line.clear()

    def expire(self, now: float) -> None:
        """Unpin rows that were promoted for requests that never came back for them. Looks for such requests once in a
        while, as it is called at every turn, and many may wait."""
        if now < self._look_again_s:
            return
        limit = now - self._state.limits.pin_s
        for request in [r for r in self._waiting.values() if r.deadline_s is None or r.deadline_s < limit]:
            if not self._state.take(1 + len(request.pinned) // PINS_PER_ROW):
                return
            request.expire()
            self.release(request)
        self._look_again_s = now + EXPIRE_EVERY_S

    # --- jobs --------------------------------------------------------------------------------------------------

    def feed_line(self, now: float) -> list[TierIndex]:
        """Queue promotions for requests that wait for their turn, as far as those whose turn has come leave room, to
        the tiers that it returns."""
        if self._crowded and not any(tier.to_load for tier in self._state.tiers):
            self._crowded = False  # nobody waits for room any more
        return self.line.feed(now) if self.line.busy and not self._crowded else []

    def plan(self, tier: TierIndex, now: float) -> list[Job]:
        """Load jobs for the keys at the front of the tier's queue, as many as its window, mover and the host take."""
        if self._crowded:
            room = self._state.make_room(1)
            if not room and self._turn_has_come(tier) and self.line.give_way(1):
                room = self._state.make_room(1)
            self._crowded = not room and self._waits_for_others()
            if self._crowded:
                return []
        most = min(self._state.load_window - tier.rows_loading, tier.send_credits * self._state.rows_per_job)
        if self._waits_for_writeback(now):
            most = min(most, self._host.free)
        wanted = self._take_queued(tier, most, now)
        room = self._state.make_room(len(wanted))
        if room < len(wanted) and self._line_gives_way(wanted, room):
            room = self._state.make_room(len(wanted))
        self._crowded = room < len(wanted) and (room > 0 or self._waits_for_others())
        moves: list[PlannedMove] = []
        put_off: list[tuple[Request, Key]] = []
        for key, requests in wanted.items():
            if len(moves) == room:
                put_off += self._without_room(key, requests)
                continue
            tick = self._state.tick_of(requests[0]) if requests else 0
            row = self._host.insert(key, RowState.LOADING, tick)
            row.source = tier.spec.name
            moves.append(tier.start_load(row))
            self._loading_for[row.order] = requests
            for request in requests:
                request.pin(row)
        tier.to_load.extendleft(reversed(put_off))
        return self._state.start_jobs(tier, Direction.LOAD, moves, now, min(len(tier.to_load), most - len(wanted)))

    def _take_queued(self, tier: TierIndex, most: int, now: float) -> dict[Key, list[Request]]:
        """Up to `most` keys from the front of the tier's queue that are to be loaded, and the requests that wait."""
        wanted: dict[Key, list[Request]] = {}
        while tier.to_load and len(wanted) < most and self._state.take():
            request, key = tier.to_load.popleft()
            if request is not None and not (request.waiting and request.asked.get(key)):
                continue  # it has loaded, expired or ended since it asked
            row = self._host.index.get(key)
            if row is None and tier.open_for_load(key, now) is not None:
                wanted.setdefault(key, []).extend(() if request is None else (request,))
            elif request is None:
                continue
            elif row is None:
                request.withdraw(key)
            else:
                request.pin(row)
                if row.state is RowState.LOADING:
                    self._loading_for.setdefault(row.order, []).append(request)
                else:
                    request.withdraw(key)
        return wanted

    def load_ended(self, tier: TierIndex, move: PlannedMove, outcome: Outcome, now: float) -> None:
        """A mover is done with this load: its row is a hit, or its requests ask the next tier."""
        tier.end_load(move)
        try:
            self._judge(tier, move, outcome, now)
        finally:  # or an error would hold up stores for ever
            self._loading_for.pop(move.row.order, None)
        self._host.reclaim(move.row)

    def _judge(self, tier: TierIndex, move: PlannedMove, outcome: Outcome, now: float) -> None:
        row = move.row
        if outcome is Outcome.OK:
            tier.counters.bytes_read += self._state.row_bytes
            if not row.invalidated:
                row.state = RowState.READY
                row.sealed = True
                self._host.counters.promoted += 1
                for request in self._loading_for.get(row.order, ()):
                    request.withdraw(row.key)
                if tier.staged.get(move.key) is row:
                    self._writeback.demotion_loaded(tier, move.key)
                else:
                    self._writeback.write_through((row,), self._state.tiers[: tier.number])
        else:
            if outcome in (Outcome.FAILED, Outcome.NO_SPACE):
                tier.counters.failed_loads += 1
                if tier.index.get(move.key) is move.entry:
                    tier.cancel_eviction(move.key, self._state.tick)
            elif tier.invalidate(move.key, move.entry):
                tier.counters.corrupt += outcome is Outcome.CORRUPT
                tier.counters.missing += outcome is Outcome.MISSING
                tier.gone.note(move.key, tag_of(tier.number, Gone.LOST))
                self._checks.mark_absent(tier.number, move.key, now)
            self.give_up(tier, row)

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
            if request is not None and request.waiting and request.asked.get(key):
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
                    request.withdraw(row.key)
                    self.enqueue(row.key, request, now)
            self._retries.popleft()

    # --- inside ------------------------------------------------------------------------------------------------

    def _rows_to_measure(self, tier: TierIndex) -> int:
        """A share of a job's; more if their time would be the tier's latency and say nothing about its bandwidth; fewer
        if they took too much of the tier's time."""
        limits, loads = self._state.limits, tier.loads
        row_s = loads.s_per_byte * self._state.row_bytes
        rows = int(self._state.rows_per_job * limits.measure_share)
        if row_s:
            rows = max(rows, int(BYTES_TO_LATENCY * loads.latency_s / row_s))
            rows = min(rows, int((limits.measure_s * limits.measure_time - loads.latency_s) / row_s))
        return max(1, rows)

    def _end_wait(self, request: Request) -> None:
        """It keeps what has come, and gets nothing more."""
        request.expire()
        if request.name in self._waiting:
            self._overdue.add(request.name)
        self._count_late(request)

    def _count_late(self, request: Request) -> None:
        """What the request waited for has not come in time."""
        for _, key in request.missing:
            row = self._host.index.get(key)
            if row is None or row.state is not RowState.READY:
                tier = next((tier for tier in self._state.tiers if key in tier), None)
                if tier is not None:
                    tier.counters.missed_late += 1

    def _retry(self, tier: TierIndex, row: Row) -> None:
        key = row.key
        if tier.staged.get(key) is row:
            del tier.staged[key]
        if requests := self._loading_for.pop(row.order, None):
            requests.reverse()
            self._retries.append((row, requests))

    def _without_room(self, key: Key, requests: Sequence[Request]) -> list[tuple[Request, Key]]:
        """The host has no room for this row: what of it to queue again."""
        put_off = []
        for request in requests:
            if request.in_line:
                request.withdraw(key)  # its turn is still to come
            elif self._crowded:
                put_off.append((request, key))
            else:  # the host is full of rows of requests that wait for more of them: this prefix ends here
                request.refuse(key)
        return put_off

    def _line_gives_way(self, wanted: dict[Key, list[Request]], room: int) -> bool:
        """Whether requests in line have unpinned rows for those whose turn has come."""
        missing = sum(any(not request.in_line for request in requests) for requests in wanted.values()) - room
        return missing > 0 and self.line.give_way(missing)

    def _turn_has_come(self, tier: TierIndex) -> bool:
        """Whether a request at the front of the tier's queue is not in line."""
        front = (request for request, _ in islice(tier.to_load, FRONT))
        return any(request is not None and request.waiting and not request.in_line for request in front)

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

    def _waits_for_others(self) -> bool:
        """Whether some rows of the full host may turn out not to be pinned, or will be unpinned though no request that
        waits for room gives up: those of loads and stores under way, and those of requests that have all they asked
        for. Loading more after them is quicker than computing, and their requests end it by their deadlines. O(1)."""
        if self._host.searching or any(tier.rows_loading for tier in self._state.tiers):
            return True
        return self._host.generation.stuck < self._host.used

    def _blame_slow_tiers(self, request: Request, now: float) -> None:
        """A request has expired: a failure for the breaker of each tier that it waited for, even if none of that tier's
        jobs is late."""
        sources = {row.source for row in request.pinned.values() if row.state is RowState.LOADING}
        queued = request.to_come and not self._crowded  # then it waited for room, and not for a tier
        for tier in self._state.tiers:
            if tier.spec.name in sources or (queued and not sources and tier.to_load):
                tier.breakers[Direction.LOAD].record(False, now)
