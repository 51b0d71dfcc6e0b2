"""`NixlTiersSpec`: what vLLM's OffloadingConnector constructs, once in the scheduler and once in every worker.

Importing this module and constructing the spec start nothing: a configuration that cannot work is refused before any
memory, process or file is created. get_worker and get_manager, which vLLM calls in that order, create them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, ClassVar, Final

from typing_extensions import override

from nixl_tiers.base.chunk import Geometry, Namespace
from nixl_tiers.base.manifest import Description
from nixl_tiers.base.times import PRODUCTION, Times
from nixl_tiers.config import schema as tiers_config
from nixl_tiers.config.schema import ConfigError, FileConfig, TiersConfig
from nixl_tiers.config.source import without_vllm
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.region_layout import RegionError
from nixl_tiers.memory.rendezvous import OtherSizes, rendezvous
from nixl_tiers.runtime.here import ask
from nixl_tiers.vllm import compat, contract, live, metrics, replicated
from nixl_tiers.vllm.amplification import refuse_amplification
from nixl_tiers.vllm.compat import (
    CanonicalKVCaches,
    OffloadingConfig,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
)

log = logging.getLogger(__name__)

WEIGHTS_S: Final = 600.0  # for the rank that reads the weight files


class NixlTiersSpec(OffloadingSpec):
    """KV tiers below the GPU: pinned host memory, files, S3. ValueError with one sentence if they cannot work."""

    times: ClassVar[Times] = PRODUCTION  # tests set others before an engine starts

    @classmethod
    @override
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        live.show()
        return metrics.definitions()

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        log_as_vllm()
        contract.check_newer(compat.version())
        refuse_layout(config)
        tiers = tiers_config.load(without_vllm(config.extra_config))
        self._here = ask(tiers, starting=True, deadline_s=self.times.open_s, in_all_s=self.times.look_s)
        self._replicas = replicas_of(config, tiers)
        self.tiers = tiers.model_copy(update={"replicas": self._replicas})
        self._times_steps = replicated.is_told()  # what vLLM's own connector does not
        self._copies = replicated.copies_of(config)
        self._lay_out(self._copies.ranks)
        self._manager: OffloadingManager | None = None
        self._worker: OffloadingWorker | None = None

    @override
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            self._worker = self._make_worker(kv_caches)
        return self._worker

    @override
    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            self._manager = self._make_manager()
        return self._manager

    def _lay_out(self, copies: int) -> None:
        self.geometry = geometry_of(self.config, copies)
        self.rows = rows_of(self.tiers, self.geometry, self._replicas)

    def _rendezvous(self) -> HostRegion:
        ranks = self.config.parallel.world_size
        try:
            return rendezvous(
                self.config.engine_id,
                self.geometry,
                self.rows,
                ranks + 1,  # and the scheduler
                self.times.rendezvous_s,
                huge_pages=self.tiers.cpu.huge_pages,
                copies=ranks // self.geometry.cells,
                answer_s=self.times.rendezvous_answer_s,
            )
        except OtherSizes as error:
            if self.config.parallel.pp_size == 1:
                raise
            raise OtherSizes(
                f"{error}; with pipeline parallelism all stages need equally many bytes of KV a block, as with equally "
                "many layers (VLLM_PP_LAYER_PARTITION)"
            ) from None

    def _make_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        from nixl_tiers.vllm.fingerprint import Fingerprint, current_vllm_config, fingerprint, names_of, weights_of
        from nixl_tiers.vllm.layers import digest_of_layers
        from nixl_tiers.vllm.weight_changes import watch_weights
        from nixl_tiers.vllm.worker import worker_over

        vllm_config = current_vllm_config()
        refuse_nodes(vllm_config)
        rank = self.config.parallel.rank
        caller = compat.calling_worker()
        runner = getattr(caller, "model_runner", None)
        refuse_amplification(self.config, getattr(runner, "kv_cache_config", None))
        if not self._times_steps:
            refuse_spoiled_stores(vllm_config, getattr(runner, "kv_cache_config", None))
        self._confirm_copies(caller, vllm_config)
        region = self._rendezvous()
        try:
            weights = Fingerprint(*self._of_one_rank(region, lambda: weights_of(vllm_config, self.tiers)))
            digest, note = fingerprint(self.config, self.tiers, self.geometry, kv_caches, vllm_config, weights=weights)
            worker = worker_over(region, kv_caches, rank, last_block_only(self.config, vllm_config), self.times)
            if rank == 0:
                region.ranks.publish_model(*names_of(vllm_config))
            watch_weights(region, rank, caller)
            if self.tiers.storage and not note:
                if caller is None:
                    note = "storage tiers are refused, because this vLLM does not show its worker's layers"
                else:
                    context = vllm_config.compilation_config.static_forward_context
                    region.ranks.publish_layers(rank, digest_of_layers(compat.models_of(caller), context))
            region.ranks.publish(rank, digest, note)
        except BaseException:
            region.close()
            raise
        return worker

    def _confirm_copies(self, worker: Any, vllm_config: Any) -> None:
        if self._copies.declared:
            return
        layers = vllm_config.compilation_config.static_forward_context if vllm_config is not None else {}
        names = {name for group in self.config.groups for name in group.layer_names}
        if not replicated.confirmed(worker, layers, names, self._copies.ranks):
            self._lay_out(1)
            if self.config.parallel.rank == 0:
                log.warning(
                    "nixl_tiers: by its configuration this model has each KV head on %d ranks, and its layers do not "
                    "confirm it: each rank's KV blocks are stored",
                    self._copies.ranks,
                )

    def _of_one_rank(self, region: HostRegion, find: Callable[[], tuple[bytes, str]]) -> tuple[bytes, str]:
        try:
            return region.ranks.shared_by_ranks(find, WEIGHTS_S)
        except RegionError as error:
            raise RegionError(f"the weights' identity: {error}; with model_id set, no weight file is read") from None

    def _make_manager(self) -> OffloadingManager:
        from nixl_tiers.runtime.coordinator import Coordinator
        from nixl_tiers.vllm.events import EventLog
        from nixl_tiers.vllm.live import LiveGauges
        from nixl_tiers.vllm.manager import NixlTiersManager
        from nixl_tiers.vllm.pause import PAUSE_S

        try:
            region = self._rendezvous()
        except OtherSizes:
            if self._copies.declared:
                raise
            self._lay_out(1)  # as the workers have, who looked at their layers
            region = self._rendezvous()
        try:
            stages, times = self.config.parallel.pp_size, self.times
            namespace = agreed_namespace(region, self.tiers, times.rendezvous_s, stages=stages)
            model, revision = region.ranks.model
            description = description_of(self.config, revision)
            device = compat.device_name() if self._times_steps else None
            coordinator = Coordinator.open(
                self.tiers, namespace, region, device=device, description=description, here=self._here, times=times
            )
        except BaseException:
            region.close()
            raise
        if not self._times_steps:
            warn_without_prices(self.tiers)
        # Data-parallel replicas step together: one that waits for storage must not make the others wait.
        pause_s = PAUSE_S if compat.replicas(self.config) == 1 else 0.0
        chunk_tokens = [group.tokens_per_block * self.config.cache.blocks_per_chunk for group in self.config.groups]
        events = None
        if self.kv_events_config.enable_kv_cache_events:
            events = EventLog(coordinator, max(chunk_tokens))
        return NixlTiersManager(
            coordinator,
            self.tiers,
            compat.group_ids(self.config),
            events,
            pause_s=pause_s,
            chunk_tokens=chunk_tokens,
            live=LiveGauges(model, compat.replica(self.config)) if model else None,
        )


def geometry_of(config: OffloadingConfig, copies: int) -> Geometry:
    """One cell for the ranks that hold the same bytes, one sub-block an engine block."""
    if config.worker_kv_bytes_per_block < 1:
        raise ValueError("vLLM does not report how many KV bytes a block has, so nothing can be offloaded")
    blocks = config.cache.blocks_per_chunk
    return Geometry(config.parallel.world_size // copies, config.worker_kv_bytes_per_block * blocks, blocks)


def replicas_of(config: OffloadingConfig, tiers: TiersConfig) -> int:
    """How many engines of this node share the capacity of the cpu tier and of file tiers: from the configuration, else
    from vLLM.

    vLLM reports the number of replicas on all nodes together, which keeps the budget but may leave some of it unused.
    For models without experts, whose replicas it runs as separate engines, it reports nothing.
    """
    if tiers.replicas is not None:
        return tiers.replicas
    reported = compat.replicas(config)
    index = compat.replica(config)
    if reported == 1 and index > 0:
        paths = [
            f"tiers[{i}].path"
            for i, tier in enumerate(tiers.tiers)
            if isinstance(tier, FileConfig) and tier.layout == "slabs"
        ]
        log.warning(
            "nixl_tiers: this engine is data-parallel replica %d, and vLLM does not say how many share this node: "
            "set replicas, or each of them takes the cpu tier's whole capacity%s",
            index,
            f", and only one of them can use {' and '.join(paths)}" if paths else "",
        )
    return reported


def rows_of(tiers: TiersConfig, geometry: Geometry, replicas: int) -> int:
    """How many rows this engine's share of the cpu tier holds; `replicas` data-parallel engines share its capacity.

    Raises ConfigError for a tier that does not hold a single row.
    """
    tiers_config.check_rows(tiers, geometry.row_bytes)
    rows = tiers.cpu.capacity // replicas // geometry.row_bytes
    if rows < 1:
        raise ConfigError(
            f"tiers[0].capacity: {tiers_config.format_size(tiers.cpu.capacity)} shared by {replicas} data-parallel "
            f"replicas does not hold one chunk each, which takes {tiers_config.format_size(geometry.row_bytes)} here"
        )
    return rows


def warn_without_prices(tiers: TiersConfig) -> None:
    """With vLLM's own connector, from which the time of steps cannot be learned."""
    if tiers.storage and tiers.prefill_tokens_per_s is None:
        log.warning(
            "nixl_tiers: OffloadingConnector does not show how fast prompts are computed, so that every hit is loaded, "
            "however slow its tier is: set prefill_tokens_per_s, or use kv_connector NixlTiersConnector"
        )


def refuse_layout(config: OffloadingConfig) -> None:
    """Raise ValueError for layouts that are not supported."""
    if config.canonical_layout:
        raise ValueError("nixl_tiers has its own row layout: remove canonical_layout from kv_connector_extra_config")


def refuse_nodes(vllm_config: Any) -> None:
    """Raise ValueError if this engine's workers could not share a region: they are on several nodes, or each has a
    scheduler of its own."""
    parallel = getattr(vllm_config, "parallel_config", None)
    nodes, ranks = getattr(parallel, "nnodes_within_dp", 1), getattr(parallel, "world_size", 1)
    if ranks > 1 and getattr(parallel, "distributed_executor_backend", None) == "external_launcher":
        raise ValueError(
            "nixl_tiers does not work with distributed_executor_backend external_launcher "
            f"and {ranks} ranks, because every rank is an engine of its own there: use mp"
        )
    if nodes > 1:
        raise ValueError(f"nixl_tiers needs all workers of an engine on one node, and this engine has {nodes} nodes")


def refuse_spoiled_stores(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise ValueError if a step of this engine may write to blocks before the stores from them have ended: vLLM's own
    connector does not show which."""
    if compat.prepares_first(vllm_config) and getattr(kv_cache_config, "needs_kv_cache_zeroing", False):
        raise ValueError(
            "nixl_tiers: with recurrent layers, or KV of several precisions, the V2 model runner may zero a block "
            "before OffloadingConnector has stored it: use kv_connector NixlTiersConnector, or set "
            "VLLM_USE_V2_MODEL_RUNNER=0"
        )


def last_block_only(config: OffloadingConfig, vllm_config: Any) -> list[int]:
    """Places of the KV groups of whose chunks loads read only the last block: a recurrent layer's state there
    replaces all earlier blocks, and vLLM keeps and stores no other block of the chunk."""
    cache_config = getattr(vllm_config, "cache_config", None)
    if getattr(cache_config, "mamba_cache_mode", None) != "align":
        return []
    layers = vllm_config.compilation_config.static_forward_context
    return [
        place
        for place, group in enumerate(config.groups)
        if all(compat.is_recurrent(layers.get(name)) for name in group.layer_names)
    ]


def description_of(config: OffloadingConfig, revision: str) -> Description:
    """What manifests say of this engine's rows."""
    return Description(
        model=str(config.model.name),
        revision=revision,
        dtype=str(config.model.dtype),
        layout=config.kv_cache_layout or "",
        chunk_tokens=min((group.tokens_per_block for group in config.groups), default=0)
        * config.cache.blocks_per_chunk,
        vllm=compat.full_version(),
    )


def agreed_namespace(region: HostRegion, tiers: TiersConfig, timeout_s: float, *, stages: int = 1) -> Namespace:
    """The namespace that all workers publish: of a pipeline, those of its stages in their order, since each has other
    layers. Ranks of a stage that compute with other things than each other have a namespace of their own. ValueError if
    the workers of a stage differ otherwise, do not join in time, or refuse storage."""
    deadline = time.monotonic() + timeout_s
    while None in (published := region.ranks.published()):
        if time.monotonic() > deadline:
            missing = [rank for rank, mine in enumerate(published) if mine is None]
            raise ValueError(f"workers {missing} did not join within {timeout_s:.0f} s; all must be on this node")
        time.sleep(0.01)
    known = [mine for mine in published if mine is not None]
    notes = {note for _, note in known if note}
    if notes:
        note = min(notes)
        if tiers.storage:
            raise ValueError(note)
        log.warning("nixl_tiers: host memory only; %s", note)
    size = len(known) // stages  # vLLM numbers its ranks stage by stage
    stage_of_ranks = [slice(begin, begin + size) for begin in range(0, len(known), size)]
    by_stage = [{digest.hex() for digest, _ in known[ranks]} for ranks in stage_of_ranks]
    if any(len(digests) > 1 for digests in by_stage):
        raise ValueError("the workers of this engine do not run the same model with the same options")
    worker, *others = (digests.pop() for digests in by_stage)
    layers = [region.ranks.layers[ranks] for ranks in stage_of_ranks]
    # One for ranks that are alike: tensor-parallel sizes with the same rows share them.
    computed = [stage if len(set(stage)) > 1 else stage[0] for stage in layers]
    return Namespace.of({"worker": worker, "layers": computed} | ({"stages": others} if others else {}))


def log_as_vllm() -> None:
    """Make our loggers descend from vLLM's, which it configures by itself and keeps apart from the root logger.

    Otherwise our INFO lines would be dropped, and warnings come without time and level. A logger `nixl_tiers` that has
    handlers or a level of its own is left as it is.
    """
    ours = logging.getLogger("nixl_tiers")
    if not ours.handlers and ours.propagate:
        ours.parent = logging.getLogger("vllm")
        ours.setLevel(ours.level)  # loggers remember which levels are enabled; this has them look again
