"""What is done with one row file: made, put in its place, opened, let go. All of it on hands (`account.py`)."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from nixl_tiers.chunk import Outcome
from nixl_tiers.tiers.disk import describe, fallocate
from nixl_tiers.tiers.folder import through
from nixl_tiers.tiers.log_once import LogOnce
from nixl_tiers.tiers.nixl_agent import Agent, AgentError, Registration
from nixl_tiers.tiers.rowfile.quota import Place, counts_from
from nixl_tiers.tiers.rowfile.scanner import DirScanner

TOUCH_S: Final = 60.0  # a row that was used this recently is not marked again
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


@dataclass
class RowFile:
    """An open file that one transfer uses."""

    registration: Registration
    path: Path
    status: os.stat_result  # when it was opened


class RowFileIo:
    """The files of one tier. Every call may wait for the file system, and may be made on any thread."""

    def __init__(
        self,
        agent: Agent,
        shelves: DirScanner,
        row_bytes: int,
        complaints: LogOnce,
        *,
        on_failure: Callable[[], None],
        is_old: Callable[[int], bool],
    ) -> None:
        """`on_failure` is called when the file system fails; `is_old` tells whether a row whose age counts from then
        (Unix seconds) is too old and yet to be left where it is."""
        self._agent = agent
        self._shelves = shelves
        self._row_bytes = row_bytes
        self._log_once = complaints
        self._on_failure = on_failure
        self._is_old = is_old
        self.direct = True  # whether files are opened with O_DIRECT

    def open_fresh(self) -> RowFile | Outcome:
        """A file to write a row into, with its room taken."""
        path: Path | None = None
        try:
            path, descriptor = self._shelves.fresh()
            try:
                failed = fallocate(descriptor, 0, self._row_bytes)
                if failed and failed != errno.EOPNOTSUPP:
                    raise OSError(failed, os.strerror(failed), str(path))
                return RowFile(self._register(descriptor, "rw"), path, os.fstat(descriptor))
            finally:
                os.close(descriptor)
        except (OSError, AgentError) as error:
            self._failed("written", error)
            self._abandon(path)
            return Outcome.NO_SPACE if isinstance(error, OSError) and error.errno in _FULL else Outcome.FAILED

    def put_away(self, file: RowFile, place: Place, good: bool, sealed_at: int) -> Outcome:
        self._agent.deregister(file.registration)
        try:
            if good:
                self._shelves.take_in(file.path, place, sealed_at)
                return Outcome.OK
            status = os.statvfs(self._shelves.path)
            full = status.f_bavail * status.f_frsize < self._row_bytes
        except OSError as error:
            self._failed("put in their places", error)
            full = error.errno in _FULL
        self._abandon(file.path)
        return Outcome.NO_SPACE if full else Outcome.FAILED

    def _failed(self, what: str, error: OSError | AgentError) -> None:
        reason = describe(error) if isinstance(error, OSError) else error
        self._log_once.report(what, f"{self._shelves.path}: rows cannot be {what} ({reason})")
        self._on_failure()

    def _abandon(self, path: Path | None) -> None:
        if path is not None:
            with suppress(OSError):
                self._shelves.discard(path)
        self._shelves.give_up()

    def _register(self, descriptor: int, access: Literal["rw", "ro"]) -> Registration:
        """Let NIXL open the very file that is open as this descriptor. Raises AgentError."""
        return self._agent.register_file(through(descriptor), self._row_bytes, direct=self.direct, access=access)

    def open_row(self, place: Place) -> RowFile | Outcome:
        try:
            descriptor = self._shelves.open_row(place)
            if descriptor is None:
                return Outcome.MISSING
            try:
                status, path = os.fstat(descriptor), self._shelves.where(place)
                if status.st_size == self._row_bytes:
                    return RowFile(self._register(descriptor, "ro"), path, status)
            finally:
                os.close(descriptor)
            self._log_once.report("spoilt", f"{path} has {status.st_size} bytes and no row")
            self._shelves.condemn(place, status)
            return Outcome.CORRUPT
        except AgentError:
            return self._why(place)
        except OSError as error:
            self._failed("read", error)
            return Outcome.FAILED

    def explain(self, file: RowFile, place: Place) -> Outcome:
        """Why could it not be read?"""
        self._agent.deregister(file.registration)
        return self._why(place)

    def _why(self, place: Place) -> Outcome:
        """MISSING if the row has gone, CORRUPT if it is no row, FAILED if it should have worked."""
        try:
            status = self._shelves.look(place)
        except OSError:
            return Outcome.FAILED
        if status is None:
            return Outcome.MISSING
        if status.st_size != self._row_bytes:
            self._shelves.condemn(place, status)
            return Outcome.CORRUPT
        return Outcome.FAILED

    def let_go(self, file: RowFile, place: Place, good: bool, sealed_at: int) -> None:
        """A row has been read; one that is not good goes."""
        self._agent.deregister(file.registration)
        now_s = self._shelves.server_time.now_s()
        if not good:
            self._shelves.condemn(place, file.status)
        elif self._is_old(counted := counts_from(sealed_at, file.status)):
            self._shelves.note(place, counted)
        elif sealed_at <= now_s and now_s - file.status.st_mtime > TOUCH_S:
            self._shelves.touch(place)
