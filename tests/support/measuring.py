"""Judges whether a core measures its tiers as it promises: what nobody waits for takes nothing from anybody."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nixl_tiers.base.chunk import Key
from nixl_tiers.base.policies import Write
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.rows import RowState
from nixl_tiers.core.tier import Tier
from nixl_tiers.core.types import Job
from tests.support import inside

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
