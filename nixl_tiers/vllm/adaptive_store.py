"""`store: adaptive`: asks the core's `Admission` what is worth storing, and tells it from which share on storing pays.

Storing everything pays where the share of chunks that come back is above what storing a chunk costs by what computing
it costs. Its cost is the connector's own time (own_time.py) in steps that store, by the chunks of these, while all are
stored. That leaves out by how much copies slow down the engine beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from nixl_tiers.config.schema import TiersConfig, Write
from nixl_tiers.core.ghost import Admission
from nixl_tiers.runtime.coordinator import Coordinator
from nixl_tiers.vllm.compat import OffloadKey, ReqContext, position_of
from nixl_tiers.vllm.kv_groups import KvGroups
from nixl_tiers.vllm.own_time import OwnTimes

LEAST, MOST = 0.005, 0.05  # shares: less is noise, and with more replayed traces lose more than a point of hits
PRICED_CHUNKS: Final = 4096  # after so many, those before count half


class AdaptiveStore:
    """`own_times`: None with OffloadingConnector, which does not report it: everything is stored then."""

    def __init__(self, coordinator: Coordinator, config: TiersConfig, groups: KvGroups) -> None:
        row_bytes = coordinator.region.geometry.row_bytes
        capacities = [tier.capacity for tier in config.storage if tier.write is not Write.OFF]
        rows = max(coordinator.region.rows, *(capacity // row_bytes for capacity in capacities), 1)
        self._coordinator = coordinator
        self._admission = Admission(rows)
        self._row_tokens = max(groups.chunk_tokens) / len(groups)  # that each row stands for; 0: not known
        self._own: dict[str, int] = {}  # tokens that requests begin with of vLLM's own cache
        self.own_times: OwnTimes | None = None
        self._began: tuple[float, float] | None = None  # the scheduler's and all time before the step that stores
        self._chunks = 0  # of that step
        self._seconds = self._priced = 0.0  # of such steps, and their chunks

    def began_at(self, request: str, tokens: int) -> None:
        self._own[request] = tokens

    def worth_storing(self, keys: list[OffloadKey], context: ReqContext) -> list[OffloadKey]:
        """Of the next chunks of a request, in prefix order, those that are to be stored: a prefix."""
        request = context.req_id
        own = self._own.pop(request, 0)
        computed = sum((position_of(key, context) or 0) > own for key in keys) if own else len(keys)
        kept = self._admission.offered(keys, request, len(keys) - computed)
        if kept and self.own_times is not None and not self._admission.selective:
            self.end_step()  # newer vLLM ends a step behind what it stores
            if self._began is None:
                self._began = self.own_times.scheduler.seconds, self._total(self.own_times)
            self._chunks += kept
        return keys[:kept]

    def loaded(self, keys: Sequence[OffloadKey], request: str) -> None:
        self._own.pop(request, None)
        self._admission.loaded(keys, request)

    def end_step(self) -> None:
        """A step is being planned. The scheduler's time goes up as that ends."""
        if self._began is None or self.own_times is None or self.own_times.scheduler.seconds == self._began[0]:
            return
        self._seconds += max(0.0, self._total(self.own_times) - self._began[1])
        self._priced += self._chunks
        if self._priced > PRICED_CHUNKS:
            self._seconds, self._priced = self._seconds / 2, self._priced / 2
        with self._coordinator.core() as core:
            speed = core.prefill.tokens_per_s
        if speed and self._row_tokens:
            compute_s = self._row_tokens / speed
            self._admission.pays = min(MOST, max(LEAST, self._seconds / self._priced / compute_s))
        self._began, self._chunks = None, 0

    def ended(self, request: str) -> None:
        self._own.pop(request, None)
        self._admission.ended(request)

    def reset(self) -> None:
        self._own.clear()
        self._admission.reset()

    def numbers(self) -> Mapping[str, float]:
        """By the names of `base/metrics.py`."""
        admission = self._admission
        return {"not_stored": float(admission.not_stored), "computed_again": float(admission.computed_again)}

    def _total(self, own_times: OwnTimes) -> float:
        numbers = own_times.numbers()
        return numbers["connector_scheduler_s"] + numbers["connector_worker_s"]
