"""The supervisor: whatever a mover does, only that mover is killed and restarted."""

from __future__ import annotations

import logging
import os
import select
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover.handler import Turn
from nixl_tiers.mover.protocol import (
    Configure,
    Heartbeat,
    Open,
    Opened,
)
from nixl_tiers.mover.supervisor import IDLE_S, Supervisor
from tests.mover.harness import NAMESPACE
from tests.mover.test_supervisor_stepped import Handler
from tests.support.waiting import until

GEOMETRY = Geometry(1, 60_000)


class Recorder(Handler):
    def __init__(self) -> None:
        super().__init__()
        self.turns: list[Turn] = []  # what the next ones return
        self.ticks = 0

    def on_tick(self, received_s: float, send_credits: Sequence[int]) -> Turn:
        self.ticks += 1
        return self.turns.pop(0) if self.turns else Turn([], {}, IDLE_S)


@contextmanager
def supervised(tmp_path: Path) -> Iterator[tuple[Supervisor, Recorder]]:
    region, recorder = HostRegion.create(GEOMETRY, 4), Recorder()
    tier: dict[str, object] = {
        "type": "tests.mover.stub_tiers:StubConfig",
        "stub": "InstantTier",
        "closed": str(tmp_path / "closed"),
    }
    supervisor = Supervisor([Configure(tier, 1, 60_000, 1, 4)], ["tier"], region.fd, recorder, time.monotonic)
    supervisor.start(Open(NAMESPACE, 0))
    try:
        until(lambda: any(isinstance(message, Opened) for _, message in recorder.received), "the movers", 60)
        yield supervisor, recorder
    finally:
        supervisor.close(10)
        region.close()


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
    assert set(recorder.problems) == {(0, reason)}
    assert (0, logging.DEBUG, "lib.so: undefined symbol: foo, key ***") in recorder.lines


def test_mover_is_in_the_engines_session_and_not_in_its_process_group(tmp_path: Path) -> None:
    """Ctrl-C is not for it, and the nice values of its threads count beside the engine's (sched_autogroup)."""
    with supervised(tmp_path) as (supervisor, _):
        (pid,) = supervisor.pids
        assert pid is not None
        assert os.getsid(pid) == os.getsid(0)
        assert os.getpgid(pid) == pid


def test_an_idle_supervisor_wakes_up_once_a_heartbeat(tmp_path: Path) -> None:
    def heartbeats(recorder: Recorder) -> int:
        return sum(isinstance(message, Heartbeat) for _, message in recorder.received)

    with supervised(tmp_path) as (supervisor, recorder):
        until(lambda: heartbeats(recorder) >= 2, "it to settle", 60)
        began, turns = time.monotonic(), supervisor.turns
        before = len(recorder.received)
        until(lambda: len(recorder.received) >= before + 4, "four heartbeats", 60)
        # Every message wakes it, and its own timeout does every second.
        elapsed_s = time.monotonic() - began
        assert supervisor.turns - turns <= len(recorder.received) - before + elapsed_s + 3


FOREVER_S = 1e6


def test_a_pause_is_ended_by_a_wake_and_by_nothing_else() -> None:
    recorder = Recorder()
    recorder.turns = [Turn([], {}, 0.0, pause_s=FOREVER_S)]
    supervisor = Supervisor([], [], -1, recorder, time.monotonic)
    report = os.eventfd(1)  # it could be read all of the time
    supervisor._epoll.register(report, select.EPOLLIN)
    supervisor.start(Open(NAMESPACE, 0))
    try:
        until(lambda: supervisor._pausing, "the pause", 60)
        supervisor.wake_soon()
        with pytest.raises(BlockingIOError):
            os.eventfd_read(supervisor._wake_fd)
        assert recorder.ticks == 1
        supervisor.wake()
        until(lambda: recorder.ticks > 1, "the next turn", 60)
    finally:
        supervisor.close(10)
        os.close(report)
