"""How many blocks a chunk has where the configuration does not say so: with NixlTiersConnector about 64 tokens.

A chunk of 16 tokens costs as much of the engine's thread as one of 64: a look-up, a row, a part of a job. Larger ones
would leave more of each prompt to be computed, half a chunk on average.
"""

from __future__ import annotations

import copy
from typing import Any, Final

from nixl_tiers.vllm import compat

CHUNK_TOKENS: Final = 64


def with_chunks(vllm_config: Any, kv_cache_config: Any) -> Any:
    """`vllm_config` as a connector of this engine is to have it: itself, or a copy with `blocks_per_chunk`. Every
    process of an engine has to come to the same."""
    transfer = vllm_config.kv_transfer_config
    extra = transfer.kv_connector_extra_config
    if extra.get("blocks_per_chunk") is not None or extra.get("block_size") is not None:
        return vllm_config
    blocks = default_blocks(vllm_config, kv_cache_config)
    if blocks == 1:
        return vllm_config
    # As MultiConnector does for each of its connectors: the caller's configuration stays as the user wrote it.
    mine = copy.copy(vllm_config)
    mine.kv_transfer_config = copy.copy(transfer)
    mine.kv_transfer_config.kv_connector_extra_config = {**extra, "blocks_per_chunk": blocks}
    return mine


def default_blocks(vllm_config: Any, kv_cache_config: Any) -> int:
    """One block, unless the model has a single KV group, of full attention: of a window or a recurrent state a chunk of
    several blocks holds what no load reads, and groups have blocks of different sizes."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or not compat.is_full_attention(groups[0].kv_cache_spec):
        return 1
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size > 1:
        return 1
    block_tokens = int(groups[0].kv_cache_spec.block_size)
    blocks = max(1, CHUNK_TOKENS // block_tokens)
    # vLLM requires of some models that whole chunks are in each interval after which it keeps a window.
    interval = vllm_config.cache_config.prefix_cache_retention_interval or 0
    return 1 if interval % (blocks * block_tokens) else blocks
