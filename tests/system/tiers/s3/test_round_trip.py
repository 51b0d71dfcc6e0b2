"""Rows through real S3 servers: what was stored is loaded, and wrong bytes never are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.tiers.base import Move
from nixl_tiers.tiers.s3 import tier as tier_module
from nixl_tiers.tiers.s3.concurrency import TransferLimit
from tests.support.servers import S3Server
from tests.system.tiers.s3.harness import NAMESPACE, OTHER_NAMESPACE, TierDriver, but, key_of, wait_until

pytestmark = pytest.mark.moto

SMALL = Geometry(cells=1, cell_payload=64 << 10)


def _objects(server: S3Server, place: dict[str, Any]) -> dict[str, int]:
    """Bytes of every row below the prefix, by name."""
    answer = server.client().list_objects_v2(Bucket=place["bucket"], Prefix=f"{place['prefix']}/")
    return {found["Key"]: found["Size"] for found in answer.get("Contents", ()) if found["Key"].count("/") > 1}


@pytest.fixture
def driver(place: dict[str, Any]) -> Iterator[TierDriver]:
    with TierDriver(SMALL, 32, **place) as driver:
        driver.open()
        yield driver


@pytest.mark.parametrize(
    "geometry",
    [
        Geometry(cells=1, cell_payload=64 << 10),
        Geometry(cells=2, cell_payload=128 << 10, sub_blocks=4),
        Geometry(cells=4, cell_payload=737_280, sub_blocks=16),
        Geometry(cells=1, cell_payload=8 << 20, sub_blocks=64),
    ],
    ids=["64KiB", "256KiB", "2.95MB", "8MiB"],
)
def test_rows_of_every_size_are_stored_and_loaded(
    place: dict[str, Any], s3_server: S3Server, geometry: Geometry
) -> None:
    numbers = list(range(20 if geometry.row_bytes < 1 << 20 else 6))
    with TierDriver(geometry, len(numbers), **place) as driver:
        driver.open()
        assert driver.store(numbers) == [Outcome.OK] * len(numbers)
        assert driver.settled(len(numbers))
        assert driver.load(numbers) == [Outcome.OK] * len(numbers)
        names = [driver.name(number) for number in numbers]
    assert _objects(s3_server, place) == dict.fromkeys(names, geometry.row_bytes)


def test_concurrent_batches_keep_their_own_outcomes(driver: TierDriver) -> None:
    driver.store([0, 1])
    stored = driver.begin_store(range(10, 30))
    loaded = driver.tier.load([Move(2, 0, key_of(0)), Move(3, 99, key_of(99)), Move(4, 1, key_of(1))])
    stored_outcomes, loaded_outcomes = driver.finish(stored, loaded)
    assert stored_outcomes == [Outcome.OK] * 20
    assert loaded_outcomes == [Outcome.OK, Outcome.MISSING, Outcome.OK]
    assert not driver.tier.busy


class TestCorruptObjects:
    """TierDriver.load compares every row that is not OK with what it was before."""

    @pytest.mark.parametrize("keep", [0, 1, 1000, 4096, -4096, -1], ids=lambda keep: f"keep{keep}")
    def test_a_truncated_object(self, driver: TierDriver, s3_server: S3Server, keep: int) -> None:
        # The whole row passes through every staging row first: its bytes there must not complete the short one.
        for number in range(1, 31):
            driver.store([number])
            whole = self._object(s3_server, driver, number)
            if whole[-1]:  # a 0 alone would not be missed: downloads find it there
                break
        driver.finish(driver.tier.load(driver.moves([number] * 64)))
        self._replace(s3_server, driver, number, whole[:keep])
        assert driver.load([number]) != [Outcome.OK]

    @pytest.mark.parametrize("at", [0, 40_000, 65_535, 65_536, -300, -1])
    def test_a_flipped_bit(self, driver: TierDriver, s3_server: S3Server, at: int) -> None:
        driver.store([1])
        body = bytearray(self._object(s3_server, driver, 1))
        body[at] ^= 0x10
        self._replace(s3_server, driver, 1, bytes(body))
        assert driver.load([1]) == [Outcome.CORRUPT]

    def test_swapped_objects(self, driver: TierDriver, s3_server: S3Server) -> None:
        driver.store([1, 2])
        one, two = (self._object(s3_server, driver, number) for number in (1, 2))
        self._replace(s3_server, driver, 1, two)
        self._replace(s3_server, driver, 2, one)
        assert driver.load([1, 2]) == [Outcome.CORRUPT, Outcome.CORRUPT]

    @pytest.mark.parametrize("body", [bytes(SMALL.row_bytes), b"\xff" * SMALL.row_bytes, b"<Error>hello</Error>"])
    def test_a_foreign_object(self, driver: TierDriver, s3_server: S3Server, body: bytes) -> None:
        driver.store([1])
        self._replace(s3_server, driver, 1, body)
        assert driver.load([1]) == [Outcome.CORRUPT]

    def test_a_row_of_another_namespace_or_epoch(
        self, driver: TierDriver, s3_server: S3Server, place: dict[str, Any]
    ) -> None:
        driver.store([1])
        body = self._object(s3_server, driver, 1)
        driver.open(OTHER_NAMESPACE, 0)
        self._replace(s3_server, driver, 1, body, OTHER_NAMESPACE)
        assert driver.load([1]) == [Outcome.CORRUPT]
        driver.open(NAMESPACE, 1)
        assert driver.load([1]) == [Outcome.CORRUPT]
        assert wait_until(lambda: _objects(s3_server, place) == {}), "the rest of us need not load them too"
        driver.open(NAMESPACE, 0)
        self._replace(s3_server, driver, 1, body)
        assert driver.load([1]) == [Outcome.OK]

    @staticmethod
    def _object(server: S3Server, driver: TierDriver, number: int) -> bytes:
        found = server.client().get_object(Bucket=driver.config.bucket, Key=driver.name(number))
        body: bytes = found["Body"].read()
        return body

    @staticmethod
    def _replace(server: S3Server, driver: TierDriver, number: int, body: bytes, namespace: bytes = NAMESPACE) -> None:
        server.client().put_object(Bucket=driver.config.bucket, Key=driver.name(number, namespace), Body=body)


def test_s3_tier_starts_no_upload_while_they_are_held(place: dict[str, Any]) -> None:
    with TierDriver(SMALL, 4, times=but(stores_held_s=3600.0), **place) as driver:
        driver.open()
        assert driver.store([0]) == [Outcome.OK]
        driver.region.stores_held_until_s = time.monotonic() + 3600.0
        batch = driver.tier.store([Move(1, 1, key_of(1), seal=True)])
        for _ in range(50):
            assert driver.tier.poll() == []
            time.sleep(0.002)
        driver.region.stores_held_until_s = 0.0
        assert driver.finish(batch) == [[Outcome.OK]]


@pytest.mark.parametrize(("most", "limit"), [(3, None), (64, 2)], ids=["allowed", "measured"])
def test_no_more_transfers_run_than_are_allowed_and_measured(
    place: dict[str, Any], monkeypatch: pytest.MonkeyPatch, most: int, limit: int | None
) -> None:
    if limit is not None:
        monkeypatch.setattr(TransferLimit, "limit", limit)
    monkeypatch.setattr(tier_module, "MOST", most)
    with TierDriver(SMALL, 32, **place) as driver:
        driver.open()
        tier, running = driver.tier, list[int]()
        data = tier._data

        def noted(begin: Callable[..., Any]) -> Callable[..., Any]:
            def begin_and_note(*where: Any) -> Any:
                transfer = begin(*where)
                running.append(sum(not each.over() for each in data._running))
                return transfer

            return begin_and_note

        monkeypatch.setattr(data, "upload", noted(data.upload))
        monkeypatch.setattr(data, "download", noted(data.download))
        for move in (driver.store, driver.load):
            running.clear()
            assert move(range(32)) == [Outcome.OK] * 32
            assert max(running) == (limit or most)
        assert tier._uploads._seen == tier._downloads._seen == 32, "the limits follow each of them"
