"""A vLLM server as a child process: start it, send requests, read its metrics, and stop all of its processes."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from demo import vllm_cpu
from tests.support.leaks import process_tree
from tests.support.servers import free_ports

START_S: Final = 420.0
STOP_S: Final = 30.0
ORPHAN_TIMEOUT_S: Final = 10.0
ANSWER_S: Final = 300.0
_PR_SET_CHILD_SUBREAPER: Final = 36


class ServerFailure(RuntimeError):
    """The server has failed; the text is one sentence and, where it helps, the end of its log."""


@dataclass(frozen=True)
class Answer:
    """One streamed completion. Seconds are from sending the request to the first token."""

    ttft_s: float
    token_ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt; 0 without `--enable-prompt-tokens-details`."""


class MetricsPage:
    """All samples of one scrape."""

    def __init__(self, text: str) -> None:
        """`text`: a page in the Prometheus text format. Raises ValueError if it cannot be parsed."""
        self.samples: list[Sample] = [s for family in text_string_to_metric_families(text) for s in family.samples]

    def total(self, name: str, **labels: str) -> float:
        """The sum over all series of this name with at least these labels; 0 if there is none."""
        return sum(s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items())


class VllmServer:
    """`vllm serve` on a free loopback port, for as long as the `with` block lasts.

    Do not start other processes meanwhile: stop() ends every new descendant of this process.
    """

    def __init__(self, model: Path, options: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._model = model
        self._options = options
        self._environment = environment
        self._log = log
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._others: set[int] = set()

    def start(self, progress: Callable[[], None]) -> None:
        """Start, and wait until it is healthy; `progress` is called about twice a second. Raises ServerFailure."""
        # Orphans of the server become our children, so that stop() finds and ends them.
        _adopt_orphans(True)
        self._others = {*process_tree(os.getpid())}
        self._port = free_ports(1)[0]
        where = ["--host", "127.0.0.1", "--port", str(self._port)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command(*where, *self._options),
                env={**os.environ, **vllm_cpu.environment(), **self._environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_S
        while not self._healthy():
            if self._process.poll() is not None:
                raise ServerFailure(f"the vLLM server ended with code {self._process.returncode}\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise ServerFailure(f"the vLLM server was not ready after {START_S:.0f} s\n{self.log_tail()}")
            progress()
            time.sleep(0.5)

    def stop(self) -> None:
        """End the server and every process that it started; SIGTERM first, SIGKILL after STOP_S seconds."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        # Its other processes end by themselves when their parent is gone; orphans are killed after a timeout.
        deadline = time.monotonic() + ORPHAN_TIMEOUT_S
        while rest := [pid for pid in process_tree(os.getpid()).keys() - self._others if _reap(pid)]:
            if time.monotonic() > deadline:
                for pid in rest:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        _adopt_orphans(False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def port(self) -> int:
        """On the loopback interface."""
        return self._port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def log_tail(self, lines: int = 25) -> str:
        """The last lines of its log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])

    def tokenize(self, text: str) -> list[int]:
        """The token ids of `text`."""
        ids: list[int] = self._call("POST", "/tokenize", {"model": str(self._model), "prompt": text})["tokens"]
        return ids

    def metrics(self) -> MetricsPage:
        """Scrape /metrics. The values are as of the engine's last step: see `poke`."""
        return MetricsPage(self._send("GET", "/metrics").decode())

    def poke(self) -> None:
        """Generate one token: an idle engine publishes no new metrics until its next step."""
        self._call("POST", "/v1/completions", {"model": str(self._model), "prompt": [1], "max_tokens": 1})

    def reset_prefix_cache(self) -> bool:
        """Reset vLLM's own prefix cache only; False while blocks are still in use."""
        return bool(self._call("POST", "/reset_prefix_cache")["success"])

    def ask(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        """Complete `prompt` (token ids) greedily with exactly `max_tokens` tokens."""
        body = {
            "model": str(self._model),
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        begun, first_s, usage = time.perf_counter(), 0.0, None
        token_ids: list[int] = []
        try:
            with self._request("POST", "/v1/completions", body) as response:
                while line := response.readline():
                    if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                        continue
                    event = json.loads(line[len(b"data: ") :])
                    if "error" in event:
                        raise ServerFailure(f"the vLLM server aborted the response: {event['error']}")
                    first_s = first_s or (time.perf_counter() - begun if event["choices"] else 0.0)
                    token_ids += [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
                    usage = event.get("usage") or usage
        except (OSError, http.client.HTTPException) as error:
            raise ServerFailure(f"the vLLM server aborted the response ({error})\n{self.log_tail()}") from error
        if not first_s or not usage:
            raise ServerFailure(f"the vLLM server ended the response before its last token\n{self.log_tail()}")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Answer(first_s, tuple(token_ids), usage["prompt_tokens"], cached)

    def _command(self, *options: str) -> list[str]:
        return vllm_cpu.serve_command(self._model, *options)

    def _healthy(self) -> bool:
        try:
            self._send("GET", "/health")
        except (OSError, http.client.HTTPException, ServerFailure):
            return False
        return True

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return json.loads(self._send(method, path, body))

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        with self._request(method, path, body) as response:
            return response.read()

    @contextlib.contextmanager
    def _request(self, method: str, path: str, body: Mapping[str, Any] | None) -> Iterator[http.client.HTTPResponse]:
        """On a connection of its own, so that any thread can ask. Raises ServerFailure, OSError, HTTPException."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_S)
        try:
            headers = {} if body is None else {"Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != http.client.OK:
                text = " ".join(response.read(500).decode("utf-8", "replace").split())
                raise ServerFailure(f"{method} {path} answered {response.status}: {text}")
            yield response
        finally:
            connection.close()


def _adopt_orphans(yes: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0)


def _reap(pid: int) -> bool:
    """Reap a former descendant; whether it still runs."""
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG)[0] == 0
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
