"""Which rows a restart finds least recently used: a use in any tier counts, and so does one that moved no bytes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nixl_tiers
from nixl_tiers.base.chunk import Geometry
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.slab.shard import slots_within
from nixl_tiers.tiers.slab.tier import SlabTier
from tests.support.file_tier import file_config, file_tier
from tests.support.waiting import until, until_up

SIZE = 16 << 10
GEOMETRY = Geometry(1, SIZE)
SLOTS = 6
CAPACITY = next(n for n in range(0, 1 << 30, 4096) if slots_within(n, GEOMETRY.row_bytes) >= SLOTS)


def config(path: Path, **file: Any) -> dict[str, Any]:
    tier = file_tier(path, CAPACITY, **file)
    return {"tiers": [{"type": "cpu", "capacity": 4 * SLOTS * SIZE}, tier], "wait_s": 120.0}


def key(number: int) -> bytes:
    return b"%032d" % number


def put(store: nixl_tiers.TieredStore, *numbers: int) -> None:
    """One request for each."""
    for number in numbers:
        assert store.put([key(number)], np.full((1, SIZE), number, np.uint8)) == 1
        assert store.flush(60.0)


def get(store: nixl_tiers.TieredStore, number: int) -> None:
    out = np.empty((1, SIZE), np.uint8)
    assert store.get([key(number)], out) == [True]
    assert (out == number).all()


def until_listed(store: nixl_tiers.TieredStore) -> None:
    until_up(store)
    assert store.stats()["file"]["rows"] == SLOTS


def on_file(store: nixl_tiers.TieredStore, count: int) -> list[int]:
    return [n for n in range(count) if store.locate([key(n)]) == ["file"]]


@pytest.mark.parametrize("promoted", [False, True], ids=["hit in host memory", "load from the tier"])
def test_row_used_last_survives_a_restart(tmp_path: Path, promoted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with nixl_tiers.open(config(tmp_path), SIZE, "n") as store:
        until_up(store)
        put(store, *range(SLOTS))
        if not promoted:
            sent: list[tuple[int, int]] = []
            index = store.coordinator._core.tiers[0].index
            take_uses = index.take_uses
            monkeypatch.setattr(index, "take_uses", lambda count: sent.extend(some := take_uses(count)) or some)
            get(store, 1)
            until(lambda: sent, "the use to be sent")
            get(store, 0)  # within a second of the last message: the regular stop sends it
    if promoted:
        with nixl_tiers.open(config(tmp_path), SIZE, "n") as store:
            until_listed(store)
            get(store, 0)
    with nixl_tiers.open(config(tmp_path), SIZE, "n") as store:
        until_listed(store)
        put(store, *range(SLOTS, 2 * SLOTS - 1))
        assert on_file(store, SLOTS) == [0]


def test_recency_is_in_the_journal_soon_without_a_restart(tmp_path: Path) -> None:
    """So that an engine that is killed loses the uses of the last second or two only."""
    engine = subprocess.Popen(
        [sys.executable, "-c", _ENGINE, str(tmp_path / "kv")], stdout=subprocess.PIPE, stdin=subprocess.PIPE
    )
    assert engine.stdout is not None
    try:
        assert engine.stdout.readline() == b"used\n"
        until(lambda: _journalled(tmp_path)[-1] == key(0), "the use to be journalled")
    finally:
        os.kill(engine.pid, signal.SIGKILL)
        engine.wait()
    with nixl_tiers.open(config(tmp_path / "kv"), SIZE, "n") as store:
        until_listed(store)
        put(store, *range(SLOTS, 2 * SLOTS - 1))
        assert on_file(store, SLOTS) == [0]


_ENGINE = """
import sys
from pathlib import Path
import nixl_tiers
from tests.system.integration.test_recency import SIZE, SLOTS, config, get, put, until_up
with nixl_tiers.open(config(Path(sys.argv[1])), SIZE, "n") as store:
    until_up(store)
    put(store, *range(SLOTS))
    get(store, 0)
    print("used", flush=True)
    sys.stdin.read()
"""


def _journalled(tmp_path: Path) -> list[bytes]:
    """The keys in a copy of the running engine's journal, least recently used first. Without files that the engine is
    about to rename: one that is listed may be gone when it is copied."""
    copy = tmp_path / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(tmp_path / "kv", copy, ignore=shutil.ignore_patterns("*.new", "*.tmp"))
    (description,) = copy.rglob("namespace.json")
    namespace = bytes.fromhex(description.parent.name)
    with HostRegion.create(GEOMETRY, 1) as region:
        tier = SlabTier(file_config(copy, CAPACITY), GEOMETRY, region)
        try:
            tier.open(namespace, 0)
            return [b"", *(entry.key for batch in tier.list_rows() for entry in batch)]
        finally:
            tier.close()
