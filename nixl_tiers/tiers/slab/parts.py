"""The parts of a path: `replicas` directories, each with an equal part of the capacity, each held by one mover.

A mover holds a part by a lock (flock) on a file in it, which the kernel releases however the mover ends; the next mover
adopts the rows that it finds there. A part has a directory for each namespace that was served from it.

Parts are taken inside the lock of the path (`SlabQuota.locked`): no other process takes one at the same time.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nixl_tiers.base.chunk import NAMESPACE_NAME
from nixl_tiers.tiers.base import TierDown
from nixl_tiers.tiers.disk import SLAB_LOCK, FileIdentity
from nixl_tiers.tiers.folder import Folder
from nixl_tiers.tiers.slab.shards import used_ns

# Names on disk: part of the format.
LOCK: Final = ".lock"
_PART: Final = re.compile(r"part-(0|[1-9]\d{0,3})")
DELETING: Final = re.compile(rf"\.gone-(?P<part>{_PART.pattern})-(?P<namespace>{NAMESPACE_NAME.pattern})")
"""A shard that is being deleted: see `deleting_name`."""

HELD_RETRY_S: Final = 2.0  # between two attempts to take a part while all are held
_HOLDERS: Final = 8  # that the sentence names at most
_LOCK_TRIES: Final = 50  # of a command, to look who holds a part
_LOCK_PAUSE_S: Final = 0.02


class Part:
    """A part that this process holds."""

    def __init__(self, number: int, folder: Folder, lock: int) -> None:
        """Takes over the folder and the descriptor of its lock file. Raises OSError, without either."""
        self.number = number
        self.folder = folder
        self._lock = lock
        self.other_holder = b""
        """The content of the lock file if another process has written it since: its lock does not exclude ours, as on
        Lustre with `localflock` or NFS with `nolock`, where locks do not reach other machines."""
        self._content = b""
        try:
            self._content = _read_lock(folder)
            self._identities = (
                FileIdentity(folder.path, os.fstat(folder.descriptor)),
                FileIdentity(folder.path / LOCK, os.fstat(lock)),
            )
        except BaseException:
            self.release()  # else this process would hold it for ever
            raise

    def problem(self) -> str:
        """Whether the directory or its lock was deleted or replaced, or another process holds it too, or "". Raises
        OSError."""
        if problem := next(filter(None, (identity.problem() for identity in self._identities)), ""):
            return problem
        content = _read_lock(self.folder)
        if not content or not self._content or content == self._content:
            return ""
        self.other_holder = content
        return (
            f"{self.folder.path} has been taken by {holder_of(content)}: locks there do not reach all of its machines, "
            "so give each a path of its own, or use layout: files"
        )

    def release(self) -> None:
        """Let another process take it: also one that has lost it to this one, and goes by the name in the lock file."""
        with suppress(OSError):
            if _read_lock(self.folder) == self._content:
                os.ftruncate(self._lock, 0)
        os.close(self._lock)
        self.folder.close()


@dataclass(frozen=True)
class FreePart:
    """A part that no process holds, as it is seen by a mover that needs one."""

    number: int
    own_bytes: int  # slabs of the mover's namespace
    used_ns: int  # when it was last used, in ns since the epoch; 0: it is empty


def preferred(free: Sequence[FreePart]) -> FreePart:
    """The one with most rows of the mover's namespace; else an empty one; else the one that was used longest ago."""
    return min(free, key=lambda part: (-part.own_bytes, part.used_ns, part.number))


def claim(base: Folder, replicas: int, namespace: bytes, lost: Mapping[int, bytes]) -> Part:
    """Take a free part. `base`: the path. `lost`: by number of a part, who has taken it from this process despite
    its lock: while the lock file names that one, it counts as holding it. Raises TierDown with the holders if all
    are held, NotOwned if others can write to one, OSError."""
    free, holders = [], []
    for number in range(replicas):
        try:
            folder = base.folder(part_name(number))
        except FileNotFoundError:
            free.append(FreePart(number, 0, 0))
            continue
        with folder:
            lock = try_lock(folder)
            if lock is None:
                holders.append(f"{part_name(number)} by {_holder(folder)}")
                continue
            os.close(lock)
            if number in lost and _read_lock(folder) == lost[number]:
                holders.append(f"{part_name(number)} by {holder_of(lost[number])}")
            else:
                free.append(_free_part(number, folder.path, namespace))
    if not free:
        more = f" and {len(holders) - _HOLDERS} more" if len(holders) > _HOLDERS else ""
        raise TierDown(
            f"{base.path} is in use: {', '.join(holders[:_HOLDERS])}{more}; replicas ({replicas} here) is how many "
            "engines may use it at once",
            retry_s=HELD_RETRY_S,
        )
    number = preferred(free).number
    folder = base.folder(part_name(number), make=True)
    try:
        lock = try_lock(folder)
        if lock is None:  # by a process that does not take the path's lock
            raise TierDown(f"{folder.path} is in use by {_holder(folder)}", retry_s=HELD_RETRY_S)
    except BaseException:
        folder.close()
        raise
    with suppress(OSError):  # on a full disk the rows must still be served
        os.ftruncate(lock, 0)
        about = {"host": socket.gethostname(), "pid": os.getpid(), "engine": os.getppid()}
        os.pwrite(lock, json.dumps(about).encode(), 0)
    return Part(number, folder, lock)


def _read_lock(folder: Folder) -> bytes:
    try:
        return folder.read(LOCK)
    except FileNotFoundError:
        return b""


def _living_holder(folder: Folder) -> str:
    """Who holds a part by its lock file, if that is a process of this machine that lives; else ""."""
    raw = folder.read(LOCK)
    try:
        about = json.loads(raw)
        if about["host"] != socket.gethostname() or int(about["pid"]) == os.getpid():
            return ""
        os.kill(int(about["pid"]), 0)
    except PermissionError:  # of another user
        pass
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return ""
    return holder_of(raw)


def deleting_name(shard: Path) -> str:
    """What a shard is renamed to, in the tier's path, before it is deleted."""
    return f".gone-{shard.parent.name}-{shard.name}"


def part_name(number: int) -> str:
    return f"part-{number}"


def part_number(name: str) -> int | None:
    """The number of the part whose directory has this name; None: it is none."""
    match = _PART.fullmatch(name)
    return int(match[1]) if match else None


def try_lock(folder: Folder) -> int | None:
    """Lock a part: the descriptor of the lock file, or None if another process holds it."""
    descriptor = folder.open(LOCK, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return None
        raise
    return descriptor


def _free_part(number: int, path: Path, namespace: bytes) -> FreePart:
    shards = [shard for shard in path.iterdir() if NAMESPACE_NAME.fullmatch(shard.name)]
    own_bytes = 0
    for slab in (path / namespace.hex()).glob("slab-*"):
        with suppress(OSError):
            own_bytes += slab.lstat().st_size
    return FreePart(number, own_bytes, max((used_ns(shard) or 1 for shard in shards), default=0))


def _holder(folder: Folder) -> str:
    """Who holds a part, by its lock file: for people."""
    try:
        return holder_of(folder.read(LOCK))
    except OSError:
        return holder_of(b"")


def holder_now(base: Folder, part: Folder) -> str:
    """Which process holds a part of the path, for people; "": none. For a command. Raises OSError.

    The part's lock is tried while the path's lock is held, in shared mode: no mover looks for a free part meanwhile, so
    none takes this process for the holder of one.
    """
    with os.fdopen(base.open(SLAB_LOCK, os.O_RDONLY)) as path_lock:
        for _ in range(_LOCK_TRIES):
            with suppress(BlockingIOError):
                fcntl.flock(path_lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return _locked_by(part)
            time.sleep(_LOCK_PAUSE_S)
    return f"an unknown process ({base.path / SLAB_LOCK} is locked)"


def _locked_by(part: Folder) -> str:
    """`holder_now`. Where nothing can be locked, a process holds it that its lock file names and that lives on this
    machine."""
    try:
        lock = part.open(LOCK, os.O_RDONLY)
    except FileNotFoundError:
        return ""
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # NFS locks what is open for reading only in shared mode
    except BlockingIOError:
        return _holder(part)
    except OSError:
        return _living_holder(part)
    finally:
        os.close(lock)
    return ""


def holder_of(raw: bytes) -> str:
    """Who holds a part, by the content of its lock file: for people."""
    try:
        about = json.loads(raw)
        return f"process {int(about['pid'])} (engine {int(about['engine'])}) on {str(about['host'])[:64]}"
    except (ValueError, KeyError, TypeError):
        return "another process"
