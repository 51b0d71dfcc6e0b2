"""Measurements: loads that no request waits for, of tiers whose rows are declined because loading them takes too long.

Without them nobody would find out that such a tier has become faster. docs/internals/load-or-recompute.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from nixl_tiers.base.chunk import Key
from nixl_tiers.core.promotion_jobs import PromotionJobs
from nixl_tiers.core.request_index import RequestIndex
from nixl_tiers.core.state import CascadeState
from nixl_tiers.core.tier_index import TierIndex
from nixl_tiers.core.types import Job

BYTES_TO_LATENCY: Final = 2  # of a large measurement's time: what the bytes take at least, in latencies
LARGE: Final = 2  # a large one is at least so many times as many rows as a small one
MAX_DOUBLED: Final = 6


@dataclass(slots=True)
class _Plan:
    """Of one tier. `keys`: rows to measure it with; none: nothing is to be measured. It is as soon as no request is
    alive, from `from_s` on; at `due_s` at the latest; never after `until_s`. `again`: it was, with these keys."""

    keys: list[Key] = field(default_factory=list)
    from_s: float = 0.0
    due_s: float = 0.0
    until_s: float = 0.0
    again: bool = False
    last_rows: int = 0  # of the last measurement
    last_s: float = float("-inf")  # when it began


class Measurements:
    """What requests decline is offered here (`declined`), and some of it is loaded when it disturbs least (`plan`)."""

    def __init__(self, state: CascadeState, requests: RequestIndex, jobs: PromotionJobs) -> None:
        self._state = state
        self._requests = requests
        self._jobs = jobs
        self._plans = [_Plan() for _ in state.tiers]

    @property
    def busy(self) -> bool:
        """Whether some are to come."""
        return any(plan.keys for plan in self._plans)

    def declined(self, tier: TierIndex, keys: Sequence[Key], now: float) -> None:
        """A request does not load these rows. If the tier was not measured for a while, some are going to be loaded.
        While it loads anything, that measures it. O(1)."""
        plan, limits = self._plans[tier.number], self._state.limits
        if plan.keys or tier.to_load or tier.rows_loading:
            return
        expected_s = tier.loads.seconds(self._rows(tier, len(keys)) * self._state.row_bytes)
        pause_s = max(limits.measure_s, expected_s / limits.measure_time)
        if tier.loads.contradictions:
            pause_s = limits.measure_again_s
        if now >= max(tier.loads.last_s or 0.0, plan.last_s) + pause_s:
            plan.keys = list(keys[: self._state.rows_per_job])
            plan.from_s, plan.due_s = now, now + limits.measure_busy_s
            plan.until_s, plan.again = now + limits.measure_s, False

    def plan(self, tier: TierIndex, now: float) -> list[Job]:
        """The measurement of this tier, if one is due.

        While no request is alive it takes nothing from any, and takes as long as if one waited for it. If the result
        contradicts those before, more follow without any other request.
        """
        plan, limits = self._plans[tier.number], self._state.limits
        if not plan.keys or (plan.again and tier.rows_loading):
            return []
        decided = plan.again and not tier.loads.contradictions
        if decided or tier.to_load or tier.rows_loading or now > plan.until_s or not tier.readable:
            plan.keys = []
        idle = not (self._requests.by_name or self._requests.queued)
        if not plan.keys or now < plan.from_s or (now < plan.due_s and not idle):
            return []
        rows = self._rows(tier, len(plan.keys))
        jobs = self._jobs.load_unasked(tier, plan.keys[:rows], now)
        if jobs:
            plan.last_rows, plan.last_s = rows, now
            plan.again = True
            plan.from_s = plan.due_s = now + limits.measure_again_s
        return jobs

    def reset(self) -> None:
        """Nothing that was declined before is loaded any more."""
        for plan in self._plans:
            plan.keys = []

    # --- inside ------------------------------------------------------------------------------------------------

    def _rows(self, tier: TierIndex, most: int) -> int:
        """How many rows the next measurement loads: few and many by turns, since only different sizes tell the latency
        from the time of a row. Many: as much as the share of the tier's time allows; if not even twice as many as few
        fit into that, only where all transfers were of one size. Where the last contradicted those before, it is
        judged by others: each of twice as many."""
        limits, loads, job = self._state.limits, tier.loads, self._state.rows_per_job
        share_s, row_s = limits.measure_s * limits.measure_time, loads.s_per_byte * self._state.row_bytes
        rows = int(job * limits.measure_share)
        if row_s:
            rows = min(rows, int((share_s - loads.latency_s) / row_s))
        few = rows = max(1, rows)
        if loads.contradictions:
            rows <<= min(loads.contradictions, MAX_DOUBLED)
        elif self._plans[tier.number].last_rows <= few:
            fits = int((share_s - loads.latency_s) / row_s) if row_s else job
            if fits >= LARGE * few:
                rows = fits
            elif loads.one_size and loads.known:
                rows = max(LARGE * few, int(BYTES_TO_LATENCY * loads.latency_s / row_s))
        return min(rows, job, most)
