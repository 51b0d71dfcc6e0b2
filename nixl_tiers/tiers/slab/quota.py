"""The budget of one path: every namespace that ever lived below it, one capacity, one lock.

Below `path` stand `.ledger` (the lock) and one directory a namespace, named by its digest in hexadecimal; in it one
directory a replica, 0 and up: movers that serve the same namespace at the same time each have their own rows. A live
mover holds its replica's `.lock`; the kernel lets go of it however the mover ends. Whoever comes next takes the lowest
replica that nobody holds, and so finds the rows of a predecessor. Room is made by forgetting replicas that nobody
holds, the longest unused first. What is not ours is counted, and never touched.
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
from nixl_tiers.tiers.folder import Folder, NotOurs

logger = logging.getLogger(__name__)

ABOUT: Final = "namespace.json"
_LOCK: Final = ".lock"
_GONE: Final = ".gone-"
_WANTED: Final = ".wanted"
_ASKED_S: Final = 30.0  # for how long who asked for room goes before who has more than its part
_NAMESPACE: Final = re.compile(r"[0-9a-f]{32}")
_REPLICA: Final = re.compile(r"0|[1-9]\d{0,2}")
_MAX_REPLICAS: Final = 1000
_ROUNDING_BYTES: Final = 64 << 10  # what a file system adds to an extent of its own accord (extent trees, directories)


class Claim:
    """A replica's directory that this process holds. `about` is what namespace.json says, empty if it is new."""

    def __init__(self, folder: Folder, descriptor: int, about: dict[str, Any]) -> None:
        """Takes over the folder and the descriptor of its lock."""
        self.folder = folder
        self.directory = folder.path
        self.about = about
        self._descriptor: int | None = descriptor
        self._marks = (
            FileIdentity(folder.path, os.fstat(folder.descriptor)),
            FileIdentity(folder.path / _LOCK, os.fstat(descriptor)),
        )

    def problem(self) -> str:
        """What somebody has done to the directory, to our lock or to the description, or "". Raises OSError."""
        for mark in self._marks:
            if problem := mark.problem():
                return problem
        about = self.directory / ABOUT
        return "" if about.exists() else f"{about} has been deleted"

    def describe(self, about: dict[str, Any]) -> None:
        """Replace namespace.json, whole or not at all."""
        self.about = about
        fresh = f"{ABOUT}.new"
        with os.fdopen(self.folder.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
            json.dump(about, file)
        self.folder.rename(fresh, self.folder, ABOUT)

    def release(self) -> None:
        """Let another process have it; its age counts from now."""
        if self._descriptor is not None:
            with suppress(OSError):
                os.utime(ABOUT, dir_fd=self.folder.descriptor, follow_symlinks=False)
            os.close(self._descriptor)
            self._descriptor = None
            self.folder.close()


class SlabQuota:
    """The account of one path. Calls may wait for the lock and for deletions: not for the loop that moves rows."""

    def __init__(self, path: Path, capacity_bytes: int) -> None:
        self.path = path
        self.capacity_bytes = capacity_bytes
        self._uid: int | None = None
        self._base: Folder | None = None  # while it is locked
        self.used_bytes = 0
        """Everything below path when it was last looked at; journals count with all that they may grow to."""

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else claims, allocates or forgets meanwhile, in any process. Not reentrant."""
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

    def forget_user(self) -> None:
        """The path may be on another file system now: find out anew whom files belong to that are made there."""
        self._uid = None

    @property
    def _locked(self) -> Folder:
        if self._base is None:
            raise RuntimeError("the ledger is not locked")
        return self._base

    def claim(self, namespace: bytes) -> Claim:
        """Hold the namespace's lowest replica that nobody holds, for as long as the Claim is not released. Inside
        `locked`. Raises TierDown if all that there may be are held, NotOurs if others can write to it, OSError."""
        base = self._locked
        for leftover in base.names():
            if leftover.startswith(_GONE) and base.has_folder(leftover):
                with suppress(OSError):
                    base.remove(leftover)
        with base.folder(namespace.hex(), make=True) as home:
            for number in range(_MAX_REPLICAS):
                folder = home.folder(str(number), make=True)
                try:
                    descriptor = _hold(folder)
                except BaseException:
                    folder.close()
                    raise
                if descriptor is not None:
                    break
                folder.close()
            else:
                raise TierDown(f"{home.path} is in use by {_MAX_REPLICAS} other movers")
        try:
            about = json.loads(folder.read(ABOUT))
        except (OSError, ValueError):
            about = {}
        return Claim(folder, descriptor, about if isinstance(about, dict) else {})

    def abandon(self, claim: Claim) -> None:
        """Let go of a replica that could not be served; a new one leaves nothing behind. Inside `locked`."""
        with suppress(OSError):
            if claim.folder.names() == [_LOCK]:
                claim.folder.unlink(_LOCK)
        claim.release()
        _remove_empty(claim.directory)
        _remove_empty(claim.directory.parent)

    def make_room(self, need_bytes: int) -> bool:
        """Whether `need_bytes` more fit now, after forgetting unheld replicas as far as it takes. Inside `locked`."""
        self._look()
        while self.used_bytes + need_bytes + _ROUNDING_BYTES > self.capacity_bytes:
            if not self.forget_oldest():
                return False
        return True

    def forget_oldest(self) -> bool:
        """Delete the replica that has been unused longest; False if there is none that nobody holds."""
        return any(self._forget(directory) for directory in self._replicas())

    def _forget(self, directory: Path) -> bool:
        """Delete a replica, unless somebody holds it."""
        base, home = self._locked, directory.parent
        try:
            with base.folder(home.name) as above, above.folder(directory.name) as folder:
                descriptor = _hold(folder)
                if descriptor is None:
                    return False
                try:
                    # Renamed first: a crash in the middle leaves rubbish to sweep, not half a replica.
                    gone = f"{_GONE}{home.name}-{directory.name}"
                    above.rename(directory.name, base, gone)
                    base.remove(gone)
                finally:
                    os.close(descriptor)
        except NotOurs:  # it has been exchanged for something that is not ours
            return False
        _remove_empty(home)
        logger.info("forgot %s, which nobody uses", directory)
        self._look()
        return True

    def ask(self, directory: Path | None, nbytes: int) -> None:
        """Say that the replica could use `nbytes` more, unless it has its part already; None: one that is to come.
        Inside `locked`."""
        share = self._part(newcomers=directory is None) - (0 if directory is None else _slab_bytes(directory))
        if share > 0:
            wanted = {"bytes": min(nbytes, share), "newcomer": directory is None}
            with suppress(OSError), os.fdopen(self._locked.open(_WANTED, os.O_WRONLY | os.O_CREAT), "w") as file:
                file.truncate()  # not at once: only now it is known to be ours
                json.dump(wanted, file)

    def asked_ns(self) -> int:
        """When somebody last asked for room; another number whenever somebody does."""
        try:
            return (self.path / _WANTED).lstat().st_mtime_ns
        except OSError:
            return 0

    def asked_bytes(self, directory: Path) -> int:
        """What this replica should give of what was asked for: nothing that it would be short of. Inside `locked`."""
        try:
            wanted = json.loads(self._locked.read(_WANTED))
            nbytes, newcomer = int(wanted["bytes"]), bool(wanted["newcomer"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0
        return max(0, min(nbytes, _slab_bytes(directory) - self._part(newcomers=newcomer)))

    def may_take(self, directory: Path, nbytes: int) -> bool:
        """Whether the replica may have `nbytes` more: while others ask for room, only up to its part. Inside
        `locked`."""
        if abs(time.time() - self.asked_ns() / 1e9) > _ASKED_S:
            return True
        return _slab_bytes(directory) + nbytes <= self._part(newcomers=False)

    def _part(self, *, newcomers: bool) -> int:
        """What each live replica may have in slabs while others want room too, in bytes."""
        self._look()
        taken, live = 0, int(newcomers)
        for directory in self._replicas():
            taken += _slab_bytes(directory)  # what nobody holds makes way
            live += self._is_held(directory)
        return max(0, self.capacity_bytes - _ROUNDING_BYTES - (self.used_bytes - taken)) // max(1, live)

    def _is_held(self, directory: Path) -> bool:
        with self._locked.folder(directory.parent.name) as home, home.folder(directory.name) as folder:
            descriptor = _hold(folder)
        if descriptor is not None:
            os.close(descriptor)
        return descriptor is None

    def forget_expired(self, max_age_s: float, now_s: float) -> None:
        """Delete every replica that nobody holds and in which nothing has been written for so long. Inside `locked`."""
        for directory in self._replicas():
            with suppress(OSError):
                written_ns = max(file.stat().st_mtime_ns for file in directory.iterdir() if file.name != _LOCK)
                if has_expired(_seen_ns(directory, written_ns, int(now_s * 1e9)) / 1e9, now_s, max_age_s):
                    self._forget(directory)

    def _look(self) -> None:
        base = self._locked
        self.used_bytes = sum(
            _weigh(entry, ours=bool(_NAMESPACE.fullmatch(entry.name)) and base.has_folder(entry.name))
            for entry in os.scandir(self.path)
        )

    def _replicas(self) -> list[Path]:
        """The directory of every replica of every namespace, the longest unused first. Not those that others can write
        to, or have made: they are not ours."""
        aged, base = [], self._locked
        for name in base.names():
            if not _NAMESPACE.fullmatch(name) or not base.has_folder(name):
                continue
            for directory in (self.path / name).iterdir():
                if _REPLICA.fullmatch(directory.name) and (directory / _LOCK).exists():
                    try:
                        used_at = (directory / ABOUT).stat().st_mtime_ns
                    except OSError:
                        used_at = 0
                    aged.append((used_at, directory))
        return [directory for _, directory in sorted(aged)]


def _seen_ns(directory: Path, written_ns: int, now_ns: int) -> int:
    """When the replica was last written, or first seen to be ahead of the clock: its lock's times keep that. Raises
    OSError."""
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


def _hold(folder: Folder) -> int | None:
    """A descriptor that locks the replica, or None if somebody else has it."""
    descriptor = folder.open(_LOCK, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return None
        raise
    return descriptor


def _weigh(entry: os.DirEntry[str], *, ours: bool = False) -> int:
    """Bytes of a file, or of everything below a directory: what is taken or, where that is more, promised. `ours`: it
    is a namespace's directory, and not to be mistrusted."""
    try:
        status = entry.stat(follow_symlinks=False)
        taken = status.st_blocks * 512
        if not entry.is_dir(follow_symlinks=False):
            return max(taken, status.st_size)
        inside = list(os.scandir(entry.path))
    except OSError:  # it went away
        return 0
    return taken + sum((_weigh_replica if ours and _REPLICA.fullmatch(each.name) else _weigh)(each) for each in inside)


def _weigh_replica(entry: os.DirEntry[str]) -> int:
    """As `_weigh`, with all that its journal may grow to."""
    try:
        journal = sum(_weigh(file) for file in os.scandir(entry.path) if file.name.startswith("manifest."))
    except OSError:
        return _weigh(entry)
    return _weigh(entry) + max(0, _promised(Path(entry.path)) - journal)


def _promised(directory: Path) -> int:
    """What the replica's journal may grow to, in bytes."""
    try:
        return int(json.loads((directory / ABOUT).read_bytes())["journal_bytes"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
