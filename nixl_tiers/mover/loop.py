"""The mover's main loop, between the coordinator's socket and one storage tier.

The loop never waits for the medium: opening runs on a thread, transfers are polled, and messages that the socket does
not take yet are queued. So a missing heartbeat means that this process is stuck, and may be killed.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Container, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover.jobs import RunningJobs
from nixl_tiers.mover.listing import IndexPublisher
from nixl_tiers.mover.protocol import (
    MAX_DENIALS,
    MAX_KIND_CHARS,
    MAX_PACKET,
    CheckExistence,
    Configure,
    Delete,
    Down,
    ExistenceChecked,
    Finished,
    Heartbeat,
    Listed,
    Load,
    Open,
    Opened,
    Refused,
    SendQueue,
    Slots,
    Stop,
    Store,
    ToMover,
    Touch,
    decode_to_mover,
    sendable_text,
)
from nixl_tiers.tiers.base import MAX_ENTRIES, StorageTier, TierDown, TierRefused

POLL_S: Final = 0.0003  # at least, while transfers run; tighter burns a core and gains nothing, measured
OPEN_POLL_S: Final = 0.005  # while the tier opens
RETRY_S: Final = (0.5, 30.0)  # opening a tier that is down: first and longest delay
MAX_QUEUED: Final = 256  # with more messages unsent, or received and not begun, nothing is read from the socket


class Mover:
    """The state of the loop. `step` does everything that can be done without waiting."""

    def __init__(self, tier: StorageTier, end: socket.socket, region: HostRegion, configure: Configure) -> None:
        self.send_queue = SendQueue(end)
        self.stopping = False
        self._tier = tier
        self.times = configure.times
        self._received: deque[ToMover] = deque()
        self._jobs = RunningJobs(tier, region, self.send_queue.send)
        self._opener = ThreadPoolExecutor(1, thread_name_prefix="opener")
        self._opening: tuple[Open, Future[int]] | None = None
        self._retry: tuple[float, Open] | None = None  # when to try an open again that failed
        self._backoff_s = RETRY_S[0]
        self._accepted = False  # whether the tier ever accepted its configuration
        self._served: Open | None = None
        self._published_slots = 0
        self._up_at_s = 0.0
        self._publisher: IndexPublisher | None = None
        self._heartbeat_at_s = 0.0
        self._used_bytes = 0
        self._denials: dict[str, str] = {}
        self._staged = (False, False)
        self._gone_before = 0
        self._stuck = False

    def receive(self, message: ToMover) -> None:
        self._received.append(message)

    @property
    def congested(self) -> bool:
        """Back-pressure: whether no more messages should be read now, because the coordinator does not read ours, or
        an Open waits for jobs that do not end."""
        return len(self.send_queue) >= MAX_QUEUED or len(self._received) >= MAX_QUEUED

    @property
    def busy(self) -> bool:
        """Whether transfers run, so that `step` should be called every `poll_s`."""
        return bool(self._jobs) or (self._served is not None and self._tier.busy)

    @property
    def may_close(self) -> bool:
        """Whether what runs leaves the tier free to be closed."""
        return not (self._jobs.storing if self._tier.closes_beside_loads else self.busy)

    def poll_s(self, now: float) -> float:
        """If `busy`: how long to wait for a message before the next `step`, in seconds."""
        return max(POLL_S, min(self._tier.poll_s, self.wait_s(now)))

    def wait_s(self, now: float) -> float:
        """How long to wait for a message before the next `step`, in seconds, if not `busy`."""
        moments = [self._heartbeat_at_s, self._jobs.report_at_s]
        if self._opening is not None:
            moments.append(now + OPEN_POLL_S)
        if self._retry is not None:
            moments.append(self._retry[0])
        if self._publisher is not None:
            moments.append(self._publisher.next_at_s)
        return max(0.0, min(moments) - now)

    def step(self, now: float) -> None:
        self._finish_open(now)
        self._handle_messages(now)
        if self._served is not None:
            self._collect(now)
            self._publish_slots()
        if self._publisher is not None:
            self._publisher.step(now)
        if now >= self._heartbeat_at_s:
            self._heartbeat_at_s = now + self.times.heartbeat_s
            if not self.send_queue:  # a coordinator that does not read needs no more of them
                self._send_heartbeat()

    def abandon(self) -> None:
        """Nobody reads results any more: nothing is begun."""
        self.send_queue.close()
        self._received.clear()
        if self._served is not None:
            self._tier.give_up_waiting()

    def close(self) -> None:
        """Let the tier write its pending state."""
        if self._opening is not None:
            self._opening[1].exception()  # wait for it
        self._tier.close()

    def _send_heartbeat(self) -> None:
        if self._opening is None:  # while it opens, the tier belongs to that thread
            self._used_bytes = self._tier.used_bytes
            self._denials = _bounded(self._tier.denials)
            self._staged = self._tier.staged
            self._gone_before, self._stuck = self._tier.gone_before, self._tier.stuck
        listed = 0 if self._publisher is None else self._publisher.listed
        self.send_queue.send(
            Heartbeat(self._used_bytes, self._denials, listed, self._staged, self._gone_before, self._stuck)
        )

    # --- opening --------------------------------------------------------------------------------------------------

    def _handle_messages(self, now: float) -> None:
        """In order. Open and Stop wait until every job before them has ended; Stop not for loads that may be left."""
        if self._retry is not None and now >= self._retry[0] and self._opening is None:
            self._begin_open(self._retry[1])
        while self._received and len(self.send_queue) < MAX_QUEUED:
            message = self._received[0]
            waits = bool(self._jobs) and not (isinstance(message, Stop) and self.may_close)
            if isinstance(message, (Open, Stop)) and (waits or self._opening is not None):
                return
            self._received.popleft()
            if isinstance(message, Open):
                self._backoff_s = RETRY_S[0]
                self._begin_open(message)
            elif isinstance(message, Stop):
                self.stopping = True
                return
            elif isinstance(message, (Store, Load)):
                self._begin_job(message, now)
            elif isinstance(message, CheckExistence):
                if self._served is None or not self._tier.check_existence(
                    message.check_id, message.keys, message.chain
                ):
                    self.send_queue.send(ExistenceChecked(message.check_id, []))
            elif isinstance(message, Delete) and self._served is not None:
                self._tier.delete(message.entries)
            elif isinstance(message, Touch) and self._served is not None:
                slots, ticks = zip(*message.entries, strict=True)
                self._tier.touch(slots, ticks)

    def _begin_open(self, message: Open) -> None:
        self._retry = None
        self._stop_serving()
        self._opening = (message, self._opener.submit(self._tier.open, message.namespace, message.epoch))

    def _finish_open(self, now: float) -> None:
        if self._opening is None or not self._opening[1].done():
            return
        (message, future), self._opening = self._opening, None
        try:
            slots = future.result()
        except (TierDown, TierRefused) as error:
            if isinstance(error, TierRefused) and not self._accepted:
                self.send_queue.send(Refused(sendable_text(error)))
                self.stopping = True
                return
            # A configuration that was accepted once, or could not be checked at the start, may become valid again: a
            # bucket that was created again, a mount.
            self._report_down(message, error, now)
        else:
            self._accepted = True
            self._served = message
            self._up_at_s = now
            if not self._published_slots:
                # Modules and clients are there by now, and stay: going through them takes the garbage collector 40 ms
                # and more, in which no thread runs.
                gc.collect()
                gc.freeze()
            self._published_slots = slots
            self._send_heartbeat()
            self.send_queue.send(Opened(message.epoch, slots, self._tier.mount_point))
            self._publisher = IndexPublisher(self._tier, self.send_queue, message.epoch, self._send_heartbeat)

    def _stop_serving(self) -> None:
        self._served = None
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    def _report_down(self, message: Open, error: TierDown | TierRefused, now: float) -> None:
        self._accepted = True
        self._stop_serving()
        delay_s = min(self._backoff_s, error.retry_s) if isinstance(error, TierDown) else self._backoff_s
        self._retry = (now + delay_s, message)
        self._backoff_s = min(2 * self._backoff_s, RETRY_S[1])
        self.send_queue.send(Down(sendable_text(error), message.epoch))

    # --- rows -----------------------------------------------------------------------------------------------------

    def _publish_slots(self) -> None:
        slots = self._tier.slots
        if self._served is not None and slots is not None and slots != self._published_slots:
            self._published_slots = slots
            self.send_queue.send(Slots(self._served.epoch, slots))

    def _begin_job(self, message: Store | Load, now: float) -> None:
        if self._served is None:
            self.send_queue.send(Finished(message.job, bytes([Outcome.FAILED] * len(message.moves)), 0.0))
            return
        self._jobs.begin(message, now)

    def _collect(self, now: float) -> None:
        try:
            ended = self._tier.poll()
        except TierDown as error:
            if self._jobs:  # their rows may still be written to: only the end of this process rules that out
                raise
            assert self._served is not None
            if now - self._up_at_s > RETRY_S[1]:
                self._backoff_s = RETRY_S[0]
            self._report_down(self._served, error, now)
            return
        answers, found = self._tier.existence_answers(), self._tier.found()
        assert self._served is not None
        for start in range(0, len(found), MAX_ENTRIES):
            self.send_queue.send(Listed(self._served.epoch, list(found[start : start + MAX_ENTRIES]), last=False))
        self._jobs.report(ended, now)
        for answer in answers:
            self.send_queue.send(ExistenceChecked(answer.check_id, list(answer.absent)))


def _bounded(denials: Mapping[str, str]) -> dict[str, str]:
    """As much of it as a Heartbeat may hold."""
    some = itertools.islice(denials.items(), MAX_DENIALS)
    return {sendable_text(kind, MAX_KIND_CHARS): sendable_text(sentence) for kind, sentence in some}


def run_loop(mover: Mover, end: socket.socket, events: select.poll, ends: set[int]) -> bool:
    """Run until Stop (True), or until the coordinator is gone or one of the descriptors `ends` is readable (False)."""
    rearm_at_s, ready = 0.0, list[tuple[int, int]]()
    while True:
        now = time.monotonic()
        if now >= rearm_at_s:
            rearm_watchdog(mover.times.watchdog_s)
            rearm_at_s = now + mover.times.heartbeat_s
        if (stopped := turn(mover, end, ends, ready, now)) is not None:
            return stopped
        interest = (0 if mover.congested or mover.stopping else select.POLLIN) | (
            select.POLLOUT if mover.send_queue else 0
        )
        events.modify(end.fileno(), interest)
        if mover.busy:
            pause_s = mover.poll_s(now)
            if pause_s < 0.001:  # which `poll` cannot wait for
                time.sleep(pause_s)
                pause_s = 0.0
            ready = events.poll(int(1000 * pause_s))
        else:
            ready = events.poll(1000 * mover.wait_s(now) + 1)


def turn(
    mover: Mover, end: socket.socket, ends: Container[int], ready: Iterable[tuple[int, int]], now: float
) -> bool | None:
    """All that can be done without waiting. `ready`: descriptors and what they are ready for. Returns None to go on,
    else how `run_loop` ends."""
    for descriptor, event in ready:
        if descriptor in ends:
            return False
        if descriptor != end.fileno():
            continue  # the tier's: `step` asks it what has happened
        if event & select.POLLIN:
            if not _receive(mover, end):
                return False
        elif event & (select.POLLHUP | select.POLLERR):
            return False
    try:
        mover.step(now)
        if mover.stopping and not mover.send_queue:
            return True
        mover.send_queue.flush()
    except (BrokenPipeError, ConnectionResetError):
        return False
    return None


def _receive(mover: Mover, end: socket.socket) -> bool:
    """Read messages until there are no more or the mover is congested; False when the other end is closed."""
    while not mover.congested:
        try:
            packet = end.recv(MAX_PACKET)
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False
        if not packet:
            return False
        mover.receive(decode_to_mover(packet))
    return True


# --- the watchdog: the kernel ends a mover whose main loop is stuck ---------------------------------------------------

# When a call into NIXL does not return, and keeps the interpreter's lock, no thread of the mover can end it; and the
# coordinator that would kill it may be dead.

_libc = ctypes.CDLL(None)


def rearm_watchdog(timeout_s: float) -> None:
    """Have SIGALRM end this process after `timeout_s`, unless this is called again.

    The timer also runs while the process is stopped (SIGSTOP, a frozen cgroup, a suspended machine), and would end it
    as soon as it is continued. So the first alarm only sets another one: its handler is alarm(2) itself, called with
    the signal's number, 14, and thus good for 14 s. It is called once, then SIGALRM is deadly again.
    """
    _libc.sysv_signal(signal.SIGALRM, ctypes.cast(_libc.alarm, ctypes.c_void_p))
    signal.setitimer(signal.ITIMER_REAL, timeout_s)


def limit_exit(timeout_s: float) -> None:
    """Have SIGALRM end this process after `timeout_s`, at the latest."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
