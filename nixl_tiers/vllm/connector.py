"""`NixlTiersConnector`: vLLM's OffloadingConnector, but a load that a worker could not copy is recomputed.

vLLM's own connector cannot report a failed load: it asserts, and the engine ends. This one reports the request as
vLLM's other connectors do. With `kv_load_failure_policy: recompute` the request is then computed from its beginning;
with vLLM's default, `fail`, that request alone ends with an error.

And it sees requests when they arrive: their chunks are promoted while they wait for their turn.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from nixl_tiers.config.schema import load
from nixl_tiers.config.source import without_vllm
from nixl_tiers.vllm import compat
from nixl_tiers.vllm.chains import Arrivals, chain_at_arrival
from nixl_tiers.vllm.chunk_size import with_chunks
from nixl_tiers.vllm.compat import KVConnectorTransferResults, beginning, scheduled_tokens
from nixl_tiers.vllm.fingerprint import current_vllm_config
from nixl_tiers.vllm.log_line import LoggedStats
from nixl_tiers.vllm.manager import NixlTiersManager
from nixl_tiers.vllm.plugin import SPEC
from nixl_tiers.vllm.replicated import copies_by_configuration, told
from nixl_tiers.vllm.worker import NixlTiersWorker

log = logging.getLogger(__name__)


class NixlTiersConnector(OffloadingConnector):
    """The value of `kv_connector` instead of OffloadingConnector, with the same fields in kv_connector_extra_config.

    ValueError with one sentence if the spec is another, or loads are configured that cannot be recomputed when they
    fail.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        transfer = vllm_config.kv_transfer_config
        refuse(transfer.kv_connector_extra_config)
        with told(copies_by_configuration(vllm_config, kv_cache_config)):
            super().__init__(with_chunks(vllm_config, kv_cache_config), role, kv_cache_config)
        self._loading: dict[int, str] = {}  # job -> request, on workers
        if self.connector_scheduler is not None:
            self._manager.times_are_published(compat.step_tokens(vllm_config.scheduler_config))
            self._manager.windows_are_known(compat.windows(self.connector_scheduler))
        self._prepares_first = compat.prepares_first(vllm_config)
        self._by_priority = vllm_config.scheduler_config.policy == "priority"
        # Groups that are not offloaded bound a load, which vLLM finds out at the request's turn.
        self._anticipates = not self._bounding_group_ids
        self._arrivals = Arrivals()
        self._withdrawn: list[Any] = []  # KV events of before the last reset
        if self.connector_scheduler is None and vllm_config.parallel_config.rank == 0:
            # vLLM goes by its own configuration, which of the two roles only workers see under MultiConnector.
            policy = (current_vllm_config() or vllm_config).kv_transfer_config.kv_load_failure_policy
            if policy != "recompute":
                log.warning(
                    "nixl_tiers: kv_load_failure_policy is %s, so a request whose load fails ends with an error; "
                    "set it to recompute to have it recomputed (under MultiConnector: beside its name)",
                    policy,
                )

    # --- on workers --------------------------------------------------------------------------------------------

    @override
    def register_kv_caches(self, kv_caches: Any) -> None:
        super().register_kv_caches(kv_caches)
        self._worker.keep_failed_loads()
        self._worker.collect()

    @override
    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """vLLM submits the stores of the step before, and waits for those whose blocks this step writes to. From here
        on it may launch work that does."""
        super().handle_preemptions(kv_connector_metadata)
        self._worker.flush()
        if (step := getattr(kv_connector_metadata, "step", None)) is not None:
            self._worker.step_clock.begin(step)

    @override
    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Behind this point a step reads no block that was freed when it was scheduled, or vLLM itself could not use
        it again in that step. So its loads need not wait for its forward pass, behind whose launch vLLM submits them.
        Not earlier: before it the runner zeroes blocks, copies them and moves recurrent state."""
        super().bind_connector_metadata(connector_metadata)
        if connector_metadata.load_jobs:
            self._worker.mark_loads()

    @override
    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._worker.unmark_loads()

    @override
    def wait_for_save(self) -> None:
        self._worker.step_clock.end()
        super().wait_for_save()

    @override
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for job_id, job in self._get_connector_metadata().load_jobs.items():
            self._loading[job_id] = job.req_id
        super().start_load_kv(forward_context, **kwargs)
        self._worker.flush()
        self._worker.unmark_loads()

    @override
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        for job_id in self._worker.take_failed_loads():
            results.failed_recving.add(self._loading[job_id])
        if results.finished_recving:  # a request has one load at a time
            ended = [job_id for job_id, request in self._loading.items() if request in results.finished_recving]
            for job_id in ended:
                del self._loading[job_id]
        return results

    # --- in the API server -------------------------------------------------------------------------------------

    @classmethod
    @override
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Not. What vLLM asks here, before it starts a process, is where it first hands over the configuration."""
        refuse(extra_config)
        load(without_vllm(extra_config))  # without a look at this machine, which need not be the engine's
        return False

    @classmethod
    @override
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> LoggedStats:
        return LoggedStats() if data is None else LoggedStats(data=data)

    # --- in the scheduler --------------------------------------------------------------------------------------

    @override
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._manager.began_at(request.request_id, num_computed_tokens)
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return found

    @override
    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """vLLM asks for each chunk, which takes longer than all the rest of a hit."""
        sources: dict[Any, int]
        if (source := self._manager.only_source(request.request_id, num_external_tokens)) is not None:
            sources = {source: num_external_tokens}
        else:
            sources = super().get_external_cache_hit_sources(request, num_external_tokens)
        return sources

    @override
    def build_connector_meta(self, scheduler_output: Any) -> Any:
        manager = self._manager
        new, cached = scheduler_output.scheduled_new_reqs, scheduler_output.scheduled_cached_reqs
        if (new or cached.resumed_req_ids) and manager.in_doubt:
            manager.began(beginning(scheduler_output))
        meta = super().build_connector_meta(scheduler_output)
        if self._prepares_first and meta.jobs_to_flush and compat.prepares_blocks(scheduler_output):
            manager.spoil(compat.stored_by(self.scheduler, meta.jobs_to_flush))
        if self._arrivals.waiting:
            self._fill_line()
        meta.step = manager.scheduled(scheduled_tokens(scheduler_output))  # which workers publish its time by
        return meta

    @override
    def _max_loadable_tokens(self, request: Any, num_computed_tokens: int) -> int | None:
        """What vLLM asks before each look-up of a request."""
        bound: int | None = super()._max_loadable_tokens(request, num_computed_tokens)
        self._manager.bound_load(request.request_id, bound)
        return bound

    @override
    def on_new_request(self, request: Any) -> None:
        """A request joins the scheduler's queue: what it is going to load comes up while it waits there."""
        super().on_new_request(request)
        self._manager.salt_of(request.request_id, request.cache_salt)
        if self._anticipates and self._manager.anticipates(request.request_id):
            rank = (float(request.priority), request.arrival_time) if self._by_priority else (0.0,)
            self._arrivals.add(request.request_id, rank)
            self._fill_line()

    @override
    def update_connector_output(self, connector_output: Any) -> None:
        """vLLM reports a failed load in the step in which all workers have ended it."""
        if connector_output.failed_recving:
            manager = self._manager
            for request in connector_output.failed_recving:
                if manager.load_failed(request):
                    log.warning("nixl_tiers: the load of request %s failed; its chunks are dropped", request)
        super().update_connector_output(connector_output)

    @override
    def reset_cache(self) -> bool | None:
        self._manager.withdraw_events()
        self._withdrawn += super().take_events()
        done: bool | None = super().reset_cache()
        return done

    @override
    def take_events(self) -> Iterable[Any]:
        withdrawn, self._withdrawn = self._withdrawn, []
        return [*withdrawn, *super().take_events()]

    def _fill_line(self) -> None:
        """Requests are next in line by now: read their chains."""
        manager = self._manager
        for request, rank in self._arrivals.take(lambda request, rank: manager.anticipate(request, (), rank)):
            try:
                keys = chain_at_arrival(self.scheduler, self._kv_cache_manager.block_pool, request)
            except Exception as error:  # noqa: BLE001 - what vLLM keeps there is its own, and its change ends no engine
                self._anticipates = False
                log.warning(
                    "nixl_tiers: this vLLM does not show its queue (%r): requests load at their turn only", error
                )
                self._arrivals = Arrivals()
                return
            manager.anticipate(request, keys, rank)

    @cached_property
    def _manager(self) -> NixlTiersManager:
        manager = self.scheduler.manager
        assert isinstance(manager, NixlTiersManager)
        return manager

    @cached_property
    def _worker(self) -> NixlTiersWorker:
        assert self.connector_worker is not None
        worker = self.connector_worker.worker
        assert isinstance(worker, NixlTiersWorker)
        return worker


def refuse(extra: dict[str, Any]) -> None:
    """Raise ValueError for a kv_connector_extra_config with which failed loads could not be recomputed."""
    if extra.get("spec_name") != SPEC:
        raise ValueError(f"spec_name: NixlTiersConnector needs {SPEC}, not {extra.get('spec_name')}")
    if extra.get("sync_load_budget_bytes"):
        raise ValueError(
            "sync_load_budget_bytes makes loads that are part of a step and cannot be computed again when they fail: "
            "remove it from kv_connector_extra_config, or use kv_connector OffloadingConnector"
        )
