"""The rounds of bench.rounds, with sides that only note that they were called."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.peers import Rows
from bench.rounds import Side, Spread, Took, Turn, cpu_seconds, disk_requests, ratio, take_turns
from nixl_tiers.base.chunk import PAGE, Geometry
from nixl_tiers.memory.region import HostRegion


class Noted(Side):
    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def store(self) -> None:
        self.calls.append(f"store {self.name}")

    def load(self) -> Took:
        self.calls.append(f"load {self.name}")
        return Took(4.0, 2.0)


def test_each_round_begins_with_another_side_and_the_first_is_not_measured() -> None:
    calls: list[str] = []
    sides = {name: Noted(name, calls) for name in "abc"}
    turns = take_turns(sides, 2, before_store=lambda: calls.append("fill"))
    stores = [call[-1] for call in calls if call.startswith("store")]
    assert "".join(stores) == "".join(call[-1] for call in calls if call.startswith("load")) == "abcbcacab"
    assert all(calls[at - 1] == "fill" for at, call in enumerate(calls) if call.startswith("store"))
    assert {what: {name: len(taken) for name, taken in of.items()} for what, of in turns.items()} == {
        what: dict.fromkeys("abc", 2) for what in ("store", "load")
    }
    taken = [turn for taken in turns["load"].values() for turn in taken]
    assert {(turn.seconds, turn.cpu_s) for turn in taken} == {(4.0, 2.0)}  # as the side says


def test_ratio_is_the_median_of_the_rounds() -> None:
    ours, theirs = ([Turn(seconds, 0.0, 0, 0) for seconds in several] for several in ([1, 1, 10], [2, 2, 1]))
    assert ratio(ours, theirs) == 2
    assert Spread.of([3.0]) == (3, 3, 3)
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 5.0]) == (2, 3, 4)


def test_processor_time_of_another_process_counts() -> None:
    work = "import time\nwhile time.process_time() < 0.2: pass\nprint(time.process_time(), flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        spent_s = float(other.stdout.readline())
        own_s = cpu_seconds()
        assert cpu_seconds([other.pid]) - own_s == pytest.approx(spent_s, abs=0.1)
        other.communicate(b"\n")
    assert cpu_seconds() >= 0.2  # as a child that has ended


def test_requests_of_a_disk_never_decrease(tmp_path: Path) -> None:
    before, after = disk_requests(tmp_path), disk_requests(tmp_path)
    assert all(after[what][part] >= before[what][part] >= 0 for what in ("store", "load") for part in (0, 1))


class Memory(Side):
    """Keeps rows, and brings them back with `damage` added to one byte."""

    def __init__(self, region: HostRegion, damage: int) -> None:
        self.rows, self.kept, self.damage = region.rows_view, np.empty(0), damage

    def store(self) -> None:
        self.kept = self.rows.copy()

    def load(self) -> None:
        self.rows[:] = self.kept
        self.rows[1, 7] += self.damage


def test_side_that_brings_other_bytes_ends_the_run() -> None:
    with HostRegion.create(Geometry(1, PAGE), 3) as region:
        rows = Rows(region, PAGE)
        rows.check("good", Memory(region, 0))
        with pytest.raises(SystemExit, match="bad: row 1 has other bytes"):
            rows.check("bad", Memory(region, 1))
