"""One storage tier under load, while something is done to it: what every test of the fault matrix is made of."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from nixl_tiers.cascade.limits import Limits
from nixl_tiers.chunk import Geometry, Key, Namespace
from nixl_tiers.config import schema as configuration
from nixl_tiers.config.schema import StorageConfig
from nixl_tiers.coordinator import Coordinator
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.store import TieredStore
from nixl_tiers.testing.config import with_faults
from nixl_tiers.testing.faulty import FaultPlan
from tests.support.leaks import ResourceCount, children
from tests.support.load import Load, get, put
from tests.support.waiting import until

KIB, MIB = 1 << 10, 1 << 20
CHUNK = 64 * KIB
HOST = 3 * MIB
CAPACITY = 48 * MIB
PROMPTS = 12  # of 8 chunks: twice as many as the host holds
LIMITS = replace(Limits(), wait_s=1.0, pin_s=3.0, hard_deadline_min_s=3.0, hard_deadline_max_s=6.0, retry_s=0.3)
PATIENCE_S = 180.0  # of the tests, for what has no deadline of its own; machines may be very slow

_turns = itertools.count()


@dataclass
class Line:
    """What one scenario has shown."""

    fault: str
    tier: str
    stall_s: float = 0.0
    deadline_s: float = 0.0
    recovery_s: float | None = None
    drops: float = 0
    failed: float = 0
    turns: int = 0
    kills: int = 0
    wrong: int = 0


class Arena:
    """A store over one storage tier and its load. Leaving it checks what must hold whatever has happened."""

    def __init__(
        self,
        line: Line,
        tier: dict[str, object],
        *,
        plan: FaultPlan | None = None,
        limits: Limits = LIMITS,
        chunk: int = CHUNK,
        below: dict[str, object] | None = None,
    ) -> None:
        """`below`: another storage tier under the one that is looked at."""
        self.line = line
        self.limits = limits
        self._plan = plan
        tiers = [{"type": "cpu", "capacity": HOST}, tier, *([below] if below else [])]
        fields = {"tiers": tiers, "wait_s": limits.wait_s}
        self.config = configuration.load(fields)
        self.chunk = chunk
        self.name = self.config.names[0]
        self.store: TieredStore
        self.load: Load
        self._ended_s: float | None = None
        self._movers: set[int] = set()
        self._was = {"dropped": 0.0, "failed": 0.0}

    @property
    def tier(self) -> StorageConfig:
        return self.config.storage[0]

    # --- a life ---------------------------------------------------------------------------------------------------

    def open(self, before_start: Callable[[Coordinator], None] | None = None) -> TieredStore:
        """A store. `before_start` is called with its engine before the engine starts."""
        geometry = Geometry(cells=1, cell_payload=self.chunk)
        configuration.check_paths(self.config)
        region = HostRegion.create(geometry, HOST // geometry.row_bytes)
        config = with_faults(self.config, self._plan.to_dict()) if self._plan is not None else self.config
        coordinator = Coordinator(config, Namespace.of({"of": "the fault matrix"}), region, limits=self.limits)
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
    ) -> Iterator[Load]:
        """A store that has been written to (if `warm`), under load. What has to hold is checked at the end."""
        before = before or ResourceCount.take()
        self.store = self.open(before_start)
        try:
            self.load = Load(self.store, seed=next(_turns), prompts=PROMPTS, pause_s=0.005)
            if warm:
                self.warm_up()
            with self.load:
                yield self.load
                self._watch()
            self._stopped()
        finally:
            self.store.close()
        self._nothing_left(before)
        self._reopened()

    def warm_up(self) -> None:
        until(self.is_up, "the tier to be up", PATIENCE_S)
        put(self.store, self.load.keys)
        assert self.store.flush(PATIENCE_S)
        assert self.stats()["rows"] > 0
        self._was = {name: self.stats()[name] for name in self._was}

    def go_on(self, turns: int = 8) -> None:
        """Return when the load has been answered so many times more."""
        goal = self.load.turns + turns
        until(lambda: self.load.turns >= goal or self.load.seen.errors, "requests to be answered", PATIENCE_S)
        self._watch()

    def over(self) -> None:
        """The fault has ended: the time to recovery runs."""
        self._ended_s = time.monotonic()

    def heals(self) -> None:
        """Return when chunks that are put now come back from the tier."""
        if self._ended_s is None:
            self.over()
        assert self._ended_s is not None
        self.load.pause_s = 0.1  # else, on a slow machine, rows are crowded out of the host before they are written
        until(self._comes_back, "the tier to heal", PATIENCE_S)
        self.line.recovery_s = time.monotonic() - self._ended_s

    def _comes_back(self) -> bool:
        keys: list[Key] = [b"probe-%d-%d" % (next(_turns), n) for n in range(4)]
        put(self.store, keys)
        storage = self.store.coordinator._core.tiers[0]
        deadline = time.monotonic() + 10 * self.limits.wait_s
        while time.monotonic() < deadline:
            queued = [key for key in keys if key in storage.to_store]
            entries = [storage.index.get(key) for key in keys]
            if all(entry is not None and entry.stored for entry in entries):
                # Only what the host has let go comes from the tier.
                self._every_row_can_be_had()
                if self.store.locate(keys) == [self.name] * len(keys):
                    hits, wrong = get(self.store, keys)
                    assert not wrong
                    return all(hits)
            elif not queued and None in entries:
                time.sleep(0.1)
                return False  # dropped: the circuit was open
            time.sleep(0.01)
        return False

    # --- what is seen ---------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        return self.store.stats()[self.name]

    def is_up(self) -> bool:
        return self.stats()["up"] == 1.0

    def mover(self) -> int | None:
        pid = self.store.coordinator.mover_pids[0]
        if pid is not None:
            self.saw(pid)
        return pid

    def saw(self, mover: int) -> None:
        self._movers.add(mover)

    def a_mover(self) -> int:
        until(lambda: self.mover() is not None, "a mover", PATIENCE_S)
        pid = self.mover()
        assert pid is not None
        return pid

    def signal(self, number: int, when: str = "idle") -> int:
        """Send a signal to the mover: at once, or when it is in the middle of stores or loads."""
        storage = self.store.coordinator._core.tiers[0]
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            pid = self.a_mover()
            moving = {"idle": 1, "store": storage.rows_storing, "load": storage.rows_loading}[when]
            if moving:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
                    return pid
            time.sleep(0)
        raise AssertionError(f"never in the middle of a {when}")

    def replaced(self, old: int) -> None:
        """Wait for another mover than `old`."""
        until(lambda: self.mover() not in {None, old}, "another mover", PATIENCE_S)

    # --- what must hold -------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        seen, line, stats = self.load.seen, self.line, self.stats()
        self.mover()
        line.stall_s, line.deadline_s = seen.longest_s, self.limits.wait_s
        line.wrong, line.turns = len(seen.wrong), seen.gets
        line.drops, line.failed = (stats[name] - self._was[name] for name in ("dropped", "failed"))
        line.kills = max(0, len(self._movers) - 1)
        assert not seen.wrong, f"wrong bytes for {seen.wrong[0]!r}"
        assert not seen.errors, seen.errors[0]

    def _stopped(self) -> None:
        """The load has ended: everything must come to rest, and the books must add up."""
        self._watch()
        assert self.store.flush(PATIENCE_S), "cascades that do not end"
        keys = self.load.keys
        _, wrong = get(self.store, keys)
        assert not wrong
        core = self.store.coordinator._core
        until(lambda: not core.tiers[0].jobs, "jobs to end", PATIENCE_S)
        storage = core.tiers[0]
        assert (storage.rows_storing, storage.rows_loading) == (0, 0)
        until(self._every_row_can_be_had, "host rows to be free again", PATIENCE_S)
        stats = self.stats()
        assert stats["rows"] == storage.counters.rows == len(storage.slots)
        assert self.store.stats()["cpu"]["rows"] == core.host.used == len(core.host.index)
        assert 0 <= stats["used_bytes"] <= self.tier.capacity
        assert 0 <= stats["rows"] * self.store._region.geometry.row_bytes <= self.tier.capacity
        path = getattr(self.tier, "path", None)
        if path is not None:
            assert sum(file.stat().st_blocks * 512 for file in _files(path)) <= self.tier.capacity

    def _every_row_can_be_had(self) -> bool:
        coordinator, rows = self.store.coordinator, self.store._region.rows
        plan = coordinator.prepare_store([b"claim-%d" % next(_turns) for _ in range(rows)], "claim")
        self.store._region.mark(np.array(plan.rows), 0, plan.store_seq, False)
        coordinator.complete_store(plan.keys)
        coordinator.finish_request("claim")
        return len(plan.rows) == rows

    def _nothing_left(self, before: ResourceCount) -> None:
        until(lambda: before.covers(ResourceCount.take()), f"what {before} does not cover to go", PATIENCE_S)
        for pid in self._movers:
            assert not Path(f"/proc/{pid}").exists() or pid not in set(children())

    def _reopened(self) -> None:
        """Whatever a later engine finds is right."""
        plan, self._plan = self._plan, None
        store = self.open()
        try:
            _, wrong = get(store, self.load.keys)
            assert not wrong
        finally:
            store.close()
            self._plan = plan


def _files(path: Path) -> list[Path]:
    return [Path(folder, name) for folder, _, names in os.walk(path) for name in names]


KILLS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP, "SIGSEGV": signal.SIGSEGV}
