"""A shared prefix is asked, and not listed: rows of other movers are found, and not uploaded twice."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.tiers.base import Entry, ExistenceAnswer
from tests.system.tiers.s3.harness import FaultyS3, Request, TierDriver, but, is_listing, key_of, wait_until

SMALL = Geometry(cells=1, cell_payload=64 << 10)
ROW = SMALL.row_bytes


pytestmark = pytest.mark.usefixtures("fast_budget")


class Checked(NamedTuple):
    found: list[bytes]
    absent: list[bytes]
    entries: Sequence[Entry]


def check(driver: TierDriver, numbers: Sequence[int], chain: bool = True) -> Checked:
    """The answer to one existence check."""
    driver.tier.found()
    assert driver.tier.check_existence(7, [key_of(number) for number in numbers], chain)
    answers: list[ExistenceAnswer] = []
    assert wait_until(lambda: bool(answers.extend(driver.tier.existence_answers()) or answers))
    assert not driver.tier._rows.busy
    ((check_id, absent),) = [(answer.check_id, answer.absent) for answer in answers]
    assert check_id == 7
    entries = driver.tier.found()
    assert driver.tier.found() == [], "reported once"
    return Checked([entry.key for entry in entries], list(absent), entries)


def keys(*numbers: int) -> list[bytes]:
    return [key_of(number) for number in numbers]


def test_a_row_that_another_mover_has_just_stored_is_found_and_loads(
    place: dict[str, Any],
) -> None:
    place |= {"capacity": 10_000 * ROW}
    with TierDriver(SMALL, 32, **place) as one, TierDriver(SMALL, 32, **place) as two:
        one.open()
        two.open()
        assert wait_until(lambda: one.store([0]) == [Outcome.OK])
        for number in range(1, 21):
            assert one.store([number]) == [Outcome.OK]
        # A server that is too slow for one question leaves the chain's end open: the next one finds more.
        assert wait_until(lambda: check(two, range(32)).found == keys(*range(21)))
        assert wait_until(lambda: check(two, range(32)).absent == keys(21))
        assert two.load(range(21)) == [Outcome.OK] * 21
        assert wait_until(lambda: check(two, [40, 7, 50], chain=False).found == keys(7))


class TestAnswers:
    @pytest.fixture
    def driver(self, faulty: FaultyS3) -> Iterator[TierDriver]:
        with TierDriver(SMALL, 8, bucket="kv-exists", endpoint=faulty.endpoint, write="off") as driver:
            driver.open()
            yield driver

    def put(self, driver: TierDriver, faulty: FaultyS3, *numbers: int, nbytes: int = ROW) -> None:
        faulty.objects |= {driver.name(number): bytes(nbytes) for number in numbers}

    def test_checks_of_an_earlier_namespace_are_not_answered(self, driver: TierDriver, faulty: FaultyS3) -> None:
        gate = threading.Event()

        def slow(request: Request) -> None:
            if request.name.endswith(driver.name(1)[-10:]):
                faulty.lock.release()
                gate.wait(20)
                faulty.lock.acquire()

        faulty.fault = slow
        assert driver.tier.check_existence(1, keys(1), True)
        driver.open(epoch=1)
        gate.set()
        assert not driver.tier._rows.busy
        assert list(driver.tier.existence_answers()) == []


class TestUploads:
    """Once others store too, it is looked before an upload whether they have stored the row meanwhile."""

    @pytest.fixture
    def driver(self, faulty: FaultyS3) -> Iterator[TierDriver]:
        times = but(s3_absent_s=3600.0)
        faulty.tests_conditions = faulty.tells_times = True
        with TierDriver(SMALL, 8, bucket="kv-uploads", endpoint=faulty.endpoint, times=times) as driver:
            driver.open()
            assert wait_until(lambda: driver.store([0]) == [Outcome.OK])
            driver.tier.found()
            driver.tier._rows.upload_quota.others_stored = 2
            yield driver

    def asked(self, driver: TierDriver, faulty: FaultyS3, number: int, method: str) -> int:
        return sum((r.method, r.name) == (method, driver.name(number)) for r in faulty.requests)

    def test_a_row_is_no_older_than_its_object(
        self, driver: TierDriver, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Else it is gone by the janitor's `oldest`, the Last-Modified of the first object that is left."""
        server_s = driver.tier._control.connection.server_time_s()
        monkeypatch.setattr(driver.tier._control.connection, "server_time_s", lambda: server_s)

        def slow(request: Request) -> None:
            nonlocal server_s
            if (request.method, request.name) == ("PUT", driver.name(1)):
                server_s += 3.7

        faulty.fault = slow
        assert driver.store([1]) == [Outcome.OK]
        (stored,) = driver.tier.found()
        assert stored.tick > server_s, "a Date is up to a second late"

    def test_a_server_that_does_not_answer_holds_up_uploads_for_a_moment(
        self, driver: TierDriver, faulty: FaultyS3
    ) -> None:
        rows = driver.tier._rows
        rows._uploads._times = but(s3_upload_check_s=0.2, s3_upload_check_retry_s=3600.0)
        gate = threading.Event()

        def slow(request: Request) -> None:
            if request.method == "HEAD":
                faulty.lock.release()
                gate.wait(60)
                faulty.lock.acquire()

        faulty.fault = slow
        try:
            assert driver.store(range(1, 7)) == [Outcome.OK] * 6
            assert driver.store([7]) == [Outcome.OK]
            assert self.asked(driver, faulty, 7, "HEAD") == 0
        finally:
            gate.set()


def test_only_the_writer_of_the_record_lists(faulty: FaultyS3) -> None:
    place = {"bucket": "kv-janitor", "endpoint": faulty.endpoint}
    with TierDriver(SMALL, 8, **place) as first, TierDriver(SMALL, 8, **place) as other:
        first.open()
        assert wait_until(lambda: first.store([0]) == [Outcome.OK])
        assert wait_until(lambda: first.tier.used_bytes > 0)
        with TierDriver(SMALL, 8, **place, write="off") as reader:
            first.tier._rows._budget.close(60.0)
            mark = len(faulty.requests)
            reader.open()
            assert wait_until(lambda: reader.tier.used_bytes > 0)
            assert wait_until(lambda: check(reader, [0]).found == keys(0))  # a slow server's answers do not count
            assert reader.load([0]) == [Outcome.OK]
            # The listing may have found the row, and the counter may have grown by it since: a bound, not a count.
            assert reader.tier.used_bytes in (ROW, 2 * ROW)
            assert {request.method for request in faulty.requests[mark:]} <= {"GET", "HEAD"}
            assert not any(is_listing(request) for request in faulty.requests[mark:])
        other.open()
        assert wait_until(lambda: other.store([1]) == [Outcome.OK])
        assert any(is_listing(request) for request in faulty.requests[mark:]), "it writes the record by now"
