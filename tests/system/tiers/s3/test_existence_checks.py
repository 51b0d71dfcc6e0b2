"""A shared prefix is asked, and not listed: rows of other movers are found, and not uploaded twice."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import pytest

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.tiers.base import Entry, ExistenceAnswer
from nixl_tiers.tiers.s3.record import Record
from tests.system.tiers.s3.harness import LONG_AGO, FaultyS3, Request, TierDriver, but, is_listing, key_of, wait_until

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

    def test_a_chain_that_does_not_exist_costs_one_request(self, driver: TierDriver, faulty: FaultyS3) -> None:
        before = faulty.count("HEAD")
        answer = check(driver, range(500))
        assert (answer.found, answer.absent) == ([], keys(0))
        assert faulty.count("HEAD") == before + 1

    def test_a_long_chain_costs_few_requests(self, driver: TierDriver, faulty: FaultyS3) -> None:
        self.put(driver, faulty, *range(300))
        before = faulty.count("HEAD")
        answer = check(driver, range(500))
        assert (answer.found, answer.absent) == (keys(*range(300)), keys(300))
        assert faulty.count("HEAD") - before <= 1 + 10 + 16 + 16

    def test_a_row_of_another_size_is_absent(self, driver: TierDriver, faulty: FaultyS3) -> None:
        self.put(driver, faulty, 1, nbytes=ROW - 1)
        assert check(driver, [1]).absent == keys(1)

    def test_errors_of_the_server_leave_a_key_unknown(self, driver: TierDriver, faulty: FaultyS3) -> None:
        self.put(driver, faulty, 1, 2)
        faulty.fault = lambda request: 503 if request.method == "HEAD" else None
        answer = check(driver, [1, 2])
        assert (answer.found, answer.absent) == ([], [])
        faulty.fault = lambda request: 403 if request.name == driver.name(2) else None
        answer = check(driver, [1, 2])
        assert (answer.found, answer.absent) == (keys(1), [])
        assert "existence checks are denied (403; the right is s3:GetObject" in driver.tier.denials["head"]

    def test_rows_are_found_with_the_time_of_their_last_write(self, driver: TierDriver, faulty: FaultyS3) -> None:
        self.put(driver, faulty, 1, 2)
        faulty.modified[driver.name(2)] = "2024-05-01T00:00:00.700Z"
        answer = check(driver, [1, 2])
        ticks = [int(datetime.fromisoformat(at).timestamp()) for at in (LONG_AGO, faulty.modified[driver.name(2)])]
        assert [(entry.slot, entry.tick) for entry in answer.entries] == [(0, ticks[0]), (0, ticks[1])]

    def test_what_the_janitor_may_delete_next_is_not_promised(
        self, driver: TierDriver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert driver.tier.gone_before == 0
        now = int(driver.tier._control.connection.server_time_s())
        monkeypatch.setattr(driver.tier._control.connection, "server_time_s", lambda: float(now))
        quota = driver.tier._rows.upload_quota
        for age_s, margin_s in ((6400, 200), (10, 0), (-100, 0)):
            quota.refresh(Record(quota.capacity_bytes, {}, now - age_s))
            assert driver.tier.gone_before == now - age_s + margin_s

    def test_nothing_is_forgotten_early_while_there_is_room(self, driver: TierDriver) -> None:
        quota = driver.tier._rows.upload_quota
        oldest = int(driver.tier._control.connection.server_time_s()) - 6400
        room = quota.capacity_bytes - 2 * quota.window_bytes  # for that one, and what must stay free
        for nbytes, early in ((room, False), (room + 1, True)):
            quota.refresh(Record(nbytes, {"one": 1, "two": 1}, oldest))  # one of them has stored since the last record
            quota.refresh(Record(nbytes, {"one": 2, "two": 1}, oldest))
            assert (driver.tier.gone_before > oldest) is early

    def test_nothing_is_listed(self, driver: TierDriver, faulty: FaultyS3) -> None:
        self.put(driver, faulty, 1)
        assert list(driver.tier.list_rows()) == []
        assert driver.tier.maintain_s is None
        assert not any(is_listing(request) for request in faulty.requests)

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

    def test_a_row_that_is_there_is_not_uploaded(self, driver: TierDriver, faulty: FaultyS3) -> None:
        faulty.objects[driver.name(1)] = bytes(ROW)
        quota = driver.tier._rows.upload_quota
        started = quota._started
        assert driver.store([1, 2]) == [Outcome.FOUND, Outcome.OK]
        assert [self.asked(driver, faulty, number, "PUT") for number in (1, 2)] == [0, 1]
        assert quota._started == started + ROW == quota.counter(0.0).ended
        there, stored = driver.tier.found()
        assert (there.key, there.tick) == (key_of(1), int(datetime.fromisoformat(LONG_AGO).timestamp()))
        assert stored.key == key_of(2)
        assert -1 <= driver.tier._control.connection.server_time_s() - stored.tick < 120, "when its upload ended"

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

    def test_a_row_that_is_known_to_be_absent_is_not_asked_for(self, driver: TierDriver, faulty: FaultyS3) -> None:
        assert wait_until(lambda: check(driver, [1, 2], chain=False).absent == keys(1, 2))
        before = faulty.count("HEAD")
        assert driver.load([3]) == [Outcome.MISSING]
        assert driver.store([1, 2, 3]) == [Outcome.OK] * 3
        assert faulty.count("HEAD") == before
        assert driver.store([4]) == [Outcome.OK]
        assert self.asked(driver, faulty, 4, "HEAD") == 1

    def test_a_corrupt_row_is_deleted_and_written_again(self, driver: TierDriver, faulty: FaultyS3) -> None:
        name = driver.name(1)
        faulty.objects[name] = bytes(ROW)
        assert driver.load([1]) == [Outcome.CORRUPT]
        assert wait_until(lambda: name not in faulty.objects)
        faulty.objects[name] = bytes(ROW)
        assert driver.load([1]) == [Outcome.CORRUPT]
        assert driver.store([1]) == [Outcome.OK]
        assert driver.load([1]) == [Outcome.OK]

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

    def test_an_evicted_row_stays_for_others(self, driver: TierDriver, faulty: FaultyS3) -> None:
        driver.delete(0)
        assert driver.load([0]) == [Outcome.OK]


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
