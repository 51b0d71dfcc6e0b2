"""Existence checks: when they are sent, which requests wait for them, and for how long."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import pytest

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.base.policies import Write
from nixl_tiers.core.chain_rows import Chain, Group
from nixl_tiers.core.existence import ExistenceCheck
from nixl_tiers.core.lookup import Lookup
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.requests import RequestWishes
from nixl_tiers.core.types import Direction, Limits, TierSpec
from tests.support import inside
from tests.support.core import expire, look_up_key, opened, put, rows_of

CHAIN = [b"k%d" % i for i in range(8)]
LIMITS = Limits(
    check_timeout_s=0.25,
    max_checks=2,
    distant_checks=2,
    keys_per_check=5,
    absent_s=30.0,
    absent_keys=3,
    retry_s=5.0,
    hard_deadline_min_s=20.0,
)
HIT, PENDING, MISS = Lookup.HIT, Lookup.PENDING, Lookup.MISS


class CheckedCore:
    """A manager over one shared tier, whose mover answers when a test calls `answer`."""

    def __init__(self, shared: bool = True, limits: Limits = LIMITS) -> None:
        specs = [TierSpec("s3", Write.THROUGH, physical_slots=False, asked=shared)]
        self.core = TierManager(64, 4096, specs, limits)
        opened(self.core, 0, 100)
        self.core.events.listed(0, [], last=True)
        self.now = 0.0

    def scan(self, name: str, keys: Sequence[bytes] = CHAIN) -> list[Lookup]:
        """One step's look-ups of a full-attention group, which stop at the first miss."""
        answers: list[Lookup] = []
        for position, key in enumerate(keys):
            answers.append(look_up_key(self.core, key, name, position, self.now))
            if answers[-1] is MISS:
                break
        self.core.end_step()
        return answers

    def each(self, name: str, keys: Sequence[bytes]) -> list[Lookup]:
        answers = [look_up_key(self.core, key, name, None, self.now) for key in keys]
        self.core.end_step()
        return answers

    def asked(self) -> list[ExistenceCheck]:
        expire(self.core, self.now)
        return self.core.events.plan_checks(self.now)

    def answer(self, probe: ExistenceCheck, found: int) -> None:
        """The first `found` keys are there, the next one is not."""
        self.core.events.listed(0, [(0, key, 0) for key in probe.keys[:found]], last=False)
        self.core.events.existence_checked(0, probe.id, probe.keys[found : found + 1], self.now)

    @property
    def loading(self) -> list[bytes]:
        return [move.key for job in self.core.events.plan(self.now) for move in job.moves]


@pytest.fixture
def core() -> CheckedCore:
    return CheckedCore()


def test_unknown_prompt_costs_one_check_of_one_key(core: CheckedCore) -> None:
    assert core.scan("r") == [PENDING, MISS]
    (probe,) = core.asked()
    assert (probe.keys, probe.chain) == (CHAIN[:1], True)
    assert core.scan("r") == [PENDING, MISS], "not answered yet"
    assert core.core.events.busy, "an answer may be late"
    core.answer(probe, 0)
    assert core.scan("r") == [MISS]
    assert core.scan("r") == [MISS]
    assert core.asked() == []
    assert not core.core.events.busy


def test_existing_chain_is_checked_at_once_and_promoted(core: CheckedCore) -> None:
    core.scan("r")
    (first,) = core.asked()
    core.answer(first, 1)
    assert core.scan("r") == [PENDING] * 6 + [MISS], "the known key, and as many as one probe takes"
    (second,) = core.asked()
    assert (second.keys, second.chain) == (CHAIN[1:6], True)
    core.answer(second, 5)
    assert core.scan("r") == [PENDING] * 8
    (third,) = core.asked()
    assert third.keys == CHAIN[6:]
    core.answer(third, 1)
    assert core.scan("r") == [PENDING] * 7 + [MISS]
    assert core.loading == CHAIN[:6], "in order, and as many as its window takes"
    assert core.asked() == []


def test_negative_cache_is_bounded(core: CheckedCore) -> None:
    for number in range(5):
        core.scan(f"r{number}", [b"x%d" % number])
        core.answer(core.asked()[0], 0)
    assert len(core.core.checks.tiers[0].absent) == 3
    assert core.scan("r", [b"x4"]) == [MISS]
    assert core.scan("r", [b"x0"]) == [PENDING]


def test_no_request_waits_for_a_slow_tier(core: CheckedCore) -> None:
    core.scan("r")
    (probe,) = core.asked()
    core.now = 0.2
    assert core.scan("r") == [PENDING, MISS]
    core.now = 0.3
    assert core.scan("r") == [MISS]
    assert core.asked() == []
    assert core.scan("other", [b"a"]) == [MISS], "a slow tier is not waited for"
    core.now = 6.0
    assert core.scan("other", [b"a"]) == [MISS]
    assert core.asked() == [], "the old answer is still awaited"
    core.answer(probe, 0)
    core.now = 12.0
    assert core.scan("third", [b"b"]) == [MISS], "asked, but not waited for"
    (trial,) = core.asked()
    assert (trial.keys, trial.chain) == ([b"a", b"b"], False), "and what was unknown meanwhile"
    core.now = 12.1
    core.answer(trial, 1)
    assert core.scan("fourth", [b"c"]) == [PENDING]
    assert core.scan("fifth", [b"a"]) == [PENDING], "it was found, and is loaded"
    assert core.loading == [b"a"]


def test_unanswered_check_is_given_up(core: CheckedCore) -> None:
    core.scan("r")
    core.asked()
    core.now = 21.0
    assert core.asked() == []
    assert not core.core.checks.busy
    core.now = 27.0
    core.scan("s", [b"a"])
    assert len(core.asked()) == 1


def test_unordered_keys_are_checked_independently(core: CheckedCore) -> None:
    assert core.each("r", CHAIN[:3]) == [PENDING] * 3
    (probe,) = core.asked()
    assert (probe.keys, probe.chain) == (CHAIN[:3], False)
    core.core.events.listed(0, [(0, CHAIN[1], 0)], last=False)
    core.core.events.existence_checked(0, probe.id, [CHAIN[0], CHAIN[2]], core.now)
    assert core.each("r", CHAIN[:3]) == [MISS, PENDING, MISS]


def test_reset_clears_the_negative_cache_and_open_checks(core: CheckedCore) -> None:
    core.scan("r", [b"a"])
    core.answer(core.asked()[0], 0)
    core.scan("s", [b"b"])
    (old,) = core.asked()
    core.core.reset(keep_tiers=False)
    opened(core.core, 0, 100)
    core.core.events.existence_checked(0, old.id, old.keys, core.now)
    assert core.scan("t", [b"a"]) == [PENDING]
    assert core.scan("u", [b"b"]) == [PENDING]
    assert len(core.asked()) == 2


class TestPatientRequests:
    """A store's `get` waits for checks as long as for rows."""

    @pytest.fixture
    def core(self) -> CheckedCore:
        core = CheckedCore()
        core.core.arrive("get", RequestWishes(patient=True))
        return core

    def test_it_is_told_of_more_keys_than_one_check_takes(self) -> None:
        core = CheckedCore(limits=replace(LIMITS, absent_keys=100))
        core.core.arrive("get", RequestWishes(patient=True))
        assert core.each("get", CHAIN) == [PENDING] * 8
        (check,) = core.asked()
        assert check.keys == CHAIN[:5]
        assert core.each("get", CHAIN) == [PENDING] * 8, "the others are asked for next"
        core.core.events.existence_checked(0, check.id, CHAIN[:5], core.now)
        assert core.each("get", CHAIN) == [MISS] * 5 + [PENDING] * 3
        (check,) = core.asked()
        assert check.keys == CHAIN[5:]
        core.core.events.listed(0, [(0, CHAIN[7], 0)], last=False)
        core.core.events.existence_checked(0, check.id, CHAIN[5:7], core.now)
        assert core.each("get", CHAIN) == [MISS] * 7 + [PENDING]

    def test_many_keys_are_not_late_for_their_number(self) -> None:
        core = CheckedCore(limits=replace(LIMITS, keys_per_check=64))
        core.core.arrive("get", RequestWishes(patient=True))
        keys = [b"%d" % number for number in range(64)]
        core.each("get", keys)
        (check,) = core.asked()
        core.now = 0.9
        core.core.events.existence_checked(0, check.id, keys, core.now)
        assert not core.core.checks.tiers[0].slow, "four waves"


class TestAheadOfRequests:
    """Requests that wait for their turn, and prefetches."""

    def planned(self, core: CheckedCore) -> tuple[list[bytes], list[ExistenceCheck]]:
        expire(core.core, core.now)
        loads = core.loading
        return loads, core.core.events.plan_checks(core.now)

    def test_a_prefetch_asks_for_each_of_its_keys(self, core: CheckedCore) -> None:
        core.core.prefetch(CHAIN)
        loads, (check,) = self.planned(core)
        assert (loads, check.keys, check.chain) == ([], CHAIN[:5], False)
        core.core.events.listed(0, [(0, CHAIN[1], 0)], last=False)
        core.core.events.existence_checked(0, check.id, [CHAIN[0], *CHAIN[2:5]], core.now)
        loads, (check,) = self.planned(core)
        assert (loads, check.keys) == (CHAIN[1:2], CHAIN[5:])
        core.answer(check, 3)
        loads, checks = self.planned(core)
        assert (loads, checks) == (CHAIN[5:], [])


class TestWhatOthersDelete:
    def known(self, core: CheckedCore, keys: Sequence[bytes] = CHAIN, first: int = 100) -> None:
        core.core.events.listed(0, [(0, key, first + n) for n, key in enumerate(keys)], last=False)

    def places(self, core: CheckedCore) -> list[bytes]:
        return [key for key in CHAIN if core.core.where([key])[0]]

    def test_rows_written_before_are_forgotten_in_slices(self) -> None:
        core = CheckedCore(limits=replace(LIMITS, rows_per_slice=2))
        self.known(core)
        core.core.events.gone_before(0, 105)
        assert len(self.places(core)) == 8
        seen = []
        for _ in range(3):
            expire(core.core, core.now)
            seen.append(len(self.places(core)))
        assert seen == [6, 4, 3]
        assert self.places(core) == CHAIN[5:]
        assert not core.core.events.unfinished
        assert core.core.tiers[0].counters.removed == 5

    def test_a_use_makes_no_row_younger_and_a_later_write_does(self, core: CheckedCore) -> None:
        self.known(core, CHAIN[:3])
        core.core.tiers[0].index.touch(CHAIN[:1], 10**6)
        self.known(core, CHAIN[1:2], first=200)
        core.core.events.gone_before(0, 150)
        expire(core.core, core.now)
        assert self.places(core) == CHAIN[1:2]

    def test_too_many_rows_take_the_place_of_the_oldest(self, core: CheckedCore) -> None:
        core.core.events.resized(0, 3)
        self.known(core)
        assert self.places(core) == CHAIN[5:]
        assert core.core.tiers[0].members[0].to_delete == deque()

    def test_a_row_that_is_missing_ends_its_chain(self, core: CheckedCore) -> None:
        """What was behind it was written at about the same time, and is worth nothing without it."""
        self.known(core)
        inside.state(core.core).load_window = 2
        assert core.scan("r") == [PENDING] * 8
        (job,) = core.core.events.plan(core.now)
        assert [move.key for move in job.moves] == CHAIN[:2]
        core.core.events.finished(0, job.id, [Outcome.OK, Outcome.MISSING], core.now)
        assert core.loading == []
        assert core.scan("r") == [HIT, MISS]
        assert self.places(core) == CHAIN[:1]
        assert core.core.tiers[0].members[0].breakers[Direction.LOAD].closed
        assert core.core.tiers[0].counters.missing == 1, "the others were not asked for"
        assert core.scan("other") == [HIT, MISS], "known to be absent"
        assert core.asked() == []

    def test_a_row_that_the_medium_has_already_counts_as_found(self, core: CheckedCore) -> None:
        put(core.core, CHAIN[:2])
        (job,) = core.core.events.plan(core.now)
        core.core.events.listed(0, [(0, CHAIN[0], 100), (0, CHAIN[1], 200)], last=False)
        core.core.events.finished(0, job.id, [Outcome.FOUND, Outcome.OK], core.now)
        counters = core.core.tiers[0].counters
        assert (counters.found, counters.stored, counters.bytes_written, counters.failed_stores) == (1, 1, 4096, 0)
        core.core.events.gone_before(0, 150)
        expire(core.core, core.now)
        assert list(rows_of(core.core.tiers[0])) == [CHAIN[1]], "each has the time of its own write"


def test_tier_that_answers_about_no_key_is_not_waited_for(core: CheckedCore) -> None:
    core.scan("r")
    (probe,) = core.asked()
    core.core.events.existence_checked(0, probe.id, [], core.now)
    assert core.scan("r") == [MISS]
    assert core.scan("s", [b"a"]) == [MISS]
    core.now = 6.0
    assert core.scan("t", [b"b"]) == [MISS]
    core.answer(core.asked()[0], 0)
    assert core.scan("u", [b"c"]) == [PENDING]


@pytest.mark.parametrize(("round_trip_s", "most"), [(0.001, 4), (0.03, 15), (0.2, 32)])
def test_more_checks_are_open_where_the_medium_is_far_away(round_trip_s: float, most: int) -> None:
    """Four of 30 ms each would be 130 a second: what is beyond that is not found."""
    core = CheckedCore(limits=Limits(check_timeout_s=1.0))
    for number in range(12):
        core.scan(f"first-{number}", [b"first-%d" % number])
        (probe,) = core.asked()
        core.now += round_trip_s
        core.answer(probe, 0)
    for number in range(100):
        core.scan(f"r-{number}", [b"other-%d" % number])
    assert len(core.asked()) == most


def test_a_row_that_is_there_again_is_loaded_for_another_though_one_request_has_missed_it() -> None:
    keys = [b"0", b"1"]
    core = TierManager(16, 4096, [TierSpec("s3", Write.THROUGH, physical_slots=False, asked=True)])
    opened(core, 0, 100)
    core.events.listed(0, [(0, key, 1) for key in keys], last=True)

    def look_up(name: str, count: int) -> None:
        assert core.look_up(name, Chain((Group(keys[:count], 16),)), 0, 0.0).waits
        core.end_step()

    look_up("missed", 2)
    (job,) = core.turn(0.0, 0.0)
    core.events.finished(0, job.id, [Outcome.MISSING, Outcome.FAILED], 0.1)
    core.events.listed(0, [(0, keys[0], 1)], last=False)  # another engine has stored it meanwhile
    look_up("other", 1)
    look_up("missed", 2)
    (job,) = core.turn(0.2, 0.2)
    assert [move.key for move in job.moves] == keys[:1]
