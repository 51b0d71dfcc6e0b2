"""One row file as NIXL reads or writes it: created or opened before a transfer, published or closed after it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.tiers.disk import describe, direct_reads, fallocate
from nixl_tiers.tiers.folder import fd_path
from nixl_tiers.tiers.nixl_agent import Agent, AgentError, Registration
from nixl_tiers.tiers.rowfile.directory import RowDirectory, TempFile
from nixl_tiers.tiers.rowfile.quota import DirQuota, RowPath, age_from

TOUCH_S: Final = 60.0  # a row that was used more recently is not touched again
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


@dataclass
class NewFile:
    """A file that a row is written into, for one transfer."""

    registration: Registration
    temporary: TempFile


@dataclass
class Written:
    """A new file, after its transfer: it is to be the row of `path` if that was `good`, else deleted."""

    file: NewFile
    path: RowPath
    good: bool
    sealed_at: int  # Unix seconds


@dataclass
class RowFile:
    """A row's open file, for one transfer."""

    registration: Registration
    path: Path
    status: os.stat_result  # when it was opened


class RowFileIo:
    """The files of one tier. Every call may wait for the file system, and may be made on any thread."""

    def __init__(
        self,
        agent: Agent,
        directory: RowDirectory,
        quota: DirQuota,
        row_bytes: int,
        log_once: LogOnce,
        *,
        on_failure: Callable[[], None],
        is_hidden: Callable[[int], bool],
    ) -> None:
        """`on_failure` is called when the file system fails; `is_hidden`: whether a row whose age begins then (Unix
        seconds) is a miss although its file stays."""
        self._agent = agent
        self._directory = directory
        self._quota = quota
        self._row_bytes = row_bytes
        self._log_once = log_once
        self._on_failure = on_failure
        self._is_hidden = is_hidden
        self.direct: bool | None = True  # whether files are opened with O_DIRECT; None: as the first one can be read

    # --- stores -----------------------------------------------------------------------------------------------------

    def create_all(self, count: int) -> list[NewFile | Outcome]:
        """`create` for so many rows."""
        return [self.create() for _ in range(count)]

    def create(self) -> NewFile | Outcome:
        """A file to write a row into, allocated. Its room is reserved; released if this fails."""
        temporary: TempFile | None = None
        try:
            temporary = self._directory.temp_file()
            descriptor = temporary.open()
            try:
                failed = fallocate(descriptor, 0, self._row_bytes)
                if failed and failed != errno.EOPNOTSUPP:
                    raise OSError(failed, os.strerror(failed), str(temporary.path))
                return NewFile(self._register(descriptor, "rw"), temporary)
            finally:
                os.close(descriptor)
        except (OSError, AgentError) as error:
            self._failed("written", error)
            if temporary is None:
                self._quota.release()
            else:
                self._discard(temporary)
            return Outcome.NO_SPACE if isinstance(error, OSError) and error.errno in _FULL else Outcome.FAILED

    def end_stores(self, rows: Sequence[Written]) -> list[Outcome]:
        """`end_store` for each of these."""
        return [self.end_store(row) for row in rows]

    def end_store(self, row: Written) -> Outcome:
        """Publish a written row, or delete its file if the transfer failed."""
        file = row.file
        self._agent.deregister(file.registration)
        try:
            if row.good:
                self._directory.publish(file.temporary, row.path, row.sealed_at)
                file.temporary.close()
                self._quota.release()
                return Outcome.OK
            status = os.statvfs(self._directory.path)
            full = status.f_bavail * status.f_frsize < self._row_bytes
        except OSError as error:
            self._failed("put in their places", error)
            full = error.errno in _FULL
        self._discard(file.temporary)
        return Outcome.NO_SPACE if full else Outcome.FAILED

    def _discard(self, temporary: TempFile) -> None:
        with suppress(OSError):
            temporary.delete()
        temporary.close()
        self._quota.release()

    # --- loads ------------------------------------------------------------------------------------------------------

    def open_row(self, path: RowPath) -> RowFile | Outcome:
        try:
            descriptor = self._directory.open_row(path)
            if descriptor is None:
                return Outcome.MISSING
            try:
                status, absolute = os.fstat(descriptor), self._directory.absolute(path)
                if status.st_size == self._row_bytes:
                    return RowFile(self._register(descriptor, "ro"), absolute, status)
            finally:
                os.close(descriptor)
            self._log_once.report("corrupt", f"{absolute} has {status.st_size} bytes and no row")
            self._directory.delete_unless_replaced(path, status)
            return Outcome.CORRUPT
        except AgentError:
            return self._failed_load(path)
        except OSError as error:
            self._failed("read", error)
            return Outcome.FAILED

    def end_load(self, file: RowFile, path: RowPath, good: bool, sealed_at: int) -> None:
        """A row has been read: mark it as used, or delete it if it is not good."""
        self._agent.deregister(file.registration)
        now_s = self._directory.server_time.now_s()
        if not good:
            self._directory.delete_unless_replaced(path, file.status)
        elif self._is_hidden(begins := age_from(sealed_at, file.status)):
            self._quota.record_age(path, begins)
        elif sealed_at <= now_s and now_s - file.status.st_mtime > TOUCH_S:
            self._directory.touch(path)

    def end_failed_load(self, file: RowFile, path: RowPath) -> Outcome:
        """The transfer failed: why?"""
        self._agent.deregister(file.registration)
        return self._failed_load(path)

    def _failed_load(self, path: RowPath) -> Outcome:
        """MISSING if the row has gone, CORRUPT if its file has another size, else FAILED."""
        try:
            status = self._directory.stat(path)
        except OSError:
            return Outcome.FAILED
        if status is None:
            return Outcome.MISSING
        if status.st_size != self._row_bytes:
            self._directory.delete_unless_replaced(path, status)
            return Outcome.CORRUPT
        return Outcome.FAILED

    def _failed(self, what: str, error: OSError | AgentError) -> None:
        reason = describe(error) if isinstance(error, OSError) else error
        self._log_once.report(what, f"{self._directory.path}: rows cannot be {what} ({reason})")
        self._on_failure()

    def _register(self, descriptor: int, access: Literal["rw", "ro"]) -> Registration:
        """Let NIXL open the very file that is open as this descriptor. Raises AgentError."""
        if self.direct is None:
            self.direct = direct_reads(fd_path(descriptor))
        return self._agent.register_file(fd_path(descriptor), self._row_bytes, direct=self.direct, access=access)
