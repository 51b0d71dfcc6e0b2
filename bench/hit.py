"""What a hit in host memory costs the scheduler's thread, call by call, in us of thread CPU time.

    python -m bench.hit [REPEATS] [--keys 437] [--cold]

A manager over host memory and two storage tiers that hold the same rows, without movers. In each repeat a new request
looks up a chain of KEYS chunks that others have used last, as vLLM's own scheduler does, loads it and ends. `--cold`:
before each call the processor's caches are emptied (`bench/cold.py`). The least of all repeats, since a busy machine
only adds to that, and the median.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any, Final

from vllm.v1.kv_offload.base import make_offload_key

from bench.cold import Cold, warm
from bench.lookups import STEP, VllmLookups, hashes
from nixl_tiers.base.chunk import Geometry, Namespace
from nixl_tiers.config import schema
from nixl_tiers.core.listing import take_all
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.vllm.manager import NixlTiersManager

PROMPTS: Final = 50
CALLS: Final = ("look up", "prepare_load", "source", "complete_load", "own hits", "end_step")


class Bench:
    def __init__(self, keys: int) -> None:
        geometry, rows = Geometry(cells=1, cell_payload=4096), keys * PROMPTS
        storage = [
            {"type": "file", "path": f"/nonexistent/nixl-tiers-{number}", "capacity": 2 * rows * geometry.row_bytes}
            for number in range(2)
        ]
        tiers = [{"type": "cpu", "capacity": rows * geometry.row_bytes}, *storage]
        config = schema.load({"prefill_tokens_per_s": 10_000, "tiers": tiers})
        coordinator = Coordinator(config, Namespace.of({"bench": 1}), HostRegion.create(geometry, rows))
        self.core: Any = coordinator._core
        self.prompts = [hashes(keys) for _ in range(PROMPTS)]
        for number, prompt in enumerate(self.prompts):
            chain = [make_offload_key(each, 0) for each in prompt]
            self.core.copies.prepare_store(chain, f"put-{number}")
            self.core.copies.complete_store(self.core.copies.rows_being_filled(chain), ())
            self.core.finish_request(f"put-{number}")
        for tier in range(len(storage)):
            take_all(self.core.events.opened(tier, 2 * rows))
            listed = [make_offload_key(each, 0) for prompt in self.prompts for each in prompt]
            self.core.events.listed(tier, [(slot, key, 0) for slot, key in enumerate(listed)], last=True)
        self.manager = NixlTiersManager(coordinator, config, (0,), None, pause_s=0.0, chunk_tokens=(16,))
        self.vllm = VllmLookups(self.manager)
        self._names = 0

    def turn(self, before: Callable[[], object]) -> list[float]:
        """us of each of CALLS for one request."""
        self._names += 1
        state = self.vllm.request(f"r{self._names}", self.prompts[self._names % PROMPTS])
        context, keys = state.req_context, state.group_states[0].offload_keys
        core = self.core

        def own_hits() -> None:
            """As if vLLM had them in its own cache: what the supervisor's thread does later."""
            core.engine_hits.add(keys, "other")
            core.turn(0.0, 0.0)

        calls: tuple[Callable[[], object], ...] = (
            lambda: self.vllm.look_up(state),
            lambda: self.manager.prepare_load(keys, context),
            lambda: [self.manager.get_load_source(key, context) for key in keys],
            lambda: self.manager.complete_load(set(keys), context),
            own_hits,
            lambda: self.manager.on_schedule_end(STEP),
        )
        took = []
        for call in calls:
            before()
            began = time.thread_time_ns()
            call()
            took.append((time.thread_time_ns() - began) / 1000)
        self.manager.on_request_finished(context)
        core.finish_request("other")
        return took


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("repeats", nargs="?", type=int, default=200)
    parser.add_argument("--keys", type=int, default=437)
    parser.add_argument("--cold", action="store_true", help="empty the processor's caches before each call")
    given = parser.parse_args()
    bench, before = Bench(given.keys), Cold() if given.cold else warm
    turns = [bench.turn(before) for _ in range(given.repeats)]
    print(f"us, least and median, of {given.keys} keys; load {os.getloadavg()[0]:.1f}")
    for call, took in zip(CALLS, zip(*turns, strict=True), strict=True):
        print(f"{call:13} | {min(took):7.0f} | {median(took):7.0f}")


if __name__ == "__main__":
    main()
