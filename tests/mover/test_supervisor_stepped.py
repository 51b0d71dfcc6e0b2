"""The supervisor, turn by turn: whatever a mover does, only that mover is killed, and it is replaced when it is quiet.

No process, no thread: movers are fakes behind a socket pair, and time passes when the test says so.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from nixl_tiers.base.clock import COUNTED_S, RunningClock
from nixl_tiers.memory.columns import ListedColumns
from nixl_tiers.mover import child
from nixl_tiers.mover.handler import Turn
from nixl_tiers.mover.protocol import (
    CheckExistence,
    Configure,
    Delete,
    Down,
    ExistenceChecked,
    Heartbeat,
    Open,
    Opened,
    Refused,
    Stop,
    ToCoordinator,
    ToMover,
)
from nixl_tiers.mover.restarts import KILLS_AN_HOUR
from nixl_tiers.mover.supervisor import IDLE_S, REAP_TIMEOUT_S, TICK_S, Supervisor
from tests.support.fake_movers import Clock, FakeMovers, FakeProcess, SteppedSupervisor
from tests.support.times import changed

NAMESPACE = bytes(range(16))
OPEN = Open(NAMESPACE, 0)
TIMES = changed(
    heartbeat_timeout_s=18.0, start_timeout_s=50.0, send_timeout_s=100.0, restart_backoff_s=(0.06, 1.2, 4.0, 12.0, 50.0)
)
"""Not production's: each mover has the times of its Configure."""
BACKOFF_S = TIMES.restart_backoff_s


class Handler:
    """Notes its calls; `fails`: the names of those that raise at their next call."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.received: list[tuple[int, ToCoordinator]] = []
        self.problems: list[tuple[int, str]] = []
        self.lines: list[tuple[int, int, str]] = []
        self.fails: list[str] = []
        self.to_send: list[tuple[int, ToMover | bytes]] = []
        self.overdue: dict[int, str] = {}
        self.during: Callable[[int], object] = lambda _: None

    def _called(self, name: str, tier: int) -> None:
        self.calls.append(f"{name} {tier}")
        if name in self.fails:
            self.fails.remove(name)
            raise ZeroDivisionError

    def on_message(self, tier: int, message: ToCoordinator) -> None:
        self.received.append((tier, message))
        self.during(tier)
        self._called("message", tier)

    def on_columns(self, tier: int, epoch: int, columns: ListedColumns) -> None:
        columns.close()

    def on_problem(self, tier: int, reason: str) -> None:
        self.problems.append((tier, reason))

    def on_log_line(self, tier: int, level: int, text: str) -> None:
        self.lines.append((tier, level, text))

    def on_killed(self, tier: int) -> None:
        self._called("killed", tier)

    def on_reaped(self, tier: int) -> None:
        self._called("reaped", tier)

    def on_tick(self, received_s: float, send_credits: Sequence[int]) -> Turn:
        if "tick" in self.fails:
            self.fails.remove("tick")
            raise ZeroDivisionError
        messages, self.to_send = self.to_send, []
        overdue, self.overdue = self.overdue, {}
        return Turn(messages, overdue, IDLE_S)

    @property
    def ends(self) -> list[str]:
        """Kills and reaps, in order."""
        return [call for call in self.calls if not call.startswith("message")]


class Rig:
    def __init__(
        self, movers: FakeMovers, count: int = 1, source: Callable[[Clock], Any] = lambda clock: clock
    ) -> None:
        self.movers = movers
        self.handler = Handler()
        self.clock = Clock()
        configures = [Configure({"type": "any"}, 1, 4096, 1, 4, times=TIMES)] * count
        names = [f"tier{number}" for number in range(count)]
        self.supervisor = Supervisor(configures, names, 0, self.handler, source(self.clock))
        self.stepped = SteppedSupervisor(self.supervisor, self.clock)
        self.step = self.stepped.step
        self.supervisor.start(OPEN)
        self.step()
        for mover in self.alive:
            mover.beat()
        self.step()

    @property
    def alive(self) -> list[FakeProcess]:
        """By tier; those that were killed and hang included."""
        started = {process.pid: process for process in self.movers.started}
        return [started[pid] for pid in self.supervisor.pids if pid is not None]

    def beat(self) -> None:
        for mover in self.alive:
            with suppress(OSError):
                mover.beat()

    def step_on(self, seconds: float, *, but_for: FakeProcess | None = None) -> None:
        """Time passes, in which all movers send heartbeats but for one."""

        def beat() -> None:
            for mover in self.alive:
                if mover is not but_for:
                    with suppress(OSError):
                        mover.beat()

        self.stepped.meanwhile = beat
        self.stepped.pass_time(seconds, each_s=0.5)
        self.stepped.meanwhile = lambda: None

    def release(self) -> None:
        for mover in self.alive:
            mover.exit(0)
        self.supervisor.close(60.0)


@pytest.fixture
def movers(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeMovers]:
    movers = FakeMovers()
    movers.install(monkeypatch)
    yield movers
    movers.release()


@pytest.fixture
def make_rig(movers: FakeMovers) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(count: int = 1, **named: Any) -> Rig:
        rigs.append(Rig(movers, count, **named))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.release()


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    """With one mover, which has sent a heartbeat."""
    return make_rig()


@pytest.fixture
def two(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig(2)


class TestWhatGetsAMoverKilled:
    def test_no_heartbeat_for_its_timeout_and_no_sooner(self, two: Rig) -> None:
        silent, other = two.alive
        two.step_on(TIMES.heartbeat_timeout_s, but_for=silent)
        assert two.handler.ends == []
        two.step_on(0.5, but_for=silent)
        assert two.handler.ends == ["killed 0"]
        two.step()
        assert two.handler.ends == ["killed 0", "reaped 0"]
        assert two.handler.problems == [(0, "its mover is killed: heartbeat timeout")]
        assert (silent.kills, other.kills) == (1, 0)

    def test_no_message_at_all_within_its_start(self, make_rig: Callable[..., Rig], movers: FakeMovers) -> None:
        rig = make_rig()
        rig.alive[0].exit(1)
        rig.step()
        rig.step(BACKOFF_S[0])
        (new,) = rig.alive
        rig.step(TIMES.start_timeout_s)
        assert new.kills == 0
        rig.step(0.1)
        assert new.kills == 1
        assert rig.handler.problems[-1] == (0, "its mover is killed: it did not start in time")

    def test_a_job_that_is_overdue(self, two: Rig) -> None:
        two.handler.overdue = {1: "a job takes too long"}
        two.step()
        assert [mover.kills for mover in two.movers.started] == [0, 1]
        assert two.handler.problems == [(1, "its mover is killed: a job takes too long")]

    @pytest.mark.parametrize(
        "packet",
        [b"\xc1", bytes(100), b"\x81\xa4type\xa6nobody", b"\x82\xa4type\xa9heartbeat\xaaused_bytes\xff"],
        ids=["no msgpack", "zeros", "unknown", "negative"],
    )
    def test_a_malformed_packet(self, two: Rig, packet: bytes) -> None:
        bad, good = two.alive
        bad.send(packet, Heartbeat(7))
        two.step()
        reasons = [reason.partition(" (")[0] for _, reason in two.handler.problems]
        assert reasons == ["its mover is killed: it sent an invalid message"]
        assert (bad.kills, good.kills) == (1, 0)
        assert (0, Heartbeat(7)) not in two.handler.received, "nothing behind it is applied"

    @pytest.mark.parametrize("how", ["closed", "empty packet", "empty packet with a descriptor"])
    def test_a_socket_that_it_has_closed(self, two: Rig, how: str) -> None:
        """Nothing is heard of it any more, so that nobody waits for its heartbeat; an empty packet looks the same."""
        deaf, other = two.alive
        before = set(Path("/proc/self/fd").iterdir())
        if how == "closed":
            deaf.hang_up()
        elif how == "empty packet":
            deaf.send(b"")
        else:
            with Path("/dev/null").open("rb") as stray:
                socket.send_fds(deaf._socket, [b""], [stray.fileno()])
        two.step()
        assert set(Path("/proc/self/fd").iterdir()) <= before, "a descriptor that came with it is closed"
        two.step_on(child.HANG_UP_S, but_for=deaf)
        assert two.handler.ends == [], "one that exits has closed it too"
        two.step_on(0.5, but_for=deaf)
        assert (deaf.kills, other.kills) == (1, 0)
        assert two.handler.problems == [(0, "its mover is killed: it has closed its socket")]

    def test_a_message_that_cannot_be_applied(self, two: Rig) -> None:
        two.handler.fails.append("message")
        two.alive[0].beat()
        two.step()
        assert [mover.kills for mover in two.movers.started[:2]] == [1, 0]
        assert two.handler.problems == [(0, "its mover is killed: its message could not be applied")]

    def test_messages_that_it_does_not_read_in_spite_of_its_heartbeats(self, two: Rig) -> None:
        full, other = two.alive
        packet = Delete([(0, bytes(100))] * 256)
        while not two.supervisor._movers[0]._unsent:  # type: ignore[union-attr]
            two.handler.to_send = [(0, packet)]
            two.step()
        two.step_on(TIMES.send_timeout_s - 1.0)
        assert full.kills == 0
        two.step_on(2.0)
        assert (full.kills, other.kills) == (1, 0)
        assert two.handler.problems[-1] == (0, "its mover is killed: it does not read its messages")

    def test_a_queue_of_messages_without_an_end(self, two: Rig) -> None:
        packet = Delete([(0, bytes(100))] * 256)
        two.handler.to_send = [(0, packet)] * (2 * child.MAX_UNSENT)
        two.step()
        assert [mover.kills for mover in two.movers.started[:2]] == [1, 0]

    @pytest.mark.parametrize("message", [Delete([(0, object())]), bytes(8 << 20)], ids=["no bytes", "too long"])  # type: ignore[list-item]
    def test_a_message_that_cannot_be_sent_and_the_others_get_theirs(self, two: Rig, message: ToMover | bytes) -> None:
        two.alive[1].read()
        two.handler.to_send = [(0, message), (1, CheckExistence(5, [b"key"], chain=True))]
        two.step()
        assert [mover.kills for mover in two.movers.started[:2]] == [1, 0]
        assert two.movers.started[1].read() == [CheckExistence(5, [b"key"], chain=True)]


class TestWhatGetsNoMoverKilled:
    def test_messages_that_had_come_before_its_silence_was_judged(self, two: Rig) -> None:
        """The message of one takes longer to handle than the timeout of the other, which has sent one meanwhile."""

        def take_long(_: int) -> None:
            two.handler.during = lambda _: None
            two.alive[1].beat()
            two.clock.now += 2 * TIMES.heartbeat_timeout_s

        for tier in (0, 1):
            two.handler.during = take_long
            two.alive[tier].beat()
            two.step()
            two.beat()
            two.step()
            assert two.handler.ends == []

    def test_a_pause_of_the_engine(self, make_rig: Callable[..., Rig]) -> None:
        rig = make_rig(source=RunningClock)
        for _ in range(3):
            rig.step(3600.0)
            rig.beat()
            rig.step(1.0)
        assert rig.handler.ends == []
        assert TIMES.heartbeat_timeout_s > COUNTED_S


class TestUntilItIsQuiet:
    """Its rows are others' only then, and no second mover uses its medium."""

    def test_one_that_cannot_be_reaped_is_not_replaced_and_its_messages_are_ignored(self, rig: Rig) -> None:
        (stuck,) = rig.alive
        stuck.hangs = True
        rig.handler.overdue = {0: "it hangs"}
        rig.step()
        assert rig.handler.ends == ["killed 0"]
        received = len(rig.handler.received)
        for _ in range(1000):
            stuck.beat()
            rig.step(1.0)
        assert len(rig.handler.received) == received
        assert rig.handler.ends == ["killed 0"]
        assert rig.movers.started == [stuck]
        assert rig.handler.problems[-1] == (0, "its mover was killed and has not exited")
        stuck.exit(-9)
        rig.step()
        assert rig.handler.ends == ["killed 0", "reaped 0"]
        rig.step(BACKOFF_S[0])
        assert len(rig.movers.started) == 2

    @pytest.mark.parametrize("killed", [False, True])
    def test_one_whose_memory_is_not_gone_is_not_reaped(self, rig: Rig, killed: bool) -> None:
        """As while a monitor reads its page tables: what it has begun to read may still land in its rows."""
        (gone,) = rig.alive
        if killed:
            gone.hangs = True
            rig.handler.overdue = {0: "it hangs"}
            rig.step()
        gone.exit(-9, memory_gone=False)
        for _ in range(5):
            rig.step(IDLE_S)
        assert "reaped 0" not in rig.handler.ends
        assert rig.movers.started == [gone]
        gone.let_go()
        rig.step()
        assert rig.handler.ends[-1] == "reaped 0"
        rig.step(BACKOFF_S[0])
        assert len(rig.movers.started) == 2

    def test_one_that_lingers_does_not_keep_the_thread_awake(self, rig: Rig) -> None:
        rig.alive[0].exit(-9, memory_gone=False)
        rig.step()
        assert not rig.supervisor._epoll.poll(0), "its exit was seen, and is no news any more"

    @pytest.mark.parametrize("call", ["killed", "reaped"])
    def test_a_report_that_the_handler_has_not_applied_is_made_again_before_a_restart(
        self, rig: Rig, call: str
    ) -> None:
        """Its rows would stay pinned for ever."""
        rig.handler.fails += [call] * 3
        rig.handler.overdue = {0: "it hangs"}
        while rig.handler.fails:
            rig.step(BACKOFF_S[0])
        assert len(rig.movers.started) == 1
        rig.step()
        assert rig.handler.ends.count(f"{call} 0") == 4
        rig.step(BACKOFF_S[1])
        assert rig.handler.ends[-1] == "reaped 0"
        rig.step(BACKOFF_S[1])
        assert len(rig.movers.started) == 2

    def test_what_it_had_sent_before_it_exited_counts(self, rig: Rig) -> None:
        (mover,) = rig.alive
        mover.send(ExistenceChecked(1, [b"key"]))
        mover.log("lib.so: undefined symbol")
        mover.exit(127)
        rig.step()
        assert (0, ExistenceChecked(1, [b"key"])) in rig.handler.received
        assert rig.handler.lines == [(0, logging.DEBUG, "lib.so: undefined symbol")]
        assert rig.handler.problems == [(0, "its mover ended with 127; its last lines: lib.so: undefined symbol")]


class TestRestarts:
    def test_each_is_later_than_the_one_before(self, rig: Rig) -> None:
        for number, wait_s in enumerate([*BACKOFF_S, BACKOFF_S[-1]], start=1):
            rig.alive[0].exit(1)
            rig.step()
            rig.step(wait_s - 0.01)
            assert len(rig.movers.started) == number
            rig.step(0.02)
            assert len(rig.movers.started) == number + 1
            rig.beat()
            rig.step()

    def test_ten_kills_within_an_hour_are_the_last_ones(self, rig: Rig) -> None:
        began_s = rig.clock.now
        while len(rig.movers.started) <= KILLS_AN_HOUR:
            rig.handler.overdue = {0: "it hangs"}
            rig.step()
            if rig.clock.now > began_s + 2000.0:
                break
            rig.stepped.pass_time(61.0, each_s=1.0)
        assert len(rig.movers.started) == KILLS_AN_HOUR
        assert rig.handler.ends.count("killed 0") == KILLS_AN_HOUR
        rig.step_on(began_s + 3600.0 - 1.0 - rig.clock.now)
        assert len(rig.movers.started) == KILLS_AN_HOUR
        rig.step_on(2.0)
        assert len(rig.movers.started) == KILLS_AN_HOUR + 1

    def test_one_that_cannot_be_started_is_tried_again(self, rig: Rig) -> None:
        rig.alive[0].exit(1)
        rig.movers.cannot_start = OSError(11, "Resource temporarily unavailable")
        rig.step()
        rig.step(BACKOFF_S[0])
        assert "its mover cannot be started" in rig.handler.problems[-1][1]
        rig.movers.cannot_start = None
        rig.step(BACKOFF_S[1])
        assert len(rig.movers.started) == 2

    def test_a_new_one_is_configured_and_told_what_is_to_be_served_now(self, rig: Rig) -> None:
        assert [type(message) for message in rig.alive[0].read()] == [Configure, Open]
        rig.supervisor.reopen(Open(NAMESPACE, 9))
        rig.handler.to_send = [(0, Delete([(0, b"key")]))]
        rig.step()
        assert rig.alive[0].read() == [Open(NAMESPACE, 9), Delete([(0, b"key")])], "what is planned is for the new one"
        rig.alive[0].exit(1)
        rig.step()
        rig.step(BACKOFF_S[0])
        assert rig.alive[0].read()[1:] == [Open(NAMESPACE, 9)]

    @pytest.mark.parametrize("accepted", [None, Opened(0, 10), Down("no disk", 0)], ids=["never", "opened", "down"])
    def test_one_that_refuses_its_configuration_is_not_started_again(
        self, rig: Rig, accepted: ToCoordinator | None
    ) -> None:
        """Unless one has accepted it before: it may become valid again."""
        (mover,) = rig.alive
        if accepted is not None:
            mover.send(accepted)
        mover.send(Refused("no such bucket"))
        mover.exit(0)
        rig.step()
        rig.stepped.pass_time(100.0, each_s=1.0)
        assert (len(rig.movers.started) > 1) is (accepted is not None)


class TestAnErrorOfTheSupervisorItself:
    def test_ends_all_movers_and_not_the_supervisor(self, two: Rig) -> None:
        """It is unknown what they have not been sent."""
        two.handler.fails.append("tick")
        assert two.step() == (0.0, TICK_S), "not at once: it may be raised again"
        assert [mover.kills for mover in two.movers.started] == [1, 1]
        two.step()
        assert sorted(two.handler.ends) == ["killed 0", "killed 1", "reaped 0", "reaped 1"]
        assert two.handler.problems[:2] == [
            (tier, "its mover is killed: the supervisor failed (ZeroDivisionError)") for tier in (0, 1)
        ]
        two.step(BACKOFF_S[0])
        assert len(two.movers.started) == 4


class TestClose:
    def test_movers_are_told_to_stop_and_waited_for(self, two: Rig) -> None:
        for mover in two.alive:
            mover.read()
        stopped: list[FakeProcess] = []

        def finish() -> None:
            for mover in two.alive:
                if mover.read() == [Stop()]:
                    stopped.append(mover)
                elif mover in stopped and two.clock.now > began_s + 3.0:
                    mover.exit(0)

        began_s, two.stepped.meanwhile = two.clock.now, finish
        assert two.supervisor.close(10.0)
        assert len(stopped) == 2
        assert [mover.kills for mover in two.movers.started] == [0, 0]
        assert two.clock.now - began_s < 3.5

    @pytest.mark.parametrize("hangs", [False, True], ids=["killed", "cannot be reaped"])
    def test_one_that_does_not_exit_is_killed_and_the_close_ends_in_its_time(self, two: Rig, hangs: bool) -> None:
        late, other = two.alive
        late.hangs = hangs
        began_s, two.stepped.meanwhile = two.clock.now, lambda: other.exit(0)
        assert not two.supervisor.close(4.0)
        assert (late.kills, other.kills) == (1, 0)
        assert two.clock.now - began_s <= 4.0 + min(REAP_TIMEOUT_S, 1.0) + TICK_S

    def test_no_mover_is_started_while_it_closes(self, rig: Rig) -> None:
        rig.alive[0].exit(1)
        rig.step()
        rig.supervisor.close(0.0)
        rig.step(BACKOFF_S[0])
        assert len(rig.movers.started) == 1

    def test_of_descriptors_nothing_is_left(self, movers: FakeMovers) -> None:
        before = set(Path("/proc/self/fd").iterdir())
        rig = Rig(movers, 2)
        for _ in range(3):
            for mover in rig.alive:
                mover.exit(1)
            rig.step()
            rig.step(100.0)
        rig.release()
        movers.release()
        movers.started.clear()
        assert set(Path("/proc/self/fd").iterdir()) <= before
