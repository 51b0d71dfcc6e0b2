"""What a test must not leak: descriptors, threads, processes, names in shared memory, host rows."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nixl_tiers.store import TieredStore
from tests.support.core import finish

MARK = "NIXL_TIERS_TEST_MARK"
"""An environment variable, inherited by every process started below one that has it."""

_serials = itertools.count()


# --- this process -----------------------------------------------------------------------------------------------------


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
        """Whether `other` has leaked nothing since this was taken."""
        return other.fds <= self.fds and other.threads <= self.threads and other.children <= self.children


def children() -> set[int]:
    """Process ids of this process's children, zombies included."""
    return {pid for pid, parent in _parents().items() if parent == os.getpid()}


def resident_bytes(pid: int | str = "self") -> int:
    """Resident set size of a process, shared memory included; 0 if it is gone."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


# --- other processes --------------------------------------------------------------------------------------------------


def processes_with_mark(mark: str) -> dict[int, str]:
    """The command line of every process with MARK=mark in its environment, without zombies."""
    pids = [int(process.name) for process in Path("/proc").glob("[0-9]*")]
    return {pid: command_line(pid) for pid in pids if has_mark(pid, mark)}


def has_mark(pid: int, mark: str) -> bool:
    """Whether this process has MARK=mark in its environment, and is no zombie."""
    process = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError):
        alive = (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
        return alive and f"{MARK}={mark}".encode() in (process / "environ").read_bytes()
    return False


def process_tree(root: int) -> dict[int, str]:
    """The command line of `root` and of every process below it, empty for one that has ended."""
    parents = _parents()
    found, front = set(), {root}
    while front:
        found |= front
        front = {pid for pid, parent in parents.items() if parent in front}
    return {pid: command_line(pid) for pid in found}


def command_line(pid: int) -> str:
    """Empty for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


class ProcessWatch:
    """Waits until processes have ended with all of their threads, also processes that are not our children."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._descriptors: list[int] = []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                self._descriptors.append(os.pidfd_open(pid))

    def wait_for_exit(self, timeout_s: float) -> bool:
        """Whether all have ended, each within `timeout_s`. May be called once."""
        ended = True
        for descriptor in self._descriptors:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            ended &= bool(poll.poll(timeout_s * 1000))
            os.close(descriptor)
        return ended


def _parents() -> dict[int, int]:
    """The parent of every process."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The command's name, in brackets, may hold anything; the parent is the second field after it.
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    return parents


# --- shared memory ----------------------------------------------------------------------------------------------------


def shared_memory_names() -> set[str]:
    """Names in /dev/shm that look like ours. There should be none: our shared memory is anonymous."""
    return {entry.name for entry in Path("/dev/shm").iterdir() if "nixl" in entry.name or "tiers" in entry.name}


def host_rows_in_use(store: TieredStore) -> int:
    """Host rows that are not free: found by a key, pinned, or leaked."""
    used = store.stats()["cpu"]["used_bytes"] / store.coordinator.region.geometry.row_bytes
    assert used.is_integer()
    return int(used)


def reclaim_all_host_rows(store: TieredStore) -> bool:
    """Allocate every host row at once and give all back as failed stores, which evicts whatever the host tier held.
    False if some row could not be had: it is pinned, or has leaked."""
    coordinator, region = store.coordinator, store.coordinator.region
    request = f"reclaim-{next(_serials)}"
    plan = coordinator.prepare_store(request, [f"{request}-{n:04}".encode() for n in range(region.rows)])
    region.mark(np.array(plan.rows), 0, plan.store_seq, False)
    coordinator.complete_store(plan.keys)
    finish(coordinator, request)
    return len(plan.rows) == region.rows
