"""vLLM's look-ups over a manager of ours: its scheduler's side of the offloading connector without an engine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as offloading
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker
from vllm.v1.kv_offload.base import ReqContext, ScheduleEndContext

TOKENS: Final = 16
STEP: Final = ScheduleEndContext((), ())


def hashes(count: int) -> list[bytes]:
    return [os.urandom(32) for _ in range(count)]


class VllmLookups:
    """`windows`: of each KV group, in chunks; None is full attention."""

    def __init__(self, manager: Any, windows: Sequence[int | None] = (None,)) -> None:
        groups = tuple(
            SimpleNamespace(
                group_idx=number,
                tokens_per_chunk=TOKENS,
                hashes_per_chunk=1,
                sliding_window_size_in_chunks=window,
                is_eagle_group=False,
                load_window_size_in_chunks=lambda _tokens, window=window: window,
            )
            for number, window in enumerate(windows)
        )
        side = self._side = object.__new__(offloading.OffloadingConnectorScheduler)
        side.config = SimpleNamespace(kv_group_configs=groups, supports_partial_tail=False)
        side.manager = self.manager = manager
        side._full_attention_groups = tuple(n for n, window in enumerate(windows) if window is None)
        side._sliding_window_groups = tuple(n for n, window in enumerate(windows) if window is not None)
        side._lookup_groups = side._full_attention_groups + side._sliding_window_groups
        side._mamba_align_size = None
        side._eagle_proof_margins, side._max_eagle_proof_margin = {}, 0  # from 0.33 on
        side._chunks_being_loaded = set()
        side._events_tracker = OffloadingEventsTracker(SimpleNamespace(enable_kv_cache_events=False))

    def request(self, name: str, hashes: Sequence[bytes], tokens: int | None = None, **parameters: Any) -> Any:
        """A new request whose prompt's chunks have these hashes, and a token more; its `kv_transfer_params`."""
        tokens = TOKENS * len(hashes) + 1 if tokens is None else tokens
        request = SimpleNamespace(
            request_id=name,
            num_tokens=tokens,
            num_prompt_tokens=tokens,
            block_hashes=list(hashes),
            kv_transfer_params=parameters or None,
        )
        context = ReqContext(name, kv_transfer_params=parameters or None)
        self.manager.on_new_request(context)
        state = offloading.RequestOffloadState(self._side.config, request, context, None)
        state.update_offload_keys()
        return state

    def look_up(self, state: Any, local_tokens: int = 0, most: int | None = None) -> int | None:
        """How many tokens vLLM would load, `most` at most; None if the request is deferred."""
        state.num_locally_computed_tokens = local_tokens
        found: int | None = self._side._lookup(state, most)
        return found

    def end_step(self) -> None:
        self.manager.on_schedule_end(STEP)
