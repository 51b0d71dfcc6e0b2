"""The file tier for directories that several engines share: one file per row, found by its key alone.

A row is written to a temporary file and renamed when it is whole. So no file that has a row's name is ever written to,
an open one stays readable when it is deleted, and a row that has vanished is a miss. Nothing is listed, and nothing is
remembered of rows: whether one is there is asked. All that may take long on a network is done by threads: the mover's
own never waits.

`transfers.py` is the way of a row, which `worker.py` moves; `budget.py` says how much may be stored by what `sweep.py`
finds; `evict.py` and `expire.py` say what is deleted; `contents.py` and `directory.py` are the access to files.
"""

from __future__ import annotations

import logging
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from nixl_tiers.base.chunk import FAILING, PAGE, Geometry, Key, align
from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.base.manifest import MAX_MANIFEST_BYTES, Description
from nixl_tiers.base.mounts import memory_at
from nixl_tiers.base.times import PRODUCTION, Times
from nixl_tiers.config.schema import FileConfig
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.seal import Sealer
from nixl_tiers.tiers.base import (
    MAX_SLOTS,
    EndedMoves,
    Entry,
    ExistenceAnswer,
    FinishedBatch,
    Move,
    StorageTier,
    TierDown,
    TierRefused,
    has_expired,
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
from nixl_tiers.tiers.existence import ExistenceChecker, Presence
from nixl_tiers.tiers.manifests import ManifestKeeper, ManifestMedium
from nixl_tiers.tiers.rowfile.budget import Budget
from nixl_tiers.tiers.rowfile.contents import NAME_BYTES, Contents
from nixl_tiers.tiers.rowfile.directory import RowDirectory, ServerTime
from nixl_tiers.tiers.rowfile.evict import FANOUTS
from nixl_tiers.tiers.rowfile.names import RowPath
from nixl_tiers.tiers.rowfile.sweep import Sweeper
from nixl_tiers.tiers.rowfile.transfers import Opened, RowTransfers
from nixl_tiers.tiers.rowfile.worker import Worker

logger = logging.getLogger(__name__)

MANIFEST_BYTES: Final = 2 * align(MAX_MANIFEST_BYTES) + PAGE  # of a manifest, while it is replaced
MARGIN_BYTES: Final = (256 << 10) + MANIFEST_BYTES + (len(FANOUTS) + 3) * PAGE
"""Of the capacity, beside rows: directories and manifest of the namespace that is served, and what a file system may
add by itself before the next sweep."""


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
        self._geometry = geometry
        self._row_bytes = align(geometry.row_bytes) + NAME_BYTES
        self._worker = Worker(region, geometry, in_memory=bool(memory_at(config.path)))
        self._log_once = LogOnce(logger)
        self._free = FreeSpace(config.path, config.min_free)
        self._directory = RowDirectory(config.path, writes=config.write != "off", server_time=server_time)
        self._open: Opened | None = None
        self._checker = ExistenceChecker(self._found_at_s, timeout_s=times.file_check_s)
        self._found: list[Entry] = []
        self._transfers = RowTransfers(
            region,
            worker=self._worker,
            directory=self._directory,
            budget_rows=self._budget().room_bytes // self._row_bytes,
            log_once=self._log_once,
            served=lambda: self._served,
            may_start=lambda: self._open is None or not self._open.health.problem,
            seen=lambda key: self._found.append(Entry(0, key, _now_s())),
            max_age_s=config.max_age,
            clock=clock,
            hold_s=times.stores_held_s,
        )
        self._moves = self._transfers.pipeline
        self._mount = MountGuard(self)
        self._manifests = ManifestKeeper(geometry.row_bytes)

    # --- the contract ---------------------------------------------------------------------------------------------

    def identify(self, engine: str) -> None:
        self._manifests.engine = engine

    def describe(self, description: Description) -> None:
        self._manifests.description = description

    def open(self, namespace: bytes, epoch: int) -> int:
        path, writes, name = self._config.path, self._directory.writes, namespace.hex()
        budget = self._budget()
        if writes and budget.capacity_bytes < self._row_bytes:
            raise TierRefused(
                f"capacity: {self._config.capacity} bytes hold no row of {self._geometry.row_bytes} bytes beside the "
                f"directories in {path}"
            )
        if self._open is not None:
            self._open.close()
        try:
            prepare_path(self._config, self._mount, self._log_once)
            self._directory.prepare(name)
            self._mount.remember(path)
            self._transfers.direct = True
            if writes:
                with self._directory.incoming() as incoming:
                    self._transfers.direct = direct_works(incoming)
                    try_out(incoming, direct=self._transfers.direct, in_place=False)
            identity = FileIdentity(path)
            self._measure_free_space(budget)

            def problem() -> str:
                """On the health monitor's thread. Raises OSError."""
                if wrong := identity.problem():
                    return wrong
                self._measure_free_space(budget)
                return self._directory.problem(name)

            health = HealthMonitor(problem, self._times.disk_check_s)
        except OSError as error:
            raise open_error(error) from error
        if not self._transfers.direct and not memory_at(path.resolve()):
            self._log_once.report("direct", f"{path} does not support O_DIRECT: rows go through the page cache")
        sweeper = Sweeper(
            Contents(self._directory, name, self._row_bytes, self._log_once),
            budget,
            writes=writes,
            max_age_s=self._config.max_age,
            server_s=self._directory.server_time.now_s,
        )
        self._open = Opened(name, Sealer(self._geometry, namespace, epoch), health, budget, sweeper)
        sweeper.start()
        self._checker.clear()
        self._found.clear()
        self._manifests.stop()
        medium = _Manifests(self._open, self._directory)
        self._manifests.serve(name, epoch, medium, self._clock)
        if not writes:
            return MAX_SLOTS
        return min(2 * (budget.capacity_bytes // self._row_bytes), MAX_SLOTS)  # others forget rows, too

    def _budget(self) -> Budget:
        return Budget(self._config.capacity - MARGIN_BYTES, self._row_bytes)

    def _measure_free_space(self, budget: Budget) -> None:
        """Below `min_free` rows are only replaced. Raises OSError."""
        if self._directory.writes:
            self._free.lacks(self._row_bytes)
            budget.limit_growth(self._free.spare_bytes)

    @property
    def denials(self) -> Mapping[str, str]:
        return {**self._free.denials, **({FAILING: problem} if (problem := self._transfers.problem) else {})}

    def list_rows(self) -> Iterator[list[Entry]]:
        return iter(())

    def store(self, moves: Sequence[Move]) -> int:
        return self._moves.store(moves)

    def load(self, moves: Sequence[Move]) -> int:
        return self._moves.load(moves)

    def poll(self) -> list[FinishedBatch]:
        self._transfers.poll()
        problem = ""
        if self._open is not None:
            self._open.sweeper.check()
            problem = self._open.health.poll()
            if problem:  # what runs ends by itself
                self._open.sweeper.stop()
                self._moves.give_up()
        self._moves.start()
        if problem and self._moves.quiet:
            self._directory.release()
            raise TierDown(problem)
        return self._moves.take()

    def ended_moves(self) -> Sequence[EndedMoves]:
        return self._moves.take_ended()

    def delete(self, entries: Sequence[tuple[int, bytes]]) -> None:
        """Others may use them."""

    @property
    def busy(self) -> bool:
        return bool(self._moves.busy or self._checker.busy or (self._open is not None and self._open.health.problem))

    @property
    def poll_s(self) -> float:
        return 0.0 if self._checker.busy else self._moves.poll_s

    @property
    def wake_fd(self) -> int:
        return self._worker.fd

    @property
    def used_bytes(self) -> int:
        """What this process knows of: others may have written since the last sweep."""
        return 0 if self._open is None else self._open.budget.used_bytes + MARGIN_BYTES

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._manifests.stop(last=True)
        self._open = None
        self._checker.close()
        self._worker.close()
        self._directory.close()

    # --- what is there ----------------------------------------------------------------------------------------------

    # A tick is when a row was last known to be there, by a clock that all movers of this engine have in common.

    def check_existence(self, check_id: int, keys: Sequence[Key], chain: bool) -> bool:
        self._checker.start(check_id, keys, chain=chain)
        return True

    def existence_answers(self) -> Sequence[ExistenceAnswer]:
        answers = self._checker.answers()
        for answer in answers:
            self._found += (Entry(0, key, found_at_s) for key, found_at_s in answer.found)
        return [ExistenceAnswer(answer.check_id, answer.absent) for answer in answers]

    def found(self) -> Sequence[Entry]:
        found, self._found = self._found, []
        return found

    @property
    def gone_before(self) -> int:
        """Others may have deleted what was not seen for so long: it is asked for again."""
        return max(0, _now_s() - int(self._times.file_known_s))

    @property
    def stuck(self) -> bool:
        return self._checker.stuck_s > self._times.file_stuck_s

    def _found_at_s(self, key: Key) -> Presence:
        """On a thread of the checker. Raises OSError."""
        status = self._directory.stat(RowPath.of(self._served.name, key))
        if status is None or not stat.S_ISREG(status.st_mode) or status.st_size != self._geometry.row_bytes:
            return 0
        # It was not used since, so it is older yet.
        expired = has_expired(status.st_mtime, self._directory.server_time.now_s(), self._config.max_age)
        return 0 if expired else _now_s()

    @property
    def _served(self) -> Opened:
        if self._open is None:
            raise RuntimeError("the tier is not open")
        return self._open


def _now_s() -> int:
    return max(1, int(time.monotonic()))


@dataclass
class _Manifests(ManifestMedium):
    """For the namespace that is served: once there are rows, since one without any needs none."""

    served: Opened
    directory: RowDirectory

    def is_wanted(self) -> bool:
        served = self.served
        return self.directory.writes and served.budget.has_rows(served.name) and not served.health.problem

    def read(self) -> bytes | None:
        return self.directory.read_manifest(self.served.name)

    def write(self, raw: bytes) -> bool:
        self.directory.write_manifest(self.served.name, raw)
        return True
