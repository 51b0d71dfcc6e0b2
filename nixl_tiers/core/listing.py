"""Listing: what a medium holds takes the place of what its index held. In steps, as it may be millions of rows."""

from __future__ import annotations

from typing import Final

from nixl_tiers.base.chunk import Key
from nixl_tiers.core.cold_rows import ColdTable, Steps, remove_all, replay
from nixl_tiers.core.slots import Slots
from nixl_tiers.core.spill import end_spill_steps
from nixl_tiers.core.tier import TierIndex
from nixl_tiers.core.types import TierState

EVICTED_A_STEP: Final = 256


def begin_listing(index: TierIndex, limit: int) -> Steps:
    """The tier was opened with `limit` slots: evict rows beyond it, or too many, the least valuable first. The tier is
    LISTING after the last step, and down before, unless it is cleared meanwhile."""
    return _begin(index, limit, index.cold.clears)


def _begin(index: TierIndex, limit: int, clears: int) -> Steps:
    if index.spill is not None and index.spill.table is None:
        index.spill.cancelled = True
    index.cold.mark_stale()
    index.clear_deletes()
    if limit < index.slots.limit:
        index.state = TierState.DOWN
        yield from end_listing(index)
    if index.cold.clears != clears:
        return
    index.set_limit(limit)
    if isinstance(index.slots, Slots) and index.slots.end > limit:
        beyond: list[Key] = []
        yield lambda: beyond.extend(_beyond(index, limit))
        while beyond and index.cold.clears == clears:
            for key in beyond[-EVICTED_A_STEP:]:
                index.evict(key)
            del beyond[-EVICTED_A_STEP:]
            yield None
    else:
        yield from _evict_surplus(index)
    if index.cold.clears == clears:
        index.state = TierState.LISTING


def add_table(index: TierIndex, table: ColdTable) -> Steps:
    """Many rows that the medium lists, in place of those that were stale: it listed them before it was opened again.
    The core owns `table` from now on: it is retired if the tier is cleared before the last step."""
    return _add(index, table, index.cold.clears)


def _add(index: TierIndex, table: ColdTable, clears: int) -> Steps:
    yield from end_spill_steps(index)
    if not index.spec.physical_slots:  # where slots are places, rows in slots that are taken are left out
        moved = index.moved_from_cold = []
        yield lambda: remove_all(table, list(index.index))  # a list of a dict is made in one go: it needs no lock
        yield from replay(table, moved, index.limits.rows_per_slice)
        index.moved_from_cold = None
    yield from index.cold.replace_stale(table, clears)
    yield from _evict_surplus(index)


def end_listing(index: TierIndex) -> Steps:
    """All has been listed: what the medium listed before it was opened again, and not since, is gone."""
    yield from end_spill_steps(index)
    yield from index.cold.replace_stale(None)


def _evict_surplus(index: TierIndex) -> Steps:
    while index.slots.free < 0 and index.make_room(min(0, index.slots.free + EVICTED_A_STEP)):
        yield None


def _beyond(index: TierIndex, limit: int) -> list[Key]:
    """The rows of `index` in slots beyond the limit. Needs no lock: each operation on the dict is atomic."""
    entries = ((key, index.index.get(key)) for key in list(index.index))
    return [key for key, entry in entries if entry is not None and entry.slot >= limit]
