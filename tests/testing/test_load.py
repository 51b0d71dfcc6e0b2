"""The load sees what a store does wrong: a load that cannot is worth nothing."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import nixl_tiers
from tests.support.load import Load, content, get, put
from tests.support.waiting import until

SIZE = 4096
HOST = {"tiers": [{"type": "cpu", "capacity": "4MiB"}]}


class Lying:
    """A store whose gets are changed before they are returned."""

    chunk_bytes = SIZE

    def __init__(self, store: nixl_tiers.TieredStore, lie: Any) -> None:
        self._store = store
        self._lie = lie
        self.put = store.put

    def get(self, keys: list[bytes], out: np.ndarray) -> list[bool]:
        return self._lie(keys, out, self._store.get(keys, out))


def flips(keys: list[bytes], out: np.ndarray, hits: list[bool]) -> list[bool]:
    out[-1, SIZE // 2] ^= 1
    return hits


def moves_nothing(keys: list[bytes], out: np.ndarray, hits: list[bool]) -> list[bool]:
    return [True] * len(keys)


def raises(keys: list[bytes], out: np.ndarray, hits: list[bool]) -> list[bool]:
    raise KeyError("a bug")


def test_every_key_has_bytes_of_its_own() -> None:
    one, other = content(b"key-1", SIZE), content(b"key-2", SIZE)
    assert np.array_equal(one, content(b"key-1", SIZE))
    assert not np.array_equal(one, other)


def test_a_store_that_does_right_is_left_in_peace() -> None:
    with nixl_tiers.open(HOST, SIZE, "n") as store:
        with Load(store, seed=1, prompts=4, depth=4) as load:
            until(lambda: load.turns >= 50, "some turns")
        seen = load.seen
        assert (seen.wrong, seen.errors) == ([], [])
        assert 0 < seen.hits < seen.chunks
        assert seen.longest_s > 0
        put(store, load.keys)
        assert get(store, load.keys) == ([True] * 16, [])


@pytest.mark.parametrize(("lie", "what"), [(flips, "wrong"), (moves_nothing, "wrong"), (raises, "errors")])
def test_what_a_store_does_wrong_is_seen(lie: Any, what: str) -> None:
    with nixl_tiers.open(HOST, SIZE, "n") as store:
        lying: Any = Lying(store, lie)
        with Load(lying, threads=1, prompts=4, depth=4) as load:
            until(lambda: getattr(load.seen, what), "the load to notice")


def test_an_answer_that_never_comes_is_seen() -> None:
    held = threading.Event()

    def waits(keys: list[bytes], out: np.ndarray, hits: list[bool]) -> list[bool]:
        held.wait()
        return hits

    with nixl_tiers.open(HOST, SIZE, "n") as store:
        lying: Any = Lying(store, waits)
        load = Load(lying, threads=1).__enter__()
        with pytest.raises(AssertionError, match="has not been answered"):
            load.stop(0.2)
        held.set()
        load.stop()
