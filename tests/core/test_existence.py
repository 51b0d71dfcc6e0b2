"""Existence checks: when they are sent, which requests wait for them, and for how long."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.base.policies import Write
from nixl_tiers.core.existence import ExistenceCheck
from nixl_tiers.core.limits import Limits
from nixl_tiers.core.manager import Lookup, TierManager
from nixl_tiers.core.types import Direction, TierSpec
from tests.support.core import expire, opened

CHAIN = [b"k%d" % i for i in range(8)]
LIMITS = Limits(
    check_timeout_s=0.25,
    max_checks=2,
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
        specs = [TierSpec("s3", Write.THROUGH, physical_slots=False, existence_checks=shared)]
        self.core = TierManager(64, 4096, specs, limits)
        opened(self.core, 0, 100)
        self.core.events.listed(0, [], last=True)
        self.now = 0.0

    def scan(self, name: str, keys: Sequence[bytes] = CHAIN) -> list[Lookup]:
        """One step's look-ups of a full-attention group, which stop at the first miss."""
        answers: list[Lookup] = []
        for position, key in enumerate(keys):
            answers.append(self.core.lookup(key, name, position, self.now))
            if answers[-1] is MISS:
                break
        self.core.end_step()
        return answers

    def each(self, name: str, keys: Sequence[bytes]) -> list[Lookup]:
        answers = [self.core.lookup(key, name, None, self.now) for key in keys]
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


def test_absent_key_is_not_checked_again_for_a_while(core: CheckedCore) -> None:
    core.scan("r")
    core.answer(core.asked()[0], 0)
    core.now = 29.0
    assert core.scan("other") == [MISS]
    core.now = 31.0
    assert core.scan("third") == [PENDING, MISS]
    assert len(core.asked()) == 1


def test_negative_cache_is_bounded(core: CheckedCore) -> None:
    for number in range(5):
        core.scan(f"r{number}", [b"x%d" % number])
        core.answer(core.asked()[0], 0)
    assert core.core.checks.tiers[0].absent_count == 3
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
    assert trial.keys == [b"b"]
    core.now = 12.1
    core.answer(trial, 0)
    assert core.scan("fourth", [b"c"]) == [PENDING]


def test_late_answer_still_serves_later_requests(core: CheckedCore) -> None:
    core.scan("r")
    (probe,) = core.asked()
    core.now = 1.0
    assert core.scan("r") == [MISS]
    core.answer(probe, 1)
    assert core.scan("later", CHAIN[:1]) == [PENDING]
    assert core.loading == CHAIN[:1]


def test_unanswered_check_is_given_up(core: CheckedCore) -> None:
    core.scan("r")
    core.asked()
    core.now = 21.0
    assert core.asked() == []
    assert not core.core.checks.busy
    core.now = 27.0
    core.scan("s", [b"a"])
    assert len(core.asked()) == 1


def test_checks_are_shared_and_bounded(core: CheckedCore) -> None:
    assert core.scan("a") == [PENDING, MISS]
    assert core.scan("b") == [PENDING, MISS]
    (probe,) = core.asked()
    assert core.scan("c", [b"x"]) == [PENDING]
    assert len(core.asked()) == 1
    assert core.scan("d", [b"y"]) == [MISS], "two are under way"
    assert core.scan("e") == [PENDING, MISS], "it joins one of them"
    assert core.asked() == []
    core.answer(probe, 1)
    for name in "abe":
        assert core.scan(name, CHAIN[:1]) == [PENDING]
    assert core.loading == CHAIN[:1]


def test_hits_before_an_unknown_key_are_pinned_during_its_check(core: CheckedCore) -> None:
    plan = core.core.copies.prepare_store(CHAIN[:2], "w")
    core.core.copies.complete_store(core.core.copies.rows_being_filled(plan.keys), set())
    core.core.finish_request("w")
    assert core.scan("r", CHAIN[:4]) == [HIT, HIT, PENDING, MISS]
    (probe,) = core.asked()
    assert probe.keys == CHAIN[2:3]
    assert all(core.core.host.index[key].request_pins for key in CHAIN[:2])
    core.answer(probe, 0)
    assert core.scan("r", CHAIN[:4]) == [HIT, HIT, MISS]


def test_unordered_keys_are_checked_independently(core: CheckedCore) -> None:
    assert core.each("r", CHAIN[:3]) == [PENDING] * 3
    (probe,) = core.asked()
    assert (probe.keys, probe.chain) == (CHAIN[:3], False)
    core.core.events.listed(0, [(0, CHAIN[1], 0)], last=False)
    core.core.events.existence_checked(0, probe.id, [CHAIN[0], CHAIN[2]], core.now)
    assert core.each("r", CHAIN[:3]) == [MISS, PENDING, MISS]


def test_tier_that_is_down_is_not_checked(core: CheckedCore) -> None:
    core.scan("r")
    core.asked()
    core.core.events.down(0, core.now)
    assert core.scan("r") == [MISS]
    assert core.scan("s") == [MISS]
    opened(core.core, 0, 100)
    assert core.scan("t") == [PENDING, MISS]


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


@pytest.mark.parametrize(
    "core", [CheckedCore(shared=False), CheckedCore(limits=Limits(check_timeout_s=0.0))], ids=["private", "off"]
)
def test_private_tier_is_not_checked_nor_if_checks_are_off(core: CheckedCore) -> None:
    assert core.scan("r") == [MISS]
    assert core.asked() == []


def test_known_row_that_is_not_loadable_is_not_checked(core: CheckedCore) -> None:
    assert core.core.tiers[0].index.reserve(CHAIN[0], 0) is not None  # it is being stored
    assert core.scan("r") == [MISS]
    assert core.asked() == []


def test_tier_with_open_circuit_is_neither_checked_nor_waited_for(core: CheckedCore) -> None:
    assert core.scan("r") == [PENDING, MISS]
    (probe,) = core.asked()
    core.core.tiers[0].breakers[Direction.LOAD].trip(core.now)
    assert core.scan("s") == [MISS], "not even for what is under way"
    assert core.scan("t", [b"x"]) == [MISS]
    core.answer(probe, 1)
    assert core.scan("r") == [MISS], "what was found cannot be loaded now"
    assert core.asked() == []
    assert not core.loading


def test_request_checks_only_its_allowed_tiers(core: CheckedCore) -> None:
    core.core.set_allowed_tiers("r", [1])
    assert core.scan("r") == [MISS]
    core.core.set_allowed_tiers("s", [0])
    assert core.scan("s") == [PENDING, MISS]
    assert len(core.asked()) == 1


@pytest.mark.parametrize("outcome", [Outcome.CORRUPT, Outcome.MISSING])
def test_corrupt_or_missing_row_is_not_checked_again(core: CheckedCore, outcome: Outcome) -> None:
    """Its reader may not be allowed to delete it; so every request would find, load and discard it again."""
    core.scan("r", CHAIN[:1])
    core.answer(core.asked()[0], 1)
    assert core.scan("r", CHAIN[:1]) == [PENDING]
    (job,) = core.core.events.plan(core.now)
    core.core.events.finished(0, job.id, [outcome], core.now)
    assert core.scan("r", CHAIN[:1]) == [MISS]
    assert core.scan("s", CHAIN[:1]) == [MISS]
    core.now = 31.0
    assert core.scan("t", CHAIN[:1]) == [PENDING]


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
