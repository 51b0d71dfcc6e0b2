"""Shards on one path share it fairly: one above its fair share gives room while all serve, within the capacity."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nixl_tiers.chunk import Geometry, Outcome
from nixl_tiers.mover.protocol import Delete, Down, Listed, Open, Opened, Slots
from nixl_tiers.tiers.base import GONE
from nixl_tiers.tiers.slab.quota import SlabQuota
from tests.mover.harness import MoverProcess, file_tier, key_of, wait_until
from tests.support.disks import assert_never_exceeds, disk_bytes

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


@pytest.mark.parametrize("numbers", [(1, 2), (1, 1)], ids=["two namespaces", "two shards"])
def test_late_shard_gets_its_fair_share_while_both_run(tmp_path: Path, numbers: tuple[int, int]) -> None:
    part = 0.4 * CAPACITY / GEOMETRY.row_bytes
    with assert_never_exceeds(tmp_path, CAPACITY), mover_on(tmp_path) as one, mover_on(tmp_path) as other:
        first = Core(one, numbers[0])
        second = Core(other, numbers[1])
        fill(first)
        assert len(first.held) > 1.5 * part
        stop = threading.Event()

        def use_first() -> None:
            while not stop.is_set():
                first.store()

        user = threading.Thread(target=use_first)
        user.start()
        try:
            assert wait_until(lambda: bool(second.store()) and len(second.held) > part)
        finally:
            stop.set()
            user.join()
        for core in (first, second):
            core.listen()
            core.check()
            assert len(core.held) > part


def test_new_shard_without_room_for_its_journal_is_given_some(tmp_path: Path) -> None:
    with (
        assert_never_exceeds(tmp_path, CAPACITY // 2),
        mover_on(tmp_path, CAPACITY // 2) as one,
        mover_on(tmp_path, CAPACITY // 2) as two,
    ):
        first = Core(one, 1)
        fill(first)
        two.send(Open(namespace(2), 0))
        down = two.expect(lambda m: isinstance(m, Down))
        assert isinstance(down, Down)
        assert str(tmp_path) in down.reason
        stop = threading.Event()

        def listen() -> None:
            while not stop.is_set():
                first.listen(0.05)

        listener = threading.Thread(target=listen)
        listener.start()
        try:
            two.expect(lambda m: isinstance(m, Opened))
        finally:
            stop.set()
            listener.join()
        first.check()
        assert first.held


def test_last_shard_in_use_grows_to_the_whole_capacity(tmp_path: Path) -> None:
    with assert_never_exceeds(tmp_path, CAPACITY), mover_on(tmp_path) as one, mover_on(tmp_path) as other:
        first, second = Core(one, 1), Core(other, 2)
        for _ in range(4):
            second.store()
        fill(first)
        full = len(first.held)
        assert wait_until(lambda: bool(first.listen() or first.slots <= full + BATCH))
        other.stop()
        assert wait_until(lambda: bool(first.store()) and len(first.held) > full + BATCH)
        first.check()


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


def test_fair_shares_and_requests(tmp_path: Path) -> None:
    quota = SlabQuota(tmp_path, 64 << 20)

    def make_shard(number: int, nbytes: int) -> Path:
        with quota.locked():
            shard = quota.acquire_shard(namespace(number))
        with (shard.path / "slab-00000.kv").open("wb") as file:
            file.truncate(nbytes)
        shards.append(shard)
        return shard.path

    shards: list[object] = []
    large, small = make_shard(1, 48 << 20), make_shard(2, 8 << 20)
    (tmp_path / "foreign").write_bytes(bytes(4 << 20))
    with quota.locked():
        assert quota.last_request_ns() == 0
        assert quota.requested_bytes(large) == 0
        assert quota.may_grow(large, 1 << 30)
        quota.request_room(large, 4 << 20)  # it has more than its fair share
        assert quota.last_request_ns() == 0
        quota.request_room(small, 4 << 20)
        assert quota.last_request_ns() > 0
        assert quota.requested_bytes(large) == 4 << 20
        assert quota.requested_bytes(small) == 0
        assert not quota.may_grow(large, 4096)
        assert quota.may_grow(small, 20 << 20)
        assert not quota.may_grow(small, 24 << 20)
        quota.request_room(small, 1 << 30)
        assert 17 << 20 < quota.requested_bytes(large) < 19 << 20  # down to half of 60 MiB, its fair share
        quota.request_room(None, 1 << 30)
        assert 19 << 20 < quota.requested_bytes(large) <= 20 << 20  # of three shards, the new one's fair share


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
