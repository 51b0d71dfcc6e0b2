"""Rows older than `max_age` are misses and soon deleted, by the server's clock and by the seal's."""

from __future__ import annotations

import time
from typing import Any

import pytest

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.tiers.base import GONE
from nixl_tiers.tiers.s3 import control, transfers
from nixl_tiers.tiers.s3.listing import FullListing
from tests.support.servers import S3Server
from tests.system.tiers.s3.harness import (
    NAMESPACE,
    OTHER_NAMESPACE,
    FaultyS3,
    TierDriver,
    hold_requests,
    is_listing,
    key_of,
    wait_until,
)

SMALL = Geometry(cells=1, cell_payload=64 << 10)
ROW = SMALL.row_bytes
HOUR = 3600
NOW = "2100-01-01T00:00:00.000Z"


pytestmark = pytest.mark.usefixtures("fast_janitor")


def names_in(server: S3Server, place: dict[str, Any]) -> set[str]:
    answer = server.client().list_objects_v2(Bucket=place["bucket"], Prefix=f"{place['prefix']}/")
    return {found["Key"] for found in answer.get("Contents", ()) if found["Key"].count("/") > 1}


def expired_keys(driver: TierDriver) -> set[bytes]:
    return {entry.key for entry in driver.listed_rows() if entry.slot == GONE}


class TestAgeOfTheSeal:
    """Last-Modified is when a row was uploaded; the seal holds when it was computed."""

    @pytest.mark.parametrize("shared", [False, True])
    def test_an_expired_row_is_a_miss_and_is_deleted_on_request(
        self, place: dict[str, Any], s3_server: S3Server, shared: bool
    ) -> None:
        with TierDriver(SMALL, 8, **place, max_age=HOUR, shared=shared) as driver:
            driver.open()
            now = int(time.time())
            assert wait_until(lambda: driver.store_sealed(1, now - 2 * HOUR) is Outcome.OK)
            assert driver.store_sealed(2, now - HOUR // 2) is Outcome.OK
            assert driver.load([1, 2]) == [Outcome.MISSING, Outcome.OK]
            driver.delete(1)
            assert wait_until(lambda: names_in(s3_server, place) == {driver.name(2)})
            assert driver.load([1, 2]) == [Outcome.MISSING, Outcome.OK]

    def test_without_max_age_nothing_expires(self, place: dict[str, Any]) -> None:
        with TierDriver(SMALL, 8, **place) as driver:
            driver.open()
            assert driver.store_sealed(1, 1) is Outcome.OK
            assert driver.load([1]) == [Outcome.OK]
            assert driver.tier.maintain_s is None


class TestClockSkew:
    """Movers share a prefix, and one of them has another time of day than the server."""

    @pytest.mark.parametrize("ahead_s", [2 * HOUR, -2 * HOUR])
    def test_nothing_expires_because_of_a_wrong_clock(
        self, place: dict[str, Any], s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, ahead_s: int
    ) -> None:
        with TierDriver(SMALL, 8, **place, max_age=HOUR, shared=True) as right:
            right.open()
            assert wait_until(lambda: right.store([1]) == [Outcome.OK])
            with (
                monkeypatch.context() as wrong_clock,
                TierDriver(SMALL, 8, **place, max_age=HOUR, shared=True) as wrong,
            ):
                wrong_clock.setattr(transfers, "time", ShiftedTime(ahead_s))
                wrong.open()
                assert wait_until(lambda: wrong.store([2]) == [Outcome.OK])
                assert wrong.load([1, 2]) == [Outcome.OK] * 2
            assert right.load([1, 2]) == [Outcome.OK] * 2

    def test_age_is_by_the_servers_clock(self, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        with TierDriver(SMALL, 8, **place, max_age=HOUR) as driver:
            driver.open()
            assert driver.store_sealed(1, int(time.time()) - 2 * HOUR) is Outcome.OK
            monkeypatch.setattr(transfers, "time", ShiftedTime(-2 * HOUR))
            assert driver.load([1]) == [Outcome.MISSING]


class ShiftedTime:
    """The module `time`, with another time of day."""

    monotonic = staticmethod(time.monotonic)

    def __init__(self, ahead_s: int) -> None:
        self._ahead_s = ahead_s

    def time(self) -> float:
        return time.time() + self._ahead_s


class TestAgeOfTheObject:
    def test_upkeep_deletes_expired_rows_of_a_private_prefix_and_reports_them(
        self, place: dict[str, Any], s3_server: S3Server
    ) -> None:
        with TierDriver(SMALL, 8, **place, max_age=1) as driver:
            driver.open()
            assert driver.tier.maintain_s is not None
            assert driver.store([1, 2]) == [Outcome.OK] * 2
            reported: set[bytes] = set()
            assert wait_until(lambda: bool(reported.update(expired_keys(driver)) or reported == {key_of(1), key_of(2)}))
            assert driver.settled(0)
            assert names_in(s3_server, place) == set()
            assert driver.load([1]) == [Outcome.MISSING]

    def test_the_janitor_deletes_expired_rows_of_a_shared_prefix(
        self, place: dict[str, Any], s3_server: S3Server
    ) -> None:
        with TierDriver(SMALL, 8, **place, shared=True, max_age=1) as driver:
            driver.open()
            other = driver.name(1, OTHER_NAMESPACE)
            s3_server.client().put_object(Bucket=place["bucket"], Key=other, Body=bytes(ROW))
            assert wait_until(lambda: driver.store([2]) == [Outcome.OK])
            assert wait_until(lambda: names_in(s3_server, place) == set())


class TestOneListing:
    """On a server whose Last-Modified the test sets."""

    def test_open_deletes_expired_rows_and_lists_the_others(self, faulty: FaultyS3) -> None:
        with TierDriver(SMALL, 8, bucket="kv-old", endpoint=faulty.endpoint, max_age=HOUR) as driver:
            for number in (1, 2):
                faulty.objects[driver.name(number)] = bytes(ROW)
                faulty.objects[driver.name(number, OTHER_NAMESPACE)] = bytes(ROW)
            young = {driver.name(2), driver.name(2, OTHER_NAMESPACE)}
            faulty.modified |= dict.fromkeys(young, NOW)
            faulty.objects["nixl-tiers/notes.txt"] = b"old, and not ours"
            assert [entry.key for entry in driver.open() if entry.slot != GONE] == [key_of(2)]
            assert driver.settled(2)
            assert set(faulty.objects) == young | {"nixl-tiers/notes.txt"}

    def test_open_deletes_more_expired_rows_than_may_wait(
        self, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They are deleted page by page, while the listing runs."""
        monkeypatch.setattr(control, "MAX_EXPIRED", 1000)
        rows, old, books = 3500, bytes(ROW), [0]
        with TierDriver(SMALL, 8, bucket="kv-old", endpoint=faulty.endpoint, max_age=HOUR) as driver:
            for number in range(rows):
                faulty.objects[driver.name(number, (NAMESPACE, OTHER_NAMESPACE)[number % 2])] = old
            faulty.objects[driver.name(rows)] = bytes(ROW)
            faulty.modified[driver.name(rows)] = NOW
            quota = driver.tier._rows.quota
            plain = quota.expire_unknown

            def expire_unknown(*args: Any) -> str | None:
                listing = driver.tier._rows.listing
                assert isinstance(listing, FullListing)
                books.append(len(quota._changed or ()) + len(listing._gone) + len(driver.tier._control._delete_queue))
                return plain(*args)

            monkeypatch.setattr(quota, "expire_unknown", expire_unknown)
            assert [entry.key for entry in driver.open() if entry.slot != GONE] == [key_of(rows)]
            assert driver.settled(1)
            assert set(faulty.objects) == {driver.name(rows)}
            assert max(books) <= 1000

    def test_a_row_stored_during_the_listing_stays(self, faulty: FaultyS3) -> None:
        with TierDriver(SMALL, 8, bucket="kv-old", endpoint=faulty.endpoint, max_age=HOUR) as driver:
            driver.open()
            assert driver.store([1, 2]) == [Outcome.OK] * 2
            gate = hold_requests(faulty, is_listing)
            listings = sum(map(is_listing, faulty.requests))
            listing = driver.tier.maintain()
            assert next(listing) == []
            assert wait_until(lambda: sum(map(is_listing, faulty.requests)) > listings), "it runs"
            assert driver.store([2]) == [Outcome.OK]
            gate.set()
            assert [(e.slot, e.key) for batch in listing for e in batch] == [(GONE, key_of(1))]
            assert driver.settled(1)
            assert set(faulty.objects) == {driver.name(2)}

    def test_a_read_only_tier_of_a_small_capacity_serves_all(self, faulty: FaultyS3) -> None:
        small: dict[str, Any] = {"capacity": 2 * ROW, "write": "off"}
        with TierDriver(SMALL, 8, bucket="kv-old", endpoint=faulty.endpoint, **small) as driver:
            faulty.objects |= {driver.name(n): bytes(ROW) for n in range(8)}
            assert driver.open_only() >= 8
            assert {entry.key for entry in driver.listed_rows()} == {key_of(n) for n in range(8)}
            for _ in range(2):
                driver.tier.poll()
            assert len(faulty.objects) == 8
            assert faulty.count("POST") == faulty.count("PUT") == faulty.count("DELETE") == 0

    def test_a_read_only_tier_deletes_nothing(self, faulty: FaultyS3) -> None:
        with TierDriver(SMALL, 8, bucket="kv-old", endpoint=faulty.endpoint, max_age=HOUR, write="off") as driver:
            faulty.objects |= {driver.name(1): bytes(ROW), driver.name(2, OTHER_NAMESPACE): bytes(ROW)}
            faulty.objects[driver.name(3)] = bytes(ROW)
            faulty.modified[driver.name(3)] = NOW
            assert [entry.key for entry in driver.open() if entry.slot != GONE] == [key_of(3)]
            assert driver.load([3]) == [Outcome.CORRUPT]
            driver.delete(3)
            assert not driver.tier._control.has_pending_deletes
            assert len(faulty.objects) == 3
            assert faulty.count("POST") == 0
            assert driver.open(NAMESPACE) is not None
