"""Rows on their way between the host region and their files: what the native worker stores and loads (`worker.py`), and
what then becomes of a row.

Whatever waits for the file system does so on the worker's threads, or on those of `directory.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Final

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.seal import Sealer, Verdict
from nixl_tiers.tiers.base import Move, has_expired
from nixl_tiers.tiers.disk import FULL_ERRORS, HealthMonitor
from nixl_tiers.tiers.move_queue import MoveQueue, Steps, Unit
from nixl_tiers.tiers.moves import MovePipeline
from nixl_tiers.tiers.rowfile.budget import WINDOW_ROWS, Budget
from nixl_tiers.tiers.rowfile.directory import RowDirectory
from nixl_tiers.tiers.rowfile.expire import age_from
from nixl_tiers.tiers.rowfile.names import RowPath
from nixl_tiers.tiers.rowfile.sweep import Sweeper
from nixl_tiers.tiers.rowfile.worker import Moved, Place, Trouble, Worker

TOUCH_S: Final = 60.0  # a row that was used more recently is not touched again
_RUNNING_BYTES: Final = 32 << 20  # in each direction, within these numbers of rows
_RUNNING_ROWS: Final = (32, 128)
_UNIT_ROWS: Final = WINDOW_ROWS  # that are handed to the worker together, within these bytes; no window has fewer
_UNIT_BYTES: Final = 4 << 20
_NEVER_S: Final = -(1 << 62)


@dataclass(frozen=True)
class Opened:
    """One opening of the tier. `name`: of the namespace, in hexadecimal."""

    name: str
    sealer: Sealer
    health: HealthMonitor
    budget: Budget
    sweeper: Sweeper

    def close(self) -> None:
        self.health.close()
        self.sweeper.close()


class RowTransfers:
    """The moves of one tier, for its thread. `pipeline` has them."""

    def __init__(
        self,
        region: HostRegion,
        *,
        worker: Worker,
        directory: RowDirectory,
        budget_rows: int,
        log_once: LogOnce,
        served: Callable[[], Opened],
        may_start: Callable[[], bool],
        seen: Callable[[Key], None],
        max_age_s: float | None,
        clock: Callable[[], float],
        hold_s: float,
    ) -> None:
        """`budget_rows`: for how many a budget makes room at once. `served`: when something is moved. `may_start`:
        whether anything may start now. `seen`: called for each row that is there for certain. `clock`: Unix seconds,
        for seals; ages go by the file server's. `hold_s`: see `MovePipeline`."""
        row_bytes = region.geometry.row_bytes
        self._worker = worker
        self._directory = directory
        self._log_once = log_once
        self._served = served
        self._seen = seen
        self._max_age_s = max_age_s
        self._clock = clock
        least, most = _RUNNING_ROWS
        rows = max(least, min(most, _RUNNING_BYTES // row_bytes))
        unit_rows = max(1, min(_UNIT_ROWS, _UNIT_BYTES // row_bytes, budget_rows))
        queue = partial(MoveQueue, limit=rows, limit_rows=rows, unit_rows=unit_rows)
        self.pipeline = MovePipeline(
            queue(run=self._run_load),
            queue(admit=self._admit_store, run=self._run_store),
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
            moved = [Moved(Trouble.NOT_MOVED, error.errno or 0)] * len(moves)
        return dict(zip(moves, moved, strict=True))

    def _reason(self, move: Move, error: int) -> str:
        """Why a row was not moved; the path is looked at soon."""
        self._served().health.check_soon()
        return f"{self._directory.absolute(self._path_of(move))}: {os.strerror(error)}"

    # --- stores -----------------------------------------------------------------------------------------------------

    def _admit_store(self, unit: Unit) -> bool:
        """All rows of a unit wait for room, or find none."""
        served = self._served()
        granted = served.budget.reserve(len(unit.moves))
        if not granted or served.budget.sweep_soon:
            served.sweeper.wake()
        if granted:
            return True
        if full := served.sweeper.full:
            unit.end_all(Outcome.NO_SPACE)
        return full

    def _run_store(self, unit: Unit) -> Steps[None]:
        names, base = self._directory.temp_names, self._directory.held
        server_s = self._directory.server_time.now_s()
        # The later of two clocks: a row must not seem older than it is by either. Where rows have an age, one that is
        # there is stored again: it may be old.
        place = Place(
            base.descriptor,
            base.uid,
            names.prefix,
            self.direct,
            max(self._clock(), server_s),
            server_s - TOUCH_S,
            keep=self._max_age_s is None,
        )
        numbers = names.take(len(unit.moves))
        moved = yield from self._move(unit, place, numbers, write=True)
        names.release(numbers)
        unit.end_each(lambda move: self._stored(move, moved[move]))

    def _stored(self, move: Move, moved: Moved) -> Outcome:
        self._served().budget.ended()
        if moved.verdict is Trouble.NOT_MOVED:
            sentence = f"{self._directory.path}: rows cannot be written ({self._reason(move, moved.error)})"
            self._log_once.report("written", sentence)
            if moved.error in FULL_ERRORS:
                return Outcome.NO_SPACE
            self.problem = sentence
            return Outcome.FAILED
        self.problem = ""
        self._seen(move.key)
        return Outcome.FOUND if moved.verdict is Trouble.FOUND else Outcome.OK

    # --- loads ------------------------------------------------------------------------------------------------------

    def _run_load(self, unit: Unit) -> Steps[None]:
        base, now_s = self._directory.held, self._directory.server_time.now_s()
        expired_s = _NEVER_S if self._max_age_s is None else now_s - self._max_age_s
        place = Place(base.descriptor, base.uid, "", self.direct, now_s, now_s - TOUCH_S, expired_s)
        moved = yield from self._move(unit, place, [0] * len(unit.moves), write=False)
        unit.end_each(lambda move: self._loaded(move, moved[move]))

    def _loaded(self, move: Move, moved: Moved) -> Outcome | None:
        verdict = moved.verdict
        if isinstance(verdict, Verdict):
            begins_s, now_s = age_from(moved.sealed_at, moved.mtime_ns), self._directory.server_time.now_s()
            outcome = self.pipeline.judge(
                verdict,
                expired=has_expired(begins_s, now_s, self._max_age_s),
                name=lambda: str(self._directory.absolute(self._path_of(move))),
                forget=lambda _: self._delete(move, moved),
            )
            if outcome is Outcome.OK:
                self._seen(move.key)
            return outcome
        if verdict is Trouble.NOT_MOVED:
            sentence = f"{self._directory.path}: rows cannot be read ({self._reason(move, moved.error)})"
            self._log_once.report("read", sentence)
            return Outcome.FAILED
        if verdict is not Trouble.ABSENT:
            self._log_once.report(verdict.name, f"{self._directory.absolute(self._path_of(move))} {verdict.value}")
        if verdict is not Trouble.CUT:
            return Outcome.MISSING
        self._delete(move, moved)
        return Outcome.CORRUPT

    def _delete(self, move: Move, moved: Moved) -> None:
        path, delete = self._path_of(move), self._directory.delete_unless_replaced
        self._deletes.append(self._directory.threads.submit(delete, path, moved.inode, moved.mtime_ns))

    def _path_of(self, move: Move) -> RowPath:
        return RowPath.of(self._served().name, move.key)
