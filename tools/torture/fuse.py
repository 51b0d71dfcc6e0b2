"""A file system that passes each call on to a folder, or has a fault: for PassThrough in disks.py.

    python -m tools.torture.fuse FOLDER MOUNTPOINT CONTROL

CONTROL is a file that says which fault there is; one beside it, `.met`, grows by a byte with each call that met it.
Served in the foreground, by as many threads as calls need.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

import mfusepy

EIO_EVERY: Final = 10


class Files(mfusepy.Operations):
    """Each call on the file behind, after the fault."""

    use_ns = True  # times are whole nanoseconds

    def __init__(self, folder: str, control: str) -> None:
        self._folder, self._control, self._writes = folder, Path(control), 0

    def _fault(self, path: str) -> str:
        if self._control.read_text() == "hang":
            self._count()
            while self._control.read_text() == "hang":
                time.sleep(0.1)
        return self._folder + path

    def _count(self) -> None:
        with self._control.with_suffix(".met").open("ab") as file:
            file.write(b".")

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        found = os.lstat(self._fault(path))
        names = ("gid", "mode", "nlink", "size", "uid", "blocks", "ino")
        times = {f"st_{name}": getattr(found, f"st_{name}_ns") for name in ("atime", "ctime", "mtime")}
        return {f"st_{name}": getattr(found, f"st_{name}") for name in names} | times

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._fault(path))]

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return os.open(self._fault(path), os.O_RDWR | os.O_CREAT, mode)

    def open(self, path: str, flags: int) -> int:
        return os.open(self._fault(path), flags & ~(os.O_DIRECT | os.O_APPEND))

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        self._fault(path)
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self._fault(path)
        self._writes += 1
        if self._control.read_text() == "eio" and self._writes % EIO_EVERY == 0:
            self._count()
            raise mfusepy.FuseOSError(errno.EIO)
        return os.pwrite(fh, data, offset)

    def fallocate(self, path: str, mode: int, offset: int, length: int, fh: int) -> int:
        self._fault(path)
        if mode:
            raise mfusepy.FuseOSError(errno.EOPNOTSUPP)
        os.posix_fallocate(fh, offset, length)
        return 0

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        os.truncate(self._fault(path), length)
        return 0

    def rename(self, old: str, new: str) -> int:
        os.rename(self._fault(old), self._folder + new)
        return 0

    def unlink(self, path: str) -> int:
        os.unlink(self._fault(path))
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(self._fault(path), mode)
        return 0

    def rmdir(self, path: str) -> int:
        os.rmdir(self._fault(path))
        return 0

    def link(self, target: str, source: str) -> int:
        os.link(self._fault(source), self._folder + target)
        return 0

    def chmod(self, path: str, mode: int) -> int:
        os.chmod(self._fault(path), mode)
        return 0

    def chown(self, path: str, uid: int, gid: int) -> int:
        os.chown(self._fault(path), uid, gid)
        return 0

    def utimens(self, path: str, times: Any = None) -> int:
        os.utime(self._fault(path), ns=times) if times else os.utime(self._fault(path))
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._fault(path))
        names = ("bavail", "bfree", "blocks", "bsize", "favail", "ffree", "files", "flag", "frsize", "namemax")
        return {f"f_{name}": getattr(found, f"f_{name}") for name in names}

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self._fault(path)
        os.fsync(fh)
        return 0

    def flush(self, path: str, fh: int) -> int:
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def access(self, path: str, amode: int) -> int:
        if not os.access(self._fault(path), amode):
            raise mfusepy.FuseOSError(errno.EACCES)
        return 0


if __name__ == "__main__":
    mfusepy.FUSE(Files(sys.argv[1], sys.argv[3]), sys.argv[2], foreground=True)
