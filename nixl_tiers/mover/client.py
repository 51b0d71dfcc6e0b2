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
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec

from nixl_tiers.memory.table import Table, TableError
from nixl_tiers.mover.messages import (
    HEARTBEAT_S,
    MAX_PACKET,
    AdoptTable,
    Down,
    Hello,
    Open,
    Opened,
    Refused,
    Stop,
    ToEngine,
    ToMover,
    decode_to_engine,
    encode,
)

log = logging.getLogger(__name__)

TICK_S: Final = 0.05  # how often deadlines are looked at while there is work
START_S: Final = 60.0  # a mover that imports, maps and opens for longer than this is hung
SILENCE_S: Final = 20 * HEARTBEAT_S
RESPAWN_S: Final = (0.05, 1.0, 5.0, 15.0, 60.0)  # by deaths within the last ten minutes
SOCKET_BYTES: Final = 1 << 20


class Handler(Protocol):
    """Whom the supervisor works for. Called on the supervisor's thread; must not block."""

    def on_message(self, tier: int, message: ToEngine) -> None: ...

    def on_table(self, tier: int, message: AdoptTable, table: Table) -> None:
        """`table` is the handler's."""

    def on_lost(self, tier: int) -> None:
        """The tier's mover is dead and reaped."""

    def on_tick(self) -> tuple[list[tuple[int, ToMover]], Sequence[int], bool]:
        """(what to send now, tiers whose movers must be killed, whether deadlines are running)."""


class _Mover:
    """One mover process and our end of its socket."""

    def __init__(self, hello: Hello, region_fd: int) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
            ours.setblocking(False)
            package_root = str(Path(__file__).parents[2])
            path = os.environ.get("PYTHONPATH")
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "nixl_tiers.mover"),
                    *("--socket", str(theirs.fileno())),
                    *("--region", str(region_fd)),
                    *("--parent", str(os.getpid())),
                ],
                pass_fds=(theirs.fileno(), region_fd),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # NIXL logs there; what matters goes to stderr
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": f"{path}:{package_root}" if path else package_root},
            )
        self.socket = ours
        self.pidfd = os.pidfd_open(self.process.pid)
        self.outgoing: deque[bytes] = deque([encode(hello)])
        self.heard_s = time.monotonic()
        self.talked = False
        self.killed = False
        self.ended = False

    def silent(self, now: float) -> bool:
        return now - self.heard_s > (SILENCE_S if self.talked else START_S)

    def flush(self) -> bool:
        """Send what the socket takes; True when nothing is left."""
        while self.outgoing:
            try:
                self.socket.send(self.outgoing[0])
            except BlockingIOError:
                return False
            except OSError:  # the mover is gone; its pidfd tells
                self.outgoing.clear()
                return True
            self.outgoing.popleft()
        return True

    def receive(self) -> Iterable[tuple[ToEngine, Table | None]]:
        """Every message that has come, and the table that came with it; sets `ended` when there will be no more."""
        while not self.ended:
            try:
                packet, fds, _, _ = socket.recv_fds(self.socket, MAX_PACKET, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError:
                packet, fds = b"", []
            if not packet:
                self.ended = True
                return
            self.heard_s = time.monotonic()
            self.talked = True
            try:
                yield _read(packet, fds)
            except (msgspec.DecodeError, msgspec.ValidationError, TableError) as error:
                log.warning("nixl_tiers: killing a mover that sent nonsense (%s)", error)
                self.kill()
                return

    def kill(self) -> None:
        self.killed = True
        self.process.kill()

    def close(self) -> None:
        self.socket.close()
        os.close(self.pidfd)


def _read(packet: bytes, fds: list[int]) -> tuple[ToEngine, Table | None]:
    """The message, and its table. All descriptors are closed, whatever happens. Raises TableError."""
    try:
        message = decode_to_engine(packet)
        if not isinstance(message, AdoptTable):
            return message, None
        if not fds:
            raise TableError("a table was told of, and no descriptor came with it")
        return message, Table.attach(fds.pop())
    finally:
        for fd in fds:
            os.close(fd)


class Supervisor:
    """Keeps one mover alive for each storage tier and carries messages both ways.

    `send`, `open` and `close` may be called from any thread; everything else happens on the supervisor's own.
    """

    def __init__(self, hellos: Sequence[Hello], names: Sequence[str], region_fd: int, handler: Handler) -> None:
        self._hellos = hellos
        self._names = names
        self._region_fd = region_fd
        self._handler = handler
        self._open: Open | None = None
        self._inbox: deque[tuple[int, ToMover]] = deque()
        self._movers: list[_Mover | None] = [None] * len(hellos)
        self._deaths: list[deque[float]] = [deque(maxlen=len(RESPAWN_S)) for _ in hellos]
        self._accepted: set[int] = set()  # tiers whose configuration was ever judged to be possible
        self._refused: set[int] = set()  # these would refuse again
        self._spawn_at: dict[int, float] = {}
        self._stopping = False
        self._selector = selectors.DefaultSelector()
        self._wake_lock = threading.RLock()  # a garbage collection inside of it may close this very supervisor
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake_fd, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="nixl-tiers-supervisor", daemon=True)

    def start(self, message: Open) -> None:
        """Start every mover with this namespace."""
        self._open = message
        self._spawn_at = dict.fromkeys(range(len(self._hellos)), 0.0)
        self._thread.start()

    def send(self, tier: int, message: ToMover) -> None:
        """Queue one message, in order. To a tier without a mover it is lost, as it would be in a dying one."""
        self._inbox.append((tier, message))
        self.wake()

    def reopen(self, message: Open) -> None:
        """Another namespace from now on, for movers that live and for those to come."""
        self._open = message
        for tier in range(len(self._hellos)):
            self.send(tier, message)

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
        for tier in range(len(self._hellos)):
            self.send(tier, Stop())
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            self._thread.join(patience_s)
        tidy = not self._thread.is_alive()
        if not tidy and patience_s:
            for mover in self._movers:
                if mover is not None:
                    mover.kill()
            self._thread.join(min(1.0, patience_s / 2))
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
        while not self._done():
            now = time.monotonic()
            waits = [TICK_S] if busy else [HEARTBEAT_S]
            waits += [max(0.0, at - now) for at in self._spawn_at.values()]
            for key, _ in self._selector.select(min(waits)):
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake_fd)
                else:
                    self._receive(*key.data)
            busy = self._step()
        self._let_go()

    def _let_go(self) -> None:
        self._selector.close()
        with self._wake_lock:
            fd, self._wake_fd = self._wake_fd, -1
            if fd >= 0:
                os.close(fd)

    def _done(self) -> bool:
        return self._stopping and not any(self._movers) and not self._inbox

    def _step(self) -> bool:
        now = time.monotonic()
        for tier, at in list(self._spawn_at.items()):
            if at <= now:
                del self._spawn_at[tier]
                self._spawn(tier)
        messages, overdue, busy = self._handler.on_tick()
        while self._inbox:
            self._queue(*self._inbox.popleft())
        for tier, message in messages:
            self._queue(tier, message)
        for tier, mover in enumerate(self._movers):
            if mover is None:
                continue
            late = tier in overdue
            if not mover.killed and (late or mover.silent(now)):
                why = "a job is overdue" if late else "it has been silent for too long"
                log.warning("nixl_tiers: killing the %s tier's mover: %s", self._names[tier], why)
                mover.kill()
            events = selectors.EVENT_READ if mover.flush() else selectors.EVENT_READ | selectors.EVENT_WRITE
            if not mover.ended and self._selector.get_key(mover.socket).events != events:
                self._selector.modify(mover.socket, events, (tier, mover))
        return busy

    def _queue(self, tier: int, message: ToMover) -> None:
        mover = self._movers[tier]
        if mover is not None:
            mover.outgoing.append(encode(message))

    def _spawn(self, tier: int) -> None:
        if self._stopping or self._open is None:
            return
        try:
            mover = _Mover(self._hellos[tier], self._region_fd)
        except OSError as error:
            log.warning("nixl_tiers: cannot start a mover for the %s tier: %s", self._names[tier], error)
            self._respawn_later(tier)
            return
        mover.outgoing.append(encode(self._open))
        self._movers[tier] = mover
        self._selector.register(mover.socket, selectors.EVENT_READ, (tier, mover))
        self._selector.register(mover.pidfd, selectors.EVENT_READ, (tier, mover))

    def _receive(self, tier: int, mover: _Mover) -> None:
        if self._movers[tier] is not mover:
            return
        gone = mover.process.poll() is not None  # looked at first: what it said before it died counts
        for message, table in mover.receive():
            if isinstance(message, (Opened, Down)):
                self._accepted.add(tier)
            elif isinstance(message, Refused) and tier not in self._accepted:
                self._refused.add(tier)
            if isinstance(message, AdoptTable) and table is not None:
                self._handler.on_table(tier, message, table)
            else:
                self._handler.on_message(tier, message)
        if mover.ended and mover.socket in self._selector.get_map():
            self._selector.unregister(mover.socket)
        if gone:
            self._bury(tier, mover)

    def _bury(self, tier: int, mover: _Mover) -> None:
        if not mover.ended:
            self._selector.unregister(mover.socket)
        self._selector.unregister(mover.pidfd)
        mover.close()
        self._movers[tier] = None
        if not self._stopping and tier not in self._refused:
            log.warning("nixl_tiers: the %s tier's mover ended (%s)", self._names[tier], mover.process.returncode)
            self._respawn_later(tier)
        self._handler.on_lost(tier)

    def _respawn_later(self, tier: int) -> None:
        now = time.monotonic()
        deaths = self._deaths[tier]
        while deaths and now - deaths[0] > 600:
            deaths.popleft()
        self._spawn_at[tier] = now + RESPAWN_S[min(len(deaths), len(RESPAWN_S) - 1)]
        deaths.append(now)
