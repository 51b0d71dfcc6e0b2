"""Measurements of tiers whose rows are declined: loads that no request waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from nixl_tiers.base.chunk import Key
from nixl_tiers.core.promotion import RequestIndex
from nixl_tiers.core.promotion_jobs import PromotionJobs
from nixl_tiers.core.state import CascadeState
from nixl_tiers.core.tier import Tier
from nixl_tiers.core.types import Job

ROUNDING: Final = 1e-6
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
        idle = not (self._requests.by_name or self._requests.queued)
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
