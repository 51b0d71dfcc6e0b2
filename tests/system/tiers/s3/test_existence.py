"""Existence checks: the galloping search, and checks with timeouts."""

from __future__ import annotations

import threading

from nixl_tiers.base.times import PRODUCTION
from nixl_tiers.tiers.existence import (
    MAX_CONCURRENT,
    Answer,
    ExistenceChecker,
    UploadChecks,
)
from tests.support.waiting import until


def test_chains_and_single_keys_are_checked() -> None:
    there = {b"%d" % n: 1000 + n for n in range(40)}
    there[b"15"] = 7  # those around it were written again
    asked: set[bytes] = set()

    def exists(key: bytes) -> int:
        asked.add(key)
        if key == b"bad":
            raise OSError("no")
        return there.get(key, 0)

    checker = ExistenceChecker(exists, lambda: 0.0)  # no check times out
    keys = [b"%d" % n for n in range(100)]
    checker.start(1, keys, chain=True)
    checker.start(2, [b"bad", b"7", b"70"], chain=False)
    answers: dict[int, Answer] = {}
    until(lambda: bool(answers.update({a.check_id: a for a in checker.answers()}) or not checker.busy), "the answers")
    assert answers[2] == Answer(2, [(b"7", 1007)], [b"70"])
    assert [key for key, _ in answers[1].found] == keys[:40]
    assert answers[1].absent == keys[40:41]
    around = {n for n in range(40) if keys[n] in asked}
    assert around < set(range(40)), "a few of them"
    for n, (key, written_s) in enumerate(answers[1].found):
        before, behind = max(each for each in around if each <= n), min(each for each in around if each >= n)
        assert written_s == min(there[keys[before]], there[keys[behind]]) <= there[key]
    checker.close()


def test_cleared_checks_are_never_answered() -> None:
    gate = threading.Event()
    checker = ExistenceChecker(lambda _: int(gate.wait(20)))
    checker.start(1, [b"a"], chain=True)
    checker.clear()
    assert not checker.busy
    gate.set()
    assert checker.answers() == []
    checker.close()


def test_a_check_ends_at_its_timeout_if_the_medium_never_answers() -> None:
    gate = threading.Event()
    now = [0.0]

    def exists(key: bytes) -> int:
        if key.startswith(b"slow"):
            gate.wait(20)
        return 9

    checker = ExistenceChecker(exists, lambda: now[0])
    found: list[Answer] = []
    try:
        checker.start(1, [b"a", *(b"slow %d" % n for n in range(40))], chain=True)
        checker.start(2, [b"b", *(b"slow too %d" % n for n in range(40))], chain=False)
        # The first key of the chain has been answered, and the second wave is in flight.
        until(lambda: not checker.answers() and len(checker._checks[0].requests) > 1, "the second wave")
        now[0] = PRODUCTION.s3_check_s + 1
        found = checker.answers()
        assert not checker.busy
    finally:
        gate.set()
        checker.close()
    assert {(answer.check_id, *answer.absent) for answer in found} == {(1,), (2,)}
    assert found[0].found == [(b"a", 9)]


def test_nothing_is_queued_while_all_threads_are_stuck() -> None:
    gate = threading.Event()
    now = [0.0]
    asked: list[bytes] = []

    def exists(key: bytes) -> int:
        asked.append(key)
        return int(not gate.is_set() and gate.wait(60))

    checker = ExistenceChecker(exists, lambda: now[0])
    try:
        checker.start(1, [b"%d" % n for n in range(2 * MAX_CONCURRENT)], chain=False)
        until(lambda: len(asked) == MAX_CONCURRENT, "all threads to be stuck")
        now[0] = PRODUCTION.s3_check_s + 1
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


class TestUploadChecks:
    """Before rows are uploaded."""

    def test_an_upload_waits_for_its_answer(self) -> None:
        gate = threading.Event()
        checks = UploadChecks(lambda key: (gate.wait(60) and 7) or 0 if key == b"there" else 0, lambda: 0.0)
        checks.ask([b"there", b"absent"])
        assert checks.answer(b"there") is None
        until(lambda: checks.answer(b"absent") == 0, "an answer")
        gate.set()
        until(lambda: checks.answer(b"there") == 7, "an answer")
        assert checks.answer(b"there") == 7, "also if it has to wait for room"
        checks.forget(b"there")
        assert checks.answer(b"there") == 0
        checks.close()

    def test_errors_hold_up_no_upload(self) -> None:
        def fails(key: bytes) -> int:
            raise OSError

        checks = UploadChecks(fails, lambda: 0.0)
        checks.ask([b"a"])
        until(lambda: checks.answer(b"a") == 0, "an answer")
        checks.close()

    def test_a_late_server_is_not_asked_for_a_while(self) -> None:
        gate, now, asked = threading.Event(), [0.0], []

        def exists(key: bytes) -> int:
            asked.append(key)
            gate.wait(60)
            return 7

        checks = UploadChecks(exists, lambda: now[0])
        try:
            checks.ask([b"a", b"b"])
            assert checks.answer(b"a") is None
            now[0] = PRODUCTION.s3_upload_check_s + 0.1
            assert checks.answer(b"a") == 0, "it goes without an answer"
            assert checks.answer(b"b") == 0, "and so do those behind it"
            until(lambda: b"a" in asked, "the request")
            asked.clear()
            checks.ask([b"c"])
            assert checks.answer(b"c") == 0
            now[0] += PRODUCTION.s3_upload_check_retry_s
            checks.ask([b"d"])
            assert checks.answer(b"d") is None
            assert b"c" not in asked
        finally:
            gate.set()
            checks.close()
