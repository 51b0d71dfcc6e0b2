"""A storage tier of `scale` that holds nothing and lists as many rows as it is told: movers import it by its name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.config.tier import StorageConfig
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.base import MAX_ENTRIES, Entry, FinishedBatch, Move, StorageTier


def key(number: int) -> bytes:
    return number.to_bytes(8, "big") * 4 + bytes(4)  # as long as a block hash with its group


class ListerConfig(StorageConfig):
    rows: int
    go: Path

    implementation: ClassVar[str] = "bench.lister:Lister"
    physical_slots: ClassVar[bool] = True


class Lister(StorageTier):
    """Holds `rows` rows, one in each slot; its listing waits until the file `go` exists."""

    def __init__(self, config: ListerConfig, geometry: Geometry, region: HostRegion) -> None:
        self._rows = config.rows
        self._go = config.go

    def open(self, namespace: bytes, epoch: int) -> int:
        return self._rows

    def list_rows(self) -> Iterator[list[Entry]]:
        while not self._go.exists():
            yield []
        slots = np.random.default_rng(1).permutation(self._rows)
        for start in range(0, self._rows, MAX_ENTRIES):
            batch = slots[start : start + MAX_ENTRIES].tolist()
            yield [Entry(slot, key(slot), start) for slot in batch]

    def store(self, moves: Sequence[Move]) -> int:
        raise NotImplementedError

    def load(self, moves: Sequence[Move]) -> int:
        raise NotImplementedError

    def poll(self) -> list[FinishedBatch]:
        return []

    def delete(self, entries: Sequence[tuple[int, bytes]]) -> None:
        pass

    @property
    def busy(self) -> bool:
        return False

    @property
    def used_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass
