"""Rows that lack sub-blocks: stored, sealed and found again as what they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nixl_tiers.base.chunk import Geometry, Namespace
from nixl_tiers.config import schema as configuration
from nixl_tiers.core.lookup import Lookup
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.store import TieredStore
from tests.support.control_words import mark_partial
from tests.support.core import end_step, finish, look_up
from tests.support.file_tier import file_tier
from tests.support.servers import S3Server
from tests.support.waiting import until, until_up

MIB = 1 << 20
GEOMETRY = Geometry(cells=2, cell_payload=4 * 4096, sub_blocks=4)
Tier = dict[str, Any]


@pytest.fixture(params=["slabs", "files", pytest.param("s3", marks=pytest.mark.s3)])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Tier:
    if request.param != "s3":
        return file_tier(tmp_path / "kv", 16 * MIB, layout=request.param)
    server: S3Server = request.getfixturevalue("any_s3")
    bucket: Callable[[S3Server], str] = request.getfixturevalue("s3_bucket")
    request.getfixturevalue("s3_credentials")(server)
    prefix = request.getfixturevalue("s3_prefix")
    return {"type": "s3", "bucket": bucket(server), "prefix": prefix, "endpoint": server.endpoint, "capacity": 16 * MIB}


class Bench:
    """A store over a region of several cells; the test plays the workers."""

    def __init__(self, *storage: Tier) -> None:
        config = configuration.load(
            {"tiers": [{"type": "cpu", "capacity": 8 * MIB}, *storage], "wait_s": 120.0, "probe_s": 60.0}
        )
        self.region = HostRegion.create(GEOMETRY, 16)
        self.store = TieredStore(Coordinator.open(config, Namespace.of({"test": "partial"}), self.region))
        self.coordinator = self.store.coordinator

    def put(self, key: bytes, missing: int) -> None:
        plan = self.coordinator.prepare_store("writer", [key])
        self.region.rows_view[plan.rows[0]] = key[0]
        for cell in range(GEOMETRY.cells):
            mark_partial(self.region, plan.rows, cell, plan.store_seq, missing)
        self.coordinator.complete_store(plan.keys)
        finish(self.coordinator, "writer")

    def lookup(self, key: bytes, first: int) -> Lookup:
        """The final answer to a request."""
        name = f"reader-{first}"
        with self.coordinator.changed:
            while (answer := look_up(self.coordinator, key, name, None, first)) is Lookup.PENDING:
                end_step(self.coordinator)
                self.coordinator.changed.wait(0.25)
        finish(self.coordinator, name)
        end_step(self.coordinator)
        return answer

    def payload(self, key: bytes, first: int) -> np.ndarray[Any, Any]:
        """(cells, sub_blocks, bytes) of a hit."""
        assert self.lookup(key, first) is Lookup.HIT
        (row,) = self.coordinator.prepare_load("loader", [key]).rows
        cells = self.region.rows_view[row, : GEOMETRY.payload_bytes].reshape(GEOMETRY.cells, GEOMETRY.sub_blocks, -1)
        self.coordinator.complete_load("loader")
        return cells.copy()


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(*storage: Tier) -> Bench:
        for old in benches:
            old.store.close()
        benches.append(Bench(*storage))
        return benches[-1]

    yield make
    for old in benches:
        old.store.close()


def check(bench: Bench) -> None:
    assert [bench.lookup(b"part", first) for first in range(4)] == [Lookup.MISS] * 2 + [Lookup.HIT] * 2
    assert [bench.lookup(b"whole", first) for first in range(4)] == [Lookup.HIT] * 4
    with bench.coordinator.core() as core:
        assert [core.host.index[key].missing for key in (b"whole", b"part")] == [0, 2]


def test_missing_sub_blocks_are_zeroed_and_stay_misses_in_storage(bench: Callable[..., Bench], tier: Tier) -> None:
    here = bench(tier)
    name = here.store.coordinator.counters().keys() - {"cpu"}
    (storage,) = name
    until_up(here.store)
    here.put(b"part", missing=2)
    here.put(b"whole", missing=0)
    assert here.store.flush(300)
    again = bench(tier)
    until_up(again.store)
    if tier.get("layout") == "slabs":  # the others are asked
        until(lambda: again.store.stats()[storage]["rows"] == 2, "the tier's listing")
    check(again)
    part = again.payload(b"part", first=2)
    assert not part[:, :2].any()
    assert (part[:, 2:] == b"part"[0]).all()
    assert (again.payload(b"whole", first=0) == b"whole"[0]).all()
    assert again.store.stats()[storage]["corrupt"] == 0
