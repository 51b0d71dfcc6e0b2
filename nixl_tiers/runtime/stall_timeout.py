"""StallTimeout: how long a thread's call may wait without any progress."""

from __future__ import annotations

import threading
import time

from nixl_tiers.base.clock import COUNTED_S, PAUSE_S
from nixl_tiers.runtime.coordinator import POLL_S


class StallTimeout:
    """Ends a call's waiting once it has waited for `timeout_s`, in all of its parts, without any progress.

    Time in which the process was stopped hardly counts, as nothing could progress.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._waited_s = 0.0
        self._best: int | None = None

    @property
    def left_s(self) -> float:
        return max(0.0, self._timeout_s - self._waited_s)

    def restart(self) -> None:
        """Another part begins, whose first measure of progress is no progress yet."""
        self._best = None

    def note(self, progress: int) -> None:
        """`progress`: any number that grows while there is some."""
        if self._best is not None and progress > self._best:
            self._waited_s = 0.0
        self._best = progress if self._best is None else max(self._best, progress)

    def expired(self, progress: int) -> bool:
        self.note(progress)
        return self._waited_s >= self._timeout_s

    def wait(self, changed: threading.Condition) -> None:
        began_s = time.monotonic()
        changed.wait(min(POLL_S, self.left_s))
        waited_s = time.monotonic() - began_s
        self._waited_s += COUNTED_S if waited_s > PAUSE_S else waited_s
