"""Uses of a tier's rows that its journal has not heard of: without them a restart would evict first what was used last.

Kept by key, and looked up in the index when they are sent: the messages to a mover arrive in order, so the slot is
still that row's when the mover reads it, whatever was evicted and stored since the use.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Final

from nixl_tiers.base.chunk import Key
from nixl_tiers.core.types import Entry

MAX_USES: Final = 16384  # 2 MB; more rows than that a few seconds, and the rows first used are the ones recorded


class RecentUses:
    """The newest tick of each row used since it was last taken; bounded."""

    def __init__(self) -> None:
        self._ticks: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._ticks)

    def __contains__(self, key: Key) -> bool:
        return key in self._ticks

    def add(self, key: Key, tick: int) -> None:
        known = self._ticks.get(key)
        if known is None:
            if len(self._ticks) < MAX_USES:
                self._ticks[key] = tick
        elif tick > known:
            self._ticks[key] = tick

    def take(self, count: int, index: Mapping[Key, Entry]) -> list[tuple[int, int]]:
        """Remove up to `count` of them, the rows first that have waited longest; (slot, tick) of those that the medium
        holds. Rows that are still being stored stay, those that have gone are dropped."""
        taken = [(key, index.get(key), self._ticks.pop(key)) for key in list(islice(self._ticks, count))]
        for key, entry, tick in taken:
            if entry is not None and not entry.stored:
                self._ticks[key] = tick
        return [(entry.slot, tick) for _, entry, tick in taken if entry is not None and entry.stored]
