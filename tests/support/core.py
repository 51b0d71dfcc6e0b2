"""Calls of a core in one go that the coordinator makes step by step."""

from __future__ import annotations

from nixl_tiers.cascade.cold_table import take_all
from nixl_tiers.cascade.manager import TierManager


def opened(core: TierManager, tier: int, slots: int) -> None:
    """A mover serves this tier."""
    take_all(core.events.opened(tier, slots))


def expire(core: TierManager, now: float) -> None:
    """A turn of the supervisor without its plan."""
    core.checks.expire(now)
    core.events.expire(now)
