"""A file tier with several movers on one directory: one stores, the others load beside it."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

import nixl_tiers
from nixl_tiers.core.types import Direction
from tests.support.checked_rows import SIZE, TIMEOUT_S, hits, put
from tests.support.core import empty_host, rows_of
from tests.support.disks import disk_bytes
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(600)

HOST_ROWS = 40
KEYS = [b"key-%04d" % number for number in range(120)]
MOVERS = 3


def opened(
    path: Path | list[Path], movers: int = MOVERS, capacity: int = 64 << 20, **more: Any
) -> nixl_tiers.TieredStore:
    places = [str(each) for each in path] if isinstance(path, list) else str(path)
    tier = {"type": "file", "path": places, "capacity": capacity, "min_free": 0, "movers": movers, **more}
    tiers = {"tiers": [{"type": "cpu", "capacity": HOST_ROWS * SIZE}, tier], "wait_s": 60.0}
    store = nixl_tiers.open(tiers, SIZE, "loaders")
    until_all_up(store)
    return store


def until_all_up(store: nixl_tiers.TieredStore) -> None:
    movers = store.coordinator._core.movers
    until(lambda: all(mover.can_load for mover in movers) and movers[0].writable, "all movers", timeout_s=TIMEOUT_S)


def held(store: nixl_tiers.TieredStore) -> int:
    with store.coordinator.core():
        return len(rows_of(store.coordinator._core.tiers[0]))


def has_loaded(store: nixl_tiers.TieredStore) -> list[bool]:
    """By mover."""
    return [bool(mover.throughput[Direction.LOAD]._samples) for mover in store.coordinator._core.movers]


def until_another(store: nixl_tiers.TieredStore, mover: int, pid: int | None) -> None:
    until(lambda: store.coordinator.mover_pids[mover] not in {pid, None}, "another mover", timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("backend", ["posix", "auto"])
def test_all_movers_load_what_one_stores(tmp_path: Path, backend: str) -> None:
    with opened(tmp_path, backend=backend) as store:
        put(store, KEYS)
        for _ in range(3):
            assert hits(store, KEYS) == len(KEYS)
        assert has_loaded(store) == [True] * MOVERS
        stats = store.stats()["file"]
        assert stats["corrupt"] == stats["missing"] == stats["failed_loads"] == 0
        assert stats["capacity_bytes"] == 64 << 20, "that of one, once"
        assert stats["used_bytes"] < 1.5 * disk_bytes(tmp_path)
        assert store.coordinator.problems()["file"] == ""


def test_a_dead_loader_costs_no_row_and_nobody_else(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, KEYS)
        pids = store.coordinator.mover_pids
        loader = store.coordinator._core.movers[1]
        assert pids[1] is not None
        os.kill(pids[1], signal.SIGKILL)
        until(lambda: store.stats()["file"]["deaths"], "its death", timeout_s=TIMEOUT_S)
        assert hits(store, KEYS) == len(KEYS), "the others load its share"
        put(store, more := [b"more-%04d" % number for number in range(20)])
        assert hits(store, more) == len(more)
        until_another(store, 1, pids[1])
        until_all_up(store)
        assert [store.coordinator.mover_pids[mover] for mover in (0, 2)] == [pids[0], pids[2]]
        loader.throughput[Direction.LOAD]._samples.clear()
        for _ in range(3):
            assert hits(store, KEYS) == len(KEYS)
        assert has_loaded(store)[1], "it loads again"
        assert store.stats()["file"]["deaths"] == 1
        assert held(store) == len(KEYS) + len(more)


def test_when_the_mover_that_stores_dies_its_loaders_open_what_its_successor_has_opened(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, KEYS)
        pids = store.coordinator.mover_pids
        assert pids[0] is not None
        os.kill(pids[0], signal.SIGKILL)
        until_another(store, 0, pids[0])
        until_all_up(store)
        assert store.coordinator.mover_pids[1:] == pids[1:]
        for mover in store.coordinator._core.movers:
            mover.throughput[Direction.LOAD]._samples.clear()
        put(store, more := [b"more-%04d" % number for number in range(40)])
        for _ in range(3):
            assert hits(store, [*KEYS, *more]) == len(KEYS) + len(more)
        assert has_loaded(store) == [True] * MOVERS
        assert store.stats()["file"]["failed_loads"] == 0


def test_slots_are_stored_into_anew_while_loaders_read(tmp_path: Path) -> None:
    """A tier that is full, and whose empty slabs are cut and come again."""
    with opened(tmp_path, capacity=6 << 20) as store:
        for turn in range(4):
            keys = [b"%d-%04d" % (turn, number) for number in range(150)]
            put(store, keys)
            assert hits(store, keys) >= 60
            assert disk_bytes(tmp_path) <= 6 << 20
        with store.coordinator.core() as core:
            empty_host(core)
            for key in rows_of(core.tiers[0]):
                core.tiers[0].index.evict(key)
        until(lambda: disk_bytes(tmp_path) < 2 << 20, "slabs to be cut", timeout_s=TIMEOUT_S)
        put(store, KEYS[:60])
        assert hits(store, KEYS[:60]) == 60
        stats = store.stats()["file"]
        assert stats["corrupt"] == stats["missing"] == stats["failed_loads"] == 0
        assert has_loaded(store) == [True] * MOVERS


def test_what_is_deleted_is_free_though_loaders_had_it_open(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "kv"
    with opened(path) as store:
        put(store, KEYS)
        assert hits(store, KEYS) == len(KEYS)
        pids = [pid for pid in store.coordinator.mover_pids[1:] if pid is not None]
        assert any(open_slabs(pid) for pid in pids)
        # What a mover makes there meanwhile goes, too.
        until(lambda: shutil.rmtree(path, ignore_errors=True) or not path.exists(), "it to be deleted")
        until(lambda: " is down: " in caplog.text, "a word", timeout_s=TIMEOUT_S)  # and not for long
        until(lambda: not any("(deleted)" in name for pid in pids for name in open_slabs(pid)), "no slab", TIMEOUT_S)
        until_all_up(store)
        assert hits(store, KEYS) <= HOST_ROWS
        put(store, KEYS)
        assert hits(store, KEYS) == len(KEYS)


def open_slabs(pid: int) -> list[str]:
    names = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            names.append(str(link.readlink()))
    return [name for name in names if "slab-" in name]


def test_another_number_of_movers_loses_nothing(tmp_path: Path) -> None:
    """1 -> 4 -> 2 -> 1, of each of two engines that use the path."""
    replicas = 2
    rows = [[b"%d-%04d" % (engine, number) for number in range(60)] for engine in range(replicas)]
    for turn, movers in enumerate([1, 4, 2, 1]):
        with ExitStack() as stack:
            stores = [stack.enter_context(opened(tmp_path, movers, replicas=replicas)) for _ in range(replicas)]
            assert all(len(store.coordinator.mover_pids) == movers for store in stores)
            if not turn:
                for store, keys in zip(stores, rows, strict=True):
                    put(store, keys)
            # Which engine has which part is not said.
            found = [[hits(store, keys) for keys in rows] for store in stores]
            assert sorted(found, reverse=True) == [[60 * (one == other) for other in rows] for one in rows]
            for store in stores:
                until(lambda store=store: store.stats()["file"]["rows"] >= 60, "its rows", timeout_s=TIMEOUT_S)  # type: ignore[misc]
                assert store.stats()["file"]["corrupt"] == 0


def test_a_reset_leads_loaders_to_what_follows(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        put(store, KEYS)
        store.coordinator.reset(changed=True)
        until_all_up(store)
        assert hits(store, KEYS) == 0
        for mover in store.coordinator._core.movers:
            mover.throughput[Direction.LOAD]._samples.clear()
        put(store, KEYS)
        for _ in range(3):
            assert hits(store, KEYS) == len(KEYS)
        assert has_loaded(store) == [True] * MOVERS


def test_loaders_of_each_directory_load_from_there(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    with opened(paths, movers=2) as store:
        put(store, KEYS)
        for _ in range(3):
            assert hits(store, KEYS) == len(KEYS)
        assert has_loaded(store) == [True] * 4
        assert store.stats()["file"]["corrupt"] == 0
