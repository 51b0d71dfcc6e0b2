"""The directory of a shard: the names in it, what they take, and when they were last written."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from nixl_tiers.tiers.disk import PROBE, FileIdentity
from nixl_tiers.tiers.folder import Folder, taken_bytes

# Names on disk: part of the format.
DESCRIPTION: Final = "namespace.json"
FIRST_SEEN: Final = ".first-seen"  # others than its engine write it
JOURNAL: Final = re.compile(r"manifest\.journal")
SLABS: Final = re.compile(r"slab-\d{5}\.kv")
ROWS: Final = re.compile(rf"{SLABS.pattern}|{JOURNAL.pattern}")
SHARD: Final = re.compile(rf"{ROWS.pattern}|(namespace|about)\.json(\.new)?|\.first-seen|{PROBE.pattern}")
"""The names of a shard's journal, of that and its slabs, and of all files that are made in it. Others are foreign."""


class ShardDir:
    """The directory of a shard in a part that this process holds. `description`: namespace.json's content, empty if it
    is new."""

    def __init__(self, part_problem: Callable[[], str], folder: Folder, description: dict[str, Any]) -> None:
        """Takes over the folder. `part_problem`: as `Part.problem`, of the part that it is in."""
        self.folder = folder
        self.path = folder.path
        self.description = description
        self._part_problem = part_problem
        self._identity = FileIdentity(folder.path, os.fstat(folder.descriptor))
        self._released = False

    def problem(self) -> str:
        """Whether the directory, the part, its lock or the description was deleted or replaced, or "". Raises
        OSError."""
        if problem := self._part_problem() or self._identity.problem():
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


def is_shard(directory: Path) -> bool:
    """Whether it has files of a shard, or nothing at all; else what is in it is foreign. Raises OSError."""
    entries = list(os.scandir(directory))
    return not entries or any(SHARD.fullmatch(each.name) and not each.is_dir(follow_symlinks=False) for each in entries)


def shard_bytes(shard: Path) -> tuple[int, int]:
    """What a shard takes, by blocks or sizes, whichever is more; and by how much its journal may still grow, by its
    description. Raises OSError."""
    used = journal = most = 0
    for file in filter(lambda each: SHARD.fullmatch(each.name), os.scandir(shard)):
        with suppress(FileNotFoundError):  # replaced meanwhile
            nbytes = taken_bytes(file.stat(follow_symlinks=False))
            used += nbytes
            journal += nbytes if JOURNAL.fullmatch(file.name) else 0
    with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        most = int(json.loads((shard / DESCRIPTION).read_bytes())["journal_bytes"])
    return used, max(0, most - journal)


def written_ns(shard: Path) -> int:
    """When an engine last wrote a file of a shard, as it does when it ends; in ns since the epoch. Raises OSError."""
    last_ns = 0
    for file in shard.iterdir():
        if file.name != FIRST_SEEN and SHARD.fullmatch(file.name):
            with suppress(FileNotFoundError):  # replaced meanwhile
                last_ns = max(last_ns, file.lstat().st_mtime_ns)
    return last_ns


def used_ns(shard: Path) -> int:
    """`written_ns`, to rank shards by it; 0 if that is not known."""
    with suppress(OSError):
        return written_ns(shard)
    return 0


def first_seen_ns(directory: Path, last_ns: int, now_ns: int) -> int:
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
