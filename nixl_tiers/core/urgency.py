"""When a turn is of use: what is to be done, whether a request may wait for it, and how long it may wait."""

from __future__ import annotations

from operator import attrgetter
from typing import Final

from nixl_tiers.core.existence import ExistenceChecks
from nixl_tiers.core.probes import Measurements
from nixl_tiers.core.promotion import Promotion
from nixl_tiers.core.promotion_jobs import PromotionJobs
from nixl_tiers.core.retention import Retention
from nixl_tiers.core.state import CascadeState
from nixl_tiers.core.types import TierState
from nixl_tiers.core.writeback import WriteBack

_LISTING: Final = TierState.LISTING  # members of an enum are found by a slow attribute look-up before Python 3.12
_DEAD, _TO_DELETE = attrgetter("dead"), attrgetter("to_delete")
PAUSE_SHARE: Final = 0.5  # of the time that a tier needs for what it is moving


class Urgency:
    """Of the turns that `Events` gives. Nothing here changes anything, but for `take_work`."""

    def __init__(
        self,
        state: CascadeState,
        checks: ExistenceChecks,
        promotion: Promotion,
        promotion_jobs: PromotionJobs,
        writeback: WriteBack,
        *,
        measurements: Measurements,
        retention: Retention,
    ) -> None:
        self._state = state
        self._checks = checks
        self._promotion = promotion
        self._promotion_jobs = promotion_jobs
        self._writeback = writeback
        self._measurements = measurements
        self._retention = retention

    @property
    def busy(self) -> bool:
        """Whether deadlines run, or jobs could be planned without any other event."""
        return (
            self.urgent
            or self.can_start
            or any(tier.jobs or (tier.to_store and tier.writable) for tier in self._state.tiers)
        )

    @property
    def can_start(self) -> bool:
        """Whether a turn might start something now for which no request waits: write-back, deletions,
        measurements."""
        if self._measurements.to_come:
            return True
        return any(map(_TO_DELETE, self._state.movers)) or any(
            tier.to_demote
            or (tier.to_store and (tier.refuses_stores or self._writeback.has_room(tier)))
            or (tier.writable and self._writeback.rows_to_clean(tier) > 0)
            for tier in self._state.tiers
        )

    @property
    def urgent(self) -> bool:
        """Whether anything is to be done, or is under way, for which a request may wait."""
        if self._starts_at_once or self._promotion.busy or self._promotion_jobs.under_way:
            return True
        # Loads that no request waits for, too: their end measures the tier.
        return any(tier.rows_loading for tier in self._state.tiers)

    @property
    def _starts_at_once(self) -> bool:
        """Whether a turn would go on with something for which a request may wait. What is under way needs none: its end
        brings one, and so does the time."""
        return (
            self._promotion.prefetch_queue.busy
            or self._promotion_jobs.waits_for_turn
            or self._checks.busy
            or self._state.host.has_old
            or any(map(_DEAD, self._state.movers))
        )

    @property
    def wants_turn(self) -> tuple[bool, bool]:
        """Whether a turn is of use now, and whether it must not wait for the end of a pause."""
        urgent = self._starts_at_once
        work = urgent or self.can_start
        # Stores that have ended in a pause are room, too, though none can be started before that is known.
        at_once = urgent or any(
            (work or tier.rows_storing) and self._writeback.short_of_room(tier) for tier in self._state.tiers
        )
        return work or at_once, at_once

    def take_work(self) -> tuple[bool, bool]:
        """`wants_turn`, if a step, a store or a call has ended since this was asked last; look-ups wait for that."""
        if not self._state.turn_due:
            return False, False
        self._state.turn_due = False
        garbage = bool(self._state.garbage)
        if not self._state.tiers:  # at each step, as no supervisor looks at the time either
            host = self._state.host
            old = host.has_old or self._promotion.busy
            return bool(old or garbage or self._retention.waiting), False
        work, at_once = self.wants_turn
        return work or garbage, at_once

    @property
    def short_of_room(self) -> bool:
        """Whether allocations would soon wait for rows to be written."""
        return any(self._writeback.short_of_room(tier) for tier in self._state.tiers)

    @property
    def pause_s(self) -> float:
        """How long the ends of jobs may wait, so that one turn applies several: 0 unless only write-back is under way
        and no allocation waits for it. No tier idles meanwhile for want of jobs that could be planned now, and no
        thread that waits for its writes waits for much longer; what is stored in a pause may wait for its end."""
        running, idles = [], self._writeback.awaited > 0
        for tier in self._state.tiers:
            if tier.state is _LISTING:
                return 0.0
            if tier.jobs:
                running.append(tier)
            if tier.to_store or tier.waiting_for_seal or tier.to_demote:
                idles = True
        if not running or self.urgent or self.short_of_room:
            return 0.0
        pause_s = self._state.limits.pause_s
        return min(pause_s, *(PAUSE_SHARE * self._state.running_s(tier) for tier in running)) if idles else pause_s
