"""The scheduler's side: vLLM's calls, translated to the coordinator's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from typing_extensions import override

from nixl_tiers.cascade.manager import Lookup
from nixl_tiers.config.schema import TiersConfig
from nixl_tiers.coordinator import Coordinator
from nixl_tiers.vllm import compat
from nixl_tiers.vllm.compat import (
    LoadStoreSpec,
    LookupResult,
    OffloadingConnectorStats,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_group_idx,
    position_of,
)
from nixl_tiers.vllm.events import EventLog
from nixl_tiers.vllm.metrics import Reporter
from nixl_tiers.vllm.store_gate import StoreGate
from nixl_tiers.vllm.transfer import RowsSpec

SHUTDOWN_S: Final = 0.3  # vLLM kills processes that have not exited a few seconds after it asked

# An engine in which every request waits for storage runs empty steps, thousands a second, and its workers spin along:
# on a node without spare cores that starves the movers for seconds (measured).
PAUSE_S: Final = 0.01

_ANSWERS: Final = {
    Lookup.HIT: LookupResult.HIT,
    Lookup.PENDING: LookupResult.HIT_PENDING,
    Lookup.MISS: LookupResult.MISS,
}


class NixlTiersManager(OffloadingManager):
    """Answers vLLM's scheduler. Its one thread makes all calls, and none of them blocks.

    `groups`: vLLM's number of each offloaded KV group, in the order of OffloadingConfig.groups. `events`: the log
    of KV events for KV-aware routers, or None if vLLM does not publish them. `pause_s`: how long to wait in a step in
    which the engine has nothing to compute because every request waits for storage; 0 if replicas step together.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        config: TiersConfig,
        groups: Sequence[int],
        events: EventLog | None,
        pause_s: float = PAUSE_S,
    ) -> None:
        self._coordinator = coordinator
        self._place = {group: place for place, group in enumerate(groups)}
        self._sources = _sources(config)
        self._localities = [tier.locality for tier in config.storage]
        self._reporter = Reporter()
        self._events = events
        self._pause_s = pause_s
        # What a load is going to read of a chunk is not known at its look-up, so workers mark a row that lacks blocks
        # as good only where loads never read any but a chunk's last.
        sub_blocks = coordinator.region.geometry.sub_blocks
        self._last_sub_block = sub_blocks - 1
        self._requests: set[str] = set()
        self._waiting: set[str] = set()  # requests that this step's look-ups deferred
        self._touched: set[str] = set()  # requests whose prefix in vLLM's own cache was touched
        self._looked_up: set[str] = set()  # in this step
        self._loading: set[str] = set()  # requests with an open load
        self._failed: set[str] = set()  # requests whose load a worker could not copy
        self._gate = StoreGate(kept=config.on_reset == "keep", one_block=sub_blocks == 1)
        self._closed = False

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._requests.add(req_context.req_id)
        if (allowed := compat.allowed_tiers(req_context, self._localities)) is not None:
            self._coordinator.set_allowed_tiers(req_context.req_id, allowed)
        return RequestOffloadingContext()

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        self._requests.discard(req_context.req_id)
        self._failed.discard(req_context.req_id)
        self._gate.ended(req_context.req_id)
        if req_context.req_id in self._touched:
            self._touched.remove(req_context.req_id)
        else:
            self._touch_prefix(req_context, None)
        self._coordinator.finish_request(req_context.req_id)

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        position = position_of(key, req_context)
        if req_context.req_id not in self._looked_up:
            self._looked_up.add(req_context.req_id)
            self._gate.looked_up(req_context, position)
            if req_context.req_id not in self._touched:
                self._touch_prefix(req_context, position)
        answer = _ANSWERS[self._coordinator.lookup(key, req_context.req_id, position, self._last_sub_block)]
        if answer is LookupResult.HIT_PENDING:
            self._waiting.add(req_context.req_id)
        elif self._events is not None and answer is LookupResult.HIT:
            self._events.present(key)
        return answer

    @override
    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> Any:
        return self._sources[self._coordinator.source(key)]

    @override
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        ordered = list(keys)
        rows = self._coordinator.prepare_load(ordered, req_context.req_id)
        self._loading.add(req_context.req_id)
        self._gate.load_began(req_context.req_id)
        return RowsSpec(np.asarray(rows, np.int64), self._counts(ordered), missing=self._coordinator.partial(ordered))

    @override
    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._loading.discard(req_context.req_id)
        if req_context.req_id in self._failed:
            self._failed.remove(req_context.req_id)
            self._coordinator.fail_load(keys, req_context.req_id)
        else:
            self._coordinator.complete_load(keys)

    def load_failed(self, request: str) -> bool:
        """A worker could not copy the load that `request` waits for. NixlTiersConnector calls it before complete_load.

        Its chunks are misses from then on, and so is everything else for the request: it recomputes what it needs.
        False, and without effect, if the request has no open load here: vLLM's MultiConnector reports to each of its
        connectors the requests that failed in any of them.
        """
        if request not in self._loading:
            return False
        self._failed.add(request)
        return True

    @override
    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput:
        """Never None, which vLLM would retry at every step: keys without room are left out from the prefix's end."""
        offered = self._gate.allowed(keys, req_context) if self._gate.shut else list(keys)
        plan = self._coordinator.prepare_store(self._in_prefix_order(offered, req_context), req_context.req_id)
        row_of = dict(zip(plan.keys, plan.rows, strict=True))
        # vLLM lists the blocks of a job in the order in which it offered the keys, whatever the order of this answer.
        accepted = [key for key in offered if key in row_of]
        rows = np.array([row_of[key] for key in accepted], np.int64)
        if self._events is not None:
            self._events.removed(plan.evicted)
            self._events.filling(accepted, rows, plan.store_seq)
        return PrepareStoreOutput(
            keys_to_store=accepted,
            store_spec=RowsSpec(rows, self._counts(accepted), plan.store_seq),
            evicted_keys=list(plan.evicted),
        )

    @override
    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """`success` is ignored: the region's control words record which rows every worker wrote."""
        if self._events is not None:
            self._events.written(keys)
        self._coordinator.complete_store(keys)

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._coordinator.end_step()
        self._looked_up.clear()
        self._gate.end_step(context)
        if self._pause_s and self._waiting and self._waiting >= self._requests:
            with self._coordinator.changed:
                self._coordinator.changed.wait(self._pause_s)
        self._waiting.clear()

    @override
    def has_pending_work(self) -> bool:
        """Always False: True would make an idle engine spin."""
        return False

    @override
    def reset_cache(self) -> None:
        self._gate.reset(self._requests, self._loading)
        self._looked_up.clear()
        self._loading.clear()  # vLLM completes no job of before a reset
        self._failed.clear()
        self._coordinator.reset()
        if self._events is not None:
            self._events.reset()

    def on_reset_flushed(self) -> None:
        """Newer vLLM: workers have ended every job of before the last reset."""
        self._coordinator.flushed()

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        if self._events is None:
            return ()
        self._events.removed(self._coordinator.take_evicted())
        return self._events.take()

    @override
    def get_stats(self) -> OffloadingConnectorStats | None:
        return self._reporter.report(self._coordinator.counters())

    @override
    def shutdown(self) -> None:
        if not self._closed:
            self._closed = True
            self._coordinator.close(SHUTDOWN_S)

    def _touch_prefix(self, req_context: ReqContext, position: int | None) -> None:
        """Touch what vLLM hits in its own cache: all before `position`, or everything if nothing was looked up.

        vLLM does not report its own hits, and without it the root of a prefix would be evicted before its leaves.
        """
        if position is not None:
            self._touched.add(req_context.req_id)
        positions: Mapping[OffloadKey, int] = getattr(req_context, "_offload_key_positions", {})
        own = [key for key, end in positions.items() if position is None or end < position]
        if own:
            self._coordinator.touch(own, req_context.req_id)

    def _counts(self, keys: Sequence[OffloadKey]) -> list[int]:
        """How many of `keys` each KV group has; vLLM orders keys by group."""
        counts = [0] * len(self._place)
        for key in keys:
            counts[self._place[get_offload_group_idx(key)]] += 1
        return counts

    def _in_prefix_order(self, keys: list[OffloadKey], req_context: ReqContext) -> list[OffloadKey]:
        """By end token, so that under pressure all groups keep the same prefix."""
        if len(self._place) == 1:
            return keys
        return sorted(keys, key=lambda key: position_of(key, req_context) or 0)


def _sources(config: TiersConfig) -> Mapping[str, Any]:
    """vLLM's name for where a hit came from, by tier name."""
    known = compat.CacheHitSource
    if known is None:
        return dict.fromkeys(("cpu", *config.names))
    storage = {
        name: known.DISK if tier.on_disk else known.EXTERNAL_UNSPECIFIED
        for name, tier in zip(config.names, config.storage, strict=True)
    }
    return {"cpu": known.HOST, **storage}
