"""Rows through real S3 servers: what was stored is loaded, and wrong bytes never are."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.tiers.s3.conditional import RACERS, most_winners, put_if
from tests.support.servers import S3Server
from tests.system.tiers.s3.harness import TierDriver

pytestmark = pytest.mark.moto

SMALL = Geometry(cells=1, cell_payload=64 << 10)


def _objects(server: S3Server, place: dict[str, Any]) -> dict[str, int]:
    """Bytes of every row below the prefix, by name."""
    answer = server.client().list_objects_v2(Bucket=place["bucket"], Prefix=f"{place['prefix']}/")
    return {found["Key"]: found["Size"] for found in answer.get("Contents", ()) if found["Key"].count("/") > 1}


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


@pytest.mark.parametrize("keep", [0, 1, 4096, -4096, -1], ids=lambda keep: f"keep{keep}")
def test_damaged_swapped_truncated_and_foreign_objects(place: dict[str, Any], s3_server: S3Server, keep: int) -> None:
    """TierDriver.load compares every row that is not OK with what it was before."""
    client = s3_server.client()
    with TierDriver(SMALL, 32, **place) as driver:
        driver.open()
        assert driver.store(range(1, 32)) == [Outcome.OK] * 31
        bodies = {
            number: bytearray(client.get_object(Bucket=place["bucket"], Key=driver.name(number))["Body"].read())
            for number in range(1, 32)
        }
        bodies[1], bodies[2] = bodies[2], bodies[1]
        bodies[3][40_000] ^= 0x10
        bodies[4][-300] ^= 0x10
        bodies[5] = bytearray(b"<Error>hello</Error>")
        cut = next(number for number in range(6, 32) if bodies[number][-1])  # a 0 alone would not be missed
        # The whole row passes through every staging row first: its bytes there must not complete the short one.
        driver.finish(driver.tier.load(driver.moves([cut] * 64)))
        bodies[cut] = bodies[cut][:keep]
        for number in (1, 2, 3, 4, 5, cut):
            client.put_object(Bucket=place["bucket"], Key=driver.name(number), Body=bytes(bodies[number]))
        assert driver.load([1, 2, 3, 4, 5]) == [Outcome.CORRUPT] * 5
        assert driver.load([cut]) != [Outcome.OK]


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
