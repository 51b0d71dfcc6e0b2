"""Long documents that are asked about again, in real vLLM, when neither its KV cache nor host memory holds them all.

    python -m bench.longdoc [--engines plain cpu file vllm-cpu vllm-fs] [--ways in-process own-process] [--rounds 7]
                            [--documents 48] [--quick] [--out bench-out/longdoc]

48 documents of 1500 tokens are asked about at once, and in each round again with another question (KV cache of
SmolLM2-135M: 35 MB a document; vLLM's own cache has room for 16 documents, host memory, 512 MiB, for 15):

- `plain`: vLLM's own prefix caching and nothing else, so nearly everything is computed anew;
- `cpu`, `file`, `s3`: nixl_tiers with host memory alone, with a file tier as well, with an S3 tier instead (SeaweedFS
  on this machine);
- `vllm-cpu`, `vllm-fs`, `vllm-obj`: vLLM's own CPUOffloadingSpec, and its TieringOffloadingSpec with an fs or obj tier.
  They refuse to run on a CPU and are patched for it (tests/support/vllm_spec_on_cpu.py); their copy is a memmove on one
  thread.

Each of them with scheduler and worker in the calling process (VLLM_ENABLE_V1_MULTIPROCESSING=0: an offline `LLM`,
where nothing yields to other threads between two steps), and with vLLM's own process for both. The engines of a way run
at the same time, each in a process of its own, and take turns in a rotating order; before the next one's turn an
engine's tiers have been written. Those without storage take part in the first two rounds only: each takes as long as
the first time. A time is from the first request to the last answer of 8 tokens. Medians with the lowest and highest
round; answers are not compared, as vLLM composes the steps of a batch differently each time, and bf16 rounds
differently in other shapes.

`--documents`: fewer or more, and host memory and vLLM's own cache with them. `--quick`: few short documents, a tiny
model and one round, which only shows that everything works. Needs vllm-cpu. Writes longdoc.json after each turn,
longdoc.png at the end, and the engines' logs to the directory; the file tiers are in a temporary directory there, so it
chooses the disk that is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final

from bench.engine_process import EngineProcess
from bench.longdoc_engine import FULL, KINDS, QUICK, WAYS, Plan, Workload
from bench.machine import file_system, machine
from bench.ttft import rotations
from demo import vllm_cpu
from nixl_tiers.memory.pages import transparent_setting
from tests.support.servers import S3Server, seaweedfs_server

DEFAULT_KINDS: Final = ("plain", "cpu", "file", "vllm-cpu", "vllm-fs")
ON_S3: Final = ("s3", "vllm-obj")
WITHOUT_STORAGE: Final = ("plain", "cpu", "vllm-cpu")
ROUNDS_WITHOUT_STORAGE: Final = 2
QUIET_S: Final = 1.0
SETTLE_S: Final = 300.0

Pass = dict[str, float]  # seconds and cached_tokens
Passes = dict[str, list[Pass]]  # by engine: the first time, then one a round


class Engine(EngineProcess):
    def __init__(self, plan: Plan, log: Path, stored: Callable[[], object]) -> None:
        """`stored`: a value that changes while something is being written to the engine's storage."""
        super().__init__("bench.longdoc_engine", json.dumps(asdict(plan)), log=log)
        self._ours, self._stored = plan.ours, stored

    def ask(self, question: int) -> Pass:
        found: Pass = self.call(["ask", question])
        self._settle()
        return found

    def _settle(self) -> None:
        """Until nothing is written any more. vLLM's own tiers do not say so."""
        self.call(["flush"])
        before, until = self._stored(), time.monotonic() + SETTLE_S
        while not self._ours:
            time.sleep(QUIET_S)
            if (now := self._stored()) == before or time.monotonic() > until:
                return
            before = now


def size_of(directory: Path) -> tuple[int, int]:
    """How many files there are below it, and how many bytes they take."""
    count = total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += (Path(folder) / name).stat().st_blocks * 512
            except FileNotFoundError:
                continue  # a temporary file
            count += 1
    return count, total


def objects_in(server: S3Server, bucket: str) -> int:
    pages = server.client().get_paginator("list_objects_v2").paginate(Bucket=bucket)
    return sum(page["KeyCount"] for page in pages)


def start(kind: str, way: str, options: argparse.Namespace, scratch: Path, server: S3Server | None) -> Engine:
    s3: dict[str, str] | None = None
    stored: Callable[[], object] = partial(size_of, scratch)
    if kind in ON_S3:
        assert server
        s3 = {"endpoint": server.endpoint, "bucket": server.make_bucket(f"longdoc-{kind}-{way}")}
        stored = partial(objects_in, server, s3["bucket"])
    plan = Plan(kind, way, options.quick, str(scratch), s3, options.documents)
    return Engine(plan, options.out / f"{kind}-{way}.log", stored)


def measure(
    way: str, options: argparse.Namespace, server: S3Server | None, passes: Passes, keep: Callable[[], object]
) -> None:
    """Fills `passes`, and calls `keep` after each turn."""
    kinds: list[str] = options.engines
    passes.update({kind: [] for kind in kinds})
    with ExitStack() as stack:
        engines = {}
        for kind in kinds:
            scratch = stack.enter_context(tempfile.TemporaryDirectory(dir=options.out, prefix=f"scratch-{kind}-"))
            engines[kind] = start(kind, way, options, Path(scratch), server)
            stack.callback(engines[kind].close)
        for engine in engines.values():
            engine.answer()
        for kind, engine in engines.items():
            passes[kind].append(engine.ask(0))
            keep()
        for turn, kind in rotations(kinds, options.rounds):
            if kind not in WITHOUT_STORAGE or turn < ROUNDS_WITHOUT_STORAGE:
                passes[kind].append(engines[kind].ask(turn + 1))
                keep()


def spread(passes: Sequence[Pass]) -> tuple[float, float, float]:
    """Median, lowest and highest seconds."""
    seconds = sorted(one["seconds"] for one in passes)
    return statistics.median(seconds), seconds[0], seconds[-1]


def print_table(way: str, passes: Passes, workload: Workload) -> None:
    print(f"\n| {way} | first time, s | again, s: median (lowest to highest) | rounds | of the tokens cached |")
    print("| --- | ---: | --- | ---: | ---: |")
    for kind, (first, *again) in passes.items():
        median, lowest, highest = spread(again)
        cached = statistics.median(one["cached_tokens"] for one in again) / workload.cacheable_tokens
        print(
            f"| {kind} | {first['seconds']:.2f} | {median:.2f} ({lowest:.2f} to {highest:.2f}) "
            f"| {len(again)} | {cached:.0%} |"
        )


def plot(results: dict[str, Passes], workload: Workload, path: Path) -> None:
    """A PNG: the median time to ask again, by engine and way."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    kinds = list(next(iter(results.values())))
    height = 0.8 / len(results)
    figure, axes = plt.subplots(figsize=(8, 0.5 * len(kinds) + 1.6), layout="constrained")
    for number, (way, passes) in enumerate(results.items()):
        spreads = [spread(passes[kind][1:]) for kind in kinds]
        errors = list(zip(*[(median - low, high - median) for median, low, high in spreads], strict=True))
        places = [place + (number - (len(results) - 1) / 2) * height for place in range(len(kinds))]
        bars = axes.barh(places, [median for median, _, _ in spreads], height, xerr=errors, label=way, capsize=2)
        axes.bar_label(bars, fmt="%.1f s", padding=6, fontsize="small")
    axes.set_yticks(range(len(kinds)), kinds)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(f"seconds to ask {workload.documents} documents of {workload.tokens} tokens again")
    axes.legend(fontsize="small")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", choices=KINDS, nargs="+", default=list(DEFAULT_KINDS))
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=list(WAYS))
    parser.add_argument("--rounds", type=int, help="default: 7; with --quick: 1")
    parser.add_argument("--documents", type=int)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("bench-out/longdoc"))
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.quick else 7)
    options.out = out = options.out.resolve()
    workload = (QUICK if options.quick else FULL).of(options.documents)
    out.mkdir(parents=True, exist_ok=True)
    if workload.real_model:
        vllm_cpu.build_model(vllm_cpu.cache_directory() / "model")  # once, and not by each engine
    about = {
        **machine(),
        "file_system": file_system(out),
        "huge_pages_of_shared_memory": transparent_setting() or "unknown",
        "workload": asdict(workload),
    }
    results: dict[str, Passes] = {}

    def keep() -> None:
        (out / "longdoc.json").write_text(json.dumps({"machine": about, "passes": results}, indent=1))

    with ExitStack() as stack:
        server: S3Server | None = None
        if set(ON_S3).intersection(options.engines):
            server = stack.enter_context(seaweedfs_server())
            os.environ.update(server.env)
        for way in options.ways:
            results[way] = {}
            measure(way, options, server, results[way], keep)
            print_table(way, results[way], workload)
    plot(results, workload, out / "longdoc.png")
    print(f"\n{about}\nwritten to {out}/longdoc.json and longdoc.png")


if __name__ == "__main__":
    main()
