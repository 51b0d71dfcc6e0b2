"""The answers to vLLM's look-ups: a request's whole chain is resolved at the first one of each step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from nixl_tiers.core.lookup import Lookup
from nixl_tiers.runtime.coordinator import COUNT_BATCH, Coordinator
from nixl_tiers.vllm import compat
from nixl_tiers.vllm.chains import Answers, RequestChain, RequestChains, answers_of
from nixl_tiers.vllm.compat import (
    LookupResult,
    OffloadKey,
    ReqContext,
    get_offload_group_idx,
    position_of,
    positions_of,
)
from nixl_tiers.vllm.store_gate import StoreGate

USED_BATCH: Final = 4096  # keys that are marked as used in one hold of the core's lock: about a millisecond
_ANSWERS: Final = {
    Lookup.HIT: LookupResult.HIT,
    Lookup.PENDING: LookupResult.HIT_PENDING,
    Lookup.MISS: LookupResult.MISS,
}


class Lookups:
    """What each request finds in a step, and what its look-ups show: what vLLM has itself, and what it has to compute.
    `groups`: how many KV groups there are; `chunk_tokens`: of each, by vLLM's number, where they are known.

    `answers`: to this step's look-ups so far, by request; `waiting`: requests that they deferred. `load_none`: requests
    that find nothing, as they compute everything themselves. `closed`: no request finds anything now.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        groups: int,
        gate: StoreGate,
        chunk_tokens: Mapping[int, int],
    ) -> None:
        self._coordinator = coordinator
        self._groups = groups
        self._gate = gate
        # What a load is going to read of a chunk is not known at its look-up, so workers mark a row that lacks blocks
        # as good only where loads never read any but a chunk's last.
        self._last_sub_block = coordinator.region.geometry.sub_blocks - 1
        self.answers: dict[str, Answers] = {}
        self.waiting: set[str] = set()
        self.load_none: set[str] = set()
        self.closed = False
        self.chains = RequestChains(chunk_tokens)
        self._missed: dict[str, int] = {}  # request -> the position from which on its misses are counted
        self._touched: set[str] = set()  # requests whose prefix in vLLM's own cache was touched

    def begin(self, key: OffloadKey, context: ReqContext) -> Answers:
        """A request's first look-up of this step, of `key`: its whole chain is resolved at once."""
        name = context.req_id
        mine = self.chains.again(key, context)
        if mine is not None:  # nothing is new but the time: a long queue of such requests is looked up at every step
            position = mine.first
            self._gate.looked_up(context, position)
        else:
            position = position_of(key, context)
            self._gate.looked_up(context, position)
            if self._groups == 1 and position <= compat.chunk_tokens(context):
                self._touched.add(name)  # vLLM has none of it
            elif name not in self._touched:
                self._touch_prefix(context, position)
            mine = None if self._finds_nothing(name) else self.chains.of(key, context, position)
        answers = self.answers[name] = {} if mine is None else self._scan(key, name, mine, mine.start(position))
        return answers

    def alone(self, key: OffloadKey, context: ReqContext, answers: Answers) -> LookupResult:
        """A key that the scan of the chain does not cover: of a windowed group, of which only vLLM knows which of its
        keys a load needs, or of the tail of a chunk. A tail is worth no existence check: it saves less than a chunk."""
        if self._finds_nothing(context.req_id):
            return LookupResult.MISS
        mine, position = self.chains.get(context.req_id), position_of(key, context)
        whole = not self.chains.is_tail(key, position)
        windowed = whole and self.chains.is_windowed(key)
        if windowed and mine is not None and mine.scan is not None:
            begin = position - self.chains.chunk_tokens(key, context)
            if begin >= mine.scan.end:
                answers[key] = LookupResult.MISS
                return LookupResult.MISS
        now = self._coordinator.now()
        with self._coordinator.core() as core:
            (found,) = core.look_up_keys(
                context.req_id, (key,), now, self._last_sub_block, positions=(position,), check=whole
            )
        answer = _ANSWERS[found]
        if answer is LookupResult.HIT_PENDING:
            self.waiting.add(context.req_id)
        if windowed:
            answers[key] = answer
        return answer

    def count_misses(self, key: OffloadKey, context: ReqContext) -> None:
        """`key` is a miss. Of a scan that does not wait for anything, count the chunks that it has to compute: from the
        first miss on, those of the same group; each once a request, however often vLLM looks it up, and no tails."""
        request = context.req_id
        if request in self.waiting:
            return
        counted, position = self._missed.get(request), position_of(key, context)
        if self._finds_nothing(request) or (counted is not None and position >= counted):
            return
        is_tail = self.chains.is_tail
        if is_tail(key, position):
            return
        self._missed[request] = position
        missed = [key]
        if counted is None:
            behind = [
                other for other, end in positions_of(context).items() if end > position and not is_tail(other, end)
            ]
            if self._groups > 1:
                group = get_offload_group_idx(key)
                behind = [other for other in behind if get_offload_group_idx(other) == group]
            missed += behind
        last = None
        for start in range(0, len(missed), COUNT_BATCH):
            with self._coordinator.core() as core:
                last = core.count_misses(request, missed[start : start + COUNT_BATCH], self._coordinator.now(), last)

    def end_step(self) -> None:
        """Before the next one, each request is looked up anew."""
        self.answers.clear()
        self.waiting.clear()

    def ended(self, context: ReqContext) -> None:
        request = context.req_id
        self.load_none.discard(request)
        self._missed.pop(request, None)
        self.chains.ended(request)
        if request in self._touched:
            self._touched.remove(request)
        else:
            self._touch_prefix(context, None)

    def reset(self) -> None:
        """Nothing that was found is there any more."""
        self.answers.clear()
        self.chains.clear()

    # --- inside ------------------------------------------------------------------------------------------------

    def _finds_nothing(self, request: str) -> bool:
        return self.closed or request in self.load_none

    def _scan(self, key: OffloadKey, name: str, mine: RequestChain, start: int) -> Answers:
        """What the whole chain is in this step, of which `key` is looked up first."""
        now = self._coordinator.now()
        with self._coordinator.core() as core:
            mine.scan = core.look_up(name, mine.chain, start, now, self._last_sub_block)
        if not mine.scan.waits:
            mine.waiting = mine.asked = None
            return answers_of(mine.chain, start, mine.scan)
        self.waiting.add(name)
        # The engine's own hit may have grown meanwhile, so that another key comes first.
        if mine.waiting is None or mine.asked != key:
            mine.waiting, mine.asked = answers_of(mine.chain, start, mine.scan), key
        return mine.waiting

    def _touch_prefix(self, context: ReqContext, position: int | None) -> None:
        """Touch what vLLM hits in its own cache: all before `position`, or everything if nothing was looked up.

        vLLM does not report its own hits, and without it the root of a prefix would be evicted before its leaves.
        """
        if position is not None:
            self._touched.add(context.req_id)
        own = [key for key, end in positions_of(context).items() if position is None or end < position]
        for start in reversed(range(0, len(own), USED_BATCH)):
            with self._coordinator.core() as core:
                core.used(context.req_id, own[start : start + USED_BATCH])
