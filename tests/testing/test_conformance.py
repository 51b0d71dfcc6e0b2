"""The conformance suite and its tier in memory, which keeps the contract; tiers with one bug each, and the test that
must catch it; and media that fail in every way there is a name for, of which a miss or a counted failure comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from nixl_tiers.base.chunk import Geometry, Key, Outcome
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.testing import faulty as faulty_module
from nixl_tiers.testing import medium as medium_module
from nixl_tiers.testing.config import MemoryConfig
from nixl_tiers.testing.conformance import NOT_OURS, SMALL, StorageTierTests
from nixl_tiers.testing.faulty import Fault, FaultPlan, FaultyTier, Rule, Way
from nixl_tiers.testing.medium import Medium, Rig, keys
from nixl_tiers.testing.memory import MemoryTier
from nixl_tiers.tiers.base import Entry, FinishedBatch, Move, StorageTier
from tests.support.fake_movers import Clock
from tests.system.tiers.media import Memory


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """To wait is to let time pass."""
    clock = Clock()

    def sleep(seconds: float) -> None:
        clock.now += seconds

    for module in (medium_module, faulty_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock, sleep=sleep, time=time.time))


class TestMemoryStorage(StorageTierTests):
    @pytest.fixture
    def medium(self) -> Medium:
        return Memory()


# --- tiers with a bug -------------------------------------------------------------------------------------------------


class Believes(MemoryTier):
    """Returns whatever is in the slot, unverified."""

    def _load(self, move: Move) -> Outcome:
        stored = self._rows.get(move.slot)
        if stored is None:
            return Outcome.MISSING
        self._region.rows_view[move.row][: len(stored.row)] = np.frombuffer(stored.row, np.uint8)
        return Outcome.OK


class BelievesItsIndex(Believes):
    """Checks the key in its index, and not the row."""

    def _load(self, move: Move) -> Outcome:
        stored = self._rows.get(move.slot)
        return super()._load(move) if stored is not None and stored.key == move.key else Outcome.MISSING


class SealsAnything(MemoryTier):
    def store(self, moves: Sequence[Move]) -> int:
        return super().store([Move(move.row, move.slot, move.key, move.tick, True) for move in moves])


class NeverSeals(MemoryTier):
    def store(self, moves: Sequence[Move]) -> int:
        return super().store([Move(move.row, move.slot, move.key, move.tick, False) for move in moves])


class DeletesTheSlot(MemoryTier):
    """Whichever key it holds by now."""

    def delete(self, entries: Sequence[tuple[int, bytes]]) -> None:
        for slot, _ in entries:
            self._rows.pop(slot, None)


class NeverTouches(MemoryTier):
    def touch(self, slots: Sequence[int], ticks: Sequence[int]) -> None:
        pass


class NeverDeletes(MemoryTier):
    def delete(self, entries: Sequence[tuple[int, bytes]]) -> None:
        pass


class ForgetsARow(MemoryTier):
    def list_rows(self) -> Iterator[list[Entry]]:
        for batch in super().list_rows():
            yield batch[:-1]


class ListsTheNewestFirst(MemoryTier):
    def list_rows(self) -> Iterator[list[Entry]]:
        for batch in super().list_rows():
            yield batch[::-1]


class ShowsEveryNamespace(MemoryTier):
    def list_rows(self) -> Iterator[list[Entry]]:
        for rows in self._medium.namespaces.values():
            yield [Entry(slot, stored.key, stored.tick) for slot, stored in rows.items()]


class OneOutcomeTooMany(MemoryTier):
    def poll(self) -> list[FinishedBatch]:
        return [FinishedBatch(done.batch_id, [*done.outcomes, Outcome.OK]) for done in super().poll()]


class ReportsTwice(MemoryTier):
    def poll(self) -> list[FinishedBatch]:
        return super().poll() * 2


class LosesABatch(MemoryTier):
    def poll(self) -> list[FinishedBatch]:
        return super().poll()[:1]


class LandsLate(MemoryTier):
    """Reports a load, and writes the row again afterwards."""

    def load(self, moves: Sequence[Move]) -> int:
        self._late = list(moves)
        return super().load(moves)

    def poll(self) -> list[FinishedBatch]:
        done = super().poll()
        if not done:
            for move in getattr(self, "_late", ()):
                self._load(move)
            self._late = []
        return done


class SpoilsTheNextRow(MemoryTier):
    def _load(self, move: Move) -> Outcome:
        self._region.rows_view[(move.row + 1) % self._region.rows][:8] = 7
        return super()._load(move)


class OneSlotTooMany(MemoryTier):
    """One more than the capacity holds."""

    def open(self, namespace: bytes, epoch: int) -> int:
        self._slots = super().open(namespace, epoch) + 1
        return self._slots


class CountsOneNamespace(MemoryTier):
    def _make_room(self, need_bytes: int) -> None:
        pass


class CloseBreaksTheSecondTime(MemoryTier):
    def close(self) -> None:
        self._rows.pop(0)


Test = Callable[[StorageTierTests, Medium, Rig], object]
SUITE: dict[type[MemoryTier], Test] = {
    Believes: lambda suite, _, rig: suite.test_slot_of_a_deleted_row_may_be_stored_into_at_once(rig),
    BelievesItsIndex: lambda suite, _, rig: suite.test_corrupted_row_is_a_miss(rig, "bit-flips", True),
    SealsAnything: lambda suite, _, rig: suite.test_unsealed_row_is_never_a_hit(rig),
    NeverSeals: lambda suite, _, rig: suite.test_one_row_at_a_time(rig),
    DeletesTheSlot: lambda suite, _, rig: suite.test_late_delete_does_not_take_the_new_row(rig),
    NeverDeletes: lambda suite, _, rig: suite.test_deleted_row_is_gone_and_its_neighbours_are_not(rig),
    ForgetsARow: lambda suite, _, rig: suite.test_restart_keeps_every_row_and_no_other(rig),
    NeverTouches: lambda suite, _, rig: suite.test_touched_row_is_listed_last(rig),
    ListsTheNewestFirst: lambda suite, _, rig: suite.test_restart_keeps_every_row_and_no_other(rig),
    ShowsEveryNamespace: lambda suite, _, rig: suite.test_other_namespace_sees_nothing(rig),
    OneOutcomeTooMany: lambda suite, _, rig: suite.test_one_row_at_a_time(rig),
    ReportsTwice: lambda suite, _, rig: suite.test_one_row_at_a_time(rig),
    LosesABatch: lambda suite, _, rig: suite.test_many_batches_at_once_in_both_directions(rig),
    LandsLate: lambda suite, _, rig: suite.test_random_operations(rig, 0),
    SpoilsTheNextRow: lambda suite, _, rig: suite.test_one_row_at_a_time(rig),
    OneSlotTooMany: lambda suite, medium, _: suite.test_every_slot_can_be_filled_and_nothing_beyond_the_capacity(
        medium
    ),
    CountsOneNamespace: lambda suite, medium, _: suite.test_other_namespaces_count(medium),
    CloseBreaksTheSecondTime: lambda suite, _, rig: suite.test_close_may_be_called_twice(rig),
}


@dataclass
class Mutated(Memory):
    kind: type[MemoryTier] = MemoryTier

    def make(self, geometry: Geometry, region: HostRegion, capacity_bytes: int) -> StorageTier:
        return self.kind(MemoryConfig(type="memory", capacity=capacity_bytes), geometry, region, self.rows)


@pytest.mark.parametrize("kind", SUITE, ids=lambda kind: kind.__name__)
def test_a_bug_is_caught(kind: type[MemoryTier], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(medium_module, "TIMEOUT_S", 0.2)

    def run(tier: type[MemoryTier]) -> None:
        with Rig(Mutated(kind=tier), SMALL, 40) as rig:
            rig.open()
            SUITE[kind](StorageTierTests(), Mutated(kind=tier), rig)

    with pytest.raises((AssertionError, KeyError)):
        run(kind)
    run(MemoryTier)


# --- media that fail --------------------------------------------------------------------------------------------------


@dataclass
class FaultyMemory(Memory):
    plan: FaultPlan = FaultPlan()  # noqa: RUF009 - a frozen value

    def make(self, geometry: Geometry, region: HostRegion, capacity_bytes: int) -> StorageTier:
        def inner(geometry: Geometry, region: HostRegion) -> StorageTier:
            return super(FaultyMemory, self).make(geometry, region, capacity_bytes)

        return FaultyTier(inner, geometry, region, self.plan)


@contextmanager
def faulty(*rules: Rule, seed: int = 0) -> Iterator[Rig]:
    with Rig(FaultyMemory(plan=FaultPlan(rules, seed)), SMALL, 24) as rig:
        rig.open()
        yield rig


HIT: tuple[Key, ...] = tuple(keys(8).values())[::2]  # every second row is struck
ENDLESS = {Fault.STALL, Fault.FREEZE}


@pytest.mark.parametrize("way", Way)
def test_a_stalled_batch_is_never_reported_and_holds_up_no_other(way: Way) -> None:
    medium = FaultyMemory(plan=FaultPlan((Rule(Fault.STALL, way, HIT),)))
    with Rig(medium, SMALL, 24) as rig:
        rig.open()
        if way is Way.LOAD:
            rig.store(keys(8))
        stalled = rig.begin_store(keys(8)) if way is Way.STORE else rig.begin_load(keys(8))
        assert set(rig.store(keys(4, first=20))) == {Outcome.OK}
        assert set(rig.load(keys(4, first=20))) == {Outcome.OK}
        assert rig.tier.busy
        rig.abandon(stalled)
        rig.tier.close()
        # Who comes next finds good rows or none: what the stalled batch has left half-done is not one.
        rig.tier = Memory(medium.rows).make(SMALL, rig.region, rig.capacity_bytes)
        found = rig.open()
        outcomes = dict(zip(found.values(), rig.load(found), strict=True))
        good = set(keys(4, first=20).values()) | (set(keys(8).values()) if way is Way.LOAD else set())
        assert {key for key, outcome in outcomes.items() if outcome is Outcome.OK} == good | set(
            keys(8).values()
        ) - set(HIT)


@pytest.mark.parametrize("seed", range(2))
def test_everything_at_once(seed: int) -> None:
    """Whatever strikes, OK means the right bytes (Rig looks at each of them), and rows that nothing struck are hits."""
    rules = [Rule(fault, chance=0.1, delay_s=0.002) for fault in Fault if fault not in ENDLESS]
    with faulty(*rules, seed=seed) as rig:
        assert isinstance(rig.tier, FaultyTier)
        hits = 0
        for turn in range(12):
            stored = rig.store(keys(16))
            loaded = rig.load(keys(16))
            hits += loaded.count(Outcome.OK)
            assert stored.count(Outcome.OK) > 4
            rig.delete({slot: key for (slot, key), it in zip(keys(16).items(), loaded, strict=True) if it in NOT_OURS})
            assert turn < 3 or len(set(loaded)) > 1
        assert hits > 50
        assert set(rig.tier.struck) == set(Fault) - ENDLESS


def test_faulty_tier_passes_on_every_call() -> None:
    """A method with a default in StorageTier would otherwise never reach the inner tier."""
    assert [name for name in vars(StorageTier) if not name.startswith("_") and name not in vars(FaultyTier)] == []
