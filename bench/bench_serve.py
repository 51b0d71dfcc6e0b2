"""`vllm bench serve` against servers with tiers and without: errors, hit rates, throughput and times.

    python -m bench.bench_serve [--arms none tiers stock] [--prompts 48] [--prefixes 8] [--prefix-tokens 1024]
                                [--json FILE]

One server after another, each with a KV cache that is too small for all prefixes: `none` without a connector, `tiers`
with a cpu and a file tier and NixlTiersConnector, `stock` the same with vLLM's OffloadingConnector. vLLM's own load
generator asks for prompts that share `--prefixes` prefixes in a random order, four at a time. Each prefix has to be
computed once; `most` is the share of all prompt tokens that can be hit after that, if four requests never ask for a
new one at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from bench.machine import machine
from tests.support import vllm_cpu
from tests.support.vllm_server import VllmServer

ARMS: Final = ("none", "tiers", "stock")
SUFFIX_TOKENS: Final = 128
OUTPUT_TOKENS: Final = 16
AT_ONCE: Final = 4
SHOWN: Final = {
    "completed": "completed",
    "failed": "failed",
    "request_throughput": "requests/s",
    "mean_ttft_ms": "first token, ms",
    "p99_ttft_ms": "99th percentile",
    "mean_tpot_ms": "a token, ms",
}


def transfer(arm: str, folder: Path) -> dict[str, Any] | None:
    """The KVTransferConfig of an arm."""
    if arm == "none":
        return None
    tiers = [
        {"type": "cpu", "capacity": "512MiB"},
        {"type": "file", "path": str(folder / "kv"), "capacity": "2GiB", "min_free": 0},
    ]
    make = vllm_cpu.recomputing_transfer if arm == "tiers" else vllm_cpu.kv_transfer
    return make(tiers, prefill_tokens_per_s=None)


def run(arm: str, given: argparse.Namespace, folder: Path) -> dict[str, float]:
    """One server under load; what the load generator says, and the share of prompt tokens that were hits."""
    model = vllm_cpu.build_model(vllm_cpu.cache_directory() / "model")
    prompt = given.prefix_tokens + SUFFIX_TOKENS
    blocks = AT_ONCE * (-(-(prompt + OUTPUT_TOKENS) // vllm_cpu.BLOCK_TOKENS) + 1)
    options = ["--max-model-len", "2048", "--num-gpu-blocks-override", str(blocks), "--max-num-seqs", str(AT_ONCE)]
    if (config := transfer(arm, folder)) is not None:
        options += ["--kv-transfer-config", json.dumps(config)]
    result = folder / "result.json"
    with VllmServer(model, options, {}, folder / "server.log") as server:
        server.start(lambda: None)
        command = [sys.executable, "-m", "tests.support.vllm_cpu", "bench", "serve", "--backend", "openai"]
        command += ["--base-url", f"http://127.0.0.1:{server.port}", "--model", str(model), "--ignore-eos"]
        command += ["--dataset-name", "prefix_repetition", "--prefix-repetition-prefix-len", str(given.prefix_tokens)]
        command += ["--prefix-repetition-suffix-len", str(SUFFIX_TOKENS)]
        command += ["--prefix-repetition-num-prefixes", str(given.prefixes)]
        command += ["--prefix-repetition-output-len", str(OUTPUT_TOKENS), "--num-prompts", str(given.prompts)]
        command += ["--max-concurrency", str(AT_ONCE), "--seed", "1", "--disable-tqdm", "--save-result"]
        command += ["--result-dir", str(folder), "--result-filename", result.name]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ.copy())
        server.poke()
        page = server.metrics()
    found = {name: float(json.loads(result.read_text()).get(name) or 0) for name in SHOWN}
    asked = page.total("vllm:prefix_cache_queries_total")
    found["own hits, %"] = 100 * page.total("vllm:prefix_cache_hits_total") / asked
    found["hits of tiers, %"] = 100 * page.total("vllm:external_prefix_cache_hits_total") / asked
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--prefixes", type=int, default=8)
    parser.add_argument("--prefix-tokens", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: dict[str, dict[str, float]] = {}
    for arm in given.arms:
        with tempfile.TemporaryDirectory() as folder:
            found[arm] = run(arm, given, Path(folder))
        print(arm, {SHOWN.get(name, name): round(value, 2) for name, value in found[arm].items()}, flush=True)
    shared = (given.prompts - given.prefixes) * given.prefix_tokens
    most = 100 * shared / (given.prompts * (given.prefix_tokens + SUFFIX_TOKENS))
    print(f"most: {most:.1f} % of all prompt tokens")
    if given.json is not None:
        given.json.write_text(json.dumps({"machine": machine(), "most": most, "arms": found}, indent=1))


if __name__ == "__main__":
    main()
