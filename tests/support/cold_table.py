"""A cold table in plain Python, in place of memory.row_table.RowTable."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nixl_tiers.base.chunk import Key
from nixl_tiers.core.cold_rows import NO_SLOT, ColdTable, SomeRows


def build_table(parts: Iterable[SomeRows], sources: Sequence[ColdTable]) -> PlainColdTable:
    """As a core has tables built."""
    rows = [row for table in sources if isinstance(table, PlainColdTable) for row in table.rows]
    for keys, slots, ticks in parts:
        rows += (row for row in zip(slots, keys, ticks, strict=True) if row[0] != NO_SLOT)
    return PlainColdTable(rows)


class PlainColdTable:
    """A ColdTable of `rows`, (slot, key, tick) each; among equal ticks, the first is the coldest."""

    def __init__(self, rows: Iterable[tuple[int, Key, int]]) -> None:
        by_use = sorted(rows, key=lambda row: row[2])
        self.closed = False
        self.built_rows = len(by_use)
        self.slots_end = 0
        self._rows: dict[Key, tuple[int, int]] = {}
        for slot, key, tick in by_use:
            self._rows.pop(key, None)  # of two rows with one key, the one used later stays
            self._rows[key] = slot, tick
        self._unclaimed: set[int] = set()

    @property
    def slots(self) -> list[int]:
        return [slot for slot, _ in self._rows.values()]

    @property
    def rows(self) -> list[tuple[int, Key, int]]:
        """(slot, key, tick), the coldest first."""
        return [(slot, key, tick) for key, (slot, tick) in self._rows.items()]

    def __len__(self) -> int:
        return len(self._rows)

    def find(self, key: Key) -> tuple[int, int] | None:
        assert not self.closed, "rows are used after they were closed"
        return self._rows.get(key)

    def has_many(self, keys: Sequence[Key]) -> list[bool]:
        return [self.find(key) is not None for key in keys]

    def remove(self, key: Key) -> tuple[int, int] | None:
        assert not self.closed, "rows are used after they were closed"
        return self._rows.pop(key, None)

    def coldest_tick(self) -> int | None:
        return next((tick for _, tick in self._rows.values()), None)

    def coldest(self, count: int, before: int | None = None) -> list[tuple[Key, int]]:
        victims = [key for key, (_, tick) in self._rows.items() if before is None or tick <= before][:count]
        return [(key, self._rows.pop(key)[0]) for key in victims]

    def prepare_slots(self) -> None:
        self.slots_end = max(self.slots, default=-1) + 1
        self._unclaimed = set()

    def claim(self, taken: memoryview | bytearray, start: int, stop: int) -> int:
        mine = [slot for slot in self.slots if start <= slot < stop]
        for slot in mine:
            if taken[slot]:
                self._unclaimed.add(slot)
            taken[slot] = 1
        return len(set(mine) - self._unclaimed)

    def drop_unclaimed(self, limit: int) -> None:
        for _, key, _ in [row for row in self.rows if row[0] >= limit or row[0] in self._unclaimed]:
            del self._rows[key]

    def release(self, taken: memoryview | bytearray, start: int, stop: int) -> int:
        mine = [slot for slot in self.slots if start <= slot < stop]
        for slot in mine:
            taken[slot] = 0
        return len(mine)

    def close(self) -> None:
        self._rows.clear()
        self.closed = True
