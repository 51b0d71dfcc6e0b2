"""Cold index: rows that a storage tier held at the start, in a compact form: millions of them cost little memory."""

from __future__ import annotations

from typing import Protocol

from nixl_tiers.chunk import Key


class ColdIndex(Protocol):
    """Rows that only become fewer: one that is used moves into the TierIndex, the coldest are evicted.

    memory.cold_index.SharedColdIndex is one, in memory shared with a mover; tests have PlainColdIndex.
    """

    @property
    def named(self) -> bool:
        """Whether `coldest` returns keys, so that they can be written to the tier below before their eviction."""

    def __len__(self) -> int: ...

    def find(self, key: Key) -> tuple[int, int] | None:
        """(slot, tick of last use) of the key's row, or None."""

    def remove(self, key: Key) -> tuple[int, int] | None:
        """As find, and remove the row: its slot is the caller's."""

    def coldest(self, count: int) -> list[tuple[bytes, int]]:
        """Remove up to `count` rows, the least recently used first: (key if `named`, else its digest; slot)."""

    def claim(self, taken: bytearray, slots_limit: int) -> None:
        """Mark these rows' slots in a map of one byte a slot. Rows in slots that are marked already, or are not below
        `slots_limit`, are removed."""

    def release(self, taken: bytearray) -> None:
        """Unmark the slots of the rows that are still here."""

    def close(self) -> None:
        """Release the memory."""
