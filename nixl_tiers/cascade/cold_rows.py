"""The cold indexes of one tier: rows that its medium listed and that were not used since, and their slots."""

from __future__ import annotations

from nixl_tiers.cascade.cold_index import ColdIndex
from nixl_tiers.cascade.counters import Counters
from nixl_tiers.cascade.slots import Slots
from nixl_tiers.chunk import Key


class ColdRows:
    """`indexes`, the coldest first. When a tier is opened again, those it has already are stale: they still serve until
    the medium has listed their rows again.

    An index that is empty or stale is retired: its slots are released at once, its memory by `take_retired`.
    """

    def __init__(self, slots: Slots, counters: Counters, *, physical_slots: bool) -> None:
        self.indexes: list[ColdIndex] = []
        self._retired: list[ColdIndex] = []
        self._stale = 0  # how many of `indexes`, from the first
        self._slots = slots
        self._counters = counters
        self._physical_slots = physical_slots

    def __contains__(self, key: Key) -> bool:
        return bool(self.indexes) and any(index.find(key) is not None for index in self.indexes)

    def add(self, index: ColdIndex) -> None:
        """Rows that are colder than any row used since. In a tier of physical slots, those whose slots are taken are
        removed from it; elsewhere the tier may be over its limit afterwards."""
        self.retire_stale()
        self.indexes.append(index)
        if self._physical_slots:
            self._slots.claim_rows(index)
        else:
            self._slots.adjust_used(len(index))
        self._counters.found += len(index)
        self.retire_empty()

    def remove(self, key: Key) -> tuple[int, int] | None:
        """(slot, tick of last use) of the key's row, which is the caller's from now on, and its slot too."""
        for index in self.indexes:
            found = index.remove(key)
            if found is not None:
                self.retire_empty()
                return found
        return None

    def mark_stale(self) -> None:
        """The tier was opened again: it is going to list its rows again."""
        self._stale = len(self.indexes)

    def retire_stale(self) -> None:
        """The rows have been listed again, or are about to be."""
        while self._stale:
            self._retire(0)

    def retire_empty(self) -> None:
        """Call after `coldest` was called on any of `indexes`."""
        for number in reversed(range(len(self.indexes))):
            if not len(self.indexes[number]):
                self._retire(number)

    def clear(self) -> None:
        """Retire all of them, after the slots were cleared."""
        self._retired += self.indexes
        self.indexes.clear()
        self._stale = 0

    def take_retired(self) -> list[ColdIndex]:
        """Retired indexes, for the caller to close. That releases much memory: do it without a lock."""
        retired, self._retired = self._retired, []
        return retired

    def _retire(self, number: int) -> None:
        index = self.indexes.pop(number)
        self._stale -= number < self._stale
        self._counters.relisted += len(index)
        if self._physical_slots:
            self._slots.release_rows(index)
        else:
            self._slots.adjust_used(-len(index))
        self._retired.append(index)
