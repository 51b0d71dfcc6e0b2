"""Rows on their way between slots of slab files and the region, or buffers (`staging.py`): what a store and a load do,
step by step. One loop of units; what moves a unit is the native worker (`WorkerTransfers`) or NIXL (`NixlTransfers`).

A batch is cut into units of some megabytes. Sealing and checking one unit overlaps with the I/O of the others.
Reads may land in the region itself: both drain what is in flight before they report an error, and no request uses a row
before it has been verified.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.memory.seal import Verdict
from nixl_tiers.tiers.base import Move
from nixl_tiers.tiers.disk import describe, open_agent
from nixl_tiers.tiers.move_queue import MoveQueue, Steps, Unit
from nixl_tiers.tiers.moves import MovePipeline, finished, transferred
from nixl_tiers.tiers.nixl_agent import Agent, AgentError, Registrar, Registration, Span
from nixl_tiers.tiers.slab.in_flight import LOADS_BYTES, StoreWindow, request_bytes, rows_of_loads
from nixl_tiers.tiers.slab.worker import Moved, Worker, open_worker
from nixl_tiers.tiers.staging import DirectRows, Staging

if TYPE_CHECKING:
    from nixl_tiers.tiers.slab.tier import SlabTier

_UNIT_BYTES: Final = 8 << 20
_UNIT_ROWS: Final = 64
_STAGED_LOADS_BYTES: Final = LOADS_BYTES + _UNIT_BYTES  # one unit is verified meanwhile
_WORKER_UNIT_BYTES: Final = 16 << 20  # its threads share the rows of a unit
_WORKER_UNIT_ROWS: Final = 256
_UNITS: Final = 64  # in each direction, within the rows of `in_flight.py`

Place = tuple[int, int]


class Transfers(ABC):
    """For the tier's thread. `moves`: all moves of the tier go through it; `registrar`: of the slabs; `staging`: the
    buffers; `wake_fd`: readable when `poll` will find something, None where units have to be polled."""

    def __init__(
        self, tier: SlabTier, registrar: Registrar, *, unit_bytes: int, unit_rows: int, wake_fd: int | None
    ) -> None:
        """A unit is at most so large, or one row."""
        self.registrar = registrar
        self.wake_fd = wake_fd
        self.staging = Staging(tier.config, tier.region, registrar, loads_bytes=_STAGED_LOADS_BYTES)
        self._tier = tier
        self._row_bytes = row_bytes = tier.geometry.row_bytes
        self._window = StoreWindow(row_bytes)
        queue = partial(MoveQueue, limit=_UNITS, unit_rows=max(1, min(unit_rows, unit_bytes // row_bytes)))
        self.moves = MovePipeline(
            queue(limit_rows=rows_of_loads(row_bytes), admit=tier.admit_load, run=self._run_load),
            queue(limit_rows=self._window.rows, admit=tier.admit_store, run=self._run_store),
            may_start=tier.may_start,
            held_until_s=lambda: tier.region.stores_held_until_s,
            wakes=wake_fd is not None,
            hold_s=tier.times.stores_held_s,
        )

    @abstractmethod
    def _move(self, unit: Unit, rows: DirectRows, places: Sequence[Place], *, write: bool) -> Steps[Sequence[Moved]]:
        """Seal and write the rows of a unit, or read and verify them, and say what became of each; nothing if each is
        to be tried alone. `places`: device and offset of each slot. Raises AgentError or OSError if it cannot begin."""

    def poll(self) -> None:
        """Go on with what runs."""
        self.moves.poll()

    def close(self) -> None:
        """Nothing is in flight. May be called twice."""
        self.staging.close()

    # --- a unit -----------------------------------------------------------------------------------------------------

    def _run_load(self, unit: Unit) -> Steps[None]:
        with (yield from self.staging.loads.rows(unit.moves)) as rows:
            moved = yield from self._begin(unit, rows, write=False)
            self._end(unit, moved, self._judged)

    def _run_store(self, unit: Unit) -> Steps[None]:
        with (yield from self.staging.stores.rows(unit.moves)) as rows:
            count, began_s = self.moves.stores.rows_moving, time.monotonic()
            moved = yield from self._begin(unit, rows, write=True)
            good = [
                (move.slot, move.key, at, error)
                for move, (verdict, at, error) in zip(unit.moves, moved, strict=False)
                if verdict is not None
            ]
            if good:  # one that was not written says nothing of how fast the medium is
                self._window.written(count, time.monotonic() - began_s)
                self.moves.stores.limit_rows = self.staging.stores.cap(self._window.rows)
                self._tier.served.store_problem = ""
                self._tier.served.journal.stored(good)
            self._end(unit, moved, self._written)

    def _begin(self, unit: Unit, rows: DirectRows, *, write: bool) -> Steps[Sequence[Moved]]:
        """`_move`; if that cannot begin, the moves end."""
        served = self._tier.served
        try:
            places = [served.slabs.locate(move.slot) for move in unit.moves]
            return (yield from self._move(unit, rows, places, write=write))
        except (AgentError, OSError) as error:
            self._tier.log_once.report("agent", describe(error) if isinstance(error, OSError) else str(error))
            served.health.check_soon()
            unit.end_all(Outcome.FAILED)
            return ()

    def _end(
        self, unit: Unit, moved: Sequence[Moved], outcome: Callable[[Move, Verdict | None, int], Outcome | None]
    ) -> None:
        if moved:
            ends = iter(moved)
            unit.end_each(lambda move: outcome(move, *next(ends)[:2]))

    # --- what becomes of a row --------------------------------------------------------------------------------------

    def _judged(self, move: Move, verdict: Verdict | None, sealed_at: int) -> Outcome | None:
        """`verdict`: None if the row could not be read. `sealed_at`: by its seal."""
        served = self._tier.served
        if verdict is None:
            served.load_failed()
            return Outcome.FAILED
        return self.moves.judge(
            verdict,
            expired=served.expiry.expire_if_due(move.slot, sealed_at),
            name=lambda: f"{served.path}: slot {move.slot}",
            forget=lambda _: served.journal.remove(move.slot, move.key),  # its bytes stay, for the next sweep
        )

    def _written(self, move: Move, verdict: Verdict | None, sealed_at: int) -> Outcome:
        """`verdict`: None if the row could not be written, else the journal has it. `sealed_at`: by its seal."""
        if verdict is not None:
            return Outcome.OK
        served = self._tier.served
        served.journal.mark_garbage(move.slot, sealed_at)
        if served.slabs.disk_is_full():
            return Outcome.NO_SPACE
        served.store_failed()
        return Outcome.FAILED


class WorkerTransfers(Transfers):
    """By the native worker, which seals and verifies, too."""

    def __init__(self, tier: SlabTier, worker: Worker) -> None:
        super().__init__(tier, worker, unit_bytes=_WORKER_UNIT_BYTES, unit_rows=_WORKER_UNIT_ROWS, wake_fd=worker.fd)
        self.worker = worker

    def poll(self) -> None:
        self.worker.poll()
        super().poll()

    def close(self) -> None:
        super().close()
        self.worker.close()

    def _move(self, unit: Unit, rows: DirectRows, places: Sequence[Place], *, write: bool) -> Steps[Sequence[Moved]]:
        served = self._tier.served
        records = served.journal.file.writer
        return self.worker.move(
            unit.moves, rows, places, served.sealer, served.clock(), write=write, records=records if write else None
        )


class NixlTransfers(Transfers):
    """By NIXL, whose transfers go on while they are polled; rows are sealed and verified on the tier's thread."""

    def __init__(self, tier: SlabTier, agent: Agent, memory: Registration | None) -> None:
        """`memory`: the region, if it is registered."""
        super().__init__(tier, agent, unit_bytes=_UNIT_BYTES, unit_rows=_UNIT_ROWS, wake_fd=None)
        # cuFile cuts rows by itself, on threads that take one request each.
        gds = tier.config.backend == "gds_mt"
        self._request_bytes = self._row_bytes if gds else request_bytes(self._row_bytes)
        self.agent = agent
        self._memory = memory

    def close(self) -> None:
        super().close()
        if self._memory is not None:
            self.agent.deregister(self._memory)
            self._memory = None

    def _move(self, unit: Unit, rows: DirectRows, places: Sequence[Place], *, write: bool) -> Steps[Sequence[Moved]]:
        """One bad row fails a whole transfer: then each is tried alone."""
        return (self._write if write else self._read)(unit, rows, self._spans(unit.moves, rows, places))

    def _read(self, unit: Unit, rows: DirectRows, spans: Sequence[Span]) -> Steps[Sequence[Moved]]:
        good = yield from transferred(self.agent.read(spans))
        self.moves.make_way(unit)  # the disk need not wait until these rows are verified
        if not good and len(unit.moves) > 1:
            return ()
        return [self._verified(move, rows) if good else (None, 0, 0) for move in unit.moves]

    def _write(self, unit: Unit, rows: DirectRows, spans: Sequence[Span]) -> Steps[Sequence[Moved]]:
        served, moves, view = self._tier.served, [*unit.moves], self._tier.region.rows_view
        journal, now_s = served.journal, served.clock()
        for move in moves:
            rows.prepare(served.sealer, move, now_s)
        times = [served.sealer.sealed_at(view[move.row]) for move in moves]
        forgotten = yield from finished(journal.threads.submit(journal.forget, [move.slot for move in moves]))
        if forgotten < 0 or not (yield from transferred(self.agent.write(spans))):
            for move, at in zip(moves, times, strict=True):
                journal.mark_garbage(move.slot, at, ended=False)  # also if none of them is tried again
            return () if len(moves) > 1 else [(None, times[0], 0)]
        made = [(move.slot, move.key, move.tick, at) for move, at in zip(moves, times, strict=True)]
        error = abs((yield from finished(journal.threads.submit(journal.record, made))))
        return [(Verdict.OK, at, error) for at in times]

    def _verified(self, move: Move, rows: DirectRows) -> Moved:
        sealer, (row, copy) = self._tier.served.sealer, rows.loaded(move)
        sealed_at = sealer.sealed_at(row)  # before its copy may be used
        return sealer.verify(row, move.key, copy), sealed_at, 0

    def _spans(self, moves: Collection[Move], rows: DirectRows, places: Sequence[Place]) -> list[Span]:
        row_bytes, step = self._row_bytes, self._request_bytes
        return [
            (rows.address(move) + at, min(step, row_bytes - at), offset + at, device)
            for move, (device, offset) in zip(moves, places, strict=True)
            for at in range(0, row_bytes, step)
        ]


def open_transfers(tier: SlabTier, movers: int) -> Transfers:
    """What the configuration chooses; by default the worker, or NIXL where that cannot be had. `movers`: of the tier,
    in all engines that share its path. Raises TierRefused."""
    worker = open_worker(tier.config, tier.region, tier.geometry, movers)
    if worker is not None:
        return WorkerTransfers(tier, worker)
    return NixlTransfers(tier, *open_agent(tier.config, tier.region))
