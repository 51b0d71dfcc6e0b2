"""Cold tables: rows of a storage tier in a compact form, so that millions of them cost little memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol

from nixl_tiers.base.chunk import Key

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


class ColdTable(Protocol):
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

    @property
    def slots_end(self) -> int:
        """One more than the highest slot, after `prepare_slots`."""

    def claim(self, taken: memoryview | bytearray, start: int, stop: int) -> int:
        """Mark the slots of its rows from `start` to `stop` in a map of one byte a slot; returns how many. Those that
        are marked already are left out."""

    def drop_unclaimed(self, limit: int) -> None:
        """Remove the rows whose slots were left out, or are not below `limit`. Call it without a lock."""

    def release(self, taken: memoryview | bytearray, start: int, stop: int) -> int:
        """Unmark the slots of its rows from `start` to `stop`; returns how many."""

    def close(self) -> None:
        """Release the memory."""
