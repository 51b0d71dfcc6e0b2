"""The byte budget of a prefix, step by step: several movers over a bucket in memory.

No thread runs, and the bucket's clock is everybody's. The protocol alone, in any order of events: record_machine.py.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from nixl_tiers.base.chunk import UNREACHABLE
from nixl_tiers.tiers.s3 import budget as budget_module
from nixl_tiers.tiers.s3 import record as record_module
from nixl_tiers.tiers.s3.budget import COUNTER_NAME, UNCHANGED_S, USAGE_NAME
from nixl_tiers.tiers.s3.deletes import MAX_DELETES
from nixl_tiers.tiers.s3.names import CONDITIONS_NAME
from nixl_tiers.tiers.s3.sweep import Sweeper
from nixl_tiers.tiers.s3.takeover import Terms
from tests.tiers.s3.memory_bucket import (
    CAPACITY_ROWS,
    LISTING,
    ROW,
    STEP_S,
    WINDOW_ROWS,
    Bucket,
    Mover,
    failed,
    lost,
    once,
    row,
)


@pytest.fixture(autouse=True)
def _virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_module, "budget_clock", lambda: Bucket.made_last.now_s)
    monkeypatch.setattr(record_module, "WINDOW_SHARE", CAPACITY_ROWS // WINDOW_ROWS)


def fill(bucket: Bucket, count: int, namespace: int = 0) -> list[str]:
    """Rows of before, each a second younger than the one before it."""
    names = [row(number, namespace) for number in range(count)]
    for name in names:
        bucket.now_s += 1.0
        bucket.store(name)
    return names


@pytest.mark.parametrize("seed", range(12))
def test_movers_that_fill_the_prefix_many_times_in_any_order_stay_within_it(seed: int) -> None:
    """Each begins uploads whenever it may, and they arrive at any time later. Some requests of janitors fail, and
    some leases expire."""
    chance = random.Random(seed)
    bucket = Bucket(page_names=chance.choice([5, 20, 1000]))
    count = chance.choice([1, 2, 3])
    failing = chance.choice([0.0, 0.0, 0.05, 0.2])

    def meanwhile(request: str) -> None:
        """Before a request, and before its answer."""
        if chance.random() < 0.1:
            chance.choice(movers).end()
        if chance.random() < failing:
            raise chance.choice([failed(503), lost()])

    bucket.before = bucket.after = meanwhile
    movers = [Mover(bucket, f"mover-{number}", count - 1) for number in range(count)]
    arrived = number = steps = 0
    while arrived < 6 * CAPACITY_ROWS:
        mover = chance.choice(movers)
        action = chance.randrange(4)
        if action == 0:
            number += 3
            arrived += mover.begin(*(row(n, chance.randrange(3)) for n in range(number - 3, number)))
        elif action == 1:
            mover.end()
        else:
            mover.steps(after_s=40.0 if chance.random() < 0.02 else STEP_S / count)
        steps += 1
        assert steps < 100_000, "uploads go on"  # of the requests of a turn more than a third may fail
    for mover in movers:
        mover.end()
    bucket.before = bucket.after = lambda _: None
    for _ in range(800):  # over an hour, so there was another sweep
        for mover in movers:
            mover.steps()
    assert [mover.denials.current() for mover in movers] == [{}] * count
    assert len(bucket.rows) <= CAPACITY_ROWS - WINDOW_ROWS
    assert bucket.record.nbytes <= (len(bucket.rows) + bucket.record.windows * WINDOW_ROWS) * ROW


class TestWhatIsDeleted:
    def test_the_oldest_rows_of_any_namespace_and_nothing_that_is_no_row(self) -> None:
        bucket = Bucket()
        ours = ["p/notes.txt", f"p/{'00' * 16}/readme", f"p/{'zz' * 16}/{'00' * 8}", "p/deep/er/still", "q/elsewhere"]
        for name in ours:
            bucket.store(name, b"x" * 10 * ROW)
        rows = [*fill(bucket, CAPACITY_ROWS // 2, 7), *fill(bucket, CAPACITY_ROWS // 2, 3)]
        before = set(bucket.objects)
        Mover(bucket, "me").steps()
        gone = before - set(bucket.objects)
        assert gone == set(rows[: 2 * WINDOW_ROWS])

    def test_rows_that_are_too_old_whether_there_is_room_or_not(self) -> None:
        bucket = Bucket()
        rows = fill(bucket, 6)
        mover = Mover(bucket, "me", max_age_s=100.0)
        mover.steps()
        assert bucket.rows == set(rows)
        bucket.now_s += 100.0 - STEP_S - 3.0
        mover.steps(8)
        assert bucket.rows == set()

    @pytest.mark.parametrize(
        ("code", "counts"), [("AccessDenied", True), ("InternalError", True), ("NoSuchKey", False)]
    )
    def test_what_the_server_has_not_deleted_still_counts(self, code: str, counts: bool) -> None:
        """Also in an answer without an error of its own. What was gone already does not."""
        bucket = Bucket()
        rows = fill(bucket, CAPACITY_ROWS)
        bucket.delete_errors = tuple({"Key": name, "Code": code} for name in rows[: 2 * WINDOW_ROWS])
        mover = Mover(bucket, "me")
        mover.steps(4 if counts else 1)
        assert bucket.record.nbytes == (CAPACITY_ROWS - (0 if counts else 2 * WINDOW_ROWS)) * ROW
        if counts:
            assert mover.store(row(1000)) == 0
            bucket.delete_errors = ()
            mover.steps(8)
            assert mover.store(row(1000)) == 1

    def test_nothing_more_when_another_has_taken_the_record_over(self) -> None:
        bucket = Bucket()
        fill(bucket, CAPACITY_ROWS + 2 * MAX_DELETES)
        one, two = Mover(bucket, "one"), Mover(bucket, "two")

        def stall(request: str) -> None:
            if request == "DELETE rows" and bucket.count(request) == 1:
                bucket.after = lambda _: None
                two.steps(1, after_s=1.0)
                two.steps(1, after_s=31.0)
                assert two.writes

        bucket.after = stall
        one.steps()
        assert not one.writes
        assert bucket.requests[-1] == f"GET {USAGE_NAME}", "it has read that, and done nothing since"


@pytest.mark.parametrize(("max_age_s", "hours"), [(None, 3), (8 * 600.0, 0.5)])
def test_an_idle_prefix_is_listed_once_an_hour_and_one_with_an_age_more_often(
    max_age_s: float | None, hours: float
) -> None:
    bucket = Bucket()
    fill(bucket, 5)
    mover = Mover(bucket, "me", max_age_s=max_age_s)
    mover.steps(int(hours * 720) + 10)
    assert bucket.count(LISTING) == 4


class TestWhoDoesNotWrite:
    def test_an_engine_without_conditional_writes_stores_and_makes_room_and_another_does_not(self) -> None:
        """Once the server has said so for a minute, which is told."""
        bucket = Bucket(knows_conditions=False)
        fill(bucket, CAPACITY_ROWS)
        one, two = Mover(bucket, "one"), Mover(bucket, "two")
        one.steps(11)
        assert one.store(row(1000)) == 0
        assert f"p/{USAGE_NAME}" not in bucket.objects
        one.steps(10)
        assert one.store(row(1000)) == 1
        for _ in range(40):
            one.steps(after_s=2.5)
            two.steps(after_s=2.5)
        assert two.store(row(1001)) == 0
        assert [*two.denials.current()] == ["conditional writes"], "the record is renewed all the time"
        assert one.store(row(1001)) == 1
        (problem,) = one.denials.current().values()
        assert "does not support conditional writes" in problem
        one.budget.end()
        two.steps(2)
        assert two.store(row(1002)) == 1
        assert len(bucket.rows) <= CAPACITY_ROWS

    @pytest.mark.parametrize(("condition", "ignored"), [("IfNoneMatch", True), ("IfMatch", True), ("IfAny", False)])
    def test_conditions_of_both_kinds_must_be_tested(self, condition: str, ignored: bool) -> None:
        class Bad(Bucket):
            def put_object(self, **given: Any) -> dict[str, Any]:
                given.pop(condition, None)
                return super().put_object(**given)

        mover = Mover(Bad(), "me")
        mover.steps(20)
        assert mover.quota.alone is ignored

    def test_an_answer_without_a_date_is_told_and_nothing_is_stored(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bucket = Bucket()
        mover = Mover(bucket, "me")
        monkeypatch.setattr(budget_module, "answered_at_s", lambda _: None)
        mover.steps(3)
        assert "lack an ETag, a Date or a Last-Modified" in mover.denials.current()["prefix"]
        assert mover.store(row(1)) == 0


class TestTheSteps:
    def test_an_unexpected_error_gives_up_the_record_and_is_logged_once(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bucket = Bucket()
        mover = Mover(bucket, "me")
        mover.steps()
        assert mover.writes

        def fail(*_: object) -> None:
            raise ZeroDivisionError

        with monkeypatch.context() as patch:
            patch.setattr(Sweeper, "_make_room", fail)
            mover.steps()
            assert not mover.writes
            mover.steps(3)
        assert (
            len([each for each in caplog.records if "unexpected error (ZeroDivisionError)" in each.getMessage()]) == 1
        )
        mover.steps(8)
        assert mover.writes
        assert mover.store(row(1)) == 1

    @pytest.mark.parametrize("stop", [LISTING, "DELETE rows"])
    def test_one_that_is_closed_in_a_sweep_hands_over(self, stop: str) -> None:
        """A listing may take many minutes, and a process that ends has two seconds."""
        bucket = Bucket(page_names=10)
        fill(bucket, 2 * CAPACITY_ROWS)
        mover = Mover(bucket, "me")
        bucket.before = lambda request: mover.budget._stop.set() if request == stop else None
        mover.steps()
        asked = [*bucket.requests]
        mover.budget.end()
        assert asked.count(stop) == 1
        other = Mover(bucket, "other")
        other.steps()
        assert other.writes


# --- requests of the writer fail, one at a time or all the time: what it has listed is not listed again ---------------

SELDOM = Terms(renew_s=3600.0, sweep_s=3600.0, confirm_s=0.0)
OFTEN = replace(SELDOM, renew_s=5.0)


def rows(first: int, last: int) -> list[str]:
    return [row(number) for number in range(first, last)]


LEFT = set(rows(2 * WINDOW_ROWS, CAPACITY_ROWS))  # when the two oldest windows were deleted


class TestDeletesThatFail:
    @pytest.fixture
    def bucket(self) -> Bucket:
        bucket = Bucket()
        fill(bucket, CAPACITY_ROWS)
        return bucket

    def test_rows_whose_delete_was_not_answered_are_deleted_again_and_no_others_for_them(self, bucket: Bucket) -> None:
        mover = Mover(bucket, "me", terms=SELDOM)
        bucket.after = once("DELETE rows")
        for _ in range(2):
            mover.budget.step()
            assert bucket.rows == LEFT
        assert bucket.record.nbytes == len(LEFT) * ROW
        assert bucket.count("DELETE rows") == 2

    @pytest.mark.parametrize("error", [{"Key": "elsewhere"}, {}], ids=["other name", "no name"])
    def test_an_error_for_a_name_that_was_not_sent_counts_for_all_of_them(
        self, bucket: Bucket, error: dict[str, str]
    ) -> None:
        mover = Mover(bucket, "me", terms=SELDOM)
        bucket.delete_errors = ({"Code": "InternalError", **error},)
        mover.budget.step()
        assert bucket.record.nbytes == CAPACITY_ROWS * ROW, "nothing is taken for deleted"
        bucket.delete_errors = ()
        for _ in range(2):
            mover.budget.step()
        assert bucket.rows == LEFT
        assert bucket.record.nbytes == len(bucket.rows) * ROW


@pytest.mark.parametrize(
    ("request_name", "status"),
    [
        (f"PUT {CONDITIONS_NAME}-me", 500),
        *itertools.product([f"PUT {USAGE_NAME}", f"GET {USAGE_NAME}", "GET .owner"], [412, 500]),
    ],
)
def test_a_request_that_always_fails_is_a_problem_until_it_succeeds(request_name: str, status: int) -> None:
    """With an error that is no denial: nothing may be uploaded, and somebody has to say so."""

    def fail(name: str) -> None:
        if name == request_name:
            raise failed(status)

    bucket = Bucket(before=fail)
    mover = Mover(bucket, "me", terms=SELDOM)
    mover.budget.step()
    assert mover.denials.current() == {}, "not after one"
    mover.steps(after_s=UNCHANGED_S + 1.0)
    (problem,) = mover.denials.current().values()
    assert "was not renewed for 6" in problem
    assert UNREACHABLE in mover.denials.current(), "an outage is no lack of room, and nobody denies it"
    assert mover.store(row(0)) == 0
    bucket.before = lambda _: None
    mover.steps(after_s=16.0)
    assert mover.store(row(0)) == 1


def test_who_cannot_list_keeps_nobody_else_from_writing_the_record() -> None:
    bucket = Bucket()
    poor, two = Mover(bucket, "poor", terms=OFTEN), Mover(bucket, "two", terms=OFTEN)
    asking, told, stored = poor, set[str](), 0

    def deny(name: str) -> None:
        if asking is poor and name.startswith(("LIST", "LOOK")):
            raise failed(403)

    bucket.before = deny
    for number in range(60):
        bucket.now_s += 5.0
        for asking in (poor, two):
            asking.budget.step()
        stored += two.store(row(number))
        told.add(bucket.record.writer)
    assert told == {"two"}
    assert stored > 40


@pytest.mark.parametrize("ahead_s", [-3600.0, 60.0, 3600.0])
def test_servers_with_two_clocks_change_nothing(ahead_s: float) -> None:
    """The Date of an answer is ahead of the Last-Modified in it: whether the record is written is seen by its
    changes, and how old a row is counted by the clock of Last-Modified."""
    bucket = Bucket()
    one, two = Mover(bucket, "one", terms=OFTEN), Mover(bucket, "two", terms=OFTEN)
    for _ in range(12):
        one.budget.step()
        two.budget.step()
        bucket.now_s += 5.0
        bucket.ahead_s = ahead_s
        one.store(row(0))
    assert (one.writes, two.writes) == (True, False)
    assert one.denials.current() == {}
    for each in (one, two):
        assert max(0.0, ahead_s - 5.0) <= each.quota.ahead_s <= max(0.0, ahead_s)
    two.steps(after_s=31.0)
    assert two.writes


def test_a_damaged_name_before_a_sweep_is_interrupted_skips_no_rows() -> None:
    bucket = Bucket(page_names=3)
    fill(bucket, CAPACITY_ROWS - 2 * WINDOW_ROWS)
    bucket.damaged_names = {f"p/{CONDITIONS_NAME}": "p/~"}

    def fail(name: str) -> None:
        if name == LISTING and bucket.count(name) == 2:
            raise failed(503)

    bucket.before = fail
    mover = Mover(bucket, "me", terms=SELDOM)
    for _ in range(2):
        mover.budget.step()
    assert bucket.record.nbytes == len(bucket.rows) * ROW


class TestCountersThatCannotBeRead:
    @pytest.mark.parametrize("damaged", [b"?", b"9" * 15])
    @pytest.mark.parametrize("uploaded", [0, WINDOW_ROWS])
    def test_one_that_has_arrived_damaged_is_written_again(self, uploaded: int, damaged: bytes) -> None:
        """Else its mover would wait for an hour: nothing is granted, so that the counter does not change."""
        bucket = Bucket()
        one, two = Mover(bucket, "one", terms=OFTEN), Mover(bucket, "two", terms=OFTEN)

        def passes(seconds: int) -> None:
            for _ in range(seconds // 5):
                two.steps()
                one.budget.step()

        one.budget.step()
        if uploaded:
            passes(20)
            assert two.store(*rows(0, 20)) == uploaded

        def damage(name: str) -> None:
            if name == f"PUT {COUNTER_NAME}two":
                bucket.after = lambda _: None
                bucket.store(f"p/{COUNTER_NAME}two", damaged)

        bucket.after = damage
        passes(60)
        assert 0 <= bucket.record.nbytes < 100 * ROW
        assert 1 <= two.store(*rows(100, 200)) <= WINDOW_ROWS

    @pytest.mark.parametrize("uploaded", [None, 0, WINDOW_ROWS])
    @pytest.mark.parametrize("healed_at", ["PUT .usage", "LIST p/", "never"])
    def test_one_that_a_sweep_has_counted_damaged_grants_no_more_than_a_window(
        self, uploaded: int | None, healed_at: str
    ) -> None:
        """`uploaded`: None: the first one arrives damaged, so that it waits for a sweep."""
        bucket = Bucket()
        one, two = (Mover(bucket, name, terms=Terms(confirm_s=0.0)) for name in ("one", "two"))
        for each in (one, two, one, two, one)[: 1 if uploaded is None else 5]:
            each.steps()
        true = b"%d" % ((uploaded or 0) * ROW)
        assert two.store(*rows(0, uploaded or 0)) * ROW == int(true)
        bucket.store(f"p/{COUNTER_NAME}two", b"9" * 15)

        def heal(name: str) -> None:
            if name == healed_at:
                bucket.store(f"p/{COUNTER_NAME}two", true)

        bucket.after = heal
        stored = 0
        for _ in range(60):
            one.steps(after_s=31.0)
            assert 0 <= bucket.record.nbytes < 100 * ROW
        two.budget.step()
        assert two.store(*rows(100, 300)) <= WINDOW_ROWS
        for _ in range(20):
            two.steps(after_s=31.0)
            one.budget.step()
            stored += two.store(row(300 + stored))
        assert stored > WINDOW_ROWS, "it is healed"
