"""Calls of a core in one go that the coordinator, or a front end, makes step by step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nixl_tiers.base.chunk import Key
from nixl_tiers.core.listing import take_all
from nixl_tiers.core.lookup import Lookup
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.prefetch_queue import Rank
from nixl_tiers.core.rows import Found, Row
from nixl_tiers.core.tier import Tier
from nixl_tiers.runtime.coordinator import Coordinator
from tests.support import inside


def opened(core: TierManager, mover: int, slots: int, listed: Sequence[tuple[int, Key, int]] | None = None) -> None:
    """A mover serves its tier, and has listed all of these."""
    take_all(core.events.opened(mover, slots))
    if listed is not None:
        core.events.listed(mover, listed, last=True)


def put(core: TierManager, keys: Sequence[Key], request: str = "put") -> None:
    """A request stores these chunks, its workers have written them, and it has ended."""
    plan = core.prepare_store(request, keys)
    core.complete_store(plan.keys, all_good)
    core.finish(request)
    core.end_step()


def empty_host(core: TierManager) -> None:
    """Host memory holds nothing any more that is not in use."""
    inside.dropped(core, list(core.host.index))


def all_good(_: Sequence[Row]) -> tuple[set[Key], set[Key]]:
    """Says of the rows of a store that all of them were written."""
    return set(), set()


def all_failed(rows: Sequence[Row]) -> tuple[set[Key], set[Key]]:
    """Says of the rows of a store that none of them was written."""
    return {row.key for row in rows}, set()


def expire(core: TierManager, now: float) -> None:
    """A turn of the supervisor without its plan."""
    core.checks.expire(now)
    core.events.expire(now)


def touched(core: TierManager, keys: Sequence[Key], request: str) -> None:
    """The engine has used these chunks from its own memory."""
    core.used(request, keys)


def look_up_key(  # noqa: PLR0917 - as a look-up is asked
    core: TierManager,
    key: Key,
    request: str,
    position: int | None,
    now: float,
    first: int = 0,
    *,
    check: bool = True,
) -> Lookup:
    """One look-up."""
    (found,) = core.look_up_keys(request, [key], now, first, positions=[position], check=check)
    return found


def anticipate(core: TierManager, name: str, keys: Sequence[Key], rank: Rank) -> None:
    """A new request waits for its turn, whatever comes before it."""
    core.arrive(name)
    core.anticipate(name, keys, rank)


def look_up(coordinator: Coordinator, key: Key, request: str, position: int | None = None, first: int = 0) -> Lookup:
    """One look-up of a scheduler, in a hold of its own."""
    with coordinator.core() as core:
        return look_up_key(core, key, request, position, coordinator.now(), first)


def end_step(coordinator: Coordinator) -> None:
    """A scheduler's step ends."""
    with coordinator.core() as core:
        core.end_step()


def finish(coordinator: Coordinator, request: str) -> None:
    """A scheduler's request has ended."""
    with coordinator.core() as core:
        core.finish(request)


def locate(coordinator: Coordinator, keys: Sequence[Key]) -> list[str | None]:
    """The first tier that holds each key."""
    with coordinator.core() as core:
        return core.where(keys)


def backlog(coordinator: Coordinator) -> int:
    """Rows that are still to be written to some tier."""
    with coordinator.core() as core:
        return core.writeback.backlog()


def rows_of(tier: Tier) -> dict[Key, Found]:
    """All rows of a tier's index."""
    rows = tier.index.rows
    return {key: Found(*found) for key in rows.some(0, 1 << 20)[1] if (found := rows.get(key)) is not None}


def set_aside(tier: Tier, keys: Iterable[Key], seconds: float, now: float = 0.0) -> None:
    """As if their moves had failed."""
    for key in keys:
        place = tier.index.rows.get(key)[0] if tier.spec.physical_slots else key  # type: ignore[index]
        tier.index.aside.add(place, seconds, now)
