"""Several engines on one prefix: they see each other's rows, and keep one budget together, whoever dies."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from botocore.exceptions import EndpointConnectionError

from nixl_tiers.chunk import Geometry, Outcome
from nixl_tiers.config.schema import S3Config
from nixl_tiers.testing.servers import ACCESS_KEY, SECRET_KEY, S3Server
from nixl_tiers.tiers.base import GONE
from nixl_tiers.tiers.s3 import janitor
from nixl_tiers.tiers.s3 import tier as object_tier
from nixl_tiers.tiers.s3.janitor import JanitorIntervals, UploadQuota, Usage
from tests.tiers.s3.objects import BRISK, NAMESPACE, OTHER_NAMESPACE, Driver, faulty_s3, key_of, wait_until

SMALL = Geometry(cells=1, cell_payload=64 << 10)
ROW = SMALL.row_bytes
CAPACITY_ROWS = 32
WINDOW_ROWS = 8


@pytest.fixture(autouse=True)
def _brisk(brisk: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(janitor, "WINDOW_SHARE", CAPACITY_ROWS // WINDOW_ROWS)


@pytest.fixture
def place(place: dict[str, Any]) -> dict[str, Any]:
    return {**place, "capacity": CAPACITY_ROWS * ROW, "shared": True}


@pytest.fixture
def drivers(place: dict[str, Any]) -> Iterator[list[Driver]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Driver(SMALL, 32, **place)) for _ in range(3)]


def stored(driver: Driver, number: int) -> bool:
    """Stores a row as soon as there is room for it."""
    return wait_until(lambda: driver.store([number]) == [Outcome.OK])


def in_charge(driver: Driver) -> bool:
    return driver.tier._janitor is not None and driver.tier._janitor.in_charge


def rows_in(server: S3Server, place: dict[str, Any]) -> list[str]:
    pages = server.client().get_paginator("list_objects_v2")
    found = pages.paginate(Bucket=place["bucket"], Prefix=f"{place['prefix']}/")
    names = [each["Key"] for page in found for each in page.get("Contents", ())]
    return [name for name in names if name.count("/") > 1]


def cut_off(driver: Driver) -> None:
    """From now on this engine's janitor does not reach the server: to the others it is dead."""

    def client() -> Any:
        raise EndpointConnectionError(endpoint_url="cut off")

    assert driver.tier._janitor is not None
    driver.tier._janitor._client = client


class TestRowsOfOthers:
    def test_are_found_without_opening_again(self, drivers: list[Driver]) -> None:
        one, two, stranger = drivers
        assert one.open() == two.open() == stranger.open(OTHER_NAMESPACE) == []
        assert stored(one, 1)
        assert two.tier.relist_s is not None
        assert [entry.key for entry in two.adopted()] == [key_of(1)]
        assert two.load([1]) == [Outcome.OK]
        assert two.adopted() == [], "told once"
        assert stranger.adopted() == []
        assert stranger.load([1]) == [Outcome.MISSING]

    def test_that_are_found_later_are_more_recent(self, drivers: list[Driver]) -> None:
        one, two, _ = drivers
        one.open()
        assert stored(one, 1)
        (first,) = two.open()
        assert stored(one, 2)
        (second,) = two.adopted()
        assert stored(two, 7), "which tells how far the engine's own count has come"
        assert stored(one, 3)
        (third,) = two.adopted()
        assert (first.key, second.key, third.key) == (key_of(1), key_of(2), key_of(3))
        assert first.tick < second.tick < third.tick
        assert third.tick > 7

    def test_that_vanish_are_misses(self, drivers: list[Driver], s3_server: S3Server, place: dict[str, Any]) -> None:
        one, two, _ = drivers
        one.open()
        assert stored(one, 1)
        assert len(two.open()) == 1
        s3_server.client().delete_object(Bucket=place["bucket"], Key=one.name(1))
        assert two.load([1]) == [Outcome.MISSING]
        assert stored(one, 1)
        assert [entry.key for entry in two.adopted()] == [key_of(1)], "and found again when they are there again"

    def test_that_vanish_are_told_of(self, drivers: list[Driver], s3_server: S3Server, place: dict[str, Any]) -> None:
        one, two, _ = drivers
        one.open()
        for number in (1, 2):
            assert stored(one, number)
        assert len(two.open()) == 2
        s3_server.client().delete_object(Bucket=place["bucket"], Key=one.name(1))
        listing = two.tier.list_rows()
        assert next(listing) == []
        assert stored(two, 3), "a row that the listing may have missed"
        entries = [entry for batch in listing for entry in batch]
        assert [(entry.slot, entry.key) for entry in entries] == [(GONE, key_of(1))]
        assert two.adopted() == []

    def test_outlive_what_one_engine_drops(self, drivers: list[Driver]) -> None:
        one, two, _ = drivers
        one.open()
        assert stored(one, 1)
        two.open()
        two.drop(1)
        assert wait_until(lambda: not two.tier._bucket.deleting)
        assert one.load([1]) == [Outcome.OK]

    def test_that_are_corrupt_are_deleted_when_they_are_dropped(
        self, drivers: list[Driver], s3_server: S3Server, place: dict[str, Any]
    ) -> None:
        one, two, _ = drivers
        one.open()
        assert stored(one, 1)
        assert stored(one, 2)
        two.open()
        s3_server.client().put_object(Bucket=place["bucket"], Key=one.name(1), Body=bytes(ROW))
        assert two.load([1, 2]) == [Outcome.CORRUPT, Outcome.OK]
        two.drop(1, 2)
        assert wait_until(lambda: rows_in(s3_server, place) == [one.name(2)])


class TestBudget:
    def test_filled_many_times_over_by_three(
        self, drivers: list[Driver], s3_server: S3Server, place: dict[str, Any]
    ) -> None:
        for driver, namespace in zip(drivers, [NAMESPACE, NAMESPACE, OTHER_NAMESPACE], strict=True):
            driver.open(namespace)
        samples: list[int] = []
        done = threading.Event()

        def sample() -> None:
            while not done.wait(0.02):
                samples.append(len(rows_in(s3_server, place)))

        thread = threading.Thread(target=sample)
        thread.start()
        arrived = turn = 0
        deadline = time.monotonic() + 120
        try:
            while arrived < 5 * CAPACITY_ROWS and time.monotonic() < deadline:
                # Each engine offers far more than its window, all of the time.
                batch_ids = []
                for index, driver in enumerate(drivers):
                    first = 1000 * index + 16 * turn
                    batch_ids.append(driver.begin_store(range(first, first + 16)))
                for driver, batch_id in zip(drivers, batch_ids, strict=True):
                    outcomes = driver.finish(batch_id)[0]
                    assert set(outcomes) <= {Outcome.OK, Outcome.NO_SPACE}
                    arrived += outcomes.count(Outcome.OK)
                turn += 1
        finally:
            done.set()
            thread.join()
        assert arrived >= 5 * CAPACITY_ROWS
        assert max(samples) <= CAPACITY_ROWS + len(drivers) * WINDOW_ROWS
        assert wait_until(lambda: len(rows_in(s3_server, place)) <= CAPACITY_ROWS)
        assert sum(map(in_charge, drivers)) == 1

    def test_the_oldest_go_first_of_any_namespace_and_nothing_else(
        self, drivers: list[Driver], s3_server: S3Server, place: dict[str, Any]
    ) -> None:
        one, two, _ = drivers
        client, bucket = s3_server.client(), place["bucket"]
        client.put_object(Bucket=bucket, Key=f"{place['prefix']}/notes.txt", Body=b"not ours" * ROW)
        old = [one.name(number, OTHER_NAMESPACE) for number in range(CAPACITY_ROWS)]
        for name in old:
            client.put_object(Bucket=bucket, Key=name, Body=bytes(ROW))
        modified = client.head_object(Bucket=bucket, Key=old[-1])["LastModified"]
        fresh = two.name(1)

        def is_later() -> bool:
            client.put_object(Bucket=bucket, Key=fresh, Body=bytes(ROW))
            later: bool = client.head_object(Bucket=bucket, Key=fresh)["LastModified"] > modified
            return later

        assert wait_until(is_later)
        one.open()
        assert wait_until(lambda: len(rows_in(s3_server, place)) == CAPACITY_ROWS - 2 * WINDOW_ROWS)
        assert fresh in rows_in(s3_server, place)
        assert client.head_object(Bucket=bucket, Key=f"{place['prefix']}/notes.txt")


class TestLease:
    def test_a_dead_janitor_is_replaced(self, drivers: list[Driver]) -> None:
        one, two, three = drivers
        one.open()
        assert wait_until(lambda: in_charge(one))
        two.open()
        three.open()
        assert stored(two, 1)
        cut_off(one)
        assert wait_until(lambda: in_charge(two) != in_charge(three))
        heir = two if in_charge(two) else three
        for number in range(2, 2 + 2 * WINDOW_ROWS):
            assert stored(heir, number), "the prefix has an account again"
        assert not in_charge(one)

    def test_a_lease_that_is_alive_is_left_alone(self, drivers: list[Driver]) -> None:
        one, two, _ = drivers
        one.open()
        assert wait_until(lambda: in_charge(one))
        two.open()
        turns = two.tier._janitor
        assert turns is not None
        assert wait_until(lambda: turns._turns > 3 * BRISK.lease_s / BRISK.turn_s / 2)
        assert in_charge(one)
        assert not in_charge(two)

    def test_leaving_hands_over(self, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            object_tier, "PACE", JanitorIntervals(turn_s=0.1, lease_s=3600.0, fresh_s=10.0, round_s=0.1)
        )
        with Driver(SMALL, 8, **place) as one:
            one.open()
            assert wait_until(lambda: in_charge(one))
        with Driver(SMALL, 8, **place) as two:
            two.open()
            assert wait_until(lambda: in_charge(two))


class TestServersAndRights:
    def test_without_conditional_writes_nothing_is_uploaded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        with (
            faulty_s3() as server,
            Driver(SMALL, 8, bucket="kv-plain", endpoint=server.endpoint, shared=True) as driver,
        ):
            driver.open()
            assert wait_until(lambda: "conditional writes" in driver.tier.denials)
            driver.open()
            assert driver.store([1, 2]) == [Outcome.NO_SPACE] * 2
            assert [name for name in server.objects if name.count("/") > 1] == []
            assert "does not support conditional writes" in driver.tier.denials["conditional writes"]

    def test_a_tier_that_only_reads_writes_nothing(
        self, place: dict[str, Any], s3_server: S3Server, drivers: list[Driver]
    ) -> None:
        with Driver(SMALL, 8, **place, write="off") as reader:
            assert reader.open() == []
            client = s3_server.client()
            assert "Contents" not in client.list_objects_v2(Bucket=place["bucket"], Prefix=f"{place['prefix']}/")
            drivers[0].open()
            assert stored(drivers[0], 1)
            assert [entry.key for entry in reader.adopted()] == [key_of(1)]
            assert reader.load([1]) == [Outcome.OK]

    def test_is_off_unless_asked_for(self) -> None:
        assert S3Config(type="s3", bucket="kv-cache", capacity=ROW).shared is False


class TestAllowance:
    """Capacity 100, window 25."""

    @pytest.fixture
    def allowance(self) -> UploadQuota:
        allowance = UploadQuota(100, 5)
        self.hear(allowance, 10.0, None)
        return allowance

    @staticmethod
    def hear(allowance: UploadQuota, now_s: float, usage: Usage | None, fresh_for_s: float = 60.0) -> None:
        allowance.asking()
        allowance.answered(now_s, usage, fresh_for_s)

    def test_nothing_before_a_listing_that_began_after_us(self, allowance: UploadQuota) -> None:
        assert not allowance.take(5)
        self.hear(allowance, 11.0, Usage(0, 10.0))
        assert not allowance.take(5)
        self.hear(allowance, 12.0, Usage(0, 11.0))
        assert allowance.take(5)

    def test_one_window_until_a_listing_has_counted_it(self, allowance: UploadQuota) -> None:
        self.hear(allowance, 12.0, Usage(0, 11.0))
        assert [allowance.take(5) for _ in range(6)] == [True] * 5 + [False]
        for _ in range(5):
            allowance.ended(5)
        assert not allowance.take(5), "the record does not know of it"
        self.hear(allowance, 13.0, Usage(0, 12.0))
        assert not allowance.take(5), "that listing began before it had ended"
        self.hear(allowance, 14.0, Usage(25, 13.0))
        assert not allowance.take(5), "within one second nobody knows what was first"
        self.hear(allowance, 15.0, Usage(25, 14.0))
        assert allowance.take(5)

    def test_what_is_under_way_is_never_counted_as_listed(self, allowance: UploadQuota) -> None:
        self.hear(allowance, 12.0, Usage(0, 11.0))
        assert allowance.take(25)
        self.hear(allowance, 99.0, Usage(0, 98.0))
        assert not allowance.take(5)

    @pytest.mark.parametrize(("nbytes", "room"), [(75, True), (76, False)])
    def test_room_for_a_whole_window(self, allowance: UploadQuota, nbytes: int, room: bool) -> None:
        self.hear(allowance, 12.0, Usage(nbytes, 11.0))
        assert allowance.take(5) is room
        assert allowance.used_bytes == nbytes

    def test_a_stale_record_allows_nothing(self, allowance: UploadQuota) -> None:
        self.hear(allowance, 12.0, Usage(0, 11.0), fresh_for_s=-1.0)
        assert not allowance.take(5)

    def test_a_record_that_goes_back_is_not_believed(self, allowance: UploadQuota) -> None:
        self.hear(allowance, 13.0, Usage(90, 12.0))
        self.hear(allowance, 14.0, Usage(0, 11.0))
        assert not allowance.take(5)


@pytest.mark.parametrize("raw", [b"", b"{}", b"[]", b"null", b'{"bytes": 1}', b'{"bytes": "x", "began": 1}', b"\xff"])
def test_what_is_no_usage_record(raw: bytes) -> None:
    assert Usage.decode(raw) is None
    assert Usage.decode(Usage(5, 7.0).encode()) == Usage(5, 7.0)
