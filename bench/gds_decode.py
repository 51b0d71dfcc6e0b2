"""A load like decoding on a GPU, in a process of its own: started by `bench.gds`. Latency of steps of small kernels.

A step is eight products of a batch of 32 with a square matrix and what a layer does in between, waited for. A request
is the seconds to run for; the answer has the median and the 99th percentile in milliseconds.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

from bench.engine_process import answer_requests, claim_stdout

WIDTH, LAYERS, BATCH = 4096, 8, 32


def prepare(gpu: int) -> Any:
    """The function that runs one step. RuntimeError or ImportError without torch for GPUs."""
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("torch finds no CUDA device")
    device = f"cuda:{gpu}"
    weights = [torch.randn((WIDTH, WIDTH), device=device, dtype=torch.bfloat16) for _ in range(LAYERS)]
    batch = torch.randn((BATCH, WIDTH), device=device, dtype=torch.bfloat16)

    def step() -> None:
        state = batch
        for weight in weights:
            state = torch.tanh(state @ weight)
        torch.cuda.synchronize(device)

    for _ in range(20):
        step()
    return step


def main() -> None:
    answers = claim_stdout()
    try:
        step = prepare(int(sys.argv[1]))
    except (ImportError, RuntimeError) as error:
        print(json.dumps({"unavailable": str(error).splitlines()[0]}), file=answers, flush=True)
        return

    def run(seconds: float) -> dict[str, float]:
        times, end = [], time.perf_counter() + seconds
        while (start := time.perf_counter()) < end:
            step()
            times.append(time.perf_counter() - start)
        p50, p99 = np.percentile(times, (50, 99)) * 1e3
        return {"p50_ms": float(p50), "p99_ms": float(p99), "steps": len(times)}

    answer_requests(answers, {"label": "decode-like steps"}, run)


if __name__ == "__main__":
    main()
