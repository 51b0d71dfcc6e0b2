"""Whether what a tier stands on is still there: files may be deleted, replaced, or unmounted under a running mover.

An open file outlives its name. A tier that did not look would go on writing, into bytes that nobody finds again and
that no account holds, or beside a mover that has meanwhile made the same files anew.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

LOOK_S: Final = 1.0


class HealthMonitor:
    """Calls `look` now and then on a thread of its own: it may wait for the medium, the loop that moves rows may not.

    `look` returns what is wrong, in one sentence, or "". What it raises as an OSError is wrong too.
    """

    def __init__(self, look: Callable[[], str]) -> None:
        self._look = look
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="watch")
        self._looking: Future[str] | None = None
        self._next_s = time.monotonic() + LOOK_S
        self.trouble = ""

    def soon(self) -> None:
        """Something has failed: look now."""
        self._next_s = 0.0

    def poll(self) -> str:
        """What was wrong at the last look, if anything; it stays so."""
        if self._looking is not None and self._looking.done():
            try:
                self.trouble = self.trouble or self._looking.result()
            except OSError as error:
                self.trouble = describe(error)
            self._looking = None
        if self._looking is None and not self.trouble and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + LOOK_S
            self._looking = self._thread.submit(self._look)
        return self.trouble

    def close(self) -> None:
        """Look no more; does not wait for a look under way."""
        self._thread.shutdown(wait=False, cancel_futures=True)


class FileIdentity:
    """One file or directory as it was when it was opened."""

    def __init__(self, path: Path, status: os.stat_result | None = None) -> None:
        """`status`: of what was opened, where that may be something else than what has the name now. Raises OSError."""
        self.path = path
        status = status or path.stat()
        self._identity = status.st_dev, status.st_ino

    def trouble(self, least_bytes: int = 0) -> str:
        """What has happened to it, or "". Raises OSError if it cannot be reached."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return f"{self.path} has been deleted"
        if (status.st_dev, status.st_ino) != self._identity:
            return f"{self.path} has been replaced"
        return f"{self.path} has been cut short" if status.st_size < least_bytes else ""


class MountGuard:
    """The file system that a path was on when it was first served. Without its medium, a mount point is a directory
    like any other, and a tier would fill the disk below it."""

    def __init__(self) -> None:
        self._point: Path | None = None

    def remember(self, path: Path) -> None:
        """It is served now."""
        if self._point is None:
            real = path.resolve()  # a link is no mount point, and its parents are not those of what it leads to
            self._point = next(place for place in (real, *real.parents) if os.path.ismount(place))

    def trouble(self) -> str:
        """What is wrong, or "". May wait for the medium."""
        known = self._point is not None
        return f"{self._point} is not mounted any more" if known and not os.path.ismount(str(self._point)) else ""


def describe(error: OSError) -> str:
    """One sentence."""
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename else reason
