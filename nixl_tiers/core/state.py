"""What promotion, write-back, health and turns share: the tiers of a cascade, which of them have room, and windows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Final

from nixl_tiers.base.chunk import Key
from nixl_tiers.base.policies import Prefer, Write
from nixl_tiers.core.announced import Announced
from nixl_tiers.core.deferred_free import DeferredFree
from nixl_tiers.core.host import HostTier
from nixl_tiers.core.member import UNLIMITED, Member
from nixl_tiers.core.prefill import PrefillEstimate
from nixl_tiers.core.pricing import FREE, TierPrice, TransferEstimate
from nixl_tiers.core.requests import Request
from nixl_tiers.core.rows import Row
from nixl_tiers.core.stats import Counters, EvictionHistory, Samples
from nixl_tiers.core.tier import Tier
from nixl_tiers.core.types import Direction, Limits, TierState

COPIES_KNOWN: Final = 3  # copies to the engine: with fewer, one that was slow by accident is all that is known
COPIES_HALVE_S: Final = 30.0  # as long without one that was measured halves their price


class CascadeState:
    """The tiers of one cascade, in order, and what every flow between them needs.

    Windows are in rows, for each tier and direction: how many may be under way at once (back-pressure).
    """

    def __init__(
        self,
        host: HostTier,
        tiers: Sequence[Tier],
        limits: Limits,
        row_bytes: int,
        garbage: DeferredFree,
        *,
        prefill: PrefillEstimate,
        gone: EvictionHistory,
        prefer: Prefer = "latency",
    ) -> None:
        self.host = host
        self.tiers = list(tiers)
        self.limits = limits
        self.row_bytes = row_bytes
        self.garbage = garbage
        self.prefill = prefill
        self.samples = Samples()
        self.announced: Announced | None = None
        self.gone = gone
        self.prefer = prefer
        self.copies = TransferEstimate()  # from the host to the engine
        self.tick = 1  # logical clock of use: one tick a request; 0: of rows that no request used, or a low one
        self.unfinished = False  # whether the last turn left work that could be done at once
        self.turn_due = False  # whether something was done since that a turn should follow, if it brings work
        self.slice_left = limits.rows_per_slice
        """How many more rows the slice has room for (`begin_slice`); zero or less: it is used up."""
        self.fit(host.rows)
        self.rows_per_job = max(1, min(limits.moves_per_job, limits.job_bytes // row_bytes))
        self.movers = [member for tier in self.tiers for member in tier.members]
        self.below_host: Tier | None = None  # the tier that is written when the host evicts
        self._below: dict[int, Tier] = {}
        self._above: dict[int, Tier | None] = {}
        above: Tier | None = None
        for tier in self.tiers:
            if tier.spec.write is Write.ON_EVICT:
                self._above[tier.number] = above
                if above is None:
                    self.below_host = tier
                else:
                    self._below[above.number] = tier
            if tier.spec.write is not Write.OFF:
                above = tier

    def fit(self, rows: int) -> None:
        """So many rows the host has, or will have: windows and quotas are shares of them."""
        self.host.fit(rows)
        few = max(1, min(4, rows // 4))  # so that a small host tier still moves
        two = min(2, rows // 2)  # one slow download stops no other load
        tier_count = max(1, len(self.tiers))
        self.load_window = max(few, two, int(rows * self.limits.load_share) // tier_count)
        self.store_window = max(few, int(rows * self.limits.store_share) // tier_count)
        # Rows that come up only to be written further down keep their host rows until they are written, however slow
        # that is. So they have a small window of their own.
        self.demote_window = max(1, min(self.store_window, self.load_window // 2, self.limits.loads_under_way // 2))

    def window(self, tier: Tier, direction: Direction) -> int:
        """How many rows of this tier may be under way."""
        if direction is Direction.LOAD:
            return min(self.load_window, self.limits.loads_under_way * len(tier.members))
        return min(self.store_window, self.limits.stores_under_way * len(tier.members))

    def counters_of(self, name: str) -> Counters:
        """Of the storage tier of this name, or of the host."""
        for tier in self.tiers:
            if tier.spec.name == name:
                return tier.counters
        return self.host.counters

    def price_of(self, tier: Tier) -> TierPrice:
        """What loads from this tier cost now. While nothing was loaded from it, nothing: it is tried."""
        row_s = tier.loads.s_per_byte * self.row_bytes
        return TierPrice(tier.loads.latency_s, row_s, tier.rows_to_load + tier.rows_loading)

    def price_of_copies(self, now: float) -> TierPrice:
        """What rows cost to be copied from host memory to the engine: nothing before a few copies were measured, and
        the less, the longer none was. What is declined for their price is not copied, and nothing else measures it."""
        copies = self.copies
        if copies.last_s is None or copies.transfers < COPIES_KNOWN:
            return FREE
        kept = 0.5 ** ((now - copies.last_s) / COPIES_HALVE_S)
        return TierPrice(kept * copies.latency_s, kept * copies.s_per_byte * self.row_bytes, 0)

    def begin_slice(self) -> None:
        """What follows holds the lock for as long as about `rows_per_slice` rows take; the next turn goes on."""
        self.slice_left = self.limits.rows_per_slice

    def take(self, rows: int = 1) -> bool:
        """Whether the slice has room for work on so many rows. Nothing follows in this slice once it has not."""
        if self.slice_left < min(rows, self.limits.rows_per_slice):
            self.slice_left = 0
            return False
        self.slice_left -= rows
        return True

    @property
    def slice_used_up(self) -> bool:
        return self.slice_left <= 0

    def below(self, tier: Tier) -> Tier | None:
        """The tier that is written when `tier` evicts, if there is one."""
        return self._below.get(tier.number)

    def above(self, tier: Tier) -> Tier | None:
        """The tier whose evictions are written to `tier`, which is written on eviction; None: the host."""
        return self._above[tier.number]

    def room_above(self, target: Tier) -> tuple[int, int]:
        """Of the tier whose evictions are written to `target`: how many rows are free, and how many should be so that
        it need not wait for a write. (0, 0) if there is none, or it is not readable."""
        if target.spec.write is not Write.ON_EVICT:
            return 0, 0
        source, share = self.above(target), self.limits.reserve_share
        if source is None:
            return self.host.free, max(1, int(self.host.limit * share))
        if source.state is not TierState.UP or not source.readable:
            return 0, 0
        # Demotion goes through the host: more than all of it cannot be brought up at once.
        return source.free_slots, max(1, min(int(source.index.slots.limit * share), self.host.rows))

    def running_s(self, tier: Tier) -> float:
        """How long the rows that are being moved to and from this tier take it, as far as is known."""
        count = len(tier.members)
        loading, storing = (-(-rows // count) * self.row_bytes for rows in (tier.rows_loading, tier.rows_storing))
        return max(
            member.throughput[Direction.LOAD].seconds(loading) + member.throughput[Direction.STORE].seconds(storing)
            for member in tier.members
        )

    def load_rooms(self, tier: Tier) -> list[int] | None:
        """How many rows may be loaded from each member now, beside those under way; None: it has only one."""
        if len(tier.members) == 1:
            return None
        readable = [member.readable and not member.dead for member in tier.members]
        return self._rooms(tier, Direction.LOAD, readable)

    def store_rooms(self, tier: Tier) -> list[int] | None:
        """How many rows may be stored to each member now; None: it has only one. Where one that can be written can be
        read too, others get none. What is free is used first: rows are evicted for others only where that is nothing,
        or a member's that does not answer."""
        if len(tier.members) == 1:
            return None
        takes = [member.takes_rows for member in tier.members]
        if True not in takes:
            takes = [member.writable and not member.dead for member in tier.members]
        rooms = self._rooms(tier, Direction.STORE, takes)
        free = [max(0, tier.index.slots_of(member).free) for member in tier.members]
        if any(fit := [min(room, slots) for room, slots in zip(rooms, free, strict=True)]):
            return fit
        for member, takes_any, slots in zip(tier.members, takes, free, strict=True):
            if takes_any and slots and not any(job.abandoned for job in member.jobs.values()):
                return [0] * len(rooms)
        return rooms

    def _rooms(self, tier: Tier, direction: Direction, takes: list[bool]) -> list[int]:
        loads = direction is Direction.LOAD
        window = max(1, self.window(tier, direction) // len(tier.members))
        rooms = []
        for member, takes_any in zip(tier.members, takes, strict=True):
            messages = member.send_credits if loads else member.store_credits
            left = min(window - member.under_way(direction), messages * self.rows_per_job)
            rooms.append(max(0, left) if takes_any else 0)
        return rooms

    def movers_that_move(self, tier: Tier, keys: Collection[Key]) -> list[Member]:
        """Those whose jobs have any of these keys."""
        if not keys:
            return []
        moved = {job.mover for job in tier.jobs for move in job.moves if move.key in keys}
        return [member for member in tier.members if member.number in moved]

    def tick_of(self, request: Request) -> int:
        """The request's tick; it gets one at its first use of any row."""
        if request.tick is None:
            request.tick = self.tick
            self.tick += 1
        return request.tick

    def make_room(self, count: int, tenant: int = 0) -> int:
        """Evict host rows until `count` are free, or all that are left are pinned; returns how many of `count` are. For
        a `tenant` also within its quota, to which its own rows give way first."""
        count = self.make_quota_room(tenant, count)
        self.dropped(self.host.make_room(count))
        return min(count, self.host.free)

    def make_quota_room(self, tenant: int, count: int) -> int:
        """How many of `count` host rows the tenant's quota has room for, after some of its own were evicted."""
        count, victims = self.host.make_quota_room(tenant, count)
        self.dropped(victims)
        return count

    def dropped(self, victims: Sequence[Row]) -> None:
        """The host has evicted these: what the tier below should have got, and has not, is counted as dropped there."""
        below = self.below_host
        if below is not None:
            for row in victims:
                below.to_store.pop(row.key, None)
                below.unwritten(not row.host_only and row.key not in below.index)


def within_quotas(tenants: Sequence[int], make_room: Callable[[int, int], int]) -> list[bool]:
    """Of rows of these tenants, which fit their quotas: of each tenant the first ones. `make_room`: of a tenant, how
    many of so many rows there is room for."""
    room = {tenant: make_room(tenant, count) for tenant, count in Counter(tenants).items()}
    fits = []
    for tenant in tenants:
        room[tenant] -= 1
        fits.append(room[tenant] >= 0)
    return fits


class StoreThrottle:
    """How many rows may be handed to a tier's mover now, to be written. None while any row of any tier is being
    promoted, or queued for it: stores take the processors, the memory bandwidth and the medium that loads need.

    Starvation is bounded. A store goes in spite of promotions
    - if `store_hold_s` have passed: then as many rows as the tier's window has, once in that time. So `flush` ends, and
      rows that no tier below holds get there, under a steady stream of promotions;
    - if the tier is far behind (back-pressure): with more rows to write than `hold_share` of the host's, these might be
      evicted unwritten;
    - if the tier above is short of room until its victims are written (`write: on_evict`): promotions need it too;
    - when the engine shuts down.
    """

    def __init__(self, state: CascadeState) -> None:
        self.closing = False
        self._state = state
        self._promoting = False
        self._now = 0.0
        self._since_s: dict[int, float] = {}  # by tier: when its hold began, or let rows go last
        self._due: dict[int, int] = {}  # by tier: rows that go in spite of promotions

    def begin(self, promoting: bool, now: float) -> None:
        """Jobs are planned at `now`; `promoting`: whether promotions are queued or running."""
        self._promoting, self._now = promoting, now
        for tier in self._state.tiers:
            if not (promoting and self._has_queued(tier)):
                self._release(tier)

    def room(self, tier: Tier) -> int:
        """How many rows may be started for `tier`."""
        if not self._holds(tier):
            self._release(tier)
            return UNLIMITED
        since_s = self._since_s.setdefault(tier.number, self._now)
        if self._now - since_s >= self._state.limits.store_hold_s:
            self._since_s[tier.number] = self._now
            self._due[tier.number] = self._state.window(tier, Direction.STORE)
        return self._due.get(tier.number, 0)

    def started(self, tier: Tier, rows: int) -> None:
        """So many were started."""
        if tier.number in self._due:
            self._due[tier.number] = max(0, self._due[tier.number] - rows)

    # --- inside ------------------------------------------------------------------------------------------------

    def _holds(self, tier: Tier) -> bool:
        limits = self._state.limits
        far_behind = tier.rows_to_write > limits.hold_share * self._state.host.limit
        if self.closing or not self._promoting or far_behind:
            return False
        free, reserve = self._state.room_above(tier)
        return 2 * free >= reserve  # the other half is for promotions: with less they would wait for stores

    def _has_queued(self, tier: Tier) -> bool:
        """Whether rows are queued for `tier`, or victims are to be loaded for it."""
        above = self._state.above(tier) if tier.spec.write is Write.ON_EVICT else None
        return bool(tier.to_store or (above is not None and above.to_demote))

    def _release(self, tier: Tier) -> None:
        self._since_s.pop(tier.number, None)
        self._due.pop(tier.number, None)
