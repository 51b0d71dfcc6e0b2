"""Spilling: the coldest rows of a tier's index move into a cold table, which bounds the number of Python objects.

    collect    the coldest rows leave the eviction policy's order, a few at a time; they stay in the index
    build      without the lock: a table of them and of the smallest tables that there are
    replay     rows that were used, evicted or deleted meanwhile are removed from the new table, which serves then
    settle     the rows leave the index, a few at a time

Until the last step the index has precedence, so look-ups notice nothing of it. A row that is used before it has left
the index stays there (`TierIndex` calls `keep`), and the log of these is all that has to be replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from nixl_tiers.cascade.cold_table import ColdTable, Steps, remove_all
from nixl_tiers.chunk import Key

if TYPE_CHECKING:
    from nixl_tiers.cascade.tier_index import TierIndex

Build = Callable[[Sequence[Key], Sequence[int], Sequence[int], Sequence[ColdTable]], ColdTable | None]
"""A table of keys, slots and ticks, but for those in slot NO_SLOT, and of what is left in other tables; None if there
is no memory for it. Called without the lock, while rows of both may be removed."""

NO_SLOT: Final = 0xFFFFFFFF


class Spill:
    """The rows that one spill moves."""

    def __init__(self) -> None:
        self.keys: list[Key] = []
        self.slots: list[int] = []  # NO_SLOT: the row stays in the index
        self.ticks: list[int] = []
        self.leaving: dict[Key, int] = {}  # those that have not been used since, with their place in these lists
        self.changes: list[Key] = []  # rows that the new table must not have, though it may be built of them
        self.table: ColdTable | None = None  # the new one, once it serves
        self.cancelled = False
        self._coldest = 0  # no row before this place is leaving

    def add(self, key: Key, slot: int, tick: int) -> None:
        """This row of the index leaves it."""
        self.leaving[key] = len(self.keys)
        self.keys.append(key)
        self.slots.append(slot)
        self.ticks.append(tick)

    def keep(self, key: Key) -> int:
        """This row does not leave the index, or leaves it for good; returns its tick."""
        place = self.leaving.pop(key)
        if self.table is None:
            self.slots[place] = NO_SLOT
            self.changes.append(key)
        else:
            self.table.remove(key)
        return self.ticks[place]

    def coldest(self) -> tuple[Key, int] | None:
        """The coldest row that is leaving and not yet found in the new table, and its tick; None if there is none."""
        if self.table is not None or not self.leaving:
            return None
        while self.slots[self._coldest] == NO_SLOT:
            self._coldest += 1
        return self.keys[self._coldest], self.ticks[self._coldest]


def spill_steps(index: TierIndex, build: Build) -> Steps:
    """One spill of `index`, if it needs one. Only one at a time may be under way. It is cancelled when the tier is
    opened again or cleared before the new table serves: only then tables are replaced by others."""
    if not index.needs_spill:
        return
    batch = index.limits.rows_per_slice
    spill = index.begin_spill()
    while index.collect_for_spill(spill, batch):
        yield None
    spill.changes = []
    sources = index.cold.begin_merge(len(spill.leaving), spill.changes)
    built: list[ColdTable | None] = []
    yield lambda: built.append(build(spill.keys, spill.slots, spill.ticks, sources))
    table = built[0]
    if table is None:
        spill.cancelled = True
    else:
        replayed = 0
        while len(spill.changes) > replayed + batch:
            some = spill.changes[replayed:]
            replayed = len(spill.changes)
            yield partial(remove_all, table, some)
        remove_all(table, spill.changes[replayed:])
        index.serve_spilled(spill, table, sources)
    index.cold.end_merge()
    while index.settle_spill(batch):
        yield None
