"""Existence checks on a shared prefix: rows that another mover has just stored are found before any listing."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.tiers.base import GONE, ExistenceAnswer
from nixl_tiers.tiers.s3 import connection, existence
from tests.tiers.s3.harness import FaultyS3, Request, TierDriver, hold_requests, is_listing, key_of, wait_until

SMALL = Geometry(cells=1, cell_payload=64 << 10)
ROW = SMALL.row_bytes


pytestmark = pytest.mark.usefixtures("fast_janitor")


def check(driver: TierDriver, numbers: Sequence[int], chain: bool = True) -> ExistenceAnswer:
    """The answer to one existence check."""
    assert driver.tier.check_existence(7, [key_of(number) for number in numbers], chain)
    answers: list[ExistenceAnswer] = []
    assert wait_until(lambda: bool(answers.extend(driver.tier.existence_answers()) or answers))
    assert not driver.tier._existence.busy
    assert [answer.check_id for answer in answers] == [7]
    return answers[0]


def found(answer: ExistenceAnswer) -> list[bytes]:
    return [entry.key for entry in answer.found]


def keys(*numbers: int) -> list[bytes]:
    return [key_of(number) for number in numbers]


def test_a_row_that_another_mover_has_just_stored_is_found_and_loads(
    place: dict[str, Any],
) -> None:
    place |= {"shared": True, "capacity": 10_000 * ROW}
    with TierDriver(SMALL, 32, **place) as one, TierDriver(SMALL, 32, **place) as two:
        one.open()
        two.open()
        assert wait_until(lambda: one.store([0]) == [Outcome.OK])
        for number in range(1, 21):
            assert one.store([number]) == [Outcome.OK]
        # A server that is too slow for one question leaves the chain's end open: the next one finds more.
        answers: list[ExistenceAnswer] = []
        assert wait_until(lambda: bool(answers.append(check(two, range(32))) or len(answers[-1].found) == 21))
        assert found(answers[-1]) == keys(*range(21))
        assert wait_until(lambda: list(check(two, range(32)).absent) == keys(21))
        assert two.load(range(21)) == [Outcome.OK] * 21
        assert wait_until(lambda: sorted(found(check(two, [40, 7, 50], chain=False))) == keys(7))


class TestAnswers:
    @pytest.fixture
    def driver(self, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> Iterator[TierDriver]:
        """On any machine each question gets its answer: how fast is not of interest here."""
        make_client = connection.make_client
        monkeypatch.setattr(existence, "TIMEOUT_S", 120.0)
        monkeypatch.setattr(
            connection, "make_client", lambda *given, **named: make_client(*given, **named | {"read_s": 120.0})
        )
        with TierDriver(SMALL, 8, bucket="kv-exists", endpoint=faulty.endpoint, shared=True, write="off") as driver:
            driver.open()
            yield driver

    def put(self, driver: TierDriver, faulty: FaultyS3, *numbers: int, nbytes: int = ROW) -> None:
        faulty.objects |= {driver.name(number): bytes(nbytes) for number in numbers}

    def test_a_chain_that_does_not_exist_costs_one_request(self, driver: TierDriver, faulty: FaultyS3) -> None:
        before = faulty.count("HEAD")
        answer = check(driver, range(500))
        assert (found(answer), list(answer.absent)) == ([], keys(0))
        assert faulty.count("HEAD") == before + 1

    def test_a_long_chain_costs_few_requests(self, driver: TierDriver, faulty: FaultyS3) -> None:
        self.put(driver, faulty, *range(300))
        before = faulty.count("HEAD")
        answer = check(driver, range(500))
        assert (found(answer), list(answer.absent)) == (keys(*range(300)), keys(300))
        assert faulty.count("HEAD") - before <= 1 + 10 + 16 + 16

    def test_a_row_of_another_size_is_absent(self, driver: TierDriver, faulty: FaultyS3) -> None:
        self.put(driver, faulty, 1, nbytes=ROW - 1)
        assert list(check(driver, [1]).absent) == keys(1)

    def test_errors_of_the_server_leave_a_key_unknown(self, driver: TierDriver, faulty: FaultyS3) -> None:
        self.put(driver, faulty, 1, 2)
        faulty.fault = lambda request: 503 if request.method == "HEAD" else None
        answer = check(driver, [1, 2])
        assert (found(answer), list(answer.absent)) == ([], [])
        faulty.fault = lambda request: 403 if request.name == driver.name(2) else None
        answer = check(driver, [1, 2])
        assert (found(answer), list(answer.absent)) == (keys(1), [])

    def test_a_found_row_survives_a_listing_that_began_earlier(self, driver: TierDriver, faulty: FaultyS3) -> None:
        gate = hold_requests(faulty, is_listing)
        listing = driver.tier.list_rows()
        assert next(listing) == []
        names = set(faulty.objects)
        self.put(driver, faulty, 1)
        assert found(check(driver, [1])) == keys(1)
        for name in set(faulty.objects) - names:
            faulty.objects.pop(name)  # the listing passed this name before it was written
        gate.set()
        assert [entry for batch in listing for entry in batch] == []
        assert [(e.slot, e.key) for e in driver.listed_rows()] == [(GONE, key_of(1))], "the next listing misses it"

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
        assert not driver.tier._existence.busy
        assert list(driver.tier.existence_answers()) == []

    def test_a_private_prefix_has_no_existence_checks(self, faulty: FaultyS3) -> None:
        with TierDriver(SMALL, 8, bucket="kv-exists", endpoint=faulty.endpoint) as driver:
            driver.open()
            assert not driver.tier.check_existence(1, keys(1), True)
