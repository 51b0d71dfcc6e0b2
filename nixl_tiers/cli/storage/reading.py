"""Reading files that an engine may be writing to, or another user may have placed: links and pipes are not opened."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.base.chunk import PAGE, align
from nixl_tiers.base.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest

_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def open_file(path: Path, flags: int = 0) -> int | None:
    """A descriptor of a plain file; None if there is none. Raises OSError if it cannot be opened."""
    try:
        descriptor = os.open(path, _FLAGS | flags)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
            return None
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    return None


def read_small(path: Path) -> bytes | None:
    """The first 64 KiB of a file; None if there is none. Raises OSError."""
    descriptor = open_file(path)
    if descriptor is None:
        return None
    try:
        return os.read(descriptor, 8 * MAX_MANIFEST_BYTES)
    finally:
        os.close(descriptor)


def manifest_in(directory: Path) -> Manifest | None:
    """Raises OSError."""
    raw = read_small(directory / MANIFEST_NAME)
    return None if raw is None else Manifest.decode(raw)


def folders(directory: Path) -> list[Path]:
    """The directories in it, sorted, but no links. Raises OSError."""
    with os.scandir(directory) as entries:
        return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))


class RowBuffer:
    """Reads one row at a time, past the page cache where that is possible: an engine writes past it, too, and the
    cache is better used for something else."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, PAGE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._memory.close()

    def read(self, path: Path, offset: int, nbytes: int) -> NDArray[np.uint8] | None:
        """Those bytes of a file, fewer where it ends; None if there is no such file. Raises OSError."""
        if len(self._memory) < align(nbytes):
            self._memory.close()
            self._memory = mmap.mmap(-1, align(nbytes))
        try:
            return self._read(path, offset, nbytes, os.O_DIRECT)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            return self._read(path, offset, nbytes, 0)

    def _read(self, path: Path, offset: int, nbytes: int, flags: int) -> NDArray[np.uint8] | None:
        descriptor = open_file(path, flags)
        if descriptor is None:
            return None
        try:
            count = 0
            wanted = align(nbytes)
            with memoryview(self._memory) as view:
                while count < wanted:
                    with view[count:wanted] as rest:
                        got = os.preadv(descriptor, [rest], offset + count)
                    count += got
                    if not got or count % PAGE:
                        break
            return np.frombuffer(bytes(self._memory[: min(count, nbytes)]), np.uint8)
        finally:
            os.close(descriptor)
