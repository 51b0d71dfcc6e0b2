"""The file tier for directories that several engines share: one file a row, found by its key alone.

A row is written under a name that nobody else uses and renamed when it is whole. So no file that has a row's name is
ever written to, an open one stays readable when it is deleted, and a row that has vanished is a miss. Opening,
renaming and deleting may take long on a network: threads do it, and this one polls. Code of the account:
`account.py`; of the scan and the room: `shelves.py`.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from nixl_tiers.chunk import PAGE, Geometry, Key, Outcome
from nixl_tiers.config.schema import FileConfig
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.seal import Sealer, Verdict
from nixl_tiers.tiers.base import (
    GONE,
    MAX_ENTRIES,
    Entry,
    FinishedBatch,
    Move,
    StorageTier,
    TierDown,
    TierRefused,
    seal_row,
)
from nixl_tiers.tiers.disk import (
    FileIdentity,
    HealthMonitor,
    MountGuard,
    direct_works,
    open_agent,
    open_error,
    prepare_path,
)
from nixl_tiers.tiers.expiry import has_expired, sweep_s
from nixl_tiers.tiers.log_once import LogOnce
from nixl_tiers.tiers.moves import Batch, Batches
from nixl_tiers.tiers.nixl_agent import Registration, Transfer, TransferState
from nixl_tiers.tiers.rowfile.io import RowFile, RowFileIo
from nixl_tiers.tiers.rowfile.namespace import NamespaceRows
from nixl_tiers.tiers.rowfile.quota import FANS, MARGIN_BYTES, NAME_BYTES, Place, Room, counts_from
from nixl_tiers.tiers.rowfile.scanner import DirScanner
from nixl_tiers.tiers.rowfile.server_time import ServerTime

logger = logging.getLogger(__name__)

RELIST_S: Final = 5.0
_RUNNING_BYTES: Final = 32 << 20  # in each direction, within these numbers of rows
_RUNNING_ROWS: Final = (16, 64)


@dataclass(eq=False)
class _Task:
    """One move: opened on a hand, moved by NIXL, ended on a hand or here."""

    batch: Batch
    index: int
    move: Move
    place: Place
    opening: Future[RowFile | Outcome] | None = None
    file: RowFile | None = None
    transfer: Transfer | None = None
    ending: Future[Outcome] | None = None
    sealed_at: int = 0


class RowFileTier(StorageTier):
    """Rows as files of their own below `<path>/<namespace>`. Slots are a count: any key may stand with any slot."""

    def __init__(
        self,
        config: FileConfig,
        geometry: Geometry,
        region: HostRegion,
        clock: Callable[[], float] = time.time,
        server_time: ServerTime | None = None,
    ) -> None:
        """`region` stays the caller's; `clock` tells the time of day, in Unix seconds, for seals; ages go by the file
        server's. Raises TierRefused if the wanted NIXL backend cannot be had here."""
        self._config = config
        self._clock = clock
        self._sweeper = ThreadPoolExecutor(1, thread_name_prefix="sweeper")
        self._sweeping = self._sweeper.submit(lambda: None)
        self._swept_at_s = 0.0
        self._geometry = geometry
        self._row_bytes = geometry.row_bytes
        self._region = region
        self._memory: Registration | None
        self._agent, self._memory = open_agent(config, region)
        self._shelves = DirScanner(
            config.path, config.capacity, self._row_bytes, writes=config.write != "off", server_time=server_time
        )
        self._lister = ThreadPoolExecutor(1, thread_name_prefix="lister")
        least, most = _RUNNING_ROWS
        self._most = max(least, min(most, _RUNNING_BYTES // self._row_bytes))
        self._open: NamespaceRows | None = None
        self._log_once = LogOnce(logger)
        self._files = RowFileIo(
            self._agent,
            self._shelves,
            self._row_bytes,
            self._log_once,
            on_failure=self._look_soon,
            is_old=self._is_old,
        )
        self._mount = MountGuard()
        self._batches = Batches()
        self._stores: deque[_Task] = deque()
        self._loads: deque[_Task] = deque()
        self._storing: list[_Task] = []
        self._loading: list[_Task] = []
        self._dropping: list[tuple[NamespaceRows, Key, Place, Future[None]]] = []

    # --- the contract ---------------------------------------------------------------------------------------------

    def open(self, namespace: bytes, epoch: int) -> int:
        path = self._config.path
        room = self._config.capacity - MARGIN_BYTES - (FANS + 3) * PAGE
        slots = room // (self._row_bytes + NAME_BYTES)
        if slots < 1:
            raise TierRefused(
                f"capacity: {self._config.capacity} bytes hold no row of {self._row_bytes} bytes beside the "
                f"directories in {path}"
            )
        try:
            prepare_path(self._config, self._mount, self._log_once)
            self._shelves.prepare(namespace.hex())
            with self._shelves.incoming() as incoming:
                self._files.direct = direct_works(incoming)
            mark = FileIdentity(path)
            health = HealthMonitor(lambda: mark.problem() or self._shelves.problem(namespace.hex()))
        except OSError as error:
            raise open_error(error) from error
        if not self._files.direct:
            self._log_once.report("direct", f"{path} does not support O_DIRECT: rows go through the page cache")
        before = self._open
        self._open = NamespaceRows(
            namespace.hex(), Sealer(self._geometry, namespace, epoch), slots, health, self._shelves, self._is_old
        )
        if before is not None:
            before.health.close()
            if (before.name, before.sealer.epoch) == (namespace.hex(), epoch):
                self._open.before = before.known | before.before
        self._mount.remember(path)
        self._shelves.start()
        return slots

    @property
    def relist_s(self) -> float | None:
        age_s = self._config.max_age
        return RELIST_S if age_s is None else min(RELIST_S, sweep_s(age_s))

    def list_rows(self) -> Iterator[list[Entry]]:
        """What is new since the last call, and as entries of slot GONE what the engine believes in and is not there
        any more. No more than there are slots for: the engine would drop it, and others may need it."""
        served = self._served
        comparing = self._lister.submit(served.compare)
        while not comparing.done():
            yield []
            if served is not self._open:
                return
        new, gone = comparing.result()
        yield from self._in_batches(served, served.still_gone(gone))
        yield from self._in_batches(served, served.still_new(new))
        lost, served.before = served.before - served.known, set()
        yield from self._in_batches(served, (Entry(GONE, key, 0) for key in lost))

    def maintain(self) -> Iterator[list[Entry]]:
        """Begin to delete what is too old, when it is time: the next listing finds out what is gone."""
        age_s, now = self._config.max_age, self._shelves.server_time.now_s()
        if age_s is not None and self._sweeping.done() and abs(now - self._swept_at_s) >= sweep_s(age_s):
            self._swept_at_s = now
            self._sweeping = self._sweeper.submit(self._shelves.expire, now, age_s)
        return iter(())

    @property
    def maintain_s(self) -> float | None:
        return None if self._config.max_age is None or self._config.write == "off" else self.relist_s

    def store(self, moves: Sequence[Move]) -> int:
        served = self._served
        for move in moves:
            served.known.add(move.key)
            served.storing[move.key] += 1
            served.tick = max(served.tick, move.tick)
        return self._accept(moves, self._stores)

    def load(self, moves: Sequence[Move]) -> int:
        return self._accept(moves, self._loads)

    def poll(self) -> list[FinishedBatch]:
        self._storing = [task for task in self._storing if not self._over(task, self._begin_write, self._end_write)]
        self._loading = [task for task in self._loading if not self._over(task, self._begin_read, self._end_read)]
        self._reap_drops()
        problem = self._open.health.poll() if self._open is not None else ""
        if problem:
            self._give_up()
        self._start_more()
        if problem and not (self._storing or self._loading or self._dropping or self._batches.waiting):
            raise TierDown(problem)
        return self._batches.take()

    def delete(self, entries: Sequence[tuple[int, bytes]]) -> None:
        served = self._served
        for _, key in entries:
            if key in served.known:  # else it has gone already, and what is there now is somebody else's
                served.known.remove(key)
                served.dropping[key] += 1
                place = Place.of(served.name, key)
                self._shelves.leaving(place, +1)
                gone = self._shelves.on_hand(place, self._shelves.take_away, place)
                self._dropping.append((served, key, place, gone))

    @property
    def busy(self) -> bool:
        running = self._storing or self._loading or self._stores or self._loads or self._dropping
        going = self._open is not None and self._open.health.problem
        return bool(running or going or self._batches.waiting)

    @property
    def used_bytes(self) -> int:
        """What this engine knows of: others may have written since it last looked."""
        return self._shelves.used_bytes

    def close(self) -> None:
        if self._open is not None:
            self._open.health.close()
        self._open = None
        for thread in (self._lister, self._sweeper):
            thread.shutdown(wait=False, cancel_futures=True)
        self._shelves.close()
        if self._memory is not None:
            self._agent.deregister(self._memory)
            self._memory = None

    def _look_soon(self) -> None:
        if (served := self._open) is not None:
            served.health.check_soon()

    # --- listing ----------------------------------------------------------------------------------------------------

    @property
    def _served(self) -> NamespaceRows:
        if self._open is None:
            raise RuntimeError("the tier is not open")
        return self._open

    def _is_old(self, counted_from: int) -> bool:
        """Whether a row is known to be too old, and will not go: whoever writes has it swept, seal read once more."""
        return self._config.write == "off" and counted_from > 0 and self._has_expired(counted_from)

    def _has_expired(self, counted_from: int) -> bool:
        age_s = self._config.max_age
        return age_s is not None and has_expired(counted_from, self._shelves.server_time.now_s(), age_s)

    def _in_batches(self, served: NamespaceRows, entries: Iterator[Entry]) -> Iterator[list[Entry]]:
        batch: list[Entry] = []
        for entry in entries:
            batch.append(entry)
            if len(batch) == MAX_ENTRIES:
                yield batch
                if served is not self._open:
                    return
                batch = []
        if batch:
            yield batch

    # --- moving rows ------------------------------------------------------------------------------------------------

    def _accept(self, moves: Sequence[Move], waiting: deque[_Task]) -> int:
        batch = self._batches.begin(len(moves))
        name = self._served.name
        waiting.extend(_Task(batch, index, move, Place.of(name, move.key)) for index, move in enumerate(moves))
        self._start_more()
        return batch.batch_id

    def _give_up(self) -> None:
        """The directory has gone: end what has not been started. What runs ends by itself."""
        while self._loads:
            self._end(self._loads.popleft(), Outcome.FAILED, writes=False)
        while self._stores:
            self._end(self._stores.popleft(), Outcome.FAILED, writes=True)

    def _start_more(self) -> None:
        if self._open is not None and self._open.health.problem:
            return
        while self._loads and len(self._loading) < self._most:
            task = self._loads.popleft()
            task.opening = self._shelves.on_hand(task.place, self._files.open_row, task.place)
            self._loading.append(task)
        while self._stores and len(self._storing) < self._most:
            room = self._shelves.reserve(min(len(self._stores), self._most))
            if room is Room.WAIT:
                return
            task = self._stores.popleft()
            if room is Room.NO:
                self._end(task, Outcome.NO_SPACE, writes=True)
                continue
            if task.move.seal:
                # Whichever clock it is judged by, it is not older than it is: ahead of one of them, it loses nothing.
                now_s = max(self._clock(), self._shelves.server_time.now_s())
                seal_row(self._served.sealer, self._region, task.move, now_s)
            task.sealed_at = self._served.sealer.sealed_at(self._region.rows_view[task.move.row])
            task.opening = self._shelves.on_hand(task.place, self._files.open_fresh)
            self._storing.append(task)

    def _over(self, task: _Task, begin: Callable[[_Task], None], end: Callable[[_Task, bool], Outcome | None]) -> bool:
        """Go on with a task; whether it has ended."""
        if task.opening is not None:
            if not task.opening.done():
                return False
            opened, task.opening = task.opening.result(), None
            if isinstance(opened, Outcome):
                self._end(task, opened, writes=begin == self._begin_write)
                return True
            task.file = opened
            begin(task)
        if task.transfer is not None:
            state = task.transfer.state()
            if state is TransferState.PENDING:
                return False
            task.transfer.release()
            task.transfer = None
            outcome = end(task, state is TransferState.DONE)
            if outcome is not None:
                self._end(task, outcome, writes=False)
                return True
        if task.ending is not None and task.ending.done():
            self._end(task, task.ending.result(), writes=begin == self._begin_write)
            return True
        return False

    def _end(self, task: _Task, outcome: Outcome, *, writes: bool) -> None:
        key, served = task.move.key, self._served
        self._batches.end(task.batch, task.index, outcome)
        if writes:
            served.storing[key] -= 1
            if not served.storing[key]:
                del served.storing[key]
        # What the engine will forget now is not ours to take away: see `delete`.
        forgotten = outcome is not Outcome.OK if writes else outcome in (Outcome.MISSING, Outcome.CORRUPT)
        if forgotten:
            served.known.discard(key)

    def _span(self, task: _Task) -> tuple[int, int, int, int]:
        assert task.file is not None
        address = self._region.address + task.move.row * self._row_bytes
        return address, self._row_bytes, 0, task.file.registration.devices[0]

    def _begin_write(self, task: _Task) -> None:
        task.transfer = self._agent.write([self._span(task)])

    def _end_write(self, task: _Task, good: bool) -> Outcome | None:
        assert task.file is not None
        task.ending = self._shelves.on_hand(
            task.place, self._files.put_away, task.file, task.place, good, task.sealed_at
        )
        return None

    def _begin_read(self, task: _Task) -> None:
        task.transfer = self._agent.read([self._span(task)])

    def _end_read(self, task: _Task, good: bool) -> Outcome | None:
        file, place = task.file, task.place
        assert file is not None
        if not good:
            task.ending = self._shelves.on_hand(place, self._files.explain, file, place)
            return None
        row, sealer = self._region.rows_view[task.move.row], self._served.sealer
        verdict = sealer.verify(row, task.move.key)
        sealed_at = sealer.sealed_at(row) if verdict is Verdict.OK else 0
        old = verdict is Verdict.OK and self._has_expired(counts_from(sealed_at, file.status))
        good = verdict is Verdict.OK and not (old and self._config.write != "off")
        self._shelves.on_hand(place, self._files.let_go, file, place, good, sealed_at)
        if old:
            return Outcome.MISSING
        if verdict is not Verdict.OK:
            self._log_once.report("spoilt", f"{file.path} is not the row that it should be ({verdict.name})")
            return Outcome.CORRUPT
        return Outcome.OK

    def _reap_drops(self) -> None:
        waiting = []
        for served, key, place, gone in self._dropping:
            if gone.done():
                self._shelves.leaving(place, -1)
                served.dropping[key] -= 1
                if not served.dropping[key]:
                    del served.dropping[key]
            else:
                waiting.append((served, key, place, gone))
        self._dropping = waiting
