"""vLLM's own scheduler side of the offloading connector over a manager of ours, without an engine or a worker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_offload.base import OffloadKey, make_offload_key

from nixl_tiers.vllm.manager import NixlTiersManager

BLOCK: Final = 32  # tokens


def offloading_scheduler(manager: Any, block_tokens: int, blocks_per_chunk: int = 1, *, events: bool = False) -> Any:
    """One full-attention group of blocks of so many tokens; `events`: it describes KV events."""
    group = SimpleNamespace(group_id=0, tokens_per_block=block_tokens, sliding_window_size_in_chunks=None)
    spec = SimpleNamespace(
        config=SimpleNamespace(groups=(group,)),
        extra_config={},
        get_manager=lambda: manager,
        blocks_per_chunk=blocks_per_chunk,
        tokens_per_hash=block_tokens,
        tokens_per_block=(block_tokens,),
        offload_prompt_only=True,
        kv_events_config=SimpleNamespace(enable_kv_cache_events=events, self_describing_kv_events=events),
    )
    config = SimpleNamespace(
        cache_config=SimpleNamespace(prefix_cache_retention_interval=None, enable_prefix_caching=True),
        parallel_config=SimpleNamespace(world_size=1, decode_context_parallel_size=1),
        speculative_config=None,
    )
    attention = FullAttentionSpec(block_size=block_tokens, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    layers = SimpleNamespace(kv_cache_spec=attention, is_eagle_group=False, layer_names=("layer",))
    caches = SimpleNamespace(kv_cache_groups=[layers], cache_hit_alignment_tokens=None)
    return OffloadingConnectorScheduler(spec, config, caches)


class ConnectorScheduler:
    """One full-attention group of blocks of BLOCK tokens. The test is the engine and its workers."""

    def __init__(self, manager: NixlTiersManager, blocks_per_chunk: int = 1, *, events: bool = False) -> None:
        self.scheduler = offloading_scheduler(manager, BLOCK, blocks_per_chunk, events=events)

    def request(self, name: str, hashes: list[bytes], params: dict[str, Any] | None = None) -> Any:
        """A new request of as many blocks as `hashes`, and a token more, as it arrives."""
        request = self.make(name, hashes, params)
        self.scheduler.on_new_request(request)
        return request

    @staticmethod
    def make(name: str, hashes: list[bytes], params: dict[str, Any] | None = None) -> Any:
        tokens = len(hashes) * BLOCK + 1
        return SimpleNamespace(
            request_id=name,
            kv_transfer_params=params,
            kv_hints=None,
            block_hashes=hashes,
            all_token_ids=[int.from_bytes(each[:4]) + n for each in hashes for n in range(BLOCK)] + [0],
            lora_request=None,
            cache_salt=None,
            num_tokens=tokens,
            num_prompt_tokens=tokens,
            num_computed_tokens=0,
            skip_reading_prefix_cache=False,
            status=None,
            is_finished=lambda: False,
        )

    def matched(self, request: Any, computed: int = 0) -> int | None:
        """How many tokens beyond the first `computed` can be loaded."""
        tokens: int | None = self.scheduler.get_num_new_matched_tokens(request, computed)[0]
        return tokens

    def store(self, request: Any) -> list[Any]:
        """The request computes its whole prompt in a step: the specs of the rows that its stores go to."""
        status = self.scheduler._req_status[request.request_id]
        status.update_offload_keys()
        status.update_block_id_groups(([*range(1, len(request.block_hashes) + 2)],))
        output = SimpleNamespace(num_scheduled_tokens={request.request_id: request.num_tokens}, finished_req_ids=())
        return [job.dst_spec for job in self.scheduler._build_store_jobs(output).values()]


def keys_of(hashes: list[bytes]) -> list[OffloadKey]:
    return [make_offload_key(each, 0) for each in hashes]
