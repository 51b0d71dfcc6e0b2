"""Write-back: how rows come down, written through when they are complete or demoted when the tier above evicts.

`StoreThrottle` (state.py) keeps it out of the way of promotions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.base.policies import Write
from nixl_tiers.core.jobs import Jobs
from nixl_tiers.core.rows import CPU, LOADING, NO_ID, READY, Found, Row
from nixl_tiers.core.state import CascadeState, StoreThrottle, within_quotas
from nixl_tiers.core.tier import Tier
from nixl_tiers.core.types import Direction, Job, PlannedMove, TierState

MAX_VICTIMS_PER_PASS: Final = 256
CLEAN_AGAIN_S: Final = 0.05  # others are selected so long after victims of which none could be written


class WriteBack:
    """Queues rows for the tiers below, plans their stores, and ends the evictions that waited for these."""

    def __init__(self, state: CascadeState, jobs: Jobs) -> None:
        self._state = state
        self._jobs = jobs
        self._host = state.host
        self.throttle = StoreThrottle(state)
        self._now = 0.0
        # By tier: when victims that wait for it were kept, and none has moved since.
        self._kept_s: dict[int, float] = {}

    # --- queueing ----------------------------------------------------------------------------------------------

    def write_through(self, rows: Sequence[Row], tiers: Iterable[Tier]) -> None:
        """Queue complete rows for those of `tiers` that are written through and lack them."""
        for tier in tiers:
            if tier.spec.write is Write.THROUGH:
                lacking = [row for row in rows if not row.host_only and row.key not in tier.index]
                room = 0 if tier.refuses_stores else max(0, self._host.rows - len(tier.to_store))
                dropped = max(0, len(lacking) - room)
                tier.unwritten(dropped)
                tier.to_store.update((row.key, row.tick) for row in lacking[:room])

    def allow(self, row: Row) -> None:
        """A request that stores to all tiers uses this host-only row: from now on it is written like any other."""
        row.host_only = False
        if row.state is READY:
            self.write_through((row,), self._state.tiers)

    def demote(self, rows: Iterable[Row]) -> None:
        """The engine shuts down, and no request waits any more: queue those of these rows that are ready and that the
        tier below the host lacks."""
        self.throttle.closing = True
        target = self._state.below_host
        if target is not None and target.writable:
            for row in rows:
                is_here = row.state is READY and self._host.index.get(row.key) is row
                if is_here and not row.host_only and row.key not in target.index:
                    target.to_store.setdefault(row.key, row.tick)
        self._state.turn_due = True

    def clean(self, now: float | None = None) -> None:
        """Select victims ahead of need in every tier whose evictions are written below, so that a reserve of rows is
        free and an allocation need not wait for a write. `now`: None if no time is known to have passed."""
        self._now = self._now if now is None else now
        for target in self._state.tiers:
            if target.spec.write is Write.ON_EVICT and target.writable:
                self._clean(target)

    def rows_to_clean(self, target: Tier) -> int:
        """How many more rows must leave the tier above `target` so that its reserve is free, as far as `target` has
        slots that nothing is moving to or from; zero or less: none."""
        free, reserve = self._state.room_above(target)
        if not reserve:
            return 0
        source = self._state.above(target)
        missing = reserve - free - (self._host.evicting if source is None else source.index.rows.evicting())
        # A victim without a slot would be dropped, and selected again at the next turn.
        return min(missing, target.index.slots.limit - target.rows_loading - target.rows_to_write)

    def can_start(self, tier: Tier) -> bool:
        """Whether a turn might start something here, as far as promotions do not hold it up."""
        if tier.to_demote or (tier.to_store and tier.refuses_stores):
            return True
        if tier.spec.write is Write.ON_EVICT and tier.writable and self.rows_to_clean(tier) > 0:
            return True
        has_room = tier.to_store and tier.rows_storing < self._state.window(tier, Direction.STORE)
        return bool(has_room and tier.writable and tier.store_credits > 0)

    def short_of_room(self, target: Tier) -> bool:
        """Whether the tier above `target` has used up half of its reserve: with less, promotions and stores of the
        engine would wait for write-back."""
        free, reserve = self._state.room_above(target)
        return 2 * free < reserve

    def backlog(self) -> int:
        """Rows queued for or being written to the tier that is furthest behind."""
        return max((tier.rows_to_write for tier in self._state.tiers), default=0)

    def pressure(self) -> int:
        """The backlog of the tiers that are writable now: waiting for any other does not help."""
        return max((tier.rows_to_write for tier in self._state.tiers if tier.writable), default=0)

    # --- jobs --------------------------------------------------------------------------------------------------

    def plan_stores(self, tier: Tier, now: float) -> list[Job]:
        """Store jobs for the rows at the front of the tier's queue, as many as promotions, its window and its mover
        leave room for."""
        rows: list[tuple[Row, int]] = []
        rooms = self._state.store_rooms(tier)
        if rooms is None:
            most = min(
                self.throttle.room(tier),
                self._state.window(tier, Direction.STORE) - tier.rows_storing,
                tier.store_credits * self._state.rows_per_job,
            )
        else:
            most = min(self.throttle.room(tier), sum(rooms))
        looks, aside = self._state.slice_left, tier.index.aside.until_s
        while tier.to_store and len(rows) < most and looks > 0:
            looks -= 1
            key, tick = tier.to_store.popitem(last=False)
            row = self._host.index.get(key)
            if key in tier.index:
                self._finish_eviction_above(tier, key, written=True)
            elif row is None or row.state is not READY or row.host_only:
                tier.counters.dropped_slow += 1
                self._give_up(tier, key)
            elif aside and tier.index.is_aside(key):
                tier.counters.dropped_failed += 1
                self._give_up(tier, key)
            elif row.sealing:
                tier.waiting_for_seal[key] = tick  # one sealer at a time
            else:
                rows.append((row, tick))
        self._state.slice_left = looks
        self.throttle.started(tier, len(rows))
        if rows:
            self._kept_s.pop(tier.number, None)
        soon = min(len(tier.to_store), most - len(rows))
        return self._jobs.start(tier, Direction.STORE, self.start_stores(tier, rows, rooms), now, soon)

    def start_stores(self, tier: Tier, rows: Sequence[tuple[Row, int]], rooms: list[int] | None) -> list[PlannedMove]:
        """Reserve a slot and pin the row for each of `rows` (row, tick); those that find no slot are dropped. `rooms`:
        of several members, how many rows each takes."""
        if tier.spec.quotas:
            rows = self._within_quotas(tier, rows)
        self._count_unwritten(tier, tier.index.make_room(len(rows), rooms))
        moves: list[PlannedMove] = []
        listed = tier.index.newest_listed
        try:
            for row, last_used in rows:
                tick = max(listed, last_used)  # its request may have begun before the listing ended
                reserved = tier.index.reserve(row.key, tick, row.tenant, rooms)
                if reserved is None:
                    tier.refused("full")
                    self._give_up(tier, row.key)
                    continue
                move = PlannedMove(row, *reserved, row.key, tick, not row.sealed)
                row.mover_refs += 1
                row.sealing = move.seal
                tier.rows_storing += 1
                tier.ending_moves.append(move)
                moves.append(move)
        finally:  # what ends these moves unpins their rows
            self._host.generation.table.pin_many([move.key for move in moves])
        return moves

    def plan_demotions(self, tier: Tier, now: float) -> list[Job]:
        """Load jobs for the tier's victims, to write them below: in the room that requests leave in the windows."""
        target = self._state.below(tier)
        if target is None or not target.writable:
            self.drop_demotions(tier)
            return []
        if not self.throttle.room(target):
            return []
        rooms = self._state.load_rooms(tier)
        most = min(
            self._state.window(tier, Direction.LOAD) - tier.rows_loading,
            self._state.demote_window - len(tier.staged),
            tier.send_credits * self._state.rows_per_job,
        )
        if self._state.below_host is not None:
            most = min(most, self._host.free)  # not at the cost of the host's own unwritten rows
        if most > 0 and not self._state.make_room(1):
            return []  # they wait: to cancel them would be to select them again at the next turn
        victims: list[Key] = []
        while tier.to_demote and len(victims) < most and self._state.take():
            del tier.to_demote[key := next(iter(tier.to_demote))]
            if not tier.index.rows.is_evicting(key) or self._needs_no_load(tier, target, key):
                continue
            if key not in self._host.index and tier.can_load(key) and tier.has_room(key, rooms):
                victims.append(key)
            else:
                # It was promoted for a request meanwhile, or cannot be loaded now.
                tier.index.cancel_eviction(key, self._state.tick)
                self._kept_s[target.number] = now
        if victims:
            self._kept_s.pop(target.number, None)
        room = self._state.make_room(len(victims))
        for key in victims[room:]:
            tier.index.cancel_eviction(key, self._state.tick)
        moves: list[PlannedMove] = []
        for key in victims[:room]:
            tenant = self._tenant_of(tier, key)
            if not self._state.make_quota_room(tenant, 1):
                tier.index.cancel_eviction(key, self._state.tick)
                continue
            row = self._host.insert(key, LOADING, 0, tenant)  # tick 0: the next victim again
            row.source = tier.spec.name
            moves.append(tier.start_load(row))
            self._host.generation.table.pin(key)
            tier.staged[key] = row
        return self._jobs.start(tier, Direction.LOAD, moves, now)

    # --- ends --------------------------------------------------------------------------------------------------

    def stores_ended(self, tier: Tier, moves: Sequence[PlannedMove], outcomes: Sequence[Outcome], now: float) -> None:
        """A mover is done with these stores, which are in `tier.ending_moves`, the first one last; their rows and slots
        are no longer pinned by them."""
        ending, rows, counters = tier.ending_moves, tier.index.rows, tier.counters
        ok, found = Outcome.OK, Outcome.FOUND
        row_bytes, reclaim, unpin = self._state.row_bytes, self._host.reclaim, self._host.generation.table.unpin
        on_evict, changed = tier.spec.write is Write.ON_EVICT, tier.index.changed
        for move, outcome in zip(moves, outcomes, strict=True):
            row, key = move.row, move.key
            ending.pop()
            tier.rows_storing -= 1
            row.mover_refs -= 1
            if not (gone := row.removed or row.generation.ended):
                unpin(key, NO_ID)
            if move.seal:
                row.sealing = False
                row.sealed = outcome is ok
            if outcome is ok or outcome is found:
                if outcome is ok:
                    counters.bytes_written += row_bytes
                if rows.stored(key, move.id):
                    counters.stored += outcome is ok
                    counters.found += outcome is found
                    if changed is not None:
                        changed(key)
                    if on_evict:
                        self._finish_eviction_above(tier, key, written=True)
            else:
                full = outcome is Outcome.NO_SPACE
                counters.failed_stores += not full
                member = tier.members[tier.index.member_place_of_slot(move.slot)]
                # Of a mover that has died it is not known.
                if failed := not full and member.state is TierState.UP and tier.spec.physical_slots:
                    tier.index.set_aside((move,), self._state.limits.aside_s, now)
                if tier.index.invalidate(key, move.id, unwritten=failed):
                    counters.dropped_failed += not full
                    tier.refused("full", int(full))
                    self._give_up(tier, key)
            if gone:
                reclaim(row)
        self._seals_ended(moves)

    def _seals_ended(self, moves: Sequence[PlannedMove]) -> None:
        """These stores have ended, and the sealing of their rows: they are next in the queues of the other tiers."""
        for tier in self._state.tiers:
            for move in reversed(moves if tier.waiting_for_seal else ()):
                if (tick := tier.waiting_for_seal.pop(move.key, None)) is not None:
                    tier.to_store.setdefault(move.key, tick)
                    tier.to_store.move_to_end(move.key, last=False)

    def demotion_loaded(self, tier: Tier, key: Key) -> None:
        """A victim of `tier` has come up: queue it for the tier below."""
        target = self._state.below(tier)
        if target is not None and target.writable:
            target.to_store[key] = self._state.tick
        else:
            self._finish_demotion(tier, key, written=False)

    def drop_stores(self, tier: Tier) -> None:
        """Nothing can be written to this tier now: drop its queue, as much as the slice has room for."""
        while (queue := tier.to_store or tier.waiting_for_seal) and self._state.take():
            tier.refused("unreachable")
            self._give_up(tier, queue.popitem()[0])

    def drop_demotions(self, tier: Tier) -> None:
        """The tier's victims cannot be brought up, or not be written below, now: they stay. As many as the
        slice has room for."""
        while tier.to_demote and self._state.take():
            tier.index.cancel_eviction(tier.to_demote.popitem()[0], self._state.tick)

    # --- inside ------------------------------------------------------------------------------------------------

    def _within_quotas(self, tier: Tier, rows: Sequence[tuple[Row, int]]) -> list[tuple[Row, int]]:
        """Those that the quotas of their tenants have room for; the others are dropped."""

        def make_room(tenant: int, count: int) -> int:
            room, evicted = tier.index.make_quota_room(tenant, count)
            self._count_unwritten(tier, evicted)
            return room

        within = []
        for (row, tick), fit in zip(rows, within_quotas([row.tenant for row, _ in rows], make_room), strict=True):
            if fit:
                within.append((row, tick))
            else:
                tier.counters.dropped_full += 1
                self._give_up(tier, row.key)
        return within

    @staticmethod
    def _tenant_of(tier: Tier, key: Key) -> int:
        found = tier.index.rows.get(key)
        return 0 if found is None else Found(*found).tenant

    def _clean(self, target: Tier) -> None:
        missing = min(self.rows_to_clean(target), MAX_VICTIMS_PER_PASS)
        if missing <= 0 or self._now - self._kept_s.get(target.number, -CLEAN_AGAIN_S) < CLEAN_AGAIN_S:
            return
        source = self._state.above(target)
        if source is None:
            for row in self._host.select_victims(missing):
                if row.host_only or row.key in target.index:
                    self._host.finish_eviction(row)
                else:
                    target.to_store[row.key] = row.tick
            return
        for key in source.index.select_victims(missing):
            if not self._needs_no_load(source, target, key):
                source.to_demote[key] = None

    def _needs_no_load(self, source: Tier, target: Tier, key: Key) -> bool:
        """Whether a victim of `source` is in `target` or in the host already: then it is evicted, or queued, here."""
        row = self._host.index.get(key)
        if key in target.index:
            source.index.finish_eviction(key, self._state.tick)
        elif row is not None and row.state is READY:
            row.host_only = False  # a storage tier has it from elsewhere
            target.to_store[key] = row.tick
        else:
            return False
        return True

    def _give_up(self, tier: Tier, key: Key) -> None:
        """`key` is dropped: it is not written to this tier, for now, and the tier above keeps it."""
        self._finish_eviction_above(tier, key, written=False)

    def _finish_eviction_above(self, tier: Tier, key: Key, written: bool) -> None:
        """If the tier above evicts `key` and only waited for its write to `tier`: finish that, or cancel it."""
        if tier.spec.write is not Write.ON_EVICT:
            return
        if written:
            self._kept_s.pop(tier.number, None)
        else:
            self._kept_s[tier.number] = self._now
        above = self._state.above(tier)
        if above is not None:
            self._finish_demotion(above, key, written)
            return
        row = self._host.index.get(key)
        if row is not None:
            if written:
                self._host.finish_eviction(row)
            else:
                self._host.cancel_eviction(row, self._state.tick)

    def _finish_demotion(self, tier: Tier, key: Key, written: bool) -> None:
        """A demotion out of `tier` has ended: unpin its host row, and free its slot if it was `written` below."""
        row = tier.staged.pop(key, None)
        if row is not None:
            self._host.unpin((row,))
            if row.state is READY:
                row.source = CPU  # no request asked for it
            unused = not (row.tick or row.invalidated)
            if written and unused and self._state.below_host is not None:  # the host would write it to `tier` again
                self._host.evict(row)
        if written:
            tier.index.finish_eviction(key, self._state.tick)
        else:
            tier.index.cancel_eviction(key, self._state.tick)

    def _count_unwritten(self, tier: Tier, evicted: Iterable[Key]) -> None:
        """Count what `tier` had to evict before it was written to the tier below."""
        below = self._state.below(tier)
        if below is not None:
            waiting = (below.to_store, below.waiting_for_seal)
            below.unwritten(sum(key not in below.index and not any(key in keys for keys in waiting) for key in evicted))
