"""Keys in batches: what every policy here keeps its keys in, because a prefix is worth most at its root."""

from __future__ import annotations

import heapq
from collections import OrderedDict

from nixl_tiers.chunk import Key


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

    def number_of(self, key: Key) -> int | None:
        return self._number_of.get(key)

    def add(self, key: Key, number: int) -> None:
        """Put an unknown key at the end of batch `number`."""
        self._number_of[key] = number
        batch = self._batches.get(number)
        if batch is None:
            batch = self._batches[number] = self._new_batch()
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
            del self._batches[number]

    def pop(self) -> tuple[Key, int]:
        """Take out the key that goes first; returns it and its batch's number. Raises IndexError if there is none."""
        while (batch := self._batches.get(self._numbers[0])) is None:
            heapq.heappop(self._numbers)
        key, _ = batch.popitem()
        number = self._number_of.pop(key)
        if not batch:
            del self._batches[number]
        return key, number

    def _new_batch(self) -> dict[Key, None]:
        return {}


class UpwardBatches(Batches):
    """Batches that grow at both ends: keys that were popped, leaf first, keep their order where they go on to.

    That needs a batch of linked keys, which takes half as much memory again: hence a class of its own.
    """

    def add_root(self, key: Key, number: int) -> None:
        """Put an unknown key at the beginning of batch `number`."""
        self.add(key, number)
        batch = self._batches[number]
        assert isinstance(batch, OrderedDict)
        batch.move_to_end(key, last=False)

    def _new_batch(self) -> dict[Key, None]:
        return OrderedDict()
