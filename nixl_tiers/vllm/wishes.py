"""What requests ask of the tiers (request_options.py reads it), kept and followed from their arrival to their end."""

from __future__ import annotations

from collections.abc import Iterable

from nixl_tiers.config.schema import TiersConfig
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.vllm.compat import ReqContext, positions_of
from nixl_tiers.vllm.hints import AtEnd, Outcome, Verb
from nixl_tiers.vllm.request_options import RequestOptions, RequestOptionsReader, Scope


class Wishes:
    """`store_none`: requests nothing of which is stored; `promote_none`: those that may not load from storage;
    `at_end`: what requests asked for the time after them."""

    def __init__(self, coordinator: Coordinator, config: TiersConfig) -> None:
        self._coordinator = coordinator
        self._reader = RequestOptionsReader(config.names, [tier.locality for tier in config.storage])
        self.store_none: set[str] = set()
        self.promote_none: set[str] = set()
        self.at_end: dict[str, tuple[AtEnd, ...]] = {}

    def begin(self, context: ReqContext) -> RequestOptions:
        """A new request is queued."""
        request = context.req_id
        options = self._reader.read(context)
        with self._coordinator.core() as core:
            core.queue(request)
            if options.tiers is not None:
                core.set_allowed_tiers(request, options.tiers)
            if options.store is not Scope.ALL:
                core.keep_in_host(request)
            if options.hints.evict_first:
                core.evict_first(request)
        if not (options.loads and (options.tiers is None or options.tiers)):
            self.promote_none.add(request)
        if options.store is Scope.NONE:
            self.store_none.add(request)
        if options.hints.at_end:
            self.at_end[request] = options.hints.at_end
        return options

    def end(self, context: ReqContext) -> None:
        """The request has ended, and is forgotten; what it asked for the time after it is begun."""
        request = context.req_id
        for names in (self.store_none, self.promote_none):
            names.discard(request)
        hints = self.at_end.pop(request, ())
        with self._coordinator.core() as core:
            tenant = core.tenant_of(request) if hints else 0
            core.finish_request(request)
        if hints:
            self._follow(hints, context, tenant)

    def counts(self) -> dict[str, float]:
        """The numbers of hints so far."""
        hints = self._reader.hints
        return {"kv_hints": float(hints.requests)} | {
            f"hints_{outcome}": float(hints.outcomes[outcome]) for outcome in Outcome
        }

    def _follow(self, hints: Iterable[AtEnd], context: ReqContext, tenant: int) -> None:
        """Retain the request's chunks that are there, and promote them before they are needed."""
        positions = positions_of(context)
        keys = sorted(positions, key=positions.__getitem__)
        for hint in hints:
            if hint.verb is Verb.RETAIN:
                done = self._coordinator.retain(keys, hint.seconds)
            else:
                with self._coordinator.core() as core:
                    done = core.retention.prefetch(keys, self._coordinator.now() + hint.seconds, tenant)
            self._reader.hints.ended(hint, done=done)
