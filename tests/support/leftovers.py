"""What may be left behind: by a process that ends, processes and names in shared memory; by a call, host rows."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from nixl_tiers.store import TieredStore

MARK = "NIXL_TIERS_TEST_MARK"
"""An environment variable; whoever is started below a process that has it has it too."""


def marked(mark: str) -> dict[int, str]:
    """The command line of every process that carries the mark and is not dead."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            alive = (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
            if alive and f"{MARK}={mark}".encode() in (process / "environ").read_bytes():
                found[int(process.name)] = (process / "cmdline").read_text().replace("\0", " ")
    return found


class Watched:
    """Processes to be seen ending, whoever reaps them: the last of their threads, and so everything they held."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._descriptors: list[int] = []
        for pid in pids:
            with suppress(ProcessLookupError):
                self._descriptors.append(os.pidfd_open(pid))

    def have_ended(self, timeout_s: float) -> bool:
        """Wait for all of them; once."""
        ended = True
        for descriptor in self._descriptors:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            ended &= bool(poll.poll(timeout_s * 1000))
            os.close(descriptor)
        return ended


def shared_names() -> set[str]:
    """Names of ours in shared memory, where nothing of ours should have a name."""
    return {entry.name for entry in Path("/dev/shm").iterdir() if "nixl" in entry.name or "tiers" in entry.name}


def family(ancestor: int) -> dict[int, str]:
    """The command line of every process below `ancestor`, and of itself."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, front = set(), {ancestor}
    while front:
        found |= front
        front = {pid for pid, parent in parents.items() if parent in front}
    return {pid: line for pid in found if (line := line_of(pid))}


def line_of(pid: int) -> str:
    """Its command line; empty for what has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def rows_in_use(store: TieredStore) -> int:
    """Host rows that are not free: found by a key, or in anybody's hands, or lost."""
    used = store.stats()["cpu"]["used_bytes"] / store._region.geometry.row_bytes
    assert used.is_integer()
    return int(used)
