"""Rows through real S3 servers: what was stored is loaded, and wrong bytes never are."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.base.manifest import Description, Manifest
from nixl_tiers.tiers import manifests
from nixl_tiers.tiers.base import Move
from nixl_tiers.tiers.s3.conditional import RACERS, get_object, most_winners, put_if
from tests.support.servers import S3Server
from tests.system.tiers.s3.harness import NAMESPACE, OTHER_NAMESPACE, TierDriver, key_of, wait_until
from tests.tiers.s3.test_compat import stored_before

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
        Geometry(cells=4, cell_payload=737_280, sub_blocks=16),
        Geometry(cells=1, cell_payload=8 << 20, sub_blocks=64),
    ],
    ids=["64KiB", "2.95MB", "8MiB"],
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

    @pytest.mark.parametrize("keep", [0, 1, 4096, -4096, -1], ids=lambda keep: f"keep{keep}")
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

    def test_damaged_swapped_and_foreign_objects(self, driver: TierDriver, s3_server: S3Server) -> None:
        assert driver.store(range(1, 6)) == [Outcome.OK] * 5
        bodies = [bytearray(self._object(s3_server, driver, number)) for number in range(1, 6)]
        bodies[0], bodies[1] = bodies[1], bodies[0]
        bodies[2][40_000] ^= 0x10
        bodies[3][-300] ^= 0x10
        bodies[4] = bytearray(b"<Error>hello</Error>")
        for number, body in enumerate(bodies, 1):
            self._replace(s3_server, driver, number, bytes(body))
        assert driver.load(range(1, 6)) == [Outcome.CORRUPT] * 5

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


@pytest.mark.parametrize("kind", ["private", "shared"])
def test_rows_of_an_earlier_version_are_found_and_loaded_and_none_is_deleted(
    s3_server: S3Server, place: dict[str, Any], kind: str, fast_budget: None
) -> None:
    """Of its only engine, or shared: there is one kind now."""
    geometry = Geometry(cells=1, cell_payload=4096)
    for name, body in stored_before(f"{kind}-closed").items():
        s3_server.client().put_object(Bucket=place["bucket"], Key=f"{place['prefix']}{name[1:]}", Body=body)
    before = _objects(s3_server, place)
    for namespace in (NAMESPACE, OTHER_NAMESPACE):
        with TierDriver(geometry, 32, **place | {"capacity": 64 * geometry.row_bytes}) as one:
            one.open(namespace)
            assert one.tier.check_existence(1, [key_of(number) for number in range(13)], False)
            assert wait_until(lambda one=one: bool(one.tier.existence_answers()))  # type: ignore[misc]
            assert sorted(entry.key for entry in one.tier.found()) == [key_of(number) for number in range(12)]
            (outcomes,) = one.finish(one.tier.load(one.moves(range(12))))
            assert outcomes == [Outcome.OK] * 12
            assert all((one.row(number)[: geometry.cell_payload] == number + 1).all() for number in range(12))
            assert wait_until(lambda one=one: one.store([20]) == [Outcome.OK])  # type: ignore[misc]
            assert before.keys() < _objects(s3_server, place).keys()


def test_a_server_that_writes_after_it_has_tested_lets_all_racers_through() -> None:
    objects: dict[str, str] = {}
    etags, tested = itertools.count(), threading.Barrier(RACERS)

    def put(name: str, body: bytes, **condition: str) -> dict[str, Any] | None:
        holds = name not in objects if "IfNoneMatch" in condition else objects.get(name) == condition["IfMatch"]
        tested.wait(60)
        if holds:
            objects[name] = str(next(etags))
            return {"ETag": objects[name]}
        return None

    assert most_winners(put, "race") == RACERS


@pytest.mark.parametrize("s3_server", ["seaweedfs"], indirect=True)  # moto may let two through
def test_a_server_lets_one_racer_through(place: dict[str, Any], s3_server: S3Server) -> None:
    client = s3_server.client()

    def put(name: str, body: bytes, **condition: str) -> dict[str, Any] | None:
        return put_if(client, place["bucket"], f"{place['prefix']}/{name}", body, condition)

    assert most_winners(put, "race") == 1


def test_expired_rows_are_misses_and_deleted_whichever_model_has_stored_them(
    place: dict[str, Any], s3_server: S3Server, fast_budget: None
) -> None:
    """The seal holds when a row was computed; Last-Modified is when it was uploaded."""
    with TierDriver(SMALL, 8, **place, max_age=3600) as driver:
        driver.open()
        now = int(time.time())
        assert wait_until(lambda: driver.store_sealed(1, now - 7200) is Outcome.OK)
        assert driver.store_sealed(2, now - 1800) is Outcome.OK
        assert driver.load([1, 2]) == [Outcome.MISSING, Outcome.OK]
        assert wait_until(lambda: [*_objects(s3_server, place)] == [driver.name(2)])
        other = driver.name(1, OTHER_NAMESPACE)
    s3_server.client().put_object(Bucket=place["bucket"], Key=other, Body=bytes(SMALL.row_bytes))
    with TierDriver(SMALL, 8, **place, max_age=1) as driver:
        driver.open()
        assert wait_until(lambda: _objects(s3_server, place) == {})


class TestManifest:
    @pytest.fixture(autouse=True)
    def _soon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(manifests, "CHECK_S", 0.02)

    def test_it_is_written_with_the_first_rows_and_not_for_weights_that_were_replaced(
        self, place: dict[str, Any], s3_server: S3Server
    ) -> None:
        def manifest(namespace: bytes = NAMESPACE) -> Manifest | None:
            name = f"{place['prefix']}/{namespace.hex()}/about.json"
            found = get_object(s3_server.client(), place["bucket"], name)
            return None if found is None else Manifest.decode(found["Body"].read())

        with TierDriver(SMALL, 8, engine="node/1/abcd", **place) as driver:
            driver.tier.describe(Description(model="org/model"))
            driver.open(OTHER_NAMESPACE, 7)
            assert driver.store([1]) == [Outcome.OK]
            driver.open()
            assert manifest() is None
            assert driver.store([1]) == [Outcome.OK]
            assert wait_until(lambda: manifest() is not None)
            assert manifest(OTHER_NAMESPACE) is None
        found = manifest()
        assert found is not None
        assert (found.namespace, found.description.model) == (NAMESPACE.hex(), "org/model")
