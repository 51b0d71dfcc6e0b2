"""Promotion jobs: the loads that bring rows up for the requests that wait for them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.core.existence import ExistenceChecks
from nixl_tiers.core.jobs import Jobs
from nixl_tiers.core.promotion import PINS_PER_ROW, Promotion
from nixl_tiers.core.requests import Request
from nixl_tiers.core.rows import LOADING, Row
from nixl_tiers.core.state import CascadeState, within_quotas
from nixl_tiers.core.stats import Gone, tag_of
from nixl_tiers.core.tier import Tier
from nixl_tiers.core.types import Direction, Job, PlannedMove
from nixl_tiers.core.writeback import WriteBack

FRONT: Final = 64  # rows of a queue, or their requests, that are looked at before others are


class PromotionJobs:
    """Plans loads of what `Promotion` has queued, as the windows and the host have room, and ends them.

    `plan` starts a key's load into a host row in state LOADING, and `load_ended` makes the row READY, or has it leave
    the host: its requests, at their next look-ups, find it in the next tier, or nowhere.
    """

    def __init__(
        self, state: CascadeState, jobs: Jobs, checks: ExistenceChecks, writeback: WriteBack, promotion: Promotion
    ) -> None:
        self._state = state
        self._jobs = jobs
        self._host = state.host
        self._checks = checks
        self._writeback = writeback
        self._promotion = promotion
        self._prefetch_queue = promotion.prefetch_queue
        self._loading_for: dict[int, list[Request]] = {}  # by Row.order, of rows in state LOADING
        self._host_full_since_s: float | None = None  # when promotions began to wait for a write-back

    @property
    def under_way(self) -> bool:
        """Whether rows are queued to be promoted for requests, or are being loaded, be it to measure a tier."""
        return bool(self._loading_for) or any(tier.to_load for tier in self._state.tiers)

    @property
    def can_start(self) -> bool:
        """Whether some are queued that a turn might start. The end of a load brings one where its window is full."""
        window = self._state.window
        return any(tier.to_load and tier.rows_loading < window(tier, Direction.LOAD) for tier in self._state.tiers)

    def waited_since(self, job: Job) -> float | None:
        """When the first of the requests that wait for the job's first row began to; None if there is none."""
        requests = self._loading_for.get(job.moves[0].row.order, ())
        since = [request.waited.since_s for request in requests if request.waited.since_s is not None]
        return min(since, default=None)

    # --- planning ----------------------------------------------------------------------------------------------

    def watch_room(self) -> None:
        """At each turn: if the host has room again, the next promotions that find none wait for write-back again."""
        if self._host.free:
            self._host_full_since_s = None

    def queue_prefetches(self, now: float) -> list[Tier]:
        """Queue promotions for requests that wait for their turn, as far as those whose turn has come leave room, to
        the tiers that it returns."""
        if self._promotion.host_full and not any(tier.to_load for tier in self._state.tiers):
            self._promotion.host_full = False  # nobody waits for room any more
        return [] if self._promotion.host_full else self._prefetch_queue.feed(now)

    def plan(self, tier: Tier, now: float) -> list[Job]:
        """Load jobs for the keys at the front of the tier's queue, as many as its window, mover and the host take."""
        waits = self._waits_for_writeback(now)
        if self._promotion.host_full:
            if waits and not self._host.free:
                return []
            room = self._state.make_room(1)
            if not room and self._serves_looked_up(tier) and self._prefetch_queue.give_way(1):
                room = self._state.make_room(1)
            self._promotion.host_full = not room and self._waits_for_others()
            if self._promotion.host_full:
                return []
        rooms = self._state.load_rooms(tier)
        if rooms is None:
            window = self._state.window(tier, Direction.LOAD)
            most = min(window - tier.rows_loading, tier.send_credits * self._state.rows_per_job)
        else:
            most = sum(rooms)
        if waits:
            most = min(most, self._host.free)
        wanted = self._take_queued(tier, most, rooms)
        if self._host.quotas:
            wanted = self._within_quotas(wanted)
        room = self._state.make_room(len(wanted))
        if room < len(wanted) and self._prefetches_give_way(wanted, room):
            wanted = _still_wanted(wanted)
            room = self._state.make_room(len(wanted))
        self._promotion.host_full = room < len(wanted) and (room > 0 or self._waits_for_others())
        moves: list[PlannedMove] = []
        put_off: list[tuple[Request, Key]] = []
        for key, requests in wanted.items():
            if len(moves) == room:
                put_off += self._without_room(key, requests)
                continue
            first = requests[0]
            row = self._host.insert(key, LOADING, self._state.tick_of(first), first.wishes.tenant)
            row.source = tier.spec.name
            moves.append(tier.start_load(row))
            self._loading_for[row.order] = requests
            for request in requests:
                request.begin_load(row)
        tier.put_back(put_off)
        return self._jobs.start(tier, Direction.LOAD, moves, now, min(tier.rows_to_load, most - len(wanted)))

    def load_unasked(self, tier: Tier, keys: Sequence[Key], now: float) -> list[Job]:
        """A job that loads these rows although no request waits for them; fewer where the host has no room. What host
        memory has, or is about to get, is loaded into a row that no look-up finds; and so is all where tenants have
        quotas, as nobody says whose rows they are."""
        rooms = self._state.load_rooms(tier)
        loadable = [key for key in keys if tier.can_load(key) and tier.has_room(key, rooms)]
        most = min(len(loadable), self._state.window(tier, Direction.LOAD) - tier.rows_loading)
        room = self._make_room_unasked(most) if tier.send_credits else 0
        if room <= 0 or not self._state.take(room):  # without room there is no work that is left
            return []
        moves: list[PlannedMove] = []
        for key in loadable[:room]:
            if key in self._host.index or self._host.quotas:
                row = self._host.allocate_scratch(key)
            else:
                row = self._host.insert(key, LOADING, 0)
                row.source = tier.spec.name
                self._loading_for[row.order] = []
            moves.append(tier.start_load(row))
        return self._jobs.start(tier, Direction.LOAD, moves, now)

    # --- ends --------------------------------------------------------------------------------------------------

    def load_ended(self, tier: Tier, move: PlannedMove, outcome: Outcome, now: float) -> None:
        """A mover is done with this load: its row is a hit, or is gone."""
        tier.end_load(move)
        try:
            self._judge(tier, move, outcome, now)
        finally:  # or an error would hold up stores for ever
            self._loading_for.pop(move.row.order, None)
        self._host.reclaim(move.row)

    def give_up(self, tier: Tier, row: Row) -> None:
        """A row's load has failed, or is late: invalidate the row. Its requests find out at their next look-ups."""
        if not row.invalidated:
            self._host.invalidate(row)
            self._loading_for.pop(row.order, None)
            if tier.staged.get(row.key) is row:
                del tier.staged[row.key]

    def drop_loads(self, tier: Tier) -> None:
        """Nothing can be loaded from this tier now: its victims stay, and nothing of its queue is asked for any more;
        as much of both as the slice has room for."""
        self._writeback.drop_demotions(tier)
        while tier.to_load:
            request, keys = next(iter(tier.to_load.items()))
            if not self._state.take(1 + len(keys) // PINS_PER_ROW):
                return
            tier.drop_loads(request)

    # --- inside ------------------------------------------------------------------------------------------------

    def _make_room_unasked(self, count: int) -> int:
        """How many of `count` rows are free, after the coldest were evicted that no tier is still to be written."""
        # A tier that is written when the host evicts would lose what is evicted now: `clean` keeps some rows free.
        if self._state.below_host is None and (missing := count - self._host.free) > 0:
            for row in self._host.select_victims(missing):
                if any(row.key in tier.to_store or row.key in tier.waiting_for_seal for tier in self._state.tiers):
                    self._host.cancel_eviction(row, 0)
                else:
                    self._host.finish_eviction(row)
        return min(count, self._host.free)

    def _take_queued(self, tier: Tier, most: int, rooms: list[int] | None) -> dict[Key, list[Request]]:
        """Up to `most` keys from the front of the tier's queue that are to be loaded, and the requests that wait. What
        is in a member without room (`rooms`) stays there."""
        wanted: dict[Key, list[Request]] = {}
        put_off: list[tuple[Request, Key]] = []
        while tier.to_load and len(wanted) < most and len(put_off) < FRONT and self._state.take():
            request, key = tier.next_load()
            if not request.wants(key):
                continue  # it has loaded, expired or ended since it asked
            if request.lost == tier.number:
                if key not in wanted:  # it is there again, and is loaded for another
                    tier.index.forget(key)
                request.withdraw((key,))
                continue
            row = self._host.index.get(key)
            if row is None and tier.can_load(key):
                if key in wanted or tier.has_room(key, rooms):
                    wanted.setdefault(key, []).append(request)
                else:
                    put_off.append((request, key))
                    self._state.slice_left += 1  # nothing that the next turn could do, either
            elif row is None:
                request.withdraw((key,))
            else:
                request.begin_load(row)
                if row.state is LOADING:
                    self._loading_for.setdefault(row.order, []).append(request)
                else:
                    request.row_came(row)
        tier.put_back(put_off)
        return wanted

    def _within_quotas(self, wanted: dict[Key, list[Request]]) -> dict[Key, list[Request]]:
        """Those that the quotas of their tenants have room for. The prefixes of others end there: the rows of their
        tenant are all in use."""
        fits = within_quotas([requests[0].wishes.tenant for requests in wanted.values()], self._state.make_quota_room)
        within = {}
        for (key, requests), fit in zip(wanted.items(), fits, strict=True):
            if fit:
                within[key] = requests
                continue
            for request in requests:
                if request.queued:
                    self._prefetch_queue.find_no_room(request, key)
                else:
                    request.refuse(key)
        return within

    def _judge(self, tier: Tier, move: PlannedMove, outcome: Outcome, now: float) -> None:
        row = move.row
        if outcome is Outcome.OK:
            tier.counters.bytes_read += self._state.row_bytes
            if not row.invalidated:
                self._host.ready((row,))
                row.sealed = True
                self._host.counters.promoted += 1
                if self._host.changed is not None:
                    self._host.changed(row.key)
                for request in self._loading_for.get(row.order, ()):
                    request.row_came(row)
                if tier.staged.get(move.key) is row:
                    self._writeback.demotion_loaded(tier, move.key)
                else:
                    self._writeback.write_through((row,), self._state.tiers[: tier.number])
        else:
            read = tier.index.is_read(move.key, move.id)
            if read:  # by another job, too: nothing may be stored there yet; whoever ends last, or loads next, judges
                tier.index.set_aside((move,), self._state.limits.retry_s, now)
            if read or outcome in (Outcome.FAILED, Outcome.NO_SPACE):
                tier.counters.failed_loads += 1
                if tier.index.has(move.key, move.id):
                    tier.index.cancel_eviction(move.key, self._state.tick)
            elif tier.index.invalidate(move.key, move.id):
                tier.counters.corrupt += outcome is Outcome.CORRUPT
                tier.counters.missing += outcome is Outcome.MISSING
                tier.gone.note(move.key, tag_of(tier.number, Gone.LOST))
                self._checks.mark_absent(tier.number, move.key, now)
                if tier.spec.asked and outcome is Outcome.MISSING:
                    self._lose(tier, row)
            self.give_up(tier, row)

    def _lose(self, tier: Tier, row: Row) -> None:
        """A row is gone that an asked tier was thought to have. Of a chain that is worth nothing without it, what is
        queued behind it is not loaded, and forgotten: it was written at about the same time."""
        for request in self._loading_for.get(row.order, ()):
            if request.scan.ascending:
                request.lost = tier.number

    def _without_room(self, key: Key, requests: Sequence[Request]) -> list[tuple[Request, Key]]:
        """The host has no room for this row: what of it to queue again."""
        put_off = []
        for request in requests:
            if request.queued:
                self._prefetch_queue.find_no_room(request, key)
            elif self._promotion.host_full:
                put_off.append((request, key))
            else:  # the host is full of rows of requests that wait for more of them: this prefix ends here
                request.refuse(key)
        return put_off

    def _prefetches_give_way(self, wanted: dict[Key, list[Request]], room: int) -> bool:
        """Whether requests in line have unpinned rows for those whose turn has come."""
        missing = sum(any(not request.queued for request in requests) for requests in wanted.values()) - room
        return missing > 0 and self._prefetch_queue.give_way(missing)

    def _serves_looked_up(self, tier: Tier) -> bool:
        """Whether a request at the front of the tier's queue is not in line."""
        return any(request.waiting for request in islice(tier.to_load, FRONT))

    def _waits_for_writeback(self, now: float) -> bool:
        """Whether promotions wait for host rows that write-back frees, rather than evict unwritten ones. Only for
        clean_wait_s, so that a slow or hanging tier below delays no request much; and then no other one before it has
        freed a row."""
        if self._state.below_host is None or not (self._host.free or self._host.evicting):
            return False
        if self._host.free:
            return True
        if self._host_full_since_s is None:
            self._host_full_since_s = now
        return now - self._host_full_since_s < self._state.limits.clean_wait_s

    def _waits_for_others(self) -> bool:
        """Whether some rows of the full host may turn out not to be pinned, or will be unpinned though no request that
        waits for room gives up: those of loads and stores under way, and those of requests that have all they asked
        for. Loading more after them is quicker than computing, and their requests end it by their deadlines. O(1)."""
        if self._host.grows or any(tier.rows_loading for tier in self._state.tiers):
            return True
        return self._host.generation.pinned_by_waiting + self._host.retained < self._host.used


def _still_wanted(wanted: dict[Key, list[Request]]) -> dict[Key, list[Request]]:
    """Without the requests that ask for nothing any more, as they have given way."""
    asking = {key: [request for request in requests if key in request.wanted] for key, requests in wanted.items()}
    return {key: requests for key, requests in asking.items() if requests}
