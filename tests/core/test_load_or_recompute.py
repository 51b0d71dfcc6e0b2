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
from tests.support.core import all_good, expire, look_up_key, opened

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

    def __init__(
        self,
        chunk_s: float | None = 0.1,
        prefer: Prefer = "latency",
        limits: Limits = LIMITS,
        prefill: PrefillEstimate | None = None,
    ) -> None:
        """`prefill`: instead of `chunk_s`."""
        specs = [TierSpec("file", Write.THROUGH, True), TierSpec("s3", Write.THROUGH, False)]
        prefill = prefill or PrefillEstimate(None if chunk_s is None else TOKENS / chunk_s)
        self.core = TierManager(256, ROW_BYTES, specs, limits, prefill=prefill, prefer=prefer)
        for tier in range(2):
            opened(self.core, tier, 1000)
        self.now = 0.0

    def store(self, tier: int, keys: Sequence[Key], row_s: float | None, latency_s: float = 0.0) -> None:
        """The tier holds these, and has loaded rows in `row_s` seconds each before, after `latency_s`."""
        self.core.events.listed(tier, [(slot, key, 0) for slot, key in enumerate(keys)], last=True)
        if row_s is not None:
            self.speed(tier, row_s, latency_s)

    def speed(self, tier: int, row_s: float, latency_s: float = 0.0) -> None:
        """The tier's last loads, one after the other, were like that."""
        loads = [(rows * ROW_BYTES, latency_s + rows * row_s) for rows in (1, 10) * 20]
        at = self.now - sum(seconds for _, seconds in loads)
        for nbytes, seconds in loads:
            at += seconds
            self.core.tiers[tier].loads.record(nbytes, seconds, at)

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


def test_chain_that_loads_sooner_than_it_computes_is_loaded() -> None:
    engine = Engine()
    engine.store(FILE, KEYS, row_s=0.01)
    assert engine.scan() == Scan(True, END)
    engine.load_all()
    assert engine.scan() == Scan(False, END)
    assert engine.core.prepare_load("r", KEYS, 0.0).rows


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


def test_row_that_another_request_is_loading_is_waited_for_and_not_asked_for_again() -> None:
    engine = Engine()
    engine.store(FILE, KEYS, row_s=0.01)
    assert engine.scan("other", keys=KEYS[:4]) == Scan(True, 4 * TOKENS)
    jobs = engine.plan()
    assert engine.scan() == Scan(True, END)
    assert engine.queued(FILE) == KEYS[4:]
    for job in jobs:
        engine.end(job)
    engine.load_all()
    assert engine.scan() == Scan(False, END)


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


def test_copy_that_is_reported_late_does_not_count_but_a_quicker_one_does() -> None:
    engine = Engine()
    engine.store(FILE, KEYS, row_s=0.01)
    inside.copied(engine.core, 1, 5.0, 0.0, at_most=True)
    assert engine.scan("first") == Scan(True, END), "nothing is known yet"
    for second in range(10):
        inside.copied(engine.core, 1, 0.05, second)
        inside.copied(engine.core, 1, 5.0, second, at_most=True)
    engine.now = 10.0
    assert engine.scan("second") == Scan(True, END)
    for second in range(10, 20):
        inside.copied(engine.core, 1, 0.2, second)
    engine.now = 20.0
    assert engine.scan("third") == Scan(False, 0)
    for second in range(20, 30):
        inside.copied(engine.core, 1, 0.001, second, at_most=True)
    assert engine.scan("fourth") == Scan(True, END)


def test_choice_is_kept_while_the_request_waits() -> None:
    engine = Engine()
    engine.store(FILE, KEYS[:4], row_s=0.01)
    engine.store(S3, KEYS[4:], row_s=0.5)
    assert engine.scan() == Scan(True, 4 * TOKENS)
    engine.speed(S3, row_s=0.001)
    assert engine.scan() == Scan(True, 4 * TOKENS)
    engine.load_all()
    assert engine.scan() == Scan(False, 4 * TOKENS)
    assert engine.queued(S3) == []


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


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.MISSING, Outcome.FAILED])
def test_wait_is_judged_at_once_when_a_row_will_not_come_or_all_have(outcome: Outcome) -> None:
    engine = Engine(chunk_s=5.0)
    engine.store(FILE, KEYS, row_s=0.01)
    for _ in range(2):
        assert engine.scan() == Scan(True, END)
    first, second = engine.plan()
    engine.end(first)
    assert inside.rests(engine.core, "r", 0.0), "the others are on their way"
    engine.core.events.finished(second.tier, second.id, [outcome, *[Outcome.OK] * 3], 0.0)
    engine.plan()
    assert not inside.rests(engine.core, "r", 0.0)


def test_request_that_was_released_preempted_or_reset_is_scanned_anew() -> None:
    for change in (
        lambda core: core.end_step(preempted=["r"]),
        lambda core: core.finish("r"),
        lambda core: core.reset(keep_tiers=True),
        lambda core: core.complete_load("r", 0.0, failed=True),
    ):
        engine = Engine(chunk_s=5.0)
        engine.store(FILE, KEYS, row_s=0.01)
        for _ in range(2):
            assert engine.scan() == Scan(True, END)
        assert inside.rests(engine.core, "r", 0.0)
        change(engine.core)
        assert not inside.rests(engine.core, "r", 0.0)


def test_request_that_computes_after_all_keeps_no_rows_and_has_none_promoted() -> None:
    """The engine's own cache has what it waited for, as another request with the same prompt has computed it."""
    engine = Engine()
    engine.store(FILE, KEYS, row_s=0.01)
    assert engine.scan() == Scan(True, END)
    first, second = engine.plan()
    engine.end(first)
    assert engine.scan(start=END - TOKENS).waits
    engine.core.end_step(began=["r"])
    engine.end(second)
    engine.load_all()
    assert not engine.core.events.busy
    assert not inside.pinned(engine.core)


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


def test_wait_that_lasts_as_long_as_it_may_is_a_failure_of_the_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though none of its jobs is known to be late."""
    engine = Engine(chunk_s=1000.0)
    engine.store(FILE, KEYS, row_s=0.1)
    verdicts = verdicts_on_loads(engine, monkeypatch)
    engine.scan()
    assert engine.plan()
    engine.now = LIMITS.wait_s + 0.1
    assert engine.scan() == Scan(False, 0)
    assert verdicts == [False]


def test_without_a_prefill_estimate_all_is_loaded() -> None:
    engine = Engine(chunk_s=None)
    engine.store(FILE, KEYS[:4], row_s=0.01)
    engine.store(S3, KEYS[4:], row_s=1.0)
    assert engine.scan() == Scan(True, END)
    engine.now = 9.9
    assert engine.scan() == Scan(True, END)
    engine.now = 10.1
    assert engine.scan() == Scan(False, 0)


@pytest.mark.parametrize("shared", [True, False])
def test_jobs_that_start_together_show_what_all_of_them_take(shared: bool) -> None:
    """40 rows are three jobs. Over S3 they share the connection, and even the first to end has taken as long as all."""
    core = TierManager(1024, 10**6, [TierSpec("s3", Write.THROUGH, False)])
    opened(core, 0, 1000)
    keys = [b"%d" % number for number in range(500)]
    core.events.listed(0, [(slot, key, 0) for slot, key in enumerate(keys)], last=True)
    now = 0.0
    for rows in (40, 8, 40, 8, 40):
        core.look_up(f"r{now}", Chain((Group(keys[:rows], TOKENS),)), 0, now)
        core.end_step()
        jobs = core.events.plan(now)
        moved = 0
        for job in jobs:
            moved += len(job.moves)
            end_s = now + 0.005 + 0.03 * (rows if shared else moved)
            core.events.finished(0, job.id, [Outcome.OK] * len(job.moves), end_s)
        assert moved == rows
        core.finish(f"r{now}")
        core.reset(True)
        core.flushed()
        now += 10.0
    loads = core.tiers[0].loads
    assert loads.seconds(40 * 10**6) == pytest.approx(1.205, rel=0.02)
    assert loads.seconds(8 * 10**6) == pytest.approx(0.245, rel=0.02)
    assert loads.seconds(10**6) == pytest.approx(0.035, rel=0.2)


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


def test_rows_of_windowed_groups_take_time_too() -> None:
    engine = Engine()
    own = [b"w%d" % number for number in range(8)]
    engine.store(FILE, [*KEYS, *own], row_s=0.09)
    assert engine.scan("all of them full") == Scan(True, END)
    engine.core.finish("all of them full")
    engine.load_all()
    assert engine.scan("r", Group(own, TOKENS, window=2)) == Scan(False, 0)


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


def test_a_wait_of_which_keys_behind_it_are_asked_for_goes_on() -> None:
    """As an engine does that drops the last block of a hit: the key behind it is looked up too, and is there."""
    engine = Engine()
    engine.put([b"tail"])
    engine.store(FILE, KEYS, row_s=0.01)
    for tail in (False, True, False, True, False):
        assert engine.core.look_up("r", Chain((Group(KEYS, TOKENS),)), 0, engine.now).waits
        if tail:
            look_up_key(engine.core, b"tail", "r", END + 3, engine.now, check=False)
        engine.core.end_step()
        engine.now += 0.001
        engine.plan()
