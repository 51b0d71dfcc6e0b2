"""One bit flipped, two rows swapped, a row replaced by another key's: a counted miss, never a hit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nixl_tiers
from nixl_tiers.base.chunk import Geometry
from nixl_tiers.memory.seal import read
from nixl_tiers.tiers.s3.names import RowNames
from tests.support.file_tier import file_tier
from tests.support.servers import S3Server
from tests.support.times import open_patient
from tests.support.waiting import until, until_up
from tests.system.integration.test_round_trips import MIB, chunks

SIZE = 60_000
ROW = Geometry(1, SIZE).row_bytes


class Medium:
    """Rows in files, seen without the tier. `tier`: its configuration."""

    def __init__(self, tier: dict[str, Any]) -> None:
        self.tier = tier

    def places(self) -> list[Any]:
        """Every place at which there may be a row."""
        files = [*Path(self.tier["path"]).rglob("slab-*"), *Path(self.tier["path"]).rglob("*.row")]
        return [(file, at) for file in files for at in range(0, file.stat().st_size, ROW)]

    def read(self, place: Any) -> bytes:
        return bytes(place[0].read_bytes()[place[1] : place[1] + ROW])

    def write(self, place: Any, row: bytes) -> None:
        with place[0].open("r+b") as file:
            file.seek(place[1])
            file.write(row)


class Objects(Medium):
    def __init__(self, server: S3Server, tier: dict[str, Any]) -> None:
        super().__init__(tier)
        self._client = server.client()

    def places(self) -> list[str]:
        listed = self._client.list_objects_v2(Bucket=self.tier["bucket"], Prefix=self.tier["prefix"] + "/")
        names = RowNames(self.tier["prefix"])
        return [entry["Key"] for entry in listed.get("Contents", ()) if names.parse(entry["Key"])]

    def read(self, place: str) -> bytes:
        body: bytes = self._client.get_object(Bucket=self.tier["bucket"], Key=place)["Body"].read()
        return body

    def write(self, place: str, row: bytes) -> None:
        self._client.put_object(Bucket=self.tier["bucket"], Key=place, Body=row)


def rows_on(medium: Medium, but_of: bytes | None = None) -> dict[bytes, Any]:
    """Key -> place of every row, by the seals; without those of the namespace `but_of`."""
    seals = ((read(medium.read(place)), place) for place in medium.places())
    return {seal.key: place for seal, place in seals if seal is not None and seal.namespace != but_of}


@pytest.fixture(params=["slabs", "files", pytest.param("s3", marks=pytest.mark.s3)])
def medium(request: pytest.FixtureRequest, tmp_path: Path) -> Medium:
    if request.param != "s3":
        return Medium(file_tier(tmp_path / "kv", 16 * MIB, layout=request.param))
    server: S3Server = request.getfixturevalue("fast_s3")
    bucket: Callable[[S3Server], str] = request.getfixturevalue("s3_bucket")
    request.getfixturevalue("s3_credentials")(server)
    place = {"bucket": bucket(server), "prefix": request.getfixturevalue("s3_prefix"), "endpoint": server.endpoint}
    return Objects(server, {"type": "s3", "capacity": 16 * MIB, **place})


def open_store(medium: Medium, salt: str = "") -> nixl_tiers.TieredStore:
    config = {
        "tiers": [{"type": "cpu", "capacity": 4 * MIB}, medium.tier],
        "salt": salt,
        "wait_s": 120.0,
        "probe_s": 60.0,
    }
    store = open_patient(config, SIZE, "n")
    until_up(store)
    return store


@pytest.mark.smoke
def test_any_corruption_is_a_counted_miss(medium: Medium) -> None:
    name = medium.tier["type"]
    keys, rows = chunks(6, SIZE)
    _, others_rows = chunks(6, SIZE, seed=1)
    with open_store(medium, salt="another tenant") as store:
        assert store.put(keys[3:4], others_rows[3:4]) == 1
        assert store.flush(300)
    theirs = medium.read(rows_on(medium)[keys[3]])
    foreign = read(theirs)
    assert foreign is not None
    with open_store(medium) as store:
        assert store.put(keys, rows) == 6
        assert store.flush(300)

    places = rows_on(medium, but_of=foreign.namespace)
    assert places.keys() == set(keys)
    flipped = bytearray(medium.read(places[keys[0]]))
    flipped[SIZE // 2] ^= 1
    first, second = (medium.read(places[key]) for key in keys[1:3])
    for key, row in zip(keys, (bytes(flipped), second, first, theirs), strict=False):
        medium.write(places[key], row)

    with open_store(medium) as store:
        if medium.tier.get("layout") == "slabs":  # shared media are asked
            until(lambda: store.stats()[name]["rows"] == 6, "the tier's listing")
        out = np.zeros_like(rows)
        assert store.get(keys, out) == [False] * 4 + [True] * 2
        assert np.array_equal(out[4:], rows[4:])
        assert not out[:4].any(), "not a byte of what was refused is handed out"
        assert store.stats()[name]["corrupt"] == 4
        assert store.locate(keys[:4]) == [None] * 4
        assert store.get(keys[:4], out[:4]) == [False] * 4
        assert store.stats()[name]["corrupt"] == 4, "what was found bad is not read again"
