"""Rows on their way between slots of slab files and the region, or buffers (`staging.py`): what a store and a load do,
step by step, by the native worker (`WorkerTransfers`) or by NIXL (`NixlTransfers`).

A batch is cut into units of some megabytes. Sealing and checking one unit overlaps with the I/O of the others.
Reads may land in the region itself: both drain what is in flight before they report an error, and no request uses a row
before it has been verified.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.base.times import Times
from nixl_tiers.config.schema import FileConfig
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.seal import Verdict
from nixl_tiers.tiers.base import Move
from nixl_tiers.tiers.disk import describe, open_agent
from nixl_tiers.tiers.move_queue import MoveQueue, Steps, T, Unit
from nixl_tiers.tiers.moves import MovePipeline, finished
from nixl_tiers.tiers.nixl_agent import Agent, AgentError, Registrar, Registration, Span, Transfer
from nixl_tiers.tiers.slab.in_flight import LOADS_BYTES, StoreWindow, request_bytes, rows_of_loads
from nixl_tiers.tiers.slab.journal_file import tag_of
from nixl_tiers.tiers.slab.shard import Shard
from nixl_tiers.tiers.slab.worker import Moved, Worker, open_worker
from nixl_tiers.tiers.staging import DirectRows, Staging

_UNIT_BYTES: Final = 8 << 20
_UNIT_ROWS: Final = 64
_STAGED_LOADS_BYTES: Final = LOADS_BYTES + _UNIT_BYTES  # one unit is verified meanwhile
_UNITS_SEALED: Final = 1  # beside those that run, for the next one to be written
_WORKER_UNIT_BYTES: Final = 16 << 20  # its threads share the rows of a unit
_WORKER_UNIT_ROWS: Final = 256
_UNITS: Final = 64  # in each direction, within the rows of `in_flight.py`


@dataclass(frozen=True)
class TierSide:
    """What the tier brings. `movers`: of the tier, in all engines that share its path; `served`: the shard that is
    open; `clock` returns Unix seconds; the others are what `MovePipeline` and its queues ask."""

    config: FileConfig
    geometry: Geometry
    region: HostRegion
    movers: int
    served: Callable[[], Shard]
    admit_load: Callable[[Unit], bool]
    admit_store: Callable[[Unit], bool]
    may_start: Callable[[], bool]
    log_once: LogOnce
    clock: Callable[[], float]
    times: Times


class Transfers(ABC):
    """For the tier's thread. `moves`: all moves of the tier go through it; `registrar`: of the slabs; `staging`: the
    buffers; `wake_fd`: readable when `poll` will find something, None where units have to be polled."""

    def __init__(
        self, tier: TierSide, registrar: Registrar, *, unit_bytes: int, unit_rows: int, ahead: int, wake_fd: int | None
    ) -> None:
        """A unit is at most so large, or one row; `ahead`: how many units of stores are prepared for the next ones to
        be written."""
        self.registrar = registrar
        self.wake_fd = wake_fd
        self.staging = Staging(tier.config, tier.region, registrar, loads_bytes=_STAGED_LOADS_BYTES)
        self._tier = tier
        self._served = tier.served
        row_bytes = tier.geometry.row_bytes
        self._window = StoreWindow(row_bytes)
        queue = partial(MoveQueue, limit=_UNITS, unit_rows=max(1, min(unit_rows, unit_bytes // row_bytes)))
        self.moves = MovePipeline(
            queue(limit_rows=rows_of_loads(row_bytes), admit=tier.admit_load, run=self._run_load),
            queue(limit_rows=self._window.rows, ahead=ahead, admit=tier.admit_store, run=self._run_store),
            may_start=tier.may_start,
            held_until_s=lambda: tier.region.stores_held_until_s,
            wakes=wake_fd is not None,
            hold_s=tier.times.stores_held_s,
        )

    @abstractmethod
    def _run_load(self, unit: Unit) -> Steps[None]: ...

    @abstractmethod
    def _run_store(self, unit: Unit) -> Steps[None]: ...

    @abstractmethod
    def poll(self) -> None:
        """Go on with what runs."""

    def close(self) -> None:
        """Nothing is in flight. May be called twice."""
        self.staging.close()

    def _timed(self, steps: Steps[T]) -> Steps[T]:
        """Write a unit; how long that takes decides how many rows of stores may be in flight."""
        rows, began_s = self.moves.stores.rows_moving, time.monotonic()
        result = yield from steps
        self._window.written(rows, time.monotonic() - began_s)
        self.moves.stores.limit_rows = self._window.rows
        return result

    # --- what becomes of a row --------------------------------------------------------------------------------------

    def _judged(self, move: Move, rows: DirectRows, verdict: Verdict | None, sealed_at: int) -> Outcome | None:
        """`verdict`: None if the row could not be read. `sealed_at`: by its seal."""
        served = self._served()
        if verdict is None:
            served.load_failed()
            return Outcome.FAILED
        outcome = self.moves.judge(
            verdict,
            expired=served.expiry.has_expired(move.slot, sealed_at),
            name=lambda: f"{served.path}: slot {move.slot}",
            forget=lambda _: served.forget(move.slot, move.key),
        )
        if outcome is Outcome.OK:
            rows.moved()
        return outcome

    def _stored(self, moved: Sequence[tuple[int, int, int, int]], rows: DirectRows) -> None:
        """These were written: as `Journal.stored`."""
        if moved:
            self._served().store_problem = ""
        self._served().journal.stored(moved)
        rows.moved(len(moved))

    def _written(self, move: Move, verdict: Verdict | None, sealed_at: int) -> Outcome:
        """`verdict`: None if the row could not be written, else the journal has it. `sealed_at`: by its seal."""
        if verdict is not None:
            return Outcome.OK
        served = self._served()
        served.journal.mark_garbage(move.slot, sealed_at)
        if served.slabs.disk_is_full():
            return Outcome.NO_SPACE
        served.store_failed()
        return Outcome.FAILED

    def _cannot_begin(self, unit: Unit, error: AgentError | OSError) -> None:
        self._tier.log_once.report("agent", describe(error) if isinstance(error, OSError) else str(error))
        self._served().health.check_soon()
        unit.end_all(Outcome.FAILED)


class WorkerTransfers(Transfers):
    """By the native worker, which seals and verifies, too."""

    def __init__(self, tier: TierSide, worker: Worker) -> None:
        size = {"unit_bytes": _WORKER_UNIT_BYTES, "unit_rows": _WORKER_UNIT_ROWS}
        super().__init__(tier, worker, **size, ahead=0, wake_fd=worker.fd)
        self.worker = worker

    def poll(self) -> None:
        self.worker.poll()
        self.moves.poll()

    def close(self) -> None:
        super().close()
        self.worker.close()

    def _run_load(self, unit: Unit) -> Steps[None]:
        with (yield from self.staging.loads.rows(unit.moves)) as rows:
            ends = iter((yield from self._move(unit, rows)))
            unit.end_each(lambda move: self._judged(move, rows, *next(ends)[:2]))

    def _run_store(self, unit: Unit) -> Steps[None]:
        with (yield from self.staging.stores.rows(unit.moves)) as rows:
            tags = [tag_of(move.key) for move in unit.moves]
            moved = yield from self._timed(self._move(unit, rows, tags))
            ended = zip(unit.moves, tags, moved, strict=True)
            self._stored([(m.slot, tag, at, error) for m, tag, (good, at, error) in ended if good is not None], rows)
            ends = iter(moved)
            unit.end_each(lambda move: self._written(move, *next(ends)[:2]))

    def _move(self, unit: Unit, rows: DirectRows, tags: Sequence[int] = ()) -> Steps[Sequence[Moved]]:
        """Move the rows of a unit: what became of each. If that cannot begin, they end. `tags`: of keys to write."""
        served = self._served()
        try:
            slots = [served.slabs.locate(move.slot) for move in unit.moves]
            now_s = self._tier.clock()
            recorded = (served.journal.file.writer, tags) if tags else None
            moving = self.worker.move(
                unit.moves, rows, slots, served.sealer, now_s, write=bool(tags), recorded=recorded
            )
            return (yield from moving)
        except (AgentError, OSError) as error:
            self._cannot_begin(unit, error)
            return ()


class NixlTransfers(Transfers):
    """By NIXL, whose transfers go on while they are polled; rows are sealed and verified on the tier's thread."""

    def __init__(self, tier: TierSide, agent: Agent, memory: Registration) -> None:
        """`memory`: the region."""
        size = {"unit_bytes": _UNIT_BYTES, "unit_rows": _UNIT_ROWS}
        super().__init__(tier, agent, **size, ahead=_UNITS_SEALED, wake_fd=None)
        # cuFile cuts rows by itself, on threads that take one request each.
        row_bytes = tier.geometry.row_bytes
        self._request_bytes = row_bytes if tier.config.backend == "gds_mt" else request_bytes(row_bytes)
        self.agent = agent
        self._memory: Registration | None = memory

    def poll(self) -> None:
        self.moves.poll()

    def close(self) -> None:
        super().close()
        if self._memory is not None:
            self.agent.deregister(self._memory)
            self._memory = None

    def _run_load(self, unit: Unit) -> Steps[None]:
        with (yield from self.staging.loads.rows(unit.moves)) as rows:
            good = yield from self._transfer(unit, rows, self.agent.read)
            self.moves.make_way(unit)  # the disk need not wait until these rows are verified
            self._end(unit, good, lambda move: self._loaded(move, rows, good))

    def _run_store(self, unit: Unit) -> Steps[None]:
        with (yield from self.staging.stores.rows(unit.moves)) as rows:
            for move in unit.moves:
                rows.prepare(self._served().sealer, move, self._tier.clock())
            yield from self.moves.turn(unit)
            journal, moves = self._served().journal, [*unit.moves]
            forgotten = yield from finished(journal.threads.submit(journal.forget, [move.slot for move in moves]))
            good = forgotten >= 0 and (yield from self._timed(self._transfer(unit, rows, self.agent.write)))
            if good:
                made = [(m.slot, m.key, tag_of(m.key), m.tick, self._sealed_at(m)) for m in moves]
                error = abs((yield from finished(journal.threads.submit(journal.record, made))))
                self._stored([(slot, tag, at, error) for slot, _, tag, _, at in made], rows)
                unit.end_all(Outcome.OK)
            else:
                self._end(unit, good, lambda move: self._written(move, None, self._sealed_at(move)))

    def _transfer(self, unit: Unit, rows: DirectRows, begin: Callable[[Sequence[Span]], Transfer]) -> Steps[bool]:
        """Move the rows of a unit at once; whether that went well. If it cannot begin, they end."""
        try:
            spans = self._spans(unit.moves, rows)
        except (AgentError, OSError) as error:
            self._cannot_begin(unit, error)
            return False
        return (yield from self.moves.transferred(unit, begin(spans)))

    def _end(self, unit: Unit, good: bool, outcome: Callable[[Move], Outcome | None]) -> None:
        """One bad row fails a whole transfer: each is tried again alone."""
        if good or len(unit.moves) == 1:
            unit.end_each(outcome)

    def _spans(self, moves: Collection[Move], rows: DirectRows) -> list[Span]:
        """Raises AgentError, OSError."""
        row_bytes, locate, step = self._tier.geometry.row_bytes, self._served().slabs.locate, self._request_bytes
        places = ((rows.address(move), *locate(move.slot)) for move in moves)
        return [
            (address + at, min(step, row_bytes - at), offset + at, device)
            for address, device, offset in places
            for at in range(0, row_bytes, step)
        ]

    def _loaded(self, move: Move, rows: DirectRows, good: bool) -> Outcome | None:
        if not good:
            return self._judged(move, rows, None, 0)
        sealer = self._served().sealer
        row, copy = rows.loaded(move)
        sealed_at = sealer.sealed_at(row)
        return self._judged(move, rows, sealer.verify(row, move.key, copy), sealed_at)

    def _sealed_at(self, move: Move) -> int:
        """By the seal of a row of the region."""
        return self._served().sealer.sealed_at(self._tier.region.rows_view[move.row])


def open_transfers(tier: TierSide) -> Transfers:
    """What the configuration chooses; by default the worker, or NIXL where that cannot be had. Raises TierRefused."""
    worker = open_worker(tier.config, tier.region, tier.geometry, tier.movers)
    if worker is not None:
        return WorkerTransfers(tier, worker)
    return NixlTransfers(tier, *open_agent(tier.config, tier.region))
