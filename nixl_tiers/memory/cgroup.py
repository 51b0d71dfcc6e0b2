"""How much memory is available: what the memory cgroups (v1 and v2) leave, and what the machine has.

A region's pages are shared memory: they are charged to the cgroup of the process that touches them first, and exceeding
the limit kills a process instead of failing a call. So it is checked before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_UNLIMITED_BYTES = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63


@dataclass(frozen=True)
class Room:
    """One limit on memory: whose it is, and how many bytes it still leaves."""

    whose: str
    free_bytes: int
    limit_bytes: int | None = None


def rooms(root: Path = Path("/")) -> list[Room]:
    """Every bound on this process: its memory cgroup, each parent of it, and the machine. A limit that cannot be read
    is left out.

    `root`: the file system to read proc and sys from.
    """
    return [*_cgroups(root), *_machine(root)]


def shortage(need_bytes: int, bounds: Iterable[Room]) -> str | None:
    """One sentence that names the bound that `need_bytes` does not fit in, or None."""
    tightest = min(bounds, key=lambda room: room.free_bytes, default=None)
    if tightest is None or need_bytes <= tightest.free_bytes:
        return None
    limit = f" of its limit of {gib(tightest.limit_bytes)}" if tightest.limit_bytes is not None else ""
    return f"the region needs {gib(need_bytes)}, but {tightest.whose} has {gib(tightest.free_bytes)} left{limit}"


def gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.2f} GiB"


def _machine(root: Path) -> Iterator[Room]:
    for name, free_bytes in _pairs(root / "proc/meminfo", scale=1024):
        if name == "MemAvailable:":
            yield Room("the machine", free_bytes)


def levels(root: Path, controller: str) -> Iterator[tuple[int, Path, PurePosixPath]]:
    """(cgroup version, where it is mounted, path below) of this process's cgroup with `controller`, and of each
    parent."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            version, mount = 2, root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            version, mount = 1, root / "sys/fs/cgroup" / controller
        else:
            continue
        # Inside a container `path` may be the host's name of the cgroup that is mounted here as the root: no such
        # folders then, but the last level is the root itself.
        inner = PurePosixPath(path.lstrip("/"))
        for level in (inner, *inner.parents):
            yield version, mount, level


def limit_of(folder: Path, limit: str, usage: str) -> tuple[int, int] | None:
    """(limit, what is used) in bytes out of two files in `folder`; None without a limit."""
    limit_bytes, used_bytes = number(folder / limit), number(folder / usage)
    if limit_bytes is None or used_bytes is None or limit_bytes >= _UNLIMITED_BYTES:
        return None
    return limit_bytes, used_bytes


def number(file: Path) -> int | None:
    """The whole number in a file; None if there is none."""
    text = next(iter(_lines(file)), "")
    return int(text) if text.isdigit() else None


def _cgroups(root: Path) -> Iterator[Room]:
    v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
    v2 = ("memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable"))
    for version, mount, level in levels(root, "memory"):
        limit, usage, reclaimable = v2 if version == 2 else v1
        bound = limit_of(mount / level, limit, usage)
        if bound is None:
            continue
        limit_bytes, used_bytes = bound
        # Clean file cache is counted as used and reclaimed on demand. Shared memory is not part of these two lists.
        used_bytes -= sum(count for name, count in _pairs(mount / level / "memory.stat") if name in reclaimable)
        free_bytes = max(0, limit_bytes - max(0, used_bytes))
        yield Room(f"the memory cgroup {PurePosixPath('/') / level}", free_bytes, limit_bytes)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def _pairs(file: Path, scale: int = 1) -> Iterator[tuple[str, int]]:
    for line in _lines(file):
        name, count, *_ = (*line.split(), "", "")
        if count.isdigit():
            yield name, int(count) * scale
