"""Movers without processes, and time that passes when a test says so: a supervisor is stepped by hand over them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from nixl_tiers.memory.address_space import marked
from nixl_tiers.mover import child
from nixl_tiers.mover.protocol import MAX_PACKET, Heartbeat, Listed, Opened, ToCoordinator, ToMover, decode_to_mover
from nixl_tiers.mover.protocol import encode as encoded
from nixl_tiers.mover.supervisor import TICK_S, Supervisor

FIRST_PID = 1 << 23  # no process of Linux has it


class Clock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class FakeProcess:
    """In place of `subprocess.Popen` in a `Child`: what the mover's process would hold and do."""

    def __init__(self, number: int, pass_fds: Sequence[int], stderr: int) -> None:
        self.pid = FIRST_PID + number
        self.returncode: int | None = None
        self.hangs = False
        """As one that the kernel does not let go: a kill is not the end of it."""
        self.kills = 0
        self.exited_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._socket = socket.socket(fileno=os.dup(pass_fds[0]))
        self._socket.setblocking(False)
        self._stderr = os.dup(stderr)
        self._memory = marked(os.dup(pass_fds[2]))
        self._status: int | None = None

    def kill(self) -> None:
        self.kills += 1
        if not self.hangs:
            self.exit(-9)

    def poll(self) -> int | None:
        self.returncode = self._status
        return self.returncode

    # --- what the mover does

    def exit(self, status: int, *, memory_gone: bool = True) -> None:
        """`memory_gone`: else a reader of its page tables keeps its memory, until `let_go`."""
        if self._status is None:
            self._status = status
            self._socket.close()
            os.close(self._stderr)
            os.eventfd_write(self.exited_fd, 1)
        if memory_gone:
            self.let_go()

    def let_go(self) -> None:
        self._memory.close()

    def send(self, *messages: ToCoordinator | bytes) -> None:
        for message in messages:
            self._socket.send(message if isinstance(message, bytes) else encoded(message))

    def hang_up(self) -> None:
        self._socket.close()

    def beat(self) -> None:
        self.send(Heartbeat(0))

    def open(self, epoch: int, slots: int, *, listed: Listed | None = None) -> None:
        """Report that it has opened its medium, and all that it holds."""
        self.send(Heartbeat(0), Opened(epoch, slots), listed or Listed(epoch, [], last=True))

    def log(self, line: str) -> None:
        os.write(self._stderr, line.encode() + b"\n")

    def read(self) -> list[ToMover]:
        """The messages that have come since the last call."""
        messages: list[ToMover] = []
        while True:
            try:
                packet = self._socket.recv(MAX_PACKET)
            except BlockingIOError:
                return messages
            if not packet:
                return messages
            messages.append(decode_to_mover(packet))

    def release(self) -> None:
        """After the test."""
        self.exit(0)
        os.close(self.exited_fd)


class FakeMovers:
    """All that were started, in order, and by which commands. `cannot_start`: what starting one raises."""

    def __init__(self) -> None:
        self.started: list[FakeProcess] = []
        self.commands: list[str] = []
        self.cannot_start: OSError | None = None

    def start(self, command: Sequence[str], *, pass_fds: Sequence[int], stderr: int, **_: Any) -> FakeProcess:
        if self.cannot_start is not None:
            raise self.cannot_start
        self.commands.append(" ".join(command))
        self.started.append(FakeProcess(len(self.started), pass_fds, stderr))
        return self.started[-1]

    def pidfd(self, pid: int) -> int:
        """Readable when that process has exited."""
        return os.dup(self.started[pid - FIRST_PID].exited_fd)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have every Child start one of these."""
        monkeypatch.setattr(child, "subprocess", SimpleNamespace(Popen=self.start, DEVNULL=-3))
        monkeypatch.setattr(os, "pidfd_open", self.pidfd)

    def release(self) -> None:
        for process in self.started:
            process.release()


class SteppedSupervisor:
    """In place of its thread, which `start` and `close` use."""

    ident = 1

    def __init__(self, supervisor: Supervisor, clock: Clock) -> None:
        self.supervisor = supervisor
        self.clock = clock
        self.meanwhile: Callable[[], object] = lambda: None
        """What happens before each step while it is waited for."""
        self._alive = True
        supervisor._thread = self  # type: ignore[assignment]

    def step(self, after_s: float = 0.0) -> tuple[float, float]:
        self.clock.now += after_s
        waits = self.supervisor.step()
        if self.supervisor.ended and self._alive:
            self._alive = False
            self.supervisor._release()
        return waits

    def pass_time(self, seconds: float, *, each_s: float = TICK_S) -> None:
        until = self.clock.now + seconds
        while self._alive and self.clock.now < until:
            self.meanwhile()
            self.step(min(each_s, until - self.clock.now))

    def start(self) -> None:
        pass

    def is_alive(self) -> bool:
        return self._alive

    def join(self, timeout_s: float) -> None:
        """Time passes until it has ended."""
        self.pass_time(timeout_s)
