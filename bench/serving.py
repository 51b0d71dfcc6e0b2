"""Real vLLM with tiers beside real vLLM without: what tiers cost where nothing can be found, and bring where it can.

    python -m bench.serving [--rounds 7] [--prompts 8] [--tokens 600] [--json FILE]

Three engines live at the same time, each in a process of its own, and take turns: without a connector, with host and
file tiers, and with these and an S3 tier whose server takes connections and never answers. Each round asks all of them
the same, in another order:

- new: prompts that nobody has seen; everything is computed, and stored where there are tiers.
- decode: prompts shorter than a block, many tokens out; nothing is stored or looked up, so what is left is the cost of
  having a connector in every step.
- again: the new prompts once more, after the engine has forgotten them; loaded where there are tiers, computed where
  there are none.

Only ratios of one round mean anything; the table shows their medians. Tokens must be the same (float32).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WITHOUT, TIERS, DEAD_S3 = "without", "cpu + file", "cpu + file + dead s3"
WORKLOADS = ("new", "decode", "again")
VOCABULARY = 3000


class Engine:
    """One engine in a child process, which does nothing between two questions."""

    def __init__(self, tiers: Sequence[dict[str, Any]], tokens: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.serving", "--child", json.dumps(tiers), "--tokens", str(tokens)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()

    def ask(self, prompts: list[list[int]], max_tokens: int) -> tuple[float, list[list[int]]]:
        """Seconds until all are answered, and the answers' tokens."""
        answer = self._call({"prompts": prompts, "max_tokens": max_tokens})
        return answer["seconds"], answer["tokens"]

    def forget(self) -> None:
        self._call({})

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _call(self, question: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise SystemExit(f"an engine ended with code {self._process.wait()}")
        return json.loads(line)


def child(tiers: list[dict[str, Any]], tokens: int) -> None:
    """Answer one question a line; what vLLM prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import SamplingParams

    from nixl_tiers.testing import vllm_cpu

    llm = vllm_cpu.in_process_llm(
        vllm_cpu.build_model(vllm_cpu.cache_directory() / "model"),
        vllm_cpu.kv_transfer(tiers) if tiers else None,
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=tokens + 256,
    )
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        if not question:
            assert llm.reset_prefix_cache()
            print(json.dumps(None), file=answers, flush=True)
            continue
        sampling = SamplingParams(temperature=0, max_tokens=question["max_tokens"], ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in question["prompts"]], sampling, use_tqdm=False
        )
        seconds = time.perf_counter() - began
        tokens_out = [list(output.outputs[0].token_ids) for output in outputs]
        print(json.dumps({"seconds": seconds, "tokens": tokens_out}), file=answers, flush=True)
    llm.llm_engine.engine_core.shutdown()


def prompts_of(round_: int, number: int, tokens: int) -> list[list[int]]:
    """Prompts of which no two share a block, within a round or between rounds."""
    return [
        [(7 * i * i + 13 * i + 977 * (round_ * number + n)) % VOCABULARY + 100 for i in range(tokens)]
        for n in range(number)
    ]


def measure(engines: dict[str, Engine], round_: int, number: int, tokens: int) -> dict[str, dict[str, float]]:
    """Seconds by workload and engine."""
    new, short = prompts_of(round_, number, tokens), prompts_of(-1 - round_, number, 48)
    order = sorted(engines, key=lambda name: (list(engines).index(name) + round_) % len(engines))
    seconds: dict[str, dict[str, float]] = {}
    for workload in WORKLOADS:
        said = []
        for name in order:
            if workload == "again":
                engines[name].forget()
            took, tokens_out = engines[name].ask(
                short if workload == "decode" else new, 64 if workload == "decode" else 8
            )
            seconds.setdefault(workload, {})[name] = took
            said.append(tokens_out)
        if said.count(said[0]) != len(said):
            raise SystemExit(f'the engines do not say the same to "{workload}" in round {round_}')
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=600, help="of a new prompt")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(json.loads(options.child), options.tokens)
        return

    os.environ.update(NIXL_BENCH_KEY="key", NIXL_BENCH_SECRET="secret")
    with tempfile.TemporaryDirectory() as place, socket.create_server(("127.0.0.1", 0)) as hole:
        host = {"type": "cpu", "capacity": "1GiB"}
        dead = {
            "type": "s3",
            "bucket": "nobody",
            "endpoint": f"http://127.0.0.1:{hole.getsockname()[1]}",
            "capacity": "1GiB",
            "access_key_env": "NIXL_BENCH_KEY",
            "secret_key_env": "NIXL_BENCH_SECRET",
        }
        kinds = {
            WITHOUT: [],
            TIERS: [host, {"type": "file", "path": f"{place}/a", "capacity": "4GiB"}],
            DEAD_S3: [host, {"type": "file", "path": f"{place}/b", "capacity": "4GiB"}, dead],
        }
        engines = {name: Engine(tiers, options.tokens) for name, tiers in kinds.items()}
        try:
            measure(engines, 0, options.prompts, options.tokens)  # everybody's first steps are slow
            rounds = [measure(engines, n, options.prompts, options.tokens) for n in range(1, options.rounds + 1)]
        finally:
            for engine in engines.values():
                engine.close()
    if options.json:
        options.json.write_text(json.dumps(rounds, indent=1))
    print("medians: seconds without tiers; then seconds with / seconds without, lowest and highest round behind it")
    for workload in WORKLOADS:
        base = statistics.median(r[workload][WITHOUT] for r in rounds)
        print(f"{workload:8s} {WITHOUT} {base:7.2f} s", end="")
        for name in (TIERS, DEAD_S3):
            ratios = sorted(r[workload][name] / r[workload][WITHOUT] for r in rounds)
            print(f"   {name} {statistics.median(ratios):5.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})", end="")
        print()


if __name__ == "__main__":
    main()
