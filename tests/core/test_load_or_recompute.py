"""Load or recompute: what of a chain is loaded, when a wait ends, and what that does to tiers and their breakers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.base.policies import Prefer, Write
from nixl_tiers.core import pricing
from nixl_tiers.core.chain_rows import Chain, Group
from nixl_tiers.core.lookup import Lookup, Scan
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.prefill import PrefillEstimate
from nixl_tiers.core.pricing import HOST, Run, TierPrice, choose
from nixl_tiers.core.requests import RequestWishes
from nixl_tiers.core.types import BreakerState, Direction, Job, Limits, TierSpec
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


def test_chain_that_computes_sooner_than_it_loads_is_computed() -> None:
    engine = Engine()
    engine.store(FILE, KEYS, row_s=0.5)
    assert engine.scan() == Scan(False, 0)
    assert engine.queued(FILE) == []
    assert engine.core.tiers[FILE].counters.missed_slower == len(KEYS)


def a_step_takes(step_s: float, token_s: float) -> PrefillEstimate:
    """The estimate of an engine whose steps took that long, and so much longer for each token."""
    prefill = PrefillEstimate()
    prefill.restore([(tokens, tokens / 2, step_s + token_s * tokens) for tokens in (1, 16, 64, 256, 1024)])
    return prefill


def test_step_that_is_needed_anyway_is_no_reason_to_load() -> None:
    """The engine computes the token behind the chain in any case: what computing the chain takes is its tokens."""
    engine = Engine(prefill=a_step_takes(1.0, 0.001))  # a whole hit still takes 1 s, and the chain 0.13 s more
    engine.store(FILE, KEYS, row_s=0.05)  # 0.4 s
    assert engine.scan() == Scan(False, 0)


def test_wait_is_not_longer_because_of_a_step_that_is_needed_anyway() -> None:
    engine = Engine(prefill=a_step_takes(1.0, 0.005))  # the chain: 0.64 s
    engine.store(FILE, KEYS, row_s=0.05)  # 0.4 s
    assert engine.scan() == Scan(True, END)
    engine.plan()
    engine.now = 0.4 + 0.6
    assert engine.scan() == Scan(True, END)
    engine.now = 0.4 + 0.7
    assert engine.scan() == Scan(False, 0)


def test_latency_counts_for_short_chains_only() -> None:
    engine = Engine()
    engine.store(FILE, KEYS, row_s=0.01, latency_s=0.4)
    assert engine.scan("short", keys=KEYS[:2]) == Scan(False, 0)
    assert engine.scan("long") == Scan(True, END)


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


def test_what_a_fast_tier_has_is_loaded_and_what_only_a_slow_one_has_is_computed() -> None:
    engine = Engine()
    engine.store(FILE, KEYS[:4], row_s=0.01)
    engine.store(S3, KEYS[4:], row_s=0.5)
    assert engine.scan() == Scan(True, 4 * TOKENS)
    assert (engine.queued(FILE), engine.queued(S3)) == (KEYS[:4], [])
    assert engine.core.tiers[S3].counters.missed_slower == 4
    assert engine.core.tiers[FILE].counters.missed_slower == 0


def test_slow_tier_loads_while_a_fast_one_does() -> None:
    """Each of the slow tier's rows takes longer than to compute it, but two of them come while the others do."""
    engine = Engine()
    engine.store(FILE, KEYS[:4], row_s=0.08)
    engine.store(S3, KEYS[4:], row_s=0.15)
    assert engine.scan() == Scan(True, 6 * TOKENS)
    assert engine.queued(S3) == KEYS[4:6]


def test_rows_in_host_memory_are_always_loaded() -> None:
    engine = Engine()
    engine.put(KEYS[:4])
    engine.store(S3, KEYS[4:], row_s=5.0)
    inside.copied(engine.core, 1, 5.0, 0.0)
    assert engine.scan() == Scan(False, 4 * TOKENS)


def test_row_that_a_slow_tier_is_loading_is_not_there_yet() -> None:
    """For another request, or for a measurement: it may take longer to come than to compute."""
    engine = Engine()
    engine.store(S3, KEYS, row_s=None)
    assert engine.scan("other", keys=KEYS[:2]) == Scan(True, 2 * TOKENS)
    engine.plan()
    engine.speed(S3, row_s=5.0)
    assert engine.scan() == Scan(False, 0)
    assert engine.queued(S3) == []


def test_rows_that_are_not_waited_for_do_not_end_a_wait() -> None:
    """The host's rows are being written, and what of the chain a slow tier has is computed: others may load that."""
    engine = Engine()
    engine.core.prepare_store("writer", KEYS[:4])
    engine.store(FILE, KEYS[4:], row_s=5.0)
    assert engine.scan("other", keys=KEYS[4:]) == Scan(False, 0)
    engine.core.tiers[FILE].queue_loads(inside.requests(engine.core).get("other"), KEYS[5:6])
    for _ in range(2):
        assert engine.scan() == Scan(True, 4 * TOKENS)
    engine.now = 0.1
    assert engine.scan() == Scan(True, 4 * TOKENS)


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


def copies_take(engine: Engine, row_s: float, times: int = 3) -> None:
    """So many copies of a row to the engine, one after the other, took so long."""
    for _ in range(times):
        engine.now += row_s
        inside.copied(engine.core, 1, row_s, engine.now)


def test_copy_to_the_engine_counts() -> None:
    engine = Engine()
    engine.store(FILE, KEYS, row_s=0.01)
    copies_take(engine, 0.2)
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


def test_copies_that_were_slow_are_tried_again_now_and_then() -> None:
    engine = Engine()
    engine.store(FILE, KEYS, row_s=0.01)
    copies_take(engine, 0.6)
    loads = [0.0]
    for number in range(1000):
        if engine.scan(f"request {number}").waits:
            loads.append(engine.now)
            engine.load_all()
            copies_take(engine, 0.6, times=1)
        engine.core.finish(f"request {number}")
        engine.core.host.make_room(256)
        engine.now += 3.6
    assert all(40 < after - before < 120 for before, after in pairwise(loads)), "they still are"
    assert len(loads) > 30
    copies_take(engine, 0.001)
    assert engine.scan().waits


def test_copy_that_is_reported_late_does_not_make_slow_ones_last() -> None:
    """An engine that computes all the time reports all of them late."""
    engine = Engine()
    engine.store(FILE, KEYS, row_s=0.01)
    copies_take(engine, 0.6)
    assert not engine.scan("first").waits
    for _ in range(300):
        engine.now += 1.0
        inside.copied(engine.core, 1, 0.4, engine.now, at_most=True)
    assert engine.scan("second").waits


def test_copy_of_no_rows_says_nothing() -> None:
    engine = Engine()
    engine.store(FILE, KEYS, row_s=0.01)
    inside.copied(engine.core, 0, 0.2, 0.0)
    copies_take(engine, 0.2)
    assert engine.scan() == Scan(False, 0)


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


def test_choice_is_kept_by_a_request_that_is_not_scheduled_at_once() -> None:
    engine = Engine()
    engine.store(S3, KEYS, row_s=0.5)
    assert engine.scan() == Scan(False, 0)
    engine.speed(S3, row_s=0.001)
    assert engine.scan() == Scan(False, 0)
    assert engine.scan("other") == Scan(True, END)


def test_preempted_request_is_weighed_anew() -> None:
    """What it computed is in host memory."""
    engine = Engine()
    engine.store(S3, KEYS, row_s=0.5)
    assert engine.scan() == Scan(False, 0)
    engine.put(KEYS)
    engine.core.end_step(preempted=["r"])
    assert engine.scan() == Scan(False, END)


def test_hits_of_a_request_that_was_not_scheduled_for_long_are_kept_for_their_load() -> None:
    engine = Engine()
    engine.store(FILE, KEYS, row_s=0.01)
    assert engine.scan() == Scan(True, END)
    engine.load_all()
    engine.now += LIMITS.pin_s - 1.0
    chain = Chain((Group(KEYS, TOKENS),))
    assert engine.core.look_up("r", chain, 0, engine.now) == Scan(False, END)
    engine.now += LIMITS.wait_s + 2.0  # its pins end within the step
    expire(engine.core, engine.now)
    engine.put([b"other%d" % number for number in range(256)])
    assert engine.core.prepare_load("r", KEYS, 0.0).rows


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


def test_wait_ends_when_the_tier_turns_out_to_be_slower() -> None:
    """The request's rows are not late yet, but others' show that they are going to be."""
    engine = Engine(chunk_s=0.5)
    engine.store(FILE, KEYS, row_s=0.1)
    assert engine.scan() == Scan(True, END)
    engine.speed(FILE, row_s=1.0)
    engine.now = 0.2
    assert engine.scan() == Scan(False, 0)


def test_wait_is_judged_again_when_an_eighth_of_what_it_may_last_is_over() -> None:
    engine = Engine(chunk_s=0.02)  # all of it: 0.16 s
    engine.store(FILE, KEYS, row_s=0.01)  # 0.08 s
    assert engine.scan() == Scan(True, END)
    assert not inside.rests(engine.core, "r", engine.now), "it was not judged yet"
    assert engine.scan() == Scan(True, END)
    assert inside.rests(engine.core, "r", 0.009)
    assert not inside.rests(engine.core, "r", 0.011)


def test_wait_that_may_last_long_is_judged_again_soon() -> None:
    """What it is judged by may change: the speed of the tier or of prefill, or the queue of requests."""
    engine = Engine(chunk_s=5.0)
    engine.store(FILE, KEYS, row_s=0.01)
    for _ in range(2):
        assert engine.scan() == Scan(True, END)
    assert inside.rests(engine.core, "r", 0.04)
    assert not inside.rests(engine.core, "r", 0.06)


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


def test_wait_with_a_windowed_group_is_judged_at_every_step() -> None:
    """Its keys are looked up one by one after the scan, and belong to the same step."""
    engine = Engine(chunk_s=5.0)
    window = Group([b"w%d" % number for number in range(len(KEYS))], TOKENS, window=2)
    engine.store(FILE, [*KEYS, *window.keys], row_s=0.01)
    for _ in range(2):
        assert engine.scan("r", window).waits
    assert not inside.rests(engine.core, "r", 0.0)


def test_wait_goes_on_while_little_is_left() -> None:
    """The last row is late, and to compute it would take less than loading all did: but it is due at any moment."""
    engine = Engine(chunk_s=0.2, limits=Limits(wait_s=10.0, moves_per_job=7))
    engine.store(FILE, KEYS, row_s=0.1, latency_s=0.15)
    assert engine.scan() == Scan(True, END)
    engine.now = 0.9
    engine.end(engine.plan()[0])
    assert engine.scan() == Scan(True, END)


def test_queued_rows_of_a_request_that_ended_its_wait_are_not_promoted() -> None:
    engine = Engine(chunk_s=0.2)
    engine.store(FILE, KEYS, row_s=0.1)
    engine.scan()
    assert engine.queued(FILE) == KEYS
    engine.now = 5.0
    assert engine.scan() == Scan(False, 0)
    assert engine.plan() == []
    assert engine.queued(FILE) == []


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


def test_seconds_that_were_waited_for_nothing_are_counted() -> None:
    engine = Engine(chunk_s=0.2)
    engine.store(FILE, KEYS, row_s=0.1)
    lost = engine.core.tiers[FILE].counters
    engine.scan()
    engine.now = 4.0
    assert engine.scan() == Scan(False, 0)
    engine.core.finish("r")
    assert lost.lost_vain_s == pytest.approx(4.0)
    engine.scan("another")
    engine.load_all()
    engine.now += 1.0
    assert engine.scan("another") == Scan(False, END)
    engine.core.prepare_load("another", KEYS, 0.0)
    engine.core.finish("another")
    assert lost.lost_vain_s == pytest.approx(4.0), "that wait has brought something"


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


def test_tier_that_hangs_is_found_although_no_request_waits_for_it() -> None:
    engine = Engine(chunk_s=0.2)
    engine.store(FILE, KEYS, row_s=0.1)
    for number in range(20):
        engine.scan(f"r{number}", keys=KEYS[number % 8 :])
        engine.plan()
        engine.now += 4.0
        engine.scan(f"r{number}", keys=KEYS[number % 8 :])
        engine.core.finish(f"r{number}")
        if engine.core.tiers[FILE].circuit is not BreakerState.CLOSED or engine.core.health.overdue(engine.now):
            return
    pytest.fail("the tier is still in use")


def test_no_wait_is_longer_than_wait_s() -> None:
    engine = Engine(chunk_s=1000.0)
    engine.store(FILE, KEYS, row_s=0.1)
    engine.scan()
    engine.now = 9.9
    assert engine.scan() == Scan(True, END)
    engine.now = 10.1
    assert engine.scan() == Scan(False, 0)


def test_load_that_takes_longer_than_wait_s_is_cut_there() -> None:
    for chunk_s in (1000.0, None):
        engine = Engine(chunk_s)
        engine.store(FILE, KEYS, row_s=3.0)
        assert engine.scan() == Scan(True, 3 * TOKENS)


def test_without_a_prefill_estimate_all_is_loaded() -> None:
    engine = Engine(chunk_s=None)
    engine.store(FILE, KEYS[:4], row_s=0.01)
    engine.store(S3, KEYS[4:], row_s=1.0)
    assert engine.scan() == Scan(True, END)
    engine.now = 9.9
    assert engine.scan() == Scan(True, END)
    engine.now = 10.1
    assert engine.scan() == Scan(False, 0)


def test_tier_that_was_never_measured_is_tried_for_as_long_as_computing_takes() -> None:
    engine = Engine(chunk_s=0.1)
    engine.store(FILE, KEYS, row_s=None)
    assert engine.scan() == Scan(True, END)
    engine.now = 0.7
    assert engine.scan() == Scan(True, END)
    engine.now = 0.9
    assert engine.scan() == Scan(False, 0)


def test_slow_tier_is_measured_again_and_no_request_waits_for_that() -> None:
    engine = Engine()
    engine.store(FILE, KEYS, row_s=0.5)
    assert engine.scan() == Scan(False, 0)
    engine.now = 11.0
    assert engine.scan("second") == Scan(False, 0)
    assert engine.scan("third") == Scan(False, 0)
    assert engine.plan() == [], "it would take something from the requests that are alive"
    engine.now += 1.0
    (job,) = engine.plan()
    assert [move.key for move in job.moves] == KEYS[:2]
    engine.now += 0.02
    engine.end(job)
    engine.core.finish("second")
    assert engine.scan("fourth").end >= 2 * TOKENS, "the rows are there"
    assert engine.core.host.make_room(256) != [], "nothing pins them"


class Medium:
    """An engine whose file tier does its jobs one after the other, in virtual time: 16 rows of 1 MB a request, one
    request every two seconds, which computes in 0.8 s."""

    ROWS = 16

    def __init__(self, bytes_per_s: float, latency_s: float = 0.005) -> None:
        self.bytes_per_s, self.latency_s = bytes_per_s, latency_s
        prefill = PrefillEstimate(self.ROWS * TOKENS / 0.8)
        self.core = TierManager(64, 10**6, [TierSpec("file", Write.THROUGH, True)], prefill=prefill)
        opened(self.core, 0, 10000)
        self.keys = [b"m%d" % number for number in range(8000)]
        self.core.events.listed(0, [(slot, key, 0) for slot, key in enumerate(self.keys)], last=True)
        self.now = self.free_s = self.busy_s = 0.0
        self.asked = 0
        self.jobs: list[tuple[float, Job]] = []

    def request(self) -> bool:
        """The next request, and what follows up to the one after it; whether it loads."""
        self.asked += 1
        first = self.ROWS * self.asked % len(self.keys)
        chain, name = Chain((Group(self.keys[first : first + self.ROWS], TOKENS),)), f"m{self.asked}"
        end_s = self.now + 2.0
        scan = self.core.look_up(name, chain, 0, self.now)
        loads = scan.waits
        self.core.end_step()
        while self.now < end_s:
            self.turn()
            self.now += 0.02
            if scan.waits:
                scan = self.core.look_up(name, chain, 0, self.now)
                self.core.end_step()
        self.core.finish(name)
        return loads

    def turn(self) -> None:
        expire(self.core, self.now)
        for job in self.core.events.plan(self.now):
            seconds = len(job.moves) * 1e6 / self.bytes_per_s
            self.free_s = max(self.free_s, self.now) + seconds
            self.busy_s += seconds
            self.jobs.append((self.free_s + self.latency_s, job))
        while self.jobs and self.jobs[0][0] <= self.now:
            at_s, job = self.jobs.pop(0)
            self.core.events.finished(0, job.id, [Outcome.OK] * len(job.moves), at_s)


def test_tier_that_was_slow_for_long_and_has_become_fast_is_loaded_from_again() -> None:
    medium = Medium(bytes_per_s=15e6)
    answers = [medium.request() for _ in range(100)]
    assert answers.count(True) <= 2, "loading takes longer than computing"
    medium.bytes_per_s = 2e9
    answers = [medium.request() for _ in range(20)]
    assert answers.index(True) <= 6, "within 12 s"
    assert all(answers[6:])


def test_tier_that_was_fast_for_long_and_has_become_slow_is_not_waited_for() -> None:
    medium = Medium(bytes_per_s=2e9)
    assert all(medium.request() for _ in range(100))
    medium.bytes_per_s = 15e6
    answers = [medium.request() for _ in range(20)]
    assert answers.index(False) <= 4, "within 8 s"
    assert answers[5:].count(True) <= 1


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


def test_tier_is_not_measured_while_it_loads_for_requests() -> None:
    """Beside others a row takes longer, and what the tier does is measured by those."""
    engine = Engine()
    engine.store(FILE, KEYS[:2], row_s=None)
    assert engine.scan("first", keys=KEYS[:2]) == Scan(True, 2 * TOKENS)
    (job,) = engine.plan()
    engine.store(FILE, KEYS, row_s=0.5)
    engine.now = 11.0
    assert engine.scan("second", keys=KEYS[2:]) == Scan(False, 0)
    engine.now = 12.0
    assert engine.plan() == []
    engine.end(job)
    assert engine.plan() == []
    engine.speed(FILE, row_s=0.5)
    engine.now = 22.0
    assert engine.scan("third", keys=KEYS[2:]) == Scan(False, 0)
    engine.now = 23.0
    assert engine.plan() != []


def test_measuring_a_slow_tier_takes_little_of_its_time() -> None:
    for bytes_per_s, share in ((15e6, 0.025), (1e6, 0.05)):
        medium = Medium(bytes_per_s)
        for _ in range(30):
            medium.request()
        before_s, medium.busy_s = medium.now, 0.0
        assert not any(medium.request() for _ in range(100))
        assert 0 < medium.busy_s / (medium.now - before_s) <= share


@pytest.mark.parametrize(("prefer", "end"), [("latency", 0), ("throughput", END)])
def test_throughput_counts_the_requests_that_wait_while_one_computes(prefer: Prefer, end: int) -> None:
    engine = Engine(prefer=prefer)
    engine.store(FILE, KEYS, row_s=0.15)
    for number in range(4):
        engine.core.look_up(f"other{number}", Chain((Group([b"x"], TOKENS),)), 0, 0.0)
    assert engine.scan() == Scan(end > 0, end)


def test_requests_whose_turn_is_still_to_come_are_counted_while_one_computes() -> None:
    engine = Engine()
    engine.store(FILE, KEYS, row_s=0.15)
    assert engine.scan("alone") == Scan(False, 0)
    engine.core.arrive("next")
    assert engine.scan("first") == Scan(True, END)
    engine.core.finish("first")
    engine.core.end_step(began=["next"])
    assert engine.scan("second") == Scan(False, 0)


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


def test_requests_that_wait_for_storage_lose_nothing_while_another_computes() -> None:
    engine = Engine()
    engine.store(FILE, [*KEYS, b"x"], row_s=0.02)
    for number in range(4):
        assert engine.scan(f"other{number}", keys=[b"x"]).waits
    engine.plan()
    engine.speed(FILE, row_s=0.15)
    assert engine.scan() == Scan(False, 0)


def test_prefetch_is_no_request_that_waits() -> None:
    engine = Engine()
    engine.store(FILE, KEYS, row_s=0.15)
    engine.core.prefetch([b"x"])
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


def test_store_without_an_engine_never_prices() -> None:
    engine = Engine(chunk_s=0.0001)
    engine.store(FILE, KEYS, row_s=1.0)
    for engine.now in (0.0, 9.9):
        assert look_up_key(engine.core, KEYS[0], "call", None, engine.now) is Lookup.PENDING
        engine.core.end_step()


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


SECONDS = st.floats(0.0, 2.0)
PRICES = st.builds(TierPrice, SECONDS, st.floats(0.001, 1.0), st.integers(0, 20))


@given(
    runs=st.lists(st.builds(Run, st.integers(HOST, 1), st.integers(1, 6)), max_size=6),
    prices=st.tuples(PRICES, PRICES),
    token_s=st.floats(0.0, 0.1),
    context_s=st.floats(0.0, 0.001),
    most_s=st.floats(0.1, 20.0),
)
def test_choice_is_the_best_of_all_ends(
    runs: list[Run], prices: tuple[TierPrice, TierPrice], token_s: float, context_s: float, most_s: float
) -> None:
    """Against all ends one by one."""
    chain = pricing.Chain(0, TOKENS, 1)
    sources = [run.source for run in runs for _ in range(run.steps)]
    tokens = TOKENS * len(sources)

    def compute_s(at: int) -> float:
        return (tokens - at) * (token_s + context_s * (at + tokens) / 2)

    def wait_s(steps: int) -> float:
        return max(price.seconds(sources[:steps].count(tier)) for tier, price in enumerate(prices))

    choice = choose(runs, chain, prices, compute_s, copy=TierPrice(0.0, 0.0, 0), most_s=most_s)
    first = next((step for step, source in enumerate(sources) if source != HOST), len(sources))
    ends = [steps for steps in range(first, len(sources) + 1) if steps == first or wait_s(steps) <= most_s]
    best_s = min(wait_s(steps) + compute_s(TOKENS * steps) for steps in ends)
    mine = choice.end // TOKENS
    assert mine in ends
    # What a tier has loaded before another begins to count is a whole number of rows: one row more or less.
    slack_s = max(price.row_s for price in prices) + TOKENS * (token_s + context_s * tokens)
    assert wait_s(mine) + compute_s(choice.end) <= best_s + slack_s + 1e-9


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
