"""The shards of a path: what they take, and which of them are deleted so that others find room.

The slots of the shard that a mover serves fit its part if it is alone there: for it to grow, other shards of the part
are deleted. Parts that nobody holds are brought within their bound whenever one is taken; those beyond `replicas` have
none. Nothing else counts, and what is foreign is never touched.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from nixl_tiers.base.chunk import NAMESPACE_NAME
from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.tiers.base import TierDown, expire_if_due
from nixl_tiers.tiers.disk import PROBE, FreeSpace, describe
from nixl_tiers.tiers.folder import NotOwned, taken_bytes
from nixl_tiers.tiers.slab.layout import SLAB
from nixl_tiers.tiers.slab.parts import DESCRIPTION, LOCK, PART, Parts, ShardDir, lock_file, remove_part

logger = logging.getLogger(__name__)

# Names on disk: part of the format.
_FIRST_SEEN: Final = ".first-seen"  # others than its engine write it
JOURNAL: Final = re.compile(r"manifest\.journal")
ROWS: Final = re.compile(rf"{SLAB.pattern}|{JOURNAL.pattern}")
SHARD: Final = re.compile(rf"{ROWS.pattern}|(namespace|about)\.json(\.new)?|\.first-seen|{PROBE.pattern}")
"""The names of a shard's journal, of that and its slabs, and of all files that are made in it. Others are foreign."""
DELETING: Final = re.compile(rf"\.gone-{PART.pattern}-{NAMESPACE_NAME.pattern}")
"""What a shard is renamed to, in the tier's path, before it is deleted."""

_DELETE_WAIT_S: Final = 1.0  # for the path's lock, before shards of other parts stay for now
_ROUNDING_BYTES: Final = 64 << 10  # that a file system adds to a part by itself (extent trees, directories)


def is_shard(directory: Path) -> bool:
    """Whether it has files of a shard, or nothing at all; else what is in it is foreign. What cannot be read must not
    count as nothing."""
    try:
        entries = [*os.scandir(directory)]
    except OSError as error:
        return not isinstance(error, (FileNotFoundError, NotADirectoryError))
    return not entries or any(SHARD.fullmatch(each.name) and not each.is_dir(follow_symlinks=False) for each in entries)


def shard_files(shard: Path) -> dict[str, os.stat_result]:
    """Its files. Raises OSError."""
    found = {}
    for file in os.scandir(shard):
        with suppress(FileNotFoundError):  # replaced meanwhile
            if SHARD.fullmatch(file.name):
                found[file.name] = file.stat(follow_symlinks=False)
    return found


def shard_bytes(shard: Path) -> tuple[int, int]:
    """What a shard takes, by blocks or sizes, whichever is more; and by how much its journal may still grow, by its
    description. Raises OSError."""
    sizes = {name: taken_bytes(status) for name, status in shard_files(shard).items()}
    most = 0
    with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        most = int(json.loads((shard / DESCRIPTION).read_bytes())["journal_bytes"])
    return sum(sizes.values()), max(0, most - sum(sizes[name] for name in filter(JOURNAL.fullmatch, sizes)))


def written_ns(shard: Path) -> int:
    """When an engine last wrote a file of a shard, as it does when it ends; in ns since the epoch. Raises OSError."""
    return max((file.st_mtime_ns for name, file in shard_files(shard).items() if name != _FIRST_SEEN), default=0)


def used_ns(shard: Path) -> int:
    """`written_ns`, to rank shards by it; 0 if that is not known."""
    with suppress(OSError):
        return written_ns(shard)
    return 0


def first_seen_ns(shard: Path, now_ns: int) -> int:
    """When it was last written, or first seen with a time ahead of the clock, which the times of a file record. Raises
    OSError."""
    last_ns = written_ns(shard)
    if last_ns <= now_ns:
        return last_ns
    record = shard / _FIRST_SEEN
    os.close(os.open(record, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    status = record.stat()
    if status.st_atime_ns == last_ns and status.st_mtime_ns <= now_ns:
        return status.st_mtime_ns
    os.utime(record, ns=(last_ns, now_ns))
    return now_ns


class Shards(Parts):
    """Calls may wait for the lock and for deletions: none belongs on the mover's loop."""

    def __init__(self, path: Path, capacity_bytes: int, replicas: int = 1, free: FreeSpace | None = None) -> None:
        """`replicas`: into how many parts the path is divided. `free`: what must stay free on the file system."""
        super().__init__(path, replicas)
        self.part_bytes = capacity_bytes // replicas
        """The capacity of one part."""
        self._free = free or FreeSpace(path, 0)
        self._log_once = LogOnce(logger)
        self._serving = ""  # name of the shard in the own part that this process serves
        self.used_bytes = 0
        """Of the part when it was last measured; journals count with the most that they may grow to."""
        self.surplus = False
        """Whether a part was over its bound, and could not be trimmed, when that was last looked at."""

    def acquire_shard(self, namespace: bytes) -> ShardDir:
        """The shard of the namespace in the part that this process holds, or takes now: a free one with most rows of
        it; else an empty one; else the one that was used longest ago. Inside `locked`. Raises as `take`."""
        self._serving = namespace.hex()
        part = self.take(self._rank)
        self.trim_parts()
        return ShardDir(part, self._serving)

    def _rank(self, part: Path) -> tuple[int, int]:
        own_bytes = 0
        with suppress(OSError):
            files = shard_files(part / self._serving)
            own_bytes = sum(files[name].st_size for name in filter(SLAB.fullmatch, files))
        return -own_bytes, max((used_ns(shard) or 1 for shard in self._shards(part)), default=0)

    def discard(self, shard: ShardDir) -> None:
        """Release a shard that could not be opened, and its part; delete them if they are empty."""
        shard.release()
        with suppress(OSError, TierDown), self.locked(_DELETE_WAIT_S):
            shard.path.rmdir()
            remove_part(shard.path.parent)
        self.release()

    def make_room(self, need_bytes: int) -> str:
        """Why `need_bytes` more do not fit, as a sentence; "" if they do, after deleting as many shards as that takes:
        of the own part, and for what must stay free on the file system those of parts that nobody holds, too. Raises
        OSError."""
        part = self.own
        assert part is not None, "a part is held"
        while True:
            for leftover in self._leftovers():  # its bytes are the part's, where they are not seen any more
                if leftover.startswith(f".gone-{part.name}-"):
                    self.finish_deletion(leftover)
            unwritten = self._measure(part)
            self._free.measure_again()  # other processes have allocated since, each by a measurement of its own
            if self.used_bytes + need_bytes > self.part_bytes:
                if not self._delete_first(self._shards(part)):
                    return f"{part} is full"
            elif not (problem := self._free.lacks(need_bytes and need_bytes + unwritten)):
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
            with suppress(OSError):
                self.finish_deletion(leftover)
        for number, part in self.others():
            try:
                surplus |= not self._trim(part, self.part_bytes if number < self.replicas else 0)
            except OSError as error:  # no reason not to serve the own one
                self._log_once.report("trim", f"{part} cannot be brought within its bound ({describe(error)})")
                surplus = True
        self.surplus = surplus or bool(self._leftovers())

    def _trim(self, part: Path, bound: int) -> bool:
        """Delete what a part has beyond its bound, the least recently used shards first, and of the last one no more
        slabs than needed. Whether it is within; False if a process holds it. Raises OSError."""
        sizes = self._sizes(part)
        excess, last = sum(sizes.values()) - bound, next(reversed(sizes), None)
        for shard, nbytes in sizes.items():
            least = excess if shard == last else math.inf
            if excess > 0 and not self.delete_shard(shard, least):
                return False
            excess -= nbytes
        return True

    def trim_again(self) -> None:
        """The same in upkeep, where others' locks hold up nothing, and errors stay for the next open."""
        with suppress(OSError, TierDown), self.locked(0.0):
            self.trim_parts()

    def delete_oldest(self) -> bool:
        """For room on the file system, delete one shard that no process serves; False if there is none. First those of
        the own part, the least recently used first; then those of other parts; last those of the same namespace, which
        another replica may soon take. Raises OSError."""
        if self.own is not None and self._delete_first(self._shards(self.own)):
            return True
        with suppress(TierDown), self.locked(_DELETE_WAIT_S):
            found = [shard for _, part in self.others() for shard in self._shards(part)]
            return self._delete_first(sorted(found, key=lambda shard: (shard.name == self._serving, used_ns(shard))))
        return False

    def delete_expired(self, max_age_s: float, now_s: float) -> None:
        """Delete every shard that no process serves and that was not written for `max_age_s`. What others hold up, and
        errors, stay for the next time."""
        with suppress(OSError, TierDown), self.locked(_DELETE_WAIT_S):
            for part in filter(None, [self.own, *(part for _, part in self.others())]):
                for shard in self._shards(part):
                    with suppress(OSError):
                        if expire_if_due(first_seen_ns(shard, int(now_s * 1e9)) / 1e9, now_s, max_age_s):
                            self.delete_shard(shard)

    def delete_shard(self, directory: Path, nbytes: float = math.inf) -> bool:
        """Delete a shard, or only its highest slabs if these are `nbytes` at least: who opens it finds the rows in its
        lowest slots. False if a process serves it. Inside `locked`, but for one of the own part. Raises NotOwned if
        others can write to it, OSError."""
        name, own = directory.name, directory.parent == self.own
        if own and name == self._serving:
            return False
        with self.open_base() as base, base.folder(directory.parent.name) as part, ExitStack() as locks:
            if not own and locks.enter_context(lock_file(part, LOCK)) is None:
                return False
            with part.folder(name) as folder:  # raises if it is foreign
                highest = []
                for slab in sorted(filter(SLAB.fullmatch, folder.names()))[:0:-1]:
                    if nbytes > 0:
                        nbytes -= taken_bytes(folder.stat(slab))
                        highest.append(slab)
                if nbytes <= 0:
                    logger.info("deleting the highest slabs of %s, which are beyond its part's share", directory)
                    for slab in highest:
                        folder.unlink(slab)
                    return True
            # Renamed first: a crash in the middle leaves an orphan to delete, not half a shard.
            renamed = f".gone-{directory.parent.name}-{name}"
            part.rename(name, base, renamed)
            self.finish_deletion(renamed)
            remove_part(part.path)
        logger.info("deleted %s, which no process serves", directory)
        return True

    def finish_deletion(self, renamed: str) -> None:
        """Delete a shard that was renamed for it; another process may do so, too. Foreign things in it go back to where
        they were. Raises NotOwned, OSError."""
        with self.open_base() as base, suppress(FileNotFoundError):
            with base.folder(renamed) as folder:
                folder.unlink_matching(SHARD)
            try:
                base.rmdir(renamed)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                above, _, name = renamed.removeprefix(".gone-").rpartition("-")
                with base.folder(above, make=True) as part:
                    base.rename(renamed, part, name)
                logger.warning("%s: the shard was deleted, and foreign files in it stay", self.path / above / name)

    def _leftovers(self) -> list[str]:
        """Of deletions that have not ended. Raises OSError."""
        with self.open_base() as base:
            return [*filter(DELETING.fullmatch, base.names())]

    def _delete_first(self, shards: Iterable[Path]) -> bool:
        """Delete the first of these that is there and that no process serves. Raises OSError."""
        failed: OSError | None = None
        for shard in shards:
            try:
                if self.delete_shard(shard):
                    return True
            except OSError as error:
                failed = failed if isinstance(error, (NotOwned, FileNotFoundError)) else error
        if failed:
            raise failed
        return False

    def _shards(self, part: Path) -> list[Path]:
        """Those in a part but the one that is served here, the least recently used first. Raises OSError."""
        served = self._serving if part == self.own else ""
        names = (name for name in os.listdir(part) if NAMESPACE_NAME.fullmatch(name) and name != served)  # noqa: PTH208
        return sorted(filter(is_shard, map(part.joinpath, names)), key=lambda shard: (used_ns(shard), shard))

    def _sizes(self, part: Path) -> dict[Path, int]:
        """What these take, with what their journals may still grow. Raises OSError."""
        sizes = {}
        for shard in self._shards(part):
            with suppress(FileNotFoundError, NotADirectoryError):  # deleted meanwhile
                sizes[shard] = sum(shard_bytes(shard))
        return sizes
