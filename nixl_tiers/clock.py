"""The clock by which deadlines of movers and requests are judged."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

PAUSE_S: Final = 2.0
"""The supervisor looks at its clock once a second, and far more often while there is work. Between two looks that are
further apart than this, the process did not run."""
COUNTED_S: Final = 0.05
"""What such a pause counts. Not nothing, so that time goes on however rarely the process runs."""


class RunningClock:
    """Monotonic seconds in which this process ran. Thread-safe.

    After a pause (SIGSTOP, a frozen cgroup, a suspended machine) every deadline would be over, and nobody would have
    had a chance to keep it: a mover's heartbeats are not read, or it was frozen too.
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
