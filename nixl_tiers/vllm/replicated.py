"""Which tensor-parallel ranks hold the same KV bytes, so that they share a cell of each row (`Share` in swap/plan.py).

With MLA vLLM declares it. With fewer KV heads than ranks each head is on several ranks, and nobody declares it: the
scheduler and the workers conclude it from the configuration, and workers then look whether their layers are made so. If
they are not, each rank stores its own bytes: two different heads must never share a cell.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, NamedTuple

from nixl_tiers.vllm.compat import OffloadingConfig, models_of


class Copies(NamedTuple):
    """`ranks`: how many consecutive ones hold the same bytes. `declared`: by vLLM, and not just concluded."""

    ranks: int
    declared: bool


NONE: Final = Copies(1, declared=True)
_told: ContextVar[Copies | None] = ContextVar("copies", default=None)


@contextmanager
def told(copies: Copies) -> Iterator[None]:
    """While a spec is made: what it cannot learn from the configuration that vLLM gives it."""
    token = _told.set(copies)
    try:
        yield
    finally:
        _told.reset(token)


def is_told() -> bool:
    """Whether NixlTiersConnector makes this spec, and not vLLM's own connector."""
    return _told.get() is not None


def copies_of(config: OffloadingConfig) -> Copies:
    """Without other parallelism than tensor-parallel ranks; else each rank's bytes are taken for its own.

    `spec.replicated_layout` stays False: where it is True, vLLM has rank 0 do all stores, over one PCIe link.
    """
    parallel = config.parallel
    if parallel.world_size != parallel.tp_size or parallel.pcp_size > 1 or parallel.dcp_size > 1:
        return NONE
    copies = Copies(parallel.tp_size, declared=True) if config.replicated_layout else _told.get() or NONE
    return copies if parallel.tp_size % copies.ranks == 0 else NONE


def copies_by_configuration(vllm_config: Any, kv_cache_config: Any) -> Copies:
    """From the arguments of a connector, the same in every process of an engine."""
    ranks = vllm_config.parallel_config.tensor_parallel_size
    declared = int(kv_cache_config.kv_tp_replicas)
    if ranks in (1, declared):
        return Copies(declared, declared=True)
    heads = vllm_config.model_config.get_total_num_kv_heads()
    count = ranks
    for spec in _layer_specs(kv_cache_config):
        shards = getattr(spec, "max_tp_shards", None) or heads
        alone = getattr(spec, "num_kv_heads", 0) == 1 and shards < ranks and ranks % shards == 0
        count = math.gcd(count, ranks // shards if alone else 1)
    return Copies(count, declared=declared % count == 0)


def confirmed(worker: Any, layers: Any, names: set[str], count: int) -> bool:
    """Whether each of these attention layers gets its keys and values from a projection whose heads vLLM replicates
    over `count` ranks, or a multiple. `worker`: vLLM's; `layers`: its layers by name."""
    from vllm.model_executor.layers.linear import QKVParallelLinear

    if worker is None or not names <= set(layers):
        return False
    missing = {id(layers[name]) for name in names}
    for model in models_of(worker):
        for parent in model.modules():
            children = list(parent.children())
            projections = [child for child in children if isinstance(child, QKVParallelLinear)]
            if len(projections) == 1 and projections[0].num_kv_head_replicas % count == 0:
                missing -= set(map(id, children))
    return not missing


def _layer_specs(kv_cache_config: Any) -> Iterator[Any]:
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        by_layer = getattr(spec, "kv_cache_specs", None)  # of a group whose layers differ
        yield from by_layer.values() if isinstance(by_layer, dict) else (spec,)
