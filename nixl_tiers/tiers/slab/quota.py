"""The quota of one path: everything below it, of all namespaces that were ever stored there, one capacity, one lock.

Below the path are the lock file and the parts (`parts.py`), each with its share of the capacity; in a part is one
directory (shard) per namespace, named by its digest in hexadecimal. A mover holds one part and serves one shard of it.
Room is made by deleting shards that no process serves. Foreign files are counted and never touched.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from nixl_tiers.base.chunk import NAMESPACE_NAME
from nixl_tiers.tiers.base import TierDown, has_expired
from nixl_tiers.tiers.disk import SLAB_LOCK, FileIdentity, FreeSpace, describe
from nixl_tiers.tiers.folder import Folder, ForeignTrees, Found, NotOwned, tree_bytes
from nixl_tiers.tiers.manifests import read_manifest
from nixl_tiers.tiers.slab.parts import (
    DELETING,
    DESCRIPTION,
    FIRST_SEEN,
    HELD_RETRY_S,
    LOCK,
    SHARD,
    Part,
    claim,
    deleting_name,
    is_shard,
    part_number,
    try_lock,
    used_ns,
    written_ns,
)

logger = logging.getLogger(__name__)

# Names on disk: part of the format, whatever the code calls these things.
_JOURNAL: Final = "manifest."
_SLAB: Final = "slab-"

_LOCK_POLL_S: Final = 0.01
_ROUNDING_BYTES: Final = 64 << 10  # that a file system adds to an extent by itself (extent trees, directories)


class ShardDir:
    """The directory of a shard in a part that this process holds. `description`: namespace.json's content, empty if it
    is new."""

    def __init__(self, part: Part, folder: Folder, description: dict[str, Any]) -> None:
        """Takes over the folder."""
        self.folder = folder
        self.path = folder.path
        self.description = description
        self._part = part
        self._identity = FileIdentity(folder.path, os.fstat(folder.descriptor))
        self._released = False

    def problem(self) -> str:
        """Whether the directory, the part, its lock or the description was deleted or replaced, or "". Raises
        OSError."""
        if problem := self._part.problem() or self._identity.problem():
            return problem
        path = self.path / DESCRIPTION
        return "" if path.exists() else f"{path} has been deleted"

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
        if not self._released:
            self._released = True
            with suppress(OSError):
                os.utime(DESCRIPTION, dir_fd=self.folder.descriptor, follow_symlinks=False)
            self.folder.close()


class SlabQuota:
    """Bytes below one path, within its capacity. Calls may wait for the lock and for deletions: none belongs on the
    mover's loop."""

    def __init__(self, path: Path, capacity_bytes: int, replicas: int = 1, free: FreeSpace | None = None) -> None:
        """`replicas`: into how many parts the path is divided. `free`: what must stay free on the file system."""
        self.path = path
        self.capacity_bytes = capacity_bytes
        self.replicas = replicas
        self._free = free
        self._foreign = ForeignTrees()
        self._found: Found | None = None
        self._base: Folder | None = None  # while it is locked
        self._part: Part | None = None
        self._lost: dict[int, bytes] = {}  # see `claim`
        self._serving = ""  # name of the shard in the part that this process serves
        self._part_used_bytes = 0
        self._unwritten = 0  # bytes that the journal of this shard may still grow by: the file system knows of none
        self.used_bytes = 0
        """Everything below the path when it was last measured; journals count with the most that they may grow to."""

    @contextmanager
    def locked(self, wait_s: float = math.inf) -> Iterator[None]:
        """The lock of the path: no other process acquires, allocates or deletes meanwhile. Not reentrant. Raises
        TierDown if it cannot be had for `wait_s`."""
        with Folder.base(self.path, self._found) as base:
            self._found = self._found or base.found
            descriptor = base.open(SLAB_LOCK, os.O_RDWR | os.O_CREAT)
            try:
                self._lock(descriptor, wait_s)
                self._base = base
                yield
            finally:
                self._base = None
                os.close(descriptor)

    def _lock(self, descriptor: int, wait_s: float) -> None:
        if wait_s == math.inf:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            return
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise TierDown(
                        f"it waits for {self.path / SLAB_LOCK}, which another process has locked for more than "
                        f"{wait_s:.0f} s: has an engine's mover on this path been stopped?",
                        retry_s=HELD_RETRY_S,
                    ) from None
            time.sleep(_LOCK_POLL_S)

    def forget_path(self) -> None:
        """The path may lead to another directory from now on, and another user own files that are made there."""
        self._found = None

    @property
    def part_bytes(self) -> int:
        """The capacity of one part."""
        return self.capacity_bytes // self.replicas

    @property
    def _locked(self) -> Folder:
        if self._base is None:
            raise RuntimeError("the quota is not locked")
        return self._base

    # --- shards -----------------------------------------------------------------------------------------------------

    def acquire_shard(self, namespace: bytes) -> ShardDir:
        """The shard of the namespace in the part that this process holds, or takes now. Inside `locked`. Raises
        TierDown if all parts are held, NotOwned if others can write to it, OSError."""
        base = self._locked
        for leftover in filter(DELETING.fullmatch, base.names()):
            if base.has_folder(leftover):
                with suppress(OSError):
                    self.finish_deletion(leftover)
        if self._part is None:
            self._part = claim(base, self.replicas, namespace, self._lost)
        self._serving = namespace.hex()
        folder = self._part.folder.folder(self._serving, make=True)
        try:
            description = json.loads(folder.read(DESCRIPTION))
        except (OSError, ValueError):
            description = {}
        return ShardDir(self._part, folder, description if isinstance(description, dict) else {})

    def discard(self, shard: ShardDir) -> None:
        """Release a shard that could not be opened, and its part; delete them if they are empty. Inside `locked`."""
        shard.release()
        part = shard.path.parent
        _remove_empty(shard.path)
        _remove_part(part)
        self.release()

    def release(self) -> None:
        """Let another process take the part; its rows stay."""
        part, self._part, self._serving = self._part, None, ""
        if part is not None:
            if part.other_holder:
                self._lost[part.number] = part.other_holder
            part.release()

    def make_room(self, need_bytes: int) -> str:
        """Why `need_bytes` more do not fit, as a sentence; "" if they do, after deleting as many shards that no process
        serves as that takes. Inside `locked`."""
        try:
            return self._make_room(need_bytes)
        except OSError as error:  # what cannot be measured may have filled the path
            return f"no room can be made in {self.path} ({describe(error)})"

    def _make_room(self, need_bytes: int) -> str:
        self._measure()
        if self._free is not None:
            self._free.measure_again()  # other processes have allocated since, each by a measurement of its own
        while True:
            need = need_bytes + _ROUNDING_BYTES
            part_is_full = self._part_used_bytes + need > self.part_bytes
            if part_is_full or self.used_bytes + need > self.capacity_bytes:
                problem = f"{self.path} is full: other engines and foreign files leave no room below its capacity"
            elif self._free is None or not (problem := self._free.lacks(need_bytes and need_bytes + self._unwritten)):
                return ""
            if not self.delete_oldest(own_part=part_is_full):
                return problem

    def fits(self, need_bytes: int) -> bool:
        """Whether there is room for so many bytes in the part that this process holds, without deleting anything.
        Inside `locked`. Raises OSError."""
        self._measure()
        part_fits = self._part_used_bytes + need_bytes <= self.part_bytes
        spare = self._free is None or self._free.spare_bytes >= need_bytes
        return part_fits and spare and self.used_bytes + need_bytes <= self.capacity_bytes

    def delete_oldest(self, *, own_part: bool = False) -> bool:
        """Delete one shard that no process serves, of any part or of the own one; False if there is none. Inside
        `locked`. First those of parts that are no more, then the least recently used; last those of the same namespace
        in other parts, which another replica may soon take."""
        for directory in self._shards():
            if own_part and (self._part is None or directory.parent != self._part.folder.path):
                continue
            with suppress(NotOwned):
                if self.delete_shard(directory):
                    return True
        return False

    def delete_expired(self, max_age_s: float, now_s: float) -> None:
        """Delete every shard that no process serves and that was not written for `max_age_s`. Inside `locked`."""
        for directory in self._shards():
            with suppress(OSError):
                first_seen_ns = _first_seen_ns(directory, written_ns(directory), int(now_s * 1e9))
                if has_expired(first_seen_ns / 1e9, now_s, max_age_s):
                    self.delete_shard(directory)

    def delete_shard(self, directory: Path) -> bool:
        """Delete a shard, unless a process serves it. Inside `locked`. Raises NotOwned if others can write to it,
        OSError."""
        base, part = self._locked, directory.parent
        own = self._part is not None and part == self._part.folder.path
        if own and directory.name == self._serving:
            return False
        with base.folder(part.name) as above:
            lock = None if own else try_lock(above)
            if lock is None and not own:
                return False
            try:
                above.folder(directory.name).close()  # raises if it is foreign
                # Renamed first: a crash in the middle leaves an orphan to delete, not half a shard.
                renamed = deleting_name(directory)
                above.rename(directory.name, base, renamed)
                self.finish_deletion(renamed)
                if not own:
                    _remove_part(part)
            finally:
                if lock is not None:
                    os.close(lock)
        logger.info("deleted %s, which no process serves", directory)
        self._measure()
        if self._free is not None:
            self._free.measure_again()
        return True

    def finish_deletion(self, renamed: str) -> None:
        """Delete a shard that was renamed for it. Foreign things in it go back to where they were. Inside `locked`.
        Raises NotOwned, OSError."""
        base = self._locked
        with base.folder(renamed) as folder:
            folder.unlink_matching(SHARD)
        try:
            base.rmdir(renamed)
        except OSError as error:
            found = DELETING.fullmatch(renamed)
            if found is None or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            with base.folder(found["part"], make=True) as part:
                base.rename(renamed, part, found["namespace"])
                path = part.path / found["namespace"]
            logger.warning("%s: the shard was deleted, and foreign files in it stay", path)

    def other_bytes(self) -> Counter[str]:
        """What the slabs of each namespace take that is not served. Inside `locked`. Raises OSError."""
        nbytes: Counter[str] = Counter()
        for directory in self._shards():
            if directory.name != self._serving:
                slabs = (file for file in os.scandir(directory) if file.name.startswith(_SLAB))
                nbytes[directory.name] += sum(tree_bytes(file.path) for file in slabs)
        return nbytes

    def manifest_of(self, namespace: str) -> bytes | None:
        """Of the shard of this namespace that was used last. Inside `locked`. Raises OSError."""
        for directory in reversed(self._shards()):
            if directory.name == namespace:
                with self._locked.folder(directory.parent.name) as part, part.folder(namespace) as folder:
                    return read_manifest(folder)
        return None

    def _shards(self) -> list[Path]:
        """The directories of all shards of all parts, the first to be deleted first, but for those in parts that other
        users made or can write to."""
        ranked, base = [], self._locked
        for name in base.names():
            number = part_number(name)
            if number is None or not base.has_folder(name) or not (self.path / name / LOCK).exists():
                continue
            for directory in (self.path / name).iterdir():
                with suppress(OSError):  # no directory, or closed to this process
                    if NAMESPACE_NAME.fullmatch(directory.name) and is_shard(directory):
                        rank = 0 if number >= self.replicas else 2 if directory.name == self._serving else 1
                        ranked.append((rank, used_ns(directory), directory))
        return [directory for *_, directory in sorted(ranked)]

    def _measure(self) -> None:
        """Raises OSError; the last measurement stays."""
        base, own = self._locked, None if self._part is None else self._part.folder.path.name
        used_bytes = part_used_bytes = 0
        for entry in os.scandir(self.path):
            ours = part_number(entry.name) is not None and base.has_folder(entry.name)
            nbytes = _part_bytes(entry) if ours else self._foreign.nbytes(entry)
            used_bytes += nbytes
            if entry.name == own:
                part_used_bytes = nbytes
        self.used_bytes, self._part_used_bytes = used_bytes, part_used_bytes
        if self._part is not None:
            self._unwritten = _journal_room(self._part.folder.path / self._serving) if self._serving else 0


def _first_seen_ns(directory: Path, last_ns: int, now_ns: int) -> int:
    """When the shard was last written, or first seen with a time ahead of the clock, which the times of a file record.
    Raises OSError."""
    if last_ns <= now_ns:
        return last_ns
    record = directory / FIRST_SEEN
    os.close(os.open(record, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    status = record.stat()
    if status.st_atime_ns == last_ns and status.st_mtime_ns <= now_ns:
        return status.st_mtime_ns
    os.utime(record, ns=(last_ns, now_ns))
    return now_ns


def _remove_empty(directory: Path) -> None:
    with suppress(OSError):
        directory.rmdir()


def _remove_part(directory: Path) -> None:
    """Remove the directory of a part that has no shard; its lock is held by this process."""
    with suppress(OSError):
        if os.listdir(directory) == [LOCK]:  # noqa: PTH208 - names only
            (directory / LOCK).unlink()
            directory.rmdir()


def _part_bytes(entry: os.DirEntry[str]) -> int:
    """As `tree_bytes` of the directory of a part, with the most that the journals of its shards may grow to."""
    nbytes = tree_bytes(entry.path, ours=True)
    with suppress(FileNotFoundError):
        for shard in os.scandir(entry.path):
            if NAMESPACE_NAME.fullmatch(shard.name) and shard.is_dir(follow_symlinks=False):
                nbytes += _journal_room(Path(shard.path))
    return nbytes


def _journal_room(shard: Path) -> int:
    """By how much the journal of this shard may still grow, by its description. Raises OSError."""
    try:
        most = int(json.loads((shard / DESCRIPTION).read_bytes())["journal_bytes"])
        journal = sum(tree_bytes(file.path, ours=True) for file in os.scandir(shard) if file.name.startswith(_JOURNAL))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return 0
    return max(0, most - journal)
