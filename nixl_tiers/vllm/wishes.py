"""What requests ask of the tiers (request_options.py reads it), kept and followed from their arrival to their end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nixl_tiers.config.schema import TiersConfig
from nixl_tiers.core.requests import RequestWishes
from nixl_tiers.runtime.coordinator import COUNT_BATCH, Coordinator
from nixl_tiers.vllm.compat import OffloadKey, ReqContext, positions_of
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
        self._tenants: dict[str, int] = {}

    def begin(self, context: ReqContext) -> RequestOptions:
        """A new request is queued."""
        request = context.req_id
        options = self._reader.read(context)
        wishes = RequestWishes(
            allowed=options.tiers, host_only=options.store is not Scope.ALL, evict_first=options.hints.evict_first
        )
        with self._coordinator.core() as core:
            core.arrive(request, wishes)
        if not (options.loads and (options.tiers is None or options.tiers)):
            self.promote_none.add(request)
        if options.store is Scope.NONE:
            self.store_none.add(request)
        if options.hints.at_end:
            self.at_end[request] = options.hints.at_end
        return options

    def belongs(self, request: str, tenant: int) -> None:
        """A new request is this tenant's."""
        self._tenants[request] = tenant
        with self._coordinator.core() as core:
            core.set_tenant(request, tenant)

    def end(self, context: ReqContext) -> None:
        """The request has ended, and is forgotten; what it asked for the time after it is begun."""
        request = context.req_id
        for names in (self.store_none, self.promote_none):
            names.discard(request)
        hints, tenant = self.at_end.pop(request, ()), self._tenants.pop(request, 0)
        with self._coordinator.core() as core:
            core.finish(request)
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
                done = self._retain(keys, self._coordinator.now() + hint.seconds)
            else:
                with self._coordinator.core() as core:
                    done = core.prefetch(keys, self._coordinator.now() + hint.seconds, tenant)
            self._reader.hints.ended(hint, done=done)

    def _retain(self, keys: Sequence[OffloadKey], until_s: float) -> bool:
        """False: only the front of them, as the share for that is full."""
        for start in range(0, len(keys), COUNT_BATCH):
            with self._coordinator.core() as core:
                if not core.retain(keys[start : start + COUNT_BATCH], until_s):
                    return False
        return True
