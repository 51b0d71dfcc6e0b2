"""Spilling: the coldest rows of a tier's index move into a cold table, which bounds the number of Python objects.

    collect    the coldest rows leave the eviction policy's order, a few at a time; they stay in the index
    build      without the lock: a table of them and of the smallest tables that there are
    replay     rows that were used, evicted or deleted meanwhile are removed from the new table, which serves then
    leave      the rows leave the index, a few at a time

Until the last step the index has precedence, so look-ups notice nothing of it. A row that is used before it has left
the index stays there (`TierIndex` calls `keep`), and the log of these is all that has to be replayed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Final

from nixl_tiers.base.chunk import Key
from nixl_tiers.core.cold_rows import ColdTable, Steps, replay
from nixl_tiers.core.eviction.lru import LeafFirstLru
from nixl_tiers.core.types import Entry

if TYPE_CHECKING:
    from nixl_tiers.core.tier import TierIndex

SomeRows = tuple[Sequence[Key], Sequence[int], Sequence[int]]
"""Keys, slots and ticks."""

Build = Callable[[Iterable[SomeRows], Sequence[ColdTable]], ColdTable]
"""A table of rows, but for those in slot NO_SLOT, and of what is left in other tables. Called without the lock, while
rows of both may be removed. If it raises, take `cancel_steps`."""

NO_SLOT: Final = 0xFFFFFFFF
BATCHES_AT_ONCE: Final = 64


class Spill:
    """The rows that one spill moves: their entries in the index have places here, until they are used. In tuples and
    arrays, which the interpreter's garbage collector does not walk over."""

    def __init__(self, index: TierIndex) -> None:
        self._index = index
        self.keys: list[tuple[Key, ...]] = []  # in batches, as they were collected
        self.slots = array("I")  # of all batches; NO_SLOT: the row stays in the index
        self.ticks = array("Q")
        self.leaving = 0  # how many have not been used since
        self.changes: list[Key] = []  # rows that the new table must not have, though it may be built of them
        self.table: ColdTable | None = None  # the new one, once it serves
        self.cancelled = False
        self._coldest = 0  # no row before this place is leaving,
        self._batch = self._offset = 0  # which is this one in `keys`
        self._settled = 0  # batches, from the last,
        self._end = 0  # of which this is the place of the first row

    def collect(self, count: int) -> bool:
        """Have up to `count` rows leave the index, the coldest first; whether there are more. Rows stay that are being
        moved or evicted, are suspects, or have uses that the medium has not heard of: `count` of them are passed over
        at most."""
        index = self._index
        missing = len(index.policy) - index.limits.hot_rows // 2  # victims stay in `index`, and are not of the order
        if self.cancelled or missing <= 0 or not isinstance(index.policy, LeafFirstLru):
            return False
        rows = index.policy.pop(min(count, missing), self._must_stay, most=count)
        collected: list[Key] = []
        for key, tick in rows:
            if self.ticks and tick < self.ticks[-1]:  # it had to stay until now: `coldest` needs them in order
                index.policy.add(key, tick)
                continue
            collected.append(key)
            entry = index.index[key]
            entry.spilled_at = len(self.slots)
            self.slots.append(entry.slot)
            self.ticks.append(tick)
        if collected:
            self.keys.append(tuple(collected))
        self._end = len(self.slots)
        self.leaving += len(collected)
        return len(collected) == len(rows) and (bool(rows) or index.policy.has_unchecked)

    def keep(self, key: Key, entry: Entry) -> int:
        """This row does not leave the index, or leaves it for good; returns its tick."""
        place, entry.spilled_at = entry.spilled_at, -1
        self.leaving -= 1
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
            self._offset += 1
            if self._offset == len(self.keys[self._batch]):
                self._batch, self._offset = self._batch + 1, 0
        return self.keys[self._batch][self._offset], self.ticks[self._coldest]

    def install(self, table: ColdTable, sources: Sequence[ColdTable]) -> None:
        """The new table serves from now on in place of `sources`, unless the spill was cancelled."""
        if self.cancelled:
            self._index.cold.retire(table)
        else:
            self.table = table
            self._index.cold.install(table, sources)

    def leave_index(self) -> bool:
        """A batch of rows leave the index for the new table; or they stay, if there is none. Whether there are more:
        else the spill has ended. A spill that is neither cancelled nor has a table is left alone."""
        index = self._index
        if index.spill is not self or (self.table is None and not self.cancelled):
            return False
        if self.leaving:
            table = self.table if self.table in index.cold.tables else None
            self._settled += 1
            for key in reversed(self.keys[-self._settled]):
                self._end -= 1
                entry = index.index.get(key)
                if entry is None or entry.spilled_at != self._end:
                    continue
                self.leaving -= 1
                if table is not None and table.find(key) is not None:
                    del index.index[key]
                else:
                    entry.spilled_at = -1
                    index.policy.add(key, self.ticks[self._end])
        if not self.leaving:
            index.spill = None
        return index.spill is not None

    def rows(self) -> Iterator[SomeRows]:
        """Some thousand at a time. Needs no lock."""
        at = 0
        for first in range(0, len(self.keys), BATCHES_AT_ONCE):
            keys = list(chain.from_iterable(self.keys[first : first + BATCHES_AT_ONCE]))
            end = at + len(keys)
            yield keys, self.slots[at:end], self.ticks[at:end]
            at = end

    def free(self) -> None:
        """Free what is not used any more, a few rows at a time. Needs no lock."""
        while self.keys:
            del self.keys[-BATCHES_AT_ONCE:]

    def _must_stay(self, key: Key) -> bool:
        index = self._index
        return index.is_pinned(key) or index.denylist.is_suspect(key) or key in index.recent_uses


def spill_steps(index: TierIndex, build: Build) -> Steps:
    """One spill of `index`, if it needs one. Only one at a time may be under way. It is cancelled when the tier is
    opened again or cleared before the new table serves: only then tables are replaced by others."""
    if not index.needs_spill:
        return
    batch = index.limits.rows_per_slice
    spill = index.spill = Spill(index)
    while spill.collect(batch):
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
    spill.install(table, sources)
    index.cold.end_merge()
    while spill.leave_index():
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
    while index.spill is not None and index.spill.leave_index():
        yield None
