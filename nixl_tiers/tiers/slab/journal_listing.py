"""The rows that a journal has at open: their keys until they are listed, their order, and which of them are double."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.memory.packed_sort import sorted_with_places
from nixl_tiers.tiers.slab.journal_file import MAX_TICK, Records

_PLACE_BITS: Final = 64 - MAX_TICK.bit_length()  # of a number that is sorted with a tick


class Listing:
    """What was read at open, until it is listed. `removed`: (slot, tag) of rows that were removed before."""

    def __init__(self, allocated: NDArray[np.bool_]) -> None:
        self.allocated = allocated
        self.removed: list[tuple[int, int]] = []
        self.order: NDArray[np.int64] | None = None  # slots, least recently used first; None: not all is read
        self.keys = np.zeros((len(allocated), 2), np.uint8)
        """By slot: a byte of length, the key, padding. Memory is taken for what is read only."""
        self.end = 0
        """How many slots have been read."""

    def add(self, found: Records) -> None:
        """Those of the next slots."""
        width = 1 + int(found.lengths.max(initial=0))
        if width > self.keys.shape[1]:
            narrow, self.keys = self.keys, np.zeros((len(self.keys), width), np.uint8)
            self.keys[: self.end, : narrow.shape[1]] = narrow[: self.end]
        rows = self.keys[self.end : self.end + len(found.keys)]
        rows[:, 0] = found.lengths
        rows[:, 1:width] = found.keys.view(np.uint8).reshape(len(found.keys), -1)[:, : width - 1]
        self.end += len(found.keys)

    def clear(self) -> None:
        self.keys = np.zeros((0, 2), np.uint8)
        self.order, self.allocated = np.zeros(0, np.int64), np.zeros(0, np.bool_)


def by_tick(ticks: NDArray[np.int64]) -> NDArray[np.int64]:
    """The places of these ticks, the lowest first; of equal ones in order."""
    if len(ticks) >> _PLACE_BITS:
        return np.argsort(ticks, kind="stable")
    both = sorted_with_places(ticks.astype(np.uint64), _PLACE_BITS)
    return (both & np.uint64((1 << _PLACE_BITS) - 1)).astype(np.int64)


def older_duplicates(
    tags: NDArray[np.uint64], ticks: NDArray[np.int64], sealed_at: NDArray[np.uint32]
) -> NDArray[np.int64]:
    """Places of rows whose key another row has that was used later, or sealed later."""
    in_order = np.sort(tags)
    twice = in_order[1:][in_order[1:] == in_order[:-1]]
    among = np.flatnonzero(np.isin(tags, twice)) if len(twice) else np.zeros(0, np.int64)
    among = among[np.lexsort((sealed_at[among], ticks[among], tags[among]))]
    older: NDArray[np.int64] = among[:-1][tags[among[1:]] == tags[among[:-1]]]
    return older


def repeated(tags: NDArray[np.uint64], held: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """By place: whether the tag is among those that are held, or occurs again later."""
    _, last = np.unique(tags[::-1], return_index=True)
    flags = np.ones(len(tags), np.bool_)
    flags[len(tags) - 1 - last] = False
    return flags | np.isin(tags, held)
