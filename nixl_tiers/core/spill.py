"""Spilling: the coldest rows of a tier's index move into a cold table, which bounds the number of Python objects.

    collect    the coldest rows leave the eviction policy's order, a few at a time; they stay in the index
    build      without the lock: a table of them and of the smallest tables that there are
    replay     rows that were used, evicted or deleted meanwhile are removed from the new table, which serves then
    leave      the rows leave the index, a few at a time

Until the last step the index has precedence, so look-ups notice nothing of it. A row that is used before it has left
the index stays there (`TierIndex` calls `keep`), and the log of these is all that has to be replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from nixl_tiers.base.chunk import Key
from nixl_tiers.core.cold_rows import ColdTable, SomeRows, Spill, Steps, replay
from nixl_tiers.core.eviction.lru import LeafFirstLru
from nixl_tiers.core.tier import TierIndex

Build = Callable[[Iterable[SomeRows], Sequence[ColdTable]], ColdTable]
"""A table of rows, but for those in slot NO_SLOT, and of what is left in other tables. Called without the lock, while
rows of both may be removed. If it raises, take `cancel_steps`."""


def spill_steps(index: TierIndex, build: Build) -> Steps:
    """One spill of `index`, if it needs one. Only one at a time may be under way. It is cancelled when the tier is
    opened again or cleared before the new table serves: only then tables are replaced by others."""
    if not index.needs_spill:
        return
    batch = index.limits.rows_per_slice
    spill = index.spill = Spill()
    while _collect(spill, index, batch):
        yield None
    if not (spill.leaving or spill.cancelled or index.cold.needs_merge):
        index.spill = None  # all rows must stay
        return
    spill.changes = []
    sources = index.cold.begin_merge(spill.leaving, spill.changes)
    built: list[ColdTable] = []
    yield lambda: built.append(build(spill.rows(), sources))
    (table,) = built
    yield from replay(table, spill.changes, batch)
    _install(spill, index, table, sources)
    index.cold.end_merge()
    while _leave_index(spill, index):
        yield None
    yield spill.free


def cancel_steps(index: TierIndex) -> Steps:
    """Instead of the steps that are left of a spill."""
    index.cold.end_merge()
    if index.spill is not None:
        index.spill.cancelled = True
    yield from end_spill_steps(index)


def end_spill_steps(index: TierIndex) -> Steps:
    """End a spill whose table serves, or that was cancelled; one whose table is being built is left alone."""
    while index.spill is not None and _leave_index(index.spill, index):
        yield None


def _collect(spill: Spill, index: TierIndex, count: int) -> bool:
    """Have up to `count` rows leave the index, the coldest first; whether there are more. Rows stay that are being
    moved or evicted, are suspects, or have uses that the medium has not heard of: `count` of them are passed over
    at most."""
    missing = len(index.policy) - index.limits.hot_rows // 2  # victims stay in `index`, and are not of the order
    if spill.cancelled or missing <= 0 or not isinstance(index.policy, LeafFirstLru):
        return False
    rows = index.policy.pop(min(count, missing), partial(_must_stay, index), most=count)
    collected: list[Key] = []
    for key, tick in rows:
        if spill.ticks and tick < spill.ticks[-1]:  # it had to stay until now: `coldest` needs them in order
            index.policy.add(key, tick)
            continue
        collected.append(key)
        entry = index.index[key]
        entry.spilled_at = len(spill.slots)
        spill.slots.append(entry.slot)
        spill.ticks.append(tick)
    if collected:
        spill.keys.append(tuple(collected))
    spill.end = len(spill.slots)
    spill.leaving += len(collected)
    return len(collected) == len(rows) and (bool(rows) or index.policy.has_unchecked)


def _install(spill: Spill, index: TierIndex, table: ColdTable, sources: Sequence[ColdTable]) -> None:
    """The new table serves from now on in place of `sources`, unless the spill was cancelled."""
    if spill.cancelled:
        index.cold.retire(table)
    else:
        spill.table = table
        index.cold.install(table, sources)


def _leave_index(spill: Spill, index: TierIndex) -> bool:
    """A batch of rows leave the index for the new table; or they stay, if there is none. Whether there are more:
    else the spill has ended. A spill that is neither cancelled nor has a table is left alone."""
    if index.spill is not spill or (spill.table is None and not spill.cancelled):
        return False
    if spill.leaving:
        table = spill.table if spill.table in index.cold.tables else None
        spill.batches_done += 1
        for key in reversed(spill.keys[-spill.batches_done]):
            spill.end -= 1
            entry = index.index.get(key)
            if entry is None or entry.spilled_at != spill.end:
                continue
            spill.leaving -= 1
            if table is not None and table.find(key) is not None:
                del index.index[key]
            else:
                entry.spilled_at = -1
                index.policy.add(key, spill.ticks[spill.end])
    if not spill.leaving:
        index.spill = None
    return index.spill is not None


def _must_stay(index: TierIndex, key: Key) -> bool:
    return index.is_pinned(key) or index.denylist.is_suspect(key) or key in index.recent_uses
