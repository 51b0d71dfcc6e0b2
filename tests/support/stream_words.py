"""What workers would read of streams, in dictionaries."""

from __future__ import annotations

from nixl_tiers.base.row_words import ARRIVED, WAITING


class FakeWords:
    """`words`: of host rows, by number; `limits`: of slots: (stream, place)."""

    def __init__(self) -> None:
        self.words: dict[int, int] = {}
        self.limits: dict[int, tuple[int, int]] = {}

    def waits(self, row: int) -> None:
        self.words[row] = WAITING

    def limit(self, slot: int, stream: int, place: int) -> None:
        old, limit = self.limits.get(slot, (stream, place))
        assert old != stream or place <= limit, "a limit is raised"
        self.limits[slot] = stream, place

    def arrive(self, row: int) -> None:
        """As a mover."""
        self.words[row] = ARRIVED

    def limit_of(self, slot: int, stream: int) -> int:
        """As a worker: a slot that another stream has cuts this one."""
        number, place = self.limits[slot]
        return place if number == stream else 0
