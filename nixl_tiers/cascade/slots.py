"""Slots: places for one row each, handed out lowest first so that a medium fills from its start."""

from __future__ import annotations

import heapq


class Slots:
    """`limit` slots numbered from 0. `take` gives the lowest free one; the budget holds because nothing else gives."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._freed: list[int] = []
        self._taken: set[int] = set()
        self._fresh = 0  # every slot from here on was never taken, or was claimed out of order

    def __len__(self) -> int:
        return len(self._taken)

    @property
    def free(self) -> int:
        return self.limit - len(self._taken)

    def take(self) -> int | None:
        while self._freed and self._freed[0] < self.limit:
            slot = heapq.heappop(self._freed)
            if slot not in self._taken:
                self._taken.add(slot)
                return slot
        while self._fresh < self.limit:
            slot = self._fresh
            self._fresh += 1
            if slot not in self._taken:
                self._taken.add(slot)
                return slot
        return None

    def claim(self, slot: int) -> bool:
        """Take this very slot (a row that was there before we came); False if it is taken or beyond the limit."""
        if not 0 <= slot < self.limit or slot in self._taken:
            return False
        self._taken.add(slot)
        return True

    def give(self, slot: int) -> None:
        """Return a slot that was taken."""
        self._taken.remove(slot)
        if slot < self._fresh:
            heapq.heappush(self._freed, slot)
