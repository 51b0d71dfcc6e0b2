"""What a put of more than fits, and a get of many keys, ask of the cascade."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nixl_tiers
from nixl_tiers.base.chunk import Key
from nixl_tiers.store import GET_KEYS
from tests.support.file_tier import file_tier
from tests.support.waiting import until_up
from tests.test_store import SIZE, config, keys_of


def rows_of(keys: list[Key]) -> np.ndarray:
    return np.frombuffer(b"".join(key.ljust(SIZE, b".") for key in keys), np.uint8).reshape(len(keys), SIZE)


@pytest.mark.parametrize("rows", [7, 600, 601])
def test_put_of_more_than_host_memory_holds_writes_each_key_once_and_ends(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last part is larger than what is left, and more rows are pinned than one search passes over."""
    keys = keys_of(rows + rows // 2)
    written: Counter[Key] = Counter()
    with nixl_tiers.open(config(rows=rows), SIZE, "n") as store:
        prepare_store = store.coordinator.prepare_store

        def counted(*arguments: Any, **others: Any) -> Any:
            plan = prepare_store(*arguments, **others)
            written.update(plan.keys)
            assert written.total() <= len(keys), "it writes for ever"
            return plan

        monkeypatch.setattr(store.coordinator, "prepare_store", counted)
        assert store.put(keys, rows_of(keys)) == rows
        assert written == Counter(keys[:rows])
        out = np.zeros((rows, SIZE), np.uint8)
        assert store.get(keys[:rows], out) == [True] * rows
        assert np.array_equal(out, rows_of(keys[:rows]))


class Holds:
    """Counts what a thread looks up in all, and at most in one hold of a store's core."""

    def __init__(self, store: nixl_tiers.TieredStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lookups = self.longest = self._here = self._depth = 0
        self._hold, self._changed = store.coordinator._hold, store.coordinator.changed
        look_up = store.coordinator._core.look_up_keys

        def counted(name: str, keys: Any, *arguments: Any) -> Any:
            self.lookups += len(keys)
            self._here += len(keys)
            self.longest = max(self.longest, self._here)
            if not self._depth:
                self._here = 0
            return look_up(name, keys, *arguments)

        monkeypatch.setattr(store.coordinator._core, "look_up_keys", counted)
        monkeypatch.setattr(store.coordinator, "_hold", self)
        monkeypatch.setattr(store.coordinator, "changed", self)

    def __enter__(self) -> Any:
        self._depth += 1
        return self._hold.__enter__()

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        self._here *= bool(self._depth)
        self._hold.__exit__(*error)  # type: ignore[arg-type]

    def wait(self, timeout: float) -> bool:
        self._here = 0
        return self._changed.wait(timeout)

    def notify_all(self) -> None:
        self._changed.notify_all()


def test_get_of_many_chunks_looks_each_up_twice_in_short_holds_and_hits_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of(6000)
    tiers = config(file_tier(tmp_path, "256MiB"), rows=24_000, wait_s=120.0)
    with nixl_tiers.open(tiers, SIZE, "n") as store:
        until_up(store)
        assert store.put(keys, rows_of(keys)) == len(keys)
        assert store.flush(300)
    with nixl_tiers.open(tiers, SIZE, "n") as store:
        until_up(store)
        assert store.locate(keys) == ["file"] * len(keys)
        holds = Holds(store, monkeypatch)
        out = np.zeros((len(keys), SIZE), np.uint8)
        assert all(store.get(keys, out))
        assert np.array_equal(out, rows_of(keys))
        assert holds.lookups <= 2 * len(keys)
        assert holds.longest <= GET_KEYS
        holds.lookups = 0
        assert all(store.get(keys, out))
        assert holds.lookups == len(keys), "what is in host memory is looked up once"
