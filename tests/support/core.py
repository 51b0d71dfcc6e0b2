"""Calls of a core in one go that the coordinator, or a front end, makes step by step."""

from __future__ import annotations

from collections.abc import Sequence

from nixl_tiers.base.chunk import Key
from nixl_tiers.core.key_lookup import Lookup
from nixl_tiers.core.listing import take_all
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.tier import Tier
from nixl_tiers.core.tier_rows import Found
from nixl_tiers.runtime.coordinator import Coordinator


def opened(core: TierManager, tier: int, slots: int) -> None:
    """A mover serves this tier."""
    take_all(core.events.opened(tier, slots))


def put(core: TierManager, keys: Sequence[Key], request: str = "put") -> None:
    """A request stores these chunks, its workers have written them, and it has ended."""
    plan = core.copies.prepare_store(keys, request)
    core.copies.complete_store(core.copies.rows_being_filled(plan.keys), set())
    core.finish_request(request)
    core.end_step()


def empty_host(core: TierManager) -> None:
    """Host memory holds nothing any more that is not in use."""
    rows = list(core.host.index.values())
    for row in rows:
        if row.retained_until:
            core.host.release(row)
        core.host.evict(row)
    core._state.dropped([row for row in rows if row.removed])


def expire(core: TierManager, now: float) -> None:
    """A turn of the supervisor without its plan."""
    core.checks.expire(now)
    core.events.expire(now)


def touched(core: TierManager, keys: Sequence[Key], request: str) -> None:
    """The engine has used these chunks from its own memory, and that has been noted."""
    core.engine_hits.add(keys, request)
    while core.engine_hits.waiting:
        core.events.work(0.0)


def look_up(coordinator: Coordinator, key: Key, request: str, position: int | None = None, first: int = 0) -> Lookup:
    """One look-up of a scheduler, in a hold of its own."""
    with coordinator.core() as core:
        return core.lookup(key, request, position, coordinator.now(), first)


def end_step(coordinator: Coordinator) -> None:
    """A scheduler's step ends."""
    with coordinator.core() as core:
        core.end_step()


def finish(coordinator: Coordinator, request: str) -> None:
    """A scheduler's request has ended."""
    with coordinator.core() as core:
        core.finish_request(request)


def backlog(coordinator: Coordinator) -> int:
    """Rows that are still to be written to some tier."""
    with coordinator.core() as core:
        return core.backlog()


def rows_of(tier: Tier) -> dict[Key, Found]:
    """All rows of a tier's index."""
    rows = tier.index.rows
    return {key: Found(*found) for key in rows.some(0, 1 << 20)[1] if (found := rows.get(key)) is not None}
