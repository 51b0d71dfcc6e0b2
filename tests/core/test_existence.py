"""Existence checks: when they are sent, which requests wait for them, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from nixl_tiers.base.policies import Write
from nixl_tiers.core.existence import ExistenceCheck
from nixl_tiers.core.lookup import Lookup
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.types import Limits, TierSpec
from tests.support.core import anticipate, expire, look_up_key, opened

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
        opened(self.core, 0, 100, [])
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


def test_what_is_found_stays_within_the_tiers_slots_and_takes_the_place_of_the_oldest(core: CheckedCore) -> None:
    keys = [b"x%d" % number for number in range(103)]
    for number, key in enumerate(keys):
        core.core.events.listed(0, [(0, key, number)], last=False)
    assert [key for key in keys if core.core.where([key])[0]] == keys[3:]


def test_a_request_that_waits_for_its_turn_has_its_first_key_asked_for(core: CheckedCore) -> None:
    anticipate(core.core, "queued", CHAIN, (0.0,))
    core.core.end_step()
    core.core.events.plan(core.now)
    assert [check.keys[0] for check in core.asked()] == CHAIN[:1]
