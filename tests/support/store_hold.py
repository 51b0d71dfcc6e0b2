"""Judges whether a core's stores keep out of the way of promotions, and are not held up for ever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nixl_tiers.base.chunk import Key
from nixl_tiers.base.policies import Write
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.tier import Tier
from nixl_tiers.core.types import Direction, Job, TierState
from tests.support import inside


@dataclass
class _Tier:
    held_since_s: float | None = None  # at the earliest
    let_go_s: float = 0.0
    rows_let_go: int = 0
    waits_since_s: float | None = None
    first: Key | None = None  # of those that wait


class HoldJudge:
    """Watches every plan of one core. Whether a promotion is under way is uncertain for loads of before a reset, and
    for demotions that a request joins: such a load may hold stores up, and need not."""

    def __init__(self, core: TierManager, require: Callable[[bool, str], None]) -> None:
        self._core = core
        self._require = require
        self._tiers = [_Tier() for _ in core.tiers]
        self._seen: set[int] = set()  # jobs
        self._promotions: set[int] = set()  # those of them that were begun for requests
        self._plan_stores = core.writeback.plan_stores
        core.writeback.plan_stores = self._judged_plan  # type: ignore[method-assign]
        self._plan_demotions = core.writeback.plan_demotions
        core.writeback.plan_demotions = self._watched_demotions  # type: ignore[method-assign]

    def planned(self, jobs: list[Job], now: float) -> None:
        """All jobs of one turn were planned, with credits for more."""
        self._look_at_jobs()
        stores = {job.tier for job in jobs if job.direction is Direction.STORE}
        for tier, watched in zip(self._core.tiers, self._tiers, strict=True):
            room = tier.store_credits > 0 and tier.rows_storing < inside.state(self._core).store_window
            room &= (rooms := inside.state(self._core).store_rooms(tier)) is None or sum(rooms) > 0
            could = tier.writable and tier.to_store and tier.recovered and room and not self._core.events.unfinished
            first = next(iter(tier.to_store), None)
            if not could or tier.number in stores:
                watched.waits_since_s = None
                continue
            if (
                watched.waits_since_s is None or first != watched.first
            ):  # those before it found no slot, and were dropped
                watched.waits_since_s = now
            watched.first = first
            self._require(
                now - watched.waits_since_s <= self._core.limits.store_hold_s, "a store is held up for too long"
            )

    def _judged_plan(self, tier: Tier, now: float) -> list[Job]:
        watched, held, hold_s = self._tiers[tier.number], self._watch(tier, now), self._core.limits.store_hold_s
        jobs = self._plan_stores(tier, now)
        rows = sum(len(job.moves) for job in jobs)
        if rows and held and self._promoting:
            assert watched.held_since_s is not None
            self._require(now - watched.held_since_s >= hold_s, "a store begins beside a promotion")
            if now - watched.let_go_s >= hold_s:
                watched.let_go_s, watched.rows_let_go = now, 0
            watched.rows_let_go += rows
            most = 2 * inside.state(self._core).store_window
            self._require(watched.rows_let_go <= most, "stores begin beside promotions")
        return jobs

    def _watched_demotions(self, tier: Tier, now: float) -> list[Job]:
        """A hold begins, too, when victims are not loaded that are to be stored."""
        target = inside.state(self._core).below(tier)
        if target is not None and target.writable:
            self._watch(target, now)
        return self._plan_demotions(tier, now)

    def _watch(self, tier: Tier, now: float) -> bool:
        self._look_at_jobs()
        watched, held = self._tiers[tier.number], self._must_hold(tier)
        if not held:
            watched.held_since_s = None
        elif watched.held_since_s is None:
            watched.held_since_s = now
        return held

    def _look_at_jobs(self) -> None:
        """A load that began as a demotion is none for a request, also if it is not to be written below any more."""
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
