"""The scheduler's side: vLLM's calls, translated to the coordinator's."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Final

from typing_extensions import override

from nixl_tiers.config.schema import TiersConfig
from nixl_tiers.core.prefetch_queue import Rank
from nixl_tiers.runtime.coordinator import Coordinator
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
)
from nixl_tiers.vllm.events import EventLog
from nixl_tiers.vllm.kv_groups import KvGroups
from nixl_tiers.vllm.live import LiveGauges
from nixl_tiers.vllm.loads import Loads
from nixl_tiers.vllm.lookups import Lookups
from nixl_tiers.vllm.own_hits import OwnHits
from nixl_tiers.vllm.pause import PAUSE_S, Pause
from nixl_tiers.vllm.prefill_meter import PrefillMeter, Scheduled
from nixl_tiers.vllm.reports import REPORT_S, Reports
from nixl_tiers.vllm.store_gate import StoreGate, WeightsGate
from nixl_tiers.vllm.stores import Stores
from nixl_tiers.vllm.wishes import Wishes

log = logging.getLogger(__name__)

_HIT: Final = LookupResult.HIT  # members of an enum are found by a slow attribute look-up before Python 3.12
_MISS: Final = LookupResult.MISS


class NixlTiersManager(OffloadingManager):
    """Answers vLLM's scheduler. Its one thread makes all calls, and none of them blocks.

    `groups`: vLLM's number of each offloaded KV group, in the order of OffloadingConfig.groups. `events`: the log
    of KV events for KV-aware routers, or None if vLLM does not publish them. `pause_s`: the longest wait in a step in
    which the engine has nothing to compute because requests wait for storage or for copies; 0 if replicas step
    together. `chunk_tokens`: of a chunk of each group. `live`: shows the gauges of an idle engine. `report_s`: between
    two reports of numbers while there are requests.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        config: TiersConfig,
        groups: Sequence[int],
        events: EventLog | None,
        *,
        pause_s: float = PAUSE_S,
        chunk_tokens: Sequence[int] = (),
        live: LiveGauges | None = None,
        report_s: float = REPORT_S,
    ) -> None:
        self._coordinator = coordinator
        self._groups = KvGroups(groups, chunk_tokens)
        self._has_storage = bool(config.storage)
        self._wishes = Wishes(coordinator, config)
        self._stores = Stores(coordinator, self._groups)
        self._reports = Reports(
            coordinator,
            config,
            chunk_tokens=max(chunk_tokens, default=0),
            live=live,
            period_s=report_s,
            own=self._wishes.counts,
        )
        self._events = events
        self._requests: set[str] = set()
        kept = config.on_reset == "keep"
        self._own_hits = OwnHits()
        self._gate = StoreGate(self._own_hits, kept=kept, one_block=coordinator.region.geometry.sub_blocks == 1)
        self.weights = WeightsGate(partial(attrgetter("ranks.weights"), coordinator.region), self._own_hits, kept=kept)
        self._meter = PrefillMeter(coordinator.prefill.observe, coordinator.region.step_seconds)
        self._lookups = Lookups(coordinator, len(groups), self._gate, self._groups.known_tokens())
        self._loads = Loads(coordinator, self._groups, config)
        self._pause = Pause(coordinator, self._lookups, self._loads, pause_s)
        self._closed = False
        self._has_quotas = bool(config.quotas)
        self._sees_salts = False
        self._core = coordinator.core()
        self._entered = -1  # how often at the last step's end
        self._calm = False  # whether nothing is to be done at a step's end until it is entered again

    def times_are_published(self, step_tokens: int) -> None:
        """NixlTiersConnector calls it: its workers publish the time of steps, and `scheduled` is called at each, as are
        `began_at` and `began` for all requests, and `salt_of` for each new one. No step computes more than
        `step_tokens` tokens of a request."""
        self._own_hits.known = self._sees_salts = True
        with self._coordinator.core() as core:
            core.prefill.limit_step(step_tokens)

    @property
    def in_doubt(self) -> bool:
        """Whether vLLM's own cache may have KV that must not be stored, nor what is computed upon it."""
        return self._gate.in_doubt or self.weights.in_doubt

    def salt_of(self, request: str, salt: str | None) -> None:
        """The `cache_salt` of a new request, by which it belongs to a tenant. NixlTiersConnector calls it."""
        if self._has_quotas and (tenant := self._coordinator.tenants.number_of(salt)):
            self._wishes.belongs(request, tenant)

    def windows_are_known(self, windows: Mapping[int, int | None]) -> None:
        """NixlTiersConnector calls it: of each KV group, by vLLM's number, how many chunks before its end a load needs;
        None: all."""
        self._lookups.chains.know(windows)

    def bound_load(self, request: str, tokens: int | None) -> None:
        """NixlTiersConnector calls it before look-ups: vLLM loads no more than so many tokens; None: all."""
        self._lookups.chains.bound(request, tokens)

    def scheduled(self, requests: Iterable[Scheduled]) -> int:
        """What the step computes that on_schedule_end has just ended the planning of; returns its number."""
        return self._meter.scheduled(requests) if requests else self._meter.number

    def began_at(self, request: str, tokens: int) -> None:
        """A request begins, or begins anew, with so many tokens of vLLM's own cache. NixlTiersConnector calls it."""
        self._look_at_weights()
        if self.in_doubt:
            self._own_hits.began_at(request, tokens)

    def began(self, requests: Iterable[tuple[str, int]]) -> None:
        """The step begins these requests at so many tokens. NixlTiersConnector calls it while it is `in_doubt`."""
        for request, tokens in requests:
            self._own_hits.scheduled_at(request, tokens)

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        request = req_context.req_id
        self._requests.add(request)
        if self._has_quotas and not self._sees_salts:
            self._has_quotas = False
            log.warning(
                "nixl_tiers: quotas have no effect with OffloadingConnector: use kv_connector NixlTiersConnector"
            )
        if not self._wishes.begin(req_context).loads:
            self._lookups.load_none.add(request)
        return RequestOffloadingContext()

    def anticipate(self, request: str, keys: Sequence[OffloadKey], rank: Rank) -> bool | None:
        """See TierManager.anticipate. NixlTiersConnector calls it."""
        with self._coordinator.core() as core:
            return core.anticipate(request, keys, rank)

    def anticipates(self, request: str) -> bool:
        """Whether anything may be promoted for a new request."""
        return self._has_storage and request not in self._wishes.promote_none

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        request = req_context.req_id
        self._requests.discard(request)
        self._pause.ended(request)
        self._loads.ended(request)
        self._gate.ended(request)
        self._own_hits.ended(request)
        self._lookups.ended(req_context)
        self._wishes.end(req_context)

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        answers = self._lookups.answers.get(req_context.req_id)
        if answers is None:
            self._look_at_weights()  # not later in the same look-up: vLLM may load what it has found by then
            answers = self._lookups.begin(key, req_context)
        answer = answers.get(key)
        if answer is None:
            answer = self._lookups.alone(key, req_context, answers)
        if answer is _MISS:
            self._lookups.count_misses(key, req_context)
        elif self._events is not None and (answer is _HIT or compat.PENDING_IS_KEPT):
            self._events.seen(key)
        return answer

    @override
    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> Any:
        return self._loads.source_of(key)

    def only_source(self, request: str, tokens: int) -> Any:
        """get_load_source of all keys of the load that was prepared last; None if they have to be asked for one by one.
        NixlTiersConnector calls it."""
        return self._loads.only_source(request, tokens)

    @override
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        ordered, request = list(keys), req_context.req_id
        counts = self._groups.counts(ordered)
        end = self._groups.end(ordered, counts, req_context)
        spec = self._loads.prepare(ordered, counts, request, end)
        self._gate.load_began(request)
        self._own_hits.load_began(request)
        return spec

    @override
    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._loads.complete(req_context.req_id)

    def load_failed(self, request: str) -> bool:
        """A worker could not copy the load that `request` waits for. NixlTiersConnector calls it before complete_load.

        Its chunks are misses from then on, and so is everything else for the request: it recomputes what it needs.
        False, and without effect, if the request has no open load here: vLLM's MultiConnector reports to each of its
        connectors the requests that failed in any of them.
        """
        return self._loads.fail(request)

    @override
    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput:
        """Never None, which vLLM would retry at every step: keys without room are left out from the prefix's end."""
        self._look_at_weights()
        if req_context.req_id in self._wishes.store_none or not self.weights.may_store(req_context.req_id):
            keys = ()
        offered = self._gate.allowed(keys, req_context) if self._gate.shut else list(keys)
        return self._stores.prepare(offered, req_context)

    @override
    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """`success` is ignored: the region's control words record which rows every worker wrote."""
        self._look_at_weights()
        spoiled = self._stores.completed(keys)
        if self.weights.closed:  # what was copied may be of either weights
            spoiled = set(keys)
        self._coordinator.complete_store(keys, spoiled)

    def spoil(self, keys: Iterable[OffloadKey]) -> None:
        """Of these open stores the engine may write to the blocks before they are copied: their rows are dropped."""
        self._stores.spoil(keys)

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """A step in which nobody has asked for anything, as most that only decode, takes the short way: after a forward
        pass no code is in a processor's cache, and each function costs microseconds."""
        began, preempted = context.new_req_ids, context.preempted_req_ids
        asked = self._lookups.answers or self._core.entered != self._entered
        self._meter.number += 1
        if self._calm and not (asked or began or preempted):
            return
        with self._coordinator.core() as core:
            core.end_step(began, preempted)
        self._gate.end_step(context)
        for request in preempted:
            self._lookups.chains.ended(request)
        if self._loads and (began or not self._pause.is_idle()):
            self._loads.computed_beside()
        self._pause.began(began)
        if self._gate.holding or self._loads:
            self.weights.computed = True
        self._look_at_weights()
        if not began:
            self._pause.take()
        self._lookups.end_step()
        self._loads.prepared = False
        self._calm = not (self._loads or self._gate.watches or self.weights.closed)
        self._entered = self._core.entered

    @override
    def has_pending_work(self) -> bool:
        """Always False: True would make an idle engine spin."""
        return False

    @override
    def reset_cache(self) -> None:
        self._look_at_weights()
        self._gate.reset(self._requests, self._loads)
        self.weights.reset()
        self._loads.reset()
        self._stores.reset()
        if not self._begin_epoch():
            self._forget()

    def _look_at_weights(self) -> None:
        """See whether the weights have been changed in place. A number a rank is compared: call it wherever something
        is to be found or stored."""
        if self.weights.look():
            self._gate.weights_changed()
            self._lookups.reset()
            self._lookups.closed = True
            self._calm = False
        if self.weights.closed:
            self._begin_epoch()

    def _begin_epoch(self) -> bool:
        """Once a change of the weights has ended, and with it every copy of before: vLLM goes on with them, and reports
        each by the keys alone, which may be stored again in the new epoch."""
        if not self.weights.closed or not self.weights.quiet or self._loads or self._stores:
            return False
        self._forget(changed=True)
        self.weights.opened()
        self._lookups.closed = False
        return True

    def _forget(self, *, changed: bool = False) -> None:
        self._lookups.reset()
        self._coordinator.reset(changed=changed)

    def on_reset_flushed(self) -> None:
        """From vLLM 0.33 on: workers have ended every job of before the last reset."""
        with self._coordinator.core() as core:
            core.flushed()

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        return () if self._events is None else self._events.take()

    def withdraw_events(self) -> None:
        """NixlTiersConnector calls it ahead of a reset, and takes events then: later vLLM does not know any more what
        the chunks are."""
        if self._events is not None:
            self._events.withdraw()

    @override
    def get_stats(self) -> OffloadingConnectorStats | None:
        if self._meter.unpublished:
            self._meter.take_published()  # vLLM asks once for each step whose output it processes
        return self._reports.take(time.monotonic(), soon=bool(self._requests))

    @override
    def shutdown(self) -> None:
        if not self._closed:
            self._closed = True
            self._reports.close()
            self._coordinator.close(self._coordinator.times.shutdown_s)
