"""The tier of a SlowedFileConfig: reads as fast as the disk does, and reports a load when it would have ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.base import FinishedBatch, Move
from nixl_tiers.tiers.slab.tier import SlabTier
from tests.support.slowed_file import SlowedFileConfig

POLL_S: Final = 0.001


class SlowedSlabTier(SlabTier):
    """Loads one batch after the other."""

    def __init__(self, config: SlowedFileConfig, geometry: Geometry, region: HostRegion) -> None:
        super().__init__(config, geometry, region)
        self._speed = Path(config.speed)
        self._row_bytes = geometry.row_bytes
        self._due_s: dict[int, float] = {}  # of loads, by batch_id
        self._free_s = 0.0
        self._held: list[FinishedBatch] = []

    def load(self, moves: Sequence[Move]) -> int:
        batch_id = super().load(moves)
        if bytes_per_s := 1e6 * float(self._speed.read_text()):
            self._free_s = max(self._free_s, time.monotonic()) + len(moves) * self._row_bytes / bytes_per_s
            self._due_s[batch_id] = self._free_s
        return batch_id

    def poll(self) -> list[FinishedBatch]:
        now, done = time.monotonic(), self._held + super().poll()
        self._held = [each for each in done if self._due_s.get(each.batch_id, 0.0) > now]
        ended = [each for each in done if self._due_s.get(each.batch_id, 0.0) <= now]
        for each in ended:
            self._due_s.pop(each.batch_id, None)
        return ended

    @property
    def busy(self) -> bool:
        return bool(self._held) or super().busy

    @property
    def poll_s(self) -> float:
        return min(POLL_S, super().poll_s) if self._held else super().poll_s
