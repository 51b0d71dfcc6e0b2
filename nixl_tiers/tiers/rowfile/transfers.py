"""Rows on their way between the host region and their files: what a store and a load do, step by step (`RowTransfers`),
and what that is for one file, on threads that may wait (`RowFileIo`)."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.base import Move, has_expired
from nixl_tiers.tiers.disk import FULL_ERRORS, describe, direct_reads, fallocate
from nixl_tiers.tiers.folder import fd_path
from nixl_tiers.tiers.move_queue import MoveQueue, Steps, Unit
from nixl_tiers.tiers.moves import MovePipeline, finished, transferred
from nixl_tiers.tiers.nixl_agent import Agent, AgentError, Registration, Span
from nixl_tiers.tiers.rowfile.directory import RowDirectory, TempFile
from nixl_tiers.tiers.rowfile.names import RowPath
from nixl_tiers.tiers.rowfile.namespace import NamespaceRows
from nixl_tiers.tiers.rowfile.quota import DirQuota, Reservation, age_from
from nixl_tiers.tiers.staging import DirectRows, Staging

TOUCH_S: Final = 60.0  # a row that was used more recently is not touched again
_RUNNING_BYTES: Final = 32 << 20  # in each direction, within these numbers of rows
_RUNNING_ROWS: Final = (16, 64)
_UNIT_ROWS: Final = 8  # that are stored together, within these bytes
_UNIT_BYTES: Final = 1 << 20


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
        self.problem = ""
        """Why rows cannot be stored now, unless the disk is full."""
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
            return Outcome.NO_SPACE if isinstance(error, OSError) and error.errno in FULL_ERRORS else Outcome.FAILED

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
                self.problem = ""
                return Outcome.OK
            status = os.statvfs(self._directory.path)
            full = status.f_blocks > 0 and status.f_bavail * status.f_frsize < self._row_bytes  # some report no size
            if not full:
                self._failed("written", AgentError("the kernel's log may tell why"))
        except OSError as error:
            self._failed("put in their places", error)
            full = error.errno in FULL_ERRORS
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
        sentence = f"{self._directory.path}: rows cannot be {what} ({reason})"
        if what != "read" and not (isinstance(error, OSError) and error.errno in FULL_ERRORS):
            self.problem = sentence
        self._log_once.report(what, sentence)
        self._on_failure()

    def _register(self, descriptor: int, access: Literal["rw", "ro"]) -> Registration:
        """Let NIXL open the very file that is open as this descriptor. Raises AgentError."""
        if self.direct is None:
            self.direct = direct_reads(fd_path(descriptor))
        return self._agent.register_file(fd_path(descriptor), self._row_bytes, direct=self.direct, access=access)


class RowTransfers:
    """The moves of one tier, for its thread. `pipeline` has them; call `end_background` between its steps."""

    def __init__(
        self,
        region: HostRegion,
        *,
        agent: Agent,
        staging: Staging,
        files: RowFileIo,
        directory: RowDirectory,
        quota: DirQuota,
        served: Callable[[], NamespaceRows],
        may_start: Callable[[], bool],
        max_age_s: float | None,
        clock: Callable[[], float],
        hold_s: float,
    ) -> None:
        """`served`: the open namespace, when something is moved. `may_start`: whether anything may start now. `clock`:
        Unix seconds, for seals; ages go by the file server's. `hold_s`: see `MovePipeline`."""
        self._region = region
        self._row_bytes = region.geometry.row_bytes
        self._agent = agent
        self._staging = staging
        self._files = files
        self._directory = directory
        self._quota = quota
        self._served = served
        self._max_age_s = max_age_s
        self._clock = clock
        least, most = _RUNNING_ROWS
        self._most = max(least, min(most, _RUNNING_BYTES // self._row_bytes))
        unit_rows = max(1, min(_UNIT_ROWS, _UNIT_BYTES // self._row_bytes))
        self.pipeline = MovePipeline(
            MoveQueue(limit=self._most, run=self._run_load, on_end=self._load_ended),
            MoveQueue(
                limit=self._most // unit_rows,
                admit=self._admit_store,
                run=self._run_store,
                on_end=self._store_ended,
                unit_rows=unit_rows,
            ),
            may_start=may_start,
            held_until_s=lambda: region.stores_held_until_s,
            hold_s=hold_s,
        )
        self._ending_loads: list[Future[None]] = []

    def end_background(self) -> None:
        """Raise the errors of threads that have ended loads: they end this mover."""
        for ending in [each for each in self._ending_loads if each.done()]:
            self._ending_loads.remove(ending)
            ending.result()

    # --- stores -----------------------------------------------------------------------------------------------------

    def _admit_store(self, unit: Unit) -> bool:
        """A unit has room for all of its rows, or its rows are admitted one by one."""
        stores, rows = self.pipeline.stores, len(unit.moves)
        waiting = sum(len(each.moves) for each in itertools.islice(stores.waiting, self._most))
        reservation = self._quota.reserve(min(waiting, self._most), rows)
        if reservation is Reservation.REFUSED and rows > 1:
            stores.split_first()
            return False
        if reservation is Reservation.REFUSED:
            unit.end_all(Outcome.NO_SPACE)
        return reservation is not Reservation.WAIT

    def _run_store(self, unit: Unit) -> Steps[None]:
        """Make a new file for each row, seal the rows, write them, give the files their names. Files come first: while
        one is made, which may take long, others are written, and no room in the buffer is taken. Rows are handed to
        threads together: for small ones, that costs more than what the threads do."""
        served, moves = self._served(), [*unit.moves]
        paths = [RowPath.of(served.name, move.key) for move in moves]
        made = yield from finished(self._directory.submit(paths[0], self._files.create_all, len(moves)))
        failed = {move: file for move, file in zip(moves, made, strict=True) if isinstance(file, Outcome)}
        unit.end_each(failed.get)
        new = [
            (move, path, file) for move, path, file in zip(moves, paths, made, strict=True) if isinstance(file, NewFile)
        ]
        if not new:
            return
        with (yield from self._staging.stores.rows([move for move, _, _ in new])) as rows:
            # The later of two clocks: a row must not seem older than it is by either.
            now_s = max(self._clock(), self._directory.server_time.now_s())
            for move, _, _ in new:
                rows.prepare(served.sealer, move, now_s)
            spans = [self._span(move, rows, file) for move, _, file in new]
            good = yield from transferred(self._agent.write(spans))
        yield from self._end_stores(unit, new, good)

    def _end_stores(self, unit: Unit, new: Sequence[tuple[Move, RowPath, NewFile]], good: bool) -> Steps[None]:
        sealed_at = self._served().sealer.sealed_at
        written = [Written(file, path, good, sealed_at(self._region.rows_view[m.row])) for m, path, file in new]
        groups = self._directory.by_worker(row.path for row in written)
        endings = [
            self._directory.submit(written[group[0]].path, self._files.end_stores, [written[place] for place in group])
            for group in groups
        ]
        outcomes: dict[Move, Outcome] = {}
        for group, ending in zip(groups, endings, strict=True):
            ended = yield from finished(ending)
            outcomes |= {new[place][0]: outcome for place, outcome in zip(group, ended, strict=True)}
        if not good and len(new) > 1:  # one bad file fails a whole transfer: each row is tried again alone
            outcomes = {move: outcome for move, outcome in outcomes.items() if outcome is not Outcome.FAILED}
        unit.end_each(outcomes.get)

    def _store_ended(self, move: Move, outcome: Outcome) -> None:
        storing = self._served().storing
        storing[move.key] -= 1
        if not storing[move.key]:
            del storing[move.key]
        if outcome is not Outcome.OK:
            self._forget(move)

    # --- loads ------------------------------------------------------------------------------------------------------

    def _run_load(self, unit: Unit) -> Steps[None]:
        """Open the row's file, read it, verify the row."""
        (move,) = unit.moves
        path = RowPath.of(self._served().name, move.key)
        with (yield from self._staging.loads.rows(unit.moves)) as rows:
            file = yield from finished(self._directory.submit(path, self._files.open_row, path))
            if isinstance(file, Outcome):
                unit.end_all(file)
                return
            if (yield from transferred(self._agent.read([self._span(move, rows, file)]))):
                unit.end_each(lambda _: self._loaded(move, rows, file, path))
                return
        unit.end_all((yield from finished(self._directory.submit(path, self._files.end_failed_load, file, path))))

    def _loaded(self, move: Move, rows: DirectRows, file: RowFile, path: RowPath) -> Outcome | None:
        sealer, (row, copy) = self._served().sealer, rows.loaded(move)

        def end(outcome: Outcome) -> None:
            """Close its file, and delete it unless it is good. A reader deletes no old row, but knows its age then."""
            good = outcome is Outcome.OK or (outcome is Outcome.MISSING and not self._directory.writes)
            sealed_at = sealer.sealed_at(row)
            self._ending_loads.append(self._directory.submit(path, self._files.end_load, file, path, good, sealed_at))

        outcome = self.pipeline.verify(
            sealer,
            move.key,
            row,
            copy,
            name=lambda: str(file.path),
            has_expired=lambda sealed_at: self._has_expired(age_from(sealed_at, file.status)),
            forget=end,
        )
        if outcome is Outcome.OK:
            end(outcome)
        return outcome

    def _has_expired(self, begins: int) -> bool:
        return self._max_age_s is not None and has_expired(begins, self._directory.server_time.now_s(), self._max_age_s)

    def _load_ended(self, move: Move, outcome: Outcome) -> None:
        if outcome in (Outcome.MISSING, Outcome.CORRUPT):
            self._forget(move)

    # --- both -------------------------------------------------------------------------------------------------------

    def _span(self, move: Move, rows: DirectRows, file: NewFile | RowFile) -> Span:
        return rows.address(move), self._row_bytes, 0, file.registration.devices[0]

    def _forget(self, move: Move) -> None:
        """The core forgets the row too: a file of that name from now on is another engine's."""
        self._quota.forget(RowPath.of(self._served().name, move.key))
