"""Keys in batches: what every policy here keeps its keys in, because a prefix is worth most at its root."""

from __future__ import annotations

import heapq

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

    def move(self, key: Key, number: int) -> bool:
        """Put a key at the end of batch `number`, unless it is in that or a later one; False if it is unknown."""
        before = self._number_of.get(key)
        if before is not None and before < number:
            self.remove(key)
            self.add(key, number)
        return before is not None

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

    def first(self) -> tuple[Key, int] | None:
        """The key that goes first, and its batch's number; None if there is none."""
        number = self.lowest()
        return None if number is None else (next(reversed(self._batches[number])), number)

    def lowest(self) -> int | None:
        """The number of the batch that goes first; None if there is none."""
        while self._numbers and self._numbers[0] not in self._batches:
            heapq.heappop(self._numbers)
        return self._numbers[0] if self._numbers else None

    def _used_up(self, number: int) -> None:
        """The dict of batch `number` has become empty."""
        del self._batches[number]


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
