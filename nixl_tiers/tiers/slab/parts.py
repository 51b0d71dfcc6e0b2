"""The parts of a path: `replicas` directories, each with an equal part of the capacity, each held by one mover.

A mover holds a part by a lock (flock) on a file in it, which the kernel releases however the mover ends; the next mover
adopts the rows that it finds there. A part has one directory (shard) for each namespace that was served from it, named
by its digest in hexadecimal.

The lock of the path is for who takes a part, or deletes in one that nobody holds: growth takes none.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from nixl_tiers.tiers.base import TierDown
from nixl_tiers.tiers.disk import SLAB_LOCK, FileIdentity
from nixl_tiers.tiers.folder import Folder, Found

# Names on disk: part of the format.
LOCK: Final = ".lock"
DESCRIPTION: Final = "namespace.json"
PART: Final = re.compile(r"part-(0|[1-9]\d{0,3})")

_HELD_RETRY_S: Final = 2.0  # between two attempts to take a part while all are held
_HOLDERS: Final = 8  # that the sentence names at most
_LOCK_POLL_S: Final = 0.01
_LOOK_S: Final = 1.0  # how long a command waits for the path's lock, to look who holds a part


class Part:
    """A part that this process holds."""

    def __init__(self, base: Folder, number: int) -> None:
        """Takes it, inside `Parts.locked`. Raises TierDown if a process holds it, NotOwned if others can write to it,
        OSError."""
        self.other_holder = b""
        """What another process has written into the lock file since: on Lustre with `localflock` or NFS with `nolock`,
        locks do not reach other machines."""
        with ExitStack() as opened:  # what fails must not hold it
            self.folder = folder = opened.enter_context(base.folder(f"part-{number}", make=True))
            lock = opened.enter_context(lock_file(folder, LOCK))
            if lock is None:  # by a process that does not take the path's lock
                raise TierDown(f"{folder.path} is in use by {_holder(folder.read(LOCK))}", retry_s=_HELD_RETRY_S)
            with suppress(OSError):  # on a full disk the rows must still be served
                os.ftruncate(lock, 0)
                about = {"host": socket.gethostname(), "pid": os.getpid(), "engine": os.getppid()}
                os.pwrite(lock, json.dumps(about).encode(), 0)
            self._lock, self._content = lock, folder.read(LOCK)
            self._identities = (
                FileIdentity(folder.path, os.fstat(folder.descriptor)),
                FileIdentity(folder.path / LOCK, os.fstat(lock)),
            )
            self._opened = opened.pop_all()

    def problem(self) -> str:
        """Whether the directory or its lock was deleted or replaced, or another process holds it too, or "". Raises
        OSError."""
        if problem := next(filter(None, (identity.problem() for identity in self._identities)), ""):
            return problem
        content = self.folder.read(LOCK)
        if not content or not self._content or content == self._content:
            return ""
        self.other_holder = content
        return (
            f"{self.folder.path} has been taken by {_holder(content)}: locks there do not reach all of its machines, "
            "so give each a path of its own, or use layout: files"
        )

    def release(self) -> None:
        """Let another process take it: also one that has lost it to this one, and goes by the name in the lock file."""
        with suppress(OSError):
            if self.folder.read(LOCK) == self._content:
                os.ftruncate(self._lock, 0)
        self._opened.close()


class ShardDir:
    """The directory of a shard in a part that this process holds."""

    def __init__(self, part: Part, name: str) -> None:
        """Raises NotOwned if others can write to it, OSError."""
        self.folder = folder = part.folder.folder(name, make=True)
        self.path = folder.path
        self.description: dict[str, Any] = {}
        """The content of namespace.json; empty if it is new or damaged."""
        with suppress(OSError, ValueError):
            found = json.loads(folder.read(DESCRIPTION))
            self.description = found if isinstance(found, dict) else {}
        self._part = part
        self._identity = FileIdentity(folder.path, os.fstat(folder.descriptor))

    def problem(self) -> str:
        """Whether the directory, the part, its lock or the description was deleted or replaced, or "". Raises
        OSError."""
        path = self.path / DESCRIPTION
        problem = self._part.problem() or self._identity.problem()
        return problem or ("" if path.exists() else f"{path} has been deleted")

    def describe(self, description: dict[str, Any]) -> None:
        """Replace namespace.json atomically."""
        self.description = description
        self.write(DESCRIPTION, json.dumps(description).encode())

    def write(self, name: str, raw: bytes) -> None:
        """Replace a small file atomically. Raises OSError."""
        new = f"{name}.new"
        with os.fdopen(self.folder.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            file.write(raw)
        self.folder.rename(new, self.folder, name)

    def release(self) -> None:
        """It is not served any more, and counts as used until now. The part stays held."""
        with suppress(OSError):
            os.utime(DESCRIPTION, dir_fd=self.folder.descriptor, follow_symlinks=False)
        self.folder.close()


class Parts:
    """The parts of one path, of which this process holds one."""

    def __init__(self, path: Path, replicas: int) -> None:
        self.path = path
        self.replicas = replicas
        self._found: Found | None = None
        self._part: Part | None = None
        self._lost: dict[Path, bytes] = {}
        """By part, who has taken it from this process despite its lock: while the lock file names that one,
        it counts as holding it."""

    @contextmanager
    def locked(self, wait_s: float = math.inf) -> Iterator[None]:
        """The lock of the path: no other process takes a part meanwhile, or deletes in one that nobody holds. Not
        reentrant. Raises TierDown if it cannot be had for `wait_s`."""
        with self.open_base() as base, lock_file(base, SLAB_LOCK, wait_s=wait_s) as lock:
            if lock is None:
                raise TierDown(
                    f"it waits for {self.path / SLAB_LOCK}, which another process has locked for more than "
                    f"{wait_s:.0f} s: has an engine's mover on this path been stopped?",
                    retry_s=_HELD_RETRY_S,
                )
            yield

    def open_base(self) -> Folder:
        base = Folder.base(self.path, self._found)
        self._found = self._found or base.found
        return base

    def forget_path(self) -> None:
        """The path may lead to another directory from now on, and another user own files that are made there."""
        self._found = None

    @property
    def own(self) -> Path | None:
        """The part that this process holds."""
        return None if self._part is None else self._part.folder.path

    def take(self, rank: Callable[[Path], tuple[int, int]]) -> Part:
        """The part that this process holds, or takes now: the free one of the lowest `rank`, which is (0, 0) for one
        that is not there. Inside `locked`. Raises TierDown with the holders if all are held, NotOwned if others can
        write to one, OSError."""
        if self._part is not None:
            return self._part
        free, holders = [], []
        with self.open_base() as base:
            for number in range(self.replicas):
                found = 0, 0
                with suppress(FileNotFoundError), base.folder(f"part-{number}") as part, lock_file(part, LOCK) as lock:
                    named = b""
                    with suppress(OSError):
                        named = part.read(LOCK)
                    if lock is None or (named and named == self._lost.get(part.path)):
                        holders.append(f"part-{number} by {_holder(named)}")
                        continue
                    found = rank(part.path)
                free.append((found, number))
            if not free:
                raise TierDown(
                    f"{self.path} is in use: {', '.join(holders[:_HOLDERS])}; replicas ({self.replicas} here) is how "
                    "many engines may use it at once",
                    retry_s=_HELD_RETRY_S,
                )
            self._part = Part(base, min(free)[1])
        return self._part

    def release(self) -> None:
        """Let another process take the part; its rows stay."""
        part, self._part = self._part, None
        if part is not None:
            if part.other_holder:
                self._lost[part.folder.path] = part.other_holder
            part.release()

    def others(self) -> Iterator[tuple[int, Path]]:
        """The directories of all other parts with their numbers, but for those that other users made or can write to.
        Raises OSError."""
        with self.open_base() as base:
            for name in base.names():
                number, part = part_number(name), self.path / name
                if number is not None and part != self.own and base.has_folder(name) and (part / LOCK).exists():
                    yield number, part


def part_number(name: str) -> int | None:
    """The number of the part whose directory has this name; None: it is none."""
    match = PART.fullmatch(name)
    return int(match[1]) if match else None


def remove_part(directory: Path) -> None:
    """Remove the directory of a part if it has no shard; its lock is held by this process."""
    with suppress(OSError):
        if os.listdir(directory) == [LOCK]:  # noqa: PTH208 - names only
            (directory / LOCK).unlink()
            directory.rmdir()


@contextmanager
def lock_file(
    folder: Folder, name: str, how: int = fcntl.LOCK_EX, flags: int = os.O_RDWR | os.O_CREAT, wait_s: float = 0.0
) -> Iterator[int | None]:
    """Lock a file: its descriptor, or None if another process has had it locked for `wait_s`. Raises OSError."""
    deadline = time.monotonic() + wait_s
    with folder.opened(name, flags) as lock:
        while not (held := _try_lock(lock, how)) and time.monotonic() < deadline:
            time.sleep(_LOCK_POLL_S)
        yield lock if held else None


def _try_lock(lock: int, how: int) -> bool:
    with suppress(BlockingIOError, PermissionError):
        fcntl.flock(lock, how | fcntl.LOCK_NB)
        return True
    return False


def holder_now(base: Folder, part: Folder) -> str:
    """Which process holds a part of the path, for people; "": none. For a command. Raises OSError.

    The part's lock is tried while the path's lock is held, in shared mode: no mover looks for a free part meanwhile, so
    none takes this process for the holder of one. NFS locks what is open for reading only in shared mode.
    """
    with lock_file(base, SLAB_LOCK, fcntl.LOCK_SH, os.O_RDONLY, _LOOK_S) as path_lock:
        if path_lock is None:
            return f"an unknown process ({base.path / SLAB_LOCK} is locked)"
        try:
            with lock_file(part, LOCK, fcntl.LOCK_SH, os.O_RDONLY) as lock:
                return _holder(part.read(LOCK)) if lock is None else ""
        except FileNotFoundError:
            return ""
        except OSError:  # nothing can be locked: whom the file names holds it
            return _holder(part.read(LOCK), living=True)


def _holder(named: bytes, *, living: bool = False) -> str:
    """Whom a part's lock file names, for people. `living`: "" unless that is another process here that lives."""
    try:
        about = json.loads(named)
        pid, engine, host = int(about["pid"]), int(about["engine"]), str(about["host"])
    except (ValueError, KeyError, TypeError):
        return "" if living else "another process"
    if living and (host != socket.gethostname() or pid == os.getpid() or not Path(f"/proc/{pid}").exists()):
        return ""
    return f"process {pid} (engine {engine}) on {host[:64]}"
