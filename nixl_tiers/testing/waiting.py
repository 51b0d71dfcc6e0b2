"""Waiting for something to become true: the one way in which tests wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nixl_tiers.store import TieredStore


def until(condition: Callable[[], object], what: str, timeout_s: float = 120.0) -> None:
    """Return as soon as `condition` holds. Raises AssertionError that names `what` after `timeout_s`, which
    is there for what never comes: a machine may be many times slower than expected."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"still waiting for {what} after {timeout_s:g} s"
        time.sleep(0.01)


def until_up(*stores: TieredStore) -> None:
    """Return when every tier of these stores is up and has told of all that it held before. A store opens without
    tiers that are slow to answer: until then, nothing is written to them."""

    def up() -> bool:
        return all(tier["up"] == 1.0 for store in stores for tier in store.stats().values())

    until(up, "every tier to be up")
