"""Which descriptors this process has open, and memory behind them."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def is_open(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_GETFD)
    except OSError:
        return False
    return True


def descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def image(fd: int) -> bytearray:
    return bytearray(os.pread(fd, os.fstat(fd).st_size, 0))


def memfd(contents: bytes, seals: int = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(fd, contents)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd
