"""One mover process as the engine sees it: a child, its pidfd, and a non-blocking socket."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from nixl_tiers.memory.cold_index import ColdIndexError, SharedColdIndex
from nixl_tiers.mover.protocol import (
    HEARTBEAT_S,
    MAX_PACKET,
    Configure,
    ListedIndex,
    ToCoordinator,
    ToMover,
    decode_to_coordinator,
    encode,
)
from nixl_tiers.mover.stderr import Stderr, secrets_of

START_S: Final = 60.0  # a mover that imports, maps and opens for longer than this is hung
SILENCE_S: Final = 20 * HEARTBEAT_S
UNSENT_PACKETS: Final = 1024
SPARE_PACKETS: Final = 16  # of these, for what cannot wait: probes, another namespace, the end
UNREAD_S: Final = 120.0  # one that beats and takes nothing for so long is in disorder
TURN_PACKETS: Final = 4096  # more than one socket's buffer has room for
SOCKET_BYTES: Final = 1 << 20


class Child:
    """Nothing here waits for the process. After `kill` it is spoken to and listened to no more: what it still has to
    say is about jobs that have failed, and it may say it for as long as it cannot be reaped."""

    def __init__(self, hello: Configure, region_fd: int, clock: Callable[[], float]) -> None:
        """Raises OSError if it cannot be started."""
        self._clock = clock
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pipe: tuple[int, ...] = ()
        try:
            pipe = os.pipe2(os.O_CLOEXEC)
            self.stderr = Stderr(pipe[0], secrets_of(os.environ, _secret_names(hello)))
            with theirs:
                for end in (ours, theirs):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
                ours.setblocking(False)
                self.process = subprocess.Popen(
                    [
                        *(sys.executable, *options(), str(Path(__file__).absolute().with_name("__main__.py"))),
                        *("--socket", str(theirs.fileno())),
                        *("--region", str(region_fd)),
                        *("--parent", str(os.getpid())),
                    ],
                    pass_fds=(theirs.fileno(), region_fd),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=pipe[1],
                    start_new_session=True,
                    env=environment(),
                )
            self.pidfd = os.pidfd_open(self.process.pid)
            os.close(pipe[1])
        except BaseException:
            ours.close()
            for fd in pipe:
                os.close(fd)
            raise
        self.socket = ours
        self.heard_s = clock()
        self.killed_s: float | None = None
        self.ended = False  # no more will come from its socket
        self.stopping = False
        self._talked = False
        self._took_s = self.heard_s  # when it last took something, or had nothing to take
        self._unsent: deque[bytes] = deque([encode(hello)])

    @property
    def killed(self) -> bool:
        return self.killed_s is not None

    @property
    def gone(self) -> bool:
        """Whether it is dead, and reaped by this look at the latest. Never waits."""
        return self.process.poll() is not None

    @property
    def room(self) -> int:
        """How many packets more it may be sent now."""
        return 0 if self.killed else max(0, UNSENT_PACKETS - SPARE_PACKETS - len(self._unsent))

    def deaf(self, now: float) -> bool:
        """Whether it has not read for too long what waits for it."""
        return bool(self._unsent) and now - self._took_s > UNREAD_S

    def silent(self, now: float) -> bool:
        return now - self.heard_s > (SILENCE_S if self._talked else START_S)

    def send(self, message: ToMover) -> None:
        """Queue a message; `flush` sends it. One that is killed has no use for it.

        Raises if it cannot be kept, or is none: kill it then, for nothing else may come after what it has missed.
        """
        if self.killed:
            return
        if len(self._unsent) >= UNSENT_PACKETS:
            raise BufferError("it does not read")
        self._unsent.append(encode(message))

    def flush(self) -> bool:
        """Send what the socket takes; True when nothing is left. Raises OSError for what can never be sent."""
        while self._unsent:
            try:
                self.socket.send(self._unsent[0])
            except BlockingIOError:
                return False
            except ConnectionError:  # it is gone; its pidfd tells
                self._unsent.clear()
                break
            self._unsent.popleft()
            self._took_s = self._clock()
        self._took_s = self._clock()
        return True

    def receive(self) -> Iterable[tuple[ToCoordinator, SharedColdIndex | None]]:
        """The messages that have come, and the table that came with each; sets `ended` when there will be no more.
        What comes in the meantime may be left for the next time.

        Raises msgspec.DecodeError, UnicodeDecodeError or TableError for what is no message.
        """
        for _ in range(TURN_PACKETS):
            if self.ended or self.killed:
                return
            try:
                packet, fds, _, _ = socket.recv_fds(self.socket, MAX_PACKET, 1, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except OSError:
                packet, fds = b"", []
            if not packet:
                self.ended = True
                return
            self.heard_s = self._clock()
            self._talked = True
            yield _read(packet, fds)

    def kill(self) -> None:
        if self.killed_s is None:
            self.killed_s = self._clock()
            self._unsent.clear()
            self.process.kill()

    def close(self) -> None:
        self.socket.close()
        os.close(self.pidfd)
        os.close(self.stderr.fd)


def _secret_names(hello: Configure) -> list[str]:
    """Environment variables that a tier's configuration names, all of which hold credentials."""
    return [str(value) for field, value in hello.tier.items() if field.endswith("_env") and value]


def options() -> list[str]:
    """Python's own: what the engine was told not to take modules from (-E, -s or -I), a mover does not, either."""
    ignored = [("-E", sys.flags.ignore_environment), ("-s", sys.flags.no_user_site)]
    return ["-P", *(option for option, given in ignored if given)]


def environment() -> dict[str, str]:
    """The engine's, without those entries of PYTHONPATH that mean the working directory, or depend on it: whoever can
    write there would have his code run with the engine's credentials. (-P keeps only Python's own entry out.)"""
    variables = dict(os.environ)
    paths = [path for path in variables.pop("PYTHONPATH", "").split(os.pathsep) if Path(path).is_absolute()]
    if paths:
        variables["PYTHONPATH"] = os.pathsep.join(paths)
    return variables


def _read(packet: bytes, fds: list[int]) -> tuple[ToCoordinator, SharedColdIndex | None]:
    """The message, and its table. All descriptors are closed, whatever happens. Raises TableError."""
    try:
        message = decode_to_coordinator(packet)
        if not isinstance(message, ListedIndex):
            return message, None
        if not fds:
            raise ColdIndexError("a table was told of, and no descriptor came with it")
        return message, SharedColdIndex.attach(fds.pop())
    finally:
        for fd in fds:
            os.close(fd)
