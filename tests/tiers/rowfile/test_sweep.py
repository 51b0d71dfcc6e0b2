"""What the thread that sweeps does when, step by step, with a clock of the test's."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from nixl_tiers.tiers.rowfile.budget import Budget, Swept
from nixl_tiers.tiers.rowfile.contents import Contents
from nixl_tiers.tiers.rowfile.sweep import FULL_S, PAUSE_S, REFRESH_S, SWEEP_S, WAIT_S, Sweeper
from tests.support.fake_movers import Clock
from tests.tiers.rowfile.rows import PATHS, ROW, make

CAPACITY = 8 * ROW


class Sweeps:
    """A sweeper, and what is in its directory."""

    def __init__(self, contents: Contents, place: Path) -> None:
        self.place = place
        self.clock = Clock(100.0)
        self.budget = Budget(CAPACITY, ROW)
        self.contents = contents
        self.swept: list[float] = []
        self.takes_s = 0.0
        sweep = contents.sweep

        def counted() -> Swept | None:
            self.swept.append(self.clock.now)
            self.clock.now += self.takes_s
            return sweep()

        contents.sweep = counted
        contents.server_s = lambda: self.clock.now
        self.sweeper = Sweeper(contents, self.budget, None, self.clock, Random(0))

    def fill(self, rows: int = 8) -> None:
        for number, path in enumerate(PATHS[:rows]):
            make(self.place, path, used_s=number)


@pytest.fixture
def sweeps(contents: Contents, tmp_path: Path) -> Sweeps:
    return Sweeps(contents, tmp_path)


def test_row_for_which_no_room_can_be_made_does_not_wait(sweeps: Sweeps, monkeypatch: pytest.MonkeyPatch) -> None:
    sweeps.fill()
    monkeypatch.setattr(sweeps.contents, "unlink", lambda _: [])
    sweeps.sweeper.step()
    assert not sweeps.budget.reserve()
    assert not sweeps.sweeper.full
    sweeps.clock.now += PAUSE_S
    sweeps.sweeper.step()
    assert sweeps.sweeper.full
    sweeps.clock.now += FULL_S
    assert not sweeps.sweeper.full
    monkeypatch.undo()
    assert not sweeps.budget.reserve()
    sweeps.sweeper.step()
    assert sweeps.budget.reserve(2)


def test_directory_is_swept_at_the_start_and_then_for_a_row_or_each_hour(sweeps: Sweeps) -> None:
    assert sweeps.sweeper.step() == REFRESH_S, "of the server's clock"
    sweeps.clock.now += SWEEP_S - 1
    assert sweeps.sweeper.step() == 1
    assert len(sweeps.swept) == 1
    sweeps.clock.now += 1
    sweeps.sweeper.step()
    assert len(sweeps.swept) == 2


def test_sweeps_pause_as_long_as_they_take(sweeps: Sweeps) -> None:
    sweeps.takes_s = 3.0
    sweeps.sweeper.step()
    for _ in range(8):
        assert sweeps.budget.reserve()
    assert not sweeps.budget.reserve()
    assert sweeps.sweeper.step() == 3.0
    assert len(sweeps.swept) == 1
    sweeps.clock.now += 3.0
    sweeps.sweeper.step()
    assert len(sweeps.swept) == 2


def test_rows_do_not_wait_for_a_sweep_that_takes_long(sweeps: Sweeps) -> None:
    """Their jobs would be late, and at last their mover would be killed, to begin again."""
    full: list[bool] = []

    def slow() -> Swept:
        full.append(sweeps.sweeper.full)
        sweeps.clock.now += WAIT_S + 1
        full.append(sweeps.sweeper.full)
        sweeps.sweeper.stop()
        return Swept()

    sweeps.contents.sweep = slow
    sweeps.sweeper._run()
    assert full == [False, True]
    assert not sweeps.sweeper.full


def test_sweep_that_hangs_is_told_from_one_that_takes_long(sweeps: Sweeps) -> None:
    quiet: list[float] = []

    def hangs() -> Swept:
        for moves in (False, True):
            sweeps.clock.now += 40.0
            sweeps.contents.moved_s = sweeps.clock.now - 1.0 if moves else 0.0
            quiet.append(sweeps.sweeper.quiet_s)
        sweeps.sweeper.stop()
        return Swept()

    sweeps.contents.sweep = hangs
    assert sweeps.sweeper.quiet_s == 0.0
    sweeps.sweeper._run()
    assert quiet == [40.0, 1.0]
    assert sweeps.sweeper.quiet_s == 0.0


def test_whatever_the_thread_reads_shows_that_it_does_not_hang(contents: Contents, tmp_path: Path) -> None:
    for path in PATHS:
        make(tmp_path, path)
    (row, *_) = contents.rows(PATHS[0].namespace, PATHS[0].fanout)
    for call in (
        contents.sweep,
        contents.namespaces,
        contents.server_s,
        lambda: contents.rows(row.namespace, row.fanout),
        lambda: contents.sealed_at([row]),
        lambda: contents.unlink([row]),
    ):
        contents.moved_s = 0.0
        call()
        assert contents.moved_s > 0.0


def test_stores_go_on_beside_a_sweep(sweeps: Sweeps) -> None:
    sweeps.budget.capacity_bytes = 64 * ROW
    sweeps.sweeper.step()
    assert sweeps.budget.reserve(9), "more than half of a window"
    sweeps.clock.now += PAUSE_S
    counted = sweeps.contents.sweep

    def beside() -> Swept:
        assert sweeps.budget.reserve(2)
        return counted()

    sweeps.contents.sweep = beside
    sweeps.sweeper.step()
    assert len(sweeps.swept) == 2
    assert sweeps.budget.reserve()
