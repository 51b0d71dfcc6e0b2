"""Least recently used, leaf first.

Recency is kept per request and not per key: whatever one request used is equally old, and among equals the deepest
chunk of the prefix goes first. A prefix that loses its root is worth nothing, one that loses its leaf nearly all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from nixl_tiers.chunk import Key


class LeafFirstLru:
    """Buckets by tick; a bucket keeps its keys in the prefix order in which they came. All calls are O(1) a key."""

    def __init__(self) -> None:
        self._tick_of: dict[Key, int] = {}
        # Ordered, because the oldest goes all the time: a plain dict would walk over what was deleted at its front.
        self._buckets: OrderedDict[int, dict[Key, None]] = OrderedDict()
        self._newest = -1
        self._sorted = True

    def __len__(self) -> int:
        return len(self._tick_of)

    def add(self, key: Key, tick: int) -> None:
        self._tick_of[key] = tick
        bucket = self._buckets.get(tick)
        if bucket is None:
            bucket = self._buckets[tick] = {}
            # Ticks come in ascending order but for keys that a restart brings back: those are sorted in when needed.
            if tick < self._newest:
                self._sorted = False
            else:
                self._newest = tick
        bucket[key] = None

    def touch(self, key: Key, tick: int) -> None:
        if self._tick_of[key] != tick:
            self.remove(key)
            self.add(key, tick)

    def remove(self, key: Key) -> None:
        tick = self._tick_of.pop(key)
        bucket = self._buckets[tick]
        del bucket[key]
        if not bucket:
            del self._buckets[tick]

    def evict(self, count: int, spare: Callable[[Key], bool]) -> list[Key]:
        if not self._sorted:
            self._buckets = OrderedDict(sorted(self._buckets.items()))
            self._sorted = True
        victims: list[Key] = []
        for bucket in self._buckets.values():
            if len(victims) >= count:
                break
            for key in reversed(bucket):
                if len(victims) >= count:
                    break
                if not spare(key):
                    victims.append(key)
        for key in victims:
            self.remove(key)
        return victims
