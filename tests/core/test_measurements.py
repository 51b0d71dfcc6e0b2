"""Measurements: loads of rows that requests decline, by which a tier's speed is found out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.base.policies import Write
from nixl_tiers.core.chain_rows import Chain, Group
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.prefill import PrefillEstimate
from nixl_tiers.core.pricing import ENOUGH_SAMPLES
from nixl_tiers.core.types import Direction, Job, Limits, TierSpec
from tests.support import inside
from tests.support.core import all_good, opened, put

TOKENS = 128
ROW_BYTES = 3_000_000
ROWS_PER_JOB = 5
KEYS = [b"k%d" % number for number in range(11)]


class Engine:
    """A core over an S3 tier that takes `row_s` a row after `latency_s`, where computing one takes 43 ms."""

    def __init__(
        self,
        row_s: float = 0.2,
        latency_s: float = 0.0,
        write: Write = Write.THROUGH,
        rows: int = 64,
        limits: Limits | None = None,
    ) -> None:
        self.row_s, self.latency_s, self.now = row_s, latency_s, 100.0
        specs = [TierSpec("s3", write, physical_slots=False)]
        limits = limits or Limits(wait_s=60.0)
        self.core = TierManager(rows, ROW_BYTES, specs, limits, prefill=PrefillEstimate(3000.0))
        opened(self.core, 0, 1000)
        self.core.events.listed(0, [(slot, key, 0) for slot, key in enumerate(KEYS)], last=True)
        self.tier = self.core.tiers[0]
        for rows_loaded in (1, 5, 1, 5):
            self.tier.loads.record(rows_loaded * ROW_BYTES, self.seconds(rows_loaded), self.now)
        self.now += 100.0

    def seconds(self, rows: int) -> float:
        return self.latency_s + rows * self.row_s

    def decline(self, name: str = "r", keys: Sequence[Key] = KEYS) -> None:
        """A step of a request that computes all of its chain, and stores it."""
        scan = self.core.look_up(name, Chain((Group(keys, TOKENS),)), 0, self.now)
        assert not scan.waits
        assert scan.end == 0
        self.core.prepare_store(name, keys)
        self.core.end_step([name])

    def finish(self, name: str = "r") -> None:
        self.core.complete_store(KEYS, all_good)
        self.core.finish(name)

    def ask(self) -> None:
        """A whole request, before which nothing is in host memory."""
        self.forget()
        self.decline()
        self.now += 0.1
        self.finish()

    def forget(self) -> None:
        self.core.reset(True, self.now)
        self.core.flushed()

    def plan(self) -> list[Job]:
        """The loads that begin now."""
        jobs = self.core.turn(self.now, self.now)
        return [job for job in jobs if job.direction is Direction.LOAD]

    def end(self, job: Job, outcome: Outcome = Outcome.OK) -> None:
        self.now += self.seconds(len(job.moves))
        self.core.events.finished(0, job.id, [outcome] * len(job.moves), self.now)

    def measured(self) -> int:
        """How many rows are loaded now; at once."""
        jobs = self.plan()
        for job in jobs:
            self.end(job)
        return sum(len(job.moves) for job in jobs)


def test_rows_that_the_request_is_storing_are_measured() -> None:
    """It has host rows for them before the supervisor's next turn."""
    engine = Engine()
    engine.ask()
    free = engine.core.host.free
    (job,) = engine.plan()
    assert job.moves[0].row.index not in {row.index for row in engine.core.host.index.values()}
    assert engine.core.host.index[KEYS[0]].source == "cpu"
    expected_s, engine.row_s = engine.tier.loads.seconds(ROW_BYTES), 0.19
    engine.end(job)
    assert engine.tier.loads.seconds(ROW_BYTES) < expected_s
    assert engine.core.host.free == free, "what was loaded is of no other use"


def test_rows_that_the_host_lacks_are_there_after_a_measurement() -> None:
    engine = Engine()
    engine.decline(keys=KEYS[:4])
    engine.core.finish("r")
    engine.core.host.invalidate(engine.core.host.index[KEYS[0]])
    (job,) = engine.plan()
    engine.end(job)
    assert engine.core.where([KEYS[0]])[0] == "cpu"


def test_nothing_is_measured_while_requests_are_alive_but_not_for_long() -> None:
    engine = Engine()
    engine.decline()
    assert engine.plan() == []
    assert engine.core.events.busy, "the supervisor comes back for it"
    engine.now += 0.99
    assert engine.plan() == []
    engine.now += 0.01
    assert engine.measured()


@pytest.mark.parametrize("alive", ["queued", "asking"])
def test_request_that_has_come_meanwhile_is_alive(alive: str) -> None:
    engine = Engine()
    engine.ask()
    if alive == "queued":
        engine.core.arrive("next")
    else:
        engine.core.look_up("next", Chain((Group([b"x"], TOKENS),)), 0, engine.now)
    assert engine.plan() == []
    engine.core.finish("next")
    assert engine.measured()


def test_end_of_a_measurement_is_not_put_off_to_be_applied_with_others() -> None:
    """Else a tier that has become much faster would seem to take a part of what it took before."""
    engine = Engine()
    for _ in range(ENOUGH_SAMPLES):
        engine.tier.members[0].throughput[Direction.LOAD].record(ROW_BYTES, engine.row_s)
    engine.decline()
    engine.now += 0.1
    engine.finish()
    (job,) = engine.plan()
    assert engine.core.events.pause_s == 0
    engine.end(job)


def test_tier_is_measured_once_in_a_while() -> None:
    engine = Engine()
    at: list[float] = []
    for _ in range(100):
        engine.ask()
        if engine.measured():
            at.append(engine.now)
        engine.now += 0.4
    assert len(at) == pytest.approx((at[-1] - at[0]) / 5.5, abs=2)
    assert not engine.measured()
    assert not engine.core.events.busy


def test_few_rows_and_many_are_measured_by_turns() -> None:
    engine = Engine(row_s=0.05)
    sizes = []
    for _ in range(4):
        engine.ask()
        sizes.append(engine.measured())
        engine.now += 10.0
    assert [size >= 4 for size in sizes] == [True, False, True, False]


def test_slow_tier_is_measured_by_single_rows_as_long_as_the_latency_is_known() -> None:
    engine = Engine()
    sizes = []
    for _ in range(60):
        engine.ask()
        sizes.append(engine.measured())
        engine.now += 10.0
    assert set(sizes) == {1, 2}
    assert 3 <= sizes.count(2) <= 12
    assert not engine.tier.loads.one_size or sizes[-1] == 1


def test_different_sizes_tell_the_latency() -> None:
    """All that was seen were single rows, whose latency looked like their bytes'."""
    engine = Engine(row_s=0.08)
    for _ in range(40):
        engine.tier.loads.record(ROW_BYTES, 0.08, engine.now)
    engine.row_s, engine.latency_s, engine.now = 0.03, 0.05, engine.now + 10.0
    engine.ask()
    assert engine.measured() == 3
    assert engine.tier.loads.seconds(11 * ROW_BYTES) == pytest.approx(0.38, rel=0.1)
    engine.forget()
    assert engine.core.look_up("again", Chain((Group(KEYS, TOKENS),)), 0, engine.now).waits


def test_one_request_is_enough_to_find_a_change() -> None:
    engine = Engine()
    engine.row_s = 0.006
    engine.ask()
    assert engine.measured() == 1
    assert engine.plan() == []
    engine.now += 1.0
    assert engine.measured() == 2
    assert engine.tier.loads.seconds(ROW_BYTES) == pytest.approx(0.006, rel=0.1)
    engine.now += 1.0
    assert engine.measured() == 0
    assert not engine.core.events.busy


def test_measurements_that_never_agree_come_to_an_end() -> None:
    engine = Engine()
    engine.ask()
    count = 0
    for number in range(40):
        engine.row_s = (0.03, 2.0)[number % 2]
        count += bool(engine.measured())
        engine.now += 0.5
    assert 2 <= count <= 6
    assert not engine.core.events.busy


def test_measurement_that_fails_is_not_repeated_at_once() -> None:
    engine = Engine()
    engine.ask()
    (job,) = engine.plan()
    engine.end(job, Outcome.FAILED)
    for _ in range(20):
        assert engine.plan() == []
        engine.now += 0.2
    assert engine.core.host.index[KEYS[0]].sealed is False, "the row that the request stored is untouched"
    assert engine.core.where([KEYS[0]])[0] == "cpu"


def test_tier_that_loads_for_requests_meanwhile_is_not_measured() -> None:
    engine = Engine()
    others = [b"x%d" % number for number in range(9)]
    engine.core.events.listed(0, [(20 + slot, key, 0) for slot, key in enumerate(others)], last=True)
    engine.decline()
    engine.row_s = 0.01
    for rows in (1, 5) * 20:
        engine.tier.loads.record(rows * ROW_BYTES, engine.seconds(rows), engine.now)
    assert engine.core.look_up("other", Chain((Group(others, TOKENS),)), 0, engine.now).waits
    jobs = engine.plan()
    assert sum(len(job.moves) for job in jobs) <= len(others)
    engine.now += 1.0
    assert {move.key for job in [*jobs, *engine.plan()] for move in job.moves} <= set(others)
    for job in jobs:
        engine.end(job)
    engine.finish()
    engine.core.finish("other")
    engine.now += 1.0
    assert engine.plan() == []


def test_tier_whose_mover_was_killed_is_not_measured() -> None:
    """Its circuit is probed by itself, and what was declined before says nothing of the next mover."""
    engine = Engine()
    engine.decline()
    engine.core.events.killed(0, engine.now)
    engine.core.events.lost(0, engine.now)
    opened(engine.core, 0, 1000)
    engine.core.events.listed(0, [(slot, key, 0) for slot, key in enumerate(KEYS)], last=True)
    engine.now += 0.5
    assert engine.plan() == []
    assert not inside.measurements(engine.core).to_come


def test_reset_ends_what_is_to_be_measured() -> None:
    engine = Engine()
    engine.decline()
    engine.forget()
    engine.now += 1.0
    assert engine.plan() == []
    assert not engine.core.events.busy


def test_full_host_gives_up_its_coldest_row_for_a_measurement_once_it_is_written() -> None:
    engine = Engine(rows=16)
    put(engine.core, [b"old%d" % number for number in range(5)])
    engine.decline()
    engine.finish()
    assert engine.core.host.free == 0
    for stored in (4, 1):  # a window at a time
        (store,) = engine.core.turn(engine.now, engine.now)
        assert (store.direction, len(store.moves)) == (Direction.STORE, stored)
        assert engine.core.host.free == 0, "nothing is evicted that is still to be written"
        engine.core.events.finished(0, store.id, [Outcome.OK] * stored, engine.now)
    assert engine.measured() == 1
    assert engine.core.host.free == 1
    assert all(key in engine.core.host.index for key in KEYS)


def test_tier_of_large_rows_that_was_never_loaded_from_is_measured_by_one() -> None:
    """It costs nothing, but what is before its rows takes too long to load."""
    specs = [TierSpec(name, Write.THROUGH, physical_slots=name == "file") for name in ("file", "s3")]
    core = TierManager(64, 80_000_000, specs, Limits(wait_s=60.0), prefill=PrefillEstimate(3000.0))
    for number, keys in enumerate([KEYS[:6], KEYS[6:]]):
        opened(core, number, 1000)
        core.events.listed(number, [(slot, key, 0) for slot, key in enumerate(keys)], last=True)
    core.tiers[0].loads.record(80_000_000, 1.0, 0.0)
    assert core.look_up("r", Chain((Group(KEYS, TOKENS),)), 0, 100.0).end == 0
    core.finish("r")
    jobs = core.turn(100.0, 100.0)
    assert [(job.tier, len(job.moves)) for job in jobs] == [(0, 1), (1, 1)]


def test_what_is_not_written_below_is_not_evicted_for_a_measurement() -> None:
    engine = Engine(write=Write.ON_EVICT, rows=16)
    put(engine.core, [b"old%d" % number for number in range(5)])
    engine.decline()
    engine.core.finish("r")
    assert engine.core.host.free == 0
    evictions = engine.core.host.counters.evictions
    engine.now += 1.0
    assert engine.plan() == []
    assert engine.core.host.counters.evictions == evictions


def test_measurement_without_room_is_no_work_that_is_left() -> None:
    """Else the supervisor would take one turn after the other until there is room, or nothing to be measured."""
    engine = Engine(rows=11, limits=Limits(wait_s=60.0, rows_per_slice=1))
    engine.decline()
    engine.now += 1.0
    assert engine.plan() == []
    assert not engine.core.events.unfinished
    engine.finish()
    assert engine.plan()
