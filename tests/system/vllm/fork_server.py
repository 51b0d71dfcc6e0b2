"""Runs Python scripts in forks of one process that has imported vLLM, which takes seconds and is the same for each.

    python fork_server.py        requests on stdin, answers on stdout, a line of JSON each

Such a script starts as in a new process otherwise: with its own environment, arguments and output, and no thread of
the server's. But forks share Python's hash seed: what a test shows of two processes that differ in it needs new ones.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, Self, TextIO


class ForkServer:
    """One script at a time. The process starts with the first one."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def run(
        self, script: Path, arguments: list[str], env: Mapping[str, str], stderr: Path, timeout_s: float = 600.0
    ) -> int:
        """Returns the exit status, negative for a signal: that of SIGKILL if time is up."""
        server = self._server
        if server is None:
            command = [sys.executable, "-P", __file__]
            server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(env))
        self._server = None  # unless it answers to the end, another one is started for the next script
        assert server.stdin is not None
        assert server.stdout is not None
        request = {"script": str(script), "arguments": arguments, "env": dict(env), "stderr": str(stderr)}
        pid = 0
        try:
            server.stdin.write(json.dumps(request) + "\n")
            server.stdin.flush()
            pid = json.loads(server.stdout.readline())
            killer = threading.Timer(timeout_s, os.kill, (pid, signal.SIGKILL))
            killer.start()
            try:
                status: int = json.loads(server.stdout.readline())
            finally:
                killer.cancel()
        except BaseException:
            with suppress(ProcessLookupError):
                os.kill(pid or server.pid, signal.SIGKILL)
            _end(server)
            raise
        self._server = server
        return status

    def close(self) -> None:
        if self._server is not None:
            _end(self._server)
            self._server = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _end(server: subprocess.Popen[str]) -> None:
    server.kill()
    server.wait()
    for pipe in (server.stdin, server.stdout):
        assert pipe is not None
        with suppress(OSError):
            pipe.close()


def _serve() -> None:
    started_with = set(os.environ)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints is no answer
    added = _import_engine()
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if not pid:
            answers.close()
            _become(request, started_with, added)
        _say(answers, pid)
        _say(answers, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _say(answers: TextIO, number: int) -> None:
    answers.write(f"{number}\n")
    answers.flush()


def _import_engine() -> list[str]:
    """What every engine on a CPU imports. Returns what child processes of an engine need in PYTHONPATH for it."""
    from tests.support import vllm_cpu

    paths = list(sys.path)
    vllm_cpu.supply_metadata()
    added = [path for path in sys.path if path not in paths]
    for module in ("entrypoints.llm", "model_executor.models.llama", "v1.engine.core", "v1.worker.cpu_worker"):
        importlib.import_module(f"vllm.{module}")
    assert threading.active_count() == 1, "a fork would miss it"
    return added


def _become(request: dict[str, Any], started_with: set[str], added: list[str]) -> NoReturn:
    """The script, and its end: as Python's, but for the destructors of C++, which wait for threads of the server."""
    with Path(os.devnull).open("r+b") as nothing, Path(request["stderr"]).open("wb") as stderr:
        for descriptor, file in ((0, nothing), (1, nothing), (2, stderr)):
            os.dup2(file.fileno(), descriptor)
    env = request["env"]
    for name in started_with - set(env):
        os.environ.pop(name, None)
    os.environ.update(env)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), *added]))
    sys.argv = [request["script"], *request["arguments"]]
    status = 0
    try:
        runpy.run_path(request["script"], run_name="__main__")
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _serve()
