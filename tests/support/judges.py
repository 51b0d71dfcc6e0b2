"""Judges whether a core keeps out of the way as it promises: its stores, and the loads that nobody waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nixl_tiers.base.chunk import Key
from nixl_tiers.base.policies import Write
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.rows import RowState
from nixl_tiers.core.tier import Tier
from nixl_tiers.core.types import Direction, Job, TierState
from tests.support import inside


class HoldJudge:
    """Watches every plan of one core. Whether a promotion is under way is uncertain for loads of before a reset, and
    for demotions that a request joins: such a load may hold stores up, and need not."""

    def __init__(self, core: TierManager, require: Callable[[bool, str], None]) -> None:
        self._core = core
        self._require = require
        self._held_since_s: list[float | None] = [None] * len(core.tiers)  # at the earliest
        self._seen: set[int] = set()  # jobs
        self._promotions: set[int] = set()  # those of them that were begun for requests
        self._plan_stores = core.writeback.plan_stores
        core.writeback.plan_stores = self._judged_plan  # type: ignore[method-assign]
        self._plan_demotions = core.writeback.plan_demotions
        core.writeback.plan_demotions = self._watched_demotions  # type: ignore[method-assign]

    def _judged_plan(self, tier: Tier, now: float) -> list[Job]:
        held = self._watch(tier, now)
        jobs = self._plan_stores(tier, now)
        if jobs and held and self._promoting:
            since_s = self._held_since_s[tier.number]
            assert since_s is not None
            self._require(now - since_s >= self._core.limits.store_hold_s, "a store begins beside a promotion")
        return jobs

    def _watched_demotions(self, tier: Tier, now: float) -> list[Job]:
        """A hold begins, too, when victims are not loaded that are to be stored."""
        target = inside.state(self._core).below(tier)
        if target is not None and target.writable:
            self._watch(target, now)
        return self._plan_demotions(tier, now)

    def _watch(self, tier: Tier, now: float) -> bool:
        self.planned()
        held, since_s = self._must_hold(tier), self._held_since_s[tier.number]
        self._held_since_s[tier.number] = None if not held else now if since_s is None else since_s
        return held

    def planned(self) -> None:
        """All jobs of a turn. A load that began as a demotion is none for a request, also if it is not to be written
        below any more."""
        new = [(tier, job) for tier in self._core.tiers for job in tier.jobs if job.id not in self._seen]
        self._seen |= {job.id for _, job in new}
        self._promotions |= {job.id for tier, job in new if _promotes(tier, job)}

    @property
    def _promoting(self) -> bool:
        running = {job.id for tier in self._core.tiers for job in tier.jobs if not job.abandoned}
        return bool(self._promotions & running) or any(tier.to_load for tier in self._core.tiers)

    def _must_hold(self, tier: Tier) -> bool:
        """Whether only promotions that are no more under way, and time, can let stores of this tier go."""
        core = self._core
        loads = any(job.direction is Direction.LOAD for other in core.tiers for job in other.jobs)
        dead = any(other.members[0].dead for other in core.tiers)
        perhaps = self._promoting or loads or dead or inside.promotion(core).busy
        far_behind = tier.rows_to_write > core.limits.hold_share * core.host.rows
        return perhaps and not far_behind and not _short_above(core, tier)


def _promotes(tier: Tier, job: Job) -> bool:
    loads = job.direction is Direction.LOAD and job.probe_episode is None
    return loads and any(tier.staged.get(move.key) is not move.row and not move.row.invalidated for move in job.moves)


def _short_above(core: TierManager, tier: Tier) -> bool:
    """Whether the tier above has less than half of its reserve."""
    if tier.spec.write is not Write.ON_EVICT:
        return False
    writers = [other for other in core.tiers[: tier.number] if other.spec.write is not Write.OFF]
    share = core.limits.reserve_share
    if not writers:
        return 2 * core.host.free < max(1, int(core.host.rows * share))
    above = writers[-1]
    reserve = max(1, min(int(above.index.slots.limit * share), core.host.rows))
    return above.state is TierState.UP and above.readable and 2 * above.free_slots < reserve


ROUNDING_S = 1e-9  # a deadline less the time from which it was counted differs from its span in the last digit


class MeasurementJudge:
    """Watches what one core's requests decline, and the loads that measure its tiers."""

    def __init__(self, core: TierManager, require: Callable[[bool, str], None]) -> None:
        self._core = core
        self._require = require
        self._declined: list[list[tuple[float, frozenset[Key]]]] = [[] for _ in core.tiers]  # by tier, since a reset
        self.measured = 0
        """Rows that were loaded for nothing else."""
        measurements = inside.measurements(core)
        self._decline, self._plan, self._reset = measurements.declined, measurements.plan, measurements.reset
        measurements.declined = self._watched_decline  # type: ignore[method-assign]
        measurements.plan = self._judged_plan  # type: ignore[method-assign]
        measurements.reset = self._watched_reset  # type: ignore[method-assign]

    def ended(self) -> None:
        """All has ended, and more time has passed than what was declined is of use."""
        self._require(not inside.measurements(self._core).to_come, "a measurement is to come for ever")
        self._require(not inside.promotion_jobs(self._core).under_way, "a load counts as under way for ever")

    def _watched_decline(self, tier: Tier, keys: Sequence[Key], now: float) -> None:
        self._declined[tier.number].append((now, frozenset(keys)))
        self._decline(tier, keys, now)

    def _watched_reset(self) -> None:
        self._declined = [[] for _ in self._core.tiers]
        self._reset()

    def _judged_plan(self, tier: Tier, now: float) -> list[Job]:
        if not inside.measurements(self._core).to_come:
            return self._plan(tier, now)
        busy, needed = bool(tier.to_load or tier.rows_loading), self._needed()
        jobs = self._plan(tier, now)
        keys = [move.key for job in jobs for move in job.moves]
        self.measured += len(keys)
        self._require(needed <= self._core.host.index.keys(), "a measurement evicts what is needed")
        if keys:
            self._judge(tier, keys, now, busy)
        return jobs

    def _judge(self, tier: Tier, keys: list[Key], now: float, busy: bool) -> None:
        core, limits = self._core, self._core.limits
        self._require(not busy, "a tier is measured that loads for requests")
        alive = bool(inside.requests(core).by_name or inside.requests(core).before_turn)
        latest = now - limits.measure_busy_s if alive else now
        for key in keys:
            times = [when for when, declined in self._declined[tier.number] if key in declined]
            recent = any(now - limits.measure_s - ROUNDING_S <= when <= latest + ROUNDING_S for when in times)
            self._require(recent, "a tier is measured while requests are alive, or with rows that none declines")

    def _needed(self) -> set[Key]:
        """Keys of host rows that may not be evicted now, for what nobody waits for."""
        host = self._core.host
        writable = [tier for tier in self._core.tiers if tier.spec.write is not Write.OFF]
        on_evict = inside.state(self._core).below_host
        needed = set()
        for key, row in host.index.items():
            used = row.referenced or row.state is not RowState.READY or inside.pins(self._core, key)
            queued = any(key in tier.to_store or key in tier.waiting_for_seal for tier in writable)
            if used or queued or (on_evict is not None and not row.host_only and key not in on_evict.index):
                needed.add(key)
        return needed
