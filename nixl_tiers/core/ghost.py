"""What is worth storing: a ghost, which remembers the chunks that were computed, and the rule that goes by it.

A key names a chunk and all that is before it. So a chunk that the ghost knows says that its whole prefix was computed,
also where the ghost has lost some of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final
from zlib import crc32

from nixl_tiers.base.chunk import Key
from nixl_tiers.base.zeroed import zeroed

MOST_KEYS: Final = 1 << 22
SAMPLE: Final = 16  # one in so many beginnings is stored wholly
WINDOW: Final = 4096  # chunks, at least, after which what came back counts half
UNKNOWN: Final = -1
DRAWN: Final = 1  # the last chunk of what was stored for the sample
DECLINED: Final = 2  # it was not stored when it was computed last
_STAMP: Final = (1 << 30) - 1
_FINGERPRINT: Final = 0xFFFFFFFF << 32


class Ghost:
    """Which chunks were seen while the last `rows` others came: as many as tiers of so many rows hold, without bytes.

    A table of two to four places a key, each 8 bytes: fingerprint (32 bits), when it was seen last (30), flags. A key
    takes the place of an older one, so a ninth to a fifth of them are lost. What was never seen is taken for another
    with odds of 1 in 2^32. There is no object of Python's for a key, and what is lost is the same in every process.
    """

    def __init__(self, rows: int) -> None:
        self._rows = min(rows, MOST_KEYS)
        places = 1 << (2 * self._rows - 1).bit_length()
        self._mask = places - 1
        self._cells = memoryview(zeroed(8 * places)).cast("Q")
        self._now = self._rows  # counts new keys: what is empty is too old

    def find(self, marks: Iterable[int]) -> list[int]:
        """The flags of each chunk, or UNKNOWN. `marks`: of their keys, by `marks_of`."""
        cells, mask, now, rows, found = self._cells, self._mask, self._now, self._rows, []
        for mark in marks:
            cell = cells[mark & mask]
            if (cell ^ mark) >> 32 or (now - (cell >> 2)) & _STAMP >= rows:
                found.append(UNKNOWN)
            else:
                found.append(cell & 3)
        return found

    def note(self, marks: Iterable[int], flags: Iterable[int], new: int) -> None:
        """These chunks were seen, of which so many are `new`."""
        cells, mask = self._cells, self._mask
        self._now += new
        stamp = (self._now & _STAMP) << 2
        for mark, its in zip(marks, flags, strict=True):
            cells[mark & mask] = mark & _FINGERPRINT | stamp | its

    def clear(self) -> None:
        """Forget all. O(1)."""
        self._now += self._rows


def marks_of(keys: Iterable[Key]) -> list[int]:
    return [crc32(key) | int.from_bytes(key[:4], "little") << 32 for key in keys]


class Admission:
    """Which chunks are stored: all while enough of them come back, else those that were computed before, each with its
    prefix or not at all, and a sample of the others.

    `pays`: the share of chunks that has to come back for storing all of them to pay; None while that is not known.
    What comes back: chunks that were loaded, or computed again, which the ghost knows, stored or not; so storing less
    does not change what it is judged by. What the engine's own cache holds counts neither way.

    The sample brings hits where hardly anything else is stored. It is drawn by the hash of the first chunk of a request
    that the ghost does not know, and what continues it belongs to it. By a request's first chunk, all that begin with
    one system prompt would be stored or none.
    """

    def __init__(self, rows: int) -> None:
        """`rows`: of the largest tier that is written."""
        self._ghost = Ghost(rows)
        self._window = max(WINDOW, rows // 4)
        self._seen = self._known = 0.0
        self._drawn: set[str] = set()  # requests that are stored wholly: they are drawn, or continue what was
        self._cut: set[str] = set()  # requests some of whose chunks were not stored: none behind them is
        self.pays: float | None = None
        self.not_stored = 0
        self.computed_again = 0
        """Chunks of which `not_stored` was the reason that they were computed."""

    @property
    def selective(self) -> bool:
        """Whether less comes back than storing everything would pay for. Not before enough was seen."""
        return self.pays is not None and self._seen >= self._window / 4 and self._known < self._seen * self.pays

    def offered(self, keys: Sequence[Key], request: str, own: int = 0) -> int:
        """The next chunks of a request, in prefix order, are in the engine: how many of them, from the first, are to be
        stored. It did not compute the first `own` of them, but found them in its own cache."""
        ghost, marks = self._ghost, marks_of(keys)
        found = ghost.find(marks)
        known = len(keys)
        while known > own and found[known - 1] == UNKNOWN:
            known -= 1
        if known and found[known - 1] == DRAWN:
            self._drawn.add(request)
        self.computed_again += found[own:].count(DECLINED)
        self._count(len(keys) - own, known - own)
        kept = len(keys)
        if request in self._cut:
            kept = 0
        elif known < kept and self.selective and request not in self._drawn:
            if (marks[known] >> 28) % SAMPLE:  # of a number that is not the place
                kept = known
            else:
                self._drawn.add(request)
        flags = [DRAWN if each == DRAWN else 0 for each in found[:kept]] + [DECLINED] * (len(keys) - kept)
        if kept < len(keys):
            self._cut.add(request)
            self.not_stored += len(keys) - max(kept, own)
        elif keys and request in self._drawn:
            flags[-1] = DRAWN
        ghost.note(marks, flags, found.count(UNKNOWN))
        return kept

    def loaded(self, keys: Sequence[Key], request: str) -> None:
        """A request has loaded its next chunks. The last of them stands for all."""
        marks = marks_of(keys[-1:])
        (flags,) = self._ghost.find(marks)
        if flags == DRAWN:
            self._drawn.add(request)
        self._ghost.note(marks, [DRAWN if flags == DRAWN else 0], flags == UNKNOWN)
        self._count(len(keys), len(keys))

    def ended(self, request: str) -> None:
        self._drawn.discard(request)
        self._cut.discard(request)

    def reset(self) -> None:
        """Nothing of before comes back."""
        self._ghost.clear()
        self._seen = self._known = 0.0
        self._drawn.clear()
        self._cut.clear()

    def _count(self, seen: int, known: int) -> None:
        self._seen += seen
        self._known += known
        if self._seen > self._window:
            self._seen, self._known = self._seen / 2, self._known / 2
