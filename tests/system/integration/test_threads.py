"""Concurrent resets, puts and gets: no thread gets another key's bytes, and no row is leaked."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import nixl_tiers
from nixl_tiers.memory.region import HostRegion
from tests.support.leaks import host_rows_in_use

SIZE = 4 << 10
ROWS = 32
TIMEOUT_S = 120.0


@pytest.fixture
def store() -> Any:
    config = {"tiers": [{"type": "cpu", "capacity": ROWS * 2 * SIZE}]}  # a page for the seal
    with nixl_tiers.open(config, SIZE, "threads") as store:
        yield store


@pytest.fixture
def others() -> Any:
    with ThreadPoolExecutor(8) as pool:
        yield pool


class HeldUp:
    """Puts of keys that begin with b"slow" stop when their rows are filled, until they may go on."""

    def __init__(self, others: ThreadPoolExecutor, store: nixl_tiers.TieredStore) -> None:
        self.go_on = threading.Event()
        self._filled = threading.Semaphore(0)
        self._others, self._store = others, store

    def put(self, key: bytes) -> Future[int]:
        future = self._others.submit(put, self._store, key)
        assert self._filled.acquire(timeout=TIMEOUT_S)
        return future

    def marked(self, region: HostRegion, rows: Any, *arguments: Any) -> None:
        if bytes(region.rows_view[rows[0], :4]) == b"slow":
            self._filled.release()
            assert self.go_on.wait(TIMEOUT_S)
        mark(region, rows, *arguments)


mark = HostRegion.mark


@pytest.fixture
def held_up(others: ThreadPoolExecutor, store: nixl_tiers.TieredStore, monkeypatch: pytest.MonkeyPatch) -> Any:
    held_up = HeldUp(others, store)
    monkeypatch.setattr(HostRegion, "mark", lambda *arguments: held_up.marked(*arguments))  # noqa: PLW0108 (a function binds)
    yield held_up
    held_up.go_on.set()


def row_of(key: bytes) -> np.ndarray:
    """(1, SIZE): what is put under `key`."""
    return np.frombuffer(key.ljust(32, b".") * (SIZE // 32), np.uint8).reshape(1, SIZE)


def put(store: nixl_tiers.TieredStore, key: bytes) -> int:
    return store.put([key], row_of(key))


def holds(store: nixl_tiers.TieredStore, key: bytes) -> bool:
    """Whether `key` is a hit; its bytes must be right then."""
    out = np.zeros((1, SIZE), np.uint8)
    (hit,) = store.get([key], out)
    assert not hit or np.array_equal(out, row_of(key)), f"{key!r} gave {out[0, :32].tobytes()!r}"
    return hit


def test_a_row_being_filled_is_not_reused_after_a_reset(store: nixl_tiers.TieredStore, held_up: HeldUp) -> None:
    before = held_up.put(b"slow")
    store.reset()
    assert put(store, b"the first to end after the reset") == 1
    assert host_rows_in_use(store) == 2, "the row that is still being filled was released"
    held_up.go_on.set()
    assert before.result(TIMEOUT_S) == 0  # it cannot be found when put returns
    assert not holds(store, b"slow")
    assert holds(store, b"the first to end after the reset")
    assert host_rows_in_use(store) == 1


def test_a_put_before_a_reset_does_not_end_a_later_put_of_the_same_key(
    store: nixl_tiers.TieredStore, held_up: HeldUp
) -> None:
    before = held_up.put(b"slow")
    store.reset()
    first, held_up.go_on = held_up.go_on, threading.Event()
    after = held_up.put(b"slow")
    first.set()
    assert before.result(TIMEOUT_S) == 0
    assert host_rows_in_use(store) == 1, "the row that the second put fills was released by the first one's end"
    held_up.go_on.set()
    assert after.result(TIMEOUT_S) == 1
    assert holds(store, b"slow")
    assert host_rows_in_use(store) == 1


def test_concurrent_resets_puts_and_gets_give_no_wrong_byte_and_leak_no_row(
    store: nixl_tiers.TieredStore, others: ThreadPoolExecutor
) -> None:
    done = threading.Event()

    def traffic(seed: int) -> int:
        random = np.random.default_rng(seed)
        hits = 0
        while not done.is_set():
            keys = [b"%d" % n for n in random.choice(3 * ROWS, ROWS // 2, replace=False)]
            if random.random() < 0.5:
                store.put(keys, np.concatenate([row_of(key) for key in keys]))
            else:
                out = np.zeros((len(keys), SIZE), np.uint8)
                for key, row, hit in zip(keys, out, store.get(keys, out), strict=True):
                    assert not hit or np.array_equal(row, row_of(key)[0]), f"{key!r} gave {row[:32].tobytes()!r}"
                    hits += hit
        return hits

    threads = [others.submit(traffic, seed) for seed in range(4)]
    try:
        for number in range(2000):
            if number % 10 == 0:
                store.reset()
            key = b"%d" % (number % (3 * ROWS))
            if not holds(store, key):
                put(store, key)
    finally:
        done.set()
    assert sum(thread.result(TIMEOUT_S) for thread in threads) > 0
    store.reset()
    assert host_rows_in_use(store) == 0
    keys = [b"after-%d" % n for n in range(ROWS)]
    assert sum(put(store, key) for key in keys) == ROWS
    assert all(holds(store, key) for key in keys)
