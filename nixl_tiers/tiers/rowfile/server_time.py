"""The time of day by the clock of a file server, which stamps the files that several machines share.

Machines that write to it may have clocks of their own making; what they ask of each other's files is how old they are,
and only the clock that stamped them can tell.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

ASKED_S: Final = 5.0  # between two questions; the clock of this machine measures only what has passed since


class ServerTime:
    """Asked on threads that may wait, read on any."""

    def __init__(self) -> None:
        self._known: tuple[float, float] | None = None  # the server's time, and when it was told, by our monotonic one

    def ask(self, directory: int) -> None:
        """Touch a directory of ours, open as this descriptor, and see what time that makes it. Raises OSError."""
        if self._known is None or time.monotonic() - self._known[1] >= ASKED_S:
            os.utime(directory)  # as in `mark`
            self._known = os.fstat(directory).st_mtime, time.monotonic()

    def mark(self, name: str | Path, directory: int | None = None) -> None:
        """Give a file the server's time. Raises OSError."""
        os.utime(name, dir_fd=directory, follow_symlinks=False)  # without a time: the server's now, not ours

    def now_s(self) -> float:
        """Unix seconds, never ahead of the server but for its jumps. `ask` comes first."""
        if self._known is None:
            raise RuntimeError("the server has not been asked for its time")
        told_s, at_s = self._known
        return told_s + time.monotonic() - at_s
