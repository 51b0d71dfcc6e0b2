"""What a restarted mover, or a store that is opened again, finds of what a tier held before: also thousands of rows."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import nixl_tiers
from nixl_tiers.base.chunk import Geometry, Key, Namespace
from nixl_tiers.config import schema as configuration
from nixl_tiers.core.lookup import Lookup
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover import child
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.store import open_with
from nixl_tiers.tiers.slab.shard import slots_within
from tests.support.core import backlog, end_step, finish, locate, look_up
from tests.support.file_tier import file_tier
from tests.support.load import get, put
from tests.support.times import PATIENT, changed
from tests.support.waiting import serves, until, until_up

GEOMETRY = Geometry(1, 2000)
HOST_ROWS = 16
MANY = 4000
ROWS = MANY + 2000


def key(number: int) -> Key:
    return b"row-%d" % number


@contextmanager
def coordinator_over_many_rows(tmp_path: Path, slots: int, rows: int = ROWS, more: int = 0) -> Iterator[Coordinator]:
    """`more`: so many others are found later, for which the oldest must go."""
    config = configuration.load(
        {
            "tiers": [
                {"type": "cpu", "capacity": HOST_ROWS * GEOMETRY.row_bytes},
                {
                    "type": "tests.mover.stub_tiers:StubConfig",
                    "stub": "PrefilledTier",
                    "capacity": slots * GEOMETRY.row_bytes,
                    "rows": rows,
                    "more": more,
                    "slots": slots,
                    "dropped": str(tmp_path / "dropped"),
                    "closed": str(tmp_path / "closed"),
                },
            ]
        }
    )
    with HostRegion.create(GEOMETRY, HOST_ROWS) as region:
        coordinator = Coordinator(config, Namespace.of({"name": "hoard"}), region, times=PATIENT)
        try:
            coordinator.start(120.0)
            wait_until_listed(coordinator, rows)
            yield coordinator
        finally:
            coordinator.close(10.0)


def wait_until_listed(coordinator: Coordinator, rows: int = ROWS) -> None:
    until(
        lambda: serves(coordinator.counters()["stub"]) and coordinator.counters()["stub"]["rows"] == rows,
        "all rows to be listed",
    )


def load(coordinator: Coordinator, number: int) -> None:
    request = f"load {number}"
    assert look_up(coordinator, key(number), request) is Lookup.PENDING
    end_step(coordinator)

    def found() -> bool:
        if look_up(coordinator, key(number), request) is Lookup.HIT:
            return True
        end_step(coordinator)  # in one step a waiting request is answered once
        return False

    until(found, "the row")
    coordinator.prepare_load(request, [key(number)])
    coordinator.complete_load(request)
    finish(coordinator, request)
    end_step(coordinator)


def store(coordinator: Coordinator, *names: Key) -> None:
    plan = coordinator.prepare_store("store", names)
    coordinator.region.mark(np.array(plan.rows), 0, plan.store_seq, True)
    coordinator.complete_store(plan.keys)
    finish(coordinator, "store")
    end_step(coordinator)
    until(lambda: backlog(coordinator) == 0, "the cascade")


def dropped(tmp_path: Path) -> list[str]:
    path = tmp_path / "dropped"
    return path.read_text().splitlines() if path.exists() else []


def test_every_evicted_row_is_deleted_from_the_medium(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many times more than the queue of packets for a mover has room for; and no mover is taken for one that does not
    read."""
    monkeypatch.setattr(child, "MAX_UNSENT", child.RESERVED_UNSENT + 8)
    rows = MANY + 20_000
    with coordinator_over_many_rows(tmp_path, slots=rows, rows=rows, more=20_000) as coordinator:
        until(lambda: len(dropped(tmp_path)) == 20_000, "the drops")
        assert dropped(tmp_path)[0] == "0 row-0"
        store(coordinator, b"new", b"newer")
        until(lambda: len(dropped(tmp_path)) == 20_002, "two more")
        stats = coordinator.counters()["stub"]
        assert stats["kills"] == stats["dropped"] == 0


@pytest.mark.smoke
def test_a_restarted_mover_lists_all_rows_again(tmp_path: Path) -> None:
    with coordinator_over_many_rows(tmp_path, slots=ROWS) as coordinator:
        load(coordinator, ROWS - 1)
        (pid,) = coordinator.mover_pids
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        until(lambda: coordinator.mover_pids not in ([pid], [None]), "another mover")
        wait_until_listed(coordinator)
        assert locate(coordinator, [key(ROWS - 2), key(MANY)]) == ["stub"] * 2
        assert coordinator.counters()["stub"]["found"] == ROWS, "what is listed again was there all the time"
        assert dropped(tmp_path) == []


def test_the_index_of_an_earlier_epoch_is_released(tmp_path: Path) -> None:
    with coordinator_over_many_rows(tmp_path, slots=ROWS) as coordinator:
        before = descriptors()
        old = coordinator._core.tiers[0].index.rows
        coordinator.reset()
        assert locate(coordinator, [key(ROWS - 1)]) == [None]
        wait_until_listed(coordinator)
        assert len(coordinator._core.tiers[0].index) == ROWS
        until(lambda: sys.getrefcount(old) == 2, "the old rows to be freed")
        assert descriptors() <= before


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# --- stores ---


@pytest.mark.parametrize("ready_s", [120.0, 0.0])
def test_stored_rows_are_hits_right_after_open(tmp_path: Path, ready_s: float) -> None:
    keys: list[Key] = [b"key-%d" % number for number in range(8)]
    setting = {"tiers": [{"type": "cpu", "capacity": 4 << 20}, file_tier(tmp_path / "kv", 64 << 20)], "wait_s": 120}
    with open_with(changed(ready_s=120.0), setting, 60_000, "n") as store:
        put(store, keys)
        assert store.flush(120)
    for _ in range(3):
        with open_with(changed(ready_s=ready_s), setting, 60_000, "n") as store:
            if ready_s:
                assert store.locate(keys) == ["file"] * len(keys)
            else:
                until(lambda: store.coordinator._link.movers[0].answered, "the mover to have started")
            assert get(store, keys) == ([True] * len(keys), [])


@pytest.mark.parametrize("promoted", [False, True], ids=["hit in host memory", "load from the tier"])
def test_row_used_last_survives_a_restart(tmp_path: Path, promoted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A use in any tier counts, and so does one that moved no bytes."""
    size, slots = 16 << 10, 6
    row_bytes = Geometry(1, size).row_bytes
    capacity = next(n for n in range(0, 1 << 30, 4096) if slots_within(n, row_bytes) >= slots)
    setting = {"tiers": [{"type": "cpu", "capacity": 4 * slots * size}, file_tier(tmp_path, capacity)], "wait_s": 120.0}
    keys: list[Key] = [b"%032d" % number for number in range(2 * slots)]

    def opened() -> nixl_tiers.TieredStore:
        store = nixl_tiers.open(setting, size, "n")
        until_up(store)
        return store

    def put_one_by_one(store: nixl_tiers.TieredStore, some: list[Key]) -> None:
        for each in some:
            assert put(store, [each]) == 1
            assert store.flush(60.0)

    with opened() as store:
        put_one_by_one(store, keys[:slots])
        if not promoted:
            sent: list[tuple[int, int]] = []
            index = store.coordinator._core.tiers[0].index
            take_uses = index.take_uses
            monkeypatch.setattr(index, "take_uses", lambda count: sent.extend(some := take_uses(count)) or some)
            assert get(store, keys[1:2]) == ([True], [])
            until(lambda: sent, "the use to be sent")
            assert get(store, keys[:1]) == (
                [True],
                [],
            )  # within a second of the last message: the regular stop sends it
    if promoted:
        with opened() as store:
            assert get(store, keys[:1]) == ([True], [])
    with opened() as store:
        assert store.stats()["file"]["rows"] == slots
        put_one_by_one(store, keys[slots:-1])
        assert [key for key in keys[:slots] if store.locate([key]) == ["file"]] == keys[:1]
