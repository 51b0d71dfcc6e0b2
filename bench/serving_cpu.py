"""Who spends the processor time that storing costs in real vLLM: engines with and without a connector, by thread.

    python -m bench.serving_cpu [--rounds 7] [--prompts 8] [--tokens 600] [--arms none vllm-cpu cpu file] [--json FILE]

Arms may be named twice, to see how much engines of the same kind differ.

Engines as those of bench.serving, each in a process of its own, take turns with prompts that nobody has seen before.

- none: without a connector
- vllm-cpu: vLLM's own CPUOffloadingSpec, patched to run on a CPU (bench/vllm_spec_on_cpu.py)
- cpu: our cpu tier; file: cpu and file tier

The time that the scheduler of Linux has charged to each thread (/proc/PID/task/TID/schedstat) is read before a turn, at
its last token, and when `--settle` seconds have passed, so that it shows what is done beside the engine and what after
it. All threads of vLLM's are one: those of OpenMP spin while they wait for each other, so they pay for whatever takes a
core from one of them. Where other work runs, only the rows of our own threads mean something.

The table shows the median of the rounds, in ms of processor time per GB stored.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.engine_process import EngineProcess, answer_requests, claim_stdout
from bench.machine import machine
from bench.serving import prompts_of
from tests.support import vllm_cpu

ARMS = ("none", "vllm-cpu", "cpu", "file")
KV_BYTES = 46_080  # of a token of SmolLM2-135M in float32
OUTPUT_TOKENS = 8

Charged = Counter[str]  # thread -> ms


class Engine(EngineProcess):
    def __init__(self, arm: str, path: str, tokens: int) -> None:
        arguments = ("--child", arm, path, "--tokens", str(tokens))
        super().__init__("bench.serving_cpu", *arguments)
        self.pid: int = self.answer()

    def charged(self) -> Charged:
        """Milliseconds of processor time by thread, of its process and those that it has started."""
        names: dict[str, str] = self.call("threads")
        total: Charged = Counter()
        for task in tasks(self.pid):
            total[f"engine: {names.get(task.name, 'vLLM')}"] += milliseconds(task)
        for mover in children(self.pid):
            for number, task in enumerate(tasks(mover)):
                comm = (task / "comm").read_text().strip()
                total["mover: loop" if task.name == str(mover) else f"mover: {number} {comm}"] += milliseconds(task)
        return total


def tasks(pid: int) -> list[Path]:
    return sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda task: int(task.name))


def children(pid: int) -> list[int]:
    return [int(word) for task in tasks(pid) for word in (task / "children").read_text().split()]


def milliseconds(task: Path) -> float:
    try:
        return int((task / "schedstat").read_text().split()[0]) / 1e6
    except OSError:  # it has ended
        return 0.0


def kernel_threads() -> Charged:
    """Those that write files back, for whoever."""
    total: Charged = Counter()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            comm = (process / "comm").read_text().strip()
        except OSError:
            continue
        if comm.startswith(("kworker", "jbd2", "kswapd", "ksoftirqd")):
            total[f"kernel: {comm.split('/')[0]}"] += milliseconds(process)
    return total


def connector(arm: str, path: str) -> dict[str, Any] | None:
    host = {"type": "cpu", "capacity": "1GiB"}
    if arm == "none":
        return None
    if arm == "vllm-cpu":
        extra = {
            "spec_name": "CPUOffloadingSpecOnCPU",
            "spec_module_path": "bench.vllm_spec_on_cpu",
            "cpu_bytes_to_use": 1 << 30,
        }
        return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    tiers = [host, {"type": "file", "path": path, "capacity": "4GiB", "min_free": 0}]
    return vllm_cpu.kv_transfer(tiers[:1] if arm == "cpu" else tiers)


def child(arm: str, path: str, tokens: int) -> None:
    answers = claim_stdout()
    from vllm import SamplingParams

    llm = vllm_cpu.in_process_llm(
        vllm_cpu.build_model(vllm_cpu.cache_directory() / "model"),
        connector(arm, path),
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=tokens + 256,
    )

    def handle(request: Any) -> Any:
        if request == "threads":
            return {str(thread.native_id): thread.name for thread in threading.enumerate()}
        sampling = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        llm.generate([{"prompt_token_ids": prompt} for prompt in request], sampling, use_tqdm=False)
        return time.perf_counter() - began

    answer_requests(answers, os.getpid(), handle)
    llm.llm_engine.engine_core.shutdown()


def turn(engine: Engine, prompts: list[list[int]], settle_s: float) -> dict[str, Any]:
    before, kernel = engine.charged(), kernel_threads()
    seconds = engine.call(prompts)
    beside, kernel_beside = engine.charged(), kernel_threads()
    time.sleep(settle_s)
    after, kernel_after = engine.charged(), kernel_threads()
    beside.update(kernel_beside)
    after.update(kernel_after)
    before.update(kernel)
    return {
        "seconds": seconds,
        "beside": {name: beside[name] - before[name] for name in beside},
        "after": {name: after[name] - beside[name] for name in after},
    }


def show(rounds: Sequence[Mapping[str, Any]], gigabytes: float) -> None:
    for arm in rounds[0]:
        turns = [each[arm] for each in rounds]
        ratios = [each[arm]["seconds"] / each[next(iter(each))]["seconds"] for each in rounds]
        seconds = statistics.median(each["seconds"] for each in turns)
        print(
            f"{arm}: {seconds:.2f} s, {statistics.median(ratios):.3f} of the first; ms a GB: beside the engine, after"
        )
        names = sorted({name for each in turns for name in each["beside"]})
        for name in names:
            beside, after = (
                statistics.median(each[when].get(name, 0.0) for each in turns) / gigabytes
                for when in ("beside", "after")
            )
            if beside + after >= 1:
                print(f"  {name:45s} {beside:9.0f} {after:9.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--settle", type=float, default=1.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child, options.tokens)
        return
    print(machine())
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        names = [f"{arm} {options.arms[:number].count(arm) + 1}" for number, arm in enumerate(options.arms)]
        engines = {name: Engine(name.split()[0], f"{place}/{name}", options.tokens) for name in names}
        try:
            for number in range(options.rounds + 1):
                prompts = prompts_of(number, options.prompts, options.tokens)
                order = sorted(engines, key=lambda name: (names.index(name) + number) % len(engines))
                found = {name: turn(engines[name], prompts, options.settle) for name in order}
                if number:  # the first is a warm-up
                    rounds.append({name: found[name] for name in names})
                if options.json:
                    options.json.write_text(json.dumps(rounds, indent=1))
        finally:
            for engine in engines.values():
                engine.close()
    whole_tokens = (options.tokens + OUTPUT_TOKENS - 1) // vllm_cpu.BLOCK_TOKENS * vllm_cpu.BLOCK_TOKENS
    show(rounds, options.prompts * whole_tokens * KV_BYTES / 1e9)
    print(f"load average {os.getloadavg()[0]:.1f} at the end")


if __name__ == "__main__":
    main()
