"""Rows on their way between the host region and their files: what the native worker stores and loads (`worker.py`), and
what then becomes of a row.

Whatever waits for the file system does so on the worker's threads, or on those of `directory.py`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.seal import Verdict
from nixl_tiers.tiers.base import Move, has_expired
from nixl_tiers.tiers.disk import FULL_ERRORS
from nixl_tiers.tiers.move_queue import MoveQueue, Steps, Unit
from nixl_tiers.tiers.moves import MovePipeline
from nixl_tiers.tiers.rowfile.directory import RowDirectory
from nixl_tiers.tiers.rowfile.names import RowPath
from nixl_tiers.tiers.rowfile.namespace import NamespaceRows
from nixl_tiers.tiers.rowfile.quota import SCAN_ROWS, DirQuota, Reservation, age_from
from nixl_tiers.tiers.rowfile.worker import Moved, Place, Trouble, Worker

TOUCH_S: Final = 60.0  # a row that was used more recently is not touched again
_RUNNING_BYTES: Final = 32 << 20  # in each direction, within these numbers of rows
_RUNNING_ROWS: Final = (16, 128)
_UNIT_ROWS: Final = SCAN_ROWS  # that are handed to the worker together, within these bytes; no scan grants more
_UNIT_BYTES: Final = 4 << 20
_NEVER_S: Final = -(1 << 62)


class RowTransfers:
    """The moves of one tier, for its thread. `pipeline` has them."""

    def __init__(
        self,
        region: HostRegion,
        *,
        worker: Worker,
        directory: RowDirectory,
        quota: DirQuota,
        log_once: LogOnce,
        served: Callable[[], NamespaceRows],
        may_start: Callable[[], bool],
        max_age_s: float | None,
        clock: Callable[[], float],
        hold_s: float,
    ) -> None:
        """`served`: the open namespace, when something is moved. `may_start`: whether anything may start now. `clock`:
        Unix seconds, for seals; ages go by the file server's. `hold_s`: see `MovePipeline`."""
        self._row_bytes = region.geometry.row_bytes
        self._worker = worker
        self._directory = directory
        self._quota = quota
        self._log_once = log_once
        self._served = served
        self._max_age_s = max_age_s
        self._clock = clock
        least, most = _RUNNING_ROWS
        self._most = max(least, min(most, _RUNNING_BYTES // self._row_bytes))
        unit_rows = max(1, min(_UNIT_ROWS, _UNIT_BYTES // self._row_bytes))
        self.pipeline = MovePipeline(
            MoveQueue(
                limit=self._most,
                limit_rows=self._most,
                run=self._run_load,
                on_end=self._load_ended,
                unit_rows=unit_rows,
            ),
            MoveQueue(
                limit=self._most,
                limit_rows=self._most,
                admit=self._admit_store,
                run=self._run_store,
                on_end=self._store_ended,
                unit_rows=unit_rows,
            ),
            may_start=may_start,
            held_until_s=lambda: region.stores_held_until_s,
            wakes=True,
            hold_s=hold_s,
        )
        self._deletes: list[Future[None]] = []
        self.problem = ""
        """Why rows cannot be stored now, unless the disk is full."""
        self.direct = True  # whether files are opened with O_DIRECT; a load does without where it must

    def poll(self) -> None:
        """Go on with what runs. Raises the errors of threads that have deleted bad rows: they end this mover."""
        self._worker.poll()
        self.pipeline.poll()
        for deleted in [each for each in self._deletes if each.done()]:
            self._deletes.remove(deleted)
            deleted.result()

    def _move(self, unit: Unit, place: Place, numbers: Sequence[int], *, write: bool) -> Steps[dict[Move, Moved]]:
        """What became of the rows of a unit."""
        moves, sealer = [*unit.moves], self._served().sealer
        try:
            moved = yield from self._worker.move(moves, numbers, place, sealer, write=write)
        except OSError as error:
            moved = [Moved(Trouble.NOT_MOVED, 0, 0, 0, 0, 0, error.errno or 0, 0)] * len(moves)
        return dict(zip(moves, moved, strict=True))

    def _failed(self, what: str, path: RowPath, error: int) -> Outcome:
        reason = f"{self._directory.absolute(path)}: {os.strerror(error)}"
        sentence = f"{self._directory.path}: rows cannot be {what} ({reason})"
        full = what == "written" and error in FULL_ERRORS
        if what == "written" and not full:
            self.problem = sentence
        self._log_once.report(what, sentence)
        self._served().health.check_soon()
        return Outcome.NO_SPACE if full else Outcome.FAILED

    # --- stores -----------------------------------------------------------------------------------------------------

    def _admit_store(self, unit: Unit) -> bool:
        """A unit has room for all of its rows, or its rows are admitted one by one. None of them is being deleted: it
        would be deleted again."""
        stores, rows, deleting = self.pipeline.stores, len(unit.moves), self._served().deleting
        if deleting and any(move.key in deleting for move in unit.moves):
            return False
        waiting = sum(len(each.moves) for each in itertools.islice(stores.waiting, self._most))
        reservation = self._quota.reserve(min(waiting, self._most), rows)
        if reservation is Reservation.REFUSED and rows > 1:
            stores.split_first()
            return False
        if reservation is Reservation.REFUSED:
            unit.end_all(Outcome.NO_SPACE)
        return reservation is not Reservation.WAIT

    def _run_store(self, unit: Unit) -> Steps[None]:
        names, base = self._directory.temp_names, self._directory.held
        # The later of two clocks: a row must not seem older than it is by either.
        now_s = max(self._clock(), self._directory.server_time.now_s())
        place = Place(base.descriptor, base.uid, names.prefix, self.direct, now_s)
        numbers = names.take(len(unit.moves))
        self._quota.begin_stores(map(self._path_of, unit.moves))
        moved = yield from self._move(unit, place, numbers, write=True)
        names.release(numbers)
        unit.end_each(lambda move: self._stored(move, moved[move]))

    def _stored(self, move: Move, moved: Moved) -> Outcome:
        path, outcome = self._path_of(move), Outcome.OK
        self._quota.add_directories(moved.made)
        if moved.verdict is Verdict.OK:
            # Without an inode: another process has evicted it already.
            status = moved.status(self._row_bytes, moved.mtime_ns) if moved.inode else None
            self._quota.record(path, status, age_from(moved.sealed_at, status) if status else 0, stored=True)
            self.problem = ""
        else:
            outcome = self._failed("written", path, moved.error)
        self._quota.release(path)
        return outcome

    def _store_ended(self, move: Move, outcome: Outcome) -> None:
        storing = self._served().storing
        storing[move.key] -= 1
        if not storing[move.key]:
            del storing[move.key]
        if outcome is not Outcome.OK:
            self._forget(move)

    # --- loads ------------------------------------------------------------------------------------------------------

    def _run_load(self, unit: Unit) -> Steps[None]:
        base, now_s = self._directory.held, self._directory.server_time.now_s()
        expired_s = _NEVER_S if self._max_age_s is None else now_s - self._max_age_s
        place = Place(base.descriptor, base.uid, "", self.direct, now_s, now_s - TOUCH_S, expired_s)
        moved = yield from self._move(unit, place, [0] * len(unit.moves), write=False)
        unit.end_each(lambda move: self._loaded(move, moved[move]))

    def _loaded(self, move: Move, moved: Moved) -> Outcome | None:
        path, verdict = self._path_of(move), moved.verdict
        if verdict is Trouble.NOT_MOVED:
            return self._failed("read", path, moved.error)
        if verdict is Trouble.ABSENT:
            self._quota.record(path, None)
            return Outcome.MISSING
        name = self._directory.absolute(path)
        if verdict is Trouble.FOREIGN:
            self._log_once.report("foreign", f"{name} {verdict.value}, and stays")
            self._quota.hide(path)
            return Outcome.MISSING
        status = moved.status(self._row_bytes, moved.mtime_ns)
        if verdict is Trouble.CUT:
            self._log_once.report("corrupt", f"{name} {verdict.value}")
            self._delete(path, status)
            return Outcome.CORRUPT
        assert isinstance(verdict, Verdict)
        begins = age_from(moved.sealed_at, status)

        def forget(outcome: Outcome) -> None:
            """A reader deletes no old row, but knows its age then."""
            if outcome is Outcome.MISSING and not self._directory.writes:
                self._quota.record_age(path, begins)
            else:
                self._delete(path, status)

        if moved.touched_ns:
            self._quota.record(path, moved.status(self._row_bytes, moved.touched_ns))
        expired = self._max_age_s is not None and has_expired(
            begins, self._directory.server_time.now_s(), self._max_age_s
        )
        return self.pipeline.judge(verdict, expired=expired, name=lambda: str(name), forget=forget)

    def _delete(self, path: RowPath, status: os.stat_result) -> None:
        self._deletes.append(self._directory.submit(path, self._directory.delete_unless_replaced, path, status))

    def _load_ended(self, move: Move, outcome: Outcome) -> None:
        if outcome in (Outcome.MISSING, Outcome.CORRUPT):
            self._forget(move)

    # --- both -------------------------------------------------------------------------------------------------------

    def _path_of(self, move: Move) -> RowPath:
        return RowPath.of(self._served().name, move.key)

    def _forget(self, move: Move) -> None:
        """The core forgets the row too: a file of that name from now on is another engine's."""
        self._quota.forget(self._path_of(move))
