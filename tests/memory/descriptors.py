"""Which descriptors this process has open."""

from __future__ import annotations

import fcntl
from pathlib import Path


def is_open(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_GETFD)
    except OSError:
        return False
    return True


def descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}
