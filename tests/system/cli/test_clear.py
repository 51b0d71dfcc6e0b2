"""`nixl-tiers clear`: a running engine, in a process of its own, evicts what it holds, deletes it, and serves on."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nixl_tiers
from nixl_tiers import cli
from nixl_tiers.runtime import control
from nixl_tiers.store import TieredStore
from tests.support.file_tier import file_tier

SIZE = 4096
KEYS = [b"key-%d" % number for number in range(8)]


def open_store(path: Path) -> TieredStore:
    config = {"tiers": [{"type": "cpu", "capacity": "1MiB"}, file_tier(path, "16MiB")], "ready_s": 60}
    return nixl_tiers.open(config, SIZE, "cleared")


def put(store: TieredStore) -> None:
    assert store.put(KEYS, np.ones((len(KEYS), SIZE), np.uint8)) == len(KEYS)
    assert store.flush(60)


def serve(path: str) -> None:
    """A process: answers each line with where the keys are, after it has put them if the line is "put"."""
    with open_store(Path(path)) as store:
        control.serve(store.coordinator)
        for line in sys.stdin:
            if line == "put\n":
                put(store)
            print(json.dumps(store.locate(KEYS)), flush=True)


class Engine:
    def __init__(self, path: Path) -> None:
        command = f"from tests.system.cli.test_clear import serve; serve({str(path)!r})"
        self.process = subprocess.Popen(
            [sys.executable, "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, line: str) -> list[str | None]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        answer: list[str | None] = json.loads(self.process.stdout.readline())
        return answer

    @property
    def chosen(self) -> list[str]:
        return ["--pid", str(self.process.pid)]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = Engine(tmp_path)
    yield engine
    engine.process.kill()
    engine.process.communicate()


@pytest.fixture
def here(tmp_path: Path) -> Iterator[TieredStore]:
    """An engine in this process."""
    with open_store(tmp_path) as store:
        control.serve(store.coordinator)
        yield store


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code = cli.main(["clear", *arguments, "--json"])
    captured = capsys.readouterr()
    return code, json.loads(captured.out) if captured.out else captured.err


def rows(answer: Any) -> list[tuple[str, int, int, str]]:
    (engine,) = answer["engines"]
    return [(tier["tier"], tier["rows"], tier["left"], tier["problem"]) for tier in engine["tiers"]]


def test_a_running_engine_is_cleared_and_serves_on(
    engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert engine.ask("put") == ["cpu"] * 8
    assert run(capsys, *engine.chosen)[0] == 0
    assert engine.ask("where") == ["cpu"] * 8, "nothing is cleared without --yes"
    code, answer = run(capsys, *engine.chosen, "--yes")
    assert (code, rows(answer)) == (0, [("cpu", 8, 0, ""), ("file", 8, 0, "")])
    assert engine.ask("where") == [None] * 8
    assert engine.ask("put") == ["cpu"] * 8, "it stores again"
    run(capsys, *engine.chosen, "--yes")
    code, answer = run(capsys, *engine.chosen, "--yes")
    assert (code, rows(answer)) == (0, [("cpu", 0, 0, ""), ("file", 0, 0, "")])
    engine.process.kill()
    engine.process.wait()
    with open_store(tmp_path) as store:
        assert store.locate(KEYS) == [None] * 8, "what was cleared is not found again"


def test_an_engine_that_has_exited_is_one_sentence(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.ask("put")
    engine.process.kill()
    engine.process.wait()
    code, error = run(capsys, *engine.chosen, "--yes")
    pid = engine.process.pid
    assert (code, error) == (2, f"nixl-tiers: clear: no engine with PID {pid} of this user is running here\n")


def test_a_name_that_no_quota_has_is_refused_with_those_that_there_are(
    here: TieredStore, capsys: pytest.CaptureFixture[str]
) -> None:
    put(here)
    code, answer = run(capsys, "--pid", str(os.getpid()), "--quota", "tenant-a", "--yes")
    assert code == 3
    assert answer["engines"][0]["problem"] == "the engine has no quota of that name: it has none"
    assert here.locate(KEYS) == ["cpu"] * 8


@pytest.fixture
def connection(here: TieredStore) -> Iterator[socket.socket]:
    """The engine waits for a request from now on, and not for long."""
    put(here)
    for pid, connection in control.engines():
        if pid == os.getpid():
            connection.settimeout(60)
            yield connection
        connection.close()


def test_another_user_is_not_answered(here: TieredStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel says whose a socket is: both ends look."""
    ours = os.geteuid()
    put(here)

    def asked() -> list[bytes]:
        answers = []
        for pid, engine in control.engines():
            with engine:
                if pid == os.getpid():
                    engine.settimeout(60)
                    answers.append(b"")
                    with suppress(ConnectionError):  # hung up on, perhaps before it has asked
                        engine.send(b'{"clear": true}')
                        answers[-1] = engine.recv(control.MAX_ANSWER_BYTES)
        return answers

    of_strangers = threading.current_thread().name  # by which thread they look: this one is the client

    real = control.identity

    def identity(peer: socket.socket) -> tuple[int, int]:
        pid, _ = real(peer)  # or every engine of this machine would be asked to clear
        return pid, ours + (threading.current_thread().name != of_strangers)

    monkeypatch.setattr(control, "identity", identity)
    assert asked() == [b""], "the engine hangs up on another user"
    of_strangers = "nixl_tiers control"
    assert asked() == [], "nor is a process of another user asked that has bound a name of ours"
    assert here.locate(KEYS) == ["cpu"] * 8


@pytest.mark.parametrize("packet", [b"clear everything", b'{"clear": 1}', b'{"clear": true, "x": 1}', b"[" * 100_000])
def test_what_is_no_command_is_refused(here: TieredStore, connection: socket.socket, packet: bytes) -> None:
    connection.send(packet)
    assert b"does not understand" in connection.recv(control.MAX_ANSWER_BYTES)
    assert here.locate(KEYS) == ["cpu"] * 8


def test_a_silent_client_holds_up_the_next_one_for_a_moment_only(here: TieredStore, connection: socket.socket) -> None:
    for pid, other in control.engines():
        with other:
            if pid == os.getpid():
                assert control.ask(other, control.Request(clear=False)).pid == pid
    assert connection.recv(1) == b"", "it was hung up on"
