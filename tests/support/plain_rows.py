"""The table of rows (csrc/tier_rows.c) in Python, for tests to compare it with, and to plant bugs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Final

from nixl_tiers.base.chunk import Key
from nixl_tiers.core.rows import MOST_TICK, NO_ID


@dataclass(eq=False)
class _Row:
    key: Key
    slot: int
    tick: int
    tenant: int
    stored: bool
    seq: int  # of its last use; of one tick the later goes first
    id: int
    listing: int
    pins: int = 0
    evicting: bool = False
    used: bool = False


_ids: Final = count(1)


class PlainTierRows:
    """As `TierRows`. `uses`: how many rows' uses wait to be taken at most."""

    def __init__(self, uses: int) -> None:
        self._rows: dict[Key, _Row] = {}
        self._victims: dict[Key, _Row] = {}  # being evicted, the first selected first
        self._numbers = count(1)
        self._listing = 0
        self._uses = uses
        self._used: deque[_Row] = deque()

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, key: Key) -> bool:
        return key in self._rows

    def add(self, key: Key, slot: int, tick: int, stored: bool, tenant: int = 0, /) -> int:
        if (known := self._rows.get(key)) is not None:
            known.listing = self._listing
            return NO_ID
        row = _Row(key, slot, tick, tenant, stored, next(self._numbers), next(_ids), self._listing)
        self._rows[key] = row
        return row.id

    def get(self, key: Key, /) -> tuple[int, int, int, int, bool, bool, int] | None:
        row = self._rows.get(key)
        return None if row is None else (row.slot, row.tick, row.id, row.pins, row.stored, row.evicting, row.tenant)

    def is_stored(self, key: Key, /) -> bool:
        row = self._rows.get(key)
        return row is not None and row.stored

    def has_many(self, keys: list[Key], stored: bool, /) -> list[bool]:
        return list(map(self.is_stored if stored else self._rows.__contains__, keys))

    def touch_many(self, keys: list[Key], tick: int, /) -> None:
        for key in keys:
            row = self._rows.get(key)
            if row is None:
                continue
            self._stay(row, tick)
            if not row.used and len(self._used) < self._uses:
                row.used = True
                self._used.append(row)

    def take_used(self, most: int, /) -> list[tuple[int, int]]:
        taken = []
        for _ in range(min(most, len(self._used))):
            row = self._used.popleft()
            if self._rows.get(row.key) is not row:
                continue
            if row.stored:
                row.used = False
                taken.append((row.slot, row.tick))
            else:
                self._used.append(row)
        return taken

    def pin(self, key: Key, /) -> tuple[int, int] | None:
        row = self._rows.get(key)
        if row is None:
            return None
        row.pins += 1
        return row.slot, row.id

    def unpin(self, key: Key, row: int, /) -> None:
        if (found := self._rows.get(key)) is not None and row in {NO_ID, found.id} and found.pins:
            found.pins -= 1

    def pin_many(self, keys: list[Key], /) -> None:
        for key in keys:
            self.pin(key)

    def unpin_many(self, keys: list[Key], /) -> None:
        for key in keys:
            self.unpin(key, NO_ID)

    def stored(self, key: Key, row: int, /) -> bool:
        if (found := self._of(key, row)) is None:
            return False
        found.stored = True
        return True

    def stored_many(self, keys: list[Key], /) -> None:
        for key in keys:
            if (row := self._rows.get(key)) is not None:
                self.stored(key, row.id)

    def select(self, count: int, /) -> list[Key]:
        selected = self._in_order()[:count]
        for row in selected:
            row.evicting = True
            self._victims[row.key] = row
        return [row.key for row in selected]

    def cancel(self, key: Key, tick: int, /) -> bool:
        row = self._rows.get(key)
        if row is None or not row.evicting:
            return False
        self._stay(row, tick)
        return True

    def cancel_all(self) -> None:
        for row in list(self._victims.values()):
            self._stay(row, 0)

    def evicting(self) -> int:
        return len(self._victims)

    def is_evicting(self, key: Key, /) -> bool:
        return key in self._victims

    def evict(self, count: int, /) -> list[tuple[Key, int]]:
        return self.evict_of(None, count)

    def evict_of(self, tenant: int | None, count: int, /) -> list[tuple[Key, int]]:
        victims = [row for row in self._victims.values() if not row.pins and tenant in {None, row.tenant}]
        gone = [*victims, *self._in_order(tenant)][:count]
        for row in gone:
            self._drop(row)
        return [(row.key, row.slot) for row in gone]

    def count_of(self, tenant: int, /) -> int:
        return sum(row.tenant == tenant for row in self._rows.values())

    def remove(self, key: Key, row: int, /) -> int:
        found = self._rows.get(key)
        if found is None or row not in {NO_ID, found.id}:
            return -1
        self._drop(found)
        return found.slot

    def begin_listing(self) -> None:
        self._listing += 1

    def list_columns(  # noqa: PLR0917 - as the native table is called
        self,
        slots: Any,
        ticks: Any,
        records: Any,
        width: int,
        start: int,
        stop: int,
        taken: Any,
        limit: int,
        base: int = 0,
        /,
    ) -> tuple[int, int, int, list[tuple[int, Key]]]:
        added = end = newest = 0
        left_out: list[tuple[int, Key]] = []
        if start == stop:
            return added, end, newest, left_out
        slots, ticks, records = memoryview(slots).cast("B"), memoryview(ticks).cast("B"), memoryview(records).cast("B")
        if width < 2 or stop < start or 4 * stop > len(slots) or 8 * stop > len(ticks) or width * stop > len(records):
            raise ValueError("columns that are shorter than they should be")
        for place in range(start, stop):
            slot = int.from_bytes(slots[4 * place : 4 * place + 4], "little")
            record = bytes(records[width * place : width * (place + 1)])
            key = record[1 : 1 + min(record[0], width - 1)]
            tick = min(int.from_bytes(ticks[8 * place : 8 * place + 8], "little"), MOST_TICK)
            newest = max(newest, tick)
            row = self._rows.get(key)
            if row is not None and (taken is None or row.slot == base + slot):
                row.listing = self._listing
            elif row is not None or not key or (taken is not None and _is_taken(taken, slot, limit)):
                left_out.append((base + slot, key))
            else:
                self.add(key, base + slot, tick, True)
                added += 1
                if taken is not None:
                    taken[slot] = 1
                    end = max(end, slot + 1)
        return added, end, newest, left_out

    def sweep(self, start: int, count: int, limit: int, low: int, high: int, /) -> tuple[int, list[tuple[Key, int]]]:
        looked_at = list(islice(self._rows.values(), start, start + count))
        gone = [
            (row.key, row.slot)
            for row in looked_at
            if row.stored and not row.pins and low <= row.slot < high
            if row.listing != self._listing or row.slot >= limit
        ]
        for key, _ in gone:
            self.remove(key, NO_ID)
        return (start + count - len(gone) if len(looked_at) == count else -1), gone

    def some(self, start: int, count: int, /) -> tuple[int, list[Key]]:
        rows = list(self._rows)
        at = min(start, len(rows))
        keys = []
        for _ in range(min(count, len(rows))):
            at = at - 1 if at else len(rows) - 1
            keys.append(rows[at])
        return at, keys

    def oldest(self) -> int | None:
        order = self._in_order()
        return order[0].tick if order else None

    # --- inside ------------------------------------------------------------------------------------------------

    def _of(self, key: Key, number: int) -> _Row | None:
        row = self._rows.get(key)
        return row if row is not None and row.id == number else None

    def _may_go(self, row: _Row) -> bool:
        return row.stored and not row.pins and not row.evicting

    def _in_order(self, tenant: int | None = None) -> list[_Row]:
        """Those that may be evicted, of this tenant or of all, the next first."""
        rows = [row for row in self._rows.values() if self._may_go(row) and tenant in {None, row.tenant}]
        return sorted(rows, key=lambda row: (row.tick, -row.seq))

    def _stay(self, row: _Row, tick: int) -> None:
        """It is used at this tick, and is not evicted, if it was being."""
        self._victims.pop(row.key, None)
        row.evicting = False
        if tick > row.tick:
            row.tick, row.seq = tick, next(self._numbers)

    def _drop(self, row: _Row) -> None:
        del self._rows[row.key]
        self._victims.pop(row.key, None)


def _is_taken(taken: Sequence[int], slot: int, limit: int) -> bool:
    return slot >= min(limit, len(taken)) or bool(taken[slot])
