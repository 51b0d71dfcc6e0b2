"""Existence checks: the galloping search; then, request by request, what a check says, and when it ends, if the medium
answers late, never or with errors. No thread runs: requests are answered and time passes when the test says so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nixl_tiers.base.chunk import Key
from nixl_tiers.base.times import PRODUCTION
from nixl_tiers.tiers.existence import (
    MAX_CONCURRENT,
    MAX_WAVES,
    Answer,
    ExistenceChecker,
    Presence,
    Search,
    UploadChecks,
    galloping_search,
)
from tests.support.by_hand import HandPool
from tests.support.fake_movers import Clock


def run(search: Search, presence: list[Presence]) -> tuple[list[int], list[int], list[list[int]]]:
    """(found, absent, waves) of a search over keys of this presence."""
    waves = [next(search)]
    while True:
        assert all(0 <= position < len(presence) for position in waves[-1])
        assert len(waves[-1]) <= MAX_CONCURRENT
        try:
            waves.append(search.send([presence[position] for position in waves[-1]]))
        except StopIteration as end:
            return *end.value, waves


@given(count=st.integers(1, 3000), data=st.data())
def test_a_chain_without_holes_is_found_to_its_end(count: int, data: st.DataObject) -> None:
    reach = data.draw(st.integers(0, count))
    found, absent, waves = run(galloping_search(count), [int(place < reach) for place in range(count)])
    assert found == list(range(reach))
    assert absent == ([reach] if reach < count else [])
    assert len(waves) <= MAX_WAVES


@given(there=st.lists(st.sampled_from([1, 1, 1, 0, None]), min_size=1, max_size=600))
def test_answers_are_right_with_holes_and_without_answers(there: list[Presence]) -> None:
    found, absent, waves = run(galloping_search(len(there)), there)
    asked = {place for wave in waves for place in wave}
    assert found == list(range(len(found)))
    assert all(there[place] for place in asked if place < len(found)), "no key behind a known hole is found"
    assert len(waves) <= MAX_WAVES
    assert all(there[place] == 0 and place in asked for place in absent)
    assert len(absent) <= 1


class Medium:
    """`there`: keys and when they were written. `fails`: keys whose requests raise."""

    def __init__(self, there: dict[Key, int] | None = None) -> None:
        self.there = there or {}
        self.fails: set[Key] = set()
        self.asked: list[Key] = []
        self.clock = Clock(0.0)
        self.pool = HandPool()

    def written_s(self, key: Key) -> int:
        self.asked.append(key)
        if key in self.fails:
            raise OSError("no")
        return self.there.get(key, 0)


def keys(count: int) -> list[Key]:
    return [b"%d" % number for number in range(count)]


@pytest.fixture
def medium() -> Medium:
    return Medium({key: 1000 + number for number, key in enumerate(keys(40))})


@pytest.fixture
def checker(medium: Medium) -> Iterator[ExistenceChecker]:
    checker = ExistenceChecker(medium.written_s, medium.clock)
    checker._pool = medium.pool  # type: ignore[assignment]
    yield checker
    checker.close()


def answers(checker: ExistenceChecker, medium: Medium) -> dict[int, Answer]:
    """With a medium that answers at once."""
    found: dict[int, Answer] = {}
    while checker.busy:
        medium.pool.run()
        found |= {answer.check_id: answer for answer in checker.answers()}
    return found


def test_chains_and_single_keys_are_checked(checker: ExistenceChecker, medium: Medium) -> None:
    medium.there[b"15"] = 7  # those around it were written again
    medium.fails.add(b"bad")
    checker.start(1, keys(100), chain=True)
    checker.start(2, [b"bad", b"7", b"70"], chain=False)
    found = answers(checker, medium)
    assert found[2] == Answer(2, [(b"7", 1007)], [b"70"]), "an error is no absence"
    assert [key for key, _ in found[1].found] == keys(40)
    assert found[1].absent == [b"40"]
    assert len(set(medium.asked)) < 40, "a few of them"
    for key, written_s in found[1].found:
        assert written_s <= medium.there[key], "no row is taken for younger than it is"


@pytest.mark.parametrize("begun", [False, True], ids=["queued", "on their way"])
def test_what_is_not_answered_by_the_timeout_is_unknown_and_not_absent(
    checker: ExistenceChecker, medium: Medium, begun: bool
) -> None:
    checker.start(1, keys(100), chain=True)
    checker.start(2, [b"5", b"70", b"6"], chain=False)
    medium.pool.run(3)  # the first key of the chain, and two of the others
    assert checker.answers() == []
    if begun:
        medium.pool.begin(100)
    medium.clock.now = PRODUCTION.s3_check_s
    assert checker.answers() == [], "there is time left"
    medium.clock.now += 0.1
    first, second = sorted(checker.answers(), key=lambda answer: answer.check_id)
    assert first == Answer(1, [(b"0", 1000)], [])
    assert second == Answer(2, [(b"5", 1005)], [b"70"])
    assert not checker.busy
    assert checker.answers() == []


def test_a_late_answer_changes_no_other_check(checker: ExistenceChecker, medium: Medium) -> None:
    checker.start(1, [b"70"], chain=False)
    ((late, _),) = medium.pool.begin(1)
    medium.clock.now = PRODUCTION.s3_check_s + 0.1
    assert checker.answers() == [Answer(1, [], [])]
    checker.start(2, [b"70"], chain=False)
    late.set_result(0)
    assert checker.answers() == []
    medium.there[b"70"] = 5
    medium.pool.run()
    assert checker.answers() == [Answer(2, [(b"70", 5)], [])]


def test_nothing_is_queued_while_all_threads_are_stuck(checker: ExistenceChecker, medium: Medium) -> None:
    checker.start(1, keys(2 * MAX_CONCURRENT), chain=False)
    stuck = medium.pool.begin(MAX_CONCURRENT)
    medium.clock.now = PRODUCTION.s3_check_s + 0.1
    assert checker.answers() == [Answer(1, [], [])]
    for number in range(2, 50):
        checker.start(number, [b"more"] * MAX_CONCURRENT, chain=number % 2 == 0)
        assert checker.answers() == [Answer(number, [], [])], "unknown, at once"
    assert medium.pool.submitted == []
    stuck[0][0].set_result(0)
    checker.start(50, [b"70"], chain=False)
    medium.pool.run()
    assert checker.answers() == [Answer(50, [], [b"70"])]


def test_it_is_told_for_how_long_all_threads_have_been_stuck(checker: ExistenceChecker, medium: Medium) -> None:
    checker.start(1, keys(MAX_CONCURRENT), chain=False)
    stuck = medium.pool.begin(MAX_CONCURRENT)
    medium.clock.now = PRODUCTION.s3_check_s
    assert checker.stuck_s == 0, "they may still answer in time"
    medium.clock.now += 0.1
    checker.answers()
    assert checker.stuck_s == 0, "since now"
    medium.clock.now += 30
    assert checker.stuck_s == 30
    stuck[0][0].set_result(0)
    assert checker.stuck_s == 0


class TestUploads:
    """Before which it is asked whether the row is there by now."""

    @pytest.fixture
    def checks(self, medium: Medium) -> Iterator[UploadChecks]:
        checks = UploadChecks(medium.written_s, medium.clock)
        checks._pool = medium.pool  # type: ignore[assignment]
        yield checks
        checks.close()

    def test_one_waits_for_its_answer(self, checks: UploadChecks, medium: Medium) -> None:
        checks.ask([b"7", b"70"])
        assert checks.answer(b"7") is None
        medium.pool.run()
        assert checks.answer(b"70") == 0
        assert checks.answer(b"7") == 1007
        assert checks.answer(b"7") == 1007, "also if it has to wait for room"
        checks.forget(b"7")
        assert checks.answer(b"7") == 0

    def test_a_late_server_holds_up_one_for_a_moment_and_is_not_asked_for_a_while(
        self, checks: UploadChecks, medium: Medium
    ) -> None:
        checks.ask([b"7", b"8"])
        assert checks.answer(b"7") is None
        medium.clock.now = PRODUCTION.s3_upload_check_s
        assert checks.answer(b"7") is None
        medium.clock.now += 0.1
        assert checks.answer(b"7") == 0, "it goes without an answer"
        assert checks.answer(b"8") == 0, "and so do those behind it"
        checks.ask([b"9"])
        assert checks.answer(b"9") == 0
        medium.pool.run()
        assert medium.asked == []
        medium.clock.now += PRODUCTION.s3_upload_check_retry_s
        checks.ask([b"10"])
        assert checks.answer(b"10") is None
        medium.pool.run()
        assert checks.answer(b"10") == 1010
