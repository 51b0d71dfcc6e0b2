"""Polling until something becomes true: the one way in which tests wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nixl_tiers.store import TieredStore


def until(condition: Callable[[], object], what: str, timeout_s: float = 120.0) -> None:
    """Return as soon as `condition` holds. Raises AssertionError that names `what` after `timeout_s`: generous, since
    it ends only what would hang, and a machine may be many times slower than expected."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"timed out after {timeout_s:g} s waiting for {what}"
        time.sleep(0.01)


def serves(tier: Mapping[str, float]) -> bool:
    """Whether a tier with these numbers (`stats()`) is up and has listed the rows it held before."""
    return tier["up"] == 1.0 and not tier["listing"]


def until_up(*stores: TieredStore) -> None:
    """Return when every tier of these stores is up and has listed the rows it held before. A store opens without
    waiting for a slow tier: until it is up, nothing is written to it."""

    def up() -> bool:
        return all(serves(tier) for store in stores for tier in store.stats().values())

    until(up, "every tier to be up")
