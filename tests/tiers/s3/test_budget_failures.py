"""Requests of the usage record's writer fail, one at a time or all the time: what it has listed is not listed again.

No thread runs: each of its turns is a step of the test, over a bucket in memory, whose clock is everybody's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from nixl_tiers.base.chunk import UNREACHABLE
from nixl_tiers.tiers.s3 import budget as budget_module
from nixl_tiers.tiers.s3.budget import COUNTER_NAME, MAX_EMPTY_PAGES, UNCHANGED_S, USAGE_NAME, Budget
from nixl_tiers.tiers.s3.denials import Denials
from nixl_tiers.tiers.s3.names import CONDITIONS_NAME
from nixl_tiers.tiers.s3.record import UploadQuota
from nixl_tiers.tiers.s3.takeover import Terms
from tests.tiers.s3.memory_bucket import LISTING, ROW, Bucket, failed, once, row

CAPACITY_ROWS = 640  # so a window is 10 rows
PAGE_NAMES = 3  # where a listing has several pages
SELDOM = Terms(renew_s=3600.0, sweep_s=3600.0, confirm_s=0.0)
EACH_PAGE = replace(SELDOM, renew_s=0.0)


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget_module, "budget_clock", lambda: Bucket.made_last.now_s)


def mover(bucket: Bucket, name: str = "me", terms: Terms = SELDOM) -> tuple[UploadQuota, Budget]:
    quota = UploadQuota(name, CAPACITY_ROWS * ROW, ROW)
    denials = Denials("the bucket", lambda: bucket.now_s)
    connection: Any = SimpleNamespace(client=bucket, delete_client=bucket, denials=denials)
    return quota, Budget(connection, "b", "p", quota=quota, terms=terms)


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

    def test_a_retry_of_the_renewal_whose_first_answer_was_lost(self) -> None:
        """boto3 sends it twice: the second time the ETag is another one."""
        bucket = Bucket()
        quota, budget = mover(bucket)
        budget.step()
        bucket.store(f"p/{USAGE_NAME}", replace(bucket.record, write="first").encode())
        budget.step()
        budget.step()
        assert writes(budget), "it finds its own name"
        assert bucket.count(LISTING) == 1
        assert uploads(quota, bucket, range(5)) == 5

    def test_a_record_that_could_not_be_written_at_the_end_of_a_sweep_is_written_later(self) -> None:
        bucket = Bucket()
        quota, budget = mover(bucket)

        def third(name: str) -> None:
            if name == f"PUT {USAGE_NAME}" and bucket.count(name) == 3:
                raise failed(503)

        bucket.before = third
        budget.step()
        assert uploads(quota, bucket, range(5)) == 0
        budget.step()
        assert uploads(quota, bucket, range(5)) == 5
        assert bucket.count(LISTING) == 1

    @pytest.mark.parametrize("lost_write", [1, 2])
    @pytest.mark.parametrize("arrives", [False, True], ids=["request lost", "answer lost"])
    def test_a_takeover_goes_on(self, lost_write: int, arrives: bool) -> None:
        bucket = Bucket()
        quota, budget = mover(bucket)

        def fail(name: str) -> None:
            if name == f"PUT {USAGE_NAME}" and bucket.count(name) == lost_write:
                raise failed(503)

        setattr(bucket, "after" if arrives else "before", fail)
        for _ in range(2):
            budget.step()
            bucket.now_s += 5.0
        assert writes(budget)
        assert uploads(quota, bucket, range(1)) == 1

    def test_rows_whose_delete_was_not_answered_are_deleted_again_and_no_others_for_them(self) -> None:
        bucket = Bucket()
        for number in range(CAPACITY_ROWS):
            bucket.now_s += 1.0
            bucket.store(row(number))
        _, budget = mover(bucket)
        bucket.after = once("DELETE rows")
        budget.step()
        expected = {row(number) for number in range(20, CAPACITY_ROWS)}
        assert bucket.rows == expected, "two windows, the oldest"
        budget.step()
        assert bucket.rows == expected
        assert bucket.record.nbytes == len(expected) * ROW
        assert bucket.count("DELETE rows") == 2

    @pytest.mark.parametrize("error", [{"Key": "elsewhere"}, {}], ids=["other name", "no name"])
    def test_an_error_for_a_name_that_was_not_sent_counts_for_all_of_them(self, error: dict[str, str]) -> None:
        bucket = Bucket()
        for number in range(CAPACITY_ROWS):
            bucket.now_s += 1.0
            bucket.store(row(number))
        _, budget = mover(bucket)
        bucket.delete_errors = ({"Code": "InternalError", **error},)
        budget.step()
        assert bucket.record.nbytes == CAPACITY_ROWS * ROW, "nothing is taken for deleted"
        bucket.delete_errors = ()
        for _ in range(2):
            budget.step()
        assert bucket.rows == {row(number) for number in range(20, CAPACITY_ROWS)}
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

    def test_who_may_not_delete_an_old_counter_goes_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bucket = Bucket()
        bucket.store(f"p/{COUNTER_NAME}gone", b"0")
        bucket.now_s += 4 * 3600.0

        def deny(**_: object) -> None:
            raise failed(403)

        monkeypatch.setattr(bucket, "delete_object", deny)
        quota, budget = mover(bucket)
        budget.step()
        assert bucket.record.counted == {"me": 0}
        assert uploads(quota, bucket, range(5)) == 5

    @pytest.mark.parametrize("since", ["the start", "later"])
    def test_who_may_not_write_hears_what_was_deleted(self, since: str) -> None:
        bucket = Bucket()
        terms = replace(SELDOM, renew_s=5.0)
        (_, one), (quota, poor) = mover(bucket, "one", terms), mover(bucket, "poor", terms)
        one.step()
        if since == "later":
            for each in (poor, one, poor):
                each.step()
            assert uploads(quota, bucket, range(1)) == 1

        def deny(name: str) -> None:
            if name.startswith("PUT"):
                raise failed(403)

        bucket.before = deny
        changed = replace(bucket.record, oldest=77, write="another")
        bucket.store(f"p/{USAGE_NAME}", changed.encode())
        poor.step()
        assert quota.record.oldest == 77


class TestEmptyPages:
    def test_a_listing_gets_behind_a_long_run_of_them_and_says_so_meanwhile(self) -> None:
        """Of delete markers, for example."""

        class Marked(Bucket):
            def paginate(self, **request: Any) -> Iterator[dict[str, Any]]:
                if request["Prefix"] == LISTING.removeprefix("LIST "):
                    bucket.now_s += UNCHANGED_S + 1.0
                    for _ in range(MAX_EMPTY_PAGES + 10):
                        yield self._date
                    problems.extend(budget._denials.current().values())
                yield from super().paginate(**request)

        bucket, problems = Marked(), list[str]()
        quota, budget = mover(bucket, terms=EACH_PAGE)
        budget.step()
        assert "was not renewed for 6" in problems[0]
        assert uploads(quota, bucket, range(1)) == 1


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

    def test_uploads_while_a_sweep_is_interrupted_are_counted(self, bucket: Bucket) -> None:
        _, budget = mover(bucket)
        other = UploadQuota("other", CAPACITY_ROWS * ROW, ROW)
        bucket.store(f"p/{COUNTER_NAME}other", b"0")

        def fail(name: str) -> None:
            if name == LISTING and bucket.count(name) == self.PAGES // 2:
                raise failed(503)

        bucket.before = fail
        budget.step()
        assert budget.takeover.account is not None
        assert budget.takeover.account.sweep is not None
        for number in (0, 10_000):  # a name that was listed, and one that will be
            bucket.objects.pop(row(number), None)
            bucket.store(row(number))
            other.upload_ended(ROW, bucket.now_s)
        bucket.store(f"p/{COUNTER_NAME}other", b"%d" % other.counter(bucket.now_s).ended)
        budget.step()
        budget.step()
        assert bucket.record.counted["other"] == 2 * ROW
        assert bucket.record.nbytes >= len(bucket.rows) * ROW


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

    def test_one_of_a_mover_that_is_gone_stops_nobody(self, caplog: pytest.LogCaptureFixture) -> None:
        bucket = Bucket()
        bucket.store(f"p/{COUNTER_NAME}gone", b"")
        quota, budget = mover(bucket)
        for _ in range(3):
            budget.step()
        assert uploads(quota, bucket, range(5)) == 5
        assert bucket.record.counted == {"me": 0}
        assert budget._denials.current() == {}
        (line,) = [each.getMessage() for each in caplog.records]
        assert f"p/{COUNTER_NAME}gone" in line

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
