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
from typing import TYPE_CHECKING, Final

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.base.mounts import memory_at
from nixl_tiers.memory.seal import Sealer, Verdict
from nixl_tiers.tiers.base import Move, expire_if_due
from nixl_tiers.tiers.disk import FULL_ERRORS, HealthMonitor
from nixl_tiers.tiers.manifests import ManifestMedium
from nixl_tiers.tiers.move_queue import MoveQueue, Steps, Unit
from nixl_tiers.tiers.moves import MovePipeline
from nixl_tiers.tiers.rowfile.budget import WINDOW_ROWS, Budget
from nixl_tiers.tiers.rowfile.directory import RowDirectory
from nixl_tiers.tiers.rowfile.expire import age_from
from nixl_tiers.tiers.rowfile.names import RowPath
from nixl_tiers.tiers.rowfile.sweep import Sweeper
from nixl_tiers.tiers.rowfile.worker import Moved, Place, Trouble, Worker

if TYPE_CHECKING:
    from nixl_tiers.tiers.rowfile.tier import RowFileTier

TOUCH_S: Final = 60.0  # a row that was used more recently is not touched again
_RUNNING_BYTES: Final = 32 << 20  # in each direction, within these numbers of rows
_RUNNING_ROWS: Final = (32, 128)
_UNIT_ROWS: Final = WINDOW_ROWS  # that are handed to the worker together, within these bytes; no window has fewer
_UNIT_BYTES: Final = 4 << 20
_NEVER_S: Final = -(1 << 62)


@dataclass(frozen=True)
class Opened(ManifestMedium):
    """One opening of the tier, and the manifest of its namespace: once there are rows, since one without any needs
    none. `name`: of the namespace, in hexadecimal. `direct`: whether its files are opened with O_DIRECT; a load does
    without where it must."""

    name: str
    directory: RowDirectory
    direct: bool
    sealer: Sealer
    health: HealthMonitor
    budget: Budget
    sweeper: Sweeper

    def is_wanted(self) -> bool:
        return self.directory.writes and self.budget.has_rows(self.name) and not self.health.problem

    def read(self) -> bytes | None:
        return self.directory.read_manifest(self.name)

    def write(self, raw: bytes) -> bool:
        self.directory.write_manifest(self.name, raw)
        return True

    def close(self) -> None:
        self.health.close()
        self.sweeper.close()


class RowTransfers:
    """The moves of one tier, for its thread. `pipeline` has them."""

    def __init__(self, tier: RowFileTier, clock: Callable[[], float]) -> None:
        """`clock`: Unix seconds, for seals. Raises OSError: no threads can be had, or no memory."""
        row_bytes, budget = tier.geometry.row_bytes, tier.new_budget()
        self.worker = Worker(tier.region, tier.geometry, in_memory=bool(memory_at(tier.config.path)))
        self._tier = tier
        self._clock = clock
        self._directory = tier.directory
        self._max_age_s = tier.config.max_age
        least, most = _RUNNING_ROWS
        rows = max(least, min(most, _RUNNING_BYTES // row_bytes))
        # A budget makes room for so many at once.
        unit_rows = max(1, min(_UNIT_ROWS, _UNIT_BYTES // row_bytes, budget.room_bytes // budget.row_bytes))
        queue = partial(MoveQueue, limit=rows, limit_rows=rows, unit_rows=unit_rows)
        self.pipeline = MovePipeline(
            queue(run=self._run_load),
            queue(admit=self._admit_store, run=self._run_store),
            may_start=tier.may_start,
            held_until_s=lambda: tier.region.stores_held_until_s,
            wakes=True,
            hold_s=tier.times.stores_held_s,
        )
        self._deletes: list[Future[None]] = []
        self.problem = ""
        """Why rows cannot be stored now, unless the disk is full."""

    def poll(self) -> None:
        """Go on with what runs. Raises the errors of threads that have deleted bad rows: they end this mover."""
        self.worker.poll()
        self.pipeline.poll()
        for deleted in [each for each in self._deletes if each.done()]:
            self._deletes.remove(deleted)
            deleted.result()

    def _move(self, unit: Unit, place: Place, numbers: Sequence[int], *, write: bool) -> Steps[dict[Move, Moved]]:
        """What became of the rows of a unit."""
        moves, sealer = [*unit.moves], self._tier.served.sealer
        try:
            moved = yield from self.worker.move(moves, numbers, place, sealer, write=write)
        except OSError as error:
            moved = [Moved(Trouble.NOT_MOVED, error.errno or 0)] * len(moves)
        return dict(zip(moves, moved, strict=True))

    def _failed(self, move: Move, moved: Moved, done: str) -> str:
        """A row that was not moved: why, as a sentence, which is logged; and the path is looked at soon."""
        self._tier.served.health.check_soon()
        why = f"{self._name_of(move)}: {os.strerror(moved.error)}"
        sentence = f"{self._directory.path}: rows cannot be {done} ({why})"
        self._tier.log_once.report(done, sentence)
        return sentence

    # --- stores -----------------------------------------------------------------------------------------------------

    def _admit_store(self, unit: Unit) -> bool:
        """All rows of a unit wait for room, or find none."""
        served = self._tier.served
        granted = served.budget.reserve(len(unit.moves))
        if not granted or served.budget.sweep_due:
            served.sweeper.wake()
        if granted:
            return True
        if full := served.sweeper.full:
            unit.end_all(Outcome.NO_SPACE)
        return full

    def _run_store(self, unit: Unit) -> Steps[None]:
        names, base = self._directory.temp_names, self._directory.held
        server_s = self._directory.server_time.now_s()
        now_s = max(self._clock(), server_s)  # so a row does not seem older than it is by either
        keep = self._max_age_s is None  # else one that is there may be old
        direct = self._tier.served.direct
        place = Place(base.descriptor, base.uid, names.prefix, direct, now_s, server_s - TOUCH_S, keep=keep)
        numbers = names.take(len(unit.moves))
        moved = yield from self._move(unit, place, numbers, write=True)
        names.release(numbers)
        unit.end_each(lambda move: self._stored(move, moved[move]))

    def _stored(self, move: Move, moved: Moved) -> Outcome:
        failed, full = moved.verdict is Trouble.NOT_MOVED, moved.error in FULL_ERRORS
        self._tier.served.budget.ended(fits=None if failed and not full else not failed)
        if failed:
            sentence = self._failed(move, moved, "written")
            if full:
                return Outcome.NO_SPACE
            self.problem = sentence
            return Outcome.FAILED
        self.problem = ""
        self._tier.seen(move.key)
        return Outcome.FOUND if moved.verdict is Trouble.FOUND else Outcome.OK

    # --- loads ------------------------------------------------------------------------------------------------------

    def _run_load(self, unit: Unit) -> Steps[None]:
        base, now_s = self._directory.held, self._directory.server_time.now_s()
        expired_s = _NEVER_S if self._max_age_s is None else now_s - self._max_age_s
        place = Place(base.descriptor, base.uid, "", self._tier.served.direct, now_s, now_s - TOUCH_S, expired_s)
        moved = yield from self._move(unit, place, [0] * len(unit.moves), write=False)
        unit.end_each(lambda move: self._loaded(move, moved[move]))

    def _loaded(self, move: Move, moved: Moved) -> Outcome | None:
        verdict = moved.verdict
        if isinstance(verdict, Verdict):
            begins_s, now_s = age_from(moved.sealed_at, moved.mtime_ns), self._directory.server_time.now_s()
            outcome = self.pipeline.judge(
                verdict,
                expired=expire_if_due(begins_s, now_s, self._max_age_s),
                name=lambda: self._name_of(move),
                forget=lambda _: self._delete(move, moved),
            )
            if outcome is Outcome.OK:
                self._tier.seen(move.key)
            return outcome
        if verdict is Trouble.NOT_MOVED:
            self._failed(move, moved, "read")
            return Outcome.FAILED
        if verdict is not Trouble.ABSENT:
            self._tier.log_once.report(verdict.name, f"{self._name_of(move)} {verdict.value}")
        if verdict is not Trouble.CUT:
            return Outcome.MISSING
        self._delete(move, moved)
        return Outcome.CORRUPT

    def _delete(self, move: Move, moved: Moved) -> None:
        path, delete = self._path_of(move), self._directory.delete_unless_replaced
        self._deletes.append(self._directory.threads.submit(delete, path, moved.inode, moved.mtime_ns))

    def _path_of(self, move: Move) -> RowPath:
        return RowPath.of(self._tier.served.name, move.key)

    def _name_of(self, move: Move) -> str:
        return str(self._directory.absolute(self._path_of(move)))
