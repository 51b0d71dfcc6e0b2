"""How far a chain reaches, in a few waves of questions."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nixl_tiers.tiers.s3.existence import (
    ANSWER_S,
    AT_ONCE,
    WAVES,
    Answer,
    ExistenceChecker,
    Search,
    Seen,
    galloping_search,
)
from tests.support.waiting import until


def run(search: Search, there: list[Seen]) -> tuple[list[int], list[int], list[list[int]]]:
    """(found, absent, waves) of a search over places of which each is there, is not, or does not answer."""
    waves = [next(search)]
    while True:
        assert all(0 <= place < len(there) for place in waves[-1])
        assert len(waves[-1]) <= AT_ONCE
        try:
            waves.append(search.send([there[place] for place in waves[-1]]))
        except StopIteration as end:
            return *end.value, waves


@given(count=st.integers(1, 3000), data=st.data())
def test_a_chain_without_holes_is_found_to_its_end(count: int, data: st.DataObject) -> None:
    reach = data.draw(st.integers(0, count))
    found, absent, waves = run(galloping_search(count), [place < reach for place in range(count)])
    assert found == list(range(reach))
    assert absent == ([reach] if reach < count else [])
    assert len(waves) <= WAVES


def test_a_chain_that_nobody_has_costs_one_question() -> None:
    assert run(galloping_search(500), [False] * 500) == ([], [0], [[0]])


@pytest.mark.parametrize("count", [1, 2, 3, 16, 17, 500, 512])
def test_a_chain_that_is_there_costs_two_waves(count: int) -> None:
    found, absent, waves = run(galloping_search(count), [True] * count)
    assert (found, absent) == (list(range(count)), [])
    assert len(waves) <= 2


@given(there=st.lists(st.sampled_from([True, True, True, False, None]), min_size=1, max_size=600))
def test_with_holes_and_silence_what_was_seen_is_told_right(there: list[Seen]) -> None:
    found, absent, waves = run(galloping_search(len(there)), there)
    asked = {place for wave in waves for place in wave}
    assert found == list(range(len(found)))
    assert all(there[place] for place in asked if place < len(found)), "nothing is counted on behind a known hole"
    assert len(waves) <= WAVES
    assert all(there[place] is False and place in asked for place in absent)
    assert len(absent) <= 1


def test_a_prober_answers_for_chains_and_for_single_keys() -> None:
    there = {b"%d" % n for n in range(40)}

    def look(key: bytes) -> bool:
        if key == b"bad":
            raise OSError("no")
        return key in there

    prober = ExistenceChecker(look)
    keys = [b"%d" % n for n in range(100)]
    prober.ask(1, keys, chain=True)
    prober.ask(2, [b"bad", b"7", b"70"], chain=False)
    answers: dict[int, Answer] = {}
    until(lambda: bool(answers.update({a.probe: a for a in prober.answers()}) or not prober.busy), "the answers")
    assert answers == {1: Answer(1, keys[:40], keys[40:41]), 2: Answer(2, [b"7"], [b"70"])}
    prober.close()


def test_questions_that_are_cleared_are_never_answered() -> None:
    gate = threading.Event()
    prober = ExistenceChecker(lambda _: gate.wait(20))
    prober.ask(1, [b"a"], chain=True)
    prober.clear()
    assert not prober.busy
    gate.set()
    assert prober.answers() == []
    prober.close()


def test_a_medium_that_never_answers_holds_up_nobody() -> None:
    gate = threading.Event()
    now = [0.0]

    def look(key: bytes) -> bool:
        if key.startswith(b"slow"):
            gate.wait(20)
        return True

    prober = ExistenceChecker(look, lambda: now[0])
    found: list[Answer] = []
    try:
        prober.ask(1, [b"a", *(b"slow %d" % n for n in range(40))], chain=True)
        prober.ask(2, [b"b", *(b"slow too %d" % n for n in range(40))], chain=False)
        # The first place of the chain has been heard of, and all that comes next has been asked.
        until(lambda: not prober.answers() and len(prober._open[0].looks) > 1, "the second wave")
        now[0] = ANSWER_S + 1
        found = prober.answers()
        assert not prober.busy
    finally:
        gate.set()
        prober.close()
    assert {(answer.probe, *answer.absent) for answer in found} == {(1,), (2,)}
    assert found[0].found == [b"a"]


def test_nothing_is_queued_for_threads_that_the_medium_does_not_let_go() -> None:
    gate = threading.Event()
    now = [0.0]
    asked: list[bytes] = []

    def look(key: bytes) -> bool:
        asked.append(key)
        return not gate.is_set() and gate.wait(60)

    prober = ExistenceChecker(look, lambda: now[0])
    try:
        prober.ask(1, [b"%d" % n for n in range(2 * AT_ONCE)], chain=False)
        until(lambda: len(asked) == AT_ONCE, "all threads to be stuck")
        now[0] = ANSWER_S + 1
        assert prober.answers() == [Answer(1, [], [])]
        for number in range(2, 50):
            prober.ask(number, [b"more"] * AT_ONCE, chain=number % 2 == 0)
            assert prober.answers() == [Answer(number, [], [])]
        assert len(asked) == AT_ONCE
        gate.set()
        until(lambda: not [look for look in prober._stuck if not look.done()], "the threads")
        prober.ask(50, [b"again"], chain=False)
        until(lambda: [answer.absent for answer in prober.answers()] == [[b"again"]], "an answer")
    finally:
        gate.set()
        prober.close()
