"""Moves that wait and run: batches as they were accepted, units that are moved together, a queue for each direction."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import TypeVar

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.tiers.base import Move

T = TypeVar("T")
Condition = Callable[[], bool]
Steps = Generator[Condition, None, T]
"""Yields conditions; it is resumed when the last one yielded holds."""


class Batch:
    """The moves of one call of `store` or `load`. `end`: called with the batch when moves have ended."""

    def __init__(self, batch_id: int, moves: int, end: Callable[[Batch], None]) -> None:
        self.id = batch_id
        self.outcomes = [Outcome.FAILED] * moves
        self.left = moves
        self.ended: dict[int, Outcome] = {}
        """By their places, those that `MovePipeline.take_ended` is still to report."""
        self._end = end

    def end(self, outcomes: Mapping[int, Outcome]) -> None:
        """The moves at these places have ended: once for each."""
        for place, outcome in outcomes.items():
            self.outcomes[place] = outcome
        self.ended.update(outcomes)
        self.left -= len(outcomes)
        self._end(self)


class Unit:
    """Moves of one batch that are made together. A move that has ended is in it no longer."""

    def __init__(self, queue: MoveQueue, batch: Batch, moves: dict[int, Move], tries: int = 0) -> None:
        """`moves`: by their places in the batch. `tries`: how often they were started before."""
        self.queue = queue
        self.tries = tries
        self._batch = batch
        self._moves = moves
        self._steps: Steps[None] | None = None
        self._condition: Condition = bool

    @property
    def moves(self) -> Collection[Move]:
        return self._moves.values()

    def end_all(self, outcome: Outcome) -> None:
        self.end_each(lambda _: outcome)

    def end_each(self, judge: Callable[[Move], Outcome | None]) -> None:
        """End each move with the outcome that `judge` gives; those without one stay."""
        ended = {place: outcome for place, move in self._moves.items() if (outcome := judge(move)) is not None}
        for place, outcome in ended.items():
            self.queue.on_end(self._moves.pop(place), outcome)
        if ended:
            self._batch.end(ended)

    def begin(self, steps: Steps[None]) -> bool:
        """Run the first of these steps. False: there are no more."""
        self.tries += 1
        self._steps = steps
        return self.advance()

    def advance(self) -> bool:
        """Run the next step. False: there are no more."""
        assert self._steps is not None
        condition = next(self._steps, None)
        self._condition = condition or bool
        return condition is not None

    @property
    def ready(self) -> bool:
        """Whether what the last step waits for has happened."""
        return self._condition()

    def split(self) -> list[Unit]:
        """What is left of it, each move in a unit of its own."""
        return [Unit(self.queue, self._batch, {place: move}, self.tries) for place, move in self._moves.items()]


class MoveQueue:
    """The moves of one direction: units that wait, in order, and units that run."""

    def __init__(
        self,
        *,
        limit: int,
        run: Callable[[Unit], Steps[None]],
        admit: Callable[[Unit], bool] = lambda _unit: True,
        on_end: Callable[[Move, Outcome], None] = lambda _move, _outcome: None,
        unit_rows: int = 1,
        limit_rows: float = math.inf,
    ) -> None:
        """`limit`: how many units may run at a time; `unit_rows`: of how many moves at most. `limit_rows`: how many
        moves may run at a time, if they are more than one unit.

        `admit`: whether the unit that waits first may start now; False holds up those behind it too. It may end moves.
        `run`: the steps of an admitted unit. Moves that they leave unended are tried again: next, each in a unit of
        its own. `on_end` is called for every move that ends, however it does.
        """
        self.waiting: deque[Unit] = deque()
        self.running: list[Unit] = []
        self.on_end = on_end
        self.limit_rows = limit_rows
        """It may be changed at any time."""
        self._limit = limit
        self._admit = admit
        self._run = run
        self._unit_rows = unit_rows

    def add(self, batch: Batch, moves: Sequence[Move]) -> None:
        for start in range(0, len(moves), self._unit_rows):
            part = moves[start : start + self._unit_rows]
            self.waiting.append(Unit(self, batch, dict(enumerate(part, start))))

    def start(self, may_start: Callable[[], bool]) -> None:
        """Start what waits, as far as there is room for it. `may_start`: asked before each, since preparing one takes
        time."""
        while self.waiting and self._has_room and may_start() and self._admit(self.waiting[0]):
            unit = self.waiting.popleft()
            if unit.moves:
                self.running.append(unit)
                if not unit.begin(self._run(unit)):
                    self._ended(unit)

    @property
    def held(self) -> bool:
        """Whether something waits though there is room for it."""
        return bool(self.waiting) and self._has_room

    @property
    def _has_room(self) -> bool:
        """Whether the unit that waits first may run beside those that do."""
        rows = self.rows_moving + len(self.waiting[0].moves)
        return not self.running or (len(self.running) < self._limit and rows <= self.limit_rows)

    @property
    def rows_moving(self) -> int:
        """How many rows run."""
        return sum(len(unit.moves) for unit in self.running)

    def split_first(self) -> None:
        """Have the moves of the unit that waits first start one by one."""
        self.waiting.extendleft(reversed(self.waiting.popleft().split()))

    def poll(self) -> int:
        """Go on with units that need not wait any more, also for each other; returns how many steps that were. None of
        those that begin meanwhile."""
        units, steps, before = [*self.running], 0, -1
        while steps != before:
            before = steps
            for unit in [*units]:
                while unit.ready:
                    steps += 1
                    if not unit.advance():
                        self._ended(unit)
                        units.remove(unit)
                        break
        return steps

    def give_up(self) -> None:
        """End what has not been started as FAILED."""
        while self.waiting:
            self.waiting.popleft().end_all(Outcome.FAILED)

    def _ended(self, unit: Unit) -> None:
        if unit in self.running:
            self.running.remove(unit)
        self.waiting.extendleft(reversed(unit.split()))
