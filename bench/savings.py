"""Do the seconds that `nixl-tiers report` says agree with an experiment? Real vLLM, the same requests with tiers and
without.

    python -m bench.savings [--requests 50] [--concurrency 1] [--tokens 1280] [--model DIR] [--out DIR]

Two engines take turns, request by request, and only one is busy at a time: `off`, without a connector, and `on`, with
NixlTiersConnector, a cpu tier that holds a third of the documents, and a file tier. Both are first asked each document,
from which `on` learns how fast it computes. Then come the requests, a random document each; before each of them vLLM's
own prefix cache is emptied, so that `off` computes and `on` loads. After every second one both are asked a document
that is new, as a service is, so that `on` goes on learning as the machine becomes slower or faster. These are no part
of the comparison; both compute them, so their sums show how far two equal engines are apart on this machine.

Saved by experiment: the sum over requests of the time to first token, `off` less `on`. By the report: the counters of
`on` since the documents were stored, first tokens earlier less what was lost. With one request at a time they must
agree within 15 %, or the exit code is 1. With more at a time both are stated: in a queue each request also gains what
those before it saved, which the report does not count.

Engine core and worker are in one process, without server and tokenizer. On two cores 50 requests take about 5 minutes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from bench.engine_process import EngineProcess, answer_requests, claim_stdout
from bench.first_token_engine import FirstTokenEngine
from bench.machine import machine
from demo import vllm_cpu
from nixl_tiers.base.kv_bytes import kv_of

AGREE: Final = 0.15
DOCUMENTS: Final = 10
READY_S: Final = 120.0


class Engine(FirstTokenEngine):
    """In the child."""

    VERBS = ("ask", "numbers")

    def __init__(self, model: Path, tiers: list[dict[str, Any]]) -> None:
        transfer = vllm_cpu.recomputing_transfer(tiers, prefill_tokens_per_s=None) if tiers else None
        super().__init__(transfer, 4096, READY_S, model)

    def numbers(self) -> dict[str, dict[str, float]]:
        return {} if self.store is None else dict(self.store.stats())


def saved_s(numbers: dict[str, dict[str, float]]) -> float:
    return sum(t["saved_first_token_s"] - t["lost_slower_s"] - t["lost_vain_s"] for t in numbers.values())


def compare(model: Path, requests: int, concurrency: int, tokens: int, scratch: Path) -> dict[str, Any]:
    draw = random.Random(7)
    about = json.loads((model / "config.json").read_text())

    def new_document(place: int) -> list[int]:
        return [draw.randrange(1, about["vocab_size"]) for _ in range(tokens * (2 + place % 4) // 5)]

    documents = [new_document(place) for place in range(DOCUMENTS)]
    host = sum(map(len, documents)) * kv_of(about).token_bytes // 3
    tiers = [
        {"type": "cpu", "capacity": host},
        {"type": "file", "path": str(scratch / "tier"), "capacity": "4GiB", "min_free": 0},
    ]
    arms = {
        "off": EngineProcess("bench.savings", "engine", str(model), "[]", log=scratch / "off.log"),
        "on": EngineProcess("bench.savings", "engine", str(model), json.dumps(tiers), log=scratch / "on.log"),
    }
    try:
        for engine in arms.values():
            engine.answer()
        for document in documents:
            for engine in arms.values():
                engine.call(["ask", [document]])
        before = arms["on"].call(["numbers"])
        spent: dict[str, list[float]] = {"off": [], "on": []}
        computed: dict[str, list[float]] = {"off": [], "on": []}
        for turn in range(-(-requests // concurrency)):
            asked = [draw.choice(documents) for _ in range(concurrency)]
            order = ("off", "on") if turn % 2 else ("on", "off")
            for name in order:
                spent[name] += arms[name].call(["ask", asked])
            if turn % 2:
                new = new_document(turn // 2)
                for name in order if turn % 4 == 1 else order[::-1]:
                    computed[name] += arms[name].call(["ask", [new]])
            if turn % 10 == 9:
                so_far = saved_s(arms["on"].call(["numbers"])) - saved_s(before)
                show(turn + 1, spent, computed, so_far)
        after = arms["on"].call(["numbers"])
    finally:
        for engine in arms.values():
            engine.close()
    return {
        "requests": len(spent["on"]),
        "concurrency": concurrency,
        "off_s": sum(spent["off"]),
        "on_s": sum(spent["on"]),
        "experiment_s": sum(spent["off"]) - sum(spent["on"]),
        "report_s": saved_s(after) - saved_s(before),
        "prefill_s": sum(after[t]["saved_prefill_s"] - before[t]["saved_prefill_s"] for t in after),
        "lost_s": sum(after[t][k] - before[t][k] for t in after for k in ("lost_slower_s", "lost_vain_s")),
        "tokens": {tier: after[tier]["hit_tokens"] - before[tier]["hit_tokens"] for tier in after},
        "tokens_per_s": after["cpu"]["prefill_tokens_per_s"],
        "machine": machine(),
        "spent": spent,
        "computed": computed,
    }


def show(turns: int, spent: dict[str, list[float]], computed: dict[str, list[float]], report_s: float) -> None:
    """Something to go by where there is no time for all of it."""
    sums = ", ".join(f"{name} {sum(spent[name]):.1f} and new {sum(computed[name]):.1f} s" for name in spent)
    print(f"after {turns} turns: {sums}; by the report {report_s:.1f} s saved", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1280, help="of the longest document")
    parser.add_argument("--model", type=Path, help="a Llama's folder; by default the tests' small model")
    parser.add_argument("--out", type=Path, default=Path("bench-out"))
    given = parser.parse_args()
    given.out = given.out.resolve()  # a tier wants an absolute path
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.out) as scratch:
        model = given.model or vllm_cpu.build_model(vllm_cpu.cache_directory() / "model")
        found = compare(model, given.requests, given.concurrency, given.tokens, Path(scratch))
    (given.out / f"savings-{given.concurrency}.json").write_text(json.dumps(found, indent=1))
    off = found["report_s"] / found["experiment_s"] - 1
    print(
        f"{found['requests']} requests, {found['concurrency']} at a time, seconds to first tokens: "
        f"{found['off_s']:.1f} without tiers, {found['on_s']:.1f} with\n"
        f"saved: {found['experiment_s']:.1f} s by experiment, {found['report_s']:.1f} s by the report ({off:+.1%}), "
        f"{found['prefill_s']:.1f} s of prefill; {found['lost_s']:.1f} s lost\n"
        f"tokens loaded: {found['tokens']}; the engine computes {found['tokens_per_s']:.0f} tokens/s\n"
        f"documents that were new: {sum(found['computed']['off']):.1f} s without tiers, "
        f"{sum(found['computed']['on']):.1f} with; load average {found['machine']['load_average']:.1f}"
    )
    return int(given.concurrency == 1 and abs(off) > AGREE)


if __name__ == "__main__":
    if sys.argv[1:2] == ["engine"]:
        stream = claim_stdout()
        child = Engine(Path(sys.argv[2]), json.loads(sys.argv[3]))
        answer_requests(stream, "ready", child.carry_out)
    else:
        sys.exit(main())
