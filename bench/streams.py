"""Streams against store-and-forward: time to the first token of a hit in files. Real vLLM on a CPU.

    python -m bench.streams [--tokens 7000] [--speeds 0,2000] [--rounds 10] [--busy 0,2] [--crowd 32] [--out DIR]

Two engines that differ by `kv_load_failure_policy` alone, which is what streams depend on. The file tier reports its
loads as if its disk gave so many MB/s (bench/slowed_file.py); 0: as fast as it is. Before a measured request vLLM's own
prefix cache and host memory are emptied (`on_reset: keep`). `--busy`: so many requests that decode meanwhile, begun
after that. `--crowd`: so many requests that share a system prompt, each with a document of its own behind it, all of
it in files; they come at once, or one every so many ms (`--gaps`). The engines take turns, in an order that rotates. An
answer whose tokens are not those of the first one, a hit that is none, and an engine that streams what it must not, or
the other way round, end the run with an error.

Writes streams.json: of each speed and number of busy requests the seconds to the first token, all and by the median
with quartiles, and the median of the rounds' ratios; of a crowd those to the first token on average, and to the last
one's.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.engine_process import EngineProcess, answer_requests, claim_stdout
from bench.first_token_engine import FirstTokenEngine
from bench.machine import machine
from bench.rounds import Spread, rotations
from tests.support import vllm_cpu

ENGINES: Final = {"streamed": "recompute", "whole": "fail"}  # kv_load_failure_policy
TOLD_TOKENS_PER_S: Final = 300  # computing is never quicker than any load here
WARM_STEPS: Final = 4  # of busy requests, before one is measured
DECODES: Final = 2000  # tokens of a busy request at most
READY_S: Final = 300.0
SYSTEM: Final = 1024  # tokens that a crowd shares
DOCUMENT: Final = 448  # of each of its requests


class Engine(FirstTokenEngine):
    VERBS = ("fill", "hit", "crowd")

    def __init__(self, plan: dict[str, Any]) -> None:
        extra = {"prefill_tokens_per_s": TOLD_TOKENS_PER_S, "on_reset": "keep", "wait_s": 120.0, "probe_s": 0}
        transfer = vllm_cpu.recomputing_transfer(plan["tiers"], **extra) | {"kv_load_failure_policy": plan["policy"]}
        super().__init__(transfer, 8192, READY_S)

    def fill(self, prompt: list[int]) -> list[float]:
        """And another one: vLLM completes the stores of a step in the next one."""
        return self.ask([prompt]) + self.ask([prompt[: vllm_cpu.BLOCK_TOKENS // 2]])

    def hit(self, prompt: list[int], busy: int) -> dict[str, Any]:
        from vllm import SamplingParams

        assert self.llm.reset_prefix_cache(reset_connector=True)
        assert self.store.wait_ready(READY_S)
        engine = self.llm.llm_engine
        sampling = SamplingParams(temperature=0, max_tokens=DECODES, ignore_eos=True, detokenize=False)
        names = [f"busy{number}" for number in range(busy)]
        for number, name in enumerate(names):
            engine.add_request(name, {"prompt_token_ids": [100 + number, 200]}, sampling)
        for _ in range(WARM_STEPS if busy else 0):
            engine.step()
        before = self.streams()
        began_s, first_s, steps = time.perf_counter(), 0.0, 0
        sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
        engine.add_request("r", {"prompt_token_ids": prompt}, sampling)
        output = None
        while output is None or not output.finished:
            steps += not first_s
            for each in engine.step():
                if each.request_id.split("-")[0] == "r":
                    output, first_s = each, first_s or time.perf_counter() - began_s
        engine.abort_request(names)
        while engine.has_unfinished_requests():
            engine.step()
        engine.step()
        self.store.flush(READY_S)
        return {
            "seconds": first_s,
            "steps": steps,
            "tokens": list(output.outputs[0].token_ids),
            "cached": output.num_cached_tokens,
            "streams": self.streams() - before,
        }

    def crowd(self, prompts: list[list[int]], gap_s: float) -> dict[str, Any]:
        from vllm import SamplingParams

        assert self.llm.reset_prefix_cache(reset_connector=True)
        assert self.store.wait_ready(READY_S)
        engine, before = self.llm.llm_engine, self.streams()
        sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
        came_s, first_s, outputs = dict[str, float](), dict[str, float](), dict[str, Any]()
        began_s = time.perf_counter()
        while len(outputs) < len(prompts):
            while len(came_s) < len(prompts) and time.perf_counter() >= began_s + gap_s * len(came_s):
                name = str(len(came_s))
                engine.add_request(name, {"prompt_token_ids": prompts[len(came_s)]}, sampling)
                came_s[name] = began_s + gap_s * len(came_s)
            for output in engine.step():
                name = output.request_id.split("-")[0]
                first_s.setdefault(name, time.perf_counter() - came_s[name])
                if output.finished:
                    outputs[name] = output
        took_s = time.perf_counter() - began_s
        self.store.flush(READY_S)
        answers = [outputs[str(number)] for number in range(len(prompts))]
        return {
            "seconds": sum(first_s.values()) / len(first_s),
            "all": took_s,
            "tokens": [list(answer.outputs[0].token_ids) for answer in answers],
            "cached": sum(answer.num_cached_tokens for answer in answers),
            "streams": self.streams() - before,
        }

    def streams(self) -> int:
        return int(sum(tier.get("streams", 0) for tier in self.store.stats().values()))


def in_turns(engines: dict[str, EngineProcess], request: list[Any], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """What each engine has answered. Ends the run if a token is another one, or a hit is none."""
    taken: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    for turn, name in rotations([*engines], rounds + 1):
        answer = engines[name].call(request)
        if turn:  # the first measures the tiers
            taken[name].append(answer)
    answers = [answer for several in taken.values() for answer in several]
    refuse([answer for answer in answers if answer["tokens"] != answers[0]["tokens"] or not answer["cached"]])
    return taken


def refuse(wrong: list[dict[str, Any]]) -> None:
    if wrong:
        raise SystemExit(f"wrong: {wrong}")


def values(taken: dict[str, list[dict[str, Any]]], what: str) -> dict[str, list[float]]:
    return {name: [answer[what] for answer in several] for name, several in taken.items()}


def spreads(each: dict[str, list[float]]) -> dict[str, Any]:
    return {name: Spread.of(several)._asdict() for name, several in each.items()}


def ratio(each: dict[str, list[float]]) -> dict[str, float]:
    return Spread.of([one / other for one, other in zip(each["streamed"], each["whole"], strict=True)])._asdict()


def compare(engines: dict[str, EngineProcess], prompt: list[int], busy: int, rounds: int) -> dict[str, Any]:
    taken = in_turns(engines, ["hit", prompt, busy], rounds)
    refuse([a for name, several in taken.items() for a in several if a["streams"] != (name == "streamed")])
    seconds = values(taken, "seconds")
    return {
        "seconds": spreads(seconds),
        "ratio": ratio(seconds),
        "steps": {name: median(several) for name, several in values(taken, "steps").items()},
        "all": seconds,
    }


def compare_crowds(
    engines: dict[str, EngineProcess], prompts: list[list[int]], gap_s: float, rounds: int
) -> dict[str, Any]:
    taken = in_turns(engines, ["crowd", prompts, gap_s], rounds)
    refuse([answer for answer in taken["whole"] if answer["streams"]])
    found = {what: spreads(values(taken, what)) for what in ("seconds", "all", "streams", "cached")}
    ratios = {f"{what}_ratio": ratio(values(taken, what)) for what in ("seconds", "all")}
    return found | ratios


def run(given: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    draw = random.Random(7)
    prompt = [draw.randrange(1000, 40000) for _ in range(given.tokens)]
    speed, points, crowds, engines = scratch / "speed", [], list[dict[str, Any]](), dict[str, EngineProcess]()
    speed.write_text("0")
    try:
        for name, policy in ENGINES.items():
            file = {"type": "bench.slowed_file:SlowedFileConfig", "path": str(scratch / name), "speed": str(speed)}
            # A stream has at most a tenth of host memory.
            tiers = [{"type": "cpu", "capacity": "3GiB"}, file | {"capacity": "2GiB", "min_free": 0}]
            plan = json.dumps({"tiers": tiers, "policy": policy})
            engines[name] = EngineProcess("bench.streams", "engine", plan, log=given.out / f"streams-{name}.log")
        for engine in engines.values():
            engine.answer()
            engine.call(["fill", prompt])
        for megabytes_per_s in given.speeds:
            speed.write_text(str(megabytes_per_s))
            for busy in given.busy:
                point = {"mb_per_s": megabytes_per_s, "busy": busy} | compare(engines, prompt, busy, given.rounds)
                points.append(point)
                shown = ", ".join(f"{name} {each['median']:.3f} s" for name, each in point["seconds"].items())
                ratio = point["ratio"]
                print(
                    f"{megabytes_per_s or 'unlimited':>9} MB/s, {busy} busy: {shown}, "
                    f"ratio {ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f}), steps {point['steps']}",
                    flush=True,
                )
        if given.crowd:
            shared = [draw.randrange(1000, 40000) for _ in range(SYSTEM)]
            crowd = [shared + [draw.randrange(1000, 40000) for _ in range(DOCUMENT)] for _ in range(given.crowd)]
            for engine in engines.values():
                engine.call(["crowd", crowd, 0.0])
            for megabytes_per_s in given.speeds:
                speed.write_text(str(megabytes_per_s))
                for gap_ms in given.gaps:
                    point = compare_crowds(engines, crowd, gap_ms / 1000, given.rounds)
                    crowds.append({"mb_per_s": megabytes_per_s, "gap_ms": gap_ms} | point)
                    print(f"crowd of {given.crowd}: {json.dumps(crowds[-1])}", flush=True)
    finally:
        for engine in engines.values():
            engine.close()
    return {"tokens": given.tokens, "rounds": given.rounds, "points": points, "crowds": crowds, "machine": machine()}


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=7000, help="of the prompt")
    parser.add_argument("--speeds", type=numbers, default=[0, 2000], help="MB/s; 0: not limited")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--busy", type=numbers, default=[0, 2], help="requests that decode meanwhile")
    parser.add_argument("--crowd", type=int, default=0, help="requests that share a system prompt; 0: none")
    parser.add_argument("--gaps", type=numbers, default=[0, 30], help="ms from one of the crowd to the next")
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    given = parser.parse_args()
    given.out = given.out.resolve()  # a tier wants an absolute path
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.out) as scratch:
        found = run(given, Path(scratch))
    (given.out / "streams.json").write_text(json.dumps(found, indent=1))
    print(f"written: {given.out / 'streams.json'}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["engine"]:
        stream = claim_stdout()
        child = Engine(json.loads(sys.argv[2]))
        answer_requests(stream, "ready", child.carry_out)
    else:
        main()
