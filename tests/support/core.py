"""Calls of a core in one go that the coordinator makes step by step."""

from __future__ import annotations

from collections.abc import Sequence

from nixl_tiers.base.chunk import Key
from nixl_tiers.core.cold_rows import take_all
from nixl_tiers.core.manager import TierManager


def opened(core: TierManager, tier: int, slots: int) -> None:
    """A mover serves this tier."""
    take_all(core.events.opened(tier, slots))


def put(core: TierManager, keys: Sequence[Key], request: str = "put") -> None:
    """A request stores these chunks, its workers have written them, and it has ended."""
    plan = core.copies.prepare_store(keys, request)
    core.copies.complete_store(core.copies.rows_being_filled(plan.keys), set())
    core.finish_request(request)
    core.end_step()


def expire(core: TierManager, now: float) -> None:
    """A turn of the supervisor without its plan."""
    core.checks.expire(now)
    core.events.expire(now)


def touched(core: TierManager, keys: Sequence[Key], request: str) -> None:
    """The engine has used these chunks from its own memory, and that has been noted."""
    core.engine_hits.add(keys, request)
    while core.engine_hits.waiting:
        core.events.work(0.0)
