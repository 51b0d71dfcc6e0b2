"""How long a coordinator's lock is held at once, in processor time of the thread that holds it."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

LONGEST_HOLDS: Final = 10


class TimedLock:
    """In place of the coordinator's lock: records the longest times that a thread held it, in processor time."""

    def __init__(self) -> None:
        self.reset()
        self._lock = threading.RLock()
        self._depth = 0
        self._since_s = 0.0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        taken = self._lock.acquire(blocking, timeout)
        if taken:
            self._depth += 1
            if self._depth == 1:
                self._since_s = time.thread_time()
        return taken

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            heapq.heappushpop(self._longest_s, time.thread_time() - self._since_s)
        self._lock.release()

    def _is_owned(self) -> bool:  # these three are for threading.Condition
        return self._lock._is_owned()  # type: ignore[attr-defined,no-any-return]

    def _release_save(self) -> int:
        depth = self._depth
        for _ in range(depth):
            self.release()
        return depth

    def _acquire_restore(self, depth: int) -> None:
        for _ in range(depth):
            self.acquire()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def reset(self) -> None:
        self._longest_s = [0.0] * LONGEST_HOLDS

    def figures(self) -> dict[str, float]:
        return {"hold_ms": max(self._longest_s) * 1e3, "hold_10th_ms": min(self._longest_s) * 1e3}

    @contextmanager
    def untimed(self) -> Iterator[None]:
        """Held by the bench itself."""
        with self._lock:
            yield
