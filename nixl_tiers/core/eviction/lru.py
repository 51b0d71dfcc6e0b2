"""Least recently used, leaf first.

Recency is kept per request and not per key: whatever one request used is equally old, and among equals the deepest
chunk of the prefix goes first. A prefix that loses its root is worth nothing, one that loses its leaf nearly all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import islice
from typing import Final

from nixl_tiers.base.chunk import Key
from nixl_tiers.core.eviction.batches import Batches

REVIEWED: Final = 16  # keys set aside that are checked again each time


class LeafFirstLru:
    """One batch of keys for each tick of last use."""

    def __init__(self) -> None:
        self._keys = Batches()
        # Keys that were pinned when they would have been victims, in that order. Without this, a long job that pins the
        # oldest keys would make every eviction walk over all of them.
        self._aside: OrderedDict[Key, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys) + len(self._aside)

    def __contains__(self, key: Key) -> bool:
        return key in self._keys or key in self._aside

    def add(self, key: Key, tick: int) -> None:
        self._keys.add(key, tick)

    def touch(self, key: Key, tick: int) -> None:
        if not self._keys.move(key, tick):
            self._keys.add(key, max(tick, self._aside.pop(key)))

    def remove(self, key: Key) -> None:
        if key in self._keys:
            self._keys.remove(key)
        else:
            del self._aside[key]

    def evict(self, count: int, is_pinned: Callable[[Key], bool]) -> list[Key]:
        return [key for key, _ in self.pop(count, is_pinned)]

    def pop(self, count: int, is_pinned: Callable[[Key], bool], most: int | None = None) -> list[tuple[Key, int]]:
        """As `evict`: (key, tick of last use). Fewer if `most` keys were looked at, besides those set aside before."""
        victims: list[tuple[Key, int]] = []
        waiting = len(self._aside)
        soon = min(waiting, 2 * count + REVIEWED)
        if soon:
            self._review(soon, count, is_pinned, victims)
        pinned: list[tuple[Key, int]] = []
        while len(victims) < count and self._keys and (most is None or len(victims) + len(pinned) < most):
            key, tick = self._keys.pop()
            (pinned if is_pinned(key) else victims).append((key, tick))
        if most is None and waiting > soon and len(victims) < count:
            self._review(waiting - soon, count, is_pinned, victims)  # there are no other keys: walk over all
        self._aside.update(pinned)
        return victims

    def coldest_tick(self, is_pinned: Callable[[Key], bool]) -> int | None:
        while (first := self._keys.first()) is not None and is_pinned(first[0]):
            self._keys.pop()
            self._aside[first[0]] = first[1]
        ticks = [tick for key, tick in islice(self._aside.items(), REVIEWED) if not is_pinned(key)]
        return min([*ticks, first[1]] if first is not None else ticks, default=None)

    @property
    def has_unchecked(self) -> bool:
        """Whether there are keys that have not been set aside."""
        return bool(self._keys)

    def resize(self, rows: int) -> None:
        pass

    def _review(self, most: int, count: int, is_pinned: Callable[[Key], bool], victims: list[tuple[Key, int]]) -> None:
        """Check up to `most` of the keys set aside again, the one checked longest ago first. What is not pinned any
        more is a victim, unless there are colder ones: then it goes back into the order."""
        for _ in range(most):
            if len(victims) >= count:
                break
            key, tick = next(iter(self._aside.items()))
            if is_pinned(key):
                self._aside.move_to_end(key)
                continue
            del self._aside[key]
            lowest = self._keys.lowest()
            if lowest is None or tick <= lowest:
                victims.append((key, tick))
            else:
                self._keys.add(key, tick)
