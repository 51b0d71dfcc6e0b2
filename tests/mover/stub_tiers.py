"""Stub tiers, most of which misbehave in one way, loaded into a real mover process by name."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import msgspec

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.config.schema import FileConfig, S3Config, Size, StorageConfig
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.base import Entry, FinishedBatch, Move, StorageTier
from nixl_tiers.tiers.s3.takeover import Terms
from tests.support.times import KEEPS_ITS_RECORD


class StubConfig(StorageConfig):
    """`stub`: the class or function below. The other fields are for some of them."""

    stub: str
    capacity: Size = 1 << 30
    closed: Path = Path("unset")
    wake: Path = Path("unset")

    @property
    def implementation(self) -> str:
        return f"{__name__}:{self.stub}"

    @property
    def physical_slots(self) -> bool:
        return True


class DecidedConfig(FileConfig):
    """A file tier that stages all of its rows, or none, as if that had been measured."""

    type: str
    staged: bool
    label: ClassVar[str] = "file"
    implementation: ClassVar[str] = f"{__name__}:decided"  # type: ignore[misc,assignment]


def decided(config: DecidedConfig, geometry: Geometry, region: HostRegion) -> StorageTier:
    from nixl_tiers.tiers import staging
    from nixl_tiers.tiers.rowfile.tier import RowFileTier
    from nixl_tiers.tiers.slab.tier import SlabTier
    from tests.support.staging import decide

    staging.mostly_huge = lambda *_: False  # type: ignore[assignment]
    tier = (SlabTier if config.layout == "slabs" else RowFileTier)(config, geometry, region)
    decide(tier, staged=config.staged)
    return tier


class FastBudgetConfig(S3Config):
    """An S3 tier whose usage record is written and taken over at short intervals."""

    type: str
    window_share: int = 64
    stale_s: float = 5.0
    ready_s: float = KEEPS_ITS_RECORD.s3_ready_s
    label: ClassVar[str] = "s3"
    implementation: ClassVar[str] = f"{__name__}:s3_with_fast_budget"


def s3_with_fast_budget(config: FastBudgetConfig, geometry: Geometry, region: HostRegion) -> StorageTier:
    from nixl_tiers.tiers.s3 import budget, record
    from nixl_tiers.tiers.s3 import tier as s3_tier

    budget.TERMS = Terms(renew_s=0.1, stale_s=config.stale_s, confirm_s=0.05, sweep_s=1.0)  # type: ignore[misc]
    record.WINDOW_SHARE = config.window_share  # type: ignore[misc]
    times = msgspec.structs.replace(KEEPS_ITS_RECORD, s3_ready_s=config.ready_s)
    return s3_tier.S3Tier(config, geometry, region, times)


class PatientConfig(S3Config):
    """An S3 tier whose first stores wait for the usage record, and which releases it, however late answers come."""

    type: str
    label: ClassVar[str] = "s3"
    implementation: ClassVar[str] = f"{__name__}:patient_s3"


def patient_s3(config: PatientConfig, geometry: Geometry, region: HostRegion) -> StorageTier:
    from nixl_tiers.tiers.s3 import tier as s3_tier

    return s3_tier.S3Tier(config, geometry, region, KEEPS_ITS_RECORD)


def dies_at_start(config: StubConfig, geometry: Geometry, region: HostRegion) -> StorageTier:
    """Ends its mover like a library that cannot be loaded."""
    os.write(2, b"lib.so: undefined symbol: foo, key " + os.environ["AWS_SECRET_ACCESS_KEY"].encode() + b"\n")
    os._exit(127)


class InstantTier(StorageTier):
    """Every move is OK at once."""

    def __init__(self, config: StubConfig, geometry: Geometry, region: HostRegion) -> None:
        self.config = config
        self.opened = 0
        self._done: list[FinishedBatch] = []
        self._last_id = 0

    def open(self, namespace: bytes, epoch: int) -> int:
        self.opened += 1
        return 100

    def list_rows(self) -> Iterator[list[Entry]]:
        yield []
        yield [Entry(1, b"one", 1)]
        yield []

    def store(self, moves: Sequence[Move]) -> int:
        self._last_id += 1
        self._done.append(FinishedBatch(self._last_id, [Outcome.OK] * len(moves)))
        return self._last_id

    def load(self, moves: Sequence[Move]) -> int:
        return self.store(moves)

    def poll(self) -> list[FinishedBatch]:
        done, self._done = self._done, []
        return done

    def delete(self, entries: Sequence[tuple[int, bytes]]) -> None:
        pass

    @property
    def busy(self) -> bool:
        return bool(self._done)

    @property
    def used_bytes(self) -> int:
        return 42

    def close(self) -> None:
        self.config.closed.write_text("closed")


class HangsWithInterpreterLock(InstantTier):
    """Some time after a store, and at close, it makes a call that never returns and holds the interpreter's lock."""

    def store(self, moves: Sequence[Move]) -> int:
        self._hang_at_s = time.monotonic() + 1.0
        return 1

    def poll(self) -> list[FinishedBatch]:
        if self.busy and time.monotonic() > self._hang_at_s:
            self._hang()
        return []

    @property
    def busy(self) -> bool:
        return hasattr(self, "_hang_at_s")

    def close(self) -> None:
        self._hang()

    def _hang(self) -> None:
        self.config.wake.touch()
        while True:  # a signal may end the call
            ctypes.PyDLL(None).sleep(3600)
