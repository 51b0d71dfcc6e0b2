"""The order of eviction of one tier, across all that holds its rows: cold tables, a spill, and the eviction policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nixl_tiers.base.chunk import Key
from nixl_tiers.core.types import Entry

if TYPE_CHECKING:
    from nixl_tiers.core.tier import TierIndex


def take_coldest(tier: TierIndex, count: int) -> list[Key]:
    """Take up to `count` rows, the least valuable first, out of the order of eviction; they are in `index` then."""
    keys: list[Key] = []
    before = _coldest_tick(tier)
    while (missing := count - len(keys)) > 0:
        cold = tier.cold.coldest(missing, before)
        keys += _out_of_tables(tier, cold)
        hot = [] if cold else _take_hot(tier, 1 if tier.cold.tables else missing)
        keys += hot
        if not (cold or hot or before is not None):
            break
        before = _coldest_tick(tier) if cold or hot else None  # None: all others are pinned
    return keys


def take_cold(tier: TierIndex, count: int) -> list[Key]:
    """The same of rows in cold tables only."""
    return _out_of_tables(tier, tier.cold.coldest(count))


def _out_of_tables(tier: TierIndex, rows: list[tuple[Key, int]]) -> list[Key]:
    """Rows (key, slot) that have left their tables are in `index` from now on; returns the keys of those that count."""
    keys: list[Key] = []
    for key, slot in rows:
        entry = tier.index.get(key)
        if entry is None:
            tier.index[key] = Entry(slot, stored=True)
            keys.append(key)
        elif entry.spilled_at >= 0 and tier.spill is not None:
            tier.spill.keep(key, entry)
            keys.append(key)
        else:  # it was listed twice: the row in `index` is the newer one
            tier.counters.relisted += 1
            tier.slots.release(slot)
            if tier.spec.physical_slots:
                tier.queue_delete(slot, key)
    return keys


def _coldest_tick(tier: TierIndex) -> int | None:
    """Of the rows in `index`."""
    hot = tier.policy.coldest_tick(tier.is_pinned)
    leaving = None if tier.spill is None else tier.spill.coldest()
    return hot if leaving is None else leaving[1] if hot is None else min(hot, leaving[1])


def _take_hot(tier: TierIndex, count: int) -> list[Key]:
    """Up to `count` rows of those that are in no table, the least valuable first."""
    keys: list[Key] = []
    while tier.spill is not None and len(keys) < count and (leaving := tier.spill.coldest()) is not None:
        hot = tier.policy.coldest_tick(tier.is_pinned)
        taken = tier.policy.evict(1, tier.is_pinned) if hot is not None and hot < leaving[1] else []
        if not taken:
            taken = [leaving[0]]
            tier.spill.keep(leaving[0], tier.index[leaving[0]])
        keys += taken
    return keys + tier.policy.evict(count - len(keys), tier.is_pinned)
