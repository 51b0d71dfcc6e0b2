"""The supervisor of the movers: one thread that owns their sockets and processes, and restarts them.

NIXL has no cancel, so the only way to be certain that nothing writes to a buffer any more is to kill the process that
may, and to wait until it is reaped and its memory is gone (memory/address_space.py). This thread never blocks on a
mover: sockets are non-blocking, processes are watched through their pidfd, and a tier whose mover cannot be reaped
stays without one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Final

import msgspec

from nixl_tiers.memory.columns import ColumnsError
from nixl_tiers.mover import protocol
from nixl_tiers.mover.child import Child
from nixl_tiers.mover.handler import Handler
from nixl_tiers.mover.protocol import (
    Configure,
    Down,
    Open,
    Opened,
    Refused,
    Stop,
    ToMover,
)
from nixl_tiers.mover.restarts import RestartBackoff

log = logging.getLogger(__name__)

TICK_S: Final = 0.05  # how often deadlines are checked while there is work
IDLE_S: Final = 1.0  # and while there is none
UNREAPED_S: Final = 5.0  # a killed process that is still there after this is stuck in the kernel
REAP_TIMEOUT_S: Final = 1.0  # how long `close` waits for movers that it had to kill, at most


class Supervisor:
    """Keeps one mover alive for each storage tier and carries messages both ways.

    `reopen`, `wake`, `wake_soon` and `close` may be called from any thread; everything else happens on the supervisor's
    own. That thread ends with `close` and for no other reason: an error about a mover ends that mover only, any other
    error ends all of them, since it is unknown what they have not been sent. New ones are started as after any death.
    """

    def __init__(
        self,
        configures: Sequence[Configure],
        names: Sequence[str],
        region_fd: int,
        handler: Handler,
        clock: Callable[[], float],
    ) -> None:
        """`configures`, `names`: one per tier. `clock`: the one by which the handler judges deadlines."""
        self._configures = [*configures]
        self._names = names
        self._region_fd = region_fd
        self._handler = handler
        self._clock = clock
        self._open: Open | None = None
        self._reopen = False
        self._to_open: set[int] = set()  # tiers whose movers have not been sent it yet
        self._movers: list[Child | None] = [None] * len(configures)
        self._backoff = [RestartBackoff(each.times.restart_backoff_s) for each in configures]
        self._accepted: set[int] = set()  # tiers that ever accepted their configuration
        self._refused: set[int] = set()  # not started again
        self._spawn_at: dict[int, float] = {}
        self._reports: deque[Callable[[], None]] = deque()  # calls of the handler that it has not applied yet
        self._logged: set[str] = set()
        self._stopping = False
        self.turns = 0
        """How often the thread has woken up."""
        self._epoll = select.epoll()
        self._wake_lock = threading.RLock()  # a garbage collection while it is held may close this very supervisor
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._wakes = select.poll()  # of all that is watched, what ends a pause
        self._wakes.register(self._wake_fd, select.POLLIN)
        self._pausing = False
        self._turn_wanted = False  # since the last one
        self._thread = threading.Thread(target=self._run, name="nixl-tiers-supervisor", daemon=True)

    def start(self, message: Open) -> None:
        """Start every mover with this namespace."""
        self._open = message
        self._spawn_at = dict.fromkeys(range(len(self._configures)), 0.0)
        self._thread.start()

    def reopen(self, message: Open) -> None:
        """Serve this namespace from now on, in running movers and in those to come."""
        self._open = message
        self._reopen = True
        self.wake()

    def wake(self) -> None:
        """Have the handler's on_tick called soon."""
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def wake_soon(self) -> None:
        """The same, after the pause if the handler has asked for one."""
        self._turn_wanted = True  # before the next line: the pause may be over by now
        if not self._pausing:
            self.wake()

    def close(self, timeout_s: float) -> bool:
        """Stop every mover; kill those that have not exited after `timeout_s`. True if none was killed.

        With a timeout of 0, returns at once: movers exit by themselves, and at the latest with this process.
        """
        if self._stopping:
            return True
        self._stopping = True
        if self._thread.ident is None:
            self._release()
            return True
        self.wake()
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            self._thread.join(timeout_s)
        stopped = not self._thread.is_alive()
        if not stopped and timeout_s:
            for mover in self._movers:
                if mover is not None:
                    mover.kill()
            self._thread.join(min(REAP_TIMEOUT_S, timeout_s / 4))
        return stopped

    def leave_to_parent(self) -> None:
        """In a forked child: close this process's copies of the parent's descriptors, and send nothing."""
        self._stopping = True
        self._wake_lock = threading.RLock()
        for mover in self._movers:
            if mover is not None:
                with contextlib.suppress(OSError):
                    mover.close()
        self._movers = [None] * len(self._configures)
        with contextlib.suppress(OSError):
            self._release()

    def expect_mount(self, tier: int, mount_point: bytes) -> None:
        """The tier's next movers accept its medium only on this mount point. On the supervisor's thread."""
        self._configures[tier] = msgspec.structs.replace(self._configures[tier], mount_point=mount_point)

    @property
    def pids(self) -> list[int | None]:
        """Process ids of the living movers, by tier."""
        return [mover.process.pid if mover is not None else None for mover in self._movers]

    # --- the supervisor's thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        wait_s = pause_s = 0.0
        while not self.ended:
            wait_s, pause_s = self.step(wait_s, pause_s)
        self._release()

    @property
    def ended(self) -> bool:
        """Whether it was closed, and every mover is reaped."""
        return self._stopping and not any(self._movers)

    def step(self, wait_s: float = 0.0, pause_s: float = 0.0) -> tuple[float, float]:
        """One turn, for which it waits so long. Returns for how long the next one may (`Turn`)."""
        self.turns += 1
        try:
            if pause_s > 0 and self._pause(pause_s):
                wait_s = 0.0
            # Deadlines are judged by the time before the wait: all messages that movers had sent by then are
            # received first, however long this thread, or this process, did not run.
            now, ready = self._wait(wait_s)
            self._report()
            for tier, mover in enumerate(self._movers):
                if mover is not None and (mover.lingers or not ready.isdisjoint(mover.fds)):
                    self._receive(tier, mover, ready)
            return self._plan(now)
        except Exception as error:  # noqa: BLE001 (whatever it is: without this thread all tiers are lost)
            self._log_once("the supervisor", error)
            for tier, mover in enumerate(self._movers):
                if mover is not None:
                    self._end(tier, mover, f"the supervisor failed ({type(error).__name__})")
            return 0.0, TICK_S  # it may be raised again at once

    def _release(self) -> None:
        self._epoll.close()
        with self._wake_lock:
            fd, self._wake_fd = self._wake_fd, -1
            if fd >= 0:
                os.close(fd)

    def _pause(self, pause_s: float) -> bool:
        """Let reports of movers gather, so that one turn handles all of them: each turn takes the interpreter's lock
        from the engine's step. Ends at a `wake`; whether there was a `wake_soon`."""
        self._pausing = True
        self._wakes.poll(1e3 * pause_s)
        self._pausing = False
        return self._turn_wanted

    def _wait(self, wait_s: float) -> tuple[float, set[int]]:
        """Wait until something has happened; returns the time before that, and the descriptors that are ready."""
        now = self._clock()
        if self._spawn_at:
            wait_s = max(0.0, min(wait_s, min(self._spawn_at.values()) - now))
        ready = {fd for fd, _ in self._epoll.poll(wait_s)}
        if self._wake_fd in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
        return now, ready

    def _plan(self, now: float) -> tuple[float, float]:
        """Messages that movers had sent by `now` have been handled. Returns for how long to wait, and to pause."""
        for tier, at in list(self._spawn_at.items()):
            if at <= now:
                del self._spawn_at[tier]
                self._spawn(tier)
        # Before the handler plans: its messages for the old namespace must not follow the Open of the new one.
        if self._reopen:
            self._reopen = False
            self._to_open.update(range(len(self._movers)))
        for tier in list(self._to_open):
            mover = self._movers[tier]
            if mover is not None and mover.send_credits and self._open is not None:
                self._to_open.remove(tier)
                self._send(tier, mover, self._open)
        send_credits = [mover.send_credits if mover is not None else 0 for mover in self._movers]
        self._turn_wanted = False
        turn = self._handler.on_tick(now, send_credits)
        for tier, message in turn.messages:
            mover = self._movers[tier]
            if mover is not None:
                self._send(tier, mover, message)
        for tier, mover in enumerate(self._movers):
            if mover is not None:
                self._flush_or_kill(tier, mover, turn.overdue.get(tier), now)
        return turn.wait_s, turn.pause_s

    def _flush_or_kill(self, tier: int, mover: Child, why: str | None, now: float) -> None:
        """Kill it if it must be killed (`why`, or a timeout), else send what its socket takes."""
        if mover.killed_s is not None:
            if now - mover.killed_s > UNREAPED_S:
                self._handler.on_problem(tier, "its mover was killed and has not exited")
            return
        if self._stopping and not mover.stopping and mover.send_credits:
            self._send(tier, mover, Stop())
            mover.stopping = True
        try:
            sent_all = mover.flush()
        except OSError as error:
            self._kill(tier, mover, f"its socket failed ({error})")
            return
        if why is None and mover.hung_up(now):
            why = "it has closed its socket"
        if why is None and mover.heartbeat_timed_out(now):
            why = "heartbeat timeout" if mover.started else "it did not start in time"
        if why is None and mover.send_timed_out(now):
            why = "it does not read its messages"
        if why is not None:
            self._kill(tier, mover, why)
        elif not mover.eof and sent_all is mover.congested:
            mover.congested = not sent_all
            self._epoll.modify(mover.socket, select.EPOLLIN if sent_all else select.EPOLLIN | select.EPOLLOUT)

    def _spawn(self, tier: int) -> None:
        if self._stopping or self._open is None:
            return
        try:
            mover = Child(self._names[tier], self._configures[tier], self._region_fd, self._clock)
        except Exception as error:  # noqa: BLE001 (whatever it is: the tier must not stay without a mover for ever)
            self._spawn_at[tier] = self._backoff[tier].died(self._clock())
            self._handler.on_problem(tier, f"its mover cannot be started: {error}")
            return
        self._to_open.discard(tier)
        mover.send(self._open)
        self._movers[tier] = mover
        for fd in mover.fds:
            self._epoll.register(fd, select.EPOLLIN)

    def _send(self, tier: int, mover: Child, message: ToMover | bytes) -> None:
        """No message may be left out: a mover that cannot be sent one is killed."""
        try:
            mover.send(message)
        except Exception as error:  # noqa: BLE001 (whatever an encoder raises ends this mover, and no other)
            self._kill(tier, mover, f"a message cannot be sent to it ({error})")

    def _receive(self, tier: int, mover: Child, ready: AbstractSet[int]) -> None:
        # Checked first: what it has sent and written before it exited counts.
        exited = (mover.lingers or mover.pidfd in ready) and mover.exited
        try:
            if exited or mover.stderr.fd in ready:
                self._relay_log(tier, mover)
            for message, columns in mover.receive():
                if isinstance(message, (Opened, Down)):
                    self._accepted.add(tier)
                elif isinstance(message, Refused) and tier not in self._accepted:
                    self._refused.add(tier)
                if isinstance(message, protocol.ListedColumns) and columns is not None:
                    self._handler.on_columns(tier, message.epoch, columns)
                else:
                    self._handler.on_message(tier, message)
        except (msgspec.DecodeError, UnicodeDecodeError, ColumnsError) as error:
            self._kill(tier, mover, f"it sent an invalid message ({error})")
        except Exception as error:  # noqa: BLE001 (a message that cannot be applied ends this mover, and no other)
            self._log_once(f"a message of the {self._names[tier]} tier's mover", error)
            self._kill(tier, mover, "its message could not be applied")
        if mover.eof:
            self._stop_reading(mover)
        if exited:
            self._reap(tier, mover)
        elif mover.lingers:
            self._unwatch(mover.pidfd)

    def _kill(self, tier: int, mover: Child, why: str) -> None:
        self._end(tier, mover, why)
        self._report()

    def _end(self, tier: int, mover: Child, why: str) -> None:
        """Kill it; the handler is told by `_report`."""
        if mover.killed:
            return
        mover.kill()
        self._backoff[tier].killed(self._clock())
        self._stop_reading(mover)
        self._reports += (
            partial(self._handler.on_problem, tier, f"its mover is killed: {why}"),
            partial(self._handler.on_killed, tier),
        )

    def _report(self) -> None:
        """Have the handler apply what has happened to movers. What raises is tried again at the next turn, before any
        other mover is started: its rows would stay pinned for ever."""
        while self._reports:
            self._reports[0]()
            self._reports.popleft()

    def _relay_log(self, tier: int, mover: Child) -> None:
        """Pass on the lines that it has written to its standard error."""
        for level, text in mover.stderr.read():
            self._handler.on_log_line(tier, level, text)
        if mover.stderr.eof:
            self._unwatch(mover.stderr.fd)

    def _stop_reading(self, mover: Child) -> None:
        mover.eof = True
        self._unwatch(mover.socket.fileno())

    def _unwatch(self, fd: int) -> None:
        with contextlib.suppress(FileNotFoundError):  # as when that was done before
            self._epoll.unregister(fd)

    def _reap(self, tier: int, mover: Child) -> None:
        self._movers[tier] = None
        if not self._stopping and tier not in self._refused:
            if not mover.killed:
                last = "; its last lines: " + " | ".join(mover.stderr.last) if mover.stderr.last else ""
                why = f"its mover ended with {mover.process.returncode}{last}"
                self._reports.append(partial(self._handler.on_problem, tier, why))
            self._spawn_at[tier] = self._backoff[tier].died(self._clock())
        self._reports.append(partial(self._handler.on_reaped, tier))
        self._stop_reading(mover)
        self._unwatch(mover.pidfd)
        self._unwatch(mover.stderr.fd)  # a process that it has started may hold the other end
        mover.close()
        self._report()

    def _log_once(self, where: str, error: Exception) -> None:
        """One line for each place and type of error."""
        line = f"nixl_tiers: {where}: {type(error).__name__}"
        if line not in self._logged:
            self._logged.add(line)
            log.error("%s", line, exc_info=error)
