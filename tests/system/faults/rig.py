"""FaultRig: a store over one storage tier under load, into which a test of the fault matrix injects a fault."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from nixl_tiers.base.chunk import Geometry, Key, Namespace
from nixl_tiers.base.times import Times
from nixl_tiers.config import schema as configuration
from nixl_tiers.config.schema import StorageConfig
from nixl_tiers.core.types import Direction, Limits
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.store import TieredStore
from nixl_tiers.testing.config import with_faults
from nixl_tiers.testing.faulty import FaultPlan
from tests.support.disks import disk_bytes
from tests.support.leaks import ResourceCount, children, reclaim_all_host_rows
from tests.support.load import LoadGenerator, get, put
from tests.support.times import changed
from tests.support.waiting import serves, until

KIB, MIB = 1 << 10, 1 << 20
CHUNK = 64 * KIB
HOST = 3 * MIB
CAPACITY = 48 * MIB
PROMPTS = 12  # of 8 chunks: twice as many chunks as the host tier holds
LIMITS = replace(
    Limits(),
    wait_s=1.0,
    pin_s=3.0,
    hard_deadline_min_s=3.0,
    hard_deadline_max_s=6.0,
    retry_s=0.3,
    aside_s=10.0,
)
TIMES = changed(
    heartbeat_timeout_s=4.0, start_timeout_s=20.0, restart_backoff_s=(0.05, 0.2, 0.5, 1.0, 2.0), s3_ready_s=1.0
)
"""A hung mover is killed sooner than in production, and is started again sooner. Stores wait for the usage record for
less than the deadline of a job, as in production."""
PATIENCE_S = 12.0  # of tests in which no mover may be killed that a busy machine holds up
TIMEOUT_S = 180.0  # of the tests themselves, generous for slow machines

_serials = itertools.count()


@dataclass
class MatrixRow:
    """The measurements of one scenario: a row of the fault matrix, its columns in order."""

    fault: str
    tier: str
    longest_stall_s: float = 0.0
    deadline_s: float = 0.0
    recovery_s: float | None = None
    dropped: float = 0
    failed: float = 0
    requests: int = 0
    restarts: int = 0
    wrong: int = 0


class FaultRig:
    """A store over one storage tier, and its load generator. `under_load` checks at its end what must hold after any
    fault."""

    def __init__(
        self,
        row: MatrixRow,
        tier: dict[str, object],
        *,
        plan: FaultPlan | None = None,
        limits: Limits = LIMITS,
        times: Times = TIMES,
        chunk: int = CHUNK,
        below: dict[str, object] | None = None,
    ) -> None:
        """`below`: another storage tier below the one under test."""
        self.row, self.limits, self.times, self._plan, self.chunk = row, limits, times, plan, chunk
        tiers = [{"type": "cpu", "capacity": HOST}, tier, *([below] if below else [])]
        self.config = configuration.load({"tiers": tiers, "wait_s": limits.wait_s})
        self.name = self.config.names[0]
        self.mover = 0
        """Which of the tier's movers is looked at, and signalled."""
        self.store: TieredStore
        self.load: LoadGenerator
        self._fault_ended_s = 0.0
        self.movers: set[int] = set()
        """All that were seen, for the column of restarts."""
        self._baseline = {"dropped": 0.0, "failed": 0.0}

    @property
    def tier(self) -> StorageConfig:
        return self.config.storage[0]

    # --- running --------------------------------------------------------------------------------------------------

    def open(self, before_start: Callable[[Coordinator], None] | None = None) -> TieredStore:
        """Open the store. `before_start` is called with its coordinator before that starts."""
        geometry = Geometry(cells=1, cell_payload=self.chunk)
        configuration.check_paths(self.config)
        region = HostRegion.create(geometry, HOST // geometry.row_bytes)
        config = with_faults(self.config, self._plan.to_dict()) if self._plan is not None else self.config
        named = Namespace.of({"of": "the fault matrix"})
        coordinator = Coordinator(config, named, region, limits=self.limits, times=self.times)
        if before_start is not None:
            before_start(coordinator)
        coordinator.start(3.0)
        return TieredStore(coordinator)

    @contextlib.contextmanager
    def under_load(
        self,
        before_start: Callable[[Coordinator], None] | None = None,
        *,
        warm: bool = True,
        before: ResourceCount | None = None,
    ) -> Iterator[LoadGenerator]:
        """Run the load generator on a store, written to before if `warm`; then check what must hold after any fault."""
        before = before or ResourceCount.take()
        self.store = self.open(before_start)
        try:
            self.load = LoadGenerator(self.store, seed=next(_serials), prompts=PROMPTS, pause_s=0.005)
            if warm:
                self.warm_up()
            with self.load:
                yield self.load
                self._record_and_check()
            self._check_at_rest()
        finally:
            self.store.close()
        self._check_no_leaks(before)
        self._check_reopened_store()

    def warm_up(self) -> None:
        until(self.is_up, "the tier to be up", TIMEOUT_S)

        def stored() -> bool:  # a bucket refuses rows before the usage record counts this mover
            put(self.store, self.load.keys)
            assert self.store.flush(TIMEOUT_S)
            return self.stats()["rows"] > 0

        until(stored, "rows to be stored", TIMEOUT_S)
        self._baseline = {name: self.stats()[name] for name in self._baseline}

    def wait_for_answers(self, count: int = 8) -> None:
        """Return when `count` more gets have been answered."""
        goal = self.load.stats.gets + count
        until(lambda: self.load.stats.gets >= goal or self.load.stats.errors, "gets to be answered", TIMEOUT_S)
        self._record_and_check()

    def ride_out(
        self,
        begin: Callable[[], object],
        end: Callable[[], object] | None = None,
        *,
        answers: int = 20,
        warm: bool = True,
        before: ResourceCount | None = None,
    ) -> None:
        """Under load: a fault that begins, lasts for so many answers, and ends, after which the tier heals. Without
        `warm` it is there from the start."""
        if not warm:
            before = before or ResourceCount.take()
            begin()
        with self.under_load(warm=warm, before=before):
            if warm:
                self.wait_for_answers()
                begin()
            self.wait_for_answers(answers)
            if end is not None:
                end()
            self.fault_ended()
            self.wait_until_healed()

    def kill(self, number: int, when: str = "idle") -> None:
        """Send a signal to the mover, and return when there is another one."""
        self.wait_for_restart(self.signal_mover(number, when))

    def fault_ended(self) -> None:
        """Start measuring the time to recovery."""
        self._fault_ended_s = time.monotonic()

    def wait_until_healed(self) -> None:
        """Return when chunks that are put now can be read back from the tier."""
        if not self._fault_ended_s:
            self.fault_ended()
        self.load.pause_s = 0.1  # otherwise a slow machine evicts rows from the host before they are written
        until(self._reads_back_from_tier, "the tier to heal", TIMEOUT_S)
        self.row.recovery_s = time.monotonic() - self._fault_ended_s

    def _reads_back_from_tier(self) -> bool:
        keys: list[Key] = [b"probe-%d-%d" % (next(_serials), n) for n in range(4)]
        put(self.store, keys)
        tier = self.store.coordinator._core.tiers[0]
        deadline = time.monotonic() + 10 * self.limits.wait_s
        while time.monotonic() < deadline:
            queued = [key for key in keys if key in tier.to_store]
            rows = tier.index.rows
            if all(rows.has_many(keys, True)):
                reclaim_all_host_rows(self.store)  # evicts them from the host, so that they can only come from the tier
                if self.store.locate(keys) == [self.name] * len(keys):
                    hits, wrong = get(self.store, keys)
                    assert not wrong
                    return all(hits)
            elif not queued and not all(rows.has_many(keys, False)):
                time.sleep(0.1)
                return False  # dropped: the breaker was open
            time.sleep(0.01)
        return False

    # --- observing the tier and its mover ------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        return self.store.stats()[self.name]

    def is_up(self) -> bool:
        return serves(self.stats())

    def mover_pid(self) -> int | None:
        pid = self.store.coordinator.mover_pids[self.mover]
        if pid is not None:
            self.movers.add(pid)
        return pid

    def wait_for_mover(self) -> int:
        pids: list[int | None] = []
        until(lambda: pids.append(self.mover_pid()) or pids[-1], "a mover", TIMEOUT_S)
        return pids[-1] or 0

    def signal_mover(self, number: int, when: str = "idle") -> int:
        """Send a signal to the mover: at once, or during a store or a load. Returns its pid."""
        mover = self.store.coordinator._core.tiers[0].members[self.mover]
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            pid = self.wait_for_mover()
            if when == "idle" or mover.under_way(Direction(when)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
                    return pid
            time.sleep(0)
        raise AssertionError(f"no {when} was ever in flight")

    def wait_for_restart(self, old: int) -> None:
        """Return when there is another mover than `old`."""
        until(lambda: self.mover_pid() not in {None, old}, "another mover", TIMEOUT_S)

    # --- what must hold after any fault ---------------------------------------------------------------------------

    def _record_and_check(self) -> None:
        load, row, stats = self.load.stats, self.row, self.stats()
        self.mover_pid()
        row.longest_stall_s, row.deadline_s = load.longest_s, self.limits.wait_s
        row.wrong, row.requests = len(load.wrong), load.gets
        row.dropped, row.failed = (stats[name] - self._baseline[name] for name in ("dropped", "failed"))
        row.restarts = max(0, len(self.movers) - 1)
        assert not load.wrong, f"wrong bytes for {load.wrong[0]!r}"
        assert not load.errors, load.errors[0]

    def _check_at_rest(self) -> None:
        """The load has ended: all jobs must end, all pins be released, and the counters agree."""
        self._record_and_check()
        assert self.store.flush(TIMEOUT_S), "cascades that do not end"
        keys = self.load.keys
        _, wrong = get(self.store, keys)
        assert not wrong
        core = self.store.coordinator._core
        tier = core.tiers[0]
        # A job's rows are counted down after the job itself has ended, in another thread.
        at_rest = (0, 0, 0)
        until(lambda: (len(tier.jobs), tier.rows_storing, tier.rows_loading) == at_rest, "jobs to end", TIMEOUT_S)
        until(lambda: reclaim_all_host_rows(self.store), "host rows to be free again", TIMEOUT_S)
        stats = self.stats()
        assert stats["rows"] == tier.counters.rows == len(tier.index.slots)
        # The tier below may still bring victims up, to write them.
        host = core.host
        until(
            lambda: self.store.stats()["cpu"]["rows"] == host.used == len(host.index), "host rows to add up", TIMEOUT_S
        )
        # Where others write and delete too, this engine knows rows that are gone, and the record counts windows that
        # perhaps nobody has used.
        if not self.tier.asked:
            assert 0 <= stats["used_bytes"] <= self.tier.capacity
            assert 0 <= stats["rows"] * self.store.coordinator.region.geometry.row_bytes <= self.tier.capacity
        for member in self.tier.members:
            if (path := getattr(member, "path", None)) is not None:
                assert disk_bytes(Path(path)) <= member.capacity

    def _check_no_leaks(self, before: ResourceCount) -> None:
        until(lambda: before.covers(ResourceCount.take()), f"what {before} does not cover to go", TIMEOUT_S)
        assert not self.movers & children()

    def _check_reopened_store(self) -> None:
        """A store opened afterwards reads no wrong byte."""
        plan, self._plan = self._plan, None
        store = self.open()
        try:
            _, wrong = get(store, self.load.keys)
            assert not wrong
        finally:
            store.close()
            self._plan = plan


KILLS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP, "SIGSEGV": signal.SIGSEGV}
