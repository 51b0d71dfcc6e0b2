"""What was put comes back from every tier, byte for byte, or not at all."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nixl_tiers
from tests.support import inside, load
from tests.support.file_tier import file_tier
from tests.support.leaks import host_rows_in_use
from tests.support.servers import S3Server
from tests.support.times import open_patient
from tests.support.waiting import serves, until, until_up

KIB, MIB = 1 << 10, 1 << 20


def chunks(count: int, size: int, seed: int = 0) -> tuple[list[bytes], np.ndarray]:
    random = np.random.default_rng(seed)
    return [b"%04d" % n + random.bytes(28) for n in range(count)], random.integers(0, 256, (count, size), np.uint8)


@pytest.fixture
def objects(
    any_s3: S3Server,
    s3_bucket: Callable[[S3Server], str],
    s3_prefix: str,
    s3_credentials: Callable[[S3Server], None],
) -> dict[str, Any]:
    """An s3 tier without its capacity."""
    s3_credentials(any_s3)
    return {"type": "s3", "bucket": s3_bucket(any_s3), "prefix": s3_prefix, "endpoint": any_s3.endpoint}


def config(*storage: dict[str, Any], host: int) -> dict[str, Any]:
    return {"tiers": [{"type": "cpu", "capacity": host}, *storage], "wait_s": 120.0}


def known(store: nixl_tiers.TieredStore, tier: str, count: int) -> None:
    """Wait until a tier has listed what it held before."""
    until(lambda: serves(store.stats()[tier]) and store.stats()[tier]["rows"] >= count, "the tier's listing")


def check(store: nixl_tiers.TieredStore, keys: list[bytes], rows: np.ndarray) -> None:
    out = np.full_like(rows, 0xEE)
    assert store.get(keys, out) == [True] * len(keys)
    assert np.array_equal(out, rows)


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(64 * KIB, marks=pytest.mark.smoke),
        *(pytest.param(size, marks=pytest.mark.slow) for size in (256 * KIB, 2_949_120)),
        8 * MIB,
    ],
)
def test_each_tier_returns_what_was_put(size: int, tmp_path: Path, objects: dict[str, Any]) -> None:
    keys, rows = chunks(10, size)
    room = 64 * size
    files, objects = file_tier(tmp_path / "kv", room), {**objects, "capacity": room}
    with open_patient(config(files, objects, host=room), size, "n") as store:
        until_up(store)
        assert store.put(keys, rows) == 10
        assert store.flush(300)
        assert store.locate(keys) == ["cpu"] * 10
        check(store, keys, rows)
        assert store.stats()["file"]["bytes_read"] == 0
    with open_patient(config(files, objects, host=room), size, "n") as store:
        known(store, "file", 10)
        assert store.locate(keys) == ["file"] * 10
        check(store, keys, rows)
        assert store.stats()["file"]["hits"] == 10
        assert store.stats()["file"]["bytes_read"] >= 10 * size
    shutil.rmtree(tmp_path / "kv")
    with open_patient(config(files, objects, host=room), size, "n") as store:
        until_up(store)
        until(lambda: all(store.get(keys, np.zeros_like(rows))), "what is asked for")
        check(store, keys, rows)
        assert store.stats()["s3"]["hits"] == 10
        assert store.flush(300)  # what came from below is written to the tiers above
        assert store.stats()["file"]["rows"] == 10


@pytest.mark.smoke
def test_another_namespace_salt_or_chunk_size_never_hits(tmp_path: Path) -> None:
    keys, rows = chunks(4, 64 * KIB)
    files = file_tier(tmp_path, 16 * MIB)
    with open_patient(config(files, host=4 * MIB), 64 * KIB, "n") as store:
        until_up(store)
        store.put(keys, rows)
        assert store.flush(300)
    salted = {**config(files, host=4 * MIB), "salt": "pepper"}
    for other, size, name in [
        (config(files, host=4 * MIB), 64 * KIB, "m"),
        (salted, 64 * KIB, "n"),
        (config(files, host=4 * MIB), 128 * KIB, "n"),
    ]:
        with open_patient(other, size, name) as store:
            until_up(store)
            assert store.get(keys, np.zeros((4, size), np.uint8)) == [False] * 4
    with open_patient(config(files, host=4 * MIB), 64 * KIB, "n") as store:
        known(store, "file", 4)
        check(store, keys, rows)


@pytest.mark.parametrize("on_reset", [pytest.param("new_epoch", marks=pytest.mark.smoke), "keep"])
def test_after_a_reset_nothing_is_a_hit_unless_kept(tmp_path: Path, on_reset: str) -> None:
    keys, rows = chunks(6, 64 * KIB)
    with open_patient(
        {**config(file_tier(tmp_path, 16 * MIB), host=4 * MIB), "on_reset": on_reset}, 64 * KIB, "n"
    ) as store:
        until_up(store)
        store.put(keys, rows)
        assert store.flush(300)
        store.reset()
        until_up(store)
        out = np.zeros_like(rows)
        kept = on_reset == "keep"
        assert store.get(keys, out) == [kept] * 6
        keys2, rows2 = chunks(6, 64 * KIB, seed=1)
        assert store.put(keys2, rows2) == 6
        assert store.flush(300)
        check(store, keys2, rows2)
        assert store.stats()["file"]["bytes_written"] > 0


def test_a_tier_written_on_eviction_gets_evicted_rows_and_at_exit_the_rest(tmp_path: Path) -> None:
    keys, rows = chunks(100, 64 * KIB)
    lazy = file_tier(tmp_path, 64 * MIB, write="on_evict")
    setting = {**config(lazy, host=4 * MIB), "flush_on_exit_s": 300.0}
    with open_patient(setting, 64 * KIB, "n") as store:
        until_up(store)
        # Promotions wait for write-back only so long, and then evict unwritten rows, and a tier that is late gets none:
        # here, for as long as it takes.
        state = inside.state(store.coordinator._core)
        late = dict.fromkeys(("soft_deadline_min_s", "hard_deadline_min_s", "hard_deadline_max_s"), 300.0)
        state.limits = replace(state.limits, clean_wait_s=300.0, **late)
        assert store.put(keys[:40], rows[:40]) == 40
        assert store.stats()["file"]["bytes_written"] == 0
        for n in range(40, 100):
            assert store.put(keys[n : n + 1], rows[n : n + 1]) == 1
            assert store.flush(300)
        assert store.stats()["file"]["dropped"] == 0
        check(store, keys, rows)
        assert store.stats()["file"]["dropped"] == 0
    with open_patient(setting, 64 * KIB, "n") as store:
        known(store, "file", 100)
        check(store, keys, rows)


def test_concurrent_resets_puts_and_gets_give_no_wrong_byte_and_leak_no_row() -> None:
    rows, done = 32, threading.Event()

    def checked(keys: list[bytes]) -> int:
        hits, wrong = load.get(store, keys)
        assert not wrong
        return sum(hits)

    def traffic(seed: int) -> int:
        random = np.random.default_rng(seed)
        hits = 0
        while not done.is_set():
            keys = [b"%d" % n for n in random.choice(3 * rows, rows // 2, replace=False)]
            if random.random() < 0.5:
                load.put(store, keys)
            else:
                hits += checked(keys)
        return hits

    # A page for the seal of each row.
    with nixl_tiers.open(config(host=rows * 8 * KIB), 4 * KIB, "n") as store, ThreadPoolExecutor(4) as others:
        threads = [others.submit(traffic, seed) for seed in range(4)]
        try:
            for number in range(2000):
                if number % 10 == 0:
                    store.reset()
                key = b"%d" % (number % (3 * rows))
                if not checked([key]):
                    load.put(store, [key])
        finally:
            done.set()
        assert sum(thread.result(120) for thread in threads) > 0
        store.reset()
        assert host_rows_in_use(store) == 0
        keys = [b"after-%d" % n for n in range(rows)]
        assert load.put(store, keys) == checked(keys) == rows
