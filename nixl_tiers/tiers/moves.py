"""Batches: what one call of `store` or `load` asked for, until the last of its moves has ended and it is reported."""

from __future__ import annotations

from dataclasses import dataclass

from nixl_tiers.chunk import Outcome
from nixl_tiers.tiers.base import FinishedBatch


@dataclass(eq=False)
class Batch:
    """One call's moves. A move that never ends keeps its batch from being reported."""

    batch_id: int
    outcomes: list[Outcome]
    left: int


class Batches:
    """The batches of one tier, for `poll` to report. For the tier's own thread."""

    def __init__(self) -> None:
        self._last_id = 0
        self._ended: list[FinishedBatch] = []

    def begin(self, moves: int) -> Batch:
        """A batch with a batch_id of its own; one of no moves has ended."""
        self._last_id += 1
        batch = Batch(self._last_id, [Outcome.FAILED] * moves, moves)
        if not moves:
            self._ended.append(FinishedBatch(batch.batch_id, batch.outcomes))
        return batch

    def end(self, batch: Batch, place: int, outcome: Outcome) -> None:
        """The move at this place of the batch has ended: once for each."""
        batch.outcomes[place] = outcome
        batch.left -= 1
        if not batch.left:
            self._ended.append(FinishedBatch(batch.batch_id, batch.outcomes))

    def take(self) -> list[FinishedBatch]:
        """Those that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    @property
    def waiting(self) -> bool:
        """Whether any that has ended is still to be reported."""
        return bool(self._ended)
