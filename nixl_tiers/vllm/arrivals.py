"""A request's chain at its arrival, long before vLLM's scheduler looks it up: read from vLLM's own state.

Rows of windowed groups are left out: which of them a load needs depends on where the hit ends.
"""

from __future__ import annotations

from bisect import bisect_left
from heapq import merge
from itertools import islice
from typing import Any

from nixl_tiers.vllm.compat import OffloadKey


def chain_at_arrival(scheduler: Any, pool: Any, request: Any) -> list[OffloadKey]:
    """The keys of the chunks of full-attention groups that a load of this request could bring, by their end tokens.

    scheduler: vLLM's OffloadingConnectorScheduler, which knows the request. pool: vLLM's BlockPool, or None. Raises
    AttributeError, KeyError or TypeError for a vLLM that keeps this in another way.
    """
    if request.skip_reading_prefix_cache:
        return []
    status = scheduler._req_status[request.request_id]  # noqa: SLF001 - no vLLM shows it in another way
    status.update_offload_keys()
    chains = []
    for config, state in zip(scheduler.config.kv_group_configs, status.group_states, strict=True):
        if config.sliding_window_size_in_chunks is not None:
            continue
        tokens, keys = config.tokens_per_chunk, state.offload_keys
        cached = _cached_chunks(pool, request.block_hashes, config, len(keys))
        end = len(keys)
        if status.max_load_tokens is not None:
            end = min(end, cached + status.max_load_tokens // tokens)
        chains.append(((number + 1) * tokens, keys[number]) for number in range(cached, end))
    return [key for _, key in merge(*chains)]


def _cached_chunks(pool: Any, hashes: Any, config: Any, chunks: int) -> int:
    """How many chunks of the request the engine's own prefix cache has. It evicts a prefix from its end."""
    if pool is None:
        return 0
    ends = list(islice(hashes, config.hashes_per_chunk - 1, None, config.hashes_per_chunk))[:chunks]
    return bisect_left(ends, True, key=lambda each: pool.get_cached_block(each, [config.group_idx]) is None)
