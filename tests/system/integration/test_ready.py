"""When a store that has been opened finds what its tiers held before."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nixl_tiers.base.chunk import Geometry, Key, Namespace
from nixl_tiers.config import schema as configuration
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.store import TieredStore, open_with
from tests.support.file_tier import file_tier
from tests.support.load import get, put
from tests.support.times import changed
from tests.support.waiting import until

SIZE = 60_000
KEYS: list[Key] = [b"key-%d" % number for number in range(8)]


def settings(tmp_path: Path, **fields: object) -> dict[str, Any]:
    tier = file_tier(tmp_path / "kv", 64 << 20)
    return {"tiers": [{"type": "cpu", "capacity": 4 << 20}, tier], **fields}


@pytest.mark.parametrize("ready_s", [120.0, 0.0])
def test_stored_rows_are_hits_right_after_open(tmp_path: Path, ready_s: float) -> None:
    with open_with(changed(ready_s=120.0), settings(tmp_path), SIZE, "n") as store:
        put(store, KEYS)
        assert store.flush(120)
    for _ in range(3):
        with open_with(changed(ready_s=ready_s), settings(tmp_path, wait_s=120), SIZE, "n") as store:
            if ready_s:
                assert store.locate(KEYS) == ["file"] * len(KEYS)
            else:
                until(lambda: store.coordinator._link.movers[0].answered, "the mover to have started")
            assert get(store, KEYS) == ([True] * len(KEYS), [])


@contextmanager
def held_up(
    tmp_path: Path, wait_s: float = 120.0, write: str = "through", flush_on_exit_s: float = 0.0
) -> Iterator[tuple[Coordinator, TieredStore, Path]]:
    """A store over a tier that holds KEYS, and lists the second half of them when the path appears. Not started."""
    setting = settings(tmp_path, wait_s=wait_s, flush_on_exit_s=flush_on_exit_s)
    setting["tiers"][1]["write"] = write
    config = configuration.load(setting)
    geometry, namespace = Geometry(1, SIZE), Namespace.of({"of": "ready"})
    with (
        HostRegion.create(geometry, 32) as region,
        TieredStore(Coordinator.open(config, namespace, region, 120.0)) as store,
    ):
        put(store, KEYS)
        assert store.flush(120)
    listed = tmp_path / "listed"
    setting["tiers"][1] |= {"type": "tests.mover.stub_tiers:PausedListingConfig", "listed": str(listed)}
    config = configuration.load(setting)
    region = HostRegion.create(geometry, 32)
    coordinator = Coordinator(config, namespace, region)
    store = TieredStore(coordinator)
    try:
        yield coordinator, store, listed
    finally:
        store.close()


def test_get_waits_for_keys_that_may_still_be_listed(tmp_path: Path) -> None:
    with held_up(tmp_path) as (coordinator, store, listed):
        coordinator.start(120.0)
        assert not store.wait_ready(0.0)
        answers: list[object] = []
        asking = threading.Thread(target=lambda: answers.append(get(store, [*KEYS, b"unknown"])))
        asking.start()
        until(lambda: coordinator.counters()["file"]["bytes_read"], "what is known to come up")
        assert not answers
        listed.touch()
        assert store.wait_ready(120.0)
        asking.join(120.0)
        assert answers == [([True] * len(KEYS) + [False], [])]
        until(lambda: coordinator.counters()["file"]["listed_rows"] == len(KEYS), "the gauge")


def test_close_flushes_to_a_tier_once_it_has_been_listed(tmp_path: Path) -> None:
    with held_up(tmp_path, write="on_evict", flush_on_exit_s=120) as (coordinator, store, listed):
        coordinator.start(120.0)
        put(store, [b"new"])
        closing = threading.Thread(target=store.close)
        closing.start()
        until(lambda: store.coordinator.closed, "the end to begin")
        listed.touch()
        closing.join(120.0)
        assert not closing.is_alive()
        assert coordinator.counters()["file"]["stored"] == 1
