"""The clock for deadlines of movers and requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

PAUSE_S: Final = 2.0
"""The supervisor reads its clock once a second, and far more often while there is work. Between two readings that
are further apart than this, the process was stopped."""
COUNTED_S: Final = 0.05
"""What such a pause counts as. Not zero, so that time passes however rarely the process runs."""


class RunningClock:
    """Monotonic seconds in which this process ran. Thread-safe.

    After a pause (SIGSTOP, a frozen cgroup, a suspended machine) every deadline would have expired without a chance to
    meet it: the movers' heartbeats were not read, or the movers were frozen too.
    """

    def __init__(self, source: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._lock = threading.RLock()  # a garbage collection inside of it may end up here again
        self._seen = source()
        self._left_out = 0.0

    def __call__(self) -> float:
        with self._lock:
            now = self._source()
            if now - self._seen > PAUSE_S:
                self._left_out += now - self._seen - COUNTED_S
            self._seen = now
            return now - self._left_out
