"""The mover's loop and its end, round by round: heartbeats, back-pressure, what ends it, and what it does then.

No process, no thread: the coordinator is the other end of a socket pair, and time passes when the test says so.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import msgspec
import pytest

from nixl_tiers.base.chunk import MAX_KEY_BYTES, Geometry, Outcome
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover import loop as loop_module
from nixl_tiers.mover import process as process_module
from nixl_tiers.mover.loop import MAX_QUEUED, RETRY_S, Mover, run_loop, turn
from nixl_tiers.mover.protocol import (
    MAX_PACKET,
    MAX_TOUCHED,
    CheckExistence,
    Configure,
    Down,
    ExistenceChecked,
    Finished,
    Heartbeat,
    Listed,
    Load,
    Open,
    Opened,
    Refused,
    Slots,
    Stop,
    Store,
    ToCoordinator,
    ToMover,
    Touch,
    decode_to_coordinator,
    encode,
)
from nixl_tiers.tiers.base import MAX_ENTRIES, Entry, FinishedBatch, Move, TierDown, TierRefused
from tests.mover.stub_tiers import InstantTier, StubConfig
from tests.support.by_hand import HandPool
from tests.support.fake_movers import Clock
from tests.support.times import changed

GEOMETRY = Geometry(1, 4096)
TIMES = changed(heartbeat_s=0.8, watchdog_s=100.0, orphan_exit_s=4.0, stop_exit_s=50.0)
"""Not production's: a mover has the times of its Configure."""
HEARTBEAT_S = TIMES.heartbeat_s
NAMESPACE = bytes(range(16))
ENGINE_FD, SIGTERM_FD = 10_001, 10_002  # what else the loop watches; ready when the engine dies, and at SIGTERM


class Tier(InstantTier):
    """Its moves end when the test says so, and it opens as `opens` says."""

    def __init__(self, path: Path, region: HostRegion) -> None:
        super().__init__(StubConfig(type="stub", stub="InstantTier", closed=path), GEOMETRY, region)
        self.opens: Callable[[], int] = lambda: 100
        self.holds_back = False
        self.poll_raises: Exception | None = None
        self.gave_up = False

    def open(self, namespace: bytes, epoch: int) -> int:
        return self.opens()

    def poll(self) -> list[FinishedBatch]:
        if self.poll_raises is not None:
            raise self.poll_raises
        return [] if self.holds_back else super().poll()

    def give_up_waiting(self) -> None:
        self.gave_up = True


class Rig:
    def __init__(self, path: Path, region: HostRegion) -> None:
        self.closed = path
        self.tier = Tier(path, region)
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self.ours, self.theirs):
            end.setblocking(False)
        self.mover = Mover(self.tier, self.theirs, region, Configure({}, 1, 4096, 1, region.rows, times=TIMES))
        self.opener = HandPool()
        self.mover._opener = self.opener  # type: ignore[assignment]
        self.now = 100.0

    def send(self, *messages: ToMover | bytes) -> None:
        for message in messages:
            self.ours.send(message if isinstance(message, bytes) else encode(message))

    def turn(self, after_s: float = 0.0, *ready: int) -> bool | None:
        """As `run_loop` does it. `ready`: what else of the descriptors that it watches."""
        self.now += after_s
        found = [(fd, select.POLLIN) for fd in ready]
        if not self.mover.congested and not self.mover.stopping:
            events = select.poll()
            events.register(self.theirs, select.POLLIN)
            found += events.poll(0)
        return turn(self.mover, self.theirs, {ENGINE_FD, SIGTERM_FD}, found, self.now)

    def turns(self, count: int = 3, after_s: float = 0.001) -> None:
        for _ in range(count):
            assert self.turn(after_s) is None

    def received(self, *, heartbeats: bool = False) -> list[ToCoordinator]:
        messages: list[ToCoordinator] = []
        while True:
            try:
                packet = self.ours.recv(MAX_PACKET)
            except BlockingIOError:
                return messages
            if not packet:
                return messages
            message = decode_to_coordinator(packet)
            if heartbeats or not isinstance(message, Heartbeat):
                messages.append(message)

    def open(self) -> None:
        """It serves the namespace, and has listed all that it holds."""
        self.send(Open(NAMESPACE, 0))
        self.turns(1)
        self.opener.run()
        self.turns(6, 0.1)
        found = self.received()
        assert Opened(0, 100) in found
        assert isinstance(found[-1], Listed)
        assert found[-1].last

    def release(self) -> None:
        self.ours.close()
        self.theirs.close()


def moves(*rows: int) -> list[Move]:
    return [Move(row, row, b"key-%d" % row) for row in rows]


OK, FAILED = bytes([Outcome.OK]), bytes([Outcome.FAILED])


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with HostRegion.create(GEOMETRY, 8) as region:
        rig = Rig(tmp_path / "closed", region)
        yield rig
        rig.release()


def seconds(messages: Sequence[ToCoordinator]) -> list[ToCoordinator]:
    """Without how long they took."""
    return [msgspec.structs.replace(m, seconds=0.0) if isinstance(m, Finished) else m for m in messages]


class TestHeartbeats:
    @pytest.mark.parametrize("what", ["before it is opened", "while it opens", "idle", "busy"])
    def test_are_sent_at_their_interval(self, rig: Rig, what: str) -> None:
        if what in {"idle", "busy"}:
            rig.open()
        elif what == "while it opens":
            rig.send(Open(NAMESPACE, 0))
        if what == "busy":
            rig.tier.holds_back = True
            rig.send(Store(1, moves(0)))
        rig.turns()
        rig.received()
        for _ in range(5):
            rig.turn(HEARTBEAT_S)
            assert [type(message) for message in rig.received(heartbeats=True)] == [Heartbeat]
            rig.turn(0.9 * HEARTBEAT_S)
            assert rig.received(heartbeats=True) == []
            rig.now -= 0.9 * HEARTBEAT_S

    def test_are_not_waited_past(self, rig: Rig) -> None:
        rig.open()
        rig.turn(HEARTBEAT_S)
        assert rig.mover.wait_s(rig.now) <= HEARTBEAT_S
        rig.tier.holds_back, rig.tier.__class__.poll_s = True, 3600.0  # type: ignore[misc]
        try:
            rig.send(Store(1, moves(0)))
            rig.turn()
            assert rig.mover.busy
            assert rig.mover.poll_s(rig.now) <= HEARTBEAT_S
        finally:
            del rig.tier.__class__.poll_s


class TestOpening:
    def test_a_tier_that_hangs_in_it_holds_up_no_message(self, rig: Rig) -> None:
        rig.send(Open(NAMESPACE, 3), Store(1, moves(0, 1)), CheckExistence(2, [b"key"], chain=False))
        rig.turns()
        assert rig.received() == [Finished(1, 2 * FAILED, 0.0), ExistenceChecked(2, [])]
        assert len(rig.opener.submitted) == 1
        rig.opener.run()
        rig.turns()
        assert rig.received()[0] == Opened(3, 100)
        rig.send(Store(2, moves(0)))
        rig.turns()
        assert Finished(2, OK, 0.0) in seconds(rig.received())

    def test_one_that_is_down_is_tried_again_with_back_off(self, rig: Rig) -> None:
        def down() -> int:
            raise TierDown("the medium sleeps")

        rig.tier.opens = down
        rig.send(Open(NAMESPACE, 3))
        rig.turns(1)
        delay_s = RETRY_S[0]
        for _ in range(10):
            rig.opener.run()
            rig.turn()
            assert rig.received() == [Down("the medium sleeps", 3)]
            rig.turn(delay_s - 0.01)
            assert not rig.opener.submitted
            rig.turn(0.02)
            assert len(rig.opener.submitted) == 1
            delay_s = min(2 * delay_s, RETRY_S[1])
        rig.tier.opens = lambda: 7
        rig.opener.run()
        rig.turns()
        assert rig.received()[0] == Opened(3, 7)

    @pytest.mark.parametrize("good_before", [False, True])
    def test_a_refusal_ends_the_mover_unless_the_configuration_was_good_before(
        self, rig: Rig, good_before: bool
    ) -> None:
        why = "bucket: there is no such thing"

        def refuse() -> int:
            raise TierRefused(why)

        if good_before:
            rig.open()
        rig.tier.opens = refuse
        rig.send(Open(NAMESPACE, 1))
        rig.turns(1)
        rig.opener.run()
        assert rig.turn() is (None if good_before else True)
        assert rig.received() == [Down(why, 1) if good_before else Refused(why)]

    def test_it_waits_for_the_jobs_of_the_namespace_before(self, rig: Rig) -> None:
        rig.open()
        rig.tier.holds_back = True
        rig.send(Store(1, moves(0)), Open(bytes(16), 1), Store(2, moves(1)))
        rig.turns()
        assert not rig.opener.submitted
        rig.tier.holds_back = False
        rig.turns()
        assert seconds(rig.received()) == [Finished(1, OK, 0.0), Finished(2, FAILED, 0.0)]
        assert len(rig.opener.submitted) == 1


class TestTheMediumFails:
    def test_with_jobs_that_may_still_write_the_process_ends(self, rig: Rig) -> None:
        """Only that rules out that bytes land in rows which the core has given to others."""
        rig.open()
        rig.tier.holds_back = True
        rig.send(Load(1, moves(0)))
        rig.turn()
        rig.tier.poll_raises = TierDown("the disk is gone")
        with pytest.raises(TierDown):
            rig.turn()


class TestBackPressure:
    def test_a_coordinator_that_does_not_read_loses_no_result(self, rig: Rig) -> None:
        rig.open()
        sent = 0
        for _ in range(100_000):  # until the mover reads no more, and the socket is full
            try:
                rig.send(Load(sent + 1, moves(0)))
                sent += 1
            except BlockingIOError:
                if rig.mover.congested:
                    break
            rig.turn(0.001)
        assert rig.mover.congested
        assert len(rig.mover.send_queue) <= MAX_QUEUED + 1
        assert len(rig.mover._received) <= MAX_QUEUED
        results = seconds(rig.received())
        for _ in range(10 * sent):
            rig.turn(0.001)
            results += seconds(rig.received())
            if len(results) == sent:
                break
        assert results == [Finished(job, OK, 0.0) for job in range(1, sent + 1)]

    def test_nothing_more_is_read_behind_an_open_that_waits(self, rig: Rig) -> None:
        rig.open()
        rig.tier.holds_back = True
        rig.send(Store(1, moves(0)), Open(NAMESPACE, 1))
        rig.turn()
        for job in range(2 * MAX_QUEUED):
            try:
                rig.send(Load(2 + job, moves(0)))
            except BlockingIOError:
                break
            rig.turn()
        assert len(rig.mover._received) <= MAX_QUEUED


class TestWhatEndsTheLoop:
    def test_stop_ends_it_when_all_jobs_have_ended_and_all_results_are_sent(self, rig: Rig) -> None:
        rig.open()
        rig.tier.holds_back = True
        rig.send(Store(1, moves(0)), Stop())
        rig.turns(100, 0.1)
        rig.received()
        rig.tier.holds_back = False
        assert rig.turn() is None
        assert rig.turn() is True
        assert seconds(rig.received()) == [Finished(1, OK, 0.0)]

    @pytest.mark.parametrize("beside_loads", [False, True])
    @pytest.mark.parametrize("job", [Store(1, moves(0)), Load(1, moves(0))], ids=["store", "load"])
    def test_stop_waits_for_no_load_that_the_tier_may_be_closed_beside(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch, job: Store | Load, beside_loads: bool
    ) -> None:
        """It may take longer than the coordinator waits, and `close` gives back what others wait for."""
        monkeypatch.setattr(Tier, "closes_beside_loads", beside_loads)
        rig.open()
        rig.tier.holds_back = True
        rig.send(job, Stop())
        ends = [rig.turn(0.1) for _ in range(3)]
        assert (True in ends) == (beside_loads and isinstance(job, Load))

    @pytest.mark.parametrize("fd", [ENGINE_FD, SIGTERM_FD], ids=["the engine is dead", "SIGTERM"])
    def test_at_once_though_the_socket_is_open_and_jobs_run(self, rig: Rig, fd: int) -> None:
        """As where a forked child of the engine holds the other end."""
        rig.open()
        rig.tier.holds_back = True
        rig.send(Store(1, moves(0)))
        rig.turns()
        assert rig.turn(0.0, fd) is False

    def test_the_end_of_the_stream(self, rig: Rig) -> None:
        rig.open()
        rig.ours.close()
        assert rig.turn() is False

    @pytest.mark.parametrize(
        "packet",
        [b"\xc1", b"\x81\xa4type\xa6nobody", encode(Heartbeat(0)), encode(Store(1, []))[:-1]],
        ids=["no msgpack", "unknown", "of the other side", "cut off"],
    )
    def test_a_malformed_packet_is_an_error_that_ends_the_process(self, rig: Rig, packet: bytes) -> None:
        rig.open()
        rig.send(packet)
        with pytest.raises(msgspec.MsgspecError):
            rig.turn()


class Waits:
    """In place of the loop's `select.poll`: waiting is time that passes."""

    def __init__(self, rig: Rig, clock: Clock) -> None:
        self.rig, self.clock = rig, clock
        self.longest_s = 0.0
        self.count = 0
        self.most = 1 << 30
        self.interest = 0

    def modify(self, fd: int, interest: int) -> None:
        assert fd == self.rig.theirs.fileno()
        self.interest = interest

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        self.count += 1
        if self.count > self.most:
            return [(SIGTERM_FD, select.POLLIN)]
        self.longest_s = max(self.longest_s, timeout_ms / 1000)
        self.clock.now += timeout_ms / 1000
        events = select.poll()
        events.register(self.rig.theirs, self.interest)
        return events.poll(0)


class TestTheWatchdog:
    """A mover whose loop is stuck is ended, and no other one (the alarm: tests/system/mover/test_loop.py)."""

    @pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
    def test_is_armed_anew_in_the_interval_of_heartbeats(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch, busy: bool
    ) -> None:
        clock, armed, limits = Clock(100.0), list[float](), set[float]()

        def passes(seconds: float) -> None:
            clock.now += seconds

        def arm(limit_s: float) -> None:
            armed.append(clock.now)
            limits.add(limit_s)

        rig.open()
        rig.tier.holds_back = busy
        if busy:
            rig.send(Store(1, moves(0)))
        waits = Waits(rig, clock)
        waits.most = 20_000 if busy else 40
        monkeypatch.setattr(loop_module, "time", SimpleNamespace(monotonic=clock, sleep=passes))
        monkeypatch.setattr(loop_module, "rearm_watchdog", arm)
        assert not run_loop(rig.mover, rig.theirs, waits, {ENGINE_FD, SIGTERM_FD})  # type: ignore[arg-type]
        assert clock.now > 103.0
        assert armed[0] == 100.0
        assert (
            max(later - one for one, later in zip(armed, [*armed[1:], clock.now], strict=True)) < 2 * HEARTBEAT_S + 0.1
        )
        assert waits.longest_s <= HEARTBEAT_S + 0.1
        assert limits == {TIMES.watchdog_s}


class TestItsExit:
    """When the loop has ended; the process exits by `os._exit` after it."""

    @pytest.fixture
    def limits(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        """After how many seconds the kernel ends the process."""
        limits: list[float] = []
        monkeypatch.setattr(process_module, "limit_exit", limits.append)
        return limits

    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> Clock:
        clock = Clock()

        def passes(seconds: float) -> None:
            clock.now += seconds

        monkeypatch.setattr(process_module, "time", SimpleNamespace(monotonic=clock, sleep=passes))
        return clock

    def test_an_orphan_finishes_what_ends_soon_and_writes_what_is_pending(
        self, rig: Rig, limits: list[float], clock: Clock
    ) -> None:
        rig.open()
        rig.tier.holds_back = True
        rig.send(Store(1, moves(0)), Store(2, moves(1)))
        rig.turn()
        rig.ours.close()
        rig.tier.holds_back = False
        process_module._exit(rig.mover, orphaned=True)
        assert rig.tier.gave_up
        assert rig.closed.exists()
        assert limits == [TIMES.orphan_exit_s]

    def test_an_orphan_whose_transfers_do_not_end_exits_without_closing(
        self, rig: Rig, limits: list[float], clock: Clock
    ) -> None:
        """To close it could hang, and what is in flight may still be written."""
        rig.open()
        rig.tier.holds_back = True
        rig.send(Store(1, moves(0)))
        rig.turn()
        rig.ours.close()
        began_s = clock.now
        process_module._exit(rig.mover, orphaned=True)
        assert not rig.closed.exists()
        assert clock.now - began_s < TIMES.orphan_exit_s
        assert limits == [TIMES.orphan_exit_s]


class Exited(BaseException):
    """In place of the end of this process."""


@pytest.mark.parametrize(("error", "status"), [(None, 0), (ZeroDivisionError("a bug"), 1), (KeyboardInterrupt(), 1)])
def test_the_process_always_exits_and_an_error_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, error: BaseException | None, status: int
) -> None:
    monkeypatch.setattr(os, "_exit", mock.Mock(side_effect=Exited))
    monkeypatch.setattr(process_module.sys, "setswitchinterval", lambda _: None)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setattr(process_module, "marked", lambda _: None)
    monkeypatch.setattr(process_module, "_run", mock.Mock(side_effect=error))
    with pytest.raises(Exited):
        process_module.run(-1, -1, -1, -1)
    os._exit.assert_called_once_with(status)  # type: ignore[attr-defined]
    assert len(caplog.records) == (error is not None)
    thread = SimpleNamespace(name="journal")  # a tier whose thread has ended would wait for it for ever
    failed = SimpleNamespace(thread=thread, exc_type=ZeroDivisionError, exc_value=ZeroDivisionError())
    with pytest.raises(Exited):
        threading.excepthook(failed)  # type: ignore[arg-type]
    os._exit.assert_called_with(1)  # type: ignore[attr-defined]
    assert caplog.messages[-1] == "the thread journal failed: ZeroDivisionError"


def test_a_full_batch_of_entries_fits_a_packet() -> None:
    entries = [Entry(2**40, bytes(MAX_KEY_BYTES), 2**60)] * MAX_ENTRIES
    assert len(encode(Listed(2**60, entries, last=False))) <= MAX_PACKET
    assert len(encode(Touch([(2**32 - 1, 2**62)] * MAX_TOUCHED))) <= MAX_PACKET


def test_slots_that_a_tier_gains_or_loses_are_told_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when its file system has become full: rows are not placed where there is no room."""
    rig.open()
    for slots in (60, 80):
        monkeypatch.setattr(Tier, "slots", slots)
        rig.turns(4, HEARTBEAT_S)
        assert rig.received() == [Slots(0, slots)]
