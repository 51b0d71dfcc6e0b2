"""The janitor's requests fail, one at a time or all the time: what it has listed is not listed again for that.

No thread runs: each turn of the janitor's is a step of the test, over a bucket in memory, whose clock is everybody's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from nixl_tiers.base.chunk import UNREACHABLE
from nixl_tiers.tiers.s3 import janitor as janitor_module
from nixl_tiers.tiers.s3 import lease as lease_module
from nixl_tiers.tiers.s3 import usage as usage_module
from nixl_tiers.tiers.s3.denials import Denials
from nixl_tiers.tiers.s3.janitor import COUNTER_NAME, USAGE_NAME, Janitor, JanitorIntervals
from nixl_tiers.tiers.s3.lease_state import JANITOR_TERMS
from nixl_tiers.tiers.s3.listing import MAX_EMPTY_PAGES
from nixl_tiers.tiers.s3.names import WRITE_TEST_NAME
from nixl_tiers.tiers.s3.usage import UploadQuota, Usage
from tests.tiers.s3.memory_bucket import LISTING, ROW, Bucket, failed, once, row

CAPACITY_ROWS = 640  # so a window is 10 rows
PAGE_NAMES = 3  # where a listing has several pages
LEASE_NAME = JANITOR_TERMS.name
SELDOM = JanitorIntervals(renew_s=3600.0, sweep_s=3600.0, lease=replace(JANITOR_TERMS, confirm_s=0.0))
EACH_PAGE = replace(SELDOM, renew_s=0.0)


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "lease_clock", lambda: Bucket.made_last.now_s)


def mover(bucket: Bucket, name: str = "me", intervals: JanitorIntervals = SELDOM) -> tuple[UploadQuota, Janitor]:
    quota = UploadQuota(name, CAPACITY_ROWS * ROW, ROW)
    return quota, Janitor(
        lambda: bucket, "b", "p", quota=quota, intervals=intervals, denials=Denials("the bucket"), max_age_s=None
    )


def uploads(quota: UploadQuota, bucket: Bucket, numbers: range) -> int:
    """How many rows it may upload, and does."""
    count = 0
    for number in numbers:
        if quota.try_acquire(ROW):
            bucket.store(row(number))
            quota.upload_ended(ROW)
            count += 1
    return count


class TestOneFailedRequest:
    @pytest.mark.parametrize("arrives", [False, True], ids=["request lost", "answer lost"])
    @pytest.mark.parametrize(
        "request_name",
        [
            f"PUT {COUNTER_NAME}me",
            f"PUT {LEASE_NAME}",
            f"LIST {COUNTER_NAME}",
            f"GET {COUNTER_NAME}me",
            f"PUT {USAGE_NAME}",
            f"GET {USAGE_NAME}",
        ],
    )
    def test_uploads_go_on_without_another_listing(self, request_name: str, arrives: bool) -> None:
        bucket = Bucket()
        quota, janitor = mover(bucket)
        janitor.step()
        assert uploads(quota, bucket, range(5)) == 5
        requests = len(bucket.requests)
        setattr(bucket, "after" if arrives else "before", once(request_name))
        janitor.step()
        assert request_name in bucket.requests[requests:]
        for _ in range(2):
            janitor.step()
        assert janitor.holds_lease
        assert bucket.usage == Usage(5 * ROW, {"me": 5 * ROW}), "renewed, with what was uploaded since"
        assert bucket.count(LISTING) == 1
        assert uploads(quota, bucket, range(5, 20)) == 10, "a window"

    def test_a_retry_of_the_renewal_whose_first_answer_was_lost(self) -> None:
        """boto3 sends it twice: the second time the ETag is another one."""
        bucket = Bucket()
        quota, janitor = mover(bucket)
        janitor.step()
        bucket.store(f"p/{LEASE_NAME}", b"me 2")
        janitor.step()
        read = bucket.count(f"GET {LEASE_NAME}")
        janitor.step()
        assert bucket.count(f"GET {LEASE_NAME}") == read + 1, "it finds its own"
        assert janitor.holds_lease
        assert bucket.count(LISTING) == 1
        assert uploads(quota, bucket, range(5)) == 5

    def test_a_record_that_could_not_be_written_at_the_end_of_a_sweep_is_written_later(self) -> None:
        bucket = Bucket()
        quota, janitor = mover(bucket)
        bucket.before = once(f"PUT {USAGE_NAME}")
        janitor.step()
        assert uploads(quota, bucket, range(5)) == 0
        janitor.step()
        assert uploads(quota, bucket, range(5)) == 5
        assert bucket.count(LISTING) == 1

    def test_after_another_janitor_everything_is_listed_again(self) -> None:
        bucket = Bucket()
        _, one = mover(bucket, "one")
        _, two = mover(bucket, "two")
        one.step()
        two.step()
        bucket.before = once(f"PUT {LEASE_NAME}")
        one.step()
        bucket.now_s += 31.0
        two.step()
        assert (one.holds_lease, two.holds_lease) == (False, True)
        one.step()
        assert (one.holds_lease, two.holds_lease) == (False, True)
        listed = bucket.count(LISTING)
        bucket.now_s += 31.0
        one.step()
        assert bucket.count(LISTING) == listed + 1
        two.step()
        assert (one.holds_lease, two.holds_lease) == (True, False)

    def test_a_lost_answer_to_a_take_over_keeps_nothing_listed_before(self) -> None:
        bucket = Bucket()
        _, one = mover(bucket, "one")
        one.step()
        bucket.store(f"p/{LEASE_NAME}", b"two 1")
        for _ in range(2):
            one.step()
        bucket.now_s += 31.0
        bucket.after = once(f"PUT {LEASE_NAME}")
        one.step()
        assert bucket.small(LEASE_NAME).startswith(b"one"), "it finds itself as the holder"
        listed = bucket.count(LISTING)
        one.step()
        assert one.holds_lease
        assert bucket.count(LISTING) == listed + 1

    def test_rows_whose_delete_was_not_answered_are_deleted_again_and_no_others_for_them(self) -> None:
        bucket = Bucket()
        for number in range(CAPACITY_ROWS):
            bucket.now_s += 1.0
            bucket.store(row(number))
        _, janitor = mover(bucket)
        bucket.after = once("DELETE rows")
        janitor.step()
        expected = {row(number) for number in range(20, CAPACITY_ROWS)}
        assert bucket.rows == expected, "two windows, the oldest"
        janitor.step()
        assert bucket.rows == expected
        assert bucket.usage is not None
        assert bucket.usage.nbytes == len(expected) * ROW
        assert bucket.count("DELETE rows") == 2

    @pytest.mark.parametrize("error", [{"Key": "elsewhere"}, {}], ids=["other name", "no name"])
    def test_an_error_for_a_name_that_was_not_sent_counts_for_all_of_them(self, error: dict[str, str]) -> None:
        bucket = Bucket()
        for number in range(CAPACITY_ROWS):
            bucket.now_s += 1.0
            bucket.store(row(number))
        _, janitor = mover(bucket)
        bucket.delete_errors = ({"Code": "InternalError", **error},)
        janitor.step()
        assert bucket.usage is not None
        assert bucket.usage.nbytes == CAPACITY_ROWS * ROW, "nothing is taken for deleted"
        bucket.delete_errors = ()
        for _ in range(2):
            janitor.step()
        assert bucket.rows == {row(number) for number in range(20, CAPACITY_ROWS)}
        assert bucket.usage.nbytes == len(bucket.rows) * ROW


class TestRequestsThatAlwaysFail:
    """With an error that is no denial: nothing may be uploaded, and somebody has to say so."""

    @pytest.mark.parametrize(
        ("request_name", "status"),
        [
            (f"PUT {WRITE_TEST_NAME}-me", 500),
            *itertools.product([f"PUT {LEASE_NAME}", f"GET {LEASE_NAME}", f"LIST {COUNTER_NAME}"], [412, 500]),
        ],
    )
    def test_is_a_problem_until_they_succeed(self, request_name: str, status: int) -> None:
        def fail(name: str) -> None:
            if name == request_name:
                raise failed(status)

        bucket = Bucket(before=fail)
        quota, janitor = mover(bucket)
        janitor.step()
        assert janitor._denials.current() == {}, "not after one"
        janitor._valid_at -= SELDOM.usage_timeout_s
        bucket.now_s += 5.0
        janitor.step()
        (problem,) = janitor._denials.current().values()
        assert "was not renewed for 6" in problem
        assert UNREACHABLE in janitor._denials.current(), "an outage is no lack of room, and nobody denies it"
        assert uploads(quota, bucket, range(1)) == 0
        bucket.before = lambda _: None
        bucket.now_s += 5.0
        janitor.step()
        assert uploads(quota, bucket, range(1)) == 1


class TestEmptyPages:
    def test_a_listing_gets_behind_a_long_run_of_them_and_says_so_meanwhile(self) -> None:
        """Of delete markers, for example."""

        class Marked(Bucket):
            def paginate(self, **request: Any) -> Iterator[dict[str, Any]]:
                if request["Prefix"] == LISTING.removeprefix("LIST "):
                    janitor._valid_at -= SELDOM.usage_timeout_s
                    for _ in range(MAX_EMPTY_PAGES + 10):
                        yield self._date
                    problems.extend(janitor._denials.current().values())
                yield from super().paginate(**request)

        bucket, problems = Marked(), list[str]()
        quota, janitor = mover(bucket, intervals=EACH_PAGE)
        janitor.step()
        assert "was not renewed for 6" in problems[0]
        assert uploads(quota, bucket, range(1)) == 1


class TestServersWithTwoClocks:
    """The Date of an answer is ahead of the Last-Modified in it: whether the lease and the record are renewed is seen
    by their changes."""

    @pytest.mark.parametrize("ahead_s", [-3600.0, 60.0, 3600.0])
    def test_change_nothing(self, ahead_s: float) -> None:
        bucket = Bucket()
        quota, one = mover(bucket, "one")
        _, two = mover(bucket, "two")
        for _ in range(12):
            one.step()
            two.step()
            bucket.now_s += 5.0
            bucket.ahead_s = ahead_s
        assert (one.holds_lease, two.holds_lease) == (True, False)
        assert uploads(quota, bucket, range(5)) == 5
        assert one._denials.current() == {}
        bucket.now_s += 31.0
        two.step()
        assert two.holds_lease


class TestUsageRecord:
    def test_one_that_is_not_renewed_allows_uploads_for_a_minute_since_it_was_last_seen_older(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Though its content stays as it is, and by no clock but the mover's own."""
        bucket = Bucket()
        for module in (janitor_module, usage_module):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: bucket.now_s, time=lambda: 0.0))
        _, one = mover(bucket, "one")
        quota, two = mover(bucket, "two")
        for _ in range(20):
            one.step()
            two.step()
            bucket.now_s += 5.0
            one._sweep_at = 0.0
        assert uploads(quota, bucket, range(1)) == 1, "it is renewed"
        for seconds, allowed in ((49.0, 1), (2.0, 0)):
            bucket.now_s += seconds
            two._read_usage()
            assert uploads(quota, bucket, range(1)) == allowed


class TestSweepsUnderThrottling:
    PAGES = 20

    @pytest.fixture
    def bucket(self) -> Bucket:
        bucket = Bucket(page_names=PAGE_NAMES)
        for number in range(self.PAGES * PAGE_NAMES - 1):  # the janitor's own objects are on the first pages
            bucket.store(row(number))
        return bucket

    @pytest.mark.parametrize("intervals", [SELDOM, EACH_PAGE], ids=["renewed seldom", "renewed after each page"])
    @pytest.mark.parametrize("request_name", [LISTING, f"PUT {LEASE_NAME}", f"PUT {COUNTER_NAME}me"])
    def test_a_sweep_ends_and_lists_no_page_twice(
        self, bucket: Bucket, request_name: str, intervals: JanitorIntervals
    ) -> None:
        """Each third request of a kind fails."""

        def fail(name: str) -> None:
            if name == request_name and bucket.count(name) % 3 == 0:
                raise failed(503)

        bucket.before = fail
        quota, janitor = mover(bucket, intervals=intervals)
        if request_name.startswith("PUT .landed"):
            janitor._published = None
            quota.upload_ended(0)
        turns = 0
        while uploads(quota, bucket, range(1000, 1001)) == 0:
            janitor.step()
            turns += 1
            assert turns < 3 * self.PAGES
        rows = self.PAGES * PAGE_NAMES - 1
        assert bucket.usage == Usage(rows * ROW, {"me": 0}), "each row is counted, once"
        failures = bucket.count(LISTING) // 3 if request_name == LISTING else 0
        assert bucket.count(LISTING) <= self.PAGES + failures + 3

    def test_a_damaged_name_before_an_interruption_skips_no_rows(self, bucket: Bucket) -> None:
        _, janitor = mover(bucket)
        bucket.damaged_names = {f"p/{WRITE_TEST_NAME}": "p/~"}

        def fail(name: str) -> None:
            if name == LISTING and bucket.count(name) == 2:
                raise failed(503)

        bucket.before = fail
        for _ in range(2):
            janitor.step()
        assert bucket.usage is not None
        assert bucket.usage.nbytes == len(bucket.rows) * ROW

    def test_uploads_while_a_sweep_is_interrupted_are_counted(self, bucket: Bucket) -> None:
        _, janitor = mover(bucket)
        other = UploadQuota("other", CAPACITY_ROWS * ROW, ROW)
        bucket.store(f"p/{COUNTER_NAME}other", b"0")

        def fail(name: str) -> None:
            if name == LISTING and bucket.count(name) == self.PAGES // 2:
                raise failed(503)

        bucket.before = fail
        janitor.step()
        assert janitor._account is None
        for number in (0, 10_000):  # a name that was listed, and one that will be
            bucket.objects.pop(row(number), None)
            bucket.store(row(number))
            other.upload_ended(ROW)
        bucket.store(f"p/{COUNTER_NAME}other", b"%d" % other.counter)
        janitor.step()
        janitor.step()
        assert bucket.usage is not None
        assert bucket.usage.counted["other"] == 2 * ROW
        assert bucket.usage.nbytes >= len(bucket.rows) * ROW


class TestCountersThatCannotBeRead:
    def test_one_of_a_mover_that_is_gone_stops_nobody(self, caplog: pytest.LogCaptureFixture) -> None:
        bucket = Bucket()
        bucket.store(f"p/{COUNTER_NAME}gone", b"")
        quota, janitor = mover(bucket)
        for _ in range(3):
            janitor.step()
        assert uploads(quota, bucket, range(5)) == 5
        assert bucket.usage == Usage(0, {"me": 0})
        assert janitor._denials.current() == {}
        (line,) = [each.getMessage() for each in caplog.records]
        assert f"p/{COUNTER_NAME}gone" in line

    def test_one_that_the_record_knows_keeps_its_value_also_for_the_next_janitor(self) -> None:
        bucket = Bucket()
        _, one = mover(bucket, "one")
        other, two = mover(bucket, "two")
        one.step()
        two.step()
        one._sweep_at = 0.0
        one.step()
        two.step()
        assert uploads(other, bucket, range(3)) == 3
        two.step()
        one.step()
        assert bucket.usage == Usage(3 * ROW, {"one": 0, "two": 3 * ROW})
        bucket.store(f"p/{COUNTER_NAME}two", b"?")
        assert uploads(other, bucket, range(3, 6)) == 3
        one._sweep_at = 0.0
        one.step()
        assert bucket.usage == Usage(6 * ROW, {"one": 0, "two": 3 * ROW}), "found by the listing, and not yet counted"
        third, three = mover(bucket, "three")
        three.step()
        bucket.now_s += 31.0
        three.step()
        assert three.holds_lease
        assert bucket.usage is not None
        assert bucket.usage.counted["two"] == 3 * ROW
        two._publish()
        three.step()
        assert bucket.usage.counted["two"] == 6 * ROW, "it has written its counter again"
        assert bucket.usage.nbytes >= len(bucket.rows) * ROW
        assert uploads(third, bucket, range(100, 101)) == 1
