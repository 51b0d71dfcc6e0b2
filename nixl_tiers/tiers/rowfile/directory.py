"""The directory of a tier with row files: what is done to one row's file, and the threads that do it.

Rows are `<path>/<namespace>/<2 hex>/<key>.row`; unfinished ones are in `<path>/.incoming`.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

from nixl_tiers.tiers.disk import INCOMING
from nixl_tiers.tiers.folder import Folder, NotOwned
from nixl_tiers.tiers.rowfile.quota import DirQuota, RowPath, age_from
from nixl_tiers.tiers.rowfile.server_time import ServerTime
from nixl_tiers.tiers.rowfile.temp_names import TempNames

_WORKERS: Final = 4

P = ParamSpec("P")
T = TypeVar("T")


class RowDirectory:
    """Every call but `submit` and `absolute` may wait for the file system, and may be made on any thread. Changes are
    recorded in the quota."""

    def __init__(
        self, path: Path, quota: DirQuota, *, writes: bool = True, server_time: ServerTime | None = None
    ) -> None:
        """Without `writes`, no row is deleted but those that do not verify: a reader does not decide what is kept."""
        self.path = path
        self.writes = writes
        self.server_time = server_time or ServerTime()
        self.temp_names = TempNames()
        self._quota = quota
        self._uid: int | None = None
        self._workers = [ThreadPoolExecutor(1, thread_name_prefix=f"rowfile-{n}") for n in range(_WORKERS)]

    def submit(self, path: RowPath, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call this on a worker thread; calls for the same row run in the order in which they were submitted."""
        return self._workers[zlib.crc32(path.key) % _WORKERS].submit(call, *args, **kwargs)

    def absolute(self, path: RowPath) -> Path:
        return self.path.joinpath(path.namespace, path.fanout, path.name)

    def close(self) -> None:
        """Wait for the calls that were submitted."""
        for worker in self._workers:
            worker.shutdown()

    # --- directories ------------------------------------------------------------------------------------------------

    def prepare(self, namespace: str) -> None:
        """Make what is missing, check who owns it, and read the server's time. Raises NotOwned, OSError."""
        self._uid = None  # the path may be on another file system now
        with self.base() as base:
            base.folder(namespace, make=True).close()
            base.folder(INCOMING, make=True).close()
        self.refresh_time()

    def problem(self, namespace: str) -> str:
        """Whether one of the directories was replaced by something foreign, or "". Raises OSError."""
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
        with Folder.base(self.path, self._uid) as base:
            self._uid = base.uid
            yield base

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
        with self.incoming() as incoming:
            self.server_time.refresh(incoming.descriptor)

    def remove_if_empty(self, path: RowPath) -> None:
        """The row's fan-out directory, and then that of its namespace."""
        with suppress(OSError), self.base() as base:  # not empty after all
            with base.folder(path.namespace) as home:
                home.rmdir(path.fanout)
            base.rmdir(path.namespace)

    # --- writing a row ----------------------------------------------------------------------------------------------

    def create_temp(self) -> tuple[Path, int]:
        """A new file to write a row into, and its descriptor, which the caller closes. Raises OSError."""
        name, flags = self.temp_names.name(), os.O_RDWR | os.O_CREAT | os.O_EXCL
        with self.base() as base:
            try:
                incoming = base.folder(INCOMING)
            except FileNotFoundError:
                incoming = base.folder(INCOMING, make=True)
            with incoming:
                return incoming.path / name, incoming.open(name, flags)

    def delete_temp(self, temporary: Path) -> None:
        """Raises OSError."""
        with self.incoming() as incoming:
            incoming.unlink(temporary.name)

    def publish(self, temporary: Path, path: RowPath, sealed_at: int) -> None:
        """Rename a written file to the row's name, atomically replacing an older file. `sealed_at`: Unix seconds.
        Raises OSError."""
        try:
            status = self._rename(temporary, path)
        except FileNotFoundError:
            with self.base() as base:
                made = int(base.make(path.namespace))
                with base.folder(path.namespace) as home:
                    made += home.make(path.fanout)
            self._quota.add_directories(made)
            status = self._rename(temporary, path)
        begins = age_from(sealed_at, status) if status is not None else 0
        self._quota.record(path, status, begins, stored=True)

    def _rename(self, temporary: Path, path: RowPath) -> os.stat_result | None:
        with (
            self.base() as base,
            base.folder(INCOMING) as incoming,
            base.folder(path.namespace) as home,
            home.folder(path.fanout) as fanout,
        ):
            incoming.rename(temporary.name, fanout, path.name)
            try:
                return fanout.stat(path.name)
            except OSError:  # already evicted by another process
                return None

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
        with suppress(FileNotFoundError), self._fanout(path) as fanout:
            fanout.unlink(path.name)
        self._quota.record(path, None)

    def delete_unless_used(self, path: RowPath) -> None:
        """Delete a row that this process evicts, unless another one has used it since this one last did."""
        known = self._quota.get(path)
        with suppress(OSError):
            status = self.stat(path)
            if self.writes and status is not None and (known is None or status.st_mtime_ns <= known.mtime_ns):
                self.delete(path)

    def delete_unless_replaced(self, path: RowPath, status: os.stat_result) -> None:
        """Delete a file that is no valid row, unless there is another one by now. `status`: of that file."""
        with suppress(OSError):
            now = self.stat(path)
            if now is not None and (now.st_ino, now.st_mtime_ns) == (status.st_ino, status.st_mtime_ns):
                self.delete(path)
