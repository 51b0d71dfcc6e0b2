"""Cold rows: rows of a storage tier in a compact form, so that millions of them cost little memory."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from operator import or_
from typing import Final, Protocol

from nixl_tiers.base.chunk import Key
from nixl_tiers.core.slots import SlotCount, SlotOwner, Slots
from nixl_tiers.core.stats import Counters
from nixl_tiers.core.types import Entry

Steps = Iterator[Callable[[], object] | None]
"""What would take too long at once. Each step is taken with the core's lock held, and takes well below a millisecond;
what it yields, if anything, is to be called without the lock before the next one."""


def take_all(steps: Steps) -> None:
    """Take all steps at once."""
    for work in steps:
        if work is not None:
            work()


def remove_all(table: ColdTable, keys: Iterable[Key]) -> None:
    for key in keys:
        table.remove(key)


def replay(table: ColdTable, changes: list[Key], batch: int) -> Steps:
    """Remove all of `changes` from `table`, to which keys are added meanwhile: the last of them when the last step is
    taken."""
    replayed = 0
    while len(changes) > replayed + batch:
        some = changes[replayed:]
        replayed += len(some)
        yield partial(remove_all, table, some)
    remove_all(table, changes[replayed:])


class Retired(Protocol):
    """What holds much memory and is not used any more."""

    def close(self) -> None:
        """Release the memory. Takes long: do it without a lock."""


class ColdTable(SlotOwner, Protocol):
    """Rows that only become fewer: one that is used moves into the TierIndex, the coldest are evicted.

    memory.row_table.RowTable is one; tests have PlainColdTable.
    """

    def __len__(self) -> int: ...

    @property
    def built_rows(self) -> int:
        """How many rows it was built with: what its memory is proportional to."""

    def find(self, key: Key) -> tuple[int, int] | None:
        """(slot, tick of last use) of the key's row, or None."""

    def has_many(self, keys: Sequence[Key]) -> list[bool]:
        """Of each key, whether `find` finds it."""

    def remove(self, key: Key) -> tuple[int, int] | None:
        """As find, and remove the row: its slot is the caller's."""

    def coldest_tick(self) -> int | None:
        """When the least recently used row was used, or earlier; None if there is none."""

    def coldest(self, count: int, before: int | None = None) -> list[tuple[Key, int]]:
        """Remove up to `count` rows, the least recently used first: (key, slot). With `before`: only those that were
        last used at that tick or earlier. Fewer, also none, if it has passed over many removed rows: call it again."""

    def prepare_slots(self) -> None:
        """Call before `claim` or `release`, without a lock. No row may be removed from now until `drop_unclaimed`, or
        the last `release`."""

    def drop_unclaimed(self, limit: int) -> None:
        """Remove the rows whose slots were left out, or are not below `limit`. Call it without a lock."""

    def close(self) -> None:
        """Release the memory."""


SLOTS_A_STEP: Final = 1 << 17
SPARSE_ROWS: Final = 1 << 16
MAX_TABLES: Final = 3  # a look-up searches each of them


class ColdRows:
    """The cold tables of one tier: rows that were not used for long, or not since the medium listed them.

    `tables`, of which the first was added first. When a tier is opened again, those it has already are stale: they
    still serve until the medium has listed their rows again.

    A table that is empty or stale is retired: `take_retired` hands it to who can release its memory without a lock.
    """

    def __init__(self, slots: SlotCount, counters: Counters) -> None:
        self.tables: list[ColdTable] = []
        self._retired: list[Retired] = []
        self._stale = 0  # how many of `tables`, from the first
        self._slots = slots
        self._counters = counters
        self.clears = 0
        """How often they were cleared."""
        self._merging: list[ColdTable] = []
        self._changes: list[Key] = []  # rows that were removed from these since the merge began

    def has(self, key: Key) -> bool:
        """As `in`, which takes longer to get here."""
        for table in self.tables:  # noqa: SIM110 (a generator takes longer than a table)
            if table.find(key) is not None:
                return True
        return False

    __contains__ = has

    def has_many(self, keys: Sequence[Key]) -> list[bool]:
        """Of each key, whether it is here."""
        if not self.tables:
            return [False] * len(keys)
        found = self.tables[0].has_many(keys)
        for table in self.tables[1:]:
            found = list(map(or_, found, table.has_many(keys)))
        return found

    def __len__(self) -> int:
        return sum(map(len, self.tables))

    def replace_stale(self, table: ColdTable | None, clears: int | None = None) -> Steps:
        """The medium has listed the rows of the stale tables again, if it still holds them: in `table`, or not in any.

        In a tier of physical slots, rows in slots that are taken are removed from it; elsewhere the tier may be over
        its limit afterwards. If the tier has been cleared since there were `clears` (None: since the first step),
        `table` is retired.
        """
        clears = self.clears if clears is None else clears
        stale = self._detach_stale()
        tables = stale if table is None else [*stale, table]
        if isinstance(self._slots, Slots):
            for each in tables:
                yield each.prepare_slots
            for start in range(0, max((each.slots_end for each in tables), default=0), SLOTS_A_STEP):
                if self.clears == clears:
                    self._slots.exchange(stale, table, start, start + SLOTS_A_STEP)
                    yield None
            if table is not None:
                limit = self._slots.limit
                yield lambda: table.drop_unclaimed(limit)
        elif self.clears == clears:
            self._slots.adjust_used((0 if table is None else len(table)) - sum(map(len, stale)))
        self._retired += stale
        if table is not None:
            if self.clears == clears:
                self._counters.found += len(table)
                self.tables.append(table)
                self.retire_empty()
            else:
                self._retired.append(table)

    def remove(self, key: Key) -> tuple[int, int] | None:
        """(slot, tick of last use) of the key's row, which is the caller's from now on, and its slot too."""
        for table in self.tables:
            found = table.remove(key)
            if found is not None:
                if table in self._merging:
                    self._changes.append(key)
                if not len(table):
                    self.retire_empty()
                return found
        return None

    def coldest(self, count: int, before: int | None = None) -> list[tuple[Key, int]]:
        """Remove up to `count` rows of all tables, the least recently used first: (key, slot). With `before`: only
        those that were last used at that tick or earlier."""
        victims: list[tuple[Key, int]] = []
        while len(victims) < count:
            ticks = [(tick, n) for n, table in enumerate(self.tables) if (tick := table.coldest_tick()) is not None]
            if not ticks:
                break
            (tick, number), *others = sorted(ticks)
            limit = before
            if others:  # of equal ticks, those of the first table go first
                until = others[0][0] - (others[0][1] < number)
                limit = until if before is None else min(before, until)
            some = self.tables[number].coldest(count - len(victims), limit)
            if not some:
                break
            victims += some
            if self.tables[number] in self._merging:
                self._changes += (key for key, _ in some)
        self.retire_empty()
        return victims

    @property
    def needs_merge(self) -> bool:
        """Whether there are too many tables, or much memory is held for rows that are not here any more."""
        return len(self.tables) > MAX_TABLES or any(map(_is_sparse, self.tables))

    def begin_merge(self, count: int, changes: list[Key]) -> list[ColdTable]:
        """The tables to make one of, together with `count` other rows: the small ones, so that a row is copied seldom,
        and as many as must go so that there are not too many. Rows that leave them are noted in `changes`."""
        self._merging, self._changes = [], changes
        left = len(self.tables)
        for table in sorted(self.tables[self._stale :], key=len):
            if len(table) <= 2 * count or left >= MAX_TABLES or _is_sparse(table):
                self._merging.append(table)
                count += len(table)
                left -= 1
        return self._merging

    def install(self, table: ColdTable, sources: Sequence[ColdTable]) -> None:
        """A table of all rows of `sources` serves in their place; of others, the slots are allocated already."""
        self._retired += (each for each in self.tables if each in sources)
        self.tables = [each for each in self.tables if each not in sources] + [table]
        self.retire_empty()

    def end_merge(self) -> None:
        self._merging, self._changes = [], []

    def mark_stale(self) -> None:
        """The tier was opened again: it is going to list its rows again."""
        self._stale = len(self.tables)

    def retire_empty(self) -> None:
        for number in reversed(range(len(self.tables))):
            if not len(self.tables[number]):
                self._retired.append(self.tables.pop(number))
                self._stale -= number < self._stale

    def clear(self) -> None:
        """Retire all of them, after the slots were cleared."""
        self._retired += self.tables
        self.tables.clear()
        self._stale = 0
        self.clears += 1

    def retire(self, what: Retired) -> None:
        self._retired.append(what)

    @property
    def has_retired(self) -> bool:
        return bool(self._retired)

    def take_retired(self) -> list[Retired]:
        """What was retired, for the caller to close. That releases much memory: do it without a lock."""
        retired, self._retired = self._retired, []
        return retired

    def _detach_stale(self) -> list[ColdTable]:
        """The stale tables, which no longer serve. Their slots are still allocated."""
        stale, self.tables = self.tables[: self._stale], self.tables[self._stale :]
        self._stale = 0
        self._counters.relisted += sum(map(len, stale))
        return stale


def _is_sparse(table: ColdTable) -> bool:
    return table.built_rows > 2 * len(table) + SPARSE_ROWS


SomeRows = tuple[Sequence[Key], Sequence[int], Sequence[int]]
"""Keys, slots and ticks."""

NO_SLOT: Final = 0xFFFFFFFF
BATCHES_AT_ONCE: Final = 64


class Spill:
    """The rows that one spill moves: their entries in the index have places here, until they are used. In tuples and
    arrays, which the interpreter's garbage collector does not walk over."""

    def __init__(self) -> None:
        self.keys: list[tuple[Key, ...]] = []  # in batches, as they were collected
        self.slots = array("I")  # of all batches; NO_SLOT: the row stays in the index
        self.ticks = array("Q")
        self.leaving = 0  # how many have not been used since
        self.changes: list[Key] = []  # rows that the new table must not have, though it may be built of them
        self.table: ColdTable | None = None  # the new one, once it serves
        self.cancelled = False
        self._coldest = 0  # no row before this place is leaving,
        self._batch = self._offset = 0  # which is this one in `keys`
        self.batches_done = 0  # batches, from the last,
        self.end = 0  # of which this is the place of the first row

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
