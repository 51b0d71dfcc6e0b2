"""Mutation tests of the conformance suite: tiers with one bug each, and the test that must catch it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.testing.config import MemoryConfig
from nixl_tiers.testing.conformance import SMALL, StorageTierTests
from nixl_tiers.testing.medium import Medium, Rig
from nixl_tiers.testing.memory import MemoryTier
from nixl_tiers.tiers.base import Entry, FinishedBatch, Move, StorageTier
from tests.system.tiers.media import Memory


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
    monkeypatch.setattr("nixl_tiers.testing.medium.TIMEOUT_S", 0.2)

    def run(tier: type[MemoryTier]) -> None:
        with Rig(Mutated(kind=tier), SMALL, 40) as rig:
            rig.open()
            SUITE[kind](StorageTierTests(), Mutated(kind=tier), rig)

    with pytest.raises((AssertionError, KeyError)):
        run(kind)
    run(MemoryTier)
