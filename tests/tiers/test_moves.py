"""The one way in which a move lives: batches, units, limits, admission, retries."""

from __future__ import annotations

import math
from concurrent.futures import Future

import pytest

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.base.times import PRODUCTION
from nixl_tiers.tiers.base import EndedMoves, FinishedBatch, Move
from nixl_tiers.tiers.move_queue import MoveQueue, Steps, Unit
from nixl_tiers.tiers.moves import HELD_POLL_S, STORE_POLL_S, MovePipeline, finished

HOLD_S = PRODUCTION.stores_held_s


def moves(*rows: int) -> list[Move]:
    return [Move(row, row, b"key-%d" % row) for row in rows]


class Medium:
    """Moves progress only when a test lets them."""

    def __init__(self, *, limit: int = 2) -> None:
        self.gates: dict[int, Future[Outcome | None]] = {}  # by row, of what has started
        self.started: list[list[int]] = []
        self.ended: list[tuple[int, Outcome]] = []
        self.up = True
        self.loads, self.stores = (
            MoveQueue(
                limit=limit,
                run=self._run,
                on_end=lambda move, outcome: self.ended.append((move.row, outcome)),
            )
            for _ in range(2)
        )
        self.now = 0.0
        self.held_until_s = 0.0
        self.pipeline = MovePipeline(
            self.loads,
            self.stores,
            may_start=lambda: self.up,
            held_until_s=lambda: self.held_until_s,
            clock=lambda: self.now,
        )

    def _run(self, unit: Unit) -> Steps[None]:
        rows = [move.row for move in unit.moves]
        self.started.append(rows)
        gate = self.gates[rows[0]] = Future[Outcome | None]()
        outcome = yield from finished(gate)
        if outcome is not None:
            unit.end_all(outcome)

    def end(self, *rows: int, outcome: Outcome | None = Outcome.OK) -> list[FinishedBatch]:
        for row in rows:
            self.gates[row].set_result(outcome)
        return self.poll()

    def poll(self) -> list[FinishedBatch]:
        self.pipeline.poll()
        self.pipeline.start()
        return self.pipeline.take()


def test_units_run_within_a_number_of_rows_and_one_always_may() -> None:
    started: list[list[int]] = []
    gates: list[Future[None]] = []

    def run(unit: Unit) -> Steps[None]:
        started.append([move.row for move in unit.moves])
        gates.append(Future())
        yield from finished(gates[-1])
        unit.end_all(Outcome.OK)

    loads = MoveQueue(limit=4, limit_rows=3, unit_rows=9, run=run)
    pipeline = MovePipeline(loads, MoveQueue(limit=1, run=run), may_start=lambda: True, wakes=True)
    pipeline.load(moves(1, 2, 3, 4))
    pipeline.load(moves(5))
    assert started == [[1, 2, 3, 4]], "more than the limit, and nothing beside it"
    assert pipeline.poll_s == math.inf, "its end wakes the caller"
    for rows in ((6, 7), (8, 9)):
        pipeline.load(moves(*rows))
    gates[0].set_result(None)
    pipeline.poll()
    pipeline.start()
    assert started[1:] == [[5], [6, 7]]


def test_moves_are_reported_once_while_others_of_their_batch_go_on() -> None:
    medium = Medium()
    first, second = medium.pipeline.load(moves(1, 2, 3)), medium.pipeline.load(moves(4))
    assert medium.end(2) == []
    assert medium.pipeline.take_ended() == [EndedMoves(first, {1: Outcome.OK})]
    assert medium.pipeline.take_ended() == []
    medium.end(1)
    assert medium.end(3, outcome=Outcome.FAILED) == [FinishedBatch(first, [Outcome.OK, Outcome.OK, Outcome.FAILED])]
    assert medium.pipeline.take_ended() == [], "its batch has all of them"
    assert medium.end(4) == [FinishedBatch(second, [Outcome.OK])]
    assert medium.pipeline.take_ended() == []


def test_stores_start_when_no_load_waits_or_runs() -> None:
    medium = Medium(limit=1)
    medium.pipeline.store(moves(1, 2))
    medium.pipeline.load(moves(11, 12))
    medium.end(1)
    medium.end(11)
    assert medium.started == [[1], [11], [12]], "the other store waits for the load that waited, too"
    medium.end(12)
    assert medium.started[3:] == [[2]]


@pytest.mark.parametrize("what", ["load", "copy of the engine"])
def test_what_never_ends_does_not_starve_stores(what: str) -> None:
    medium = Medium(limit=1)
    if what == "load":
        medium.pipeline.load(moves(1000))
    else:
        medium.held_until_s = 1000.0
    medium.pipeline.store(moves(*range(100)))
    at: list[int] = []
    for tenth in range(40):
        medium.now = (tenth + 0.5) * HOLD_S / 10
        medium.poll()
        for row, gate in medium.gates.items():
            if row != 1000 and not gate.done():
                at.append(tenth)
                gate.set_result(Outcome.OK)
    assert at == [*range(10, 20), *range(30, 40)]


def test_no_store_starts_while_the_engine_copies_rows() -> None:
    medium = Medium(limit=1)
    medium.pipeline.store(moves(1, 2, 3))
    medium.held_until_s = HOLD_S / 2
    medium.end(1)
    assert medium.started == [[1]], "what runs ends, and what waits stays"
    assert medium.pipeline.poll_s == HELD_POLL_S
    medium.pipeline.load(moves(11))
    assert medium.started[1:] == [[11]], "loads do not wait"
    assert medium.pipeline.poll_s == 0
    medium.end(11)
    medium.held_until_s = 0.0
    medium.poll()
    assert medium.started[2:] == [[2]]
    medium.held_until_s = HOLD_S / 2
    medium.end(2)
    medium.now = HOLD_S / 2
    medium.poll()
    assert medium.started[3:] == [[3]], "the copy has taken too long"
    assert medium.pipeline.poll_s == STORE_POLL_S


def test_nothing_starts_while_the_medium_is_down_and_what_waits_can_be_given_up() -> None:
    medium = Medium(limit=1)
    running = medium.pipeline.load(moves(1))
    medium.up = False
    batch = medium.pipeline.load(moves(2, 3))
    assert medium.end(1) == [FinishedBatch(running, [Outcome.OK])]
    assert medium.started == [[1]]
    assert medium.pipeline.quiet
    medium.loads.give_up()
    assert medium.poll() == [FinishedBatch(batch, [Outcome.FAILED] * 2)]
    assert medium.ended == [(1, Outcome.OK), (2, Outcome.FAILED), (3, Outcome.FAILED)]


def test_unit_goes_on_in_the_poll_in_which_a_later_one_ends_and_gives_it_room() -> None:
    """Nothing else wakes a mover whose worker has just said that units have ended."""
    room: list[int] = []
    ended = Future[None]()

    def run(unit: Unit) -> Steps[None]:
        if next(iter(unit.moves)).row == 0:
            yield lambda: bool(room)
        else:
            yield from finished(ended)
            room.append(1)
        unit.end_all(Outcome.OK)

    stores = MoveQueue(limit=2, run=run)
    pipeline = MovePipeline(MoveQueue(limit=2, run=run), stores, may_start=lambda: True, wakes=True)
    pipeline.store(moves(0, 1))
    assert pipeline.poll() == 0
    ended.set_result(None)
    pipeline.poll()
    assert [batch.outcomes for batch in pipeline.take()] == [[Outcome.OK] * 2]
