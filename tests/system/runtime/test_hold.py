"""Holds of the core: leaving one wakes the supervisor where there is work, and none does more than its share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import nixl_tiers
from nixl_tiers.base.chunk import Geometry
from tests.support.holds import counted

OF_A_STORE: dict[str, Callable[[nixl_tiers.TieredStore, list[bytes], Any], object]] = {
    "put": lambda store, keys, rows: store.put(keys, rows),
    "locate": lambda store, keys, _: store.locate(keys),
    "get": lambda store, keys, rows: store.get(keys, rows),
    "get of none": lambda store, keys, rows: store.get([b"no " + key for key in keys], rows),
    "prefetch": lambda store, keys, _: store.prefetch(keys),
    "stats": lambda store, *_: store.stats(),
}


def test_no_hold_of_a_store_grows_with_its_call() -> None:
    """A put allocates rows for at most 1024 keys in a hold, a get looks up and loads 256."""
    longest: list[dict[str, int]] = []
    for count in (1500, 6000):
        keys = [b"key-%05d" % number for number in range(count)]
        rows = np.zeros((count, 64), np.uint8)
        cpu = {"type": "cpu", "capacity": 4 * count * Geometry(1, 64).row_bytes}
        with nixl_tiers.open({"tiers": [cpu]}, 64, "n") as store, counted(store.coordinator) as hold:
            holds = {}
            for name, call in OF_A_STORE.items():
                hold.longest = 0
                call(store, keys, rows)
                holds[name] = hold.longest
        longest.append(holds)
    few, many = longest
    for name in OF_A_STORE:
        assert 0 < many[name] <= 1.1 * few[name] + 100, (name, few, many)
