"""Which rows are deleted when there is no room: about those that were used least recently, without knowing all.

A row is in a fan-out directory by the hash of its key, so a few directories are a fair sample of all rows, if they are
taken of every namespace alike. A sample tells before when an eighth of the rows was last used. Rows that were not used
since go, one directory after the other from a random one on, until there is room; what is missing then is a little of
what is oldest everywhere. (Whole directories instead would be holes in every prefix.) The next eviction goes on from
there, and when all directories were passed a new sample is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from random import Random
from typing import TYPE_CHECKING, Final, NamedTuple

from nixl_tiers.tiers.rowfile.budget import Budget

if TYPE_CHECKING:
    from nixl_tiers.tiers.rowfile.contents import Contents

FANOUTS: Final = tuple(f"{number:02x}" for number in range(256))
SAMPLE_ROWS: Final = 1024
OLD_SHARE: Final = 8  # one row of so many is old
BATCH_ROWS: Final = 64  # deleted together


class Row(NamedTuple):
    """One file, as it was seen."""

    namespace: str
    fanout: str
    name: str
    used_ns: int  # its modification time
    nbytes: int


def rotated(random: Random) -> list[str]:
    """The fan-out directories from a random one on: engines that evict at the same time begin apart."""
    start = random.randrange(len(FANOUTS))
    return [*FANOUTS[start:], *FANOUTS[:start]]


class Evictor:
    """On the thread that sweeps."""

    def __init__(self, files: Contents, budget: Budget, random: Random) -> None:
        self._files = files
        self._budget = budget
        self._random = random
        self._before_ns = 0  # rows that were last used by then are old
        self._in_vain = False  # the sample had no row, or old ones could not be deleted; else others were quicker
        self._left: list[str] = []  # directories that this pass has not come to, the next one last

    def steps(self) -> Iterator[None]:
        """Make room until the budget is content, or nothing can be deleted: a directory at a time."""
        deleted = True  # in this pass, or before it
        while self._budget.excess_bytes:
            if not self._left:
                if not deleted:
                    self._budget.no_room(others=not self._in_vain)
                    return
                deleted = False
                self._sample()
            fanout = self._left.pop()
            for namespace in self._files.namespaces():
                deleted = self._delete_old(self._files.rows(namespace, fanout)) or deleted
            yield

    def _sample(self) -> None:
        namespaces, times = self._files.namespaces(), list[int]()
        for fanout in rotated(self._random):
            for namespace in namespaces:
                times += (row.used_ns for row in self._files.rows(namespace, fanout))
            if len(times) >= SAMPLE_ROWS:
                break
        times.sort()
        self._before_ns = times[(len(times) - 1) // OLD_SHARE] if times else 0
        self._in_vain = not times
        self._left = rotated(self._random)[::-1]

    def _delete_old(self, rows: Sequence[Row]) -> bool:
        """Whether any was deleted. Rows of the same age are old alike, however many there are."""
        old = sorted((row for row in rows if row.used_ns <= self._before_ns), key=lambda row: row.used_ns)
        deleted = False
        while old and (excess := self._budget.excess_bytes):
            count = min(BATCH_ROWS, math.ceil(excess / old[0].nbytes))  # as rows of one namespace take the same
            batch, old = old[:count], old[count:]
            gone = self._files.unlink(batch)
            for row in gone:
                self._budget.evicted(row.namespace, row.nbytes)
                deleted = True
            if left := {*batch}.difference(gone):
                self._in_vain |= left <= {*self._files.rows(batch[0].namespace, batch[0].fanout)}
        return deleted
