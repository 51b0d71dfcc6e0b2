"""The file tier for directories that several engines share: one file per row, found by its key alone.

A row is written to a temporary file and renamed when it is whole. So no file that has a row's name is ever written to,
an open one stays readable when it is deleted, and a row that has vanished is a miss. All that may take long on a
network is done by threads: the mover's own never waits.

`transfers.py` is the way of a row, which `worker.py` moves; `quota.py` counts what is there; `directory.py` is what is
done to one row's file; `scanner.py` finds what others did; `eviction.py` deletes what is least recently used or too
old; `namespace.py` is what the core knows of it.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

from nixl_tiers.base.chunk import FAILING, PAGE, Geometry, Key
from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.base.manifest import Description
from nixl_tiers.base.times import PRODUCTION, Times
from nixl_tiers.config.schema import FileConfig
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.seal import Sealer
from nixl_tiers.tiers.base import (
    GONE,
    MAX_ENTRIES,
    MAX_SLOTS,
    EndedMoves,
    Entry,
    FinishedBatch,
    Move,
    StorageTier,
    TierDown,
    TierRefused,
    sweep_s,
)
from nixl_tiers.tiers.disk import (
    FileIdentity,
    FreeSpace,
    HealthMonitor,
    MountGuard,
    direct_works,
    open_error,
    prepare_path,
    try_out,
)
from nixl_tiers.tiers.manifests import ManifestKeeper, ManifestMedium
from nixl_tiers.tiers.moves import HELD_POLL_S
from nixl_tiers.tiers.rowfile.directory import RowDirectory, ServerTime
from nixl_tiers.tiers.rowfile.eviction import Evictor
from nixl_tiers.tiers.rowfile.names import RowPath
from nixl_tiers.tiers.rowfile.namespace import NamespaceRows
from nixl_tiers.tiers.rowfile.quota import FANOUT, MARGIN_BYTES, NAME_BYTES, DirQuota
from nixl_tiers.tiers.rowfile.scanner import DirScanner
from nixl_tiers.tiers.rowfile.transfers import RowTransfers
from nixl_tiers.tiers.rowfile.worker import Worker

logger = logging.getLogger(__name__)

RELIST_S: Final = 5.0
MAX_RELIST_S: Final = 60.0
_RELIST_SHARE: Final = (
    20  # others' changes are looked for less often where that would take more than this part of a core
)

P = ParamSpec("P")
T = TypeVar("T")


class RowFileTier(StorageTier):
    """Rows as files of their own below `<path>/<namespace>`. Slots are a count: any slot goes with any key."""

    def __init__(
        self,
        config: FileConfig,
        geometry: Geometry,
        region: HostRegion,
        clock: Callable[[], float] = time.time,
        server_time: ServerTime | None = None,
        *,
        times: Times = PRODUCTION,
    ) -> None:
        """`region` stays the caller's; `clock` returns Unix seconds, for seals; ages go by the file
        server's. Raises OSError: no threads can be had, or no memory."""
        self._config = config
        self._clock = clock
        self._times = times
        self._sweeper = ThreadPoolExecutor(1, thread_name_prefix="sweeper")
        self._sweeping = self._sweeper.submit(lambda: None)
        self._geometry = geometry
        self._row_bytes = geometry.row_bytes
        self._region = region
        self._worker = Worker(region, geometry)
        self._log_once = LogOnce(logger)
        self._quota = DirQuota(config.capacity, self._row_bytes)
        self._free = FreeSpace(config.path, config.min_free)
        self._directory = RowDirectory(config.path, self._quota, writes=config.write != "off", server_time=server_time)
        self._evictor = Evictor(self._directory, self._quota, self._log_once)
        self._scanner = DirScanner(self._directory, self._quota, self._evictor, self._log_once)
        self._lister = ThreadPoolExecutor(1, thread_name_prefix="lister")
        self._open: NamespaceRows | None = None
        self._transfers = RowTransfers(
            region,
            worker=self._worker,
            directory=self._directory,
            quota=self._quota,
            log_once=self._log_once,
            served=lambda: self._served,
            may_start=lambda: self._open is None or not self._open.health.problem,
            max_age_s=config.max_age,
            clock=clock,
            hold_s=times.stores_held_s,
        )
        self._moves = self._transfers.pipeline
        self._mount = MountGuard(self)
        self._deleting: list[tuple[NamespaceRows, Key, Future[None]]] = []
        self._manifests = ManifestKeeper(self._row_bytes)

    # --- the contract ---------------------------------------------------------------------------------------------

    def identify(self, engine: str) -> None:
        self._manifests.engine = engine

    def describe(self, description: Description) -> None:
        self._manifests.description = description

    def open(self, namespace: bytes, epoch: int) -> int:
        path = self._config.path
        room = self._config.capacity - MARGIN_BYTES - (FANOUT + 3) * PAGE
        slots = min(room // (self._row_bytes + NAME_BYTES), MAX_SLOTS) if self._directory.writes else MAX_SLOTS
        if slots < 1:
            raise TierRefused(
                f"capacity: {self._config.capacity} bytes hold no row of {self._row_bytes} bytes beside the "
                f"directories in {path}"
            )
        try:
            prepare_path(self._config, self._mount, self._log_once)
            self._directory.prepare(namespace.hex())
            self._mount.remember(path)
            self._transfers.direct = True
            if self._directory.writes:
                with self._directory.incoming() as incoming:
                    self._transfers.direct = direct_works(incoming)
                    try_out(incoming, direct=self._transfers.direct, in_place=False)
            identity = FileIdentity(path)
            self._measure_free_space()
            health = HealthMonitor(
                lambda: identity.problem() or self._problem(namespace.hex()), self._times.disk_check_s
            )
        except OSError as error:
            raise open_error(error) from error
        if not self._transfers.direct:
            self._log_once.report("direct", f"{path} does not support O_DIRECT: rows go through the page cache")
        before = self._open
        self._open = NamespaceRows(
            namespace.hex(), Sealer(self._geometry, namespace, epoch), slots, health, self._quota, self._hidden_until
        )
        if before is not None:
            before.health.close()
        again = before is not None and (before.name, before.sealer.epoch) == (namespace.hex(), epoch)
        self._lister.submit(self._open.begin, again=again).result()  # after a listing that is under way
        self._scanner.served = namespace.hex()
        self._quota.scan_all = True
        self._scanner.start()
        self._manifests.stop()
        medium = _Manifests(self._open, self._directory, self._quota)
        self._manifests.serve(namespace.hex(), epoch, medium, self._clock)
        return slots

    def _problem(self, namespace: str) -> str:
        """On the health monitor's thread, once a second. Raises OSError."""
        self._measure_free_space()
        return self._directory.problem(namespace)

    def _measure_free_space(self) -> None:
        """Below `min_free` rows are only replaced. Raises OSError."""
        if self._directory.writes:
            self._free.lacks(self._row_bytes)
            self._quota.limit_growth(self._free.spare_bytes)

    @property
    def denials(self) -> Mapping[str, str]:
        return {**self._free.denials, **({FAILING: problem} if (problem := self._transfers.problem) else {})}

    @property
    def relist_s(self) -> float | None:
        age_s = self._config.max_age
        least_s = RELIST_S if age_s is None else min(RELIST_S, sweep_s(age_s))
        return max(least_s, min(MAX_RELIST_S, _RELIST_SHARE * self._scanner.cpu_s))

    def list_rows(self) -> Iterator[list[Entry]]:
        """Rows that are new since the last call, and as entries of slot GONE keys that the core knows but are gone.
        No more rows than there are slots: the core would delete the others, which other engines may need."""
        served = self._served
        if not (yield from self._on_lister(served, self._quota.wait_for_scan)):
            return
        gone, new, lost = served.gone_rows(), served.new_rows(), served.lost_rows()
        while keys := (yield from self._on_lister(served, next, gone, None)):
            yield from self._in_batches(served, (Entry(GONE, key, 0) for key in keys if served.confirm_gone(key)))
        slots, last_ns = itertools.count(), -1
        while (rows := (yield from self._on_lister(served, next, new, None))) is not None:
            for start in range(0, len(rows), MAX_ENTRIES):
                if served.room < 0:  # stores have taken it meanwhile
                    yield from self._on_lister(served, served.unlist, rows[start:])
                    break
                batch = []
                for mtime_ns, key in rows[start : start + MAX_ENTRIES].pairs():
                    served.tick += mtime_ns > last_ns
                    last_ns = mtime_ns
                    batch.append(Entry(next(slots), key, served.tick))
                yield batch
                if served is not self._open:
                    return
        while keys := (yield from self._on_lister(served, next, lost, None)):
            yield from self._in_batches(served, (Entry(GONE, key, 0) for key in keys))

    def _on_lister(
        self, served: NamespaceRows, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> Generator[list[Entry], None, T | None]:
        """What the call returns on the lister's thread; None once another namespace is served."""
        calling = self._lister.submit(call, *args, **kwargs)
        while served is self._open and not calling.done():
            yield []
        return calling.result() if served is self._open else None

    def maintain(self) -> Iterator[list[Entry]]:
        """Begin to delete what is too old: the next listing finds out what is gone. A reader deletes nothing."""
        age_s = self._config.max_age
        if age_s is not None and self._directory.writes and self._sweeping.done():
            self._sweeping.result()  # an error of it ends this mover
            now_s = self._directory.server_time.now_s()
            self._sweeping = self._sweeper.submit(self._evictor.expire, now_s, age_s)
        return iter(())

    @property
    def maintain_s(self) -> float | None:
        age_s = self._config.max_age
        return sweep_s(age_s) if age_s is not None and self._directory.writes else None

    def store(self, moves: Sequence[Move]) -> int:
        served = self._served
        for move in moves:
            served.storing[move.key] += 1
            served.tick = max(served.tick, move.tick)
        return self._moves.store(moves)

    def load(self, moves: Sequence[Move]) -> int:
        return self._moves.load(moves)

    def poll(self) -> list[FinishedBatch]:
        self._transfers.poll()
        self._end_deletes()
        problem = self._open.health.poll() if self._open is not None else ""
        if problem:  # what runs ends by itself
            self._moves.loads.give_up()
            self._moves.stores.give_up()
        self._moves.start()
        if problem and self._moves.quiet and not self._deleting:
            self._directory.release()
            raise TierDown(problem)
        return self._moves.take()

    def ended_moves(self) -> Sequence[EndedMoves]:
        return self._moves.take_ended()

    def delete(self, entries: Sequence[tuple[int, bytes]]) -> None:
        served = self._served
        for _, key in entries:
            path = RowPath.of(served.name, key)
            if self._quota.forget(path):  # else it is gone already, and a file there now is another engine's
                served.deleting[key] += 1
                self._quota.begin_delete()
                gone = self._directory.submit(path, self._directory.delete_unless_used, path)
                self._deleting.append((served, key, gone))

    def _end_deletes(self) -> None:
        """Notice what threads have deleted, and raise their errors: they end this mover."""
        waiting = []
        for served, key, gone in self._deleting:
            if gone.done():
                gone.result()
                self._quota.end_delete()
                served.deleting[key] -= 1
                if not served.deleting[key]:
                    del served.deleting[key]
            else:
                waiting.append((served, key, gone))
        self._deleting = waiting

    @property
    def busy(self) -> bool:
        return bool(self._moves.busy or self._deleting or (self._open is not None and self._open.health.problem))

    @property
    def poll_s(self) -> float:
        return min(self._moves.poll_s, HELD_POLL_S if self._deleting else math.inf)

    @property
    def wake_fd(self) -> int:
        return self._worker.fd

    @property
    def used_bytes(self) -> int:
        """What this process knows of: others may have written since the last scan."""
        return self._quota.used_bytes

    def close(self) -> None:
        if self._open is not None:
            self._open.health.close()
            self._manifests.stop(last=True)
        self._open = None
        for thread in (self._lister, self._sweeper):
            thread.shutdown(wait=False, cancel_futures=True)
        self._scanner.close()
        self._worker.close()
        self._directory.close()

    # --- listing ----------------------------------------------------------------------------------------------------

    @property
    def _served(self) -> NamespaceRows:
        if self._open is None:
            raise RuntimeError("the tier is not open")
        return self._open

    def _hidden_until(self) -> int:
        """A reader (`write: off`) leaves deleting to writers: rows whose age begins by then (Unix seconds) are too old,
        but stay. 0: none."""
        age_s = self._config.max_age
        hides = age_s is not None and not self._directory.writes
        return int(self._directory.server_time.now_s() - age_s) if hides and age_s is not None else 0

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


class _Manifests(ManifestMedium):
    """For the namespace that is served: once there are rows, since one without any needs none."""

    def __init__(self, served: NamespaceRows, directory: RowDirectory, quota: DirQuota) -> None:
        self._served = served
        self._directory = directory
        self._quota = quota

    def is_wanted(self) -> bool:
        rows = self._quota.bytes_by_namespace() or Counter()
        return self._directory.writes and rows[self._served.name] > 0 and not self._served.health.problem

    def read(self) -> bytes | None:
        return self._directory.read_manifest(self._served.name)

    def write(self, raw: bytes) -> bool:
        if fits := self._quota.add_manifest():
            self._directory.write_manifest(self._served.name, raw)
        return fits
