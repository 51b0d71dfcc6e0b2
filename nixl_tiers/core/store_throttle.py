"""Write-back keeps out of the way of promotions, which requests wait for."""

from __future__ import annotations

from nixl_tiers.base.policies import Write
from nixl_tiers.core.member import UNLIMITED
from nixl_tiers.core.state import CascadeState
from nixl_tiers.core.tier import Tier
from nixl_tiers.core.types import Direction


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
