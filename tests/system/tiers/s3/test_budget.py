"""Several movers on a prefix: they see each other's rows and keep one budget, also when one of them dies."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from botocore.exceptions import EndpointConnectionError

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.tiers.s3 import budget as budget_module
from nixl_tiers.tiers.s3 import record
from nixl_tiers.tiers.s3.budget import Budget
from tests.support.engines import least_s3_bytes
from tests.support.servers import S3Server
from tests.system.tiers.s3.harness import (
    FAST,
    NAMESPACE,
    OTHER_NAMESPACE,
    FaultyS3,
    TierDriver,
    key_of,
    wait_until,
)
from tests.tiers.s3.test_compat import stored_before

SMALL = Geometry(cells=1, cell_payload=64 << 10)
ROW = SMALL.row_bytes
CAPACITY_ROWS = 32
WINDOW_ROWS = 8


@pytest.fixture(autouse=True)
def _fast_budget(fast_budget: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "WINDOW_SHARE", CAPACITY_ROWS // WINDOW_ROWS)


@pytest.fixture
def place(place: dict[str, Any]) -> dict[str, Any]:
    return {**place, "capacity": CAPACITY_ROWS * ROW}


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


def budget_of(driver: TierDriver) -> Budget:
    budget = driver.tier._rows._budget
    assert budget is not None
    return budget


def writes(driver: TierDriver) -> bool:
    return budget_of(driver).takeover.account is not None


def rows_in(server: S3Server, place: dict[str, Any]) -> list[str]:
    pages = server.client().get_paginator("list_objects_v2")
    found = pages.paginate(Bucket=place["bucket"], Prefix=f"{place['prefix']}/")
    names = [each["Key"] for page in found for each in page.get("Contents", ())]
    return [name for name in names if name.count("/") > 1]


def disconnect(driver: TierDriver) -> None:
    """From now on this mover's budget does not reach the server; to the others it is dead."""

    class Disconnected:
        def __getattr__(self, name: str) -> Any:
            raise EndpointConnectionError(endpoint_url="disconnected")

    budget_of(driver)._connection = Disconnected()


class TestRowsOfOtherMovers:
    """They are asked for: see also test_existence_checks.py."""

    def test_rows_are_found_without_a_listing(self, drivers: list[TierDriver]) -> None:
        one, two, other = drivers
        for driver, namespace in ((one, NAMESPACE), (two, NAMESPACE), (other, OTHER_NAMESPACE)):
            driver.open(namespace)
        assert stored(one, 1)
        assert list(two.tier.list_rows()) == []
        assert found(two, 1, 2) == [key_of(1)]
        assert two.load([1]) == [Outcome.OK]
        assert found(other, 1) == []
        assert other.load([1]) == [Outcome.MISSING]


class TestAPrefixOfAnEarlierVersion:
    """Of its only engine, or shared: there is one kind now."""

    @pytest.mark.parametrize("kind", ["private", "shared"])
    def test_its_rows_are_found_and_loaded_and_none_is_deleted(
        self, s3_server: S3Server, place: dict[str, Any], kind: str
    ) -> None:
        geometry = Geometry(cells=1, cell_payload=4096)
        for name, body in stored_before(f"{kind}-closed").items():
            s3_server.client().put_object(Bucket=place["bucket"], Key=f"{place['prefix']}{name[1:]}", Body=body)
        before = rows_in(s3_server, place)
        for namespace in (NAMESPACE, OTHER_NAMESPACE):
            with TierDriver(geometry, 32, **place | {"capacity": 64 * geometry.row_bytes}) as one:
                one.open(namespace)
                assert sorted(found(one, *range(13))) == [key_of(number) for number in range(12)]
                (outcomes,) = one.finish(one.tier.load(one.moves(range(12))))
                assert outcomes == [Outcome.OK] * 12
                assert all((one.row(number)[: geometry.cell_payload] == number + 1).all() for number in range(12))
                assert stored(one, 20)
                assert set(before) < set(rows_in(s3_server, place))


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
        assert wait_until(lambda: sum(map(writes, drivers)) == 1), "on a busy machine it may have become stale"

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


class TestTakeover:
    def test_a_dead_writer_is_replaced(self, drivers: list[TierDriver]) -> None:
        one, two, three = drivers
        one.open()
        assert wait_until(lambda: writes(one))
        two.open()
        three.open()
        assert stored(two, 1)
        disconnect(one)
        assert wait_until(lambda: writes(two) != writes(three))
        successor = two if writes(two) else three
        for number in range(2, 2 + 2 * WINDOW_ROWS):
            assert stored(successor, number), "the record is written again"

    def test_a_record_that_is_renewed_is_not_taken_over(
        self, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With a time that no busy machine exceeds, so that it is looked at that the record is renewed."""
        monkeypatch.setattr(budget_module, "TERMS", replace(FAST, stale_s=600.0))
        with TierDriver(SMALL, 32, **place) as one, TierDriver(SMALL, 32, **place) as two:
            one.open()
            assert wait_until(lambda: writes(one))
            two.open()
            changes: set[float] = set()
            assert wait_until(lambda: changes.add(budget_of(two).takeover.changed_s) or len(changes) > 10)
            assert (writes(one), writes(two)) == (True, False)


class TestServersAndRights:
    @pytest.mark.parametrize("ignores", [False, True])
    def test_without_conditional_writes_one_engine_stores(
        self, faulty: FaultyS3, monkeypatch: pytest.MonkeyPatch, ignores: bool
    ) -> None:
        monkeypatch.setattr(budget_module, "DOUBT_S", 0.0)
        monkeypatch.setattr(budget_module, "TERMS", replace(FAST, settle_s=0.05))
        faulty.tests_conditions, faulty.ignores_conditions = False, ignores
        place = {"bucket": "kv-plain", "endpoint": faulty.endpoint}
        with TierDriver(SMALL, 8, **place) as one, TierDriver(SMALL, 8, **place) as two:
            one.open()
            assert stored(one, 1)
            two.open()
            assert wait_until(lambda: bool(two.tier.denials))
            assert "does not support conditional writes" in next(iter(two.tier.denials.values()))
            assert wait_until(lambda: budget_of(two).takeover.changed_s > 0)
            assert (writes(one), writes(two)) == (True, False)
            assert not two.tier._rows.upload_quota.try_acquire(ROW)
