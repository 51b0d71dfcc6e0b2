"""A shard uses its capacity, and gives an empty tail back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.mover.protocol import Delete, Listed, Slots
from nixl_tiers.tiers.base import GONE
from tests.mover.harness import MoverProcess, key_of, wait_until
from tests.support.disks import assert_never_exceeds, disk_bytes
from tests.support.file_tier import file_tier

GEOMETRY = Geometry(1, 120_000)
CAPACITY = 24 << 20
BATCH = 32


def namespace(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Core:
    """The core's part: uses the slots it may, forgets rows that are gone, and evicts the oldest to store more."""

    def __init__(self, mover: MoverProcess, number: int) -> None:
        self.mover = mover
        self.slots = mover.open(namespace(number))
        self.held = {int(entry.key[4:]): entry.slot for entry in mover.listed_rows()}
        self._next = max(self.held, default=-1) + 1

    def listen(self, timeout_s: float = 0.001) -> None:
        """Handle what the mover has reported."""
        while True:
            try:
                message = self.mover.expect(lambda m: isinstance(m, (Slots, Listed)), timeout_s)
            except TimeoutError:
                return
            if isinstance(message, Slots):
                self.slots = message.slots
            elif isinstance(message, Listed):
                assert {entry.slot for entry in message.entries} == {GONE}
                self.drop([int(entry.key[4:]) for entry in message.entries])

    def drop(self, numbers: list[int]) -> None:
        gone = [(self.held.pop(number), key_of(number)) for number in numbers if number in self.held]
        if gone:
            self.mover.send(Delete(gone))

    def store(self) -> list[Outcome]:
        """One batch of rows that were never stored before."""
        self.listen()
        taken = set(self.held.values())
        free = [slot for slot in range(self.slots) if slot not in taken][:BATCH]
        if len(free) < BATCH:
            self.drop(sorted(self.held)[: BATCH - len(free)])
            taken = set(self.held.values())
            free = [slot for slot in range(self.slots) if slot not in taken][:BATCH]
        numbers = range(self._next, self._next + len(free))
        self._next += len(free)
        if not free:
            time.sleep(0.05)
            return []
        outcomes = self.mover.store(numbers, free)
        stored = zip(numbers, free, outcomes, strict=True)
        self.held |= {number: slot for number, slot, outcome in stored if outcome is Outcome.OK}
        return outcomes

    def check(self) -> None:
        """All rows that it knows are hits, but for those that are gone since."""
        numbers = sorted(self.held)
        for start in range(0, len(numbers), BATCH):
            part = numbers[start : start + BATCH]
            outcomes = self.mover.load(part, [self.held[number] for number in part])
            assert set(outcomes) <= {Outcome.OK, Outcome.MISSING}
            self.drop([n for n, outcome in zip(part, outcomes, strict=True) if outcome is not Outcome.OK])


def fill(core: Core) -> None:
    """Until nothing more fits without eviction."""
    while len(core.held) < core.slots:
        outcomes = core.store()
        if Outcome.NO_SPACE in outcomes:
            return


@contextmanager
def mover_on(path: Path, capacity: int = CAPACITY) -> Iterator[MoverProcess]:
    with MoverProcess(file_tier(path, capacity), GEOMETRY, BATCH) as mover:
        yield mover


def test_empty_tail_is_freed(tmp_path: Path) -> None:
    with mover_on(tmp_path) as one:
        core = Core(one, 1)
        fill(core)
        before = disk_bytes(tmp_path)
        core.drop([number for number, slot in core.held.items() if slot >= 20])
        assert wait_until(lambda: disk_bytes(tmp_path) < before / 2)
        core.check()
        assert len(core.held) == 20
        fill(core)  # and taken again
        core.check()
        assert disk_bytes(tmp_path) > 0.9 * before
        one.stop()
    with mover_on(tmp_path) as one:
        again = Core(one, 1)
        assert again.held == core.held
        again.check()


def test_ten_times_the_capacity(tmp_path: Path) -> None:
    """The core evicts, slot by slot; the disk is sampled all the time."""
    with assert_never_exceeds(tmp_path, CAPACITY) as looks, mover_on(tmp_path) as mover:
        core = Core(mover, 1)
        stored = 0
        while stored < 10 * core.slots:
            stored += core.store().count(Outcome.OK)
        core.check()
        assert len(core.held) > core.slots - BATCH
    assert max(looks) > 0.75 * CAPACITY  # and the capacity is used
