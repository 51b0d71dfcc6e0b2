"""Several movers on a shared prefix: they see each other's rows and keep one budget, also when one of them dies."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import formatdate
from io import BytesIO
from typing import Any
from unittest.mock import Mock

import pytest
from botocore.exceptions import EndpointConnectionError

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.config.schema import S3Config
from nixl_tiers.tiers.s3 import lease as lease_module
from nixl_tiers.tiers.s3 import shared as shared_module
from nixl_tiers.tiers.s3 import usage
from nixl_tiers.tiers.s3.denials import Denials
from nixl_tiers.tiers.s3.janitor import COUNTER_NAME, USAGE_NAME, Janitor
from nixl_tiers.tiers.s3.lease_state import JANITOR_TERMS
from nixl_tiers.tiers.s3.shared import SharedRows
from nixl_tiers.tiers.s3.usage import Account, UploadQuota, Usage
from tests.support.engines import least_s3_bytes
from tests.support.servers import ACCESS_KEY, SECRET_KEY, S3Server
from tests.system.tiers.s3.harness import (
    CUT_OFF,
    FAST_JANITOR,
    FAST_LEASE,
    NAMESPACE,
    OTHER_NAMESPACE,
    TierDriver,
    client_of,
    faulty_s3,
    key_of,
    wait_until,
)

SMALL = Geometry(cells=1, cell_payload=64 << 10)
ROW = SMALL.row_bytes
CAPACITY_ROWS = 32
WINDOW_ROWS = 8


@pytest.fixture(autouse=True)
def _fast_janitor(fast_janitor: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "WINDOW_SHARE", CAPACITY_ROWS // WINDOW_ROWS)


@pytest.fixture
def place(place: dict[str, Any]) -> dict[str, Any]:
    return {**place, "capacity": CAPACITY_ROWS * ROW, "shared": True}


@pytest.fixture
def drivers(place: dict[str, Any]) -> Iterator[list[TierDriver]]:
    with ExitStack() as stack:
        yield [stack.enter_context(TierDriver(SMALL, 32, **place)) for _ in range(3)]


def stored(driver: TierDriver, number: int) -> bool:
    """Store a row as soon as there is room for it. FOUND: an upload that was given up has arrived after all."""
    return wait_until(lambda: set(driver.store([number])) <= {Outcome.OK, Outcome.FOUND})


def found(driver: TierDriver, *numbers: int) -> list[bytes]:
    """Which of these keys the mover finds by asking."""
    driver.tier.found()
    assert driver.tier.check_existence(1, [key_of(number) for number in numbers], False)
    assert wait_until(lambda: bool(driver.tier.existence_answers()))
    return [entry.key for entry in driver.tier.found()]


def rows_of(driver: TierDriver) -> SharedRows:
    rows = driver.tier._rows
    assert isinstance(rows, SharedRows)
    return rows


def janitor_of(driver: TierDriver) -> Janitor:
    janitor = rows_of(driver)._janitor
    assert janitor is not None
    return janitor


def holds_lease(driver: TierDriver) -> bool:
    return janitor_of(driver).holds_lease


def rows_in(server: S3Server, place: dict[str, Any]) -> list[str]:
    pages = server.client().get_paginator("list_objects_v2")
    found = pages.paginate(Bucket=place["bucket"], Prefix=f"{place['prefix']}/")
    names = [each["Key"] for page in found for each in page.get("Contents", ())]
    return [name for name in names if name.count("/") > 1]


def disconnect_janitor(driver: TierDriver) -> None:
    """From now on this mover's janitor does not reach the server; to the others it is dead."""

    def client() -> Any:
        raise EndpointConnectionError(endpoint_url="disconnected")

    janitor = janitor_of(driver)
    janitor._client = janitor._lease.client = client


class TestRowsOfOtherMovers:
    """They are asked for: see also test_existence_checks.py."""

    def test_rows_are_found_without_a_listing(self, drivers: list[TierDriver]) -> None:
        one, two, other = drivers
        assert one.open() == two.open() == other.open(OTHER_NAMESPACE) == []
        assert stored(one, 1)
        assert two.listed_rows() == []
        assert found(two, 1, 2) == [key_of(1)]
        assert two.load([1]) == [Outcome.OK]
        assert found(other, 1) == []
        assert other.load([1]) == [Outcome.MISSING]

    def test_rows_are_found_after_a_restart(self, drivers: list[TierDriver], place: dict[str, Any]) -> None:
        one, *_ = drivers
        one.open()
        assert stored(one, 1)
        with TierDriver(SMALL, 32, **place) as again:
            assert again.open() == []
            assert found(again, 1) == [key_of(1)]

    def test_vanished_rows_are_misses(
        self, drivers: list[TierDriver], s3_server: S3Server, place: dict[str, Any]
    ) -> None:
        one, two, _ = drivers
        one.open()
        two.open()
        assert stored(one, 1)
        assert found(two, 1) == [key_of(1)]
        s3_server.client().delete_object(Bucket=place["bucket"], Key=one.name(1))
        assert two.load([1]) == [Outcome.MISSING]
        assert stored(one, 1)
        assert found(two, 1) == [key_of(1)], "found again when stored again"

    def test_a_row_survives_its_eviction_by_one_mover(self, drivers: list[TierDriver]) -> None:
        one, two, _ = drivers
        one.open()
        assert stored(one, 1)
        two.open()
        two.delete(1)
        assert wait_until(lambda: not two.tier._control.has_pending_deletes)
        assert one.load([1]) == [Outcome.OK]

    def test_a_corrupt_row_is_deleted(
        self, drivers: list[TierDriver], s3_server: S3Server, place: dict[str, Any]
    ) -> None:
        one, two, _ = drivers
        one.open()
        assert stored(one, 1)
        assert stored(one, 2)
        two.open()
        s3_server.client().put_object(Bucket=place["bucket"], Key=one.name(1), Body=bytes(ROW))
        assert wait_until(lambda: not two.tier._rows.beside_others)  # it has looked whose prefix this is
        assert two.load([1, 2]) == [Outcome.CORRUPT, Outcome.OK]
        assert wait_until(lambda: rows_in(s3_server, place) == [one.name(2)])


class TestBudget:
    def test_three_movers_that_fill_the_prefix_many_times_stay_in_budget(
        self, drivers: list[TierDriver], s3_server: S3Server, place: dict[str, Any]
    ) -> None:
        for driver, namespace in zip(drivers, [NAMESPACE, NAMESPACE, OTHER_NAMESPACE], strict=True):
            driver.open(namespace)
        samples: list[int] = []
        done = threading.Event()

        def sample() -> None:
            client = s3_server.client()
            while not done.wait(0.1):
                samples.append(least_s3_bytes(client, place) // ROW)

        thread = threading.Thread(target=sample)
        thread.start()
        arrived = turn = 0
        deadline = time.monotonic() + 600
        try:
            while arrived < 5 * CAPACITY_ROWS and time.monotonic() < deadline:
                # Each mover always offers far more than its window.
                batch_ids = []
                for index, driver in enumerate(drivers):
                    first = 1_000_000 * index + 16 * turn
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
        assert max(samples) <= CAPACITY_ROWS + (len(drivers) - 1) * WINDOW_ROWS
        assert wait_until(lambda: len(rows_in(s3_server, place)) <= CAPACITY_ROWS)
        assert wait_until(lambda: sum(map(holds_lease, drivers)) == 1), "on a busy machine it may have expired"

    def test_the_oldest_rows_of_any_namespace_are_deleted_first(
        self, drivers: list[TierDriver], s3_server: S3Server, place: dict[str, Any]
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

    def test_the_usage_record_says_what_is_deleted(
        self, drivers: list[TierDriver], s3_server: S3Server, place: dict[str, Any]
    ) -> None:
        """All that was written before `oldest`, and nothing that was written a second later or more."""
        one, two, _ = drivers
        client, bucket = s3_server.client(), place["bucket"]
        for number in range(CAPACITY_ROWS):
            client.put_object(Bucket=bucket, Key=one.name(number, OTHER_NAMESPACE), Body=bytes(ROW))
        one.open()
        two.open()
        left = CAPACITY_ROWS - 2 * WINDOW_ROWS
        assert wait_until(lambda: len(rows_in(s3_server, place)) == left)
        heads = [client.head_object(Bucket=bucket, Key=name) for name in rows_in(s3_server, place)]
        oldest = min(int(head["LastModified"].timestamp()) for head in heads)
        for driver in (one, two):
            quota = rows_of(driver).upload_quota
            assert wait_until(lambda quota=quota: quota.oldest == oldest)  # type: ignore[misc]

    def test_uploads_go_on_between_listings(self, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            shared_module,
            "INTERVALS",
            replace(FAST_JANITOR, usage_timeout_s=60.0, sweep_s=3600.0, lease=replace(FAST_LEASE, lease_s=20.0)),
        )
        with TierDriver(SMALL, 32, **place) as one:
            one.open()
            for number in range(CAPACITY_ROWS - WINDOW_ROWS):
                assert stored(one, number)
            janitor = janitor_of(one)
            assert janitor._rows == 0, "the only listing found nothing"
            numbers = itertools.count(100)
            assert wait_until(lambda: bool(one.store([next(numbers)])) and janitor._rows > 0), "out of names, it lists"
            assert stored(one, 99)

    def test_what_another_janitors_record_has_counted_stays_counted(
        self, s3_server: S3Server, place: dict[str, Any]
    ) -> None:
        client, bucket, prefix = s3_server.client(), place["bucket"], place["prefix"]
        quota = UploadQuota("me", CAPACITY_ROWS * ROW, ROW)
        janitor = Janitor(
            lambda: client, bucket, prefix, quota=quota, intervals=FAST_JANITOR, denials=Denials("the bucket")
        )
        janitor._account = Account({"me": 5})

        def replaced(record: Usage) -> Usage | None:
            client.put_object(Bucket=bucket, Key=f"{prefix}/{USAGE_NAME}", Body=record.encode())
            janitor._read_usage()
            janitor._write_usage()
            return Usage.decode(client.get_object(Bucket=bucket, Key=f"{prefix}/{USAGE_NAME}")["Body"].read())

        assert replaced(Usage(50, {"me": 9})) == Usage(4, {"me": 9})
        late = Usage(50, {"me": 9, "late": 7})
        client.put_object(Bucket=bucket, Key=f"{prefix}/{COUNTER_NAME}late", Body=b"7")
        assert replaced(late) == late, "this janitor's listing began before that mover"
        client.delete_object(Bucket=bucket, Key=f"{prefix}/{COUNTER_NAME}late")
        assert replaced(late) == Usage(4, {"me": 9}), "a mover that is long gone"


@pytest.mark.parametrize(("date_s", "ahead_s"), [(1066, 61), (1006, 0), (940, 0)], ids=["ahead", "equal", "behind"])
def test_how_much_the_servers_date_is_ahead_is_seen_by_a_record_that_was_renewed(date_s: int, ahead_s: int) -> None:
    """Else rows that this mover stores would seem to be younger than they are, and be promised for longer."""
    quota, client = UploadQuota("me", CAPACITY_ROWS * ROW, ROW), Mock()
    janitor = Janitor(lambda: client, "b", "p", quota=quota, intervals=FAST_JANITOR, denials=Denials("here"))
    for etag, written_s in (("one", 1000), ("two", 1005), ("two", 1005)):
        client.get_object.return_value = {
            "ETag": etag,
            "LastModified": datetime.fromtimestamp(written_s, UTC),
            "Body": BytesIO(Usage(0).encode()),
            "ResponseMetadata": {"HTTPHeaders": {"date": formatdate(date_s, usegmt=True)}},
        }
        janitor._read_usage()
    assert quota.ahead_s == pytest.approx(ahead_s, abs=1)


class TestLease:
    def test_a_dead_janitor_is_replaced(self, drivers: list[TierDriver]) -> None:
        one, two, three = drivers
        one.open()
        assert wait_until(lambda: holds_lease(one))
        two.open()
        three.open()
        assert stored(two, 1)
        disconnect_janitor(one)
        assert wait_until(lambda: holds_lease(two) != holds_lease(three))
        successor = two if holds_lease(two) else three
        for number in range(2, 2 + 2 * WINDOW_ROWS):
            assert stored(successor, number), "there is a fresh usage record again"
        assert not holds_lease(one)

    def test_a_renewed_lease_is_not_taken_over(
        self, s3_server: S3Server, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With a timeout that no busy machine exceeds, so that it is looked at that the lease is renewed."""
        patient = replace(FAST_JANITOR, usage_timeout_s=600.0, lease=replace(FAST_LEASE, lease_s=600.0))
        monkeypatch.setattr(shared_module, "INTERVALS", patient)
        client, lease = s3_server.client(), f"{place['prefix']}/{JANITOR_TERMS.name}"
        renewed: set[str] = set()

        def asked_often() -> bool:
            renewed.add(client.get_object(Bucket=place["bucket"], Key=lease)["ETag"])
            return other._lease.state.others > 20 and len(renewed) > 10

        with TierDriver(SMALL, 32, **place) as one, TierDriver(SMALL, 32, **place) as two:
            one.open()
            assert wait_until(lambda: holds_lease(one))
            two.open()
            other = janitor_of(two)
            assert wait_until(asked_often)
            assert holds_lease(one)
            assert not holds_lease(two)

    def test_close_releases_the_lease(self, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            shared_module,
            "INTERVALS",
            replace(FAST_JANITOR, lease=replace(FAST_LEASE, lease_s=3600.0)),
        )
        with TierDriver(SMALL, 8, **place) as one:
            one.open()
            assert wait_until(lambda: holds_lease(one))
        with TierDriver(SMALL, 8, **place) as two:
            two.open()
            assert wait_until(lambda: holds_lease(two))


class TestServersAndRights:
    def test_without_conditional_writes_nothing_is_uploaded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        with (
            faulty_s3() as server,
            TierDriver(SMALL, 8, bucket="kv-plain", endpoint=server.endpoint, shared=True) as driver,
        ):
            driver.open()
            assert wait_until(lambda: "conditional writes" in driver.tier.denials)
            driver.open()
            assert driver.store([1, 2]) == [Outcome.NO_SPACE] * 2
            assert [name for name in server.objects if name.count("/") > 1] == []
            assert "does not support conditional writes" in driver.tier.denials["conditional writes"]

    def test_answer_that_is_cut_off_is_no_unexpected_error(
        self,
        server_credentials: None,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(lease_module, "conditional_writes_work", lambda *_: True)
        monkeypatch.setattr(Janitor, "_publish", lambda _: None)
        with faulty_s3() as server:
            server.fault = lambda request: CUT_OFF if request.method == "GET" else None
            client, quota = client_of(server), UploadQuota("me", CAPACITY_ROWS * ROW, ROW)
            janitor = Janitor(lambda: client, "kv", "p", quota=quota, intervals=FAST_JANITOR, denials=Denials("here"))
            janitor.start()
            assert wait_until(lambda: server.count("GET") > 2)
            janitor.close()
        assert not [r for r in caplog.records if "unexpected" in r.getMessage()]

    @pytest.mark.parametrize(
        ("headers", "reported"),
        [({}, True), ({"date": "Mon, 2? Nov 2026"}, False), ({"date": "23 Nov 99999999999 12:00:00 GMT"}, False)],
        ids=["none", "damaged", "far"],
    )
    def test_a_server_without_a_date_is_reported_and_a_damaged_one_is_a_failed_request(
        self, headers: dict[str, str], reported: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(lease_module, "conditional_writes_work", lambda *_: True)
        names: list[str] = []

        class Client:
            def put_object(self, *, Key: str, **_: object) -> dict[str, Any]:  # noqa: N803 (boto3's)
                names.append(Key)
                return {"ResponseMetadata": {"HTTPHeaders": headers}, "ETag": '"etag"'}

            get_object = delete_object = put_object

        quota, denials = UploadQuota("me", CAPACITY_ROWS * ROW, ROW), Denials("here")
        janitor = Janitor(Client, "kv", "p", quota=quota, intervals=FAST_JANITOR, denials=denials)
        janitor.start()
        assert wait_until(lambda: len(names) > 2)
        janitor.close()
        assert not janitor.holds_lease
        assert ("shared prefix" in denials.current()) is reported
        assert not [r for r in caplog.records if "unexpected" in r.getMessage()]

    def test_a_read_only_tier_writes_nothing(
        self, place: dict[str, Any], s3_server: S3Server, drivers: list[TierDriver]
    ) -> None:
        with TierDriver(SMALL, 8, **place, write="off") as reader:
            assert reader.open() == []
            client = s3_server.client()
            assert "Contents" not in client.list_objects_v2(Bucket=place["bucket"], Prefix=f"{place['prefix']}/")
            drivers[0].open()
            assert stored(drivers[0], 1)
            assert found(reader, 1) == [key_of(1)]
            assert reader.load([1]) == [Outcome.OK]

    def test_shared_is_off_by_default(self) -> None:
        assert S3Config(type="s3", bucket="kv-cache", capacity=ROW).shared is False
