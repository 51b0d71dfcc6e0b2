"""Rows on their way between the host region and their files: what a store and a load do, step by step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.base import Move, has_expired
from nixl_tiers.tiers.moves import MovePipeline, MoveQueue, Steps, Unit, finished
from nixl_tiers.tiers.nixl_agent import Agent, Span
from nixl_tiers.tiers.rowfile.directory import RowDirectory
from nixl_tiers.tiers.rowfile.io import NewFile, RowFile, RowFileIo, Written
from nixl_tiers.tiers.rowfile.namespace import NamespaceRows
from nixl_tiers.tiers.rowfile.quota import DirQuota, Reservation, RowPath, age_from
from nixl_tiers.tiers.staging import DirectRows, Staging

_RUNNING_BYTES: Final = 32 << 20  # in each direction, within these numbers of rows
_RUNNING_ROWS: Final = (16, 64)
_UNIT_ROWS: Final = 8  # that are stored together, within these bytes
_UNIT_BYTES: Final = 1 << 20


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
    ) -> None:
        """`served`: the open namespace, when something is moved. `may_start`: whether anything may start now. `clock`:
        Unix seconds, for seals; ages go by the file server's."""
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
            good = yield from self.pipeline.transferred(unit, self._agent.write(spans))
            if good:
                rows.moved(len(new))
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
            if (yield from self.pipeline.transferred(unit, self._agent.read([self._span(move, rows, file)]))):
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
            name=str(file.path),
            has_expired=lambda sealed_at: self._has_expired(age_from(sealed_at, file.status)),
            forget=end,
        )
        if outcome is Outcome.OK:
            rows.moved()
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
