"""A whole tier of row files, step by step: no thread of Python runs, and the test's clock is the file server's. The
native worker moves the rows, and its calls are seen."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from nixl_tiers.base.chunk import Geometry, Outcome, align
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers import disk, existence
from nixl_tiers.tiers.base import Move
from nixl_tiers.tiers.rowfile import directory as directory_module
from nixl_tiers.tiers.rowfile.contents import NAME_BYTES
from nixl_tiers.tiers.rowfile.directory import ServerTime
from nixl_tiers.tiers.rowfile.names import RowPath
from nixl_tiers.tiers.rowfile.sweep import Sweeper
from nixl_tiers.tiers.rowfile.tier import RowFileTier
from tests.mover.harness import NAMESPACE, key_of, payload
from tests.support.by_hand import HandPool
from tests.support.fake_movers import Clock
from tests.support.file_tier import file_config
from tests.support.hooked import DONE

GEOMETRY = Geometry(1, 50_000)
ROWS = 16
ROW_BYTES = align(GEOMETRY.row_bytes) + NAME_BYTES
CAPACITY = 16 << 20
AGE_S = 3600.0
DONE_S = 60.0  # for the native threads to end what they have begun


class Server(ServerTime):
    """A file server with the clock of the test."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def refresh(self, directory: int | None) -> None:
        pass

    def touch(self, name: str | Path, directory: int | None = None) -> None:
        os.utime(name, (self.clock(),) * 2, dir_fd=directory)

    def now_s(self) -> float:
        return self.clock()


class Calls:
    """Of the native worker. `answer`: what a test has one do, by its name and the path of the file that it is given."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.answer: Callable[[str, str], int] = lambda *_: 0

    def __call__(self, call: str, descriptor: int, name: str, _: int) -> int:
        if call == "futimens":
            os.utime(descriptor, (self.clock(),) * 2)
            return DONE
        place = name
        with suppress(OSError):
            place = name or os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115
        return self.answer(call, place)


def without_threads(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    for module in (directory_module, disk, existence):
        monkeypatch.setattr(module, "ThreadPoolExecutor", lambda *_, **__: HandPool(at_once=True))

    def start(sweeper: Sweeper) -> None:
        sweeper._clock = clock
        sweeper.step()

    monkeypatch.setattr(Sweeper, "start", start)


class SteppedFiles:
    """`ahead_s`: how far the engine's clock is ahead of the server's."""

    def __init__(
        self, path: Path, clock: Clock, *, ahead_s: float = 0.0, capacity: int = CAPACITY, **fields: Any
    ) -> None:
        self.path = path
        self.clock = clock
        self.region = HostRegion.create(GEOMETRY, ROWS)
        config = file_config(path, capacity, layout="files", **fields)
        self.tier = RowFileTier(config, GEOMETRY, self.region, lambda: clock() + ahead_s, Server(clock))

    def open(self, namespace: bytes = NAMESPACE) -> SteppedFiles:
        self.tier.open(namespace, 0)
        return self

    def end(self, batch_id: int) -> list[Outcome]:
        for _ in range(200):
            moves = self.tier._moves
            if moves.loads.running or moves.stores.running:
                select.select([self.tier.wake_fd], [], [], DONE_S)
            for done in self.tier.poll():
                if done.batch_id == batch_id:
                    return list(done.outcomes)
            if self.tier.served.sweeper._wake.is_set():
                self.tier.served.sweeper._wake.clear()
                self.clock.now += 0.01
                self.tier.served.sweeper.step()
        raise AssertionError("a batch does not end")

    def store(self, numbers: Sequence[int]) -> list[Outcome]:
        """What is stored has the server's time."""
        for row, number in enumerate(numbers):
            self.region.rows_view[row] = payload(number, GEOMETRY)
        moves = [Move(row, number, key_of(number), seal=True) for row, number in enumerate(numbers)]
        outcomes = self.end(self.tier.store(moves))
        for number, outcome in zip(numbers, outcomes, strict=True):
            if outcome is Outcome.OK and (file := self.row(number)).exists():
                os.utime(file, (self.clock(),) * 2)
        return outcomes

    def load(self, numbers: Sequence[int]) -> list[Outcome]:
        """An OK row holds what was stored under that key."""
        self.region.rows_view[:] = 0xEE
        moves = [Move(row, number, key_of(number)) for row, number in enumerate(numbers)]
        outcomes = self.end(self.tier.load(moves))
        size = GEOMETRY.cell_payload
        for row, (number, outcome) in enumerate(zip(numbers, outcomes, strict=True)):
            if outcome is Outcome.OK:
                wanted = payload(number, GEOMETRY)[:size]
                assert (self.region.rows_view[row][:size] == wanted).all(), f"wrong bytes for key {number}"
        return outcomes

    def there(self, numbers: Sequence[int]) -> list[int]:
        """Which are found, one by one."""
        self.tier.found()
        assert self.tier.check_existence(1, [key_of(number) for number in numbers], False)
        while not self.tier.existence_answers():
            pass
        return sorted(int(entry.key[4:]) for entry in self.tier.found())

    def expire(self) -> None:
        """A whole pass over all directories."""
        sweeper = self.tier.served.sweeper
        assert sweeper._expiry is not None
        for _ in sweeper._expiry.steps(self.clock):
            pass

    def row(self, number: int) -> Path:
        return self.tier.directory.absolute(RowPath.of(NAMESPACE.hex(), key_of(number)))

    @property
    def files(self) -> int:
        return len([*self.path.rglob("*.row")])

    def close(self) -> None:
        self.tier.close()
        self.region.close()
