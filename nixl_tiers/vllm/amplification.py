"""How much of what is stored is KV: every key of every KV group takes a row of whole blocks of vLLM's.

Groups of equal size fill these. In packed layouts (DeepSeek-V4, GLM-5.3) a block holds a page of every layer of every
group, and each key only those of its own: vllm#41834 reports 19 times.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, Final

from nixl_tiers.vllm.compat import OffloadingConfig, group_ids

WARN_ABOVE: Final = 1.5
MOST: Final = 4.0
log = logging.getLogger(__name__)


def refuse_amplification(config: OffloadingConfig, kv_cache_config: Any) -> None:
    """Raise ValueError if more than MOST bytes would be stored for a byte of KV, and warn of a smaller waste.

    `kv_cache_config`: of vLLM's worker; None if that cannot be found, and then nothing is known.
    """
    if kv_cache_config is None:
        return
    found = amplification(config, kv_cache_config)
    said = f"each byte of this model's KV cache takes {found:.1f} bytes in tiers, because its KV groups differ in size"
    if found > MOST:
        raise ValueError(f"nixl_tiers: {said}, and more than {MOST:g} are refused: most of each row would be padding")
    if found > WARN_ABOVE and config.parallel.rank == 0:
        log.warning("nixl_tiers: %s: count with that when you choose capacities", said)


def amplification(config: OffloadingConfig, kv_cache_config: Any) -> float:
    """Bytes that are stored for a byte of KV, if every group stores each of its blocks."""
    stored = kv = 0.0
    for group, number in zip(config.groups, group_ids(config), strict=True):
        of_vllm = kv_cache_config.kv_cache_groups[number]
        stored += config.worker_kv_bytes_per_block / group.tokens_per_block
        kv += sum(_page_bytes(of_vllm.kv_cache_spec, name) for name in group.layer_names) / group.tokens_per_block
    return stored / kv if kv else 1.0


def _page_bytes(spec: Any, layer: str) -> int:
    """Of one block, without padding."""
    by_layer = getattr(spec, "kv_cache_specs", None)  # of a group whose layers differ
    spec = by_layer[layer] if isinstance(by_layer, dict) else spec
    if hasattr(spec, "unpadded_page_size_bytes"):
        return int(spec.unpadded_page_size_bytes)
    if getattr(spec, "page_size_padded", None) is not None:  # of recurrent states
        spec = replace(spec, page_size_padded=None)
    return int(spec.page_size_bytes)
