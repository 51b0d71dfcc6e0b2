"""Which tier each key has left last, and why: for the reasons of misses."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Final

from nixl_tiers.base.chunk import Key
from nixl_tiers.base.zeroed import zeroed

TABLE_BITS: Final = 20
_MASK: Final = (1 << TABLE_BITS) - 1
HOST: Final = -1
"""In place of a tier's number."""
_MOST_TIERS: Final = 61


class Gone(IntEnum):
    """Why a key is in a tier no more."""

    EVICTED = 0
    EXPIRED = 1  # or deleted by another engine
    LOST = 2  # corrupt, missing, or it could not be copied


class GoneKeys:
    """The tier that each key has left last, and why: 4 bytes a key, 4 MiB for a million keys, which the kernel gives
    when they are touched. O(1), and no object for Python's garbage collector.

    A table of fingerprints, one place a key: a newer key takes the place of an older one, so that of the keys that left
    before the last n, a share of 1 - exp(-n / 2^20) is forgotten. A key that never was there is taken for another with
    odds of 1 in 2^24. Which key takes whose place goes by Python's hash of bytes, another one in each process: nothing
    but the counters of misses may go by this table.
    """

    def __init__(self) -> None:
        self._table = memoryview(zeroed(4 << TABLE_BITS)).cast("I")
        self._salt = 0

    def note(self, key: Key, tag: int) -> None:
        """`key` has left a tier: see `tag_of`."""
        mixed = hash(key) ^ self._salt
        self._table[mixed & _MASK] = (mixed >> 12) & 0xFFFFFF00 | tag

    def find(self, key: Key) -> int:
        """The tag of the tier that the key has left last; 0 if that is not known."""
        mixed = hash(key) ^ self._salt
        noted = self._table[mixed & _MASK]
        return noted & 0xFF if not (noted ^ mixed >> 12) & 0xFFFFFF00 else 0

    def find_many(self, keys: Sequence[Key]) -> list[int]:
        """`find` of each key."""
        table, salt, found = self._table, self._salt, []
        for hashed in map(hash, keys):
            mixed = hashed ^ salt
            noted = table[mixed & _MASK]  # 0 at most places
            found.append(noted & 0xFF if noted and not (noted ^ mixed >> 12) & 0xFFFFFF00 else 0)
        return found

    def clear(self) -> None:
        """Forget all. O(1)."""
        self._salt = hash((self._salt, 1))


def tag_of(tier: int, why: Gone) -> int:
    """What is noted of a key that has left this tier (its number, or HOST) for this reason; 0 (nothing) for a number
    that is too high."""
    return (tier + 2) << 2 | int(why) if tier <= _MOST_TIERS else 0


def tier_and_reason(tag: int) -> tuple[int, Gone]:
    """The inverse of tag_of, for what is not 0."""
    return (tag >> 2) - 2, Gone(tag & 3)
