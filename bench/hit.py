"""What a hit in host memory costs the scheduler's thread, beside vLLM's own CPU offloading: us of thread CPU time.

    python -m bench.hit [REPEATS] [--keys 437] [--chunk 16] [--cold] [--profile cpu]

vLLM's own scheduler side of the offloading connector, driven as an engine drives it: a request whose KEYS chunks, which
others have used last, are in host memory looks them up, loads them, computes its last token and ends, while another
request decodes. The load ends in the second step. Sides take turns: `vllm` (its CPUOffloadingManager), `cpu` (a cpu
tier), `cpu+2` (two storage tiers below that hold the same rows, without movers). Engine and copies are left out, and
the numbers that are reported four times a second.

The least of all repeats for each call, since a busy machine only adds to that, and the median of their sums. `--cold`:
before each schedule, and each output, the processor's caches are emptied (`bench/cold.py`). `--profile SIDE`: instead,
where its time goes.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_offload.base import OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from bench.cold import Cold, warm
from bench.stores import TOKENS, Connector, new_request, reported, scheduled
from nixl_tiers.base.chunk import Geometry, Namespace
from nixl_tiers.config import schema
from nixl_tiers.core.listing import take_all
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.vllm.connector import NixlTiersConnector
from nixl_tiers.vllm.manager import NixlTiersManager
from tests.support.core import all_good
from tests.support.vllm_lookups import hashes

PROMPTS: Final = 50
STORAGE: Final = {"cpu": 0, "cpu+2": 2}
SIDES: Final = ("vllm", *STORAGE)
CALLS: Final = ("arrive", "look up", "alloc", "sources", "build", "output", "stats", "events", "finish")


class Side:
    """A connector whose manager holds all chunks of `prompts`, and a request that decodes."""

    def __init__(self, name: str, prompts: list[list[bytes]], blocks_per_chunk: int) -> None:
        self._prompts = prompts
        chunks = slice(blocks_per_chunk - 1, None, blocks_per_chunk)
        chains = [[make_offload_key(each, 0) for each in prompt[chunks]] for prompt in prompts]
        self._region: HostRegion | None = None
        if name == "vllm":
            self.connector = Connector(_vllm(chains), OffloadingConnector, blocks_per_chunk).connector
        else:
            manager, self._region = _tiers(chains, STORAGE[name], blocks_per_chunk * TOKENS)
            self.connector = Connector(manager, NixlTiersConnector, blocks_per_chunk).connector
            manager.times_are_published(8192)
            manager.windows_are_known({0: None})
        self._hits = 0
        self.took_us: dict[str, float] = {}
        self._decodes: list[Any] = []
        first = self._arrive("decodes", [])
        first.blocks = [1]
        self._step(warm, (), new=[first])
        self._decodes.append(first)

    def hit(self, before: Callable[[], object]) -> dict[str, float]:
        """us of each of CALLS for one request."""
        self.took_us = dict.fromkeys(CALLS, 0.0)
        connector, prompt = self.connector, self._prompts[self._hits % PROMPTS]
        self._hits += 1
        before()
        request = self._arrive(f"r{self._hits}", prompt)
        request.blocks = list(range(2, len(prompt) + 3))
        blocks = KVCacheBlocks(([KVCacheBlock(block) for block in request.blocks[:-1]],))
        before()
        with self._timed("look up"):
            tokens, _ = connector.get_num_new_matched_tokens(request, 0)
        assert tokens == len(prompt) * TOKENS
        with self._timed("alloc"):
            connector.update_state_after_alloc(request, blocks, tokens)
        with self._timed("sources"):
            connector.get_external_cache_hit_sources(request, tokens)
        loads = self._step(before, ()).load_jobs
        before()
        self._step(before, loads)
        request.num_computed_tokens = tokens
        before()
        self._step(before, (), new=[request])
        request.status = "finished"
        before()
        with self._timed("finish"):
            connector.request_finished(request, [])
        self._step(before, (), ended=[request.request_id])
        return self.took_us

    def _arrive(self, name: str, prompt: list[bytes]) -> Any:
        request = new_request(name, prompt)
        with self._timed("arrive"):
            self.connector.on_new_request(request)
        return request

    def _step(
        self, before: Callable[[], object], jobs: Sequence[int], new: Sequence[Any] = (), ended: Sequence[str] = ()
    ) -> Any:
        """The end of a step's schedule, and its output: these jobs have ended."""
        connector = self.connector
        output, report = scheduled(list(new), list(self._decodes), list(ended)), reported(jobs)
        with self._timed("build"):
            meta = connector.build_connector_meta(output)
        if self._region is not None:
            self._region.publish_step(meta.step, 0.01)
        before()
        with self._timed("output"):
            connector.update_connector_output(report)
        with self._timed("stats"):
            connector.get_kv_connector_stats()
        with self._timed("events"):
            list(connector.take_events())
        return meta

    @contextmanager
    def _timed(self, call: str) -> Iterator[None]:
        began_ns = time.thread_time_ns()
        yield
        self.took_us[call] = self.took_us.get(call, 0.0) + (time.thread_time_ns() - began_ns) / 1000


def _vllm(chains: list[list[OffloadKey]]) -> CPUOffloadingManager:
    manager = CPUOffloadingManager(sum(map(len, chains)))
    for number, chain in enumerate(chains):
        context = ReqContext(f"put-{number}")
        manager.prepare_store(chain, context)
        manager.complete_store(chain, context)
    return manager


def _tiers(chains: list[list[OffloadKey]], storage: int, chunk_tokens: int) -> tuple[NixlTiersManager, HostRegion]:
    geometry, rows = Geometry(cells=1, cell_payload=4096), sum(map(len, chains))
    capacity = 2 * rows * geometry.row_bytes
    tiers = [{"type": "cpu", "capacity": rows * geometry.row_bytes}] + [
        {"type": "file", "path": f"/nonexistent/nixl-tiers-{number}", "capacity": capacity} for number in range(storage)
    ]
    config = schema.load({"prefill_tokens_per_s": 10_000, "tiers": tiers})
    region = HostRegion.create(geometry, rows)
    coordinator = Coordinator(config, Namespace.of({"bench": 1}), region)
    core: Any = coordinator._core
    for number, chain in enumerate(chains):
        core.prepare_store(f"put-{number}", chain)
        core.complete_store(chain, all_good)
        core.finish(f"put-{number}")
    for tier in range(storage):
        take_all(core.events.opened(tier, 2 * rows))
        listed = enumerate(key for chain in chains for key in chain)
        core.events.listed(tier, [(slot, key, 0) for slot, key in listed], last=True)
    manager = NixlTiersManager(
        coordinator, config, (0,), None, pause_s=0.0, chunk_tokens=(chunk_tokens,), report_s=float("inf")
    )
    return manager, region


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("repeats", nargs="?", type=int, default=200)
    parser.add_argument("--keys", type=int, default=437)
    parser.add_argument("--chunk", type=int, default=16, help=f"tokens of a chunk, in blocks of {TOKENS}")
    parser.add_argument("--cold", action="store_true", help="empty the processor's caches before each call")
    parser.add_argument("--profile", choices=SIDES)
    given = parser.parse_args()
    blocks_per_chunk = given.chunk // TOKENS
    prompts = [hashes(given.keys * blocks_per_chunk) for _ in range(PROMPTS)]
    names = [given.profile] if given.profile else SIDES
    sides = {name: Side(name, prompts, blocks_per_chunk) for name in names}
    before = Cold() if given.cold else warm
    for side in sides.values():
        for _ in range(PROMPTS):
            side.hit(warm)
    if given.profile:
        with cProfile.Profile() as profile:
            for _ in range(given.repeats):
                sides[given.profile].hit(before)
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)
        return
    took: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    for turn in range(given.repeats):
        for place in range(len(names)):  # who comes after whom makes a difference, too
            name = names[(turn + place) % len(names)]
            took[name].append(sides[name].hit(before))
    state = "emptied" if given.cold else "warm"
    print(f"us of {given.keys} keys of {given.chunk} tokens, the caches {state}; load {os.getloadavg()[0]:.1f}")
    print(f"{'':5} | " + " | ".join(f"{call:>7}" for call in CALLS) + " |     sum | median")
    for name, turns in took.items():
        each = [min(turn[call] for turn in turns) for call in CALLS]
        middle = median(sum(turn.values()) for turn in turns)
        print(f"{name:5} | " + " | ".join(f"{us:7.0f}" for us in each) + f" | {sum(each):7.0f} | {middle:6.0f}")


if __name__ == "__main__":
    main()
