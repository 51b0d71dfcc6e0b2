"""A request on a real engine whose load begins before its rows have come, and what happens to it then."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from nixl_tiers.core.rows import RowState
from tests.support.waiting import until_up


def ask_stream(
    llm: Any,
    store: Any,
    streams: Any,
    *,
    kill: Callable[[], None],
    prompt: list[int],
    max_tokens: int,
    what: str,
) -> dict[str, Any]:
    """The first mover is stopped until the load has begun. Then, by `what`: it goes on ("whole"), or does so when the
    request has ended ("late"); `kill` is called ("kill"); the request is aborted ("abort"); the connector is reset
    ("reset").

    Returns the answer's tokens, whether the load was a stream, what vLLM took from each load in chunks, how many chunks
    were stored, and in the end: references of workers to rows, and blocks that requests hold. `streams`: the manager's.
    """
    from vllm import SamplingParams

    engine, core, mover = llm.llm_engine, store.coordinator._core, store.coordinator.mover_pids[0]
    loaded: list[int | None] = []
    ended = streams.load_ended
    streams.load_ended = lambda name: loaded.append(ended(name)) or loaded[-1]
    while any(row.state is RowState.FILLING for row in core.host.index.values()):
        engine.step()  # what was computed before is stored
    stored = store.stats()["cpu"]["stored"]
    os.kill(mover, signal.SIGSTOP)
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    engine.add_request("streamed", {"prompt_token_ids": prompt}, sampling)
    outputs: list[Any] = []
    while engine.has_unfinished_requests() and not core.streams._open:
        outputs += engine.step()
    begun = bool(core.streams._open)
    if what == "whole":
        os.kill(mover, signal.SIGCONT)
    elif what == "kill":
        kill()
    elif what == "abort":
        engine.abort_request(["streamed"])
    elif what == "reset":
        assert not llm.reset_prefix_cache(reset_connector=True), "the request holds blocks"
    while engine.has_unfinished_requests() or core.streams._open:
        outputs += engine.step()
    for _ in range(2):  # what vLLM frees when it is told of the end
        engine.step()
    if what not in ("whole", "kill"):
        os.kill(mover, signal.SIGCONT)
    until_up(store)
    del streams.load_ended
    pool = engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    return {
        "streamed": begun,
        "tokens": list(outputs[-1].outputs[0].token_ids) if outputs else [],
        "loaded": loaded,
        "stored": store.stats()["cpu"]["stored"] - stored,
        "pinned": sum(row.worker_refs for row in core.host.index.values()),
        "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
    }
