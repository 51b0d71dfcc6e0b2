"""The quota of one path: all namespaces that were ever stored below it, one capacity, one lock.

Below the path are the lock file and one directory per namespace, named by its digest in hexadecimal; in it one
directory per shard, 0 and up: movers that serve the same namespace at the same time each have a shard of their own. A
running mover holds the lock of its shard, which the kernel releases however the mover ends. The next mover takes the
lowest free shard, and so finds its predecessor's rows. Room is made by deleting shards that no process holds, least
recently used first. Foreign files are counted and never touched.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from nixl_tiers.tiers.base import TierDown
from nixl_tiers.tiers.disk import SLAB_LOCK, FileIdentity
from nixl_tiers.tiers.expiry import has_expired
from nixl_tiers.tiers.folder import Folder, NotOwned

logger = logging.getLogger(__name__)

# Names on disk: part of the format, whatever the code calls these things.
DESCRIPTION: Final = "namespace.json"
_LOCK: Final = ".lock"
_DELETING: Final = ".gone-"  # the prefix of a shard that is being deleted
_REQUEST: Final = ".wanted"  # the last request for room
_JOURNAL: Final = "manifest."
_NAMESPACE: Final = re.compile(r"[0-9a-f]{32}")
_SHARD: Final = re.compile(r"0|[1-9]\d{0,2}")

_REQUEST_S: Final = 30.0  # how long after a request no shard grows beyond its fair share
_MAX_SHARDS: Final = 1000
_ROUNDING_BYTES: Final = 64 << 10  # that a file system adds to an extent by itself (extent trees, directories)


class ShardDir:
    """The directory of a shard, locked by this process. `description`: namespace.json's content, empty if it is new."""

    def __init__(self, folder: Folder, lock: int, description: dict[str, Any]) -> None:
        """Takes over the folder and the descriptor of its lock file."""
        self.folder = folder
        self.path = folder.path
        self.description = description
        self._lock: int | None = lock
        self._identities = (
            FileIdentity(folder.path, os.fstat(folder.descriptor)),
            FileIdentity(folder.path / _LOCK, os.fstat(lock)),
        )

    def problem(self) -> str:
        """Whether the directory, its lock or the description was deleted or replaced, or "". Raises OSError."""
        for identity in self._identities:
            if problem := identity.problem():
                return problem
        path = self.path / DESCRIPTION
        return "" if path.exists() else f"{path} has been deleted"

    def describe(self, description: dict[str, Any]) -> None:
        """Replace namespace.json atomically."""
        self.description = description
        new = f"{DESCRIPTION}.new"
        with os.fdopen(self.folder.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
            json.dump(description, file)
        self.folder.rename(new, self.folder, DESCRIPTION)

    def release(self) -> None:
        """Unlock it for other processes. It counts as used until now."""
        if self._lock is not None:
            with suppress(OSError):
                os.utime(DESCRIPTION, dir_fd=self.folder.descriptor, follow_symlinks=False)
            os.close(self._lock)
            self._lock = None
            self.folder.close()


class SlabQuota:
    """Bytes below one path, within its capacity. Calls may wait for the lock and for deletions: none belongs on the
    mover's loop."""

    def __init__(self, path: Path, capacity_bytes: int) -> None:
        self.path = path
        self.capacity_bytes = capacity_bytes
        self._uid: int | None = None
        self._base: Folder | None = None  # while it is locked
        self.used_bytes = 0
        """Everything below the path when it was last measured; journals count with the most that they may grow to."""

    @contextmanager
    def locked(self) -> Iterator[None]:
        """The lock of the path: no other process acquires, allocates or deletes meanwhile. Not reentrant."""
        with Folder.base(self.path, self._uid) as base:
            self._uid = base.uid
            descriptor = base.open(SLAB_LOCK, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                self._base = base
                yield
            finally:
                self._base = None
                os.close(descriptor)

    def forget_uid(self) -> None:
        """The path may be on another file system now: find out anew which user owns files that are made there."""
        self._uid = None

    @property
    def _locked(self) -> Folder:
        if self._base is None:
            raise RuntimeError("the quota is not locked")
        return self._base

    # --- shards -----------------------------------------------------------------------------------------------------

    def acquire_shard(self, namespace: bytes) -> ShardDir:
        """Lock the lowest free shard of the namespace. Inside `locked`. Raises TierDown if all are in use, NotOwned if
        others can write to it, OSError."""
        base = self._locked
        for leftover in base.names():
            if leftover.startswith(_DELETING) and base.has_folder(leftover):
                with suppress(OSError):
                    base.remove(leftover)
        with base.folder(namespace.hex(), make=True) as home:
            for number in range(_MAX_SHARDS):
                folder = home.folder(str(number), make=True)
                try:
                    lock = _try_lock(folder)
                except BaseException:
                    folder.close()
                    raise
                if lock is not None:
                    break
                folder.close()
            else:
                raise TierDown(f"{home.path} is in use by {_MAX_SHARDS} other movers")
        try:
            description = json.loads(folder.read(DESCRIPTION))
        except (OSError, ValueError):
            description = {}
        return ShardDir(folder, lock, description if isinstance(description, dict) else {})

    def discard(self, shard: ShardDir) -> None:
        """Release a shard that could not be opened; delete it if it is new. Inside `locked`."""
        with suppress(OSError):
            if shard.folder.names() == [_LOCK]:
                shard.folder.unlink(_LOCK)
        shard.release()
        _remove_empty(shard.path)
        _remove_empty(shard.path.parent)

    def make_room(self, need_bytes: int) -> bool:
        """Whether `need_bytes` more fit now, after deleting as many unused shards as that takes. Inside `locked`."""
        self._measure()
        while self.used_bytes + need_bytes + _ROUNDING_BYTES > self.capacity_bytes:
            if not self.delete_oldest():
                return False
        return True

    def delete_oldest(self) -> bool:
        """Delete the least recently used shard that no process holds; False if there is none. Inside `locked`."""
        return any(self._delete(directory) for directory in self._shards())

    def delete_expired(self, max_age_s: float, now_s: float) -> None:
        """Delete every shard that no process holds and that was not written for `max_age_s`. Inside `locked`."""
        for directory in self._shards():
            with suppress(OSError):
                written_ns = max(file.stat().st_mtime_ns for file in directory.iterdir() if file.name != _LOCK)
                if has_expired(_first_seen_ns(directory, written_ns, int(now_s * 1e9)) / 1e9, now_s, max_age_s):
                    self._delete(directory)

    def _delete(self, directory: Path) -> bool:
        """Delete a shard, unless a process holds it."""
        base, home = self._locked, directory.parent
        try:
            with base.folder(home.name) as above, above.folder(directory.name) as folder:
                lock = _try_lock(folder)
                if lock is None:
                    return False
                try:
                    # Renamed first: a crash in the middle leaves an orphan to delete, not half a shard.
                    renamed = f"{_DELETING}{home.name}-{directory.name}"
                    above.rename(directory.name, base, renamed)
                    base.remove(renamed)
                finally:
                    os.close(lock)
        except NotOwned:  # replaced by something foreign
            return False
        _remove_empty(home)
        logger.info("deleted %s, which no process uses", directory)
        self._measure()
        return True

    def _shards(self) -> list[Path]:
        """The directories of all shards of all namespaces, least recently used first, but for those that other users
        made or can write to."""
        aged, base = [], self._locked
        for name in base.names():
            if not _NAMESPACE.fullmatch(name) or not base.has_folder(name):
                continue
            for directory in (self.path / name).iterdir():
                if _SHARD.fullmatch(directory.name) and (directory / _LOCK).exists():
                    try:
                        used_at = (directory / DESCRIPTION).stat().st_mtime_ns
                    except OSError:
                        used_at = 0
                    aged.append((used_at, directory))
        return [directory for _, directory in sorted(aged)]

    def _is_held(self, directory: Path) -> bool:
        with self._locked.folder(directory.parent.name) as home, home.folder(directory.name) as folder:
            lock = _try_lock(folder)
        if lock is not None:
            os.close(lock)
        return lock is None

    # --- fair shares ------------------------------------------------------------------------------------------------

    def request_room(self, directory: Path | None, nbytes: int) -> None:
        """Ask other shards for up to `nbytes`, unless this one has its fair share already. None: a shard that is still
        to be made. Inside `locked`."""
        room = self._fair_share(newcomers=directory is None) - (0 if directory is None else _slab_bytes(directory))
        if room > 0:
            request = {"bytes": min(nbytes, room), "newcomer": directory is None}
            with suppress(OSError), os.fdopen(self._locked.open(_REQUEST, os.O_WRONLY | os.O_CREAT), "w") as file:
                file.truncate()  # not by O_TRUNC: only now it is known to be ours
                json.dump(request, file)

    def last_request_ns(self) -> int:
        """When room was last requested; changes with every request."""
        try:
            return (self.path / _REQUEST).lstat().st_mtime_ns
        except OSError:
            return 0

    def requested_bytes(self, directory: Path) -> int:
        """What this shard has to give of the last request, never below its own fair share. Inside `locked`."""
        try:
            request = json.loads(self._locked.read(_REQUEST))
            nbytes, newcomer = int(request["bytes"]), bool(request["newcomer"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0
        return max(0, min(nbytes, _slab_bytes(directory) - self._fair_share(newcomers=newcomer)))

    def may_grow(self, directory: Path, nbytes: int) -> bool:
        """Whether the shard may take `nbytes` more: up to its fair share while others request room. Inside `locked`."""
        if abs(time.time() - self.last_request_ns() / 1e9) > _REQUEST_S:
            return True
        return _slab_bytes(directory) + nbytes <= self._fair_share(newcomers=False)

    def _fair_share(self, *, newcomers: bool) -> int:
        """Bytes of slabs for each shard in use, if all want as much as they can get."""
        self._measure()
        slab_bytes, in_use = 0, int(newcomers)
        for directory in self._shards():
            slab_bytes += _slab_bytes(directory)  # shards that no process holds are deleted for those in use
            in_use += self._is_held(directory)
        return max(0, self.capacity_bytes - _ROUNDING_BYTES - (self.used_bytes - slab_bytes)) // max(1, in_use)

    def _measure(self) -> None:
        base = self._locked
        self.used_bytes = sum(
            _disk_bytes(entry, ours=bool(_NAMESPACE.fullmatch(entry.name)) and base.has_folder(entry.name))
            for entry in os.scandir(self.path)
        )


def _first_seen_ns(directory: Path, written_ns: int, now_ns: int) -> int:
    """When the shard was last written, or first seen with a time ahead of the clock, which the times of its lock file
    record. Raises OSError."""
    if written_ns <= now_ns:
        return written_ns
    lock = directory / _LOCK
    status = lock.stat()
    if status.st_atime_ns == written_ns and status.st_mtime_ns <= now_ns:
        return status.st_mtime_ns
    os.utime(lock, ns=(written_ns, now_ns))
    return now_ns


def _slab_bytes(directory: Path) -> int:
    total = 0
    for slab in directory.glob("slab-*"):
        with suppress(OSError):
            total += slab.stat().st_size
    return total


def _remove_empty(directory: Path) -> None:
    with suppress(OSError):
        directory.rmdir()


def _try_lock(folder: Folder) -> int | None:
    """Lock a shard: the descriptor of the lock file, or None if another process holds it."""
    descriptor = folder.open(_LOCK, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return None
        raise
    return descriptor


def _disk_bytes(entry: os.DirEntry[str], *, ours: bool = False) -> int:
    """Bytes of a file, or of everything below a directory: blocks or size, whichever is more. `ours`: it is the
    directory of a namespace, with shards in it."""
    try:
        status = entry.stat(follow_symlinks=False)
        taken = status.st_blocks * 512
        if not entry.is_dir(follow_symlinks=False):
            return max(taken, status.st_size)
        inside = list(os.scandir(entry.path))
    except OSError:  # it has gone
        return 0
    return taken + sum((_shard_bytes if ours and _SHARD.fullmatch(each.name) else _disk_bytes)(each) for each in inside)


def _shard_bytes(entry: os.DirEntry[str]) -> int:
    """As `_disk_bytes`, with the most that its journal may grow to."""
    try:
        journal = sum(_disk_bytes(file) for file in os.scandir(entry.path) if file.name.startswith(_JOURNAL))
    except OSError:
        return _disk_bytes(entry)
    return _disk_bytes(entry) + max(0, _max_journal_bytes(Path(entry.path)) - journal)


def _max_journal_bytes(directory: Path) -> int:
    """The most that the shard's journal may grow to, by its description."""
    try:
        return int(json.loads((directory / DESCRIPTION).read_bytes())["journal_bytes"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
