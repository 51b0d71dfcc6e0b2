"""Which keys a request is going to look up: at its arrival, and out of what vLLM hands over later.

vLLM looks up full-attention groups from the first chunk on, up to the first miss, and then windowed groups (sliding
windows, recurrent states) from the end on, and last the tail of a chunk, in all groups. NixlTiersConnector says which
group is what. With vLLM's own connector that is not known: the chain is the one of the group that is looked up first,
and the keys of all others are looked up one by one.

At a request's arrival, long before it is scheduled, its chain is read from vLLM's own state. Rows of windowed groups
are left out: which of them a load needs depends on where the hit ends.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, merge
from itertools import count, islice
from typing import Any

from nixl_tiers.core.chain_rows import Chain, Group
from nixl_tiers.core.lookup import Scan
from nixl_tiers.core.prefetch_queue import Rank
from nixl_tiers.vllm.compat import LookupResult, OffloadKey, ReqContext, get_offload_group_idx, positions_of

Answers = dict[OffloadKey, LookupResult]


@dataclass(slots=True)
class RequestChain:
    """One request's chain, and the answers that it gets for as long as it waits. `count`: of vLLM's keys."""

    chain: Chain
    count: int
    group: int  # vLLM's number of the first group with full attention, of which the first look-up was
    scan: Scan | None = None  # of this step
    first: int = 0  # position of this step's first look-up
    waiting: Answers | None = None
    asked: OffloadKey | None = None  # the first look-up of the last step, if the request waits since then
    cut_at: int | None = None  # position beyond which nothing is loaded, if there is one

    def start(self, position: int) -> int:
        """The first token that this step looks up, by the end of its first chunk."""
        return position - self.chain.groups[0].chunk_tokens


class RequestChains:
    """The chains of all requests, and what is known of KV groups."""

    def __init__(self, chunk_tokens: Mapping[int, int]) -> None:
        """`chunk_tokens`: of each group, by vLLM's number."""
        self._chunk_tokens = chunk_tokens
        self._windows: Mapping[int, int | None] = {}  # of all groups, or of none: None is full attention
        self._bounds: dict[str, int] = {}  # requests that vLLM itself loads only so many tokens of
        self._chains: dict[str, RequestChain] = {}

    def know(self, windows: Mapping[int, int | None]) -> None:
        """These are the windows of all groups, in chunks."""
        self._windows = windows

    def bound(self, request: str, tokens: int | None) -> None:
        """vLLM loads no more than so many tokens for the request in this step; None: all that there is."""
        if tokens is not None:
            self._bounds[request] = tokens
        else:
            self._bounds.pop(request, None)

    def is_tail(self, key: OffloadKey, position: int) -> bool:
        """Whether `key` ends within a chunk (`--prefix-match-unit`)."""
        return position % self._chunk_tokens.get(get_offload_group_idx(key), 1) != 0

    def is_windowed(self, key: OffloadKey) -> bool:
        """Whether the group of `key` is known to be."""
        return self._windows.get(get_offload_group_idx(key)) is not None

    def of(self, key: OffloadKey, context: ReqContext, position: int) -> RequestChain | None:
        """The chain of a request whose first look-up of a step is of `key`; None if that has to be looked up key by
        key: it is a tail, or of a windowed group, the group's chunks are not all there, or the chain ends before."""
        group = get_offload_group_idx(key)
        if self.is_tail(key, position) or self.is_windowed(key):
            return None
        positions = positions_of(context)
        mine = self._chains.get(context.req_id)
        limits = (_max_load_tokens(context), self._bounds.get(context.req_id))
        most = min((limit for limit in limits if limit is not None), default=None)
        cut_at = None if most is None else position + most
        if mine is None or mine.count != len(positions) or mine.group != group or mine.cut_at != cut_at:
            chain = self._build(positions, group)
            if chain is None:
                return None
            if most is not None:
                # vLLM counts from inside this chunk on: it may look up one chunk more, which is looked up alone.
                chain = _cut(chain, position - chain.groups[0].chunk_tokens + most)
            mine = self._chains[context.req_id] = RequestChain(chain, len(positions), group, cut_at=cut_at)
        mine.first = position
        if mine.start(position) >= mine.chain.end or position % mine.chain.groups[0].chunk_tokens:
            return None
        return mine

    def again(self, key: OffloadKey, context: ReqContext) -> RequestChain | None:
        """The chain of a request that waits, if it looks up in this step what it has looked up in the last one."""
        mine = self._chains.get(context.req_id)
        if mine is None or mine.asked != key or mine.count != len(positions_of(context)):
            return None
        return mine

    def chunk_tokens(self, key: OffloadKey, context: ReqContext) -> int:
        """Tokens of a chunk of the group of `key`, which is a part of the request's chain."""
        groups, number = self._chains[context.req_id].chain.groups, get_offload_group_idx(key)
        return next((g.chunk_tokens for g in groups if g.keys and get_offload_group_idx(g.keys[0]) == number), 0)

    def ended(self, request: str) -> None:
        self._chains.pop(request, None)
        self._bounds.pop(request, None)

    def clear(self) -> None:
        self._chains.clear()

    def get(self, request: str) -> RequestChain | None:
        return self._chains.get(request)

    def _build(self, positions: Mapping[OffloadKey, int], first: int) -> Chain | None:
        keys, ends = list(positions), list(positions.values())
        groups: list[Group] = []
        if len(self._chunk_tokens) == 1 and ends[-1] == ends[0] * len(ends):
            groups = [Group(keys, ends[0])]
        else:
            by_group: dict[int, list[OffloadKey]] = {}
            for key in keys:
                by_group.setdefault(get_offload_group_idx(key), []).append(key)
            for number in sorted(by_group, key=lambda number: number != first):
                if number == first or number in self._windows:
                    whole = _whole(by_group[number], positions, self._chunk_tokens.get(number))
                    if whole is not None:
                        groups.append(Group(*whole, self._windows.get(number)))
                    elif number == first:
                        return None
        return Chain(tuple(groups))


def answers_of(chain: Chain, start: int, scan: Scan) -> Answers:
    """What vLLM's look-ups of the full-attention groups get: one PENDING is enough to defer the request."""
    answers: Answers = {}
    for group in chain.full:
        begin, end = start // group.chunk_tokens, scan.end // group.chunk_tokens
        if scan.waits:
            end = begin + 1
            answers[group.keys[begin]] = LookupResult.HIT_PENDING
        else:
            answers.update(dict.fromkeys(group.keys[begin:end], LookupResult.HIT))
        if end < len(group.keys):
            answers[group.keys[end]] = LookupResult.MISS
    return answers


def _max_load_tokens(context: ReqContext) -> int | None:
    """The most tokens that vLLM is going to load for the request, if the request says so."""
    parameters: dict[str, Any] = context.kv_transfer_params or {}
    most = parameters.get("max_load_tokens")
    return most if type(most) is int and most >= 0 else None


def _cut(chain: Chain, end: int) -> Chain:
    """What of a chain ends at token `end` or before."""
    return Chain(tuple(Group(g.keys[: end // g.chunk_tokens], g.chunk_tokens, g.window) for g in chain.groups))


def _whole(
    keys: Sequence[OffloadKey], positions: Mapping[OffloadKey, int], tokens: int | None
) -> tuple[list[OffloadKey], int] | None:
    """The keys of a group's whole chunks, from the first on, and the tokens of one. vLLM also reports positions of keys
    that end within a chunk."""
    tokens = tokens or min(positions[key] for key in keys)
    whole = sorted((key for key in keys if positions[key] % tokens == 0), key=positions.__getitem__)
    return (whole, tokens) if whole and positions[whole[-1]] == tokens * len(whole) else None


class Arrivals:
    """Requests that are not next in line yet, in the order of their turns. Only their names are kept: thousands may
    wait, each with hundreds of keys."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Rank, int, str]] = []  # a heap
        self._count = 0

    def add(self, request: str, rank: Rank) -> None:
        self._count += 1
        heappush(self.waiting, (rank, self._count, request))

    def take(self, is_next: Callable[[str, Rank], bool | None]) -> Iterator[tuple[str, Rank]]:
        """Those that are next by now, and are kept here no more. `is_next`: whether this one is; None: it has begun, or
        ended."""
        while self.waiting:
            rank, _, request = self.waiting[0]
            if (found := is_next(request, rank)) is False:
                return
            heappop(self.waiting)
            if found:
                yield request, rank


def chain_at_arrival(scheduler: Any, pool: Any, name: str) -> list[OffloadKey]:
    """The keys of the chunks of full-attention groups that a load of this request could bring, by their end tokens.

    scheduler: vLLM's OffloadingConnectorScheduler, which knows the request. pool: vLLM's BlockPool. Raises
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
    ends = list(islice(hashes, config.hashes_per_chunk - 1, None, config.hashes_per_chunk))[:chunks]
    return bisect_left(ends, True, key=lambda each: pool.get_cached_block(each, [config.group_idx]) is None)
