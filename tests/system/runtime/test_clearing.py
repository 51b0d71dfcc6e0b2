"""Clearing over a real file tier: by quota, with rows in use, and where a tier cannot be cleared."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nixl_tiers.base.chunk import Geometry, Key, Namespace
from nixl_tiers.config import schema
from nixl_tiers.core.key_lookup import Lookup
from nixl_tiers.core.types import TierState
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.runtime import clearing, control
from nixl_tiers.runtime.clearing import Cleared, Clearing
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.store import TieredStore
from tests.support.core import look_up
from tests.support.file_tier import file_tier, files_tier
from tests.support.waiting import until_up

GEOMETRY = Geometry(1, 60_000)
ROWS = 16
QUOTAS = {
    name: {"share": "50%", "salt_sha256": hashlib.sha256(name.encode()).hexdigest()} for name in ("tenant-a", "other")
}


def opened(path: Path, layout: str = "slabs") -> TieredStore:
    tier = file_tier(path / layout, "16MiB") if layout == "slabs" else files_tier(path / layout, "16MiB")
    config = schema.load({"tiers": [{"type": "cpu", "capacity": ROWS * GEOMETRY.row_bytes}, tier], "quotas": QUOTAS})
    coordinator = Coordinator(config, Namespace.of({"name": "cleared"}), HostRegion.create(GEOMETRY, ROWS))
    coordinator.start()
    return TieredStore(coordinator)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TieredStore]:
    with opened(tmp_path) as store:
        until_up(store)
        yield store


def put(store: TieredStore, tenant: int, *keys: Key) -> None:
    """A request of this tenant stores them; the test is its worker."""
    coordinator, name = store.coordinator, f"request-{keys[0]!r}"
    with coordinator.core() as core:
        core.set_tenant(name, tenant)
    plan = coordinator.prepare_store(keys, name)
    for row in plan.rows:
        coordinator.region.rows_view[row, : GEOMETRY.cell_payload] = 1
    coordinator.region.mark(np.array(plan.rows), 0, plan.store_seq, True)
    coordinator.complete_store(set(keys))
    with coordinator.core() as core:
        core.finish_request(name)
        core.end_step()
    assert store.flush(120)


def clear(store: TieredStore, tenant: int = 0) -> list[Cleared]:
    return Clearing(store.coordinator, tenant, time.monotonic() + 120).run()


def test_the_rows_of_one_quota_go_and_what_belongs_to_none_is_counted(store: TieredStore) -> None:
    put(store, 1, b"a1", b"a2")
    put(store, 2, b"b1")
    put(store, 0, b"c1", b"c2", b"c3")
    assert [each.rows for each in Clearing(store.coordinator, 1, time.monotonic() + 120).look()] == [2, 2]
    cpu, file = clear(store, 1)
    assert (cpu.rows, cpu.left, cpu.unknown, cpu.problem) == (2, 0, 3, "")
    assert (file.rows, file.left, file.unknown, file.problem) == (2, 0, 3, "")
    assert store.locate([b"a1", b"a2", b"b1", b"c1"]) == [None, None, "cpu", "cpu"]


def test_what_was_found_at_the_start_is_of_no_quota(tmp_path: Path) -> None:
    for _ in range(2):
        with opened(tmp_path) as store:
            until_up(store)
            cleared = clear(store, 1) if store.locate([b"a1"]) == ["file"] else []
            put(store, 1, b"a1")
    assert [(each.tier, each.rows, each.unknown) for each in cleared] == [("cpu", 0, 0), ("file", 0, 1)]


def test_rows_in_use_stay_whole_and_go_when_they_are_not(store: TieredStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clearing, "ROUND_S", 0.0)
    coordinator = store.coordinator
    put(store, 1, b"a1", b"a2")
    assert look_up(coordinator, b"a1", "reader", 1) is Lookup.HIT
    (row,) = coordinator.prepare_load([b"a1"], "reader")
    cpu, file = clear(store)
    assert (cpu.rows, cpu.left) == (1, 1)
    assert (file.rows, file.left) == (2, 0)
    put(store, 1, b"b1")
    assert (coordinator.region.rows_view[row, : GEOMETRY.cell_payload] == 1).all()
    coordinator.complete_load("reader")
    with coordinator.core() as core:
        core.end_step()
    assert [each.left for each in clear(store)] == [0, 0]


def test_what_engines_may_share_stays(tmp_path: Path) -> None:
    with opened(tmp_path, "files") as store:
        until_up(store)
        put(store, 1, b"a1")
        cpu, file = clear(store)
        assert (cpu.rows, file.shared) == (1, True)
        assert store.locate([b"a1"]) == ["file"]


@pytest.mark.parametrize("state", [TierState.DOWN, TierState.LISTING])
def test_a_tier_that_is_away_is_not_called_clear(store: TieredStore, state: TierState) -> None:
    """Its medium lists its rows when it is back."""
    put(store, 1, b"a1")
    with store.coordinator.core() as core:
        core.tiers[0].members[0].state = state
    cpu, file = clear(store)
    assert cpu.rows == 1
    assert (file.rows, bool(file.problem)) == (0, True)


def test_clearing_ends_where_the_medium_deletes_nothing(store: TieredStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clearing, "DRAIN_S", 0.0)
    put(store, 1, b"a1")
    with store.coordinator.core() as core:
        monkeypatch.setattr(core.tiers[0].members[0], "delete_batches", lambda most: [])
    assert clear(store)[1].problem == "its medium has not deleted all of them yet"


def test_a_closed_coordinator_ends_a_command(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        coordinator = store.coordinator
    answer = control._answer(b'{"clear": true}', coordinator)
    assert answer.problem == "the engine is shutting down"
