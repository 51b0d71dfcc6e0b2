"""Stub tiers, most of which misbehave in one way, loaded into a real mover process by name."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nixl_tiers.chunk import Geometry, Outcome
from nixl_tiers.config.schema import S3Config, tier_from_dict
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.base import MAX_ENTRIES, Entry, FinishedBatch, Move, StorageTier, TierDown, TierRefused


def paused_listing(config: dict[str, Any], geometry: Geometry, region: HostRegion) -> StorageTier:
    """The file tier `config["inner"]`, whose listing pauses after half of the rows until `config["listed"]` exists."""
    from nixl_tiers.config.schema import FileConfig
    from nixl_tiers.tiers.slab.tier import SlabTier

    class PausedListing(SlabTier):
        def list_rows(self) -> Iterator[list[Entry]]:
            found = [entry for batch in super().list_rows() for entry in batch]
            yield found[: len(found) // 2]
            while not Path(config["listed"]).exists():
                yield []
            yield found[len(found) // 2 :]

    tier = tier_from_dict(config["inner"])
    assert isinstance(tier, FileConfig)
    return PausedListing(tier, geometry, region)


def s3_with_fast_janitor(config: dict[str, Any], geometry: Geometry, region: HostRegion) -> StorageTier:
    """The S3 tier `config["inner"]`, whose janitor has short intervals."""
    from nixl_tiers.tiers.s3 import janitor
    from nixl_tiers.tiers.s3 import tier as object_tier

    object_tier.PACE = janitor.JanitorIntervals(turn_s=0.1, lease_s=5.0, fresh_s=10.0, round_s=1.0)
    janitor.SKEW_S = 0.0
    janitor.WINDOW_SHARE = config["window_share"]
    tier = tier_from_dict(config["inner"])
    assert isinstance(tier, S3Config)
    return object_tier.ObjectStorage(tier, geometry, region)


def dies_at_start(config: dict[str, Any], geometry: Geometry, region: HostRegion) -> StorageTier:
    """Ends its mover like a library that cannot be loaded."""
    os.write(2, b"lib.so: undefined symbol: foo, key " + os.environ["AWS_SECRET_ACCESS_KEY"].encode() + b"\n")
    os._exit(127)


class InstantTier(StorageTier):
    """Every move is OK at once."""

    def __init__(self, config: dict[str, Any], geometry: Geometry, region: HostRegion) -> None:
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
        Path(str(self.config["closed"])).write_text("closed")


class SlowToOpen(InstantTier):
    """The first open fails, the second takes until `config["wake"]` exists."""

    def open(self, namespace: bytes, epoch: int) -> int:
        super().open(namespace, epoch)
        if self.opened == 1:
            raise TierDown("the medium sleeps")
        while not Path(str(self.config["wake"])).exists():
            threading.Event().wait(0.01)
        return 7


class RefusingTier(InstantTier):
    def open(self, namespace: bytes, epoch: int) -> int:
        raise TierRefused("bucket: there is no such thing")


class CrashingTier(InstantTier):
    def poll(self) -> list[FinishedBatch]:
        if self._done:
            raise ZeroDivisionError("a bug")
        return []


class NeverFinishes(InstantTier):
    """Its transfers never end."""

    def poll(self) -> list[FinishedBatch]:
        return []

    @property
    def busy(self) -> bool:
        return bool(self._done)


class ShortWatchdog(InstantTier):
    """Its mover's watchdog has a short timeout."""

    def open(self, namespace: bytes, epoch: int) -> int:
        from nixl_tiers.mover import watchdog

        watchdog.TIMEOUT_S = 3.0  # type: ignore[misc]
        return super().open(namespace, epoch)


class HangsWithInterpreterLock(InstantTier):
    """Some time after a store, and at close, it makes a call that never returns and holds the interpreter's lock."""

    def store(self, moves: Sequence[Move]) -> int:
        from nixl_tiers.mover import watchdog

        watchdog.TIMEOUT_S = 4.0  # type: ignore[misc]
        self._hang_at_s = time.monotonic() + 2.0
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
        Path(str(self.config["wake"])).touch()
        while True:  # a signal may end the call
            ctypes.PyDLL(None).sleep(3600)


class PrefilledTier(InstantTier):
    """Holds `rows` rows, row n in slot n, and `more` that it lists later. Appends the rows that it is told to delete to
    the file `dropped`."""

    def open(self, namespace: bytes, epoch: int) -> int:
        return int(self.config["slots"])

    def list_rows(self) -> Iterator[list[Entry]]:
        rows = int(self.config["rows"])
        for start in range(0, rows, MAX_ENTRIES):
            yield [Entry(n, b"row-%d" % n, n) for n in range(start, min(start + MAX_ENTRIES, rows))]
        more = int(self.config.get("more", 0))
        until_s = time.monotonic() + 2.0  # so that these come in a cold index of their own
        while more and time.monotonic() < until_s:
            yield []
        for start in range(0, more, MAX_ENTRIES):
            yield [Entry(n, b"more-%d" % n, rows + n) for n in range(start, min(start + MAX_ENTRIES, more))]

    def delete(self, entries: Sequence[tuple[int, bytes]]) -> None:
        with Path(str(self.config["dropped"])).open("a") as file:
            file.writelines(f"{slot} {key.decode()}\n" for slot, key in entries)
