"""The load generator detects wrong bytes, errors and hangs of a store."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import nixl_tiers
from tests.support.load import LoadGenerator, content, get, put
from tests.support.waiting import until

SIZE = 4096
HOST = {"tiers": [{"type": "cpu", "capacity": "4MiB"}]}


class TamperedStore:
    """A store whose gets pass through `tamper` before they are returned."""

    chunk_bytes = SIZE

    def __init__(self, store: nixl_tiers.TieredStore, tamper: Any) -> None:
        self._store = store
        self._tamper = tamper
        self.put = store.put

    def get(self, keys: list[bytes], out: np.ndarray) -> list[bool]:
        return self._tamper(keys, out, self._store.get(keys, out))


def flip_bit(keys: list[bytes], out: np.ndarray, hits: list[bool]) -> list[bool]:
    out[-1, SIZE // 2] ^= 1
    return hits


def report_hit_without_copy(keys: list[bytes], out: np.ndarray, hits: list[bool]) -> list[bool]:
    return [True] * len(keys)


def raise_error(keys: list[bytes], out: np.ndarray, hits: list[bool]) -> list[bool]:
    raise KeyError("a bug")


def test_content_follows_from_the_key() -> None:
    first, second = content(b"key-1", SIZE), content(b"key-2", SIZE)
    assert np.array_equal(first, content(b"key-1", SIZE))
    assert not np.array_equal(first, second)


def test_correct_store_has_no_findings() -> None:
    with nixl_tiers.open(HOST, SIZE, "n") as store:
        with LoadGenerator(store, seed=1, prompts=4, depth=4) as load:
            until(lambda: load.stats.gets >= 50, "some requests")
        stats = load.stats
        assert (stats.wrong, stats.errors) == ([], [])
        assert 0 < stats.hits < stats.chunks
        assert stats.longest_s > 0
        put(store, load.keys)
        assert get(store, load.keys) == ([True] * 16, [])


@pytest.mark.parametrize(
    ("tamper", "field"), [(flip_bit, "wrong"), (report_hit_without_copy, "wrong"), (raise_error, "errors")]
)
def test_wrong_bytes_and_errors_are_detected(tamper: Any, field: str) -> None:
    with nixl_tiers.open(HOST, SIZE, "n") as store:
        tampered: Any = TamperedStore(store, tamper)
        with LoadGenerator(tampered, threads=1, prompts=4, depth=4) as load:
            until(lambda: getattr(load.stats, field), "the load generator to detect it")


def test_hanging_get_is_detected() -> None:
    asked, held = threading.Event(), threading.Event()

    def block(keys: list[bytes], out: np.ndarray, hits: list[bool]) -> list[bool]:
        asked.set()
        held.wait()
        return hits

    with nixl_tiers.open(HOST, SIZE, "n") as store:
        tampered: Any = TamperedStore(store, block)
        load = LoadGenerator(tampered, threads=1).__enter__()
        asked.wait()  # or it would be stopped before it asks for anything
        with pytest.raises(AssertionError, match="has not been answered"):
            load.stop(0.2)
        held.set()
        load.stop()
