"""The coordinator over a real mover: a failing medium end to end, and what it is configured with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from nixl_tiers.base.chunk import Key, Namespace
from nixl_tiers.config import schema as configuration
from nixl_tiers.core.types import Limits
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.store import TieredStore
from nixl_tiers.testing.config import with_faults
from nixl_tiers.testing.faulty import Fault, FaultPlan, Rule, Way
from tests.runtime.test_coordinator import CHUNK_BYTES, GEOMETRY, HOST_ROWS
from tests.support.file_tier import file_tier
from tests.support.waiting import until, until_up

SOON_S, OVERDUE_S = 2.0, 10.0  # for what stalls


def content(key: Key) -> np.ndarray:
    return np.random.default_rng(list(key)).integers(0, 256, CHUNK_BYTES, np.uint8)


def keys_of(start: int, stop: int) -> list[Key]:
    return [b"key-%04d" % number for number in range(start, stop)]


@contextmanager
def store_over(path: Path, *rules: Rule, wait_s: float = 60.0, overdue_s: float = 120.0) -> Iterator[TieredStore]:
    """A store with few host rows over a file tier on a medium with these faults."""
    config = configuration.load(
        {
            "tiers": [
                {"type": "cpu", "capacity": HOST_ROWS * GEOMETRY.row_bytes},
                file_tier(path, "16MiB"),
            ],
            "wait_s": wait_s,
        }
    )
    region = HostRegion.create(GEOMETRY, HOST_ROWS)
    limits = Limits(wait_s=wait_s, hard_deadline_min_s=overdue_s, hard_deadline_max_s=overdue_s)
    config = with_faults(config, FaultPlan(rules).to_dict())
    coordinator = Coordinator(config, Namespace.of({"name": "faulty"}), region, limits=limits)
    with TieredStore(coordinator) as store:
        coordinator.start()
        until_up(store)
        yield store


def put(store: TieredStore, keys: list[Key]) -> None:
    assert store.put(keys, np.stack([content(key) for key in keys])) == len(keys)
    assert store.flush(300)


def get(store: TieredStore, keys: list[Key]) -> list[bool]:
    """Which are hits; a hit must be right."""
    out = np.full((len(keys), CHUNK_BYTES), 0xEE, np.uint8)
    hits = store.get(keys, out)
    for key, hit, row in zip(keys, hits, out, strict=True):
        assert not hit or np.array_equal(row, content(key)), f"a wrong byte under {key!r}"
    return hits


def put_beneath(store: TieredStore, keys: list[Key]) -> None:
    """Put these, and then so much else that the host has none of them left."""
    put(store, keys)
    for start in range(1000, 1000 + HOST_ROWS, 4):
        put(store, keys_of(start, start + 4))
    assert "cpu" not in store.locate(keys)


def test_corrupt_rows_are_counted_and_dropped_and_others_are_hits(tmp_path: Path) -> None:
    keys = keys_of(0, 8)
    with store_over(tmp_path, Rule(Fault.BIT_FLIP, Way.STORE, tuple(keys[::2]), times=1)) as store:
        put_beneath(store, keys)
        assert store.locate(keys) == ["file"] * 8
        assert get(store, keys) == [False, True] * 4
        assert store.stats()["file"]["corrupt"] == 4
        assert store.locate(keys[::2]) == [None] * 4
        put_beneath(store, keys)  # stored again, they are as good as any
        assert all(get(store, keys))
        assert store.stats()["file"]["corrupt"] == 4


def test_rows_without_space_below_are_counted_and_stay_in_the_host(tmp_path: Path) -> None:
    keys = keys_of(0, 8)
    with store_over(tmp_path, Rule(Fault.NO_SPACE, keys=tuple(keys[:3]), times=1)) as store:
        put(store, keys)
        counted = store.stats()["file"]
        assert counted["dropped"] == 3
        assert counted["failed"] == 0, "of a full medium nothing fails, and no alert on failures is raised"
        assert store.locate(keys) == ["cpu"] * 8
        assert all(get(store, keys))
        put_beneath(store, keys[3:])
        assert get(store, keys[3:]) == [True] * 5


def test_a_stalled_load_is_a_miss_in_time_and_its_mover_is_replaced(tmp_path: Path) -> None:
    keys = keys_of(0, 4)
    with store_over(
        tmp_path, Rule(Fault.STALL, Way.LOAD, tuple(keys[:1])), wait_s=SOON_S, overdue_s=OVERDUE_S
    ) as store:
        put_beneath(store, keys)
        pid = store.coordinator.mover_pids[0]
        assert get(store, keys[:1]) == [False]
        assert store.coordinator.mover_pids[0] == pid, "the request must not have waited for the mover's end"
        until(lambda: store.coordinator.mover_pids[0] not in {pid, None}, "another mover")
        until_up(store)
        until(lambda: store.locate(keys[1:]) == ["file"] * 3, "the rows to be listed")
        until(lambda: all(get(store, keys[1:])), "them to be hits")


def test_rows_beside_a_stalled_load_are_hits_in_time_and_outlive_its_mover(tmp_path: Path) -> None:
    keys = keys_of(0, 4)
    with store_over(
        tmp_path, Rule(Fault.STALL, Way.LOAD, tuple(keys[3:])), wait_s=SOON_S, overdue_s=OVERDUE_S
    ) as store:
        put_beneath(store, keys)
        pid = store.coordinator.mover_pids[0]
        # In time for the first request, but on a busy machine.
        until(lambda: get(store, keys) == [True, True, True, False], "those beside it")
        assert store.coordinator.mover_pids[0] == pid, "they have come by the mover that was stuck"
        until(lambda: store.coordinator.mover_pids[0] not in {pid, None}, "another mover")
        assert get(store, keys[:3]) == [True] * 3
        assert store.locate(keys[:3]) == ["cpu"] * 3


def test_a_load_that_fails_late_is_a_miss_and_its_bytes_are_not_used(tmp_path: Path) -> None:
    """All of the row is in the region when the error comes: it must not be taken for a hit, by that key or another."""
    keys = keys_of(0, 4)
    with store_over(tmp_path, Rule(Fault.LATE_ERROR, keys=tuple(keys), times=1)) as store:
        put_beneath(store, keys)
        assert get(store, keys) == [False] * 4
        assert store.stats()["file"]["failed"] == 4
        put(store, keys_of(2000, 2000 + HOST_ROWS // 2))
        assert all(get(store, keys_of(2000, 2000 + HOST_ROWS // 2)))
