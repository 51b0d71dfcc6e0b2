"""Rows of a store whose content follows from their keys: every hit is compared, byte by byte."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

import nixl_tiers

SIZE: Final = 64 << 10
TIMEOUT_S: Final = 120.0


def content(key: bytes) -> np.ndarray:
    return np.random.default_rng(list(key)).integers(0, 256, SIZE, np.uint8)


def put(store: nixl_tiers.TieredStore, keys: Sequence[bytes]) -> None:
    for start in range(0, len(keys), 20):
        some = keys[start : start + 20]
        store.put(some, np.stack([content(key) for key in some]))
        assert store.flush(TIMEOUT_S)


def hits(store: nixl_tiers.TieredStore, keys: Sequence[bytes]) -> int:
    """Of all these keys, each of which is checked."""
    found = 0
    for start in range(0, len(keys), 20):
        some = keys[start : start + 20]
        out = np.full((len(some), SIZE), 0xEE, np.uint8)
        for key, hit, row in zip(some, store.get(some, out), out, strict=True):
            assert not hit or np.array_equal(row, content(key)), f"a wrong byte for {key!r}"
            found += hit
    return found
