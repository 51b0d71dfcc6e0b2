"""What a storage tier held before the engine came, in a form of its own: millions of rows that cost next to nothing."""

from __future__ import annotations

from typing import Protocol

from nixl_tiers.chunk import Key


class ColdIndex(Protocol):
    """Rows that only become fewer: one that is used moves over into the tier's own book, one that is cold is evicted.

    memory.table.Table is one, in memory shared with a mover; testing.adopted has one for tests.
    """

    @property
    def named(self) -> bool:
        """Whether `coldest` tells keys, so that these rows can be written to the tier below before they go."""

    def __len__(self) -> int: ...

    def find(self, key: Key) -> tuple[int, int] | None:
        """(slot, tick of last use) of the key's row, or None."""

    def remove(self, key: Key) -> tuple[int, int] | None:
        """As find, and the row is no longer here: its slot is the caller's."""

    def coldest(self, count: int) -> list[tuple[bytes, int]]:
        """Remove up to `count` rows, those not used for longest first: (key if `named`, else its digest; slot)."""

    def claim(self, taken: bytearray, slots_limit: int) -> None:
        """Mark these rows' slots in a map of one byte a slot. Rows in slots that are marked already, or are not below
        `slots_limit`, are removed."""

    def release(self, taken: bytearray) -> None:
        """Unmark the slots of the rows that are still here."""

    def close(self) -> None:
        """Give the memory back."""
