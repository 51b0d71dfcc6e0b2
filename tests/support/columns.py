"""Rows that a medium lists, as the core gets them from a mover."""

from __future__ import annotations

from collections.abc import Sequence

from nixl_tiers.base.chunk import Key


class PlainColumns:
    """nixl_tiers.core.types.Columns of (slot, key, tick)."""

    def __init__(self, rows: Sequence[tuple[int, Key, int]]) -> None:
        self.rows = list(rows)
        self.count = len(self.rows)
        self.width = 1 + max([1, *(len(key) for _, key, _ in self.rows)])
        self.slots = b"".join(slot.to_bytes(4, "little") for slot, _, _ in self.rows)
        self.ticks = b"".join(tick.to_bytes(8, "little") for _, _, tick in self.rows)
        self.records = b"".join((bytes([len(key)]) + key).ljust(self.width, b"\0") for _, key, _ in self.rows)
        self.closed = False

    def close(self) -> None:
        self.closed = True
