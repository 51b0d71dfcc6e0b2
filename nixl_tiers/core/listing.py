"""Listing: what a medium holds is what its index holds from then on. In steps, as it may be millions of rows.

Rows of before the tier was opened again serve while it lists; those that it has not listed by the end are gone. A tier
that is asked lists nothing: what is known of it stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from nixl_tiers.core.slots import Slots
from nixl_tiers.core.tier import Tier
from nixl_tiers.core.tier_rows import ALL_SLOTS
from nixl_tiers.core.types import Columns, TierState

Steps = Iterator[None]
"""What would take too long at once: each step is taken with the core's lock held, and takes about a millisecond."""
EVICTED_A_STEP: Final = 256


def take_all(steps: Steps) -> None:
    """Take all steps at once."""
    for _ in steps:
        pass


def begin_listing(tier: Tier, limit: int) -> Steps:
    """The tier was opened with `limit` slots: evict rows beyond it, or too many, the least valuable first. The tier is
    LISTING after the last step, and down before, unless it is cleared after this call."""
    return _begin(tier, limit, tier.index.clears)


def _begin(tier: Tier, limit: int, clears: int) -> Steps:
    index = tier.index
    if index.clears != clears:
        return
    index.clear_deletes()
    if limit < index.slots.limit:
        tier.state = TierState.DOWN
        yield None
    if index.clears != clears:
        return
    index.set_limit(limit)
    if isinstance(index.slots, Slots) and index.slots.end > limit:
        yield from _sweep(tier, clears, limit)
    yield from _evict_surplus(tier)
    if index.clears == clears:
        index.begin_listing()
        tier.state = TierState.LISTING


def add_columns(tier: Tier, columns: Columns) -> Steps:
    """Many rows that the medium lists. The core owns `columns` from now on; they are dropped if the tier is cleared
    after this call."""
    return _add(tier, columns, tier.index.clears)


def _add(tier: Tier, columns: Columns, clears: int) -> Steps:
    rows = tier.limits.listed_per_step
    for start in range(0, columns.count, rows):
        if tier.index.clears == clears:
            tier.index.add_columns(columns, start, min(start + rows, columns.count))
        yield None
    columns.close()
    yield from _evict_surplus(tier)


def end_listing(tier: Tier) -> Steps:
    """All has been listed: what was not listed since the tier was opened again is gone; unless nothing ever is. Without
    steps if they have all been taken before."""
    return iter(()) if tier.spec.asked or not tier.index.listing else _sweep(tier, tier.index.clears)


def _sweep(tier: Tier, clears: int, limit: int = ALL_SLOTS) -> Steps:
    place = 0
    while place >= 0 and tier.index.clears == clears:
        place = tier.index.sweep(place, tier.limits.listed_per_step, limit)
        yield None


def _evict_surplus(tier: Tier) -> Steps:
    slots = tier.index.slots
    while slots.free < 0 and tier.index.make_room(min(0, slots.free + EVICTED_A_STEP)):
        yield None
