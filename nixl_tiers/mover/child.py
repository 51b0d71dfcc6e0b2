"""One mover process as the supervisor sees it: a child process, its pidfd, a non-blocking socket, and its standard
error in lines, with secrets redacted."""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from nixl_tiers.base.gpus import gpu_for
from nixl_tiers.memory import columns
from nixl_tiers.memory.address_space import AddressSpace
from nixl_tiers.mover.protocol import (
    MAX_PACKET,
    Configure,
    Down,
    Heartbeat,
    ListedColumns,
    Refused,
    ToCoordinator,
    ToMover,
    decode_to_coordinator,
    encode,
)

MAX_UNSENT: Final = 1024  # messages
RESERVED_UNSENT: Final = 16  # of these, for messages that cannot wait: existence checks, Open, Stop
MAX_RECEIVED: Final = 4096  # messages in one call of `receive`; more than a socket's buffer has room for
FD_SPACE: Final = socket.CMSG_SPACE(array("i").itemsize)  # for one descriptor
SOCKET_BYTES: Final = 1 << 20
HANG_UP_S: Final = 1.0  # a process that exits has closed its socket before; no longer before


class Child:
    """Nothing here waits for the process. After `kill` nothing is sent to it or read from it: its messages would be
    about jobs that have failed, and they may come for as long as it cannot be reaped."""

    def __init__(self, name: str, configure: Configure, region_fd: int, clock: Callable[[], float]) -> None:
        """`name`: of its tier. Raises OSError if it cannot be started."""
        self._clock = clock
        self._times = configure.times
        self.memory = AddressSpace()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pipe: tuple[int, ...] = ()
        try:
            pipe = os.pipe2(os.O_CLOEXEC)
            self._redact = Redactor(secrets_of(os.environ, configure.secret_variables))
            self.stderr = Stderr(pipe[0], self._redact)
            with theirs:
                for end in (ours, theirs):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
                ours.setblocking(False)
                self.process = subprocess.Popen(
                    [
                        *(sys.executable, *options(), str(Path(__file__).absolute().with_name("__main__.py"))),
                        *("--tier", name),
                        *("--socket", str(theirs.fileno())),
                        *("--region", str(region_fd)),
                        *("--mark", str(self.memory.fd)),
                        *("--parent", str(os.getpid())),
                    ],
                    pass_fds=(theirs.fileno(), region_fd, self.memory.fd),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=pipe[1],
                    # Ctrl-C is the engine's. Not a session of its own: there the nice values of its threads would not
                    # count beside the engine's, where Linux groups processes by session (sched_autogroup).
                    process_group=0,
                    env=environment(configure.tier),
                )
            self.pidfd = os.pidfd_open(self.process.pid)
            os.close(pipe[1])
        except BaseException:
            ours.close()
            self.memory.close()
            for fd in pipe:
                os.close(fd)
            raise
        self.socket = ours
        self.fds = (ours.fileno(), self.stderr.fd, self.pidfd)
        self.received_s = clock()  # when the last message came
        self.killed_s: float | None = None
        self._buffer = bytearray(MAX_PACKET)
        self.congested = False  # its socket has not taken all
        self.eof = False  # nothing more will be read from its socket
        self.closed_s = float("inf")  # when it had closed its end of that
        self.stopping = False
        self.lingers = False  # it has exited, but its memory is not gone
        self.started = False  # has sent a message
        self._sent_s = self.received_s  # when the socket last took a message, or there was none to send
        self._unsent: deque[bytes] = deque([encode(configure)])

    @property
    def killed(self) -> bool:
        return self.killed_s is not None

    @property
    def exited(self) -> bool:
        """Whether it has exited and nothing of it writes to the region any more; reaps it. Never waits."""
        self.lingers = self.process.poll() is not None and not self.memory.is_gone()
        return self.process.returncode is not None and not self.lingers

    @property
    def send_credits(self) -> int:
        """Back-pressure: how many more messages may be sent to it now."""
        return 0 if self.killed else max(0, MAX_UNSENT - RESERVED_UNSENT - len(self._unsent))

    def send_timed_out(self, now: float) -> bool:
        return bool(self._unsent) and now - self._sent_s > self._times.send_timeout_s

    def hung_up(self, now: float) -> bool:
        """Whether it has closed its socket, and goes on."""
        return now - self.closed_s > HANG_UP_S and not self.lingers

    def heartbeat_timed_out(self, now: float) -> bool:
        times = self._times
        return now - self.received_s > (times.heartbeat_timeout_s if self.started else times.start_timeout_s)

    def send(self, message: ToMover | bytes) -> None:
        """Queue a message, which may be encoded already; `flush` sends it. A no-op after `kill`.

        Raises if the queue is full or the message cannot be encoded: kill it then, for it must not miss a message.
        """
        if self.killed:
            return
        if len(self._unsent) >= MAX_UNSENT:
            raise BufferError("it does not read its messages")
        self._unsent.append(message if isinstance(message, bytes) else encode(message))

    def flush(self) -> bool:
        """Send what the socket takes; True when nothing is left. Raises OSError for a message that can never be
        sent."""
        while self._unsent:
            try:
                self.socket.send(self._unsent[0])
            except BlockingIOError:
                return False
            except ConnectionError:  # it has exited, which its pidfd reports
                self._unsent.clear()
                break
            self._unsent.popleft()
            self._sent_s = self._clock()
        self._sent_s = self._clock()
        return True

    def receive(self) -> Iterable[tuple[ToCoordinator, columns.ListedColumns | None]]:
        """The messages that have come, each with the rows that came with it; sets `eof` at the end of the
        stream. Messages that come in the meantime may be left for the next call.

        Raises msgspec.DecodeError, UnicodeDecodeError or ColumnsError for an invalid message.
        """
        for _ in range(MAX_RECEIVED):
            if self.eof or self.killed:
                return
            try:
                # Not `socket.recv_fds`, which allocates a whole packet each time.
                received = self.socket.recvmsg_into([self._buffer], FD_SPACE, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # it closed without reading all; reported once, before what it had sent
            except OSError:
                received = 0, [], 0, None
            nbytes, ancillary, _, _ = received
            fds = _descriptors(ancillary) if ancillary else []
            if not nbytes:  # also an empty packet, which nobody sends
                _close(fds)
                self.eof, self.closed_s = True, self._clock()
                return
            self.received_s = self._clock()
            self.started = True
            message, rows = _read(memoryview(self._buffer)[:nbytes], fds)
            yield _redacted(message, self._redact), rows

    def kill(self) -> None:
        if self.killed_s is None:
            self.killed_s = self._clock()
            self._unsent.clear()
            self.process.kill()

    def close(self) -> None:
        self.socket.close()
        os.close(self.pidfd)
        os.close(self.stderr.fd)
        self.memory.close()


def options() -> list[str]:
    """Options of the interpreter: where this process must not import modules from (-E, -s, -I), a mover must not."""
    ignored = [("-E", sys.flags.ignore_environment), ("-s", sys.flags.no_user_site)]
    return ["-P", *(option for option, given in ignored if given)]


def environment(tier: Mapping[str, object]) -> dict[str, str]:
    """This process's environment, without those entries of PYTHONPATH that depend on the working directory: code that
    others put there would run with this process's credentials. (-P removes only the entry that Python itself adds.)

    And without GPUs that it does not need."""
    variables = os.environ | gpu_for(tier.get("backend"))
    paths = [path for path in variables.pop("PYTHONPATH", "").split(os.pathsep) if Path(path).is_absolute()]
    if paths:
        variables["PYTHONPATH"] = os.pathsep.join(paths)
    return variables


def _descriptors(ancillary: Iterable[tuple[int, int, bytes]]) -> list[int]:
    fds = array("i")
    for _, _, data in ancillary:
        fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()


def _redacted(message: ToCoordinator, redact: Redactor) -> ToCoordinator:
    """The message without secrets in its texts, which are logged and reported."""
    if isinstance(message, (Down, Refused)):
        return msgspec.structs.replace(message, reason=redact(message.reason))
    if isinstance(message, Heartbeat) and message.denials:
        denials = {redact(kind): redact(sentence) for kind, sentence in message.denials.items()}
        return msgspec.structs.replace(message, denials=denials)
    return message


def _read(packet: memoryview, fds: list[int]) -> tuple[ToCoordinator, columns.ListedColumns | None]:
    """The message, and its rows. All other descriptors are closed, also on errors. Raises ColumnsError."""
    try:
        message = decode_to_coordinator(packet)
        if not isinstance(message, ListedColumns):
            return message, None
        if not fds:
            raise columns.ColumnsError("a listing was announced, and no descriptor came with it")
        return message, columns.ListedColumns.attach(fds.pop())
    finally:
        _close(fds)


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


# --- its standard error -----------------------------------------------------------------------------------------------

READ_BYTES: Final = 64 << 10  # in one call
LINE_BYTES: Final = 2000  # longer lines are cut
LAST_LINES: Final = 20  # errors, and what is not in our log format (LOG_FORMAT): kept to explain the mover's death

_OURS: Final = re.compile(r"nixl_tiers mover\[[^\]]*\] ([A-Z]+): (.*)")
_SECRET_FIELD: Final = re.compile(
    r"((?:secret|token|passw|credential|signature|authorization|access.?key)[\w-]*[\"']?\s*[=:]\s*).*", re.IGNORECASE
)


class Stderr:
    """The reading end of the pipe. `last`: the last LAST_LINES lines that are errors, without their tracebacks, or not
    in our log format (libraries)."""

    def __init__(self, fd: int, redact: Redactor) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.eof = False
        self.last: deque[str] = deque(maxlen=LAST_LINES)
        self._redact = redact
        self._partial = b""
        self._skipping = False  # the rest of a line that was too long

    def read(self) -> list[tuple[int, str]]:
        """(level, text) of the lines that have come; tracebacks and lines of libraries are DEBUG."""
        try:
            raw = os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            raw = b""
        self.eof = not raw
        *lines, self._partial = (self._partial + (raw or b"\n")).split(b"\n")
        if self._skipping and lines:
            del lines[0]
            self._skipping = False
        if len(self._partial) > LINE_BYTES:
            if not self._skipping:
                lines.append(self._partial)
            self._skipping, self._partial = True, b""
        return [self._parse(line) for line in lines if line.strip()]

    def _parse(self, line: bytes) -> tuple[int, str]:
        text = self._redact(line.decode(errors="replace"))
        if len(line) > LINE_BYTES:  # it may end with the beginning of a secret
            text = text[: max(0, LINE_BYTES - self._redact.longest)]
        ours = _OURS.fullmatch(text)
        level = logging.getLevelNamesMapping().get(ours[1]) if ours else None
        if ours and level is not None:
            if level >= logging.ERROR:
                self.last.append(ours[2].partition(" | ")[0])
            return level, ours[2]
        text = _SECRET_FIELD.sub(r"\1***", text)
        self.last.append(text)
        return logging.DEBUG, text


# --- secrets, which are replaced before anything is logged or reported ------------------------------------------------

_SECRET_NAME: Final = re.compile(
    r"SECRET|TOKEN|PASSW|PASSPHRASE|CREDENTIAL|API_?KEY|(PASS|AUTH|KEYS?)(_|$)", re.IGNORECASE
)
_PLACE_NAME: Final = re.compile(r"_(FILE|PATH|DIR)$", re.IGNORECASE)  # and not _URL: some URLs are secrets
_USER_OF_URL: Final = re.compile(r"://[^/@\s]+@")
_SHORT: Final = 8  # shorter values are ordinary words


def secrets_of(environment: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """Values to be redacted: of variables whose names look secret, and of these `names`."""
    named = set(names)
    return [
        value
        for name, value in environment.items()
        if name in named or (_SECRET_NAME.search(name) and not _PLACE_NAME.search(name))
    ]


class Redactor:
    """Replaces secrets, and each line of a secret that has several, such as a private key; what is shorter than 8
    characters is left. `longest`: of what is replaced, in characters."""

    def __init__(self, secrets: Iterable[str]) -> None:
        lines = {line.strip() for secret in secrets for line in secret.splitlines()}
        known = sorted((line for line in lines if len(line) >= _SHORT), key=len, reverse=True)
        self.longest = len(known[0]) if known else 0
        self._secrets = re.compile("|".join(map(re.escape, known))) if known else None

    def __call__(self, text: str) -> str:
        if self._secrets is not None:
            text = self._secrets.sub("***", text)
        return _USER_OF_URL.sub("://***@", text)
