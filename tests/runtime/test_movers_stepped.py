"""The coordinator over movers that hang, lie and die, turn by turn: which host rows others get when, how long calls
wait.

The core, the link, the supervisor and the blocking calls are the real ones; movers are fakes behind a socket pair, no
thread runs, and time passes when the test says so, or a call waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nixl_tiers.base.chunk import Geometry, Key, Namespace, Outcome
from nixl_tiers.base.times import PRODUCTION
from nixl_tiers.config import schema as configuration
from nixl_tiers.core.lookup import Lookup
from nixl_tiers.core.types import TierState
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover.protocol import (
    Finished,
    Heartbeat,
    Listed,
    Load,
    Open,
    Opened,
    Slots,
    Store,
)
from nixl_tiers.mover.supervisor import REAP_TIMEOUT_S, TICK_S
from nixl_tiers.runtime.blocking import POLL_S
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.store import TieredStore
from nixl_tiers.tiers.base import Entry
from tests.support.core import end_step, finish, locate, look_up
from tests.support.fake_movers import Clock, FakeMovers, FakeProcess, SteppedSupervisor
from tests.support.file_tier import file_tier

CHUNK_BYTES = 4096
GEOMETRY = Geometry(1, CHUNK_BYTES)
ROWS = 16
CAPACITY = 16 << 20
WAIT_S, PROBE_S = 3.0, 1.0
KEYS: list[Key] = [b"key-%d" % number for number in range(8)]
OK = bytes([Outcome.OK])


class Rig:
    """`medium`: what the movers list when they open. A mover ends its jobs at once, but for those of `stalls`."""

    def __init__(self, movers: FakeMovers, tier: dict[str, Any]) -> None:
        cpu = {"type": "cpu", "capacity": ROWS * GEOMETRY.row_bytes}
        config = configuration.load({"tiers": [cpu, tier], "wait_s": WAIT_S, "probe_s": PROBE_S})
        self.movers = movers
        self.clock = Clock()
        self.region = HostRegion.create(GEOMETRY, ROWS)
        self.coordinator = Coordinator(config, Namespace.of({}), self.region, clock=self.clock)
        self.core = self.coordinator._core
        self.store = TieredStore(self.coordinator)
        self.stepped = SteppedSupervisor(self.coordinator._link.supervisor, self.clock)
        self.medium: dict[Key, int] = {}
        self.stalls: set[type] = set()
        self.outcome = Outcome.OK
        self.silent = False  # no heartbeats, no answers
        self.open_jobs: list[tuple[FakeProcess, Load | Store]] = []
        self.stepped.meanwhile = self.serve
        self.coordinator._link.start()
        self.step()

    @property
    def mover(self) -> FakeProcess:
        return self.movers.started[-1]

    def serve(self) -> None:
        """What the living mover does with what it is sent, and a heartbeat."""
        if self.silent or None in self.coordinator.mover_pids or self.mover.kills:
            return
        with suppress(OSError):
            self.mover.beat()
            for message in self.mover.read():
                if isinstance(message, Open):
                    listed = [Entry(slot, key, slot + 1) for key, slot in self.medium.items()]
                    self.mover.open(message.epoch, 100, listed=Listed(message.epoch, listed, last=True))
                elif isinstance(message, (Load, Store)):
                    self.open_jobs.append((self.mover, message))
                    if type(message) not in self.stalls:
                        self.end_jobs()

    def end_jobs(self, outcome: Outcome | None = None) -> None:
        for mover, job in self.open_jobs:
            for move in job.moves:
                if isinstance(job, Load):
                    self.region.rows_view[move.row] = self.medium.get(move.key, 0) + 1
                else:
                    self.medium[move.key] = move.slot
            codes = bytes([self.outcome if outcome is None else outcome]) * len(job.moves)
            with suppress(OSError):  # it is dead
                mover.send(Finished(job.job, codes, 0.01))
        self.open_jobs.clear()

    def step(self, after_s: float = 0.0) -> None:
        self.stepped.step(after_s)

    def steps(self, count: int = 3) -> None:
        for _ in range(count):
            self.serve()
            self.step(0.001)

    def open(self, keys: Sequence[Key] = ()) -> None:
        """It is up, and holds these."""
        self.medium = {key: slot for slot, key in enumerate(keys)}
        self.steps()
        assert self.coordinator.ready

    def pass_time(self, seconds: float) -> None:
        self.stepped.pass_time(seconds, each_s=0.25)

    def look_up(self, key: Key, request: str = "request") -> Lookup:
        """In a step of its own."""
        answer = look_up(self.coordinator, key, request)
        end_step(self.coordinator)
        return answer

    def begin_load(self, keys: Sequence[Key] = KEYS[:1], request: str = "request") -> list[int]:
        """A request waits for these: the host rows that a mover reads them into."""
        self.stalls.add(Load)
        for key in keys:
            assert look_up(self.coordinator, key, request) is Lookup.PENDING
        end_step(self.coordinator)
        self.steps()
        rows = [move.row for _, job in self.open_jobs for move in job.moves]
        assert len(rows) == len(keys)
        return rows

    def free_rows(self) -> set[int]:
        """Those that can be given to others now. They are given back."""
        keys = [b"probe-%d" % number for number in range(ROWS)]
        plan = self.coordinator.prepare_store("probe", keys, call=True)
        self.coordinator.end_call("probe")
        return set(plan.rows)

    def release(self) -> None:
        self.stepped.meanwhile = lambda: None
        for mover in self.movers.started:
            mover.exit(0)
        self.coordinator.close(10.0)


@pytest.fixture
def movers(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMovers]:
    movers = FakeMovers()
    movers.install(monkeypatch)
    # Between two steps of a listing the supervisor lets others have the lock.
    monkeypatch.setattr("nixl_tiers.runtime.mover_link.time", SimpleNamespace(sleep=lambda _: None))
    yield movers
    movers.release()


@pytest.fixture
def rig(movers: FakeMovers, tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(movers, file_tier(tmp_path, CAPACITY))
    yield rig
    rig.release()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Callable[[Rig], None]:
    """waits(rig): while a call waits for a change, time passes and the supervisor has its turns."""

    def use(rig: Rig) -> None:
        left = iter(range(10_000))

        def wait(_: threading.Condition, timeout: float | None = None) -> bool:
            assert timeout is not None, "a wait without an end"
            assert next(left, None) is not None, "a call that waits for ever"
            rig.stepped.pass_time(timeout, each_s=TICK_S)
            return True

        monkeypatch.setattr(threading.Condition, "wait", wait)
        for module in ("store", "runtime.blocking", "runtime.coordinator"):
            monkeypatch.setattr(f"nixl_tiers.{module}.time", SimpleNamespace(monotonic=rig.clock))

    return use


def hard_deadline(rig: Rig) -> None:
    """Its job is overdue."""
    rig.pass_time(130.0)


def heartbeat(rig: Rig) -> None:
    """It is silent."""
    rig.silent = True
    rig.pass_time(PRODUCTION.heartbeat_timeout_s + 1.0)


def malformed(rig: Rig) -> None:
    """It sends what is no message."""
    rig.mover.send(b"\xc1")
    rig.step()


def wrong_report(rig: Rig) -> None:
    """It reports a job with more rows than it has."""
    rig.mover.send(Finished(rig.open_jobs[0][1].job, 9 * OK, 0.0))
    rig.step()


def too_many_slots(rig: Rig) -> None:
    """It says that it has room for more than fits any medium of this capacity."""
    rig.mover.send(Slots(0, 2 * CAPACITY // GEOMETRY.row_bytes + 1))
    rig.step()


KILLED = pytest.mark.parametrize(
    "provoke", [hard_deadline, heartbeat, malformed, wrong_report], ids=lambda provoke: provoke.__name__
)


class TestAKilledMover:
    @KILLED
    def test_keeps_its_rows_from_others_until_it_is_reaped(self, rig: Rig, provoke: Callable[[Rig], None]) -> None:
        """It may write to them until then, and does."""
        rig.open(KEYS)
        rows = rig.begin_load(KEYS[:1])
        mover = rig.mover
        mover.hangs = True
        provoke(rig)
        assert mover.kills == 1
        finish(rig.coordinator, "request")
        for _ in range(20):
            rig.step(60.0)
            assert rig.free_rows() == set(range(ROWS)).difference(rows)
        assert rig.movers.started == [mover], "no other uses its medium"
        mover.exit(-9, memory_gone=False)
        rig.step(60.0)
        assert rig.free_rows() == set(range(ROWS)).difference(rows), "what it has begun to read may still land"
        mover.let_go()
        rig.step()
        assert rig.free_rows() == set(range(ROWS))

    @KILLED
    def test_that_cannot_be_reaped_leaves_its_tier_without_one_and_requests_do_not_wait(
        self, rig: Rig, provoke: Callable[[Rig], None]
    ) -> None:
        rig.open(KEYS)
        rig.begin_load(KEYS[:1])
        rig.mover.hangs = True
        provoke(rig)
        rig.pass_time(1000.0)
        (member,) = rig.core.movers
        assert member.state is TierState.DOWN
        assert rig.look_up(KEYS[1], "another") is Lookup.MISS
        assert "has not exited" in rig.store.stats()["file"]["problem"]
        assert len(rig.movers.started) == 1
        assert rig.store.put(KEYS[4:6], np.zeros((2, CHUNK_BYTES), np.uint8)) == 2, "the host goes on"
        assert rig.store.flush(0.0), "what cannot be written is dropped, and nobody waits for it"

    def test_that_says_it_has_too_many_slots_is_killed(self, rig: Rig) -> None:
        rig.open()
        too_many_slots(rig)
        assert rig.mover.kills == 1


class TestBlockingCalls:
    def test_a_get_ends_wait_s_after_the_last_row_and_leaves_the_rest_unchanged(
        self, rig: Rig, waits: Callable[[Rig], None]
    ) -> None:
        rig.open(KEYS)
        waits(rig)
        rig.stalls.add(Load)
        out = np.full((3, CHUNK_BYTES), 0xEE, np.uint8)
        began_s = rig.clock.now
        assert rig.store.get(KEYS[:3], out) == [False] * 3
        assert WAIT_S <= rig.clock.now - began_s <= WAIT_S + 2 * POLL_S
        assert (out == 0xEE).all()
        assert rig.mover.kills == 0

    def test_a_get_waits_on_while_rows_come(self, rig: Rig, waits: Callable[[Rig], None]) -> None:
        rig.open(KEYS)
        waits(rig)
        rig.stalls.add(Load)

        def come() -> None:
            """One job each 0.9 * WAIT_S."""
            rig.serve()
            if rig.open_jobs and rig.clock.now - began_s > 0.9 * WAIT_S * (len(ended) + 1):
                ended.append(rig.clock.now)
                rig.end_jobs()

        ended: list[float] = []
        began_s, rig.stepped.meanwhile = rig.clock.now, come
        out = np.zeros((8, CHUNK_BYTES), np.uint8)
        assert rig.store.get(KEYS, out) == [True] * 8
        assert [int(row[0]) for row in out] == list(range(1, 9))
        assert len(ended) > 1
        assert rig.clock.now - began_s > 1.5 * WAIT_S

    def test_a_flush_and_a_wait_for_listings_end_in_their_time(self, rig: Rig, waits: Callable[[Rig], None]) -> None:
        waits(rig)
        rig.silent = True
        began_s = rig.clock.now
        assert not rig.store.wait_ready(3.0)
        assert 3.0 <= rig.clock.now - began_s <= 3.0 + TICK_S
        rig.silent = False
        rig.open()
        rig.stalls.add(Store)
        assert rig.store.put(KEYS, np.zeros((8, CHUNK_BYTES), np.uint8)) == 8
        began_s = rig.clock.now
        assert not rig.store.flush(2.0)
        assert 2.0 <= rig.clock.now - began_s <= 2.0 + TICK_S
        rig.stalls.clear()
        rig.end_jobs()
        assert rig.store.flush(2.0)

    @pytest.mark.parametrize(("listed_after_s", "hit"), [(0.5 * WAIT_S, True), (2.0 * WAIT_S, False)])
    def test_a_get_waits_for_a_listing_in_its_time(
        self, rig: Rig, waits: Callable[[Rig], None], listed_after_s: float, hit: bool
    ) -> None:
        """The tier may hold any key until then."""
        rig.medium = {KEYS[0]: 0}
        rig.mover.read()
        rig.mover.send(Heartbeat(0), Opened(0, 100))
        rig.step()
        waits(rig)
        listed = [Listed(0, [Entry(0, KEYS[0], 1)], last=True)]

        def answer() -> None:
            if listed and rig.clock.now >= began_s + listed_after_s:
                rig.mover.send(listed.pop())
            rig.serve()

        began_s, rig.stepped.meanwhile = rig.clock.now, answer
        assert rig.store.get(KEYS[:1], np.zeros((1, CHUNK_BYTES), np.uint8)) == [hit]
        assert rig.clock.now - began_s <= WAIT_S + 2 * POLL_S


class TestAReset:
    def test_what_is_listed_late_of_before_is_none(self, rig: Rig) -> None:
        rig.open()
        rig.coordinator.reset()
        listed = Listed(0, [Entry(1, KEYS[0], 1)], last=True)
        rig.mover.send(Heartbeat(0), Opened(0, 100), listed)
        rig.step()
        assert not rig.coordinator.ready
        (tier,) = rig.core.tiers
        assert tier.members[0].state is TierState.DOWN, "nothing is stored before the new one is open"
        rig.mover.send(Heartbeat(0), Opened(rig.coordinator.namespace.epoch, 100))
        rig.step()
        assert locate(rig.coordinator, KEYS[:1]) == [None]
        assert rig.store.stats()["file"]["rows"] == 0


class TestClose:
    @pytest.mark.parametrize("hangs", [False, True], ids=["killed", "cannot be reaped"])
    def test_ends_in_its_time_while_the_tier_hangs(self, rig: Rig, waits: Callable[[Rig], None], hangs: bool) -> None:
        rig.open(KEYS)
        rig.begin_load(KEYS[:1])
        waits(rig)
        rig.mover.hangs, rig.silent = hangs, True
        began_s = rig.clock.now
        rig.coordinator.close(4.0)
        assert rig.clock.now - began_s <= 4.0 + REAP_TIMEOUT_S + TICK_S
        assert rig.mover.kills == 1
        with pytest.raises(RuntimeError, match="closed"):
            rig.store.get(KEYS[:1], np.zeros((1, CHUNK_BYTES), np.uint8))
