"""A hit beside a running step: a load marked before a long step's kernels ends before them, with the right bytes; one
that is marked behind them does not (`bind_connector_metadata`; docs/internals/gpu.md, "Order")."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tools.gpu_day.here import Here

STEP_S = 0.2
PART_S = 5e-3  # of a step that is a chain of graphs
STRATEGIES = ("staged", "copy_engine")


def run(here: Here) -> None:
    gpu = here.gpu
    blocks = here.blocks((64, 64 << 10, 32), (16, 512, 2))
    here.left_out("a step that fills all of the GPU: the fake driver has a stream that is held")
    steps: dict[str, Callable[[], Any]] = {"kernel": lambda: gpu.busy(STEP_S)}
    if not here.rehearsed:
        graph = gpu.chain(PART_S)

        def chain() -> Any:
            for _ in range(round(STEP_S / PART_S)):
                graph.replay()
            return gpu.after()

        steps["chain"] = chain
    places = np.arange(blocks.count)
    gpu.busy(STEP_S / 10)  # calibrated before anything is ordered behind it
    gpu.cuda.synchronize()
    for strategy in STRATEGIES:
        swap = blocks.swap(strategy)
        here.tell(f"{strategy}_bytes", blocks.round_trip(swap))
        for name, step in steps.items():
            for order in ("before", "behind"):
                blocks.poison()
                gpu.cuda.synchronize()
                begin_s = time.perf_counter()
                if order == "before":
                    swap.mark_loads()
                event = step()
                if order == "behind":
                    swap.mark_loads()
                transfer = swap.load(0, blocks.ids, places)
                ends = _ends(begin_s, {"load": transfer.done, "step": event.query})
                swap.unmark_loads()
                good = (ends["load"] < ends["step"]) == (order == "before")
                found: dict[str, object] = {f"{what}_ms": round(end_s * 1e3, 2) for what, end_s in ends.items()}
                found |= {"as_wanted": good, "bytes": "right" if blocks.right() else "WRONG"}
                here.tell(f"{strategy}_marked_{order}_{name}", found)
        swap.close()


def _ends(begin_s: float, all_done: dict[str, Callable[[], bool]]) -> dict[str, float]:
    """When each has ended, in seconds from the beginning. A step that has ended is looked at first."""
    ends: dict[str, float] = {}
    while len(ends) < len(all_done):
        for name in sorted(all_done, reverse=True):
            if name not in ends and all_done[name]():
                ends[name] = time.perf_counter() - begin_s
        time.sleep(1e-4)
    return ends
