"""Rows older than `max_age` are misses and soon deleted, by the server's clock and by the seal's."""

from __future__ import annotations

import time
from typing import Any

import pytest

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.tiers.s3 import tier as tier_module
from tests.support.servers import S3Server
from tests.system.tiers.s3.harness import (
    OTHER_NAMESPACE,
    TierDriver,
    wait_until,
)

SMALL = Geometry(cells=1, cell_payload=64 << 10)
ROW = SMALL.row_bytes
HOUR = 3600
NOW = "2100-01-01T00:00:00.000Z"


pytestmark = pytest.mark.usefixtures("fast_budget")


def names_in(server: S3Server, place: dict[str, Any]) -> set[str]:
    answer = server.client().list_objects_v2(Bucket=place["bucket"], Prefix=f"{place['prefix']}/")
    return {found["Key"] for found in answer.get("Contents", ()) if found["Key"].count("/") > 1}


class TestAgeOfTheSeal:
    """Last-Modified is when a row was uploaded; the seal holds when it was computed."""

    def test_an_expired_row_is_a_miss_and_is_deleted(self, place: dict[str, Any], s3_server: S3Server) -> None:
        with TierDriver(SMALL, 8, **place, max_age=HOUR) as driver:
            driver.open()
            now = int(time.time())
            assert wait_until(lambda: driver.store_sealed(1, now - 2 * HOUR) is Outcome.OK)
            assert driver.store_sealed(2, now - HOUR // 2) is Outcome.OK
            assert driver.load([1, 2]) == [Outcome.MISSING, Outcome.OK]
            assert wait_until(lambda: names_in(s3_server, place) == {driver.name(2)})
            assert driver.load([1, 2]) == [Outcome.MISSING, Outcome.OK]

    def test_without_max_age_nothing_expires(self, place: dict[str, Any]) -> None:
        with TierDriver(SMALL, 8, **place) as driver:
            driver.open()
            assert driver.store_sealed(1, 1) is Outcome.OK
            assert driver.load([1]) == [Outcome.OK]


class TestClockSkew:
    """Movers share a prefix, and one of them has another time of day than the server."""

    @pytest.mark.parametrize("ahead_s", [2 * HOUR, -2 * HOUR])
    def test_nothing_expires_because_of_a_wrong_clock(
        self, place: dict[str, Any], s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, ahead_s: int
    ) -> None:
        with TierDriver(SMALL, 8, **place, max_age=HOUR) as right:
            right.open()
            assert wait_until(lambda: right.store([1]) == [Outcome.OK])
            with (
                monkeypatch.context() as wrong_clock,
                TierDriver(SMALL, 8, **place, max_age=HOUR) as wrong,
            ):
                wrong_clock.setattr(tier_module, "time", ShiftedTime(ahead_s))
                wrong.open()
                assert wait_until(lambda: wrong.store([2]) == [Outcome.OK])
                assert wrong.load([1, 2]) == [Outcome.OK] * 2
            assert right.load([1, 2]) == [Outcome.OK] * 2

    def test_age_is_by_the_servers_clock(self, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        with TierDriver(SMALL, 8, **place, max_age=HOUR) as driver:
            driver.open()
            assert driver.store_sealed(1, int(time.time()) - 2 * HOUR) is Outcome.OK
            monkeypatch.setattr(tier_module, "time", ShiftedTime(-2 * HOUR))
            assert driver.load([1]) == [Outcome.MISSING]


class ShiftedTime:
    """The module `time`, with another time of day."""

    monotonic = staticmethod(time.monotonic)

    def __init__(self, ahead_s: int) -> None:
        self._ahead_s = ahead_s

    def time(self) -> float:
        return time.time() + self._ahead_s


class TestAgeOfTheObject:
    def test_expired_rows_of_any_namespace_are_deleted(self, place: dict[str, Any], s3_server: S3Server) -> None:
        with TierDriver(SMALL, 8, **place, max_age=1) as driver:
            driver.open()
            other = driver.name(1, OTHER_NAMESPACE)
            s3_server.client().put_object(Bucket=place["bucket"], Key=other, Body=bytes(ROW))
            assert wait_until(lambda: driver.store([2]) == [Outcome.OK])
            assert wait_until(lambda: names_in(s3_server, place) == set())
