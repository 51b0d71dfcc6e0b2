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
    expire_if_due,
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
from nixl_tiers.tiers.manifests import ManifestKeeper
from nixl_tiers.tiers.rowfile.budget import Budget
from nixl_tiers.tiers.rowfile.contents import NAME_BYTES, Contents
from nixl_tiers.tiers.rowfile.directory import RowDirectory, ServerTime
from nixl_tiers.tiers.rowfile.evict import FANOUTS
from nixl_tiers.tiers.rowfile.names import RowPath
from nixl_tiers.tiers.rowfile.sweep import Sweeper
from nixl_tiers.tiers.rowfile.transfers import Opened, RowTransfers

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
        self.config = config
        self._clock = clock
        self.times = times
        self.geometry = geometry
        self.region = region
        self.log_once = LogOnce(logger)
        self.directory = RowDirectory(config.path, writes=config.write != "off", server_time=server_time)
        self._free = FreeSpace(config.path, config.min_free)
        self._open: Opened | None = None
        self._checker = ExistenceChecker(self._found_at_s, timeout_s=times.file_check_s)
        self._found: list[Entry] = []
        self._transfers = RowTransfers(self, clock)
        self._moves = self._transfers.pipeline
        self._mount = MountGuard(self)
        self._manifests = ManifestKeeper(geometry.row_bytes)

    # --- the contract ---------------------------------------------------------------------------------------------

    def identify(self, engine: str) -> None:
        self._manifests.engine = engine

    def describe(self, description: Description) -> None:
        self._manifests.description = description

    def open(self, namespace: bytes, epoch: int) -> int:
        path, directory, name = self.config.path, self.directory, namespace.hex()
        budget = self.new_budget()
        if directory.writes and budget.capacity_bytes < budget.row_bytes:
            raise TierRefused(
                f"capacity: {self.config.capacity} bytes hold no row of {self.geometry.row_bytes} bytes beside the "
                f"directories in {path}"
            )
        if self._open is not None:
            self._open.close()
        try:
            prepare_path(self.config, self._mount, self.log_once)
            directory.prepare(name)
            self._mount.remember(path)
            direct = True
            if directory.writes:
                with directory.incoming() as incoming:
                    direct = direct_works(incoming)
                    try_out(incoming, direct=direct, in_place=False)
            identity = FileIdentity(path)
            self._measure_free_space(budget)

            def problem() -> str:
                """On the health monitor's thread. Raises OSError."""
                wrong = identity.problem()
                if not wrong:
                    self._measure_free_space(budget)
                    directory.check(name)
                return wrong

            health = HealthMonitor(problem, self.times.disk_check_s)
        except OSError as error:
            raise open_error(error) from error
        if not direct and not memory_at(path.resolve()):
            self.log_once.report("direct", f"{path} does not support O_DIRECT: rows go through the page cache")
        contents = Contents(directory, name, budget.row_bytes, self.log_once)
        sweeper = Sweeper(contents, budget, self.config.max_age)
        self._open = Opened(name, directory, direct, Sealer(self.geometry, namespace, epoch), health, budget, sweeper)
        sweeper.start()
        self._checker.clear()
        self._found.clear()
        self._manifests.stop()
        self._manifests.serve(name, epoch, self._open, self._clock)
        if not directory.writes:
            return MAX_SLOTS
        return min(2 * (budget.capacity_bytes // budget.row_bytes), MAX_SLOTS)  # others forget rows, too

    def new_budget(self) -> Budget:
        return Budget(self.config.capacity - MARGIN_BYTES, align(self.geometry.row_bytes) + NAME_BYTES)

    def _measure_free_space(self, budget: Budget) -> None:
        """Below `min_free` rows are only replaced. Raises OSError."""
        if self.directory.writes:
            self._free.lacks(budget.row_bytes)
            budget.limit_growth(self._free.spare_bytes)

    @property
    def denials(self) -> Mapping[str, str]:
        problem = self._transfers.problem
        if self._open is not None and self._open.sweeper.quiet_s > self.times.file_stuck_s:
            problem = f"{self.config.path} does not answer when what is there is counted: no row may be stored"
        return {**self._free.denials, **({FAILING: problem} if problem else {})}

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
            self.directory.release()
            raise TierDown(problem)
        return self._moves.take()

    def ended_moves(self) -> Sequence[EndedMoves]:
        return self._moves.take_ended()

    def delete(self, entries: Sequence[tuple[int, bytes]]) -> None:
        """Others may use them."""

    @property
    def busy(self) -> bool:
        return self._moves.busy or self._checker.busy or not self.may_start()

    @property
    def poll_s(self) -> float:
        return 0.0 if self._checker.busy else self._moves.poll_s

    @property
    def wake_fd(self) -> int:
        return self._transfers.worker.fd

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
        self._transfers.worker.close()
        self.directory.close()

    # --- what is there ----------------------------------------------------------------------------------------------

    # A tick is when a row was last known to be there, by a clock that all movers of this engine have in common.

    def seen(self, key: Key) -> None:
        """It is there for certain."""
        self._found.append(Entry(0, key, _now_s()))

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
        return max(0, _now_s() - int(self.times.file_known_s))

    @property
    def stuck(self) -> bool:
        return self._checker.stuck_s > self.times.file_stuck_s

    def _found_at_s(self, key: Key) -> Presence:
        """On a thread of the checker. Raises OSError."""
        status = self.directory.stat(RowPath.of(self.served.name, key))
        if status is None or not stat.S_ISREG(status.st_mode) or status.st_size != self.geometry.row_bytes:
            return 0
        # It was not used since, so it is older yet.
        expired = expire_if_due(status.st_mtime, self.directory.server_time.now_s(), self.config.max_age)
        return 0 if expired else _now_s()

    # --- for its transfers ------------------------------------------------------------------------------------------

    def may_start(self) -> bool:
        return self._open is None or not self._open.health.problem

    @property
    def served(self) -> Opened:
        if self._open is None:
            raise RuntimeError("the tier is not open")
        return self._open


def _now_s() -> int:
    return max(1, int(time.monotonic()))
