"""Rate-limited warnings: a medium that fails, fails for every row, and a line per row would bury the first one."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

REPEAT_S: Final = 600.0


class LogOnce:
    """Logs a warning of each kind once, and again every REPEAT_S if it still occurs. Thread-safe."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._lock = threading.Lock()
        self._logged: dict[str, tuple[float, int]] = {}  # kind -> when it was logged, occurrences since

    def report(self, kind: str, text: str) -> None:
        """`text`: one sentence about this occurrence."""
        now = self._clock()
        with self._lock:
            logged_at, count = self._logged.get(kind, (now - REPEAT_S, 0))
            if now - logged_at < REPEAT_S:
                self._logged[kind] = logged_at, count + 1
                return
            self._logged[kind] = now, 0
        self._logger.warning("%s%s", text, f" (and {count} times since this was last logged)" if count else "")
