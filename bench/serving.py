"""Cost and gain of tiers in real vLLM: engines with and without tiers, on requests that miss and requests that hit.

    python -m bench.serving [--rounds 7] [--starts 1] [--prompts 8] [--tokens 600]
                            [--workloads new decode again] [--no-dead-s3] [--json FILE]

Three engines run at the same time, each in a process of its own, and alternate: without a connector, with cpu and file
tiers, and with these plus an S3 tier whose server accepts connections but never responds. Each round sends the same
requests to all of them, in a different order:

- new: prompts not seen before; everything is computed, and stored if there are tiers.
- decode: prompts shorter than a block, many output tokens; nothing is stored or looked up, so the difference is the
  cost of a connector in every step.
- again: the new prompts once more, after a reset of vLLM's prefix cache; loaded if there are tiers, computed if not.

Only ratios within a round are comparable; the table shows their medians. Below it, for each workload: how many requests
a second there were, and what the 99th percentile of their times from the round's start to their last token was, over
all rounds, as ratios to the engine without tiers. For prompts that cannot hit ("new"), the first should be 0.98 or more
and the second 1.02 or less: raise --prompts and --rounds until a p99 means something (100 requests and more).

`--workloads new --no-dead-s3` asks only that, of two engines: 13 rounds of 8 prompts in some minutes on two processors.
The JSON file is written after each round.

Engines have STEADY_MALLOC of engine_process.py: without it, chance decides which one is a sixth faster. vLLM computes
all prompts of a round that fit in a step together, so they end together, and the p99 is that of the slowest rounds. Two
engines without tiers still differ by some hundredths from start to start: --starts 4 and more, to tell 0.98 from 1.

All engines must generate the same tokens (float32). XDG_CACHE_HOME=$(mktemp -d) keeps the prefill speed that they learn
to themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.engine_process import EngineProcess, answer_requests, claim_stdout

WITHOUT, TIERS, DEAD_S3 = "without", "cpu + file", "cpu + file + dead s3"
WORKLOADS = ("new", "decode", "again")
VOCABULARY = 3000


class Engine(EngineProcess):
    """With vLLM's own connector, if there are tiers."""

    def __init__(self, tiers: Sequence[dict[str, Any]], tokens: int) -> None:
        super().__init__("bench.serving", "--child", json.dumps(tiers), "--tokens", str(tokens))
        self.answer()

    def ask(self, prompts: list[list[int]], max_tokens: int) -> tuple[list[float], list[list[int]]]:
        """Seconds until each prompt is answered, of prompts that are asked together, and the generated tokens."""
        answer = self.call({"prompts": prompts, "max_tokens": max_tokens})
        return answer["seconds"], answer["tokens"]

    def reset_prefix_cache(self) -> None:
        self.call({})


def child(tiers: list[dict[str, Any]], tokens: int) -> None:
    answers = claim_stdout()
    from vllm import SamplingParams

    from demo import vllm_cpu

    llm = vllm_cpu.in_process_llm(
        vllm_cpu.build_model(vllm_cpu.cache_directory() / "model"),
        vllm_cpu.kv_transfer(tiers) if tiers else None,
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=tokens + 256,
    )

    def handle(request: dict[str, Any]) -> dict[str, Any] | None:
        if not request:
            assert llm.reset_prefix_cache()
            return None
        sampling = SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False)
        engine, seconds, tokens = llm.llm_engine, {}, {}
        began = time.perf_counter()
        for number, prompt in enumerate(request["prompts"]):
            engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    number = int(output.request_id)
                    seconds[number] = time.perf_counter() - began
                    tokens[number] = list(output.outputs[0].token_ids)
        return {"seconds": [seconds[n] for n in sorted(seconds)], "tokens": [tokens[n] for n in sorted(tokens)]}

    answer_requests(answers, "ready", handle)
    llm.llm_engine.engine_core.shutdown()


def prompts_of(round_: int, number: int, tokens: int) -> list[list[int]]:
    """Prompts that share no block with each other or with other rounds."""
    return [
        [(7 * i * i + 13 * i + 977 * (round_ * number + n)) % VOCABULARY + 100 for i in range(tokens)]
        for n in range(number)
    ]


def measure(
    engines: dict[str, Engine], round_: int, number: int, tokens: int, workloads: Sequence[str] = WORKLOADS
) -> dict[str, dict[str, list[float]]]:
    """Seconds of each request by workload and engine."""
    new, short = prompts_of(round_, number, tokens), prompts_of(-1 - round_, number, 48)
    order = sorted(engines, key=lambda name: (list(engines).index(name) + round_) % len(engines))
    seconds: dict[str, dict[str, list[float]]] = {}
    for workload in workloads:
        outputs = []
        for name in order:
            if workload == "again":
                engines[name].reset_prefix_cache()
            took, tokens_out = engines[name].ask(
                short if workload == "decode" else new, 64 if workload == "decode" else 8
            )
            seconds.setdefault(workload, {})[name] = took
            outputs.append(tokens_out)
        if outputs.count(outputs[0]) != len(outputs):
            raise SystemExit(f'the engines generate different tokens for "{workload}" in round {round_}')
    return seconds


def tiers_of(place: Path, hole: int) -> dict[str, list[dict[str, Any]]]:
    """Each engine's tiers. `hole`: a port where nobody responds."""
    host = {"type": "cpu", "capacity": "1GiB"}
    file, other = (
        {"type": "file", "path": str(place / name), "capacity": "4GiB", "min_free": 0} for name in ("a", "b")
    )
    dead = {
        "type": "s3",
        "bucket": "nobody",
        "endpoint": f"http://127.0.0.1:{hole}",
        "capacity": "1GiB",
    }
    return {WITHOUT: [], TIERS: [host, file], DEAD_S3: [host, other, dead]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--starts", type=int, default=1, help="of each engine, each with so many rounds")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=600, help="length of a new prompt")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--no-dead-s3", action="store_true", help="without the third engine")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        child(json.loads(options.child), options.tokens)
        return

    os.environ.update(AWS_ACCESS_KEY_ID="key", AWS_SECRET_ACCESS_KEY="secret")
    with tempfile.TemporaryDirectory() as place, socket.create_server(("127.0.0.1", 0)) as hole:
        kinds = tiers_of(Path(place), hole.getsockname()[1])
        if options.no_dead_s3:
            kinds.pop(DEAD_S3, None)
        rounds: list[dict[str, dict[str, list[float]]]] = []
        for start in range(options.starts):
            first = start * (options.rounds + 1)
            engines = {name: Engine(tiers, options.tokens) for name, tiers in kinds.items()}
            try:
                for number in range(options.rounds + 1):
                    found = measure(engines, first + number, options.prompts, options.tokens, options.workloads)
                    if number:  # the first is a warm-up
                        rounds.append(found)
                        if options.json:
                            options.json.write_text(json.dumps(rounds, indent=1))
            finally:
                for engine in engines.values():
                    engine.close()
    show(rounds, options.workloads, [name for name in kinds if name != WITHOUT])


def show(rounds: list[dict[str, dict[str, list[float]]]], workloads: Sequence[str], others: Sequence[str]) -> None:
    print("medians: seconds without tiers; then seconds with / seconds without, lowest and highest round in brackets")
    for workload in workloads:
        base = statistics.median(max(r[workload][WITHOUT]) for r in rounds)
        print(f"{workload:8s} {WITHOUT} {base:7.2f} s", end="")
        for name in others:
            ratios = sorted(max(r[workload][name]) / max(r[workload][WITHOUT]) for r in rounds)
            print(f"   {name} {statistics.median(ratios):5.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})", end="")
        print()
    print("requests a second, and p99 of their seconds, over all rounds: with / without")
    for workload in workloads:
        print(f"{workload:8s}", end="")
        for name in others:
            speed = sum(max(r[workload][WITHOUT]) for r in rounds) / sum(max(r[workload][name]) for r in rounds)
            late = p99(rounds, workload, name) / p99(rounds, workload, WITHOUT)
            print(f"   {name} {speed:5.3f}, p99 {late:5.3f}", end="")
        print()


def p99(rounds: Sequence[dict[str, dict[str, list[float]]]], workload: str, name: str) -> float:
    """Seconds within which 99 of 100 requests of the workload were answered."""
    times = sorted(seconds for each in rounds for seconds in each[workload][name])
    return times[min(len(times) - 1, len(times) * 99 // 100)]


if __name__ == "__main__":
    main()
