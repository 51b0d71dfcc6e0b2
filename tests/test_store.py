"""What a put of more than fits, and a get of many keys, ask of the cascade."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

import nixl_tiers
from nixl_tiers.chunk import Geometry, Key

SIZE = 1000
ROW_BYTES = Geometry(1, SIZE).row_bytes


def keys_of(count: int) -> list[Key]:
    return [b"key-%05d" % number for number in range(count)]


def rows_of(keys: list[Key]) -> np.ndarray:
    return np.frombuffer(b"".join(key.ljust(SIZE, b".") for key in keys), np.uint8).reshape(len(keys), SIZE)


def config(*storage: dict[str, Any], rows: int, **others: Any) -> dict[str, Any]:
    return {"tiers": [{"type": "cpu", "capacity": rows * ROW_BYTES}, *storage], **others}


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
