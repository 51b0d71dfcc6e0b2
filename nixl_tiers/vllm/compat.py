"""Which vLLM this is, and every name of its offloading interface that we use, in one place.

The other modules of this package import vLLM from here, so that an unsupported version is refused with one sentence
instead of an ImportError from somewhere inside.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import vllm.version

OLDEST: Final = (0, 32)


class UnsupportedVllm(ImportError):
    """This vLLM has no offloading interface that we know; one sentence."""


def version() -> tuple[int, int] | None:
    """(major, minor) of the vLLM that is installed, None for a development tree without a version."""
    major, minor = vllm.version.__version_tuple__[:2]
    return (int(major), int(minor)) if (major, minor) != (0, 0) else None


def full_version() -> str:
    """As vLLM has it, for people."""
    return str(vllm.version.__version__)


def check(found: tuple[int, int] | None) -> None:
    """Raise UnsupportedVllm for a version that is known to have another interface."""
    if found is not None and found < OLDEST:
        raise UnsupportedVllm(
            f"nixl_tiers needs vLLM {OLDEST[0]}.{OLDEST[1]} or newer, and this is {found[0]}.{found[1]}, "
            "whose offloading specs have another interface"
        )


check(version())
try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.v1.core.kv_cache_utils import DEFAULT_NONE_HASH_SEED
    from vllm.v1.kv_offload.base import (
        CanonicalKVCaches,
        GPULoadStoreSpec,
        LoadStoreSpec,
        Locality,
        LookupResult,
        Medium,
        OffloadingCounterMetadata,
        OffloadingEvent,
        OffloadingGaugeMetadata,
        OffloadingHistogramMetadata,
        OffloadingManager,
        OffloadingMetricMetadata,
        OffloadingSpec,
        OffloadingWorker,
        OffloadKey,
        PrepareStoreOutput,
        ReqContext,
        RequestOffloadingContext,
        ScheduleEndContext,
        TierFilter,
        TransferResult,
        get_offload_group_idx,
    )
    from vllm.v1.kv_offload.config import OffloadingConfig
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError as error:
    raise UnsupportedVllm(
        f"nixl_tiers does not know the offloading interface of vLLM {vllm.version.__version__} ({error})"
    ) from error
if list(inspect.signature(OffloadingSpec.__init__).parameters) != ["self", "config"]:
    raise UnsupportedVllm(
        f"nixl_tiers does not know the offloading interface of vLLM {vllm.version.__version__} "
        "(a spec is not made from an OffloadingConfig alone)"
    )

# From 0.33 on vLLM keeps the tokens of pending hits too, and can be told to forget them without a word to routers.
PENDING_IS_KEPT: Final = "metadata_only" in {each.name for each in fields(OffloadingEvent)}


def host_event(keys: list[OffloadKey], removed: bool) -> OffloadingEvent:
    """That chunks are in host memory, or have left it."""
    # vLLM keeps their tokens until as many removals have come.
    return OffloadingEvent(keys=keys, medium=Medium.CPU, removed=removed, removal_expected=True)


def passing_events(keys: list[OffloadKey]) -> list[OffloadingEvent]:
    """vLLM keeps the tokens of chunks that are not in host memory (any more): it is to forget them."""
    if PENDING_IS_KEPT:
        return [OffloadingEvent(keys=keys, medium=Medium.CPU, removed=True, metadata_only=True)]
    return [host_event(keys, removed) for removed in (False, True)]


def storage_event(keys: list[OffloadKey], removed: bool, name: str, locality: str | None) -> OffloadingEvent:
    """The same of a storage tier. `locality`: LOCAL, REMOTE, or None if unknown."""
    place = None if locality is None else Locality(locality)
    return OffloadingEvent(
        keys=keys, medium=Medium.STORAGE, removed=removed, locality=place, ownership=name, removal_expected=True
    )


def positions_of(context: ReqContext) -> Mapping[OffloadKey, int]:
    """The end token of each key in its request. vLLM notes it before it asks for a key, or offers it."""
    positions: Mapping[OffloadKey, int] = context._offload_key_positions  # noqa: SLF001 - else one key at a time
    return positions


def position_of(key: OffloadKey, context: ReqContext) -> int:
    """The end token of `key` in its request."""
    return positions_of(context)[key]


def chunk_tokens(context: ReqContext) -> int:
    """Tokens of the request's first chunk: vLLM numbers them by their end tokens. 0 where it has none."""
    return next(iter(positions_of(context).values()), 0)


def scheduled_tokens(output: Any) -> list[tuple[int, int, bool]]:
    """Of each request that a vLLM SchedulerOutput schedules: tokens computed before, tokens to be computed now, whether
    they are part of a prompt, and not one token decoded (with its speculated ones). Of a new request they always are,
    be it only the last one, whose logits are needed although the whole prompt was loaded. Of a step that only decodes,
    one token of each request, none."""
    if not output.scheduled_new_reqs and sum(output.num_scheduled_tokens.values()) == len(output.num_scheduled_tokens):
        return []
    computed = {each.req_id: each.num_computed_tokens for each in output.scheduled_new_reqs}
    new = frozenset(computed)
    cached = output.scheduled_cached_reqs
    computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    speculated = output.scheduled_spec_decode_tokens
    return [
        (computed[request], count, request in new or count > 1 + len(speculated.get(request, ())))
        for request, count in output.num_scheduled_tokens.items()
        if request in computed
    ]


def beginning(output: Any) -> Iterator[tuple[str, int]]:
    """The requests with which a vLLM SchedulerOutput begins, or begins anew after a preemption, and how many tokens of
    each were not computed for it."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    if resumed := cached.resumed_req_ids:
        for request, tokens in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            if request in resumed:
                yield request, tokens


def step_tokens(scheduler_config: Any) -> int:
    """The most tokens that vLLM computes of a prompt in one step."""
    most = int(scheduler_config.max_num_batched_tokens)
    long = int(scheduler_config.long_prefill_token_threshold)
    return min(most, long) if long > 0 else most


def allowed_tiers(context: ReqContext, localities: Sequence[str | None]) -> list[int] | None:
    """Which of the storage tiers the request's `kv_load_tiers` allows; None for all. `localities`: of each tier LOCAL,
    REMOTE, or None if unknown, which is never a reason to leave it out."""
    wish = context.load_tier_filter
    if wish is TierFilter.ALL:
        return None
    places = [None if name is None else Locality(name) for name in localities]
    return [tier for tier, place in enumerate(places) if wish.allows(Medium.STORAGE, place)]


def declare_histogram(stats: OffloadingConnectorStats, name: str, labels: tuple[str, ...]) -> None:
    """Let a histogram have this series without a sample. vLLM has no call for it, but takes an empty list."""
    stats.observe_histogram(name, 0.0, labels)
    for by_name in stats.data.values():  # one has the types of metrics, one their values
        if isinstance(by_name, dict) and isinstance(by_name.get(name), dict):  # not what 0.33 adds
            by_name[name][labels].clear()


def device_name() -> str:
    """What computes in this engine: the name of its GPU, or its processor with the number of cores that it may use."""
    from vllm.platforms import current_platform

    name = str(current_platform.get_device_name())
    if not current_platform.is_cpu():
        return name
    model = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"{model[1] if model else name}, {len(os.sched_getaffinity(0))} cores"


def block_hash_seed(algorithm: str) -> str | None:
    """The seed of block hashes of this algorithm; None where every process draws its own."""
    return os.environ.get("PYTHONHASHSEED", None if "xxhash" in algorithm else DEFAULT_NONE_HASH_SEED)


def replicas(config: OffloadingConfig) -> int:
    """How many data-parallel engines there are."""
    return int(config.parallel.data_parallel_size)


def replica(config: OffloadingConfig) -> int:
    """Which of them this is, from 0 on."""
    return int(config.parallel.data_parallel_index)


def is_recurrent(layer: object) -> bool:
    """Whether a layer of the model keeps a state instead of keys and values."""
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    return isinstance(layer, MambaBase)


def is_full_attention(spec: Any) -> bool:
    """Whether all layers of a KV group with this spec attend to the whole context. Workers have the specs of each
    layer where the scheduler has one of them."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    by_layer = getattr(spec, "kv_cache_specs", None)
    return all(isinstance(each, FullAttentionSpec) for each in (by_layer.values() if by_layer else (spec,)))


def group_ids(config: OffloadingConfig) -> tuple[int, ...]:
    """vLLM's own number of each offloaded KV group, as it is in the keys."""
    return tuple(group.group_id for group in config.groups)


def windows(scheduler: Any) -> dict[int, int | None]:
    """Of each KV group of vLLM's OffloadingConnectorScheduler, by its number, how many chunks before its end a load
    needs; None: all."""
    return {group.group_idx: group.sliding_window_size_in_chunks for group in scheduler.config.kv_group_configs}


def prepares_first(vllm_config: Any) -> bool:
    """Whether a step zeroes blocks and copies them before it waits for the stores that still read them. The V2 model
    runner does (`update_requests`, then `pre_forward`)."""
    return bool(getattr(vllm_config, "use_v2_model_runner", False))


def prepares_blocks(output: Any) -> bool:
    """Whether this step zeroes blocks or copies to them. V1 and V2 model runners do, with recurrent state, or where KV
    has several precisions (`needs_kv_cache_zeroing`)."""
    return bool(output.new_block_ids_to_zero or output.kv_cache_block_copies)


def stored_by(scheduler: Any, jobs: Iterable[int]) -> Iterator[OffloadKey]:
    """The keys of the stores among these open jobs of vLLM's OffloadingConnectorScheduler."""
    for job in map(scheduler._jobs.__getitem__, jobs):  # noqa: SLF001 - no vLLM shows it in another way
        if job.is_store:
            yield from job.keys


def models_of(worker: Any) -> list[Any]:
    """The model and its draft model, if there is one, of vLLM's worker."""
    runner = worker.model_runner
    return [model for model in (runner.get_model(), runner.get_draft_model()) if model is not None]


def calling_worker() -> Any:
    """vLLM's worker in whose method this happens, or None: connectors are not given it."""
    from vllm.v1.worker.worker_base import WorkerBase

    frame = inspect.currentframe()
    while frame is not None:
        if isinstance(found := frame.f_locals.get("self"), WorkerBase):
            return found
        frame = frame.f_back
    return None


__all__ = [
    "OLDEST",
    "PENDING_IS_KEPT",
    "CacheHitSource",
    "CanonicalKVCaches",
    "GPULoadStoreSpec",
    "KVConnectorTransferResults",
    "LoadStoreSpec",
    "LookupResult",
    "OffloadKey",
    "OffloadingConfig",
    "OffloadingConnectorStats",
    "OffloadingCounterMetadata",
    "OffloadingEvent",
    "OffloadingGaugeMetadata",
    "OffloadingHistogramMetadata",
    "OffloadingManager",
    "OffloadingMetricMetadata",
    "OffloadingSpec",
    "OffloadingWorker",
    "PrepareStoreOutput",
    "ReqContext",
    "RequestOffloadingContext",
    "ScheduleEndContext",
    "TransferResult",
    "UnsupportedVllm",
    "allowed_tiers",
    "beginning",
    "block_hash_seed",
    "check",
    "chunk_tokens",
    "declare_histogram",
    "device_name",
    "full_version",
    "get_offload_group_idx",
    "group_ids",
    "host_event",
    "is_full_attention",
    "is_recurrent",
    "passing_events",
    "position_of",
    "positions_of",
    "prepares_blocks",
    "prepares_first",
    "replica",
    "replicas",
    "scheduled_tokens",
    "step_tokens",
    "storage_event",
    "stored_by",
    "version",
    "windows",
]
