"""A real engine in a separate process: runs a list of steps and writes the result of each.

    python run_engine.py PLAN RESULT        both JSON files

Plan: {"model": path, "tiers": fields of kv_connector_extra_config or null, "transfer": fields of KVTransferConfig to
replace, "settings": {...}, "steps": [...]}, and "times" if they are not production's: fields of Times.
Steps: ["generate", prompts, max_tokens] with prompts as lists of token ids, asked at once, or with [name, number, path]
of a LoRA adapter behind that; ["ask", prompt, max_tokens, {...}] asks one with a "salt", with actions of vLLM's
kv_hints as [type, payload] in "hints", or with "options" as for nixl_tiers in kv_transfer_params;
["forget"] empties the engine's own prefix cache; ["reset"] that and the connector's; ["evict"] that and host memory,
when all tiers are up; ["kill", n] kills the n-th mover;
["flush"] waits for the storage tiers, and ["promoted", n] until n chunks have been; ["stats"];
["change", how, path] replaces the weights by those of another model, by a "reload" of vLLM's, or embeddings alone by
a "load" behind its back;
["touch", file] creates a file and ["await", file] waits for one; ["break", n] has the next n copies of loads put wrong
bytes into the engine's blocks and fail; ["hold", n] has copies of loads wait until n more steps computed nothing, and
counts steps from then on; ["steps"] how many there were so far, by whether they computed something, and how many
drafted tokens they checked;
["offline"] asks what examples/offline.py asks;
["wipe"] fills the engine's blocks with zeros, and ["pages"] gives digests of each rank's blocks with anything else;
["queue"] has steps that compute wait until what requests in the queue are to load is in host memory, and ["turns"] says
of each of these requests where its chunks were at its arrival and when its turn came, and whether it then waited;
["follow"] waits until a router that follows the KV events (settings: "kv_events_config") says of each chunk that was
looked up or offered so far what `locate` and the tiers' indexes say, and counts chunks by their tiers, by that router.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from nixl_tiers.base.times import Times
from nixl_tiers.store import TieredStore
from tests.support import vllm_cpu
from tests.support.core import locate
from tests.support.leaks import reclaim_all_host_rows
from tests.support.waiting import until, until_up


def main(plan: dict[str, Any]) -> list[Any]:
    transfer = None
    if plan["tiers"] is not None:
        patient = {"wait_s": 120.0, **plan["tiers"]}  # a busy machine's load is late, and no miss
        transfer = {**vllm_cpu.kv_transfer(**patient), **plan["transfer"]}
    settings = plan["settings"]
    events = settings.pop("kv_events_config", None)
    settings |= publishing(events) if events else {}
    times = msgspec.convert(plan.get("times", {}), Times)
    llm = vllm_cpu.in_process_llm(Path(plan["model"]), transfer, times=times, **settings)
    core = llm.llm_engine.engine_core.engine_core
    try:
        if events:
            core.follower = Follower(core, llm, events)
        if transfer is not None:
            until_up(store_of(core))
        return [carry_out(llm, core, *step) for step in plan["steps"]]
    finally:
        llm.llm_engine.engine_core.shutdown()


def carry_out(llm: Any, core: Any, verb: str, *arguments: Any) -> Any:
    if verb in ("generate", "ask", "offline"):
        questions = {"generate": generate, "ask": ask, "offline": offline}
        return questions[verb](llm, *arguments)
    if verb in ("forget", "reset"):
        assert llm.reset_prefix_cache(reset_connector=verb == "reset")
        return until_up(store_of(core)) if verb == "reset" else None
    if verb in ("evict", "kill"):
        return evict(llm, store_of(core)) if verb == "evict" else kill_mover(store_of(core), *arguments)
    if verb in ("touch", "await"):
        file = Path(arguments[0])
        return file.touch() if verb == "touch" else until(file.exists, str(file), timeout_s=500)
    if verb in ("break", "change"):
        return break_loads(*arguments) if verb == "break" else change_weights(llm, *arguments)
    if verb in ("hold", "queue"):
        core.of_test = Steps(core, *arguments) if verb == "hold" else Queue(core)
        return None
    if verb in ("steps", "turns", "follow"):
        return core.follower.agrees() if verb == "follow" else core.of_test.seen()
    if verb in ("pages", "wipe"):
        return llm.collective_rpc(digests if verb == "pages" else wipe)
    assert verb in ("flush", "stats", "promoted")
    store = store_of(core)
    if verb == "stats":
        return store.stats()
    return until(lambda: store.flush(300) if verb == "flush" else promoted(store) >= arguments[0], verb)


def offline(llm: Any) -> list[Any]:
    return list(runpy.run_path(str(Path(__file__).parents[3] / "examples/offline.py"))["ask"](llm))


def evict(llm: Any, store: Any) -> None:
    until_up(store)
    assert llm.reset_prefix_cache()
    until(lambda: reclaim_all_host_rows(store), "every host row to be free")


def kill_mover(store: Any, number: int) -> None:
    """Returns when that is seen: what a dead mover is sent until then is no hit for a while."""

    def deaths() -> float:
        return sum(tier.get("deaths", 0) for tier in store.stats().values())

    before = deaths()
    os.kill(store.coordinator.mover_pids[number], signal.SIGKILL)
    until(lambda: deaths() > before, "the death of a mover")


def promoted(store: Any) -> float:
    return float(store.stats()["cpu"]["promoted"])


def change_weights(llm: Any, how: str, path: str) -> None:
    if how == "reload":
        llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
    else:
        llm.collective_rpc(load_embeddings, args=(path,))


def load_embeddings(worker: Any, path: str) -> None:
    """As frameworks for reinforcement learning do it, which know vLLM's worker. Of vLLM on a CPU, most other weights
    are packed, so that only a reload replaces them."""
    from safetensors.torch import load_file

    name = "model.embed_tokens.weight"
    worker.model_runner.model.load_weights([(name, load_file(Path(path) / "model.safetensors")[name])])


def ours(connector: Any) -> Any:
    """The connector itself, or that of a MultiConnector's that is ours."""
    children = getattr(connector, "sub_connectors", [connector])
    return next(child for child in children if hasattr(child, "connector_scheduler"))


def store_of(core: Any) -> Any:
    return TieredStore(ours(core.scheduler.connector).connector_scheduler.manager._coordinator)


def wipe(worker: Any) -> None:
    for layer in worker.model_runner.kv_caches:
        layer.zero_()


def digests(worker: Any) -> list[list[str]]:
    """Of each block that is in use, in the order of their numbers: one of each layer. Block 0 is vLLM's dummy."""
    import hashlib

    import torch

    layers = [layer.flatten(1) for layer in worker.model_runner.kv_caches]
    used = layers[0].any(1).nonzero().flatten().tolist()
    return [
        [hashlib.sha256(layer[block].view(torch.uint8).numpy()).hexdigest() for layer in layers]
        for block in used
        if block
    ]


def generate(llm: Any, prompts: list[list[int]], max_tokens: int, adapter: Any = None) -> list[dict[str, Any]]:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=1, detokenize=False)
    lora = None if adapter is None else LoRARequest(*adapter)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(asked, sampling, use_tqdm=False, lora_request=lora)
    return [
        {
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": [max(entry.logprob for entry in step.values()) for step in output.outputs[0].logprobs],
            "cached": output.num_cached_tokens,
        }
        for output in outputs
    ]


def ask(llm: Any, prompt: list[int], max_tokens: int, wish: dict[str, Any]) -> dict[str, Any]:
    """LLM.generate, as of vLLM 0.33, takes no kv_hints."""
    from vllm import SamplingParams
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    engine = llm.llm_engine
    actions = [KvHintAction(kind, kind, "1.0", payload) for kind, payload in wish.get("hints", ())]
    own = {"kv_transfer_params": {"nixl_tiers": wish["options"]}} if "options" in wish else None
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, extra_args=own)
    asked = {"prompt_token_ids": prompt} | ({"cache_salt": wish["salt"]} if "salt" in wish else {})
    engine.add_request("asked", asked, sampling, kv_hints=KvHintsEnvelope("1.0", "of the test", actions))
    output = None
    while engine.has_unfinished_requests():
        output = next(iter(engine.step()), output)
    engine.step()  # in which the connector is told of the end
    assert output is not None
    return {"tokens": list(output.outputs[0].token_ids), "cached": output.num_cached_tokens}


class Steps:
    """Holds copies of loads until `empty` steps computed nothing, and counts steps."""

    def __init__(self, core: Any, empty: int) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        self.counts: Counter[str] = Counter()
        self._left = empty
        self._may_copy = threading.Event()
        if not empty:
            self._may_copy.set()
        swap = get_kv_transfer_group().connector_worker.worker._swap
        self._schedule, self._copy = core.scheduler.schedule, swap.copy
        core.scheduler.schedule, swap.copy = self.schedule, self.copy

    def seen(self) -> dict[str, int]:
        return dict(self.counts)

    def schedule(self, *arguments: Any) -> Any:
        output = self._schedule(*arguments)
        kind = "computing" if output.total_num_scheduled_tokens else "empty"
        self.counts[kind] += 1
        self.counts["drafted"] += sum(map(len, output.scheduled_spec_decode_tokens.values()))
        if kind == "empty":
            self._left -= 1
            if self._left <= 0:
                self._may_copy.set()
        return output

    def copy(self, *arguments: Any, to_host: bool) -> Any:
        assert to_host or self._may_copy.wait(300)
        return self._copy(*arguments, to_host=to_host)


class Queue:
    """Requests that are in vLLM's queue while another computes: it goes on once they have all chunks in host memory, or
    when that takes long."""

    def __init__(self, core: Any) -> None:
        self.turns: dict[str, dict[str, Any]] = {}
        self._keys: dict[str, list[Any]] = {}
        manager = core.scheduler.connector.connector_scheduler.manager
        self._coordinator, executor = manager._coordinator, core.model_executor
        self._anticipate, self._scan = manager.anticipate, self._coordinator._core.look_up
        self._execute = executor.execute_model
        manager.anticipate, self._coordinator._core.look_up = self.anticipate, self.scan
        executor.execute_model = self.execute

    def seen(self) -> list[dict[str, Any]]:
        return list(self.turns.values())

    def anticipate(self, request: str, keys: Any, rank: Any) -> Any:
        if keys:
            self._keys[request] = list(keys)
            self.turns[request] = {"arrival": locate(self._coordinator, keys), "computed": 0}
        return self._anticipate(request, keys, rank)

    def execute(self, output: Any, *arguments: Any, **named: Any) -> Any:
        queued = [request for request, turn in self.turns.items() if "turn" not in turn]
        for request in queued:
            turn, keys = self.turns[request], self._keys[request]
            turn["computed"] += output.total_num_scheduled_tokens
            if turn["computed"] > output.total_num_scheduled_tokens:
                continue
            with contextlib.suppress(AssertionError):  # the test sees that it is not there
                until(lambda keys=keys: set(locate(self._coordinator, keys)) == {"cpu"}, "promotions", timeout_s=100)
        return self._execute(output, *arguments, **named)

    def scan(self, request: str, *arguments: Any) -> Any:
        found = self._scan(request, *arguments)
        turn = self.turns.get(request, {})
        if turn and "turn" not in turn:
            turn.update(turn=locate(self._coordinator, self._keys[request]), waits=found.waits)
        return found


def publishing(events: dict[str, str]) -> dict[str, Any]:
    from vllm.config import KVEventsConfig

    return {"kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", **events)}


class Follower:
    """A router beside the engine, and the chunks that requests had, with the tokens before their ends."""

    def __init__(self, core: Any, llm: Any, events: dict[str, str]) -> None:
        from tests.support.router import Router

        self._llm = llm
        self._router = Router(events["endpoint"], events["replay_endpoint"])
        manager = core.scheduler.connector.connector_scheduler.manager
        self._coordinator = manager._coordinator
        self._ends: dict[Any, int] = {}
        finish = manager.on_request_finished

        def finished(context: Any) -> None:
            self._ends.update(context._offload_key_positions)
            finish(context)

        manager.on_request_finished = finished

    def agrees(self) -> dict[str, int]:
        until(self._agrees, "the router to know what locate says")
        return dict(Counter(", ".join(sorted(map(str, self._tiers(key)))) for key in self._ends))

    def _agrees(self) -> bool:
        generate(self._llm, [[1]], 1)  # an idle engine publishes nothing
        self._router.receive()
        places = locate(self._coordinator, list(self._ends))
        if [self._located(key) for key in self._ends] != places:
            return False
        with self._coordinator.core() as tiers:
            held = {
                key: {tier.spec.name for tier in tiers.tiers if tier.index.rows.is_stored(key)}
                | ({"cpu"} if key in tiers.host.index else set())
                for key in self._ends
            }
        return all(self._tiers(key) == names for key, names in held.items())

    def _tiers(self, key: Any) -> set[str | None]:
        return {"cpu" if medium == "CPU" else owner for medium, owner, _ in self._router.tiers(self._block(key))}

    def _located(self, key: Any) -> str | None:
        tiers = self._tiers(key)
        if tiers:
            assert len(self._router.prefix(self._block(key))) == self._ends[key]
        return next((name for name in ("cpu", *self._coordinator.config.names) if name in tiers), None)

    def _block(self, key: Any) -> Any:
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
        from vllm.v1.kv_offload.base import get_offload_block_hash

        return maybe_convert_block_hash(get_offload_block_hash(key))


def break_loads(times: int) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    swap = ours(get_kv_transfer_group()).connector_worker.worker._swap
    good = swap.copy
    left = times

    def copy(group: int, pairs: Any, *, to_host: bool) -> None:
        nonlocal left
        if left and not to_host:
            left -= 1
            # Another order would change nothing: attention does not care where in memory a position's keys lie.
            wrong = pairs.view().copy()
            wrong[:, 1] = wrong[0, 1]
            good(group, type(pairs).of(wrong), to_host=False)
            raise OSError("broken by the test")
        good(group, pairs, to_host=to_host)

    swap.copy = copy


if __name__ == "__main__":
    result = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result))
