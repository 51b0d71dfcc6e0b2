"""The bytes of one path: each part is bounded by itself, and a mover fills the one that it holds.

Below the path are the lock file and the parts (`parts.py`); in a part is one directory (shard) per namespace, named by
its digest in hexadecimal. A mover holds one part and serves one shard of it, whose slots fit the part if it is alone
there: for it to grow, other shards of the part are deleted. Parts that nobody holds are brought within their bound
whenever one is taken; those beyond `replicas` have none. Nothing else counts, and what is foreign is never touched.

The lock of the path is for who takes a part, or deletes in one that nobody holds: growth takes none.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from nixl_tiers.base.chunk import NAMESPACE_NAME
from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.tiers.base import TierDown, has_expired
from nixl_tiers.tiers.disk import SLAB_LOCK, FreeSpace, describe
from nixl_tiers.tiers.folder import Folder, Found, NotOwned, taken_bytes
from nixl_tiers.tiers.slab.parts import (
    DELETING,
    HELD_RETRY_S,
    LOCK,
    Part,
    claim,
    deleting_name,
    part_number,
    try_lock,
)
from nixl_tiers.tiers.slab.shards import (
    DESCRIPTION,
    SHARD,
    SLABS,
    ShardDir,
    first_seen_ns,
    is_shard,
    shard_bytes,
    used_ns,
    written_ns,
)

logger = logging.getLogger(__name__)

DELETE_WAIT_S: Final = 1.0  # for the path's lock, before shards of other parts stay for now
_LOCK_POLL_S: Final = 0.01
_ROUNDING_BYTES: Final = 64 << 10  # that a file system adds to a part by itself (extent trees, directories)


class SlabQuota:
    """The parts of one path, of which this process holds one. Calls may wait for the lock and for deletions: none
    belongs on the mover's loop."""

    def __init__(self, path: Path, capacity_bytes: int, replicas: int = 1, free: FreeSpace | None = None) -> None:
        """`replicas`: into how many parts the path is divided. `free`: what must stay free on the file system."""
        self.path = path
        self.capacity_bytes = capacity_bytes
        self.replicas = replicas
        self._free = free
        self._log_once = LogOnce(logger)
        self._found: Found | None = None
        self._part: Part | None = None
        self._lost: dict[int, bytes] = {}  # see `claim`
        self._serving = ""  # name of the shard in the part that this process serves
        self.used_bytes = 0
        """Of the part when it was last measured; journals count with the most that they may grow to."""
        self.surplus = False
        """Whether a part was over its bound, and another process held it, when that was last looked at."""

    @contextmanager
    def locked(self, wait_s: float = math.inf) -> Iterator[None]:
        """The lock of the path: no other process takes a part meanwhile, or deletes in one that nobody holds. Not
        reentrant. Raises TierDown if it cannot be had for `wait_s`."""
        deadline = time.monotonic() + wait_s
        with self._open_base() as base, os.fdopen(base.open(SLAB_LOCK, os.O_RDWR | os.O_CREAT)) as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise TierDown(
                            f"it waits for {self.path / SLAB_LOCK}, which another process has locked for more than "
                            f"{wait_s:.0f} s: has an engine's mover on this path been stopped?",
                            retry_s=HELD_RETRY_S,
                        ) from None
                time.sleep(_LOCK_POLL_S)
            yield

    def _open_base(self) -> Folder:
        base = Folder.base(self.path, self._found)
        self._found = self._found or base.found
        return base

    def forget_path(self) -> None:
        """The path may lead to another directory from now on, and another user own files that are made there."""
        self._found = None

    @property
    def part_bytes(self) -> int:
        """The capacity of one part."""
        return self.capacity_bytes // self.replicas

    # --- the part and its shards ------------------------------------------------------------------------------------

    def acquire_shard(self, namespace: bytes) -> ShardDir:
        """The shard of the namespace in the part that this process holds, or takes now. Inside `locked`. Raises
        TierDown if all parts are held, NotOwned if others can write to it, OSError."""
        if self._part is None:
            with self._open_base() as base:
                self._part = claim(base, self.replicas, namespace, self._lost)
        self.trim_parts()
        self._serving = namespace.hex()
        folder = self._part.folder.folder(self._serving, make=True)
        try:
            description = json.loads(folder.read(DESCRIPTION))
        except (OSError, ValueError):
            description = {}
        return ShardDir(self._part.problem, folder, description if isinstance(description, dict) else {})

    def discard(self, shard: ShardDir) -> None:
        """Release a shard that could not be opened, and its part; delete them if they are empty."""
        shard.release()
        with suppress(OSError, TierDown), self.locked(DELETE_WAIT_S):
            shard.path.rmdir()
            _remove_part(shard.path.parent)
        self.release()

    def release(self) -> None:
        """Let another process take the part; its rows stay."""
        part, self._part, self._serving = self._part, None, ""
        if part is not None:
            if part.other_holder:
                self._lost[part.number] = part.other_holder
            part.release()

    def make_room(self, need_bytes: int) -> str:
        """Why `need_bytes` more do not fit, as a sentence; "" if they do, after deleting as many shards as that takes:
        of the own part, and for what must stay free on the file system those of parts that nobody holds, too. Raises
        OSError."""
        assert self._part is not None, "a part is held"
        part = self._part.folder.path
        while True:
            for leftover in self._leftovers():  # its bytes are the part's, where they are not seen any more
                if leftover["part"] == part.name:
                    self.finish_deletion(leftover[0])
            unwritten = self._measure(part)
            if self._free is not None:
                self._free.measure_again()  # other processes have allocated since, each by a measurement of its own
            if self.used_bytes + need_bytes > self.part_bytes:
                if not self._delete_first(self._shards(part)):
                    return f"{part} is full"
            elif self._free is None or not (problem := self._free.lacks(need_bytes and need_bytes + unwritten)):
                return ""
            elif not self.delete_oldest():
                return problem

    def _measure(self, part: Path) -> int:
        """By how much the journal of this shard may still grow: the file system knows of none. Raises OSError; the last
        measurement stays."""
        used, unwritten = shard_bytes(part / self._serving)
        self.used_bytes = _ROUNDING_BYTES + used + unwritten + sum(self._sizes(part).values())
        return unwritten

    # --- deleting ---------------------------------------------------------------------------------------------------

    def trim_parts(self) -> None:
        """Bring each part that no process holds within its bound. Inside `locked`. Raises OSError."""
        surplus = False
        for leftover in self._leftovers():
            try:
                self.finish_deletion(leftover[0])
            except OSError:
                surplus = True
        for number, part in self._other_parts():
            try:
                surplus |= not self._trim(part, self.part_bytes if number < self.replicas else 0)
            except OSError as error:  # no reason not to serve the own one
                self._log_once.report("trim", f"{part} cannot be brought within its bound ({describe(error)})")
                surplus = True
        self.surplus = surplus

    def _trim(self, part: Path, bound: int) -> bool:
        """Delete what a part has beyond its bound, the least recently used shards first, and of the last one no more
        slabs than needed. Whether it is within; False if a process holds it. Raises OSError."""
        sizes = self._sizes(part)
        excess = sum(sizes.values()) - bound
        for shard, nbytes in sizes.items():
            if excess <= 0:
                break
            if nbytes > excess and shard == [*sizes][-1]:
                return self._cut(shard, excess)
            if not self._delete_first([shard]):
                return False
            excess -= nbytes
        return True

    def _cut(self, shard: Path, nbytes: int) -> bool:
        """Delete so many bytes of a shard's highest slabs at least, unless a process holds its part: who opens it finds
        the rows in its lowest slots. Raises OSError."""
        with self._open_base() as base, base.folder(shard.parent.name) as part:
            if (lock := try_lock(part)) is None:
                return False
            try:
                with part.folder(shard.name) as folder:
                    for name in sorted(filter(SLABS.fullmatch, folder.names()), reverse=True):
                        if nbytes > 0:
                            nbytes -= taken_bytes(folder.stat(name))
                            folder.unlink(name)
            finally:
                os.close(lock)
        logger.info("deleted the highest slabs of %s, which were beyond its part's share", shard)
        return True

    def trim_again(self) -> None:
        """The same in upkeep, where others' locks hold up nothing, and errors stay for the next open."""
        with suppress(OSError, TierDown), self.locked(0.0):
            self.trim_parts()

    def delete_oldest(self) -> bool:
        """For room on the file system, delete one shard that no process serves; False if there is none. First those of
        the own part, the least recently used first; then those of parts beyond `replicas`, and of others; last those of
        the same namespace, which another replica may soon take. Raises OSError."""
        if self._part is not None and self._delete_first(self._shards(self._part.folder.path)):
            return True
        with suppress(TierDown), self.locked(DELETE_WAIT_S):
            ranked = [
                (0 if number >= self.replicas else 2 if shard.name == self._serving else 1, used_ns(shard), shard)
                for number, part in self._other_parts()
                for shard in self._shards(part)
            ]
            return self._delete_first(shard for *_, shard in sorted(ranked))
        return False

    def delete_expired(self, max_age_s: float, now_s: float) -> None:
        """Delete every shard that no process serves and that was not written for `max_age_s`. Inside `locked`."""
        own = [] if self._part is None else [self._part.folder.path]
        parts = [*own, *(part for _, part in self._other_parts())]
        for shard in (shard for part in parts for shard in self._shards(part)):
            with suppress(OSError):
                seen_ns = first_seen_ns(shard, written_ns(shard), int(now_s * 1e9))
                if has_expired(seen_ns / 1e9, now_s, max_age_s):
                    self.delete_shard(shard)

    def delete_shard(self, directory: Path) -> bool:
        """Delete a shard, unless a process serves it. Inside `locked`, but for one of the own part. Raises NotOwned if
        others can write to it, OSError."""
        part = directory.parent
        own = self._part is not None and part == self._part.folder.path
        if own and directory.name == self._serving:
            return False
        with self._open_base() as base, base.folder(part.name) as above:
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
        return True

    def finish_deletion(self, renamed: str) -> None:
        """Delete a shard that was renamed for it; another process may do so, too. Foreign things in it go back to where
        they were. Raises NotOwned, OSError."""
        with self._open_base() as base, suppress(FileNotFoundError):
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

    def _leftovers(self) -> list[re.Match[str]]:
        """Of deletions that have not ended. Raises OSError."""
        with self._open_base() as base:
            return [*filter(None, map(DELETING.fullmatch, base.names()))]

    def _delete_first(self, shards: Iterable[Path]) -> bool:
        """Delete the first of these that is there and that no process serves. Raises OSError."""
        failed: OSError | None = None
        for shard in shards:
            try:
                if self.delete_shard(shard):
                    return True
            except (NotOwned, FileNotFoundError):
                pass
            except OSError as error:
                failed = error
        if failed:
            raise failed
        return False

    def _other_parts(self) -> Iterator[tuple[int, Path]]:
        """The directories of all other parts with their numbers, but for those that other users made or can write to.
        Raises OSError."""
        with self._open_base() as base:
            for name in base.names():
                number, part = part_number(name), self.path / name
                own = self._part is not None and part == self._part.folder.path
                if number is not None and not own and base.has_folder(name) and (part / LOCK).exists():
                    yield number, part

    def _shards(self, part: Path) -> list[Path]:
        """Those in a part but the one that is served here, the least recently used first. Raises OSError."""
        found = []
        for directory in part.iterdir():
            served = self._part is not None and directory == self._part.folder.path / self._serving
            if NAMESPACE_NAME.fullmatch(directory.name) and not served and _may_be_shard(directory):
                found.append((used_ns(directory), directory))
        return [directory for _, directory in sorted(found)]

    def _sizes(self, part: Path) -> dict[Path, int]:
        """What these take, with what their journals may still grow. Raises OSError."""
        sizes = {}
        for shard in self._shards(part):
            with suppress(FileNotFoundError, NotADirectoryError):  # deleted meanwhile
                sizes[shard] = sum(shard_bytes(shard))
        return sizes


def _may_be_shard(directory: Path) -> bool:
    """What cannot be read must not count as nothing."""
    try:
        return is_shard(directory)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def _remove_part(directory: Path) -> None:
    """Remove the directory of a part that has no shard; its lock is held by this process."""
    with suppress(OSError):
        if os.listdir(directory) == [LOCK]:  # noqa: PTH208 - names only
            (directory / LOCK).unlink()
            directory.rmdir()
