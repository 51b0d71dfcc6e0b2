"""The supervisor: whatever a mover does, it costs that mover and nothing else."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from nixl_tiers.chunk import Geometry
from nixl_tiers.clock import COUNTED_S, RunningClock
from nixl_tiers.memory.cold_index import SharedColdIndex
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover import child
from nixl_tiers.mover.backoff import KILLS_AN_HOUR, RestartBackoff
from nixl_tiers.mover.protocol import (
    HEARTBEAT_S,
    CheckExistence,
    Configure,
    Delete,
    ExistenceChecked,
    Heartbeat,
    ListedIndex,
    Open,
    Opened,
    ToCoordinator,
    ToMover,
)
from nixl_tiers.mover.supervisor import Supervisor
from tests.mover.harness import NAMESPACE
from tests.support.waiting import until

GEOMETRY = Geometry(1, 60_000)


class Recorder:
    """A handler that notes what it hears, and may be told to raise."""

    def __init__(self) -> None:
        self.heard: list[ToCoordinator] = []
        self.troubles: list[str] = []
        self.lines: list[tuple[int, str]] = []
        self.tiers: list[int] = []
        self.killed = self.lost = self.raises = 0
        self.nap_s = 0.0  # how long it takes over the next message
        self.send: list[tuple[int, ToMover]] = []

    def on_message(self, tier: int, message: ToCoordinator) -> None:
        self.heard.append(message)
        self.tiers.append(tier)
        nap_s, self.nap_s = self.nap_s, 0.0
        time.sleep(nap_s)
        if self.raises:
            self.raises -= 1
            raise ZeroDivisionError

    def on_table(self, tier: int, message: ListedIndex, table: SharedColdIndex) -> None:
        table.close()

    def on_trouble(self, tier: int, reason: str) -> None:
        self.troubles.append(reason)

    def on_line(self, tier: int, level: int, text: str) -> None:
        self.lines.append((level, text))

    def on_killed(self, tier: int) -> None:
        self.killed += 1

    def on_lost(self, tier: int) -> None:
        self.lost += 1

    def on_tick(
        self, heard_s: float, room: Sequence[int]
    ) -> tuple[Sequence[tuple[int, ToMover]], Mapping[int, str], bool]:
        send, self.send = self.send, []
        return send, {}, False

    def opened(self) -> int:
        return sum(isinstance(message, Opened) for message in self.heard)


@contextmanager
def supervised(
    tmp_path: Path, movers: int = 1, clock: Callable[[], float] | None = None
) -> Iterator[tuple[Supervisor, Recorder]]:
    region, recorder = HostRegion.create(GEOMETRY, 4), Recorder()
    tier: dict[str, object] = {"type": "tests.mover.toys:Quick", "closed": str(tmp_path / "closed")}
    hellos = [Configure(tier, 1, 60_000, 1, 4)] * movers
    names = [f"toy{number}" for number in range(movers)]
    supervisor = Supervisor(hellos, names, region.fd, recorder, clock or time.monotonic)
    supervisor.start(Open(NAMESPACE, 0))
    try:
        until(lambda: recorder.opened() == movers, "the movers", 60)
        yield supervisor, recorder
    finally:
        supervisor.close(10)
        region.close()


def test_a_message_that_cannot_be_applied_costs_the_mover_and_the_thread_goes_on(tmp_path: Path) -> None:
    with supervised(tmp_path) as (_, recorder):
        recorder.raises = 1
        until(lambda: recorder.opened() > 1, "another mover", 60)
        assert (recorder.killed, recorder.lost) == (1, 1)


def test_a_mover_that_does_not_read_is_killed_at_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "UNSENT_PACKETS", 10)
    with supervised(tmp_path) as (supervisor, recorder):
        pid = supervisor.pids[0]
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)

        def stuff() -> bool:
            recorder.send = [(0, Delete([(0, bytes(200))] * 200))] * 20
            supervisor.wake()
            return bool(recorder.lost)

        until(stuff, "its end", 60)
        assert recorder.killed == 1
        until(lambda: recorder.opened() > 1, "another mover", 60)


def test_a_mover_that_takes_nothing_is_killed_though_its_heart_beats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with supervised(tmp_path) as (supervisor, recorder):
        with monkeypatch.context() as patch:
            patch.setattr(child, "UNREAD_S", 0.5)
            patch.setattr(child.Child, "flush", lambda self: not self._unsent)
            recorder.send = [(0, Delete([(0, b"key")]))]
            supervisor.wake()
            until(lambda: recorder.lost, "its end", 60)
        until(lambda: recorder.opened() > 1, "another mover", 60)


def test_a_message_that_cannot_be_sent_costs_its_mover_and_no_other(tmp_path: Path) -> None:
    with supervised(tmp_path, movers=2) as (supervisor, recorder):
        pids = supervisor.pids
        too_long = Delete([(0, bytes(200))] * 20_000)
        for unsendable in (Delete([(0, object())]), too_long):  # type: ignore[list-item]
            lost = recorder.lost
            until(lambda: recorder.opened() == 2 + lost, "the next mover", 60)  # noqa: B023 - called in this turn only
            recorder.send = [(0, unsendable), (1, CheckExistence(lost, [b"key"], chain=True))]
            supervisor.wake()
            until(lambda: recorder.lost > lost, "the mover's end", 60)  # noqa: B023 - as above
            until(lambda: ExistenceChecked(lost, []) in recorder.heard, "the other's answer", 60)  # noqa: B023 - as above
        assert supervisor.pids[1] == pids[1]


def test_a_mover_that_cannot_be_reaped_is_not_replaced_and_not_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with supervised(tmp_path) as (supervisor, recorder):
        mover = supervisor._movers[0]
        assert mover is not None
        really = mover.process.kill
        monkeypatch.setattr(mover.process, "kill", lambda: None)  # as if it hung in the kernel
        recorder.raises = 1
        try:
            until(lambda: recorder.killed, "the kill", 60)
            heard = len(recorder.heard)
            turns = supervisor.turns
            until(lambda: supervisor.turns > turns + 3, "some turns", 60)
            assert len(recorder.heard) == heard
            assert recorder.lost == 0
            assert supervisor.pids == [mover.process.pid]
        finally:
            really()
        until(lambda: recorder.opened() > 1, "another mover", 60)
        assert recorder.lost == 1


class Jumping:
    """A clock that can be put forward, as after a pause of this process."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


def test_a_pause_of_the_engine_costs_no_mover(tmp_path: Path) -> None:
    jumping = Jumping()
    with supervised(tmp_path, clock=RunningClock(jumping)) as (supervisor, recorder):
        pids = supervisor.pids
        for _ in range(3):
            heard = len(recorder.heard)
            jumping.ahead_s += 3600.0
            until(lambda: len(recorder.heard) > heard + 1, "heartbeats", 60)  # noqa: B023 - called in this turn only
        assert (recorder.killed, recorder.lost) == (0, 0)
        assert supervisor.pids == pids


def test_what_a_mover_has_said_is_read_before_its_silence_is_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor is held up by one mover's message for longer than the other may be silent."""
    with supervised(tmp_path, movers=2) as (supervisor, recorder):
        pids = supervisor.pids
        monkeypatch.setattr(child, "SILENCE_S", 3 * HEARTBEAT_S)
        for _ in range(2):
            recorder.nap_s = 4 * HEARTBEAT_S
            until(lambda: not recorder.nap_s, "a message", 60)
            heard = len(recorder.heard)
            until(lambda: set(recorder.tiers[heard:]) == {0, 1}, "both movers", 60)  # noqa: B023 - as above
        assert recorder.killed == 0
        assert supervisor.pids == pids


def test_time_in_which_nobody_ran_counts_for_next_to_nothing() -> None:
    moments = [0.0, 1.0, 3601.0, 3602.0, 7200.0]
    clock = RunningClock(iter(moments).__next__)
    assert [clock() for _ in moments[1:]] == pytest.approx([1.0, 1.0 + COUNTED_S, 2.0 + COUNTED_S, 2.0 + 2 * COUNTED_S])


def test_a_mover_that_dies_at_its_start_shows_its_last_lines_and_no_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "0123456789abcdef")
    recorder = Recorder()
    with HostRegion.create(GEOMETRY, 4) as region:
        hello = Configure({"type": "tests.mover.toys:dying"}, 1, 60_000, 1, 4)
        supervisor = Supervisor([hello], ["toy"], region.fd, recorder, time.monotonic)
        before = len(list(Path("/proc/self/fd").iterdir()))
        supervisor.start(Open(NAMESPACE, 0))
        try:
            until(lambda: len(recorder.troubles) > 1, "two deaths", 120)
        finally:
            supervisor.close(10)
        assert len(list(Path("/proc/self/fd").iterdir())) < before
    reason = "its mover ended with 127; its last lines: lib.so: undefined symbol: foo, key ***"
    assert set(recorder.troubles) == {reason}
    assert (logging.DEBUG, "lib.so: undefined symbol: foo, key ***") in recorder.lines


def _hears_the_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a mover says is believed also after it was given up."""
    monkeypatch.setattr(Supervisor, "_deafen", lambda self, mover: None)
    monkeypatch.setattr(child.Child, "killed", False)


def _buries_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are free when their mover was killed, though it may still write to them."""
    honest = Supervisor._kill

    def kill(self: Supervisor, tier: int, mover: child.Child, why: str) -> None:
        honest(self, tier, mover, why)
        self._handler.on_lost(tier)

    monkeypatch.setattr(Supervisor, "_kill", kill)


@pytest.mark.slow
@pytest.mark.parametrize("plant", [_hears_the_dead, _buries_alive])
def test_planted_bugs_in_how_movers_end_are_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_mover_that_cannot_be_reaped_is_not_replaced_and_not_heard(tmp_path, monkeypatch)


def test_an_idle_supervisor_wakes_up_once_a_heartbeat(tmp_path: Path) -> None:
    def beats(recorder: Recorder) -> int:
        return sum(isinstance(message, Heartbeat) for message in recorder.heard)

    with supervised(tmp_path) as (supervisor, recorder):
        until(lambda: beats(recorder) >= 2, "it to settle", 60)
        began, turns = time.monotonic(), supervisor.turns
        before = len(recorder.heard)
        until(lambda: len(recorder.heard) >= before + 4, "four heartbeats", 60)
        # Every message wakes it, and its own clock does every second.
        elapsed_s = time.monotonic() - began
        assert supervisor.turns - turns <= len(recorder.heard) - before + elapsed_s + 3


def test_kills_are_bounded_by_the_hour_and_deaths_are_not() -> None:
    respawn, now = RestartBackoff(), 0.0
    for _ in range(3 * KILLS_AN_HOUR):
        now = respawn.died(now)
    assert now <= 60.0 * 3 * KILLS_AN_HOUR
    respawn, now, starts = RestartBackoff(), 0.0, []
    for _ in range(3 * KILLS_AN_HOUR):
        respawn.killed(now)
        now = respawn.died(now)
        starts.append(now)
    for first, last in zip(starts, starts[KILLS_AN_HOUR:], strict=False):
        assert last - first >= 3600.0 - 120.0
