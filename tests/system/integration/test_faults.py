"""Storage may do its worst: the store answers, and never with a wrong byte."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import nixl_tiers
from nixl_tiers.core.types import TierState
from nixl_tiers.store import open_with
from tests.support.core import backlog
from tests.support.file_tier import file_tier
from tests.support.servers import S3Server, free_ports, moto_server
from tests.support.times import changed, open_patient
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


def test_movers_killed_under_load_never_return_a_wrong_byte(tmp_path: Path) -> None:
    stop = threading.Event()

    def killer(store: nixl_tiers.TieredStore) -> None:
        while not stop.wait(0.15):
            pid = store.coordinator.mover_pids[0]
            if pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    with nixl_tiers.open(with_file(tmp_path, wait_s=1.0), SIZE, "n") as store:
        thread = threading.Thread(target=killer, args=(store,))
        thread.start()
        try:
            for round_ in range(8):
                fresh = keys_of(100 * round_, 100 * round_ + 100)
                store.put(fresh, rows_of(fresh))
                verified_hits(store, keys_of(0, 100 * round_ + 100))
        finally:
            stop.set()
            thread.join()
        until(lambda: is_up(store), "the tier to heal", timeout_s=300)  # who dies often is started seldom
        keys = keys_of(5000, 5020)
        assert store.put(keys, rows_of(keys)) == 20
        assert verified_hits(store, keys) == 20


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


def test_a_missing_bucket_is_one_clear_sentence(moto: S3Server, s3_credentials: Callable[[S3Server], None]) -> None:
    s3_credentials(moto)
    objects = {"type": "s3", "bucket": "no-such-bucket", "endpoint": moto.endpoint, "capacity": "64MiB"}
    config = {"tiers": [{"type": "cpu", "capacity": "2MiB"}, objects]}
    caught: list[str] = []

    def refused() -> bool:
        """An answer that comes too late, on a busy machine, refuses nothing: the store opens without the tier."""
        try:
            open_with(changed(ready_s=120.0), config, SIZE, "n").close()
        except nixl_tiers.ConfigError as error:
            caught.append(str(error))
        return bool(caught)

    until(refused, "the refusal")
    assert caught[0].startswith("tiers[1].bucket: there is no")
    assert "\n" not in caught[0]


def test_nothing_is_leaked_after_close(tmp_path: Path) -> None:
    fds, threads = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
    for _ in range(3):
        with nixl_tiers.open(with_file(tmp_path), SIZE, "n") as store:
            until_up(store)
            keys = keys_of(0, 10)
            store.put(keys, rows_of(keys))
            pid = mover_pid(store)
        until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), "the mover to end")
    until(lambda: threading.active_count() <= threads, "threads to end")
    assert len(list(Path("/proc/self/fd").iterdir())) <= fds


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the calls of this thread have spent in waiting: no more than they wanted to, however slow the machine."""
    spent: list[float] = []
    wait = threading.Condition.wait

    def counted(self: threading.Condition, timeout: float | None = None) -> bool:
        began_s = time.monotonic()
        try:
            return wait(self, timeout)
        finally:
            if threading.current_thread() is threading.main_thread():
                spent.append(min(time.monotonic() - began_s, timeout or 0.0))

    monkeypatch.setattr(threading.Condition, "wait", counted)
    return spent


def test_a_get_of_many_parts_on_a_stopped_mover_waits_once(tmp_path: Path, waited: list[float]) -> None:
    keys = keys_of(0, 60)
    with nixl_tiers.open(with_file(tmp_path, wait_s=2.0), SIZE, "n") as store:
        until_up(store)
        store.put(keys, rows_of(keys))
        assert store.flush(300)
        gone = [key for key, tier in zip(keys, store.locate(keys), strict=True) if tier == "file"]
        assert len(gone) > 3 * store._batch
        os.kill(mover_pid(store), signal.SIGSTOP)
        waited.clear()
        assert verified_hits(store, gone) == 0
        assert 0 < sum(waited) < 2.1


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


def test_the_log_has_lines_for_start_outage_and_recovery(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    # Movers log what was measured for rows of this size before, if it was kept on this machine.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    caplog.set_level(logging.INFO, "nixl_tiers")

    def lines() -> list[str]:
        of_others = ("nixl_tiers.store", "nixl_tiers.memory.region")
        return [record.getMessage() for record in caplog.records if record.name not in of_others]

    where = f"the file tier ({tmp_path}, 64 MiB)"
    with nixl_tiers.open(with_file(tmp_path), SIZE, "n") as store:
        until(lambda: len(lines()) == 2, "the start")
        os.kill(mover_pid(store), signal.SIGKILL)
        until(lambda: len(lines()) == 4, "the end of the outage")
        until_up(store)
        assert lines()[0].startswith("nixl_tiers: cpu tier, 1.992 MiB: 30 rows")
        assert lines()[1] == f"nixl_tiers: {where} is up, 0 rows found"
        assert lines()[2] == f"nixl_tiers: {where} is down: its mover ended with -9"
        assert lines()[3].startswith("nixl_tiers: the file tier is up again after ")
        # A relapse soon after it: logged once more, and then not until it has been up for a while.
        for _ in range(2):
            old = mover_pid(store)
            os.kill(old, signal.SIGKILL)
            # Not that there is none for a while: a busy machine may not look at that moment.
            until(lambda old=old: store.coordinator.mover_pids[0] not in {None, old}, "another mover")  # type: ignore[misc]
            until_up(store)
        assert len(lines()) == 5
        assert "not logged again until it has worked for 60 s" in lines()[4]


def test_no_put_waits_for_a_tier_that_is_being_listed(tmp_path: Path, waited: list[float]) -> None:
    keys = keys_of(0, 64)
    with nixl_tiers.open(with_file(tmp_path, wait_s=1.0), SIZE, "n") as store:
        until_up(store)
        store.coordinator._core.tiers[0].members[0].state = TierState.LISTING
        waited.clear()
        for start in range(0, len(keys), 4):
            assert store.put(keys[start : start + 4], rows_of(keys[start : start + 4])) == 4
        assert backlog(store.coordinator) > 2 * store._batch
        assert waited == []
