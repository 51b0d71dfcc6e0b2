"""How many bytes foreign files take below a tier's path: whatever their names and however deep, and measured rarely."""

from __future__ import annotations

import errno
import math
import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

REMEASURE_S: Final = 60.0
_SHARE: Final = 200  # a tree is measured again after so many times what that took: less than a percent of a core
_REMEMBERED: Final = 1024
_NAMED: Final = 4  # levels that an error names
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def tree_bytes(path: str, *, ours: bool = False) -> int:
    """Bytes of a file, or of everything below a directory: blocks or size, whichever is more. 0 if it has gone; without
    `ours`, what this process may not look into is left out. Raises OSError: nothing else may count as empty.

    One or two descriptors are open at a time, whatever the depth, and no path gets longer than one name.
    """
    skipped = (FileNotFoundError,) if ours else (FileNotFoundError, PermissionError)
    try:
        status = os.lstat(path)
        if not stat.S_ISDIR(status.st_mode):
            return taken_bytes(status)
        descriptor = os.open(path, _DIRECTORY)
    except skipped:
        return 0
    above = list[tuple[tuple[int, int], list[str], str]]()  # of each level: identity, what is left to enter, entered
    name = ""
    try:
        total, inside = _read(descriptor, skipped)
        while inside or above:
            if inside:
                name = inside.pop()
                try:
                    below = os.open(name, _DIRECTORY, dir_fd=descriptor)
                except skipped:
                    continue
                try:
                    os.stat("..", dir_fd=below)  # the way back
                except OSError as error:
                    os.close(below)
                    if isinstance(error, skipped):
                        continue
                    raise
                status = os.fstat(descriptor)
                above.append(((status.st_dev, status.st_ino), inside, name))
                os.close(descriptor)
                descriptor, inside = below, []
                with suppress(*skipped):
                    nbytes, inside = _read(descriptor, skipped)
                    total += nbytes
            else:
                identity, inside, _ = above.pop()
                parent = os.open("..", _DIRECTORY, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = parent
                status = os.fstat(descriptor)
                if (status.st_dev, status.st_ino) != identity:
                    raise OSError(errno.ESTALE, "a directory in it was moved while it was measured")
        return total
    except OSError as error:
        error.filename = "/".join([path, *(each for *_, each in above[:_NAMED])])
        raise
    finally:
        os.close(descriptor)


def _read(descriptor: int, skipped: tuple[type[OSError], ...]) -> tuple[int, list[str]]:
    """Bytes of a directory and of the files in it, and the names of the directories in it."""
    total, inside = os.fstat(descriptor).st_blocks * 512, list[str]()
    for entry in list(os.scandir(descriptor)):
        try:
            if entry.is_dir(follow_symlinks=False):
                inside.append(entry.name)
            else:
                total += taken_bytes(entry.stat(follow_symlinks=False))
        except skipped:
            pass
    return total, inside


def taken_bytes(status: os.stat_result) -> int:
    """Of a file: blocks or size, whichever is more."""
    return max(status.st_blocks * 512, status.st_size)


class ForeignTrees:
    """Remembers what foreign directories take."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[tuple[str, int], tuple[float, int]] = {}  # name, inode -> when to measure again, bytes

    def nbytes(self, entry: os.DirEntry[str]) -> int:
        """As `tree_bytes`; of a directory as it was when it was last measured, which may be a minute ago. What this
        process may not look into is 0. Raises OSError."""
        try:
            if not entry.is_dir(follow_symlinks=False):
                return taken_bytes(entry.stat(follow_symlinks=False))
            key, began_s = (entry.name, entry.inode()), self._clock()
            due_s, nbytes = self._known.get(key, (-math.inf, 0))
            if began_s >= due_s:
                nbytes = tree_bytes(entry.path)
                now_s = self._clock()
                if len(self._known) >= _REMEMBERED:  # most of them have gone
                    self._known.clear()
                self._known[key] = now_s + max(REMEASURE_S, _SHARE * (now_s - began_s)), nbytes
            return nbytes
        except (FileNotFoundError, PermissionError):
            return 0
