"""Least recently used, leaf first; and the batches in which every policy keeps its keys.

Recency is kept per request and not per key: whatever one request used is equally old, and among equals the deepest
chunk of the prefix goes first. A prefix that loses its root is worth nothing, one that loses its leaf nearly all.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from nixl_tiers.base.chunk import Key


class Batches:
    """A queue of numbered batches. The lowest number goes first, and within a batch the key at its end: the leaf.

    All calls take constant time, but that a batch whose number is lower than others' costs a heap's logarithm.
    """

    def __init__(self) -> None:
        self._number_of: dict[Key, int] = {}
        self._batches: dict[int, dict[Key, None]] = {}
        self._numbers: list[int] = []  # a heap; numbers of batches that are empty by now are dropped when met

    def __len__(self) -> int:
        return len(self._number_of)

    def __contains__(self, key: Key) -> bool:
        return key in self._number_of

    def add(self, key: Key, number: int) -> None:
        """Put an unknown key at the end of batch `number`."""
        self._number_of[key] = number
        batch = self._batches.get(number)
        if batch is None:
            batch = self._batches[number] = {}
            if len(self._numbers) > 2 * len(self._batches) + 64:
                self._numbers = sorted(self._batches)
            else:
                heapq.heappush(self._numbers, number)
        batch[key] = None

    def remove(self, key: Key) -> None:
        number = self._number_of.pop(key)
        batch = self._batches[number]
        del batch[key]
        if not batch:
            self._used_up(number)

    def pop(self) -> tuple[Key, int]:
        """Take out the key that goes first; returns it and its batch's number. Raises IndexError if there is none."""
        while (batch := self._batches.get(self._numbers[0])) is None:
            heapq.heappop(self._numbers)
        key, _ = batch.popitem()
        number = self._number_of.pop(key)
        if not batch:
            self._used_up(number)
        return key, number

    def lowest(self) -> int | None:
        """The number of the batch that goes first; None if there is none."""
        while self._numbers and self._numbers[0] not in self._batches:
            heapq.heappop(self._numbers)
        return self._numbers[0] if self._numbers else None

    def _used_up(self, number: int) -> None:
        """The dict of batch `number` has become empty."""
        del self._batches[number]


class ForwardBatches(Batches):
    """Batches whose keys move on to later ones."""

    def move(self, keys: Iterator[Key], number: int) -> Key | None:
        """Put keys at the end of batch `number` one after the other, those that are not in that or a later one, up to
        one that is unknown, which is returned."""
        number_of, batches, last = self._number_of, self._batches, None
        for key in keys:
            before = number_of.get(key)
            if before is None:
                return key
            if before < number:
                batch = batches[before]
                del batch[key]
                if not batch:
                    self._used_up(before)
                if last is None:
                    self.add(key, number)
                    last = batches[number]
                else:
                    number_of[key] = number
                    last[key] = None
        return None


class UpwardBatches(Batches):
    """Batches that grow at both ends: keys that were popped, leaf first, keep their order where they go on to.

    What is put at a batch's beginning waits in a dict of its own, the other way round, until all behind it has gone.
    (An OrderedDict a batch would do, but each of them is one more thing for the garbage collector to walk over.)
    """

    def __init__(self) -> None:
        super().__init__()
        self._roots: dict[int, dict[Key, None]] = {}

    def add_root(self, key: Key, number: int) -> None:
        """Put an unknown key at the beginning of batch `number`."""
        if number not in self._batches:
            self.add(key, number)
            return
        self._number_of[key] = number
        self._roots.setdefault(number, {})[key] = None

    def remove(self, key: Key) -> None:
        number = self._number_of[key]
        roots = self._roots.get(number)
        if roots is None or key not in roots:
            super().remove(key)
            return
        del self._number_of[key]
        del roots[key]
        if not roots:
            del self._roots[number]

    def _used_up(self, number: int) -> None:
        roots = self._roots.pop(number, None)
        if roots is None:
            del self._batches[number]
        else:
            self._batches[number] = dict.fromkeys(reversed(roots))


REVIEWED: Final = 16  # keys set aside that are checked again each time


class LeafFirstLru:
    """One batch of keys for each tick of last use."""

    def __init__(self) -> None:
        self._keys = ForwardBatches()
        # Keys that were pinned when they would have been victims, in that order. Without this, a long job that pins the
        # oldest keys would make every eviction walk over all of them.
        self._aside: OrderedDict[Key, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys) + len(self._aside)

    def __contains__(self, key: Key) -> bool:
        return key in self._keys or key in self._aside

    def add(self, key: Key, tick: int) -> None:
        self._keys.add(key, tick)

    put_back = add

    def touch(self, keys: Iterable[Key], tick: int) -> None:
        left = iter(keys)
        while (key := self._keys.move(left, tick)) is not None:
            self._keys.add(key, max(tick, self._aside.pop(key)))

    def remove(self, key: Key) -> None:
        if key in self._keys:
            self._keys.remove(key)
        else:
            del self._aside[key]

    def evict(self, count: int, is_pinned: Callable[[Key], bool]) -> list[Key]:
        victims: list[Key] = []
        waiting = len(self._aside)
        soon = min(waiting, 2 * count + REVIEWED)
        if soon:
            self._review(soon, count, is_pinned, victims)
        pinned: list[tuple[Key, int]] = []
        while len(victims) < count and self._keys:
            key, tick = self._keys.pop()
            if is_pinned(key):
                pinned.append((key, tick))
            else:
                victims.append(key)
        if waiting > soon and len(victims) < count:
            self._review(waiting - soon, count, is_pinned, victims)  # there are no other keys: walk over all
        self._aside.update(pinned)
        return victims

    def _review(self, most: int, count: int, is_pinned: Callable[[Key], bool], victims: list[Key]) -> None:
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
                victims.append(key)
            else:
                self._keys.add(key, tick)
