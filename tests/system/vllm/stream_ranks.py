"""An engine of several ranks, whose streams go differently on each (tests/support/stream_copies.py).

    python stream_ranks.py PLAN RESULT        both JSON files

Plan: {"model": path, "transfer": fields of KVTransferConfig, "settings": arguments of LLM, "prompts": the first one is
for learning, each other one is a case; "answer": tokens, "there": tokens of a prompt that are in host memory when its
stream begins, "cases": what becomes of the stream on each rank; "few": by rank, how many rows are a copy; "file": a
path}. Result: of each prompt the cold answer, and of each case the answer, what vLLM took from its load in chunks,
whether its load was a stream, and in the end: references of workers to rows, and blocks that requests hold.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.support import vllm_cpu
from tests.support.stream_copies import Disturbed, copy_at_once
from tests.support.waiting import until, until_up
from tests.system.vllm.one_stream import recorded, store_all
from tests.system.vllm.run_engine import ask, evict, generate, ours, store_of

STEPS = 20  # in which a late rank keeps the request


def main(plan: dict[str, Any]) -> dict[str, Any]:
    llm = vllm_cpu.in_process_llm(Path(plan["model"]), plan["transfer"], **plan["settings"])
    core = llm.llm_engine.engine_core.engine_core
    try:
        store, prompts, answer = store_of(core), plan["prompts"], plan["answer"]
        until_up(store)
        llm.collective_rpc(begin, args=(plan["few"],))
        cold = [generate(llm, [prompt], answer)[0]["tokens"] for prompt in prompts]
        assert store.flush(300)
        results = []
        for prompt, hows in zip(prompts[1:], plan["cases"], strict=True):
            for _ in range(2):  # what the tier gives when its mover is not stopped
                evict(llm, store)
                generate(llm, [prompts[0]], answer)
            evict(llm, store)
            ask(llm, prompt[: plan["there"] + 1], 1, {"options": {"load": "none"}})
            assert llm.reset_prefix_cache()
            results.append(streamed(llm, prompt, answer, hows, Path(plan["file"])))
        return {"cold": cold, "cases": results}
    finally:
        core.shutdown()


def streamed(llm: Any, prompt: list[int], answer: int, hows: list[str], file: Path) -> dict[str, Any]:
    from vllm import SamplingParams

    engine, scheduler = llm.llm_engine, llm.llm_engine.engine_core.engine_core.scheduler
    store = store_of(engine.engine_core.engine_core)
    core, streams = store.coordinator._core, ours(scheduler.connector).connector_scheduler.manager.streams
    mover = store.coordinator.mover_pids[0]
    loaded = recorded(streams, "load_ended")
    file.unlink(missing_ok=True)
    store_all(engine, core)
    begins = recorded(core.streams, "begin")  # one, which may end in the step in which it begins
    os.kill(mover, signal.SIGSTOP)
    try:
        llm.collective_rpc(disturb, args=(hows, str(file)))
        sampling = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False)
        engine.add_request("streamed", {"prompt_token_ids": prompt}, sampling)
        outputs: list[Any] = []
        while engine.has_unfinished_requests() and not begins:
            outputs += engine.step()
        begun = bool(begins) and begins[0][1] is not None
        assert begun, f"no stream: {begins}, {len(streams._waiting)} requests wait"
        llm.collective_rpc(until_it_copies)
    finally:
        os.kill(mover, signal.SIGCONT)
        del core.streams.begin
    if "late" in hows:
        until(lambda: engine.step() or not any(map(is_to_come, core.streams._open.values())), "all rows have come")
        for _ in range(STEPS):
            outputs += engine.step()
        assert not outputs, "one rank has copied nothing yet"
        file.touch()
    while engine.has_unfinished_requests() or core.streams._open:
        outputs += engine.step()
    llm.collective_rpc(end)
    for _ in range(2):  # what vLLM frees when it is told of the end
        engine.step()
    del streams.load_ended
    pool = scheduler.kv_cache_manager.block_pool
    return {
        "streamed": begun,
        "tokens": list(outputs[-1].outputs[0].token_ids),
        "loaded": loaded,
        "pinned": sum(row.worker_refs for row in core.host.index.values()),
        "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
    }


def is_to_come(stream: Any) -> bool:
    return stream.first_to_come is not None


# --- on each rank ----------------------------------------------------------------------------------------------------


def begin(vllm_worker: Any, few: dict[str, int]) -> None:
    if rows := few.get(str(vllm_worker.rank)):
        copy_at_once(our_worker(), rows)


def disturb(vllm_worker: Any, hows: list[str], file: str) -> None:
    our_worker().disturbed = Disturbed(our_worker(), hows[vllm_worker.rank], Path(file))


def until_it_copies(_: Any) -> None:
    disturbed = our_worker().disturbed
    disturbed.cancel() if disturbed.how == "cancelled" else disturbed.until_it_copies()


def end(_: Any) -> None:
    our_worker().disturbed.end()


def our_worker() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return ours(get_kv_transfer_group()).connector_worker.worker


if __name__ == "__main__":
    result = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result))
