"""Movers start no store while the engine copies rows out of the host; and host memory comes piece by piece
(memory/backing.py), and may end early."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from nixl_tiers.base.chunk import Geometry, Namespace
from nixl_tiers.base.policies import Write
from nixl_tiers.config import schema as configuration
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.types import TierSpec
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.runtime.copies import HOLD_S, OpenLoads, take_memory
from tests.support import inside
from tests.support.core import look_up

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
    plan = coordinator.prepare_store("put", KEYS, call=True)
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


@pytest.mark.parametrize("end", ["complete", "fail", "reset"])
def test_load_of_workers_holds_stores_until_it_ends(coordinator: Coordinator, end: str) -> None:
    before = time.monotonic()
    for key in KEYS:
        look_up(coordinator, key, "request")
    coordinator.prepare_load("request", KEYS)
    assert before + HOLD_S <= coordinator.region.stores_held_until_s <= time.monotonic() + HOLD_S
    match end:
        case "complete":
            coordinator.complete_load("request")
        case "fail":
            coordinator.complete_load("request", failed=True)
        case "reset":
            coordinator.reset()
    assert coordinator.region.stores_held_until_s == 0


def test_bounds_are_of_the_rows_there_are_where_memory_ends_early() -> None:
    """A tenant with half of all rows would have had more than there were."""
    tiers = [TierSpec("file", Write.THROUGH, physical_slots=True)]
    core, small = (TierManager(rows, 1 << 20, tiers, quotas=(0.5, 0.25)) for rows in (1000, 200))
    core.host.limit = 0
    for lacks in (False, True):
        region: Any = SimpleNamespace(ranks=SimpleNamespace(ready_rows=200), lacks_memory=lacks)
        take_memory(core, region)
    assert (core.host.limit, core.host.grows, core.host.quotas) == (200, False, (100, 50))
    windows = [
        (state.load_window, state.store_window, state.demote_window)
        for state in (inside.state(core), inside.state(small))
    ]
    assert windows[0] == windows[1]
