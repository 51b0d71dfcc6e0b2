"""What a process holds: compare before and after, and nothing is left over."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ResourceCount:
    """Descriptors, threads and child processes of this process."""

    fds: int
    threads: int
    children: frozenset[int]

    @classmethod
    def take(cls) -> ResourceCount:
        return cls(len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), frozenset(children()))

    def covers(self, other: ResourceCount) -> bool:
        """Whether nothing of `other` is more than this."""
        return other.fds <= self.fds and other.threads <= self.threads and other.children <= self.children


def children() -> Iterator[int]:
    """Process ids of this process's children, dead ones that nobody has reaped among them."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid = int(entry.name)
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid():
                yield pid


def resident_bytes(pid: int | str = "self") -> int:
    """Memory that a process has in RAM, shared memory included; 0 if it is gone."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
