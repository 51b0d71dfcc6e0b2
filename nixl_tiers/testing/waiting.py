"""Waiting for something to become true: the one way in which tests wait."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], object], what: str, timeout_s: float = 30.0) -> None:
    """Return as soon as `condition` holds. Raises AssertionError that names `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"still waiting for {what} after {timeout_s:g} s"
        time.sleep(0.01)
