"""The time of day by the clock of a file server, which sets the times of files that several machines share.

Clocks of the machines that share a directory may be wrong. The ages of files in it are right only by the clock that set
their times.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

REFRESH_S: Final = 5.0  # between two reads of the server's clock; until the next one the monotonic clock counts


class ServerTime:
    """`refresh` and `touch` belong on threads that may wait for the server, `now_s` on any."""

    def __init__(self) -> None:
        self._read: tuple[float, float] | None = None  # the server's time, and the monotonic time when it was read

    def refresh(self, directory: int) -> None:
        """Touch a directory of this tier, open as this descriptor, and read the time that it got. Raises OSError."""
        if self._is_old:
            os.utime(directory)  # as in `touch`
            self._read = os.fstat(directory).st_mtime, time.monotonic()

    def assume(self) -> None:
        """Nothing can be touched there: the server's clock is taken to be this machine's."""
        if self._is_old:
            self._read = time.time(), time.monotonic()

    @property
    def _is_old(self) -> bool:
        return self._read is None or time.monotonic() - self._read[1] >= REFRESH_S

    def touch(self, name: str | Path, directory: int | None = None) -> None:
        """Set a file's times to the server's. Raises OSError."""
        os.utime(name, dir_fd=directory, follow_symlinks=False)  # without a time: the server's now, not this machine's

    def now_s(self) -> float:
        """Unix seconds; ahead of the server only if its clock was put back. `refresh` comes first."""
        if self._read is None:
            raise RuntimeError("the server's time has not been read")
        server_s, read_at_s = self._read
        return server_s + time.monotonic() - read_at_s
