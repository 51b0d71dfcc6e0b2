"""Whether the vLLM that is installed still has the interface that this package is written against.

vLLM does not declare its offloading interface stable: it changes with minor versions. What we override must exist and
take what vLLM passes, and what we read must be there; else an engine fails at a step, or never calls what it should.
The tests check it, and so does the start of an engine whose vLLM is newer than what was tried.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from inspect import Parameter
from typing import Any, Final

from nixl_tiers.vllm import compat

NEWEST: Final = (0, 33)  # that was tried: docs/guide/compatibility.md
log = logging.getLogger(__name__)

# Fields of vLLM's classes for which nothing else will do.
FIELDS: Final[Mapping[str, Sequence[str]]] = {
    "vllm.v1.kv_offload.config.OffloadingConfig": (
        *("groups", "worker_kv_bytes_per_block", "enable_kv_cache_events", "extra_config", "engine_id"),
        *("model", "cache", "parallel", "replicated_layout", "canonical_layout", "kv_cache_layout"),
    ),
    "vllm.v1.kv_offload.config.OffloadingGroupConfig": ("tokens_per_block", "layer_names", "group_id"),
    "vllm.v1.kv_offload.config.OffloadingModelConfig": ("name", "dtype"),
    "vllm.v1.kv_offload.config.OffloadingCacheConfig": ("tokens_per_hash", "blocks_per_chunk"),
    "vllm.v1.kv_offload.config.OffloadingParallelConfig": (
        *("rank", "world_size", "tp_size", "pp_size", "pcp_size", "dcp_size"),
        *("data_parallel_index", "data_parallel_size"),
    ),
    "vllm.v1.kv_offload.base.CanonicalKVCaches": ("tensors", "group_data_refs"),
    "vllm.v1.kv_offload.base.CanonicalKVCacheRef": ("tensor_idx", "page_size_bytes"),
    "vllm.v1.kv_offload.base.ReqContext": (
        *("req_id", "kv_transfer_params", "kv_hints", "load_tier_filter", "_offload_key_positions"),
    ),
    "vllm.v1.kv_offload.base.ScheduleEndContext": ("new_req_ids", "preempted_req_ids"),
    "vllm.v1.core.sched.output.SchedulerOutput": (
        *("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "scheduled_spec_decode_tokens"),
    ),
    "vllm.v1.core.sched.output.NewRequestData": ("req_id", "num_computed_tokens"),
    "vllm.v1.core.sched.output.CachedRequestData": ("req_ids", "num_computed_tokens", "resumed_req_ids"),
    "vllm.v1.outputs.KVConnectorOutput": ("failed_recving",),
    "vllm.v1.kv_cache_interface.KVCacheConfig": ("kv_tp_replicas",),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler.GroupOffloadConfig": (
        *("group_idx", "sliding_window_size_in_chunks"),
    ),
}


def check_newer(found: tuple[int, int] | None) -> None:
    """Of a vLLM that is newer than what was tried: a warning, or UnsupportedVllm with the first difference."""
    if found is None or found <= NEWEST:
        return
    if other := differences():
        raise compat.UnsupportedVllm(
            f"nixl_tiers does not know the offloading interface of vLLM {compat.full_version()}: {other[0]}"
        )
    log.warning(
        "nixl_tiers: vLLM %s is newer than what was tried (to %d.%d); its offloading interface has not changed",
        compat.full_version(),
        *NEWEST,
    )


def differences() -> list[str]:
    """What is not as we use it, a sentence each."""
    return [*_of_fields(), *(text for ours, theirs in _classes() for text in _of_methods(ours, theirs))]


def _classes() -> Iterator[tuple[type, type]]:
    """Classes of ours that vLLM calls, and of vLLM's that they stand for."""
    from nixl_tiers.vllm.connector import NixlTiersConnector
    from nixl_tiers.vllm.manager import NixlTiersManager
    from nixl_tiers.vllm.spec import NixlTiersSpec
    from nixl_tiers.vllm.worker import NixlTiersWorker

    yield NixlTiersSpec, compat.OffloadingSpec
    yield NixlTiersManager, compat.OffloadingManager
    yield NixlTiersWorker, compat.OffloadingWorker
    yield NixlTiersConnector, NixlTiersConnector.__mro__[1]


def _of_methods(ours: type, theirs: type) -> Iterator[str]:
    for name in sorted(getattr(ours, "__abstractmethods__", ())):
        yield f"{theirs.__name__} has a method {name} that has to be written"
    for name, method in vars(ours).items():
        function = getattr(method, "__func__", method)
        if not getattr(function, "__override__", False):
            continue
        base = inspect.getattr_static(theirs, name, None)
        base = getattr(base, "__func__", getattr(base, "fget", base))
        if base is None:
            yield f"{theirs.__name__} has no method {name} any more"
        elif inspect.isfunction(function) and (argument := _not_taken(function, base)):
            yield f"{theirs.__name__}.{name} has another argument, {argument}"


def _not_taken(ours: Any, theirs: Any) -> str | None:
    """An argument that vLLM passes, or leaves out, and our method does not expect."""
    takes = dict(inspect.signature(ours).parameters)
    every = {parameter.kind for parameter in takes.values()}
    for name, parameter in inspect.signature(theirs).parameters.items():
        mine = takes.pop(name, None)
        wanted = Parameter.VAR_POSITIONAL if parameter.kind is Parameter.VAR_POSITIONAL else Parameter.VAR_KEYWORD
        if mine is None and wanted not in every:
            return name
        if mine is not None and mine.default is Parameter.empty and parameter.default is not Parameter.empty:
            return name
    variable = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    needed = (name for name, left in takes.items() if left.default is left.empty and left.kind not in variable)
    return next(needed, None)


def _of_fields() -> Iterator[str]:
    for path, names in FIELDS.items():
        module, _, name = path.rpartition(".")
        try:
            cls = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            yield f"there is no {path} any more"
            continue
        known = {*dir(cls), *(field for base in cls.__mro__ for field in getattr(base, "__annotations__", ()))}
        yield from (f"{name} has no {field} any more" for field in names if field not in known)
