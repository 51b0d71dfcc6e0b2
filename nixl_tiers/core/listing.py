"""Listing: what a medium holds is what its index holds from then on. In steps, as it may be millions of rows.

Rows of before the tier was opened again serve while it lists; those that it has not listed by the end are gone. A tier
that is asked lists nothing: what is known of it stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from nixl_tiers.core.member import Member
from nixl_tiers.core.rows import ALL_SLOTS
from nixl_tiers.core.slots import Slots
from nixl_tiers.core.tier import Tier
from nixl_tiers.core.types import Columns, TierState

Steps = Iterator[None]
"""What would take too long at once: each step is taken with the core's lock held, and takes about a millisecond."""
EVICTED_A_STEP: Final = 256


def take_all(steps: Steps) -> None:
    """Take all steps at once."""
    for _ in steps:
        pass


def begin_listing(tier: Tier, member: Member, limit: int) -> Steps:
    """The member's medium was opened with `limit` slots: evict rows beyond it, or too many, the least valuable first.
    It is LISTING after the last step, and down before, unless the tier is cleared after this call."""
    return _begin(tier, member, limit, tier.index.clears)


def _begin(tier: Tier, member: Member, limit: int, clears: int) -> Steps:
    index = tier.index
    if index.clears != clears:
        return
    member.clear_deletes()
    slots = index.slots_of(member)
    if limit < slots.limit:
        member.state = TierState.DOWN
        yield None
    if index.clears != clears:
        return
    index.set_limit(member, limit)
    if isinstance(slots, Slots) and slots.end > limit:
        yield from _sweep(tier, member, clears, limit)
    yield from _evict_surplus(tier)
    if index.clears == clears:
        if not index.begin_listing(member):
            yield from _sweep(tier, member, clears, all_rows=True)
        if index.clears == clears:
            member.state = TierState.LISTING


def add_columns(tier: Tier, member: Member, columns: Columns) -> Steps:
    """Many rows that the medium lists. The core owns `columns` from now on; they are dropped if the tier is cleared
    after this call."""
    return _add(tier, member, columns, tier.index.clears)


def _add(tier: Tier, member: Member, columns: Columns, clears: int) -> Steps:
    rows = tier.limits.listed_per_step
    for start in range(0, columns.count, rows):
        if tier.index.clears == clears:
            tier.index.add_columns(member, columns, start, min(start + rows, columns.count))
        yield None
    columns.close()
    yield from _evict_surplus(tier)


def end_listing(tier: Tier, member: Member) -> Steps:
    """All has been listed: what was not listed since the medium was opened again is gone; unless nothing ever is.
    Without steps if they have all been taken before."""
    if tier.spec.asked or member.place not in tier.index.listing:
        return iter(())
    return _sweep(tier, member, tier.index.clears)


def _sweep(tier: Tier, member: Member, clears: int, limit: int = ALL_SLOTS, *, all_rows: bool = False) -> Steps:
    place = 0
    while place >= 0 and tier.index.clears == clears:
        place = tier.index.sweep(member, place, tier.limits.listed_per_step, limit, all_rows=all_rows)
        yield None


def _evict_surplus(tier: Tier) -> Steps:
    slots = tier.index.slots
    while slots.free < 0 and tier.index.make_room(min(0, slots.free + EVICTED_A_STEP)):
        yield None
