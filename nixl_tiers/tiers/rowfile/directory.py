"""The directory of a tier with row files, by descriptors, but for what the native worker does there (`worker.py`); and
the file server's time.

Rows are `<path>/<namespace>/<2 hex>/<key>.row`; unfinished ones are in `<path>/.incoming`.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from nixl_tiers.base.manifest import MANIFEST_NAME
from nixl_tiers.tiers.disk import INCOMING, probe_name
from nixl_tiers.tiers.folder import READ_ONLY, Folder, Found
from nixl_tiers.tiers.manifests import read_manifest
from nixl_tiers.tiers.rowfile.names import RowPath, TempNames
from nixl_tiers.tiers.stored import Problems

_THREADS: Final = 16  # a server takes its time for each call
REFRESH_S: Final = 5.0  # between two reads of the server's clock; until the next one the monotonic clock counts


class RowDirectory:
    """Every call but `absolute` may wait for the file system, and may be made on any thread."""

    def __init__(self, path: Path, *, writes: bool = True, server_time: ServerTime | None = None) -> None:
        """Without `writes` nothing is made, replaced or deleted, and nothing needs the right to; the times of files
        that are used are set, if that is allowed."""
        self.path = path
        self.writes = writes
        self.server_time = server_time or ServerTime()
        self.temp_names = TempNames()
        self._found: Found | None = None
        self._held: Folder | None = None
        self.threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="rowfile")
        """For what is done to single files."""

    def absolute(self, path: RowPath) -> Path:
        return self.path.joinpath(path.namespace, path.fanout, path.name)

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.release()

    # --- directories ------------------------------------------------------------------------------------------------

    def prepare(self, namespace: str) -> None:
        """Make what is missing, check who owns it, and read the server's time. Raises NotOwned, OSError."""
        self._found = None  # the path may be on another file system now
        self.release()
        self._held = base = self.base()
        for name in (namespace, INCOMING) if self.writes else ():
            base.folder(name, make=True).close()
        self.refresh_time()

    @property
    def held(self) -> Folder:
        """The tier's path as it was when `prepare` opened it, until `release`."""
        assert self._held is not None, "no directory is open"
        return self._held

    def release(self) -> None:
        """Nothing is stored or loaded: let the file system be unmounted."""
        held, self._held = self._held, None
        if held is not None:
            held.close()

    def check(self, namespace: str) -> None:
        """Raises NotOwned if one of the directories was replaced by something foreign, and OSError."""
        os.fstat(self.held.descriptor)  # a server may know it no more, though the path leads there
        with self.base() as base:
            for name in (INCOMING, namespace):
                with suppress(FileNotFoundError):  # made again when it is needed
                    base.folder(name).close()

    def base(self) -> Folder:
        """The tier's path, which the caller closes."""
        base = Folder.base(self.path, self._found, writes=self.writes)
        self._found = self._found or base.found
        return base

    @contextmanager
    def incoming(self) -> Iterator[Folder]:
        """The directory of unfinished files, made again if somebody has deleted it."""
        with self.base() as base, base.folder(INCOMING, make=self.writes) as folder:
            yield folder

    @contextmanager
    def fanout(self, namespace: str, name: str) -> Iterator[Folder]:
        """A directory of rows."""
        with self.base() as base, base.folder(namespace) as home, home.folder(name) as fanout:
            yield fanout

    def refresh_time(self) -> None:
        """Read the time of the file server. Raises OSError."""
        try:
            with self.incoming() as incoming:
                self.server_time.refresh(incoming.descriptor)
        except OSError as error:
            if self.writes or error.errno not in (*READ_ONLY, errno.ENOENT):
                raise
            self.server_time.refresh(None)

    # --- the manifest -----------------------------------------------------------------------------------------------

    def read_manifest(self, namespace: str) -> bytes | None:
        """None if there is none. Raises OSError."""
        try:
            with self.base() as base, base.folder(namespace) as home:
                return read_manifest(home)
        except FileNotFoundError:
            return None

    def write_manifest(self, namespace: str, raw: bytes) -> None:
        """Replace it atomically. Raises OSError."""
        name = probe_name()
        with self.base() as base, base.folder(INCOMING, make=True) as incoming, base.folder(namespace) as home:
            try:
                with os.fdopen(incoming.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                    file.write(raw)
                incoming.rename(name, home, MANIFEST_NAME)
            finally:
                with suppress(OSError):  # else it has the manifest's name
                    incoming.unlink(name)

    # --- rows -------------------------------------------------------------------------------------------------------

    def stat(self, path: RowPath) -> os.stat_result | None:
        """The row's file, or None if it is not there. By its path alone: nothing relies on that. Raises OSError."""
        try:
            return self.absolute(path).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def delete_unless_replaced(self, path: RowPath, inode: int, mtime_ns: int) -> None:
        """Delete a file that is no valid row, unless there is another one by now. A reader leaves it."""
        with suppress(OSError), self.fanout(path.namespace, path.fanout) as fanout:
            now = fanout.stat(path.name)
            if self.writes and (now.st_ino, now.st_mtime_ns) == (inode, mtime_ns):
                fanout.unlink(path.name)


def row_files(
    folder: Folder, namespace: str, fanout: str, problems: Problems
) -> Iterator[tuple[RowPath, os.stat_result]]:
    """The rows' files in a fan-out directory that are there now."""
    place = str(folder.path)
    for name in folder.names():
        if (path := RowPath.of_file(namespace, fanout, name)) is not None:
            with problems.reading(f"{place}/{name}"):
                status = folder.stat(name)
                if stat.S_ISREG(status.st_mode):
                    yield path, status


class ServerTime:
    """The time of day by the clock of the file server, which sets the times of files that several machines share: their
    clocks may be wrong, and the ages of files are right only by the clock that set their times.

    `refresh` and `touch` belong on threads that may wait for the server, `now_s` on any.
    """

    def __init__(self) -> None:
        self._read: tuple[float, float] | None = None  # the server's time, and the monotonic time when it was read

    def refresh(self, directory: int | None) -> None:
        """Touch a directory of this tier, open as this descriptor, and read the time that it got. None: nothing can be
        touched there, and the server's clock is taken to be this machine's. Raises OSError."""
        if self._read is None or time.monotonic() - self._read[1] >= REFRESH_S:
            if directory is not None:
                os.utime(directory)  # as in `touch`
            server_s = time.time() if directory is None else os.fstat(directory).st_mtime
            self._read = server_s, time.monotonic()

    def touch(self, name: str | Path, directory: int | None = None) -> None:
        """Set a file's times to the server's. Raises OSError."""
        os.utime(name, dir_fd=directory, follow_symlinks=False)  # without a time: the server's now, not this machine's

    def now_s(self) -> float:
        """Unix seconds; ahead of the server only if its clock was put back. `refresh` comes first."""
        assert self._read is not None, "the server's time has not been read"
        server_s, read_at_s = self._read
        return server_s + time.monotonic() - read_at_s
