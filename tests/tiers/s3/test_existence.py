"""Existence checks: the galloping search, and checks with timeouts."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nixl_tiers.tiers.s3.existence import (
    MAX_CONCURRENT,
    MAX_WAVES,
    TIMEOUT_S,
    Answer,
    ExistenceChecker,
    Presence,
    Search,
    galloping_search,
)
from tests.support.waiting import until


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
    found, absent, waves = run(galloping_search(count), [place < reach for place in range(count)])
    assert found == list(range(reach))
    assert absent == ([reach] if reach < count else [])
    assert len(waves) <= MAX_WAVES


def test_a_chain_that_does_not_exist_costs_one_request() -> None:
    assert run(galloping_search(500), [False] * 500) == ([], [0], [[0]])


@pytest.mark.parametrize("count", [1, 2, 3, 16, 17, 500, 512])
def test_a_chain_that_exists_costs_two_waves(count: int) -> None:
    found, absent, waves = run(galloping_search(count), [True] * count)
    assert (found, absent) == (list(range(count)), [])
    assert len(waves) <= 2


@given(there=st.lists(st.sampled_from([True, True, True, False, None]), min_size=1, max_size=600))
def test_answers_are_right_with_holes_and_without_answers(there: list[Presence]) -> None:
    found, absent, waves = run(galloping_search(len(there)), there)
    asked = {place for wave in waves for place in wave}
    assert found == list(range(len(found)))
    assert all(there[place] for place in asked if place < len(found)), "no key behind a known hole is found"
    assert len(waves) <= MAX_WAVES
    assert all(there[place] is False and place in asked for place in absent)
    assert len(absent) <= 1


def test_chains_and_single_keys_are_checked() -> None:
    there = {b"%d" % n for n in range(40)}

    def exists(key: bytes) -> bool:
        if key == b"bad":
            raise OSError("no")
        return key in there

    checker = ExistenceChecker(exists, lambda: 0.0)  # no check times out
    keys = [b"%d" % n for n in range(100)]
    checker.start(1, keys, chain=True)
    checker.start(2, [b"bad", b"7", b"70"], chain=False)
    answers: dict[int, Answer] = {}
    until(lambda: bool(answers.update({a.check_id: a for a in checker.answers()}) or not checker.busy), "the answers")
    assert answers == {1: Answer(1, keys[:40], keys[40:41]), 2: Answer(2, [b"7"], [b"70"])}
    checker.close()


def test_cleared_checks_are_never_answered() -> None:
    gate = threading.Event()
    checker = ExistenceChecker(lambda _: gate.wait(20))
    checker.start(1, [b"a"], chain=True)
    checker.clear()
    assert not checker.busy
    gate.set()
    assert checker.answers() == []
    checker.close()


def test_a_check_ends_at_its_timeout_if_the_medium_never_answers() -> None:
    gate = threading.Event()
    now = [0.0]

    def exists(key: bytes) -> bool:
        if key.startswith(b"slow"):
            gate.wait(20)
        return True

    checker = ExistenceChecker(exists, lambda: now[0])
    found: list[Answer] = []
    try:
        checker.start(1, [b"a", *(b"slow %d" % n for n in range(40))], chain=True)
        checker.start(2, [b"b", *(b"slow too %d" % n for n in range(40))], chain=False)
        # The first key of the chain has been answered, and the second wave is in flight.
        until(lambda: not checker.answers() and len(checker._checks[0].requests) > 1, "the second wave")
        now[0] = TIMEOUT_S + 1
        found = checker.answers()
        assert not checker.busy
    finally:
        gate.set()
        checker.close()
    assert {(answer.check_id, *answer.absent) for answer in found} == {(1,), (2,)}
    assert found[0].found == [b"a"]


def test_nothing_is_queued_while_all_threads_are_stuck() -> None:
    gate = threading.Event()
    now = [0.0]
    asked: list[bytes] = []

    def exists(key: bytes) -> bool:
        asked.append(key)
        return not gate.is_set() and gate.wait(60)

    checker = ExistenceChecker(exists, lambda: now[0])
    try:
        checker.start(1, [b"%d" % n for n in range(2 * MAX_CONCURRENT)], chain=False)
        until(lambda: len(asked) == MAX_CONCURRENT, "all threads to be stuck")
        now[0] = TIMEOUT_S + 1
        assert checker.answers() == [Answer(1, [], [])]
        for number in range(2, 50):
            checker.start(number, [b"more"] * MAX_CONCURRENT, chain=number % 2 == 0)
            assert checker.answers() == [Answer(number, [], [])]
        assert len(asked) == MAX_CONCURRENT
        gate.set()
        until(lambda: not [request for request in checker._abandoned if not request.done()], "the threads")
        checker.start(50, [b"again"], chain=False)
        until(lambda: [answer.absent for answer in checker.answers()] == [[b"again"]], "an answer")
    finally:
        gate.set()
        checker.close()
