"""Slots: places for one row each, handed out lowest first so that a medium fills from its start."""

from __future__ import annotations

from nixl_tiers.cascade.cold_index import ColdIndex


class Slots:
    """`limit` slots numbered from 0, one byte of memory each. `allocate` gives the lowest free one; the budget holds
    because nothing else gives."""

    def __init__(self, limit: int) -> None:
        self._map = bytearray()
        self._limit = limit
        self._used = 0
        self._lowest = 0  # no free slot below this one
        self._cover(limit)

    def __len__(self) -> int:
        return self._used

    @property
    def limit(self) -> int:
        return self._limit

    @limit.setter
    def limit(self, limit: int) -> None:
        """Slots beyond a smaller limit are not taken back: that is up to whoever evicts their rows."""
        self._limit = limit
        self._cover(limit)

    @property
    def free(self) -> int:
        """How many more rows fit the budget; below zero while a smaller limit is being kept."""
        return self._limit - self._used

    def allocate(self) -> int | None:
        """The lowest free slot, or None if there is none, or if rows beyond the limit still use up the budget."""
        if self._used >= self._limit:
            return None
        slot = self._map.find(0, self._lowest, self._limit)
        if slot < 0:
            return None
        self._lowest = slot + 1
        self._map[slot] = 1
        self._used += 1
        return slot

    def claim(self, slot: int) -> bool:
        """Take this very slot (a row that was there before we came); False if it is taken or beyond the limit."""
        if not 0 <= slot < self._limit or self._map[slot]:
            return False
        self._map[slot] = 1
        self._used += 1
        return True

    def release(self, slot: int) -> None:
        """Return a slot that was taken."""
        assert self._map[slot], "a slot that nobody has is given back"
        self._map[slot] = 0
        self._used -= 1
        self._lowest = min(self._lowest, slot)

    def claim_rows(self, rows: ColdIndex) -> None:
        """Take the slots of all these rows; they become fewer by those whose slots are taken or beyond the limit."""
        rows.claim(self._map, self._limit)
        self._used += len(rows)

    def release_rows(self, rows: ColdIndex) -> None:
        """Return the slots of all these rows."""
        rows.release(self._map)
        self._used -= len(rows)
        self._lowest = 0

    def adjust_used(self, count: int) -> None:
        """Take `count` slots without saying which, or return so many where it is negative. This may pass the limit."""
        self._used += count

    def clear(self) -> None:
        """No slots any more: the limit is 0."""
        self._map.clear()
        self._limit = self._used = self._lowest = 0

    def _cover(self, limit: int) -> None:
        if limit > len(self._map):
            self._map.extend(bytes(limit - len(self._map)))
