"""Requests at their arrival, long before vLLM's scheduler looks them up: which are next, and their chains.

A chain is read from vLLM's own state. Rows of windowed groups are left out: which of them a load needs depends on where
the hit ends.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from heapq import heappop, heappush, merge
from itertools import count, islice
from typing import Any

from nixl_tiers.core.prefetch_queue import Rank
from nixl_tiers.vllm.compat import OffloadKey


class Arrivals:
    """Requests that are not next in line yet, in the order of their turns. Only their names are kept: thousands may
    wait, each with hundreds of keys."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Rank, int, str]] = []  # a heap
        self._count = 0

    def add(self, request: str, rank: Rank) -> None:
        self._count += 1
        heappush(self._waiting, (rank, self._count, request))

    def take(self, has_room: Callable[[Rank], bool]) -> Iterator[tuple[str, Rank]]:
        """Those that are next by now, and are kept here no more. `has_room`: whether a request of this rank is."""
        while self._waiting and has_room(self._waiting[0][0]):
            rank, _, request = heappop(self._waiting)
            yield request, rank


def chain_at_arrival(scheduler: Any, pool: Any, name: str) -> list[OffloadKey]:
    """The keys of the chunks of full-attention groups that a load of this request could bring, by their end tokens.

    scheduler: vLLM's OffloadingConnectorScheduler, which knows the request. pool: vLLM's BlockPool, or None. Raises
    AttributeError, KeyError or TypeError for a vLLM that keeps this in another way.
    """
    status = scheduler._req_status[name]  # noqa: SLF001 - no vLLM shows it in another way
    request = status.req
    if request.skip_reading_prefix_cache:
        return []
    status.update_offload_keys()
    chains: list[tuple[int, int, list[OffloadKey]]] = []
    for config, state in zip(scheduler.config.kv_group_configs, status.group_states, strict=True):
        if config.sliding_window_size_in_chunks is not None:
            continue
        tokens, keys = config.tokens_per_chunk, state.offload_keys
        cached = _cached_chunks(pool, request.block_hashes, config, len(keys))
        end = len(keys)
        if status.max_load_tokens is not None:
            end = min(end, cached + status.max_load_tokens // tokens)
        chains.append((cached, tokens, keys[cached:end]))
    if len(chains) == 1:
        return chains[0][2]
    ends = (zip(count(tokens * (cached + 1), tokens), keys, strict=False) for cached, tokens, keys in chains)
    return [key for _, key in merge(*ends)]


def _cached_chunks(pool: Any, hashes: Any, config: Any, chunks: int) -> int:
    """How many chunks of the request the engine's own prefix cache has. It evicts a prefix from its end."""
    if pool is None:
        return 0
    ends = list(islice(hashes, config.hashes_per_chunk - 1, None, config.hashes_per_chunk))[:chunks]
    return bisect_left(ends, True, key=lambda each: pool.get_cached_block(each, [config.group_idx]) is None)
