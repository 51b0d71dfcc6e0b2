"""Load or recompute: what of a chain is loaded, when a wait ends, and what that does to tiers and their breakers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.base.policies import Prefer, Write
from nixl_tiers.core.chain_rows import Chain, Group
from nixl_tiers.core.lookup import Scan
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.prefill import PrefillEstimate
from nixl_tiers.core.requests import RequestWishes
from nixl_tiers.core.types import Direction, Job, Limits, TierSpec
from tests.support import inside
from tests.support.core import all_good, expire, opened

TOKENS = 16
ROW_BYTES = 1000
KEYS = [b"k%d" % number for number in range(8)]
END = TOKENS * len(KEYS)
FILE, S3 = 0, 1
LIMITS = Limits(
    wait_s=10.0,
    pin_s=30.0,
    soft_deadline_min_s=5.0,
    moves_per_job=4,
    measure_s=10.0,
    measure_share=0.5,
    measure_time=0.1,
)


class Engine:
    """A core over a file tier and an S3 tier, whose movers do what a test says. Computing a chunk takes
    `chunk_s` seconds."""

    def __init__(self, chunk_s: float = 0.1, prefer: Prefer = "latency") -> None:
        specs = [TierSpec("file", Write.THROUGH, True), TierSpec("s3", Write.THROUGH, False)]
        prefill = PrefillEstimate(TOKENS / chunk_s)
        self.core = TierManager(256, ROW_BYTES, specs, LIMITS, prefill=prefill, prefer=prefer)
        for tier in range(2):
            opened(self.core, tier, 1000)
        self.now = 0.0

    def store(self, tier: int, keys: Sequence[Key], row_s: float | None) -> None:
        """The tier holds these, and has loaded rows in `row_s` seconds each before, one job after the other."""
        self.core.events.listed(tier, [(slot, key, 0) for slot, key in enumerate(keys)], last=True)
        loads = [(rows, rows * row_s) for rows in (1, 10) * 20] if row_s is not None else []
        at = self.now - sum(seconds for _, seconds in loads)
        for rows, seconds in loads:
            at += seconds
            self.core.tiers[tier].loads.record(rows * ROW_BYTES, seconds, at)

    def put(self, keys: Sequence[Key]) -> None:
        """Host memory holds these."""
        self.core.prepare_store("put", keys)
        self.core.complete_store(keys, all_good)
        self.core.finish("put")

    def scan(self, name: str = "r", *more: Group, start: int = 0, keys: Sequence[Key] = KEYS) -> Scan:
        scan = self.core.look_up(name, Chain((Group(keys, TOKENS), *more)), start, self.now)
        self.core.end_step()
        return scan

    def queued(self, tier: int) -> list[Key]:
        return [key for keys in self.core.tiers[tier].to_load.values() for key in keys]

    def plan(self) -> list[Job]:
        expire(self.core, self.now)
        return self.core.events.plan(self.now)

    def end(self, job: Job) -> None:
        self.core.events.finished(job.tier, job.id, [Outcome.OK] * len(job.moves), self.now)

    def load_all(self) -> None:
        while jobs := self.plan():
            for job in jobs:
                self.end(job)


def test_rows_queued_ahead_count() -> None:
    engine = Engine()
    engine.store(FILE, KEYS, row_s=0.05)
    others = [b"other%d" % number for number in range(100)]
    engine.store(FILE, [*KEYS, *others], row_s=None)
    assert engine.scan("first") == Scan(True, END)
    engine.core.finish("first")
    engine.plan()
    for number in range(10):
        engine.scan(f"o{number}", keys=others[10 * number : 10 * number + 10])
    assert engine.scan() == Scan(False, 0)


def test_one_slow_copy_at_the_beginning_does_not_have_tiers_declined() -> None:
    """It was the only one: what was declined was not copied, and nothing showed that it had been an accident."""
    engine = Engine()
    engine.store(FILE, KEYS, row_s=0.01)
    inside.copied(engine.core, 1, 0.6, 0.0)
    for number in range(1000):
        name = f"request {number}"
        assert engine.scan(name).waits
        engine.load_all()
        assert engine.scan(name) == Scan(False, END)
        engine.core.prepare_load(name, KEYS, 0.0)
        engine.core.complete_load(name, 0.0)
        inside.copied(engine.core, len(KEYS), 0.001, engine.now)
        engine.core.finish(name)
        engine.core.host.make_room(256)
        engine.now += 3.6


def test_wait_ends_when_computing_is_quicker_and_what_has_come_is_used() -> None:
    engine = Engine(chunk_s=0.5)
    engine.store(FILE, KEYS, row_s=0.1)
    assert engine.scan() == Scan(True, END)
    first, second = engine.plan()
    engine.now = 0.4
    engine.end(first)
    assert engine.scan() == Scan(True, END)
    engine.now = 0.8 + 1.9  # later than expected by less than computing the other half takes
    assert engine.scan() == Scan(True, END)
    engine.now = 0.8 + 2.1
    assert engine.scan() == Scan(False, 4 * TOKENS)
    assert engine.core.tiers[FILE].counters.missed_late == 4
    assert len(engine.core.prepare_load("r", KEYS[:4], 0.0).rows) == 4
    engine.end(second)


def verdicts_on_loads(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What the file tier's circuit is told from now on."""
    verdicts: list[bool] = []
    loads = engine.core.tiers[FILE].members[0].breakers[Direction.LOAD]
    monkeypatch.setattr(loads, "record", lambda good, now: verdicts.append(good))
    return verdicts


def test_wait_that_ends_by_its_price_is_no_failure_of_the_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(chunk_s=0.2)
    engine.store(FILE, KEYS, row_s=0.1)
    verdicts = verdicts_on_loads(engine, monkeypatch)
    assert engine.scan() == Scan(True, END)
    jobs = engine.plan()
    engine.now = 4.0  # the jobs are not late yet
    assert engine.scan() == Scan(False, 0)
    assert verdicts == []
    for job in jobs:
        engine.end(job)
    assert False not in verdicts


@pytest.mark.parametrize(("prefer", "end"), [("latency", 0), ("throughput", END)])
def test_throughput_counts_the_requests_that_wait_while_one_computes(prefer: Prefer, end: int) -> None:
    engine = Engine(prefer=prefer)
    engine.store(FILE, KEYS, row_s=0.15)
    for number in range(4):
        engine.core.look_up(f"other{number}", Chain((Group([b"x"], TOKENS),)), 0, 0.0)
    assert engine.scan() == Scan(end > 0, end)


def test_wait_lasts_longer_while_others_wait_for_their_turn() -> None:
    """To compute instead would hold them up."""
    engine = Engine()  # all of it: 0.8 s
    engine.store(FILE, KEYS, row_s=0.01)
    engine.core.arrive("next")
    assert engine.scan() == Scan(True, END)
    engine.plan()
    engine.now = 0.08 + 1.5
    assert engine.scan() == Scan(True, END)
    engine.now = 0.08 + 1.7
    assert engine.scan() == Scan(False, 0)


def test_load_ends_where_the_windows_of_all_groups_exist() -> None:
    engine = Engine()
    own = [b"w%d" % number for number in range(8)]
    window = Group(own, TOKENS, window=2)
    engine.store(FILE, [*KEYS, *own[2:5], own[7]], row_s=0.01)
    assert engine.scan("r", window) == Scan(True, 5 * TOKENS)
    assert engine.queued(FILE) == KEYS[:5]


def test_load_ends_where_all_full_groups_are() -> None:
    engine = Engine()
    coarse = Group([b"c%d" % number for number in range(4)], 2 * TOKENS)
    engine.store(FILE, [*KEYS, *coarse.keys[:3]], row_s=0.01)
    assert engine.scan("r", coarse) == Scan(True, 6 * TOKENS)
    assert set(engine.queued(FILE)) == {*KEYS[:6], *coarse.keys[:3]}
    engine.load_all()
    assert engine.scan("r", coarse) == Scan(False, 6 * TOKENS)


def test_part_that_the_engine_has_is_neither_loaded_nor_computed() -> None:
    engine = Engine()
    engine.store(FILE, KEYS, row_s=0.01)
    assert engine.scan(start=6 * TOKENS) == Scan(True, END)
    assert engine.queued(FILE) == KEYS[6:]


def test_request_that_may_not_use_a_tier_computes_what_only_that_has() -> None:
    engine = Engine()
    engine.store(FILE, KEYS[:4], row_s=0.01)
    engine.store(S3, KEYS[4:], row_s=0.01)
    engine.core.arrive("r", RequestWishes(allowed=frozenset([FILE])))
    assert engine.scan() == Scan(True, 4 * TOKENS)
