"""Movers start no store while the engine copies rows out of the host."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nixl_tiers
from nixl_tiers.base.chunk import Geometry, Namespace, Outcome
from nixl_tiers.config import schema as configuration
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.runtime.copies import HOLD_S, OpenLoads
from nixl_tiers.tiers import moves as moves_module
from nixl_tiers.tiers.base import Move
from tests.mover.harness import key_of, payload
from tests.support.core import look_up
from tests.support.times import changed
from tests.tiers import file_tiers

GEOMETRY = Geometry(1, 8192)
KEYS = [b"one", b"two"]


@pytest.fixture
def region() -> Iterator[HostRegion]:
    with HostRegion.create(GEOMETRY, 4) as region:
        yield region


@pytest.fixture
def coordinator(region: HostRegion) -> Iterator[Coordinator]:
    """It holds KEYS."""
    config = configuration.load({"tiers": [{"type": "cpu", "capacity": 4 * GEOMETRY.row_bytes}]})
    coordinator = Coordinator.open(config, Namespace.of({"test": 1}), region)
    plan = coordinator.prepare_store(KEYS, "put", call=True)
    region.mark(plan.rows, 0, plan.store_seq, True)
    coordinator.end_call("put")
    yield coordinator
    coordinator.close()


def test_stores_are_held_until_the_last_open_load_has_ended(region: HostRegion) -> None:
    loads = OpenLoads(region, clock=lambda: 100.0)
    loads.begin(2, "request")
    loads.begin(3, "call", call=True)
    assert region.stores_held_until_s == 100.0 + HOLD_S
    loads.end("request")
    assert region.stores_held_until_s > 0
    loads.end_call("another call")
    assert region.stores_held_until_s > 0
    loads.end_call("call")
    assert region.stores_held_until_s == 0


def test_load_without_rows_holds_nothing(region: HostRegion) -> None:
    OpenLoads(region).begin(0, "request")
    assert region.stores_held_until_s == 0


def test_loads_of_before_a_reset_hold_nothing_and_may_end_late(region: HostRegion) -> None:
    loads = OpenLoads(region)
    loads.begin(2, "before")
    loads.reset()
    assert region.stores_held_until_s == 0
    loads.begin(1, "behind")
    loads.end("before")
    assert region.stores_held_until_s > 0
    loads.end("behind")
    assert region.stores_held_until_s == 0


def test_movers_see_it_in_their_own_mapping(region: HostRegion) -> None:
    with HostRegion.attach(os.dup(region.fd)) as other:
        assert other.stores_held_until_s == 0
        region.stores_held_until_s = 12.5
        assert other.stores_held_until_s == 12.5


@pytest.mark.parametrize("end", ["complete", "fail", "reset"])
def test_load_of_workers_holds_stores_until_it_ends(coordinator: Coordinator, end: str) -> None:
    before = time.monotonic()
    for key in KEYS:
        look_up(coordinator, key, "request")
    coordinator.prepare_load(KEYS, "request")
    assert before + HOLD_S <= coordinator.region.stores_held_until_s <= time.monotonic() + HOLD_S
    match end:
        case "complete":
            coordinator.complete_load("request")
        case "fail":
            coordinator.fail_load("request")
        case "reset":
            coordinator.reset()
    assert coordinator.region.stores_held_until_s == 0


def test_get_holds_stores_while_it_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[float] = []

    class Out(np.ndarray[Any, Any]):
        def __setitem__(self, key: Any, value: Any) -> None:
            held.append(store.coordinator.region.stores_held_until_s)
            super().__setitem__(key, value)

    monkeypatch.setattr("nixl_tiers.store._out_of", lambda out, *_: out)
    with nixl_tiers.open({"tiers": [{"type": "cpu", "capacity": "1MiB"}]}, 1000, "test") as store:
        store.put(KEYS, np.ones((2, 1000), np.uint8))
        assert store.get(KEYS, np.zeros((2, 1000), np.uint8).view(Out)) == [True, True]
        assert len(held) == 2
        assert all(held)
        assert store.coordinator.region.stores_held_until_s == 0


@pytest.mark.parametrize("layout", ["slabs", "files"])
def test_file_tier_starts_no_store_while_they_are_held(layout: str, tmp_path: Path) -> None:
    with HostRegion.create(file_tiers.GEOMETRY, 2) as region:
        tier = file_tiers.make_tier(layout, tmp_path, region, times=changed(stores_held_s=3600.0))
        tier.open(bytes(16), 0)
        list(tier.list_rows())
        assert file_tiers.store(tier, region, range(1)) == [Outcome.OK]
        region.stores_held_until_s = time.monotonic() + 3600.0
        region.rows_view[0] = payload(1, file_tiers.GEOMETRY)
        batch = tier.store([Move(0, 1, key_of(1), seal=True)])
        for _ in range(50):
            assert tier.poll() == []
            assert tier.poll_s == moves_module.HELD_POLL_S, "a mover need not look more often"
            time.sleep(0.002)
        region.stores_held_until_s = 0.0
        assert file_tiers.outcomes(tier, batch) == [[Outcome.OK]]
        tier.close()
