"""Slots: one row each, allocated lowest first so that a medium fills from its start."""

from __future__ import annotations

from nixl_tiers.cascade.cold_index import ColdIndex


class Slots:
    """`limit` slots numbered from 0, one byte of memory each. The budget holds because a slot is only got from
    `allocate` (the lowest free one) or `claim`."""

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
        """Slots beyond a smaller limit stay allocated until their rows are evicted."""
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
        """Allocate this very slot, for a row that the medium lists; False if it is taken or beyond the limit."""
        if not 0 <= slot < self._limit or self._map[slot]:
            return False
        self._map[slot] = 1
        self._used += 1
        return True

    def release(self, slot: int) -> None:
        """Free a slot."""
        assert self._map[slot], "a free slot is released"
        self._map[slot] = 0
        self._used -= 1
        self._lowest = min(self._lowest, slot)

    def claim_rows(self, rows: ColdIndex) -> None:
        """Allocate the slots of all these rows; those whose slots are taken or beyond the limit are removed."""
        rows.claim(self._map, self._limit)
        self._used += len(rows)

    def release_rows(self, rows: ColdIndex) -> None:
        """Free the slots of all these rows."""
        rows.release(self._map)
        self._used -= len(rows)
        self._lowest = 0

    def adjust_used(self, count: int) -> None:
        """Count `count` more slots as used (fewer if negative) without choosing which. This may pass the limit."""
        self._used += count

    def clear(self) -> None:
        """No slots any more: the limit is 0."""
        self._map.clear()
        self._limit = self._used = self._lowest = 0

    def _cover(self, limit: int) -> None:
        if limit > len(self._map):
            self._map.extend(bytes(limit - len(self._map)))
