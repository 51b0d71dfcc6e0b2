"""What storing takes from a decode step: a graph of about 5 ms, replayed, and beside each step the store of 16 MiB.

    nothing   the graph alone
    python    what the step's thread does for a store, and a transfer of no blocks
    copies    the same number of transfers as `both`, queued ahead: the native thread submits them, no Python runs
    both      a store in each step

Steps a second as a share of `nothing`, medians of rounds in which all alternate.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from nixl_tiers.swap import stream
from nixl_tiers.swap.cuda import CudaSwap
from tools.gpu_day.here import Here

STEP_S = 5e-3
STAGE_BLOCKS = (8, 16, 32, 64)
ROUNDS = 9


def run(here: Here) -> None:
    gpu, steps = here.gpu, here.size(100, 3)
    blocks = here.blocks((512, 64 << 10, 32), (16, 512, 2))
    each = here.size(8, 2)
    graph = gpu.chain(STEP_S)
    here.left_out("times: a replay of the graph does next to nothing")
    swaps: dict[int, CudaSwap] = {}
    for count in STAGE_BLOCKS:
        vars(stream)["STAGE_BLOCKS"] = count
        swaps[count] = blocks.swap("staged")
        here.tell(f"bytes_with_{count}", blocks.round_trip(swaps[count]))
    ids, places = blocks.ids[:each], np.arange(each)

    def loop(per_step: Callable[[], Any]) -> float:
        """Steps a second."""
        pending: list[Any] = []
        begin_s = time.perf_counter()
        for _ in range(steps):
            graph.replay()
            if transfer := per_step():
                pending.append(transfer)
            gpu.after().synchronize()
            pending = [one for one in pending if not one.done()]
        return steps / (time.perf_counter() - begin_s)

    def python(swap: CudaSwap) -> float:
        def submit() -> Any:
            swap.plan.pairs(0, ids, places)
            return swap.store(0, ids[:0], places[:0])

        return loop(submit)

    def copies(swap: CudaSwap) -> float:
        pending = [swap.store(0, ids, places) for _ in range(steps)]
        found = loop(lambda: None)
        for transfer in pending:
            transfer.wait()
        return found

    ways: dict[str, Callable[[], float]] = {
        "nothing": lambda: loop(lambda: None),
        "python": lambda: python(swaps[STAGE_BLOCKS[-1]]),
    }
    for count, swap in swaps.items():
        ways[f"copies_{count}"] = lambda swap=swap: copies(swap)  # type: ignore[misc]
        ways[f"both_{count}"] = lambda swap=swap: loop(lambda: swap.store(0, ids, places))  # type: ignore[misc]
    loop(lambda: None)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(here.size(ROUNDS, 1)):
        if here.left_s < 15:
            break
        for name, way in ways.items():
            rates[name].append(way())
            swaps[STAGE_BLOCKS[0]].drain()
        shares = {
            name: round(statistics.median(a / b for a, b in zip(found, rates["nothing"], strict=True)), 4)
            for name, found in rates.items()
        }
        here.tell("rounds", len(rates["nothing"]))
        here.tell("step_ms", 1e3 / statistics.median(rates["nothing"]))
        here.tell("share_of_steps", shares)
    here.tell("stored_mib_a_step", each * blocks.block_bytes / (1 << 20))
