"""Trouble said once: a medium that fails, fails for every row, and one line a row would bury the one that tells why."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

AGAIN_S: Final = 600.0


class LogOnce:
    """One warning for each kind of trouble, and from then on another every AGAIN_S, if it lasts. Any thread."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._lock = threading.Lock()
        self._said: dict[str, tuple[float, int]] = {}  # kind -> when it was said, how often it has come up since

    def about(self, kind: str, text: str) -> None:
        """`text` is one sentence about this case of the trouble."""
        now = self._clock()
        with self._lock:
            said_at, since = self._said.get(kind, (now - AGAIN_S, 0))
            if now - said_at < AGAIN_S:
                self._said[kind] = said_at, since + 1
                return
            self._said[kind] = now, 0
        self._logger.warning("%s%s", text, f" (and {since} times since this was last said)" if since else "")

    def over(self, kind: str) -> None:
        """That trouble has ended: it is news when it comes back."""
        with self._lock:
            self._said.pop(kind, None)
