"""A real engine in a process of its own: runs a list of steps and returns the result of each.

Plan: {"model": path, "tiers": fields of kv_connector_extra_config or null, "transfer": fields of KVTransferConfig to
replace, "times": fields of Times, "settings": {...}, "steps": [...]}.
Steps: ["generate", prompts, max_tokens] with prompts as lists of token ids, asked at once, or with [name, number, path]
of a LoRA adapter behind that; ["ask", prompt, max_tokens, {...}] asks one with a "salt", with actions of vLLM's
kv_hints as [type, payload] in "hints", or with "options" as for nixl_tiers in kv_transfer_params;
["offline"] asks what examples/offline.py asks;
["forget"] empties the engine's own prefix cache; ["reset"] that and the connector's; ["evict"] that and host memory,
when all tiers are up; ["kill"] kills the first mover;
["flush"] waits for the storage tiers, and ["promoted", n] until n chunks have been; ["stats"];
["change", how, path] replaces the weights by those of another model, by a "reload" of vLLM's, or embeddings alone by
a "load" behind its back;
["break", n] has the next n copies of loads put wrong bytes into the engine's blocks and fail;
["steps"] how many there were since it was asked last, by whether they computed something, and how many drafted tokens
they checked;
["wipe"] fills the engine's blocks with zeros, and ["pages"] gives digests of each rank's blocks with anything else;
["follow"] waits until a router that follows the KV events (settings: "kv_events_config") says of each chunk that was
looked up or offered so far what `locate` and the tiers' indexes say, and counts chunks by their tiers, by that router.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import runpy
import signal
import sys
import threading
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from demo import vllm_cpu
from nixl_tiers.base.times import Times
from nixl_tiers.store import TieredStore
from tests.support.core import locate
from tests.support.leaks import reclaim_all_host_rows
from tests.support.waiting import until, until_up


def become(
    function: Callable[[Any], Any], plan: Any, result: Path, environment: Mapping[str, str], stderr: Path
) -> None:
    """What a process is for, and its end: as Python's, but for the destructors of C++, which wait for threads of the
    process that it was forked from."""
    with Path(os.devnull).open("r+b") as nothing, stderr.open("wb") as log:
        for descriptor, file in enumerate((nothing, nothing, log)):
            os.dup2(file.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    status = 0
    try:
        result.write_text(json.dumps(function(plan)))
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(status)


def main(plan: dict[str, Any]) -> list[Any]:
    transfer = None
    if plan["tiers"] is not None:
        patient = {"wait_s": 120.0, **plan["tiers"]}  # a busy machine's load is late, and no miss
        transfer = {**vllm_cpu.kv_transfer(**patient), **plan["transfer"]}
    settings = plan["settings"]
    events = settings.pop("kv_events_config", None)
    if events:
        from vllm.config import KVEventsConfig

        settings["kv_events_config"] = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", **events)
    times = msgspec.convert(plan["times"], Times)
    llm = vllm_cpu.in_process_llm(Path(plan["model"]), transfer, times=times, **settings)
    core = llm.llm_engine.engine_core.engine_core
    try:
        core.counts, core.router = counted_steps(core), Router(core, llm, events) if events else None
        if transfer is not None:
            until_up(store_of(core))
        return [carry_out(llm, core, *step) for step in plan["steps"]]
    finally:
        llm.llm_engine.engine_core.shutdown()


def carry_out(llm: Any, core: Any, verb: str, *arguments: Any) -> Any:
    of_engine: dict[str, Callable[..., Any]] = {
        "generate": generate,
        "ask": ask,
        "offline": offline,
        "change": change_weights,
        "forget": reset,
        "pages": lambda llm: llm.collective_rpc(digests),
        "wipe": lambda llm: llm.collective_rpc(wipe),
    }
    if verb in of_engine:
        return of_engine[verb](llm, *arguments)
    of_test: dict[str, Callable[..., Any]] = {"break": break_loads, "steps": lambda: steps(core)}
    if core.router is not None:
        of_test["follow"] = core.router.agrees
    if verb in of_test:
        return of_test[verb](*arguments)
    of_store: dict[str, Callable[..., Any]] = {
        "stats": TieredStore.stats,
        "kill": kill_mover,
        "reset": lambda store: (reset(llm, connector=True), until_up(store))[1],
        "evict": lambda store: evict(llm, store),
        "flush": lambda store: until(lambda: store.flush(300), verb),
        "promoted": lambda store, count: until(lambda: store.stats()["cpu"]["promoted"] >= count, verb),
    }
    return of_store[verb](store_of(core), *arguments)


def offline(llm: Any) -> list[Any]:
    return list(runpy.run_path(str(Path(__file__).parents[3] / "examples/offline.py"))["ask"](llm))


def reset(llm: Any, *, connector: bool = False) -> None:
    assert llm.reset_prefix_cache(reset_connector=connector)


def evict(llm: Any, store: Any) -> None:
    until_up(store)
    reset(llm)
    until(lambda: reclaim_all_host_rows(store), "every host row to be free")


def steps(core: Any) -> dict[str, int]:
    found = dict(core.counts)
    core.counts.clear()
    return found


def kill_mover(store: Any) -> None:
    """Returns when that is seen: what a dead mover is sent until then is no hit for a while."""

    def deaths() -> float:
        return sum(tier.get("deaths", 0) for tier in store.stats().values())

    before = deaths()
    os.kill(store.coordinator.mover_pids[0], signal.SIGKILL)
    until(lambda: deaths() > before, "the death of a mover")


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


def counted_steps(core: Any) -> Counter[str]:
    counts, schedule = Counter[str](), core.scheduler.schedule

    def counted(*arguments: Any) -> Any:
        output = schedule(*arguments)
        counts["computing" if output.total_num_scheduled_tokens else "empty"] += 1
        counts["drafted"] += sum(map(len, output.scheduled_spec_decode_tokens.values()))
        return output

    core.scheduler.schedule = counted
    return counts


class Router:
    """Follows the engine's KV events over ZeroMQ, as those of Dynamo and llm-d do, and refuses what they would drop in
    silence: a block without tokens, or whose parent it does not know."""

    def __init__(self, core: Any, llm: Any, events: dict[str, str]) -> None:
        import zmq
        from vllm.distributed.kv_events import KVEventBatch

        self._llm, self._received, self._decoder = llm, 0, msgspec.msgpack.Decoder(KVEventBatch)
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(events["endpoint"])
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._prefixes: dict[Any, list[int]] = {None: []}  # the tokens from a prompt's first to a block's last
        self._places: dict[Any, Counter[Any]] = defaultdict(Counter)  # but for the engine's own cache
        manager = core.scheduler.connector.connector_scheduler.manager
        self._coordinator = manager._coordinator
        self._ends: dict[Any, int] = {}  # of the chunks that requests had: the tokens before them
        finish = manager.on_request_finished

        def finished(context: Any) -> None:
            self._ends.update(context._offload_key_positions)
            finish(context)

        manager.on_request_finished = finished

    def agrees(self) -> dict[str, int]:
        until(self._agrees, "the router to know what locate says")
        return dict(Counter(", ".join(sorted(self._tiers(key))) for key in self._ends))

    def _agrees(self) -> bool:
        generate(self._llm, [[1]], 1)  # an idle engine publishes nothing
        while self._socket.poll(200):
            _, number, batch = self._socket.recv_multipart()
            assert int.from_bytes(number, "big") == self._received, "a batch is missing"
            self._received += 1
            for event in self._decoder.decode(batch).events:
                self._take(event)
        names = ("cpu", *self._coordinator.config.names)
        found = [next((name for name in names if name in self._tiers(key)), None) for key in self._ends]
        if found != locate(self._coordinator, list(self._ends)):
            return False
        with self._coordinator.core() as tiers:
            held = {
                key: {tier.spec.name for tier in tiers.tiers if tier.index.rows.is_stored(key)}
                | ({"cpu"} if key in tiers.host.index else set())
                for key in self._ends
            }
        return all(self._tiers(key) == names for key, names in held.items())

    def _take(self, event: Any) -> None:
        kind, medium = type(event).__name__, getattr(event, "medium", "GPU")
        place = "cpu" if medium == "CPU" else getattr(event, "ownership", None)
        if kind == "BlockRemoved" and medium != "GPU":
            for block in event.block_hashes:
                assert self._places[block][place] == 1, f"{block} is not in {place}"
                self._places[block][place] = 0
        elif kind == "BlockStored":
            assert event.block_size > 0, "a placeholder, which only says that something was stored"
            assert len(event.token_ids) == event.block_size * len(event.block_hashes), "not one hash a block"
            parent = event.parent_block_hash
            for start, block in enumerate(event.block_hashes):
                tokens = event.token_ids[start * event.block_size : (start + 1) * event.block_size]
                prefix = self._prefixes[parent] + tokens  # KeyError: a child comes before its parent
                assert self._prefixes.setdefault(block, prefix) == prefix
                if medium != "GPU":
                    assert not self._places[block][place], f"{block} is stored twice in {place}"
                    self._places[block][place] = 1
                parent = block

    def _tiers(self, key: Any) -> set[str]:
        from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
        from vllm.v1.kv_offload.base import get_offload_block_hash

        block = maybe_convert_block_hash(get_offload_block_hash(key))
        tiers = {place for place, count in self._places[block].items() if count}
        assert not tiers or len(self._prefixes[block]) == self._ends[key]
        return tiers


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
