"""The byte budget of a prefix, step by step: several movers over a bucket in memory.

No thread runs, and the bucket's clock is everybody's. The protocol alone, in any order of events: record_machine.py.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from nixl_tiers.base.chunk import UNREACHABLE
from nixl_tiers.tiers.s3 import budget as budget_module
from nixl_tiers.tiers.s3 import deletes
from nixl_tiers.tiers.s3 import record as record_module
from nixl_tiers.tiers.s3.budget import COUNTER_NAME, LEAST_TURN_S, UNCHANGED_S, USAGE_NAME, Budget
from nixl_tiers.tiers.s3.deletes import MAX_DELETES
from nixl_tiers.tiers.s3.denials import Denials
from nixl_tiers.tiers.s3.names import CONDITIONS_NAME
from nixl_tiers.tiers.s3.record import UploadQuota
from nixl_tiers.tiers.s3.sweep import Sweeper
from nixl_tiers.tiers.s3.takeover import Terms
from tests.tiers.s3.memory_bucket import LISTING, NAMES, ROW, Bucket, failed, lost, once, row

CAPACITY_ROWS = 64
WINDOW_ROWS = 8
STEP_S = 5.0
TERMS = Terms(confirm_s=0.0, settle_s=0.0)


@pytest.fixture(autouse=True)
def _virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def now_s() -> float:
        return Bucket.made_last.now_s

    monkeypatch.setattr(budget_module, "budget_clock", now_s)
    monkeypatch.setattr(record_module, "WINDOW_SHARE", CAPACITY_ROWS // WINDOW_ROWS)


class Mover:
    """Uploads, the quota that grants them, and what keeps that up to date. `budget_rows`: how many may be there."""

    def __init__(
        self, bucket: Bucket, name: str, budget_rows: int = CAPACITY_ROWS, rows: int = CAPACITY_ROWS, **named: object
    ) -> None:
        self.bucket = bucket
        self.budget_rows = budget_rows
        self.quota = UploadQuota(name, rows * ROW, ROW)
        self.denials = Denials("the bucket", lambda: bucket.now_s)
        connection: Any = SimpleNamespace(client=bucket, delete_client=bucket, denials=self.denials)
        given: dict[str, Any] = {"terms": TERMS, **named}
        self.budget = Budget(connection, "b", "p", quota=self.quota, **given)
        self.begun: list[str] = []

    def begin(self, *names: str) -> int:
        """Begin these uploads, as many as are granted."""
        count = 0
        for name in names:
            if not self.quota.try_acquire(ROW):
                break
            self.begun.append(name)
            count += 1
        return count

    def end(self) -> None:
        """All that were begun arrive."""
        for name in self.begun:
            self.bucket.store(name)
            self.quota.upload_ended(ROW, self.bucket.now_s)
        assert len(self.bucket.rows) <= self.budget_rows
        self.begun.clear()

    def store(self, *names: str) -> int:
        count = self.begin(*names)
        self.end()
        return count

    def steps(self, count: int = 1, after_s: float = STEP_S) -> None:
        for _ in range(count):
            self.bucket.now_s += after_s
            self.budget.step()

    @property
    def writes(self) -> bool:
        """Whether it writes the usage record, and so lists and deletes."""
        return self.budget.takeover.account is not None


def name_of(number: int, namespace: int = 0) -> str:
    return NAMES.name(f"{namespace:02x}" * 16, b"%08d" % number)


def fill(bucket: Bucket, count: int, namespace: int = 0) -> list[str]:
    """Rows of before, each a second younger than the one before it."""
    names = [name_of(number, namespace) for number in range(count)]
    for name in names:
        bucket.now_s += 1.0
        bucket.store(name)
    return names


class TestTheBudget:
    @pytest.mark.parametrize("seed", range(12))
    def test_movers_that_fill_the_prefix_many_times_in_any_order_stay_within_it(self, seed: int) -> None:
        """Each begins uploads whenever it may, and they arrive at any time later. Some requests of janitors fail, and
        some leases expire."""
        chance = random.Random(seed)
        bucket = Bucket(page_names=chance.choice([5, 20, 1000]))
        count = chance.choice([1, 2, 3])
        budget = CAPACITY_ROWS + (count - 1) * WINDOW_ROWS
        failing = chance.choice([0.0, 0.0, 0.05, 0.2])

        def meanwhile(request: str) -> None:
            """Before a request, and before its answer."""
            if chance.random() < 0.1:
                chance.choice(movers).end()
            if chance.random() < failing:
                raise chance.choice([failed(503), lost()])

        bucket.before = bucket.after = meanwhile
        movers = [Mover(bucket, f"mover-{number}", budget) for number in range(count)]
        arrived = number = steps = 0
        while arrived < 6 * CAPACITY_ROWS:
            mover = chance.choice(movers)
            action = chance.randrange(4)
            if action == 0:
                number += 3
                arrived += mover.begin(*(name_of(n, chance.randrange(3)) for n in range(number - 3, number)))
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

    def test_half_a_window_is_published_at_once(self) -> None:
        """So one engine writes as fast as it can, and not a window in five seconds."""
        bucket = Bucket()
        mover = Mover(bucket, "me")
        mover.steps()
        stored = 0
        for number in range(0, 40, WINDOW_ROWS // 2):
            stored += mover.store(*(name_of(n) for n in range(number, number + WINDOW_ROWS // 2)))
            assert mover.budget._wake.is_set()
            assert mover.budget.takeover.next_s <= bucket.now_s + LEAST_TURN_S, "also between the pages of a listing"
            mover.budget._wake.clear()
            mover.steps(after_s=0.0)
        assert stored == 40


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

    def test_no_others_than_those_that_are_too_old_while_uploads_are_counted(self) -> None:
        bucket = Bucket()
        me, other = (Mover(bucket, name, max_age_s=100.0) for name in ("me", "other"))
        for each in (me, other, me, other):
            each.steps()
        old, young = [name_of(n) for n in range(2)], [name_of(n) for n in range(10, 14)]
        assert other.store(*old) == len(old)
        bucket.now_s += 60.0
        assert other.store(*young) == len(young)
        for each in (other, me, me, me):
            each.steps()
        assert bucket.rows == {*old, *young}

        def slow(request: str) -> None:
            if request == "DELETE rows":
                bucket.now_s += TERMS.renew_s + 1
                other.store(*(name_of(n) for n in range(20, 24)))
                other.steps(after_s=0.0)

        bucket.before = slow
        me.steps(5)
        assert bucket.rows >= {*young}
        assert not bucket.rows & {*old}

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
            assert mover.store(name_of(1000)) == 0
            bucket.delete_errors = ()
            mover.steps(8)
            assert mover.store(name_of(1000)) == 1

    def test_names_that_may_not_be_deleted_were_not_used(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Else the prefix is listed again when half of them were."""
        monkeypatch.setattr(deletes, "MAX_DELETES", WINDOW_ROWS)
        bucket = Bucket()
        fill(bucket, CAPACITY_ROWS)
        monkeypatch.setattr(budget_module, "delete_names", lambda *_: set())
        mover = Mover(bucket, "me", terms=replace(TERMS, sweep_s=0.0))
        mover.steps(CAPACITY_ROWS // WINDOW_ROWS)
        assert bucket.count(LISTING) == 1

    def test_what_a_lock_keeps_is_not_said_to_be_gone(self) -> None:
        bucket = Bucket()
        rows = fill(bucket, CAPACITY_ROWS)
        bucket.delete_errors = tuple({"Key": name, "Code": "AccessDenied"} for name in rows[:3])
        mover = Mover(bucket, "me")
        mover.steps(4)
        assert bucket.record.nbytes <= (CAPACITY_ROWS - WINDOW_ROWS) * ROW
        assert bucket.record.oldest == int(bucket.objects[rows[0]][2])

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

    def test_nothing_later_than_a_while_after_the_last_own_write(self) -> None:
        """Another may have taken the record over meanwhile. It is deleted once it was renewed."""
        bucket = Bucket()
        mover = Mover(bucket, "me")
        mover.steps()
        fill(bucket, CAPACITY_ROWS)
        mover.budget.takeover.account.nbytes = CAPACITY_ROWS * ROW  # type: ignore[union-attr]

        def stall(request: str) -> None:
            if request == LISTING:
                bucket.now_s += 1.0
            if request == f"PUT {USAGE_NAME}" and bucket.now_s < late_s:
                raise failed(503)

        late_s = bucket.now_s + 60.0
        bucket.before = stall
        while bucket.now_s < late_s - STEP_S:
            mover.steps()
            assert bucket.count("DELETE rows") == 0
        mover.steps(4)
        assert len(bucket.rows) == CAPACITY_ROWS - 2 * WINDOW_ROWS


class TestSweeps:
    """A prefix may have ten million rows: it is listed when that is needed, and no more."""

    @pytest.mark.parametrize(("max_age_s", "hours"), [(None, 3), (8 * 600.0, 0.5)])
    def test_an_idle_prefix_is_listed_once_an_hour_and_one_with_an_age_more_often(
        self, max_age_s: float | None, hours: float
    ) -> None:
        bucket = Bucket()
        fill(bucket, 5)
        mover = Mover(bucket, "me", max_age_s=max_age_s)
        mover.steps(int(hours * 720) + 10)
        assert bucket.count(LISTING) == 4

    def test_a_prefix_that_somebody_has_emptied_is_written_to_again_by_all(self) -> None:
        """Which `aws s3 rm --recursive` does while engines run. Their counters are above a window."""
        bucket = Bucket()
        movers = [Mover(bucket, name, CAPACITY_ROWS + 2 * WINDOW_ROWS) for name in ("a", "b", "c")]
        for number in range(20):
            for place, each in enumerate(movers):
                each.steps(after_s=STEP_S / 3)
                each.store(*(name_of(100 * place + n) for n in range(3 * number, 3 * number + 3)))
        bucket.objects.clear()
        for _ in range(20):
            for each in movers:
                each.steps(after_s=STEP_S / 3)
        assert [each.store(name_of(1000 + place)) for place, each in enumerate(movers)] == [1, 1, 1]
        assert bucket.count(LISTING) < 20

    def test_restarts_of_eight_engines_list_nothing_before_more_than_four_windows_are_owed(self) -> None:
        bucket = Bucket()
        fill(bucket, 10)
        movers = [Mover(bucket, f"mover-{number}", CAPACITY_ROWS + 7 * WINDOW_ROWS) for number in range(4)]
        for _ in range(4):
            for mover in movers:
                mover.steps(after_s=1.0)
        assert bucket.count(LISTING) == 1
        assert bucket.record.windows == 3
        movers += [Mover(bucket, f"mover-{number}", CAPACITY_ROWS + 7 * WINDOW_ROWS) for number in range(4, 8)]
        for _ in range(20):
            for mover in movers:
                mover.steps(after_s=1.0)
        assert bucket.count(LISTING) == 2
        assert bucket.record.windows == 0
        assert bucket.record.nbytes == 10 * ROW


class TestTakeover:
    def test_one_that_is_gone_is_replaced_after_half_a_minute_and_a_closed_one_at_once(self) -> None:
        bucket = Bucket()
        one, two, three = (Mover(bucket, name) for name in ("one", "two", "three"))
        one.steps()
        two.steps(6)
        assert not two.writes
        two.steps(2)
        assert two.writes
        two.budget.end()
        three.steps()
        assert three.writes
        assert bucket.count(LISTING) == 1, "the next ones go on from the record that they replace"


class TestWhoDoesNotWrite:
    def test_an_engine_without_conditional_writes_stores_and_makes_room_and_another_does_not(self) -> None:
        """Once the server has said so for a minute, which is told."""
        bucket = Bucket(knows_conditions=False)
        fill(bucket, CAPACITY_ROWS)
        one, two = Mover(bucket, "one"), Mover(bucket, "two")
        one.steps(11)
        assert one.store(name_of(1000)) == 0
        assert f"p/{USAGE_NAME}" not in bucket.objects
        one.steps(10)
        assert one.store(name_of(1000)) == 1
        for _ in range(40):
            one.steps(after_s=2.5)
            two.steps(after_s=2.5)
        assert two.store(name_of(1001)) == 0
        assert [*two.denials.current()] == ["conditional writes"], "the record is renewed all the time"
        assert one.store(name_of(1001)) == 1
        (problem,) = one.denials.current().values()
        assert "does not support conditional writes" in problem
        one.budget.end()
        two.steps(2)
        assert two.store(name_of(1002)) == 1
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
        assert mover.store(name_of(1)) == 0


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
        assert mover.store(name_of(1)) == 1

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

    def test_the_thread_makes_them_until_it_is_closed_and_then_hands_over(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bucket = Bucket()
        mover = Mover(bucket, "me")
        budget, steps, waits = mover.budget, list[float](), list[float]()
        step = budget.step

        def counted() -> None:
            step()
            steps.append(bucket.now_s)

        def wait(seconds: float) -> bool:
            waits.append(seconds)
            bucket.now_s += seconds
            if len(steps) == 3:
                budget._stop.set()
            return budget._stop.is_set()

        monkeypatch.setattr(budget, "step", counted)
        monkeypatch.setattr(budget._stop, "wait", wait)
        monkeypatch.setattr(budget._wake, "wait", wait)
        budget._run()
        assert len(steps) == 3
        assert [after - before for before, after in itertools.pairwise(steps)] == [TERMS.renew_s] * 2
        assert not mover.writes
        other = Mover(bucket, "other")
        other.steps()
        assert other.writes, "it need not wait until the record is stale"


# --- requests of the writer fail, one at a time or all the time: what it has listed is not listed again ---------------

ROWS = 80  # so a window is 10 rows
PAGE_NAMES = 3  # where a listing has several pages
SELDOM = Terms(renew_s=3600.0, sweep_s=3600.0, confirm_s=0.0)
EACH_PAGE = replace(SELDOM, renew_s=0.0)


def mover(bucket: Bucket, name: str = "me", terms: Terms = SELDOM) -> tuple[UploadQuota, Budget]:
    made = Mover(bucket, name, rows=ROWS, terms=terms)
    return made.quota, made.budget


def writes(budget: Budget) -> bool:
    return budget.takeover.account is not None


def uploads(quota: UploadQuota, bucket: Bucket, numbers: range) -> int:
    """How many rows it may upload, and does."""
    count = 0
    for number in numbers:
        if quota.try_acquire(ROW):
            bucket.store(row(number))
            quota.upload_ended(ROW, bucket.now_s)
            count += 1
    return count


class TestOneFailedRequest:
    @pytest.mark.parametrize("arrives", [False, True], ids=["request lost", "answer lost"])
    @pytest.mark.parametrize(
        "request_name",
        [
            f"PUT {COUNTER_NAME}me",
            f"LIST {COUNTER_NAME}",
            f"GET {COUNTER_NAME}me",
            f"PUT {USAGE_NAME}",
            "PUT .owner",
            "PUT .janitor",
        ],
    )
    def test_uploads_go_on_without_another_listing(self, request_name: str, arrives: bool) -> None:
        bucket = Bucket()
        quota, budget = mover(bucket)
        budget.step()
        assert uploads(quota, bucket, range(5)) == 5
        bucket.now_s += 20.0
        requests = len(bucket.requests)
        setattr(bucket, "after" if arrives else "before", once(request_name))
        budget.step()
        assert request_name in bucket.requests[requests:]
        for _ in range(2):
            budget.step()
        assert writes(budget)
        assert bucket.record.nbytes == 5 * ROW
        assert bucket.record.counted == {"me": 5 * ROW}, "renewed, with what was uploaded since"
        assert bucket.count(LISTING) == 1
        assert uploads(quota, bucket, range(5, 20)) == 10, "a window"

    def test_rows_whose_delete_was_not_answered_are_deleted_again_and_no_others_for_them(self) -> None:
        bucket = Bucket()
        for number in range(ROWS):
            bucket.now_s += 1.0
            bucket.store(row(number))
        _, budget = mover(bucket)
        bucket.after = once("DELETE rows")
        budget.step()
        expected = {row(number) for number in range(20, ROWS)}
        assert bucket.rows == expected, "two windows, the oldest"
        budget.step()
        assert bucket.rows == expected
        assert bucket.record.nbytes == len(expected) * ROW
        assert bucket.count("DELETE rows") == 2

    @pytest.mark.parametrize("error", [{"Key": "elsewhere"}, {}], ids=["other name", "no name"])
    def test_an_error_for_a_name_that_was_not_sent_counts_for_all_of_them(self, error: dict[str, str]) -> None:
        bucket = Bucket()
        for number in range(ROWS):
            bucket.now_s += 1.0
            bucket.store(row(number))
        _, budget = mover(bucket)
        bucket.delete_errors = ({"Code": "InternalError", **error},)
        budget.step()
        assert bucket.record.nbytes == ROWS * ROW, "nothing is taken for deleted"
        bucket.delete_errors = ()
        for _ in range(2):
            budget.step()
        assert bucket.rows == {row(number) for number in range(20, ROWS)}
        assert bucket.record.nbytes == len(bucket.rows) * ROW


class TestRequestsThatAlwaysFail:
    """With an error that is no denial: nothing may be uploaded, and somebody has to say so."""

    @pytest.mark.parametrize(
        ("request_name", "status"),
        [
            (f"PUT {CONDITIONS_NAME}-me", 500),
            *itertools.product([f"PUT {USAGE_NAME}", f"GET {USAGE_NAME}", "GET .owner"], [412, 500]),
        ],
    )
    def test_is_a_problem_until_they_succeed(self, request_name: str, status: int) -> None:
        def fail(name: str) -> None:
            if name == request_name:
                raise failed(status)

        bucket = Bucket(before=fail)
        quota, budget = mover(bucket)
        budget.step()
        assert budget._denials.current() == {}, "not after one"
        bucket.now_s += UNCHANGED_S + 1.0
        budget.step()
        (problem,) = budget._denials.current().values()
        assert "was not renewed for 6" in problem
        assert UNREACHABLE in budget._denials.current(), "an outage is no lack of room, and nobody denies it"
        assert uploads(quota, bucket, range(1)) == 0
        bucket.before = lambda _: None
        bucket.now_s += 16.0
        budget.step()
        assert uploads(quota, bucket, range(1)) == 1


class TestRightsThatOneLacks:
    def test_who_cannot_list_keeps_nobody_else_from_writing_the_record(self) -> None:
        bucket = Bucket()
        terms = replace(SELDOM, renew_s=5.0)
        (_, poor), (quota, two) = mover(bucket, "poor", terms), mover(bucket, "two", terms)
        asking, told, stored = poor, set[str](), 0

        def deny(name: str) -> None:
            if asking is poor and name.startswith(("LIST", "LOOK")):
                raise failed(403)

        bucket.before = deny
        for number in range(60):
            bucket.now_s += 5.0
            for asking in (poor, two):
                asking.step()
            stored += uploads(quota, bucket, range(number, number + 1))
            told.add(bucket.record.writer)
        assert told == {"two"}
        assert stored > 40


class TestServersWithTwoClocks:
    """The Date of an answer is ahead of the Last-Modified in it: whether the record is written is seen by its
    changes, and how old a row is counted by the clock of Last-Modified."""

    @pytest.mark.parametrize("ahead_s", [-3600.0, 60.0, 3600.0])
    def test_change_nothing(self, ahead_s: float) -> None:
        bucket = Bucket()
        terms = replace(SELDOM, renew_s=5.0)
        quota, one = mover(bucket, "one", terms)
        late, two = mover(bucket, "two", terms)
        for _ in range(12):
            one.step()
            two.step()
            bucket.now_s += 5.0
            bucket.ahead_s = ahead_s
            uploads(quota, bucket, range(1))
        assert (writes(one), writes(two)) == (True, False)
        assert one._denials.current() == {}
        for each in (quota, late):
            assert max(0.0, ahead_s - 5.0) <= each.ahead_s <= max(0.0, ahead_s)
        bucket.now_s += 31.0
        two.step()
        assert writes(two)


class TestSweepsUnderThrottling:
    PAGES = 20

    @pytest.fixture
    def bucket(self) -> Bucket:
        bucket = Bucket(page_names=PAGE_NAMES)
        for number in range(self.PAGES * PAGE_NAMES - 1):  # the janitor's own objects are on the first pages
            bucket.store(row(number))
        return bucket

    @pytest.mark.parametrize("terms", [SELDOM, EACH_PAGE], ids=["renewed seldom", "renewed after each page"])
    @pytest.mark.parametrize("request_name", [LISTING, f"PUT {USAGE_NAME}", f"PUT {COUNTER_NAME}me"])
    def test_a_sweep_ends_and_lists_no_page_twice(self, bucket: Bucket, request_name: str, terms: Terms) -> None:
        """Each third request of a kind fails."""

        def fail(name: str) -> None:
            if name == request_name and bucket.count(name) % 3 == 0:
                raise failed(503)

        bucket.before = fail
        quota, budget = mover(bucket, terms=terms)
        if request_name.startswith("PUT .landed"):
            budget.takeover._published_s = float("-inf")
        turns = 0
        while uploads(quota, bucket, range(1000, 1001)) == 0:
            budget.step()
            turns += 1
            assert turns < 3 * self.PAGES
        rows = self.PAGES * PAGE_NAMES - 1
        assert bucket.record.nbytes == rows * ROW, "each row is counted, once"
        failures = bucket.count(LISTING) // 3 if request_name == LISTING else 0
        assert bucket.count(LISTING) <= self.PAGES + failures + 3

    def test_a_damaged_name_before_an_interruption_skips_no_rows(self, bucket: Bucket) -> None:
        _, budget = mover(bucket)
        bucket.damaged_names = {f"p/{CONDITIONS_NAME}": "p/~"}

        def fail(name: str) -> None:
            if name == LISTING and bucket.count(name) == 2:
                raise failed(503)

        bucket.before = fail
        for _ in range(2):
            budget.step()
        assert bucket.record.nbytes == len(bucket.rows) * ROW


class TestCountersThatCannotBeRead:
    @pytest.mark.parametrize("damaged", [b"?", b"9" * 15])
    @pytest.mark.parametrize("uploaded", [0, 10])
    def test_one_that_has_arrived_damaged_is_written_again(self, uploaded: int, damaged: bytes) -> None:
        """Else its mover would wait for an hour: nothing is granted, so that the counter does not change."""
        bucket = Bucket()
        terms = replace(SELDOM, renew_s=5.0)
        (_, one), (quota, two) = mover(bucket, "one", terms), mover(bucket, "two", terms)

        def passes(seconds: int) -> None:
            for _ in range(seconds // 5):
                bucket.now_s += 5.0
                two.step()
                one.step()

        one.step()
        if uploaded:
            passes(20)
            assert uploads(quota, bucket, range(20)) == uploaded

        def damage(name: str) -> None:
            if name == f"PUT {COUNTER_NAME}two":
                bucket.after = lambda _: None
                bucket.store(f"p/{COUNTER_NAME}two", damaged)

        bucket.after = damage
        passes(60)
        assert 0 <= bucket.record.nbytes < 100 * ROW
        assert 1 <= uploads(quota, bucket, range(100, 200)) <= 10, "a window"

    @pytest.mark.parametrize("uploaded", [None, 0, 10])
    @pytest.mark.parametrize("healed_at", ["PUT .usage", "LIST p/", "never"])
    def test_one_that_a_sweep_has_counted_damaged_grants_no_more_than_a_window(
        self, uploaded: int | None, healed_at: str
    ) -> None:
        """`uploaded`: None: the first one arrives damaged, so that it waits for a sweep."""
        bucket = Bucket()
        terms = Terms(confirm_s=0.0)
        (_, one), (quota, two) = mover(bucket, "one", terms), mover(bucket, "two", terms)
        for each in (one, two, one, two, one)[: 1 if uploaded is None else 5]:
            bucket.now_s += 5.0
            each.step()
        true = b"%d" % ((uploaded or 0) * ROW)
        assert uploads(quota, bucket, range(uploaded or 0)) * ROW == int(true)
        bucket.store(f"p/{COUNTER_NAME}two", b"9" * 15)

        def heal(name: str) -> None:
            if name == healed_at:
                bucket.store(f"p/{COUNTER_NAME}two", true)

        bucket.after = heal
        stored = 0
        for _ in range(60):
            bucket.now_s += 31.0
            one.step()
            assert 0 <= bucket.record.nbytes < 100 * ROW
        two.step()
        assert uploads(quota, bucket, range(100, 300)) <= 10, "a window"
        for _ in range(20):
            bucket.now_s += 31.0
            two.step()
            one.step()
            stored += uploads(quota, bucket, range(300 + stored, 301 + stored))
        assert stored > 10, "it is healed"

    def test_one_that_the_record_knows_keeps_its_value_also_for_the_next_writer(self) -> None:
        bucket = Bucket()
        _, one = mover(bucket, "one")
        other, two = mover(bucket, "two")
        for each in (one, two, one, two):
            each.step()
        assert uploads(other, bucket, range(3)) == 3
        two.step()
        one.step()
        assert bucket.record.counted == {"one": 0, "two": 3 * ROW}
        bucket.store(f"p/{COUNTER_NAME}two", b"?")
        assert uploads(other, bucket, range(3, 6)) == 3
        one.step()
        assert bucket.record.counted == {"one": 0, "two": 3 * ROW}
        third, three = mover(bucket, "three")
        three.step()
        bucket.now_s += 31.0
        for _ in range(2):
            three.step()
        assert writes(three)
        assert bucket.record.counted["two"] == 3 * ROW
        two.takeover._published_s = float("-inf")
        two.step()
        three.step()
        assert bucket.record.counted["two"] == 6 * ROW, "it has written its counter again"
        assert bucket.record.nbytes >= len(bucket.rows) * ROW
        assert uploads(third, bucket, range(100, 101)) == 1
