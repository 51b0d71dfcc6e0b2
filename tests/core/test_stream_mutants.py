"""Bugs that are planted in streams, each of which the state machine has to find."""

from __future__ import annotations

from typing import Any

import pytest

from nixl_tiers.core import manager
from nixl_tiers.core.copies import Copies
from nixl_tiers.core.host import HostTier
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.promotion_jobs import PromotionJobs
from nixl_tiers.core.requests import Request
from nixl_tiers.core.rows import Row
from nixl_tiers.core.streams import Reason, Stream, Streams
from nixl_tiers.core.tier import Tier
from tests.core.test_mutants import original_of, search
from tests.support.stateful import StreamStateMachine


class WordsOfBeforeStay(Streams):
    """A row that arrived as another key passes for one that has come."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._host.waits = None


class CutsAreNotWritten(Streams):
    def _cut(self, *arguments: Any) -> None:
        self._write, write = lambda stream: None, self._write  # type: ignore[method-assign,assignment]
        try:
            super()._cut(*arguments)
        finally:
            self._write = write  # type: ignore[method-assign]


class FailedRowsDoNotCut(Streams):
    def lost(self, row: Row, reason: Reason) -> None:
        self._of_row.pop(row.order, None)


class RowsFreedAtTheCut(Streams):
    """Its worker may have read an older limit, and words that it finds there again."""

    def lost(self, row: Row, reason: Reason) -> None:
        super().lost(row, reason)
        row.worker_refs = 0


class AbortsDoNotCut(TierManager):
    def finish_request(self, name: str) -> None:
        self._requests.finish(name)


class ResetsDoNotCut(Streams):
    def cut_all(self, reason: Reason = "reset") -> None:
        pass


class GivenUpRowsAreLostAtAReset(Streams):
    def reset(self) -> list[Row]:
        super().reset()
        return []


class TheLongestWaitDoesNotCut(Streams):
    def watch(self, now: float) -> None:
        pass


class SlotsAreUsedUp(Streams):
    def ended(self, stream: Stream) -> None:
        super().ended(stream)
        self._slots[:] = self._slots[:-1]


class SlotsAreFreedAtTheCut(Streams):
    """Two streams have one limit."""

    def _cut(self, stream: Stream, place: int, reason: Reason) -> None:
        super()._cut(stream, place, reason)
        self._slots.append(stream.plan.slot)


class ToldAgainAndAgain(Streams):
    def accepts(self, request: Request, *arguments: Any) -> int:
        request.told_early = False
        return super().accepts(request, *arguments)


class RoomThatIsNot(HostTier):
    def room_of(self, tenant: int) -> int:
        return 100


class EndedRowsAreNotReclaimed(Copies):
    """A row that was given up while workers used it."""

    def _end_load(self, name: str) -> Any:
        reclaim, self._host.reclaim = self._host.reclaim, lambda row: None  # type: ignore[method-assign,assignment]
        try:
            return super()._end_load(name)
        finally:
            self._host.reclaim = reclaim  # type: ignore[method-assign]


class EndedRowsAreFoundByKey(Copies):
    """The key may be another row by then."""

    def _end_load(self, name: str) -> Any:
        for load in self._loads.get(name, ()):
            load.rows = [self._host.index.get(row.key, row) for row in load.rows]
        return super()._end_load(name)


class DroppedRowsStay(PromotionJobs):
    """Those that are queued for a stream that was cut."""

    def _drop(self, tier: Tier, row: Row) -> None:
        pass


MUTANTS = [
    WordsOfBeforeStay,
    CutsAreNotWritten,
    FailedRowsDoNotCut,
    RowsFreedAtTheCut,
    AbortsDoNotCut,
    ResetsDoNotCut,
    GivenUpRowsAreLostAtAReset,
    TheLongestWaitDoesNotCut,
    SlotsAreUsedUp,
    SlotsAreFreedAtTheCut,
    ToldAgainAndAgain,
    RoomThatIsNot,
    EndedRowsAreNotReclaimed,
    EndedRowsAreFoundByKey,
    DroppedRowsStay,
]


# The seed that catches it soonest, as in test_mutants.py.
FIRST: dict[type, int] = {
    AbortsDoNotCut: 2,
    CutsAreNotWritten: 1,
    DroppedRowsStay: 1,
    EndedRowsAreNotReclaimed: 5,
    FailedRowsDoNotCut: 1,
    GivenUpRowsAreLostAtAReset: 22,
    ResetsDoNotCut: 9,
    RoomThatIsNot: 4,
    RowsFreedAtTheCut: 1,
    TheLongestWaitDoesNotCut: 3,
    ToldAgainAndAgain: 5,
    WordsOfBeforeStay: 1,
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_planted_bug_in_streams_is_caught(mutant: type, monkeypatch: pytest.MonkeyPatch) -> None:
    members: dict[str, object] = {}
    if issubclass(mutant, TierManager):
        members["core"] = mutant
    else:
        monkeypatch.setattr(manager, original_of(mutant).__name__, mutant)
    with pytest.raises((AssertionError, KeyError)):
        search(type("Machine", (StreamStateMachine,), members), FIRST.get(mutant, 0))


def test_mutants_override_existing_methods() -> None:
    for mutant in MUTANTS:
        original = original_of(mutant)
        assert original is TierManager or getattr(manager, original.__name__) is original
        assert all(hasattr(original, name) for name in vars(mutant) if not name.startswith("__"))
