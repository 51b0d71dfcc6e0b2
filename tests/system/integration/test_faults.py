"""Storage may do its worst: the store answers, and never with a wrong byte."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import nixl_tiers
from tests.support.file_tier import file_tier
from tests.support.servers import free_ports, moto_server
from tests.support.times import open_patient
from tests.support.waiting import serves, until, until_up

KIB, MIB = 1 << 10, 1 << 20
SIZE = 64 * KIB


def content(key: bytes) -> np.ndarray:
    """Every key's own bytes, so that any hit can be checked."""
    return np.random.default_rng(list(key)).integers(0, 256, SIZE, np.uint8)


def keys_of(start: int, stop: int) -> list[bytes]:
    return [b"key-%06d" % n for n in range(start, stop)]


def rows_of(keys: list[bytes]) -> np.ndarray:
    return np.stack([content(key) for key in keys])


def verified_hits(store: nixl_tiers.TieredStore, keys: list[bytes]) -> int:
    out = np.full((len(keys), SIZE), 0xEE, np.uint8)
    hits = store.get(keys, out)
    for key, hit, row in zip(keys, hits, out, strict=True):
        assert not hit or np.array_equal(row, content(key)), f"a wrong byte for {key!r}"
    return sum(hits)


def with_file(path: Path, host: int = 2 * MIB, **more: object) -> dict[str, object]:
    return {
        "tiers": [{"type": "cpu", "capacity": host}, file_tier(path, "64MiB")],
        "wait_s": 120.0,
        **more,
    }


def mover_pid(store: nixl_tiers.TieredStore) -> int:
    pid = store.coordinator.mover_pids[0]
    assert pid is not None
    return pid


def is_up(store: nixl_tiers.TieredStore, tier: str = "file") -> bool:
    return serves(store.stats()[tier])


@pytest.mark.parametrize(
    "deadly", [pytest.param(signal.SIGKILL, marks=pytest.mark.smoke), signal.SIGSEGV, signal.SIGTERM]
)
def test_a_dead_mover_is_replaced_without_losing_stored_rows(tmp_path: Path, deadly: int) -> None:
    keys = keys_of(0, 100)
    with open_patient(with_file(tmp_path), SIZE, "n") as store:
        until_up(store)
        assert store.put(keys, rows_of(keys)) == 100
        assert store.flush(300)
        old = mover_pid(store)
        os.kill(old, deadly)
        verified_hits(store, keys)  # in the middle of it: whatever is a hit is right
        until(lambda: is_up(store) and store.coordinator.mover_pids[0] not in (None, old), "another mover")
        # Rows that were under way at the kill are not tried again for some seconds.
        until(lambda: verified_hits(store, keys) == 100, "every row to be a hit again")


@pytest.mark.smoke
def test_a_stopped_mover_is_a_miss_within_wait_s(tmp_path: Path) -> None:
    keys = keys_of(0, 60)
    with open_patient(with_file(tmp_path, wait_s=3.0), SIZE, "n") as store:
        until_up(store)
        store.put(keys, rows_of(keys))
        assert store.flush(300)
        os.kill(mover_pid(store), signal.SIGSTOP)
        gone = [key for key, tier in zip(keys, store.locate(keys), strict=True) if tier == "file"]
        assert gone
        assert verified_hits(store, gone) == 0
        os.kill(mover_pid(store), signal.SIGCONT)
        until(lambda: verified_hits(store, gone) == len(gone), "the mover to go on")


def test_s3_may_be_down_at_the_start_and_recovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tiers-test-access")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "tiers-test-not-a-secret")
    objects = {"type": "s3", "bucket": "late-bucket", "endpoint": f"http://127.0.0.1:{port}", "capacity": "64MiB"}
    config = {"tiers": [{"type": "cpu", "capacity": "2MiB"}, objects]}
    keys = keys_of(0, 10)
    with nixl_tiers.open(config, SIZE, "n") as store:
        assert store.put(keys, rows_of(keys)) == 10
        assert verified_hits(store, keys) == 10
        assert not is_up(store, "s3")
        with moto_server(port=port) as server:
            server.make_bucket("late-bucket")
            until(lambda: is_up(store, "s3"), "the s3 tier to heal", timeout_s=300)
            more = keys_of(10, 20)
            assert store.put(more, rows_of(more)) == 10
            assert store.flush(300)
            assert store.stats()["s3"]["rows"] == 10


def test_a_put_of_many_parts_above_a_stopped_mover_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only waiting moves: however late a busy machine wakes this thread up."""
    keys, now = keys_of(0, 64), 100.0

    def wait(_: threading.Condition, timeout: float | None = None) -> bool:
        nonlocal now
        assert timeout is not None
        now += timeout
        return False

    with nixl_tiers.open({"tiers": [{"type": "cpu", "capacity": "2MiB"}], "wait_s": 1.0}, SIZE, "n") as store:
        for module in ("store", "runtime.blocking"):
            monkeypatch.setattr(f"nixl_tiers.{module}.time", SimpleNamespace(monotonic=lambda: now))
        monkeypatch.setattr(threading.Condition, "wait", wait)
        monkeypatch.setattr(store.coordinator._core, "pressure", lambda: 1000)
        store.put(keys, rows_of(keys))
        assert now == pytest.approx(101.0)
        backlog = itertools.count(1000, -1)
        monkeypatch.setattr(store.coordinator._core, "pressure", lambda: next(backlog))
        store.put(keys[: 2 * store._batch], rows_of(keys[: 2 * store._batch]))
        assert now == pytest.approx(103.0, abs=0.1), "what makes progress is waited for, part by part"
        monkeypatch.undo()
