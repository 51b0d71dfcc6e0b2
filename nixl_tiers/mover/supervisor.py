"""The engine's end of its movers: one supervisor thread that owns their sockets, their processes and their deaths.

NIXL has no cancel, so the only way to make a buffer certainly quiet is to kill the process that may still write to
it and to wait until it is reaped. Nothing here ever waits for a mover: sockets are non-blocking, processes are
watched through their pidfd, and a mover that cannot be reaped just stays lost to its tier.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import msgspec

from nixl_tiers.memory.cold_index import ColdIndexError, SharedColdIndex
from nixl_tiers.mover.backoff import RestartBackoff
from nixl_tiers.mover.child import Child
from nixl_tiers.mover.protocol import (
    HEARTBEAT_S,
    Configure,
    Down,
    ListedIndex,
    Open,
    Opened,
    Refused,
    Stop,
    ToCoordinator,
    ToMover,
)

log = logging.getLogger(__name__)

TICK_S: Final = 0.05  # how often deadlines are looked at while there is work
UNREAPED_S: Final = 5.0  # a killed process that is there for longer is stuck in the kernel
REAP_S: Final = 1.0  # how long `close` waits for those that it had to kill, at most


class Handler(Protocol):
    """Whom the supervisor works for. Called on the supervisor's thread; must not block."""

    def on_message(self, tier: int, message: ToCoordinator) -> None: ...

    def on_table(self, tier: int, message: ListedIndex, table: SharedColdIndex) -> None:
        """`table` is the handler's."""

    def on_trouble(self, tier: int, reason: str) -> None:
        """The tier has no mover that can serve, and why; comes again while that lasts."""

    def on_line(self, tier: int, level: int, text: str) -> None:
        """The tier's mover has logged something."""

    def on_killed(self, tier: int) -> None:
        """The tier's mover is being killed. It will not be heard again; its rows are not quiet yet."""

    def on_lost(self, tier: int) -> None:
        """The tier's mover is dead and reaped."""

    def on_tick(
        self, heard_s: float, room: Sequence[int]
    ) -> tuple[Sequence[tuple[int, ToMover]], Mapping[int, str], bool]:
        """What movers had said by `heard_s` has been told: later deadlines must not be judged yet. `room`: how many
        messages each mover takes now; one that is sent many more dies.

        Returns (what to send now, tiers whose movers must be killed and why, whether deadlines are running)."""


class Supervisor:
    """Keeps one mover alive for each storage tier and carries messages both ways.

    `reopen`, `wake` and `close` may be called from any thread; everything else happens on the supervisor's own. That
    thread ends with `close` and for no other reason: whatever goes wrong about a mover costs that mover.
    """

    def __init__(
        self,
        hellos: Sequence[Configure],
        names: Sequence[str],
        region_fd: int,
        handler: Handler,
        clock: Callable[[], float],
    ) -> None:
        """`clock`: the one by which the handler judges deadlines."""
        self._hellos = hellos
        self._names = names
        self._region_fd = region_fd
        self._handler = handler
        self._clock = clock
        self._open: Open | None = None
        self._reopen = False
        self._to_open: set[int] = set()  # tiers whose movers are still to be told of it
        self._movers: list[Child | None] = [None] * len(hellos)
        self._respawn = [RestartBackoff() for _ in hellos]
        self._accepted: set[int] = set()  # tiers whose configuration was ever judged to be possible
        self._refused: set[int] = set()  # these would refuse again
        self._spawn_at: dict[int, float] = {}
        self._told: set[str] = set()
        self._stopping = False
        self.turns = 0
        """How often the thread has woken up."""
        self._selector = selectors.DefaultSelector()
        self._wake_lock = threading.RLock()  # a garbage collection inside of it may close this very supervisor
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="nixl-tiers-supervisor", daemon=True)

    def start(self, message: Open) -> None:
        """Start every mover with this namespace."""
        self._open = message
        self._spawn_at = dict.fromkeys(range(len(self._hellos)), 0.0)
        self._thread.start()

    def reopen(self, message: Open) -> None:
        """Another namespace from now on, for movers that live and for those to come."""
        self._open = message
        self._reopen = True
        self.wake()

    def wake(self) -> None:
        """Have the handler's on_tick called soon."""
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def close(self, patience_s: float) -> bool:
        """Ask every mover to finish and leave; kill those that have not after `patience_s`. True if none was killed.

        A patience of 0 asks and returns: movers leave by themselves, and at the latest with this process.
        """
        if self._stopping:
            return True
        self._stopping = True
        if self._thread.ident is None:
            self._let_go()
            return True
        self.wake()
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            self._thread.join(patience_s)
        tidy = not self._thread.is_alive()
        if not tidy and patience_s:
            for mover in self._movers:
                if mover is not None:
                    mover.kill()
            self._thread.join(min(REAP_S, patience_s / 4))
        return tidy

    def leave_to_parent(self) -> None:
        """In a forked child: close our copies of the parent's descriptors, without a word to anybody behind them."""
        self._stopping = True
        self._wake_lock = threading.RLock()
        for mover in self._movers:
            if mover is not None:
                with contextlib.suppress(OSError):
                    mover.close()
        self._movers = [None] * len(self._hellos)
        with contextlib.suppress(OSError):
            self._let_go()

    @property
    def pids(self) -> list[int | None]:
        """Process ids of the living movers, by tier."""
        return [mover.process.pid if mover is not None else None for mover in self._movers]

    # --- the supervisor's thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        busy = True
        while not (self._stopping and not any(self._movers)):
            self.turns += 1
            try:
                self._wait(busy)
                now = self._clock()
                # Before anything is judged, for much may have come while this thread, or this process, did not run.
                for tier, mover in enumerate(self._movers):
                    if mover is not None:
                        self._receive(tier, mover)
                busy = self._step(now)
            except Exception as error:  # noqa: BLE001 (whatever it is: without this thread all tiers are lost)
                self._tell("the supervisor", error)
                busy = False
                time.sleep(TICK_S)  # what raised may be there again at once
        self._let_go()

    def _let_go(self) -> None:
        self._selector.close()
        with self._wake_lock:
            fd, self._wake_fd = self._wake_fd, -1
            if fd >= 0:
                os.close(fd)

    def _wait(self, busy: bool) -> None:
        now = self._clock()
        waits = [TICK_S] if busy else [HEARTBEAT_S]
        waits += [max(0.0, at - now) for at in self._spawn_at.values()]
        for key, _ in self._selector.select(min(waits)):
            if key.fd == self._wake_fd:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)

    def _step(self, now: float) -> bool:
        """All that movers had said by `now` has been heard."""
        for tier, at in list(self._spawn_at.items()):
            if at <= now:
                del self._spawn_at[tier]
                self._spawn(tier)
        # Before the handler plans: what it plans for the old namespace must not come after the new one's Open.
        if self._reopen:
            self._reopen = False
            self._to_open.update(range(len(self._movers)))
        for tier in list(self._to_open):
            mover = self._movers[tier]
            if mover is not None and mover.room and self._open is not None:
                self._to_open.remove(tier)
                self._send(tier, mover, self._open)
        room = [mover.room if mover is not None else 0 for mover in self._movers]
        messages, overdue, busy = self._handler.on_tick(now, room)
        for tier, message in messages:
            mover = self._movers[tier]
            if mover is not None:
                self._send(tier, mover, message)
        for tier, mover in enumerate(self._movers):
            if mover is not None:
                self._tend(tier, mover, overdue.get(tier), now)
        return busy

    def _tend(self, tier: int, mover: Child, why: str | None, now: float) -> None:
        """Kill it if it must be, else send it what it takes."""
        if mover.killed_s is not None:
            if now - mover.killed_s > UNREAPED_S:
                self._handler.on_trouble(tier, "its mover was killed and does not die")
            return
        if self._stopping and not mover.stopping and mover.room:
            self._send(tier, mover, Stop())
            mover.stopping = True
        try:
            everything = mover.flush()
        except OSError as error:
            self._kill(tier, mover, f"it cannot be spoken to ({error})")
            return
        if why is None and mover.silent(now):
            why = "it has been silent for too long"
        if why is None and mover.deaf(now):
            why = "it does not read"
        if why is not None:
            self._kill(tier, mover, why)
        elif not mover.ended:
            events = selectors.EVENT_READ if everything else selectors.EVENT_READ | selectors.EVENT_WRITE
            if self._selector.get_key(mover.socket).events != events:
                self._selector.modify(mover.socket, events)

    def _spawn(self, tier: int) -> None:
        if self._stopping or self._open is None:
            return
        try:
            mover = Child(self._hellos[tier], self._region_fd, self._clock)
        except OSError as error:
            self._handler.on_trouble(tier, f"its mover cannot be started: {error}")
            self._spawn_at[tier] = self._respawn[tier].died(self._clock())
            return
        self._to_open.discard(tier)
        mover.send(self._open)
        self._movers[tier] = mover
        self._selector.register(mover.socket, selectors.EVENT_READ)
        self._selector.register(mover.pidfd, selectors.EVENT_READ)
        self._selector.register(mover.stderr.fd, selectors.EVENT_READ)

    def _send(self, tier: int, mover: Child, message: ToMover) -> None:
        """Nothing is ever left out: a mover that cannot be told something dies."""
        try:
            mover.send(message)
        except Exception as error:  # noqa: BLE001 (whatever an encoder raises costs this mover, and no other)
            self._kill(tier, mover, f"it cannot be told everything ({error})")

    def _receive(self, tier: int, mover: Child) -> None:
        gone = mover.gone  # looked at first: what it said before it died counts
        self._relay(tier, mover)
        try:
            for message, table in mover.receive():
                if isinstance(message, (Opened, Down)):
                    self._accepted.add(tier)
                elif isinstance(message, Refused) and tier not in self._accepted:
                    self._refused.add(tier)
                if isinstance(message, ListedIndex) and table is not None:
                    self._handler.on_table(tier, message, table)
                else:
                    self._handler.on_message(tier, message)
        except (msgspec.DecodeError, UnicodeDecodeError, ColdIndexError) as error:
            self._kill(tier, mover, f"it sent nonsense ({error})")
        except Exception as error:  # noqa: BLE001 (a message that cannot be applied costs the mover, and no more)
            self._tell(f"a message of the {self._names[tier]} tier's mover", error)
            self._kill(tier, mover, "what it sent could not be applied")
        if mover.ended:
            self._deafen(mover)
        if gone:
            self._bury(tier, mover)

    def _kill(self, tier: int, mover: Child, why: str) -> None:
        if mover.killed:
            return
        self._handler.on_trouble(tier, f"its mover is killed: {why}")
        mover.kill()
        self._respawn[tier].killed(self._clock())
        self._deafen(mover)
        self._handler.on_killed(tier)

    def _relay(self, tier: int, mover: Child) -> None:
        """Hand on what it has written to its standard error."""
        for level, text in mover.stderr.read():
            self._handler.on_line(tier, level, text)
        if mover.stderr.ended and mover.stderr.fd in self._selector.get_map():
            self._selector.unregister(mover.stderr.fd)

    def _deafen(self, mover: Child) -> None:
        mover.ended = True
        if mover.socket in self._selector.get_map():
            self._selector.unregister(mover.socket)

    def _bury(self, tier: int, mover: Child) -> None:
        self._deafen(mover)
        self._selector.unregister(mover.pidfd)
        if mover.stderr.fd in self._selector.get_map():  # somebody that it has started holds the other end
            self._selector.unregister(mover.stderr.fd)
        mover.close()
        self._movers[tier] = None
        if not self._stopping and tier not in self._refused:
            if not mover.killed:
                last = "; its last lines: " + " | ".join(mover.stderr.last) if mover.stderr.last else ""
                self._handler.on_trouble(tier, f"its mover ended with {mover.process.returncode}{last}")
            self._spawn_at[tier] = self._respawn[tier].died(self._clock())
        self._handler.on_lost(tier)

    def _tell(self, where: str, error: Exception) -> None:
        """Once for each place and kind of error."""
        line = f"nixl_tiers: {where}: {type(error).__name__}"
        if line not in self._told:
            self._told.add(line)
            log.error("%s", line, exc_info=error)
