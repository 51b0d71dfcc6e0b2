"""The supervisor: whatever a mover does, only that mover is killed and restarted."""

from __future__ import annotations

import logging
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.base.clock import RunningClock
from nixl_tiers.base.times import PRODUCTION, Times
from nixl_tiers.memory.address_space import marked
from nixl_tiers.memory.columns import ListedColumns
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover import child
from nixl_tiers.mover.handler import Turn
from nixl_tiers.mover.protocol import (
    CheckExistence,
    Configure,
    Delete,
    ExistenceChecked,
    Heartbeat,
    Open,
    Opened,
    ToCoordinator,
    ToMover,
)
from nixl_tiers.mover.supervisor import IDLE_S, Supervisor
from tests.mover.harness import NAMESPACE
from tests.support.times import changed
from tests.support.waiting import until

GEOMETRY = Geometry(1, 60_000)


class Recorder:
    """A handler that records its calls, and raises for the next `raises` messages."""

    def __init__(self) -> None:
        self.received: list[ToCoordinator] = []
        self.problems: list[str] = []
        self.lines: list[tuple[int, str]] = []
        self.tiers: list[int] = []
        self.killed = self.reaped = self.raises = 0
        self.during: dict[int, Callable[[], None]] = {}  # what happens while the next message of a tier is handled
        self.send: list[tuple[int, ToMover]] = []
        self.turns: list[Turn] = []  # what the next ones return
        self.ticks = 0

    def on_message(self, tier: int, message: ToCoordinator) -> None:
        self.received.append(message)
        self.tiers.append(tier)
        self.during.pop(tier, lambda: None)()
        if self.raises:
            self.raises -= 1
            raise ZeroDivisionError

    def on_columns(self, tier: int, epoch: int, columns: ListedColumns) -> None:
        columns.close()

    def on_problem(self, tier: int, reason: str) -> None:
        self.problems.append(reason)

    def on_log_line(self, tier: int, level: int, text: str) -> None:
        self.lines.append((level, text))

    def on_killed(self, tier: int) -> None:
        self.killed += 1

    def on_reaped(self, tier: int) -> None:
        self.reaped += 1

    def on_tick(self, received_s: float, send_credits: Sequence[int]) -> Turn:
        self.ticks += 1
        if self.turns:
            return self.turns.pop(0)
        send, self.send = self.send, []
        return Turn(send, {}, IDLE_S)

    def opened(self) -> int:
        return sum(isinstance(message, Opened) for message in self.received)


@contextmanager
def supervised(
    tmp_path: Path, movers: int = 1, clock: Callable[[], float] | None = None, times: Times = PRODUCTION
) -> Iterator[tuple[Supervisor, Recorder]]:
    region, recorder = HostRegion.create(GEOMETRY, 4), Recorder()
    tier: dict[str, object] = {
        "type": "tests.mover.stub_tiers:StubConfig",
        "stub": "InstantTier",
        "closed": str(tmp_path / "closed"),
    }
    configures = [Configure(tier, 1, 60_000, 1, 4, times=times)] * movers
    names = [f"tier{number}" for number in range(movers)]
    supervisor = Supervisor(configures, names, region.fd, recorder, clock or time.monotonic)
    supervisor.start(Open(NAMESPACE, 0))
    try:
        until(lambda: recorder.opened() == movers, "the movers", 60)
        yield supervisor, recorder
    finally:
        supervisor.close(10)
        region.close()


def test_a_message_that_cannot_be_applied_kills_its_mover_and_the_thread_continues(tmp_path: Path) -> None:
    with supervised(tmp_path) as (_, recorder):
        recorder.raises = 1
        until(lambda: recorder.opened() > 1, "another mover", 60)
        assert (recorder.killed, recorder.reaped) == (1, 1)


def test_a_mover_that_does_not_read_is_killed_when_its_queue_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "MAX_UNSENT", 10)
    with supervised(tmp_path) as (supervisor, recorder):
        pid = supervisor.pids[0]
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)

        def fill_queue() -> bool:
            recorder.send = [(0, Delete([(0, bytes(200))] * 200))] * 20
            supervisor.wake()
            return bool(recorder.reaped)

        until(fill_queue, "its end", 60)
        assert recorder.killed == 1
        until(lambda: recorder.opened() > 1, "another mover", 60)


def test_a_mover_that_reads_nothing_is_killed_in_spite_of_its_heartbeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with supervised(tmp_path, times=changed(send_timeout_s=0.5)) as (supervisor, recorder):
        with monkeypatch.context() as patch:
            patch.setattr(child.Child, "flush", lambda self: not self._unsent)
            recorder.send = [(0, Delete([(0, b"key")]))]
            supervisor.wake()
            until(lambda: recorder.reaped, "its end", 60)
        until(lambda: recorder.opened() > 1, "another mover", 60)


def test_a_message_that_cannot_be_encoded_kills_its_mover_and_no_other(tmp_path: Path) -> None:
    with supervised(tmp_path, movers=2) as (supervisor, recorder):
        pids = supervisor.pids
        too_long = Delete([(0, bytes(200))] * 20_000)
        for unsendable in (Delete([(0, object())]), too_long):  # type: ignore[list-item]
            reaped = recorder.reaped
            until(lambda: recorder.opened() == 2 + reaped, "the next mover", 60)  # noqa: B023 - called in this turn only
            recorder.send = [(0, unsendable), (1, CheckExistence(reaped, [b"key"], chain=True))]
            supervisor.wake()
            until(lambda: recorder.reaped > reaped, "the mover's end", 60)  # noqa: B023 - as above
            until(lambda: ExistenceChecked(reaped, []) in recorder.received, "the other's answer", 60)  # noqa: B023 - as above
        assert supervisor.pids[1] == pids[1]


def test_a_mover_that_cannot_be_reaped_is_not_replaced_and_its_messages_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with supervised(tmp_path) as (supervisor, recorder):
        mover = supervisor._movers[0]
        assert mover is not None
        real_kill = mover.process.kill
        monkeypatch.setattr(mover.process, "kill", lambda: None)  # as if it were stuck in the kernel
        recorder.raises = 1
        try:
            until(lambda: recorder.killed, "the kill", 60)
            received = len(recorder.received)
            turns = supervisor.turns
            until(lambda: supervisor.turns > turns + 3, "some turns", 60)
            assert len(recorder.received) == received
            assert recorder.reaped == 0
            assert supervisor.pids == [mover.process.pid]
        finally:
            real_kill()
        until(lambda: recorder.opened() > 1, "another mover", 60)
        assert recorder.reaped == 1


def test_a_mover_whose_memory_is_not_gone_is_not_replaced_and_nothing_spins(tmp_path: Path) -> None:
    """As while a monitor reads its page tables: what it has begun to read may still land in its rows."""
    with supervised(tmp_path) as (supervisor, recorder):
        mover = supervisor._movers[0]
        assert mover is not None
        other = marked(os.dup(mover.memory.fd))
        os.kill(mover.process.pid, signal.SIGKILL)
        until(lambda: mover.lingers, "its end", 60)
        began, turns = time.monotonic(), supervisor.turns
        until(lambda: supervisor.turns > turns + 2, "some turns", 60)
        assert time.monotonic() - began > IDLE_S
        assert (mover.process.returncode, recorder.reaped) == (-signal.SIGKILL, 0)
        assert supervisor._movers == [mover]
        other.close()
        until(lambda: recorder.opened() > 1, "another mover", 60)
        assert recorder.reaped == 1


class JumpingClock:
    """A clock that can be put forward, as after a pause of this process."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


def test_a_pause_of_the_process_kills_no_mover(tmp_path: Path) -> None:
    jumping = JumpingClock()
    with supervised(tmp_path, clock=RunningClock(jumping)) as (supervisor, recorder):
        pids = supervisor.pids
        for _ in range(3):
            received = len(recorder.received)
            jumping.ahead_s += 3600.0
            until(lambda: len(recorder.received) > received + 1, "heartbeats", 60)  # noqa: B023 - called in this turn only
        assert (recorder.killed, recorder.reaped) == (0, 0)
        assert supervisor.pids == pids


def test_messages_are_read_before_the_heartbeat_timeout_is_judged(tmp_path: Path) -> None:
    """One mover's message takes longer to handle than the heartbeat timeout of the other, which has sent one meanwhile.
    By a clock of the test's: on a busy machine a mover may be late by any real time."""
    jumping = JumpingClock()
    with supervised(tmp_path, movers=2, clock=jumping) as (supervisor, recorder):
        pids = supervisor.pids

        def take_long() -> None:
            movers = [mover for mover in supervisor._movers if mover is not None]
            for mover in movers:
                assert select.select([mover.socket], [], [], 60)[0], "a heartbeat"
            jumping.ahead_s += 2 * PRODUCTION.heartbeat_timeout_s

        for tier in (0, 1):
            recorder.during[tier] = take_long
            until(lambda: not recorder.during, "a message", 60)
            received = len(recorder.received)
            until(lambda: set(recorder.tiers[received:]) == {0, 1}, "both movers", 60)  # noqa: B023 - as above
        assert recorder.killed == 0
        assert supervisor.pids == pids


def test_a_mover_that_dies_at_its_start_is_logged_with_its_last_lines_without_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "0123456789abcdef")
    recorder = Recorder()
    with HostRegion.create(GEOMETRY, 4) as region:
        configure = Configure({"type": "tests.mover.stub_tiers:StubConfig", "stub": "dies_at_start"}, 1, 60_000, 1, 4)
        supervisor = Supervisor([configure], ["stub"], region.fd, recorder, time.monotonic)
        before = len(list(Path("/proc/self/fd").iterdir()))
        supervisor.start(Open(NAMESPACE, 0))
        try:
            until(lambda: len(recorder.problems) > 1, "two deaths", 120)
        finally:
            supervisor.close(10)
        assert len(list(Path("/proc/self/fd").iterdir())) < before
    reason = "its mover ended with 127; its last lines: lib.so: undefined symbol: foo, key ***"
    assert set(recorder.problems) == {reason}
    assert (logging.DEBUG, "lib.so: undefined symbol: foo, key ***") in recorder.lines


def _reads_after_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of a mover are handled also after it was killed."""
    monkeypatch.setattr(Supervisor, "_stop_reading", lambda self, mover: None)
    monkeypatch.setattr(child.Child, "killed", False)


def _frees_rows_before_reaping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are freed when their mover is killed, though it may still write to them."""
    original = Supervisor._kill

    def kill(self: Supervisor, tier: int, mover: child.Child, why: str) -> None:
        original(self, tier, mover, why)
        self._handler.on_reaped(tier)

    monkeypatch.setattr(Supervisor, "_kill", kill)


@pytest.mark.slow
@pytest.mark.parametrize("plant", [_reads_after_kill, _frees_rows_before_reaping])
def test_planted_bugs_in_kill_and_reap_are_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_mover_that_cannot_be_reaped_is_not_replaced_and_its_messages_are_ignored(tmp_path, monkeypatch)


def test_mover_is_in_the_engines_session_and_not_in_its_process_group(tmp_path: Path) -> None:
    """Ctrl-C is not for it, and the nice values of its threads count beside the engine's (sched_autogroup)."""
    with supervised(tmp_path) as (supervisor, _):
        (pid,) = supervisor.pids
        assert pid is not None
        assert os.getsid(pid) == os.getsid(0)
        assert os.getpgid(pid) == pid


def test_an_idle_supervisor_wakes_up_once_a_heartbeat(tmp_path: Path) -> None:
    def heartbeats(recorder: Recorder) -> int:
        return sum(isinstance(message, Heartbeat) for message in recorder.received)

    with supervised(tmp_path) as (supervisor, recorder):
        until(lambda: heartbeats(recorder) >= 2, "it to settle", 60)
        began, turns = time.monotonic(), supervisor.turns
        before = len(recorder.received)
        until(lambda: len(recorder.received) >= before + 4, "four heartbeats", 60)
        # Every message wakes it, and its own timeout does every second.
        elapsed_s = time.monotonic() - began
        assert supervisor.turns - turns <= len(recorder.received) - before + elapsed_s + 3


FOREVER_S = 1e6


@contextmanager
def pausing(turn: Turn, reports: int = 0) -> Iterator[tuple[Supervisor, Recorder]]:
    """A supervisor without movers whose first turn is this one. `reports`: what it could read all of the time."""
    recorder = Recorder()
    recorder.turns = [turn]
    supervisor = Supervisor([], [], -1, recorder, time.monotonic)
    report = os.eventfd(reports)
    supervisor._epoll.register(report, select.EPOLLIN)
    supervisor.start(Open(NAMESPACE, 0))
    try:
        yield supervisor, recorder
    finally:
        supervisor.close(10)
        os.close(report)


def test_a_pause_is_ended_by_a_wake_and_by_nothing_else() -> None:
    with pausing(Turn([], {}, 0.0, pause_s=FOREVER_S), reports=1) as (supervisor, recorder):
        until(lambda: supervisor._pausing, "the pause", 60)
        supervisor.wake_soon()
        with pytest.raises(BlockingIOError):
            os.eventfd_read(supervisor._wake_fd)
        assert recorder.ticks == 1
        supervisor.wake()
        until(lambda: recorder.ticks > 1, "the next turn", 60)


@pytest.mark.parametrize("pause_s", [0.0, 0.5])
def test_a_turn_that_may_wait_for_the_end_of_a_pause_waits_no_longer(pause_s: float) -> None:
    with pausing(Turn([], {}, FOREVER_S, pause_s)) as (supervisor, recorder):
        until(lambda: recorder.ticks, "the first turn", 60)
        supervisor.wake_soon()
        until(lambda: recorder.ticks > 1, "the next turn", 60)
