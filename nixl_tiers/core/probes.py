"""Probes: moves that no request waits for, of tiers whose rows are declined, or whose circuit is half-open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from nixl_tiers.base.chunk import Key
from nixl_tiers.base.policies import Write
from nixl_tiers.core.host import HostTier
from nixl_tiers.core.jobs import Jobs
from nixl_tiers.core.member import Member
from nixl_tiers.core.promotion import RequestIndex
from nixl_tiers.core.promotion_jobs import PromotionJobs
from nixl_tiers.core.rows import READY, Found, Row
from nixl_tiers.core.state import CascadeState
from nixl_tiers.core.tier import Tier
from nixl_tiers.core.types import Direction, Job, TierState
from nixl_tiers.core.writeback import WriteBack

ROUNDING: Final = 1e-6
MAX_SOUGHT: Final = 1024  # rows of a tier that are looked at; the first of them will do, as a rule
MAX_SAMPLED: Final = 64  # rows of the host
LARGE: Final = 2  # a large measurement is at least so many times as many rows as a small one


@dataclass(slots=True)
class _Plan:
    """Of one tier. `keys`: rows that a request declined at `declined_s`, to measure it with; none: it is not to be."""

    keys: Sequence[Key] = ()
    declined_s: float = 0.0
    measured_s: float = float("-inf")  # when the last measurement began
    rows: int = 0  # of that one


class Measurements:
    """Loads that no request waits for, of tiers whose rows are declined because loading them takes too long. Without
    them nobody would find out that such a tier has become faster. docs/internals/load-or-recompute.md.

    What requests decline is offered here (`declined`), and some of it is loaded when it disturbs least (`plan`).
    """

    def __init__(self, state: CascadeState, requests: RequestIndex, jobs: PromotionJobs) -> None:
        self._state = state
        self._requests = requests
        self._jobs = jobs
        self._plans = [_Plan() for _ in state.tiers]
        self.to_come: set[int] = set()
        """Numbers of the tiers that are to be measured."""

    def declined(self, tier: Tier, keys: Sequence[Key], now: float) -> None:
        """A request does not load these rows. If the tier was not measured for a while, some are going to be loaded.
        While it loads anything, that measures it. O(1)."""
        plan, limits, loads = self._plans[tier.number], self._state.limits, tier.loads
        if plan.keys or tier.to_load or tier.rows_loading:
            return
        expected_s = loads.seconds(self._rows(tier, len(keys)) * self._state.row_bytes)
        pause_s = max(limits.measure_s, expected_s / limits.measure_time)
        if now >= max(loads.last_s or 0.0, plan.measured_s) + (limits.measure_busy_s if loads.surprising else pause_s):
            plan.keys, plan.declined_s = keys[: self._state.rows_per_job], now
            self.to_come.add(tier.number)
            loads.doubt()

    def plan(self, tier: Tier, now: float) -> list[Job]:
        """The measurement of this tier, if one is due: as soon as no request is alive, since it takes nothing from any
        then, and takes as long as if one waited for it; or else a while later. One that surprises is followed by
        another, a while later too."""
        plan, limits = self._plans[tier.number], self._state.limits
        measured = plan.measured_s >= plan.declined_s  # with these keys
        if not plan.keys or (measured and tier.rows_loading):
            return []
        decided = measured and not tier.loads.surprising
        late = now > plan.declined_s + limits.measure_s
        if decided or late or tier.to_load or tier.rows_loading or not tier.readable:
            plan.keys = ()
            self.to_come.discard(tier.number)
            return []
        idle = not (self._requests.by_name or self._requests.before_turn)
        waits_s = 0.0 if idle and not measured else limits.measure_busy_s
        if now < max(plan.declined_s, plan.measured_s) + waits_s:
            return []
        rows = self._rows(tier, len(plan.keys))
        jobs = self._jobs.load_unasked(tier, plan.keys[:rows], now)
        if jobs:
            plan.rows, plan.measured_s = rows, now
        return jobs

    def reset(self) -> None:
        """Nothing that was declined before is loaded any more."""
        self.to_come.clear()
        for plan in self._plans:
            plan.keys = ()

    # --- inside ------------------------------------------------------------------------------------------------

    def _rows(self, tier: Tier, most: int) -> int:
        """How many rows the next measurement loads: few and many by turns, since only different sizes tell the latency
        from the time of a row. Many: as much as the share of the tier's time allows; if not even twice as many as few
        fit into that, only where all transfers were of one size."""
        limits, loads, job = self._state.limits, tier.loads, self._state.rows_per_job
        row_s = loads.s_per_byte * self._state.row_bytes
        fits = int(ROUNDING + (limits.measure_s * limits.measure_time - loads.latency_s) / row_s) if row_s else job
        few = max(1, min(fits, int(job * limits.measure_share)))
        many = LARGE * few if (loads.one_size and loads.known) or loads.surprising else few
        rows = few if self._plans[tier.number].rows > few else max(many, fits if fits >= LARGE * few else 0)
        return min(rows, job, most)


class Probes:
    """Loads and stores that find out whether a circuit that is half-open may close."""

    def __init__(self, state: CascadeState, jobs: Jobs, writeback: WriteBack) -> None:
        self._state = state
        self._jobs = jobs
        self._writeback = writeback

    def plan_load(self, member: Member, now: float) -> list[Job]:
        """A load of one row, if the circuit is half-open, into a scratch row, which no look-up finds; it may evict a
        row of a full host."""
        tier, loads = self._state.tiers[member.tier], member.loads
        if member.state is TierState.DOWN or not loads.wants_probe:
            return []
        if not len(tier.index.slots_of(member)):  # no load can fail, and none was asked for while it was not readable
            loads.end_probe(loads.begin_probe(), True, now)
            return []
        key = _row_to_load(tier, member)
        if key is None or not tier.index.rows.is_stored(key) or not self._state.make_room(1):
            return []
        move = tier.start_load(self._state.host.allocate_scratch(key))
        return self._as_probe(self._jobs.start(tier, Direction.LOAD, [move], now))

    def plan_store(self, member: Member, now: float) -> list[Job]:
        """A store of one row, if the circuit is half-open and the host has any that the tier lacks."""
        tier, stores = self._state.tiers[member.tier], member.breakers[Direction.STORE]
        row = _row_to_store(tier, self._state.host) if member.state is TierState.UP and stores.wants_probe else None
        if row is None:
            return []
        rooms = [int(each is member) for each in tier.members] if len(tier.members) > 1 else None
        moves = self._writeback.start_stores(tier, [(row, row.tick)], rooms)
        return self._as_probe(self._jobs.start(tier, Direction.STORE, moves, now))

    def _as_probe(self, jobs: list[Job]) -> list[Job]:
        for job in jobs:
            job.probe_episode = self._state.movers[job.mover].breakers[job.direction].begin_probe()
        return jobs


def _row_to_load(tier: Tier, member: Member) -> Key | None:
    """A stored row that is not set aside, which would say nothing of its medium: the one asked for
    last while the circuit was not closed, or any other. Each call goes on from where the last one ended."""
    is_aside, place_of = tier.index.is_aside, tier.index.member_place_of_slot
    last = tier.last_refused
    if last is not None and tier.index.member_place_of(last) == member.place and not is_aside(last):
        return last
    tier.looked_at, keys = tier.index.rows.some(tier.looked_at, min(MAX_SOUGHT, len(tier.index)))
    rows = ((key, tier.index.rows.get(key)) for key in keys if not is_aside(key))
    found = ((key, Found(*row)) for key, row in rows if row is not None and place_of(row[0]) == member.place)
    return next((key for key, row in found if row.stored and not row.evicting), None)


def _row_to_store(tier: Tier, host: HostTier) -> Row | None:
    """One of the host's newest rows that `tier` lacks: if possible one that is sealed, as other tiers cannot be written
    while a probe seals it."""
    if tier.spec.write is Write.OFF:
        return None
    found: Row | None = None
    for key, row in islice(reversed(host.index.items()), MAX_SAMPLED):
        ready = row.state is READY and not row.sealing and not row.host_only
        if ready and (row.sealed or found is None) and key not in tier.index and not tier.index.is_aside(key):
            if row.sealed:
                return row
            found = row
    return found
