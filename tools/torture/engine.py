"""An engine of the torture suite: real vLLM in a process of its own, that may die, hang, or be killed at any time.

Scheduler and worker are in that one process (VLLM_ENABLE_V1_MULTIPROCESSING=0), as with an offline `LLM`. What would
end vLLM's engine process under `vllm serve`, an exception out of a step, is an `EngineDied` here.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

BLOCK_TOKENS: Final = 128
ANSWER_TOKENS: Final = 8
START_S: Final = 300.0
EXIT_S: Final = 60.0
IMPORTED: Final = (
    "vllm.entrypoints.llm", "vllm.model_executor.models.llama", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker",
)  # fmt: skip
IMPORTED_LMCACHE: Final = (
    "lmcache.integration.vllm.lmcache_mp_connector", "lmcache.cli.main", "lmcache.v1.multiprocess.server",
)  # fmt: skip


class EngineDied(Exception):
    """The engine's process has ended, or a step of it has raised. The text is its last words."""


class NoAnswer(Exception):
    """There was none within the limit."""


def forked(target: Callable[..., object], *arguments: Any) -> BaseProcess:
    """A process of a server that has imported what takes long: of vLLM, and of LMCache where that is installed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tools.torture.preload"])
    process = context.Process(target=target, args=arguments)
    process.start()
    return process


def write_to(log: str | Path) -> None:
    """All that this process prints."""
    with Path(log).open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)


@dataclass(frozen=True)
class Plan:
    """What an engine is started with."""

    model: str
    transfer: Mapping[str, Any] | None = None
    """Fields of KVTransferConfig."""
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `LLM` to replace."""
    folder: str = "."
    """Where the process runs."""


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    cached: int
    """Tokens of the prompt that were not computed."""
    reason: str
    seconds: float


class Engine:
    """From its start on; `stop` or `kill` must be called."""

    def __init__(self, plan: Plan, log: Path) -> None:
        """Returns when it is ready. Raises EngineDied or NoAnswer."""
        self._log = log
        self._talk, theirs = multiprocessing.Pipe()
        self._process = forked(_serve, theirs, plan, str(log))
        theirs.close()
        self.pid = self._process.pid or 0
        try:
            self._answer(START_S)
        except BaseException:
            self.kill()
            raise

    def ask(self, prompts: Iterable[Sequence[int]], limit_s: float, tokens: int = ANSWER_TOKENS) -> list[Answer]:
        """One after the other, so that batches are the same each time. `limit_s`: for each. Raises EngineDied or
        NoAnswer."""
        return [Answer(*self.call(["ask", list(prompt), tokens], limit_s)) for prompt in prompts]

    def begin_at_once(self, prompts: Sequence[Sequence[int]], resets: Sequence[int] = ()) -> None:
        """All in one batch. After the steps with these numbers `reset_prefix_cache(reset_connector=True)` is called:
        vLLM empties its own cache only where no request has blocks, so mostly it is the connector that is reset."""
        self.send(["batch", [list(one) for one in prompts], list(resets)])

    def answered_at_once(self, limit_s: float) -> list[Answer]:
        """What comes of a batch that was begun. Raises EngineDied or NoAnswer."""
        return [Answer(*one) for one in self._answer(limit_s)]

    @property
    def answers(self) -> bool:
        """Whether one waits to be read."""
        return self._talk.poll()

    def call(self, request: list[Any], limit_s: float) -> Any:
        self.send(request)
        return self._answer(limit_s)

    def send(self, request: list[Any]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `_answer` says how it ended
            self._talk.send(request)

    def _answer(self, limit_s: float) -> Any:
        try:
            if not self._talk.poll(limit_s):
                raise NoAnswer(f"none within {limit_s:.0f} s")
            kind, value = self._talk.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(EXIT_S)
            raise EngineDied(f"exit code {self._process.exitcode}; {self.last_words()}") from None
        if kind == "died":
            raise EngineDied(value)
        return value

    def last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1][-300:] if lines else ""

    def stop(self) -> None:
        """As a user does; whatever hangs is killed after EXIT_S."""
        self.send(["exit"])
        self._process.join(EXIT_S)
        self.kill()

    def kill(self) -> None:
        """SIGKILL of the engine's process alone, as the kernel does when memory is short."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._process.join(EXIT_S)
        self._talk.close()


# --- in the engine's process ------------------------------------------------------------------------------------------


def _serve(talk: Connection, plan: Plan, log: str) -> None:
    write_to(log)
    os.environ.update(plan.environment)
    os.chdir(plan.folder)
    try:
        llm = _llm(plan)
        talk.send(("ready", None))
        while True:
            verb, *arguments = talk.recv()
            if verb == "exit":
                break
            talk.send(("answer", _VERBS[verb](llm, *arguments)))
        llm.llm_engine.engine_core.shutdown()
    except EOFError:
        os._exit(0)  # whoever asks has ended
    except BaseException as error:  # noqa: BLE001 - as vLLM's engine process, it ends by any
        traceback.print_exc()
        sys.stderr.flush()
        with contextlib.suppress(OSError):
            talk.send(("died", f"{type(error).__name__}: {error}"[:300]))
        os._exit(1)


def _llm(plan: Plan) -> Any:
    from demo import vllm_cpu

    settings = {
        "dtype": "float32",
        "block_size": BLOCK_TOKENS,
        "max_model_len": 1024,
        "max_num_batched_tokens": 1024,
        "num_gpu_blocks_override": 128,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        **plan.settings,
    }
    if "LMCacheMPConnector" in (plan.transfer or {}).values() or "lmcache" in sys.modules:
        _scan_past_llvmlite()
    return vllm_cpu.in_process_llm(Path(plan.model), plan.transfer, **settings)


def _scan_past_llvmlite() -> None:
    """vLLM for CPUs looks for Triton kernels in all modules, and fails at llvmlite, which LMCache imports."""
    from vllm.triton_utils import dispatcher

    dispatcher.vars = lambda value: found if isinstance(found := value.__dict__, Mapping) else {}


def _ask(llm: Any, prompt: list[int], tokens: int) -> tuple[Any, ...]:
    begun = time.monotonic()
    output = llm.generate([{"prompt_token_ids": prompt}], _sampling(tokens), use_tqdm=False)[0]
    return _shown(output, begun)


def _sampling(tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def _shown(output: Any, begun: float) -> tuple[Any, ...]:
    done = output.outputs[0]
    return tuple(done.token_ids), output.num_cached_tokens or 0, str(done.finish_reason), time.monotonic() - begun


def _batch(llm: Any, prompts: list[list[int]], resets: list[int]) -> list[tuple[Any, ...]]:
    engine, begun, found = llm.llm_engine, time.monotonic(), {}
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, _sampling(ANSWER_TOKENS))
    steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found[int(output.request_id)] = _shown(output, begun)
        steps += 1
        if steps in resets:
            llm.reset_prefix_cache(reset_connector=True)
    return [found[number] for number in range(len(prompts))]


def _wait_until_up(llm: Any, timeout_s: float) -> bool:
    """Of nixl_tiers, whose tiers open beside the engine's start; the others have none that open."""
    from nixl_tiers.runtime.coordinator import _coordinators

    until = time.monotonic() + timeout_s
    for coordinator in list(_coordinators):
        while not all(tier["up"] and not tier.get("listing") for tier in coordinator.counters().values()):
            if time.monotonic() > until:
                return False
            time.sleep(0.01)
    return True


def _helpers(llm: Any) -> list[int]:
    """Processes that move rows for the engine."""
    from nixl_tiers.runtime.coordinator import _coordinators

    return [pid for coordinator in list(_coordinators) for pid in coordinator.mover_pids if pid]


_VERBS: Final[dict[str, Callable[..., Any]]] = {
    "ask": _ask,
    "batch": _batch,
    "wait until up": _wait_until_up,
    "helpers": _helpers,
}
