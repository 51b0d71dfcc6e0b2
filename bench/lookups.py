"""What look-ups cost the scheduler's thread, through vLLM's own look-up function, in us of thread CPU time.

    python bench/lookups.py [REPEATS]

A manager over a host tier and a file tier with a million cold rows, without movers, that knows the speed of prefill. By
length of the prompt: a request's first look-up, per key, for a chain half of whose chunks are in host memory and half
cold in the file tier, for one that is all in host memory, and for one that is nowhere; and a later step of the first
while it waits, per request. Of the first and the last also what vLLM itself takes, with a manager that answers from a
dict. The least of all repeats, since a busy machine only adds to that, and the median.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from types import SimpleNamespace
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as offloading
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext, make_offload_key

from nixl_tiers.base.chunk import Geometry, Namespace
from nixl_tiers.config import schema
from nixl_tiers.core.listing import take_all
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.vllm.manager import NixlTiersManager

TOKENS: Final = 16
COLD_ROWS: Final = 1_000_000
HOST_ROWS: Final = 65_536
CHUNKS: Final = (32, 128, 437, 2000)
STEP: Final = ScheduleEndContext((), ())


class VllmLookups:
    """vLLM's look-ups over a manager: its scheduler's side of the connector without an engine. `windows`: of each KV
    group, in chunks; None is full attention."""

    def __init__(self, manager: Any, windows: Sequence[int | None] = (None,)) -> None:
        groups = tuple(
            SimpleNamespace(
                group_idx=number,
                tokens_per_chunk=TOKENS,
                hashes_per_chunk=1,
                sliding_window_size_in_chunks=window,
                is_eagle_group=False,
                load_window_size_in_chunks=lambda _tokens, window=window: window,
            )
            for number, window in enumerate(windows)
        )
        side = self._side = object.__new__(offloading.OffloadingConnectorScheduler)
        side.config = SimpleNamespace(kv_group_configs=groups, supports_partial_tail=False)
        side.manager = self.manager = manager
        side._full_attention_groups = tuple(n for n, window in enumerate(windows) if window is None)
        side._sliding_window_groups = tuple(n for n, window in enumerate(windows) if window is not None)
        side._lookup_groups = side._full_attention_groups + side._sliding_window_groups
        side._mamba_align_size = None
        side._eagle_proof_margins, side._max_eagle_proof_margin = {}, 0  # from 0.33 on
        side._chunks_being_loaded = set()
        side._events_tracker = OffloadingEventsTracker(SimpleNamespace(enable_kv_cache_events=False))

    def request(self, name: str, hashes: Sequence[bytes], **parameters: Any) -> Any:
        """A new request whose prompt's chunks have these hashes, and a token more; its `kv_transfer_params`."""
        request = SimpleNamespace(
            request_id=name,
            num_tokens=TOKENS * len(hashes) + 1,
            block_hashes=list(hashes),
            kv_transfer_params=parameters or None,
        )
        context = ReqContext(name, kv_transfer_params=parameters or None)
        self.manager.on_new_request(context)
        state = offloading.RequestOffloadState(self._side.config, request, context, None)
        state.update_offload_keys()
        return state

    def look_up(self, state: Any, local_tokens: int = 0, most: int | None = None) -> int | None:
        """How many tokens vLLM would load, `most` at most; None if the request is deferred."""
        state.num_locally_computed_tokens = local_tokens
        return self._side._lookup(state, most)

    def end_step(self) -> None:
        self.manager.on_schedule_end(STEP)


class _Dict:
    """A manager whose answers cost nothing."""

    def __init__(self) -> None:
        self.answers: dict[OffloadKey, LookupResult] = {}

    def on_new_request(self, context: ReqContext) -> None:
        pass

    def lookup(self, key: OffloadKey, context: ReqContext) -> LookupResult:
        return self.answers.get(key, LookupResult.MISS)


def hashes(count: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]


class Bench:
    """The manager, what it holds, and the figures."""

    def __init__(self) -> None:
        geometry = Geometry(cells=1, cell_payload=4096)
        config = schema.load(
            {
                "prefill_tokens_per_s": 10_000,
                "tiers": [
                    {"type": "cpu", "capacity": HOST_ROWS * geometry.row_bytes},
                    {"type": "file", "path": "/nonexistent/nixl-tiers", "capacity": 2 * COLD_ROWS * geometry.row_bytes},
                ],
            }
        )
        region = HostRegion.create(geometry, HOST_ROWS)
        self.coordinator = Coordinator(config, Namespace.of({"bench": 1}), region)
        self.core = self.coordinator._core
        self.cold = hashes(COLD_ROWS)
        self._next_cold = 0
        take_all(self.core.events.opened(0, 2 * COLD_ROWS))
        rows = [(slot, make_offload_key(each, 0), 0) for slot, each in enumerate(self.cold)]
        self.core.events.listed(0, rows, last=True)
        self.vllm = VllmLookups(NixlTiersManager(self.coordinator, config, (0,), None, pause_s=0.0))
        self._names = 0

    def put(self, chunks: Sequence[bytes]) -> None:
        keys = [make_offload_key(each, 0) for each in chunks]
        self.core.copies.prepare_store(keys, "put")
        self.core.copies.complete_store(self.core.copies.rows_being_filled(keys), ())
        self.core.finish_request("put")

    def some_cold(self, count: int) -> list[bytes]:
        self._next_cold += count
        return self.cold[self._next_cold - count : self._next_cold]

    def time(self, chunks: Sequence[bytes], steps: int = 1) -> list[float]:
        """us of each step's look-up of a new request."""
        self._names += 1
        state = self.vllm.request(f"r{self._names}", chunks)
        took = [_us(lambda: self.vllm.look_up(state), self.vllm.end_step) for _ in range(steps)]
        self.vllm.manager.on_request_finished(state.req_context)
        self.core.tiers[0].to_load.clear()
        return took


def _us(call: Callable[[], object], after: Callable[[], None]) -> float:
    began = time.thread_time_ns()
    call()
    took = time.thread_time_ns() - began
    after()
    return took / 1000


def _own_us(chain: Sequence[bytes], *, waits: bool = False) -> float:
    """vLLM's own share of looking up a chain of hits, or of deferring its request."""
    vllm = VllmLookups(_Dict())
    state = vllm.request("own", chain)
    keys = state.group_states[0].offload_keys
    if waits:
        vllm.manager.answers = {keys[0]: LookupResult.HIT_PENDING}
        vllm.look_up(state)  # the first step of the wait, which is not meant
    else:
        vllm.manager.answers = dict.fromkeys(keys, LookupResult.HIT)
    return _us(lambda: vllm.look_up(state), lambda: None)


def main(repeats: int) -> None:
    bench = Bench()
    print("us, least (median)")
    print("chunks | half cold, a key | vLLM's own | all hits, a key | no hit, a key | waiting, a step | vLLM's own")
    for chunks in CHUNKS:
        figures: list[list[float]] = [[], [], [], [], [], []]
        for _ in range(repeats):
            warm = hashes(chunks - chunks // 2)
            bench.put(warm)
            chain = [*warm, *bench.some_cold(chunks // 2)]
            first, *later = bench.time(chain, steps=6)
            figures[0].append(first / chunks)
            figures[1].append(_own_us(chain) / chunks)
            figures[2].append(bench.time(warm)[0] / len(warm))
            figures[3].append(bench.time(hashes(chunks))[0] / chunks)
            figures[4] += later
            figures[5].append(_own_us(chain, waits=True))
        print(f"{chunks:6} | " + " | ".join(f"{min(each):6.2f} ({median(each):.2f})" for each in figures))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
