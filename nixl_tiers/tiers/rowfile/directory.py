"""The directory of a tier with row files: what is done to one row's file, but for storing and loading it (`worker.py`),
and the threads that do it.

Rows are `<path>/<namespace>/<2 hex>/<key>.row`; unfinished ones are in `<path>/.incoming`.
"""

from __future__ import annotations

import errno
import os
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

from nixl_tiers.base.manifest import MANIFEST_NAME
from nixl_tiers.tiers.disk import INCOMING
from nixl_tiers.tiers.folder import READ_ONLY, Folder, Found, NotOwned
from nixl_tiers.tiers.manifests import read_manifest
from nixl_tiers.tiers.rowfile.names import RowPath, TempNames
from nixl_tiers.tiers.rowfile.packed_rows import KnownRow
from nixl_tiers.tiers.rowfile.quota import DirQuota

_WORKERS: Final = 4
REFRESH_S: Final = 5.0  # between two reads of the server's clock; until the next one the monotonic clock counts

P = ParamSpec("P")
T = TypeVar("T")


def _worker_of(path: RowPath) -> int:
    return zlib.crc32(path.key) % _WORKERS


class TempFile:
    """A file that a row is written into, in an open directory of unfinished files; to be closed."""

    def __init__(self, base: Folder, incoming: Folder, names: TempNames) -> None:
        """Takes both directories over."""
        self.base = base
        self._incoming = incoming
        self._names = names
        self._numbers = names.take(1)
        self._name = names.name(*self._numbers)

    @property
    def path(self) -> Path:
        return self._incoming.path / self._name

    def open(self) -> int:
        """Make it; a descriptor, which the caller closes. Raises OSError."""
        return self._incoming.open(self._name, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def rename(self, to: Folder, name: str) -> None:
        """Raises OSError."""
        self._incoming.rename(self._name, to, name)

    def delete(self) -> None:
        """Raises OSError."""
        self._incoming.unlink(self._name)

    def close(self) -> None:
        """If it could be neither renamed nor deleted, the scanner deletes it from now on."""
        self._names.release(self._numbers)
        self._incoming.close()
        self.base.close()


class RowDirectory:
    """Every call but `submit` and `absolute` may wait for the file system, and may be made on any thread. Changes are
    recorded in the quota."""

    def __init__(
        self, path: Path, quota: DirQuota, *, writes: bool = True, server_time: ServerTime | None = None
    ) -> None:
        """Without `writes` nothing is made, replaced or deleted, and nothing needs the right to; the times of files
        that are used are set, if that is allowed."""
        self.path = path
        self.writes = writes
        self.server_time = server_time or ServerTime()
        self.temp_names = TempNames()
        self._quota = quota
        self._found: Found | None = None
        self._held: Folder | None = None
        self._prepared = ""
        self._workers = [ThreadPoolExecutor(1, thread_name_prefix=f"rowfile-{n}") for n in range(_WORKERS)]

    def submit(self, path: RowPath, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call this on a worker thread; calls for the same row run in the order in which they were submitted."""
        return self._workers[_worker_of(path)].submit(call, *args, **kwargs)

    def absolute(self, path: RowPath) -> Path:
        return self.path.joinpath(path.namespace, path.fanout, path.name)

    def close(self) -> None:
        """Wait for the calls that were submitted."""
        for worker in self._workers:
            worker.shutdown()
        self.release()

    # --- directories ------------------------------------------------------------------------------------------------

    def prepare(self, namespace: str) -> None:
        """Make what is missing, check who owns it, and read the server's time. Raises NotOwned, OSError."""
        self._found = None  # the path may be on another file system now
        self._prepared = namespace
        self.release()
        self._held = base = self._open_base()
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

    def problem(self, namespace: str) -> str:
        """Whether one of the directories was replaced by something foreign, or "". Raises OSError."""
        os.fstat(self.held.descriptor)  # a server may know it no more, though the path leads there
        with self.base() as base:
            for name in (INCOMING, namespace):
                try:
                    base.folder(name).close()
                except NotOwned as error:
                    return str(error)
                except FileNotFoundError:  # made again when it is needed
                    pass
        return ""

    @contextmanager
    def base(self) -> Iterator[Folder]:
        """The tier's path."""
        with self._open_base() as base:
            yield base

    def _open_base(self) -> Folder:
        base = Folder.base(self.path, self._found, writes=self.writes)
        self._found = self._found or base.found
        return base

    @contextmanager
    def incoming(self) -> Iterator[Folder]:
        """The directory of unfinished files."""
        with self.base() as base, base.folder(INCOMING) as folder:
            yield folder

    @contextmanager
    def _fanout(self, path: RowPath) -> Iterator[Folder]:
        with self.base() as base, base.folder(path.namespace) as home, home.folder(path.fanout) as fanout:
            yield fanout

    def refresh_time(self) -> None:
        """Read the time of the file server. Raises OSError."""
        try:
            with self.incoming() as incoming:
                self.server_time.refresh(incoming.descriptor)
        except OSError as error:
            if self.writes or error.errno not in (*READ_ONLY, errno.ENOENT):
                raise
            self.server_time.assume()

    def remove_if_empty(self, path: RowPath) -> None:
        """The row's fan-out directory, and then that of its namespace, with its manifest."""
        with suppress(OSError), self.base() as base:  # not empty after all
            with base.folder(path.namespace) as home:
                home.rmdir(path.fanout)
                if home.names() == [MANIFEST_NAME] and path.namespace != self._prepared:
                    home.unlink(MANIFEST_NAME)
            base.rmdir(path.namespace)

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
        temporary = self.temp_file()
        try:
            with os.fdopen(temporary.open(), "wb") as file:
                file.write(raw)
            with temporary.base.folder(namespace) as home:
                temporary.rename(home, MANIFEST_NAME)
        except BaseException:
            with suppress(OSError):
                temporary.delete()
            raise
        finally:
            temporary.close()

    # --- writing a file ---------------------------------------------------------------------------------------------

    def temp_file(self) -> TempFile:
        """A name for a new file, not made yet. Raises OSError."""
        base = self._open_base()
        try:
            try:
                incoming = base.folder(INCOMING)
            except FileNotFoundError:
                incoming = base.folder(INCOMING, make=True)
        except BaseException:
            base.close()
            raise
        return TempFile(base, incoming, self.temp_names)

    # --- a row that is there ----------------------------------------------------------------------------------------

    def stat(self, path: RowPath) -> os.stat_result | None:
        """The row's file, or None if it is not there. Raises OSError."""
        try:
            with self._fanout(path) as fanout:
                return fanout.stat(path.name)
        except FileNotFoundError:
            self._quota.record(path, None)
            return None

    def open_row(self, path: RowPath) -> int | None:
        """A descriptor to read the row's file, which the caller closes; None if it is not there. Raises OSError."""
        try:
            with self._fanout(path) as fanout:
                return fanout.open(path.name, os.O_RDONLY)
        except FileNotFoundError:
            self._quota.record(path, None)
            return None

    def touch(self, path: RowPath) -> None:
        """Mark the row as used now, for all processes. Not while its seal is ahead of the server's time: `age_from`."""
        with suppress(OSError), self._fanout(path) as fanout:
            self.server_time.touch(path.name, fanout.descriptor)
            self._quota.record(path, fanout.stat(path.name))

    def delete(self, path: RowPath) -> None:
        """Raises OSError, but not if it is gone already."""
        deleted = False
        with suppress(FileNotFoundError), self._fanout(path) as fanout:
            fanout.unlink(path.name)
            deleted = True
        self._quota.record(path, None, deleted=deleted)

    def delete_unless_used(self, path: RowPath) -> None:
        """Delete a row that this process evicts, unless another one has used it since this one last did."""
        known = self._quota.get(path)
        with suppress(OSError):
            status = self.stat(path)
            if self.writes and status is not None and (known is None or KnownRow.of(status).mtime_ns <= known.mtime_ns):
                self.delete(path)

    def delete_unless_replaced(self, path: RowPath, status: os.stat_result) -> None:
        """Delete a file that is no valid row, unless there is another one by now. `status`: of that file. A reader
        leaves it, and lists it no more."""
        with suppress(OSError):
            now = self.stat(path)
            if now is not None and (now.st_ino, now.st_mtime_ns) == (status.st_ino, status.st_mtime_ns):
                if self.writes:
                    self.delete(path)
                else:
                    self._quota.hide(path)


class ServerTime:
    """The time of day by the clock of the file server, which sets the times of files that several machines share: their
    clocks may be wrong, and the ages of files are right only by the clock that set their times.

    `refresh` and `touch` belong on threads that may wait for the server, `now_s` on any.
    """

    def __init__(self) -> None:
        self._read: tuple[float, float] | None = None  # the server's time, and the monotonic time when it was read

    def refresh(self, directory: int) -> None:
        """Touch a directory of this tier, open as this descriptor, and read the time that it got. Raises OSError."""
        if self._is_old:
            os.utime(directory)  # as in `touch`
            self._read = os.fstat(directory).st_mtime, time.monotonic()

    def assume(self) -> None:
        """Nothing can be touched there: the server's clock is taken to be this machine's."""
        if self._is_old:
            self._read = time.time(), time.monotonic()

    @property
    def _is_old(self) -> bool:
        return self._read is None or time.monotonic() - self._read[1] >= REFRESH_S

    def touch(self, name: str | Path, directory: int | None = None) -> None:
        """Set a file's times to the server's. Raises OSError."""
        os.utime(name, dir_fd=directory, follow_symlinks=False)  # without a time: the server's now, not this machine's

    def now_s(self) -> float:
        """Unix seconds; ahead of the server only if its clock was put back. `refresh` comes first."""
        if self._read is None:
            raise RuntimeError("the server's time has not been read")
        server_s, read_at_s = self._read
        return server_s + time.monotonic() - read_at_s
