"""Storage may do its worst: the store answers, and never with a wrong byte."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import nixl_tiers
from nixl_tiers.base.chunk import Key
from nixl_tiers.store import TieredStore
from tests.support.core import rows_of
from tests.support.disks import hung_mount
from tests.support.file_tier import file_tier
from tests.support.load import get, put
from tests.support.servers import ACCESS_KEY, SECRET_KEY, free_ports, moto_server
from tests.support.waiting import serves, until

SIZE = 64 << 10
KEYS: list[Key] = [b"key-%06d" % n for n in range(120)]
OPEN = """
import json, logging, sys, nixl_tiers
logging.basicConfig()
with nixl_tiers.open(json.loads(sys.argv[1]), chunk_bytes=4096, namespace="n") as store:
    assert store.put([b"k"], [bytes(4096)]) == 1
    print(store.stats()["file"]["problem"])
"""


def hits(store: TieredStore, keys: Sequence[Key] = KEYS) -> int:
    """Of all these keys, each of which is checked."""
    found, wrong = get(store, keys)
    assert not wrong
    return sum(found)


def stored(store: TieredStore, keys: Sequence[Key] = KEYS) -> None:
    for start in range(0, len(keys), 20):
        put(store, keys[start : start + 20])
        assert store.flush(300)


def on(*tiers: dict[str, Any], wait_s: float = 120.0) -> dict[str, Any]:
    return {"tiers": [{"type": "cpu", "capacity": "2MiB"}, *tiers], "wait_s": wait_s}


@pytest.mark.smoke
def test_a_put_of_many_parts_above_a_stopped_mover_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only waiting moves: however late a busy machine wakes this thread up."""
    now = 100.0

    def wait(_: threading.Condition, timeout: float | None = None) -> bool:
        nonlocal now
        assert timeout is not None
        now += timeout
        return False

    with nixl_tiers.open(on(wait_s=1.0), SIZE, "n") as store:
        for module in ("store", "runtime.blocking"):
            monkeypatch.setattr(f"nixl_tiers.{module}.time", SimpleNamespace(monotonic=lambda: now))
        monkeypatch.setattr(threading.Condition, "wait", wait)
        monkeypatch.setattr(store.coordinator._core, "pressure", lambda: 1000)
        put(store, KEYS[:64])
        assert now == pytest.approx(101.0)
        backlog = itertools.count(1000, -1)
        monkeypatch.setattr(store.coordinator._core, "pressure", lambda: next(backlog))
        put(store, KEYS[: 2 * store._batch])
        assert now == pytest.approx(103.0, abs=0.1), "what makes progress is waited for, part by part"
        monkeypatch.undo()


def test_store_opens_without_a_tier_on_a_hung_mount_and_a_command_says_so(tmp_path: Path) -> None:
    """What waits in the kernel is a child or a mover."""
    (tmp_path / "mnt").mkdir()
    with hung_mount(tmp_path / "mnt") as place:
        config = json.dumps(on(file_tier(place / "kv", "64MiB", max_age="7d")))

        def run(*arguments: str) -> tuple[str, str]:
            command = [sys.executable, *arguments, config]
            # The product's own limit is 3 s.
            done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, env=os.environ)
            return done.stdout, done.stderr

        shown, logged = run("-c", OPEN)
        assert shown == "it has not answered within 3 s, and was not checked\n"
        assert "is down: it has not answered within 3 s, and was not checked" in logged
        shown, _ = run("-m", "nixl_tiers.cli", "config")
        assert "warning: file tier: it has not answered within 3 s, and was not checked\n" in shown
        assert shown.startswith("the configuration is valid, 1 warning\n")


def test_s3_may_be_down_at_the_start_and_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    (port,) = free_ports(1)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    objects = {"type": "s3", "bucket": "late-bucket", "endpoint": f"http://127.0.0.1:{port}", "capacity": "64MiB"}
    with nixl_tiers.open(on(objects), SIZE, "n") as store:
        assert put(store, KEYS[:10]) == hits(store, KEYS[:10]) == 10
        assert not serves(store.stats()["s3"])
        with moto_server(port=port) as server:
            server.make_bucket("late-bucket")
            until(lambda: serves(store.stats()["s3"]), "the s3 tier to heal", timeout_s=300)
            # Until it knows what others have stored, all of the capacity counts as used.
            until(lambda: store.stats()["s3"]["used_bytes"] == 0, "a first look at the usage record", timeout_s=60)
            assert put(store, KEYS[10:20]) == 10
            assert store.flush(300)
            assert store.stats()["s3"]["rows"] == 10


# --- a file tier over several directories ---


def opened(*paths: Path) -> TieredStore:
    tier = file_tier("", "64MiB") | {"path": [*map(str, paths)]}
    store = nixl_tiers.open(on(tier, wait_s=60.0), SIZE, "members")
    members = store.coordinator._core.movers
    until(lambda: all(member.writable and member.readable for member in members), "all members")
    return store


def held(store: TieredStore) -> list[int]:
    """How many rows each member holds."""
    tier = store.coordinator._core.tiers[0]
    with store.coordinator.core():
        places = [tier.index.member_place_of(key) for key in rows_of(tier)]
    return [places.count(place) for place in range(len(tier.members))]


def test_directories_are_added_and_removed_and_each_keeps_its_rows(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abcd"]
    with opened(paths[0]) as store:
        stored(store)
        assert held(store) == [len(KEYS)]
    with opened(*paths) as store:  # its rows fit into a quarter
        assert hits(store) == len(KEYS)
        assert held(store) == [len(KEYS), 0, 0, 0]
        stored(store, more := [b"more-%04d" % number for number in range(80)])
        assert hits(store, more) == len(more)
        rows = held(store)
        assert min(rows[1:]) > 0, "new rows are spread"
    for count in (2, 1):
        with opened(*paths[:count]) as store:
            assert held(store) == rows[:count]
            assert hits(store) == len(KEYS)
