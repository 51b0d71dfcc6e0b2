"""The engines of bench.ttft: vLLM with a random model, without a connector, with tiers, with tiers that are always
loaded from, or with vLLM's own offloading.

    python -m bench.ttft_engine PLAN       the fields of `Plan` as JSON; requests as lines of JSON on standard input

Requests: ["ask", seed], ["batch"], ["fresh", turn], ["decode", turn], ["forget"] empties vLLM's prefix cache,
["flush"] waits for the file tier. Whatever is timed begins after the same idle time in all engines, right behind a
short prompt that the engine knows: an idle thread has cold caches.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import threading
import time
import zlib
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from bench.connector_time import ConnectorTime
from bench.engine_process import answer_requests, claim_stdout
from demo import vllm_cpu
from nixl_tiers.base.kv_bytes import kv_of
from nixl_tiers.store import TieredStore

KINDS: Final = ("plain", "tiers", "always", "host", "native")
TIERS: Final = ("tiers", "always", "host")
NEVER_COMPUTE: Final = 1  # tokens a second: any load is quicker
ANSWER_TOKENS: Final = 32
BATCH_PROMPTS, BATCH_ANSWER_TOKENS = 24, 16  # prompts of half the length
BATCH_SEED: Final = 1_000_000
FRESH_PROMPTS, FRESH_TOKENS, FRESH_ANSWER_TOKENS = 32, 1000, 32
FRESH_SEED: Final = 3_000_000
DECODE_PROMPT, DECODE_TOKENS = 64, 192
DECODE_SEED: Final = 4_000_000
IDLE_S: Final = 1.0
DECODE_GRAPHS: Final = "FULL_DECODE_ONLY"
WARM_UP_SEED, WARM_UP_TOKENS, WARM_UP_ANSWER_TOKENS = 5_000_000, 256, 4
WAIT_S: Final = 120.0


@dataclass(frozen=True)
class Model:
    """A Llama in bf16 by the names of its configuration, and the length of its prompt, which all capacities follow."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    prompt_tokens: int

    @property
    def max_tokens(self) -> int:
        return -(-(self.prompt_tokens + ANSWER_TOKENS) // 1024) * 1024

    @property
    def kv_tokens(self) -> int:
        """Room of the engine's KV cache: two fifths of a batch's prompts."""
        return BATCH_PROMPTS * self.prompt_tokens // 5

    def kv_bytes(self, tokens: int) -> int:
        return tokens * kv_of(asdict(self) | {"model_type": "llama"}).token_bytes

    def host_bytes(self, rounds: int) -> int:
        """Room in host memory for all prompts that an engine gets more than once, with their answers."""
        return max(self.kv_bytes((rounds + BATCH_PROMPTS // 2 + 4) * self.max_tokens), 64 << 20)

    def write(self, directory: Path) -> Path:
        """The directory with the model's configuration."""
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "max_position_embeddings": 32768,
            "tie_word_embeddings": False,
            **asdict(self),
        }
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(config))
        return directory

    def prompt(self, seed: int, tokens: int) -> dict[str, list[int]]:
        return {"prompt_token_ids": random.Random(seed).choices(range(3, self.vocab_size), k=tokens)}


MODELS: Final = {
    "7b": Model(4096, 32, 32, 8, 128, 14336, 32000, 7000),
    "small": Model(1024, 16, 8, 4, 128, 4096, 32000, 7000),
    "tiny": Model(256, 2, 4, 2, 64, 256, 512, 700),
}


@dataclass(frozen=True)
class Plan:
    engine: str
    """One of KINDS and, with a file tier over several directories, which have a mover each, their number: `always4`."""
    model: str
    rounds: int
    cpu: bool
    graphs: bool
    """Steps that only generate are CUDA graphs."""
    scratch: str
    """A directory for the model's configuration and the file tier."""

    @property
    def kind(self) -> str:
        return self.engine.rstrip("0123456789")

    @property
    def tier(self) -> Path:
        return Path(self.scratch) / "tier" / self.engine

    @property
    def path(self) -> str | list[str]:
        """Of the file tier."""
        number = self.engine.removeprefix(self.kind)
        return [str(self.tier / str(i)) for i in range(int(number))] if number else str(self.tier)

    def connector(self) -> dict[str, Any] | None:
        """The fields of KVTransferConfig."""
        host_bytes = MODELS[self.model].host_bytes(self.rounds)
        if self.kind == "plain":
            return None
        if self.kind == "native":
            extra = {"spec_name": "CPUOffloadingSpec", "cpu_bytes_to_use": host_bytes}
            return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        file = {"type": "file", "path": self.path, "capacity": 2 * host_bytes + (1 << 30), "min_free": 0}
        tiers: list[dict[str, Any]] = [{"type": "cpu", "capacity": host_bytes}, file]
        if self.kind == "host":
            del tiers[1:]
        extra = {"prefill_tokens_per_s": NEVER_COMPUTE if self.kind == "always" else None, "wait_s": WAIT_S}
        # model_id: there are no weight files to tell models apart
        return vllm_cpu.recomputing_transfer(tiers, model_id=f"bench.ttft {self.model}", **extra)

    def llm(self) -> Any:
        model = MODELS[self.model]
        settings: dict[str, Any] = {"num_gpu_blocks_override": model.kv_tokens // vllm_cpu.BLOCK_TOKENS}
        if not self.cpu:  # vLLM's own block size; the engines share the GPU
            kv_bytes = model.kv_bytes(model.kv_tokens)
            settings = {"block_size": None, "kv_cache_memory_bytes": kv_bytes, "gpu_memory_utilization": 0.3}
        if self.graphs:
            settings |= {"enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": DECODE_GRAPHS}}
        return vllm_cpu.in_process_llm(
            model.write(Path(self.scratch) / self.engine),
            self.connector(),
            load_format=seeded_loader(),
            skip_tokenizer_init=True,
            generation_config="vllm",
            max_model_len=model.max_tokens,
            max_num_batched_tokens=model.max_tokens,
            max_num_seqs=64,
            **settings,
        )


def seeded_loader() -> str:
    """The `load_format` that draws weights. Later is too late: vLLM for CPUs packs them at the end of loading."""
    vllm_cpu.supply_metadata()
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    class SeededLoader(DummyModelLoader):  # type: ignore[misc]
        def load_weights(self, model: Any, model_config: Any) -> None:
            draw_weights(model)

    register_model_loader("seeded")(SeededLoader)
    return "seeded"


def draw_weights(model: Any) -> None:
    """Weights with which each token depends on the whole context; those of vLLM's `dummy` format are too small."""
    import torch

    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "norm" in name:
                weights.fill_(1.0)
                continue
            generator = torch.Generator(device=weights.device)
            generator.manual_seed(zlib.crc32(name.encode()))
            deviation = (2.0 if "qkv" in name else 1.3) / weights.shape[
                -1
            ] ** 0.5  # attention to few tokens, not to all
            for part in weights.view(-1).split(1 << 26):
                drawn = torch.empty(part.shape, dtype=torch.float32, device=part.device)
                part.copy_(drawn.normal_(0, deviation, generator=generator))


class Engine:
    """What carries out the requests."""

    def __init__(self, plan: Plan) -> None:
        self.model = MODELS[plan.model]
        self.llm = plan.llm()
        self.store: TieredStore | None = None
        self._names = itertools.count()
        if plan.kind in TIERS:
            core = self.llm.llm_engine.engine_core.engine_core
            self.store = TieredStore(core.scheduler.connector.connector_scheduler.manager._coordinator)
            if not self.store.wait_ready(WAIT_S) or not all(tier["up"] for tier in self.store.stats().values()):
                raise SystemExit(f"a tier is not up: {self.store.stats()}")
        self._connector = self._timed_connector() if plan.kind != "plain" else None

    def carry_out(self, request: list[Any]) -> Any:
        verb, *arguments = request
        assert verb in ("ask", "batch", "fresh", "decode", "forget", "flush")
        if verb in ("ask", "batch", "fresh", "decode"):
            self._warm_up()
        return getattr(self, verb)(*arguments)

    def ask(self, seed: int) -> dict[str, Any]:
        engine, prompt, before = self.llm.llm_engine, self.model.prompt(seed, self.model.prompt_tokens), self._hits()
        first_s, turns, connector_ms, final = 0.0, 0, dict[str, float](), None
        self._connector_ms()
        began = time.perf_counter()
        engine.add_request(f"ask-{next(self._names)}", prompt, _sampling(ANSWER_TOKENS))
        while engine.has_unfinished_requests():
            turns += not first_s
            for output in engine.step():
                if output.outputs and output.outputs[0].token_ids:
                    if not first_s:
                        first_s, connector_ms = time.perf_counter() - began, self._connector_ms()
                    final = output
        total_s = time.perf_counter() - began
        assert final is not None
        tokens, steps = list(final.outputs[0].token_ids), final.outputs[0].logprobs
        return {
            "ttft_s": first_s,
            "total_s": total_s,
            "connector_ms": connector_ms,
            "steps": turns,
            "cached_tokens": final.num_cached_tokens,
            "hits": {tier: after - before[tier] for tier, after in self._hits().items()},
            "tokens": tokens,
            "logprobs": [step[token].logprob for token, step in zip(tokens, steps, strict=True)],
        }

    def batch(self) -> dict[str, float]:
        seeds = range(BATCH_SEED, BATCH_SEED + BATCH_PROMPTS)
        prompts = [self.model.prompt(seed, self.model.prompt_tokens // 2) for seed in seeds]
        began = time.perf_counter()
        outputs = self.llm.generate(prompts, _sampling(BATCH_ANSWER_TOKENS), use_tqdm=False)
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "cached_tokens": sum(output.num_cached_tokens or 0 for output in outputs)}

    def fresh(self, turn: int) -> dict[str, Any]:
        """Of some prompts that nobody has asked before, all asked at once: the seconds to the last token of each, and
        those to the last of their first tokens; the CPU seconds of this process's threads."""
        engine, ended_s, begun_s = self.llm.llm_engine, list[float](), dict[str, float]()
        tokens = min(FRESH_TOKENS, self.model.max_tokens // 2)
        before, began = _thread_seconds(), time.perf_counter()
        for seed in range(turn * FRESH_PROMPTS, (turn + 1) * FRESH_PROMPTS):
            prompt = self.model.prompt(FRESH_SEED + seed, tokens)
            engine.add_request(f"fresh-{next(self._names)}", prompt, _sampling(FRESH_ANSWER_TOKENS))
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.outputs and output.outputs[0].token_ids:
                    begun_s.setdefault(output.request_id, time.perf_counter() - began)
                if output.finished:
                    ended_s.append(time.perf_counter() - began)
        threads = {name: seconds - before.get(name, 0.0) for name, seconds in _thread_seconds().items()}
        busy = {name: seconds for name, seconds in threads.items() if seconds > 0.005}
        return {"ended_s": ended_s, "begun_s": max(begun_s.values()), "thread_s": busy}

    def decode(self, turn: int) -> dict[str, Any]:
        """Of one request that generates: milliseconds a token, and the CPU milliseconds a token of each thread of this
        process that took one per cent of that or more."""
        engine = self.llm.llm_engine
        engine.add_request(
            f"decode-{turn}", self.model.prompt(DECODE_SEED + turn, DECODE_PROMPT), _sampling(DECODE_TOKENS)
        )
        while not any(output.outputs and output.outputs[0].token_ids for output in engine.step()):
            pass
        before, began = _thread_seconds(), time.perf_counter()
        while engine.has_unfinished_requests():
            engine.step()
        took_s, after = time.perf_counter() - began, _thread_seconds()
        threads = {name: seconds - before.get(name, 0.0) for name, seconds in after.items()}
        busy = {name: 1e3 * seconds / DECODE_TOKENS for name, seconds in threads.items() if seconds > took_s / 100}
        return {"token_ms": 1e3 * took_s / (DECODE_TOKENS - 1), "thread_ms": busy}

    def forget(self) -> None:
        until = time.monotonic() + WAIT_S
        while not self.llm.reset_prefix_cache():
            if time.monotonic() > until:
                raise SystemExit("the prefix cache could not be reset")
            # Stores that have not ended hold blocks, and the engine learns of their end only in a step.
            self.llm.generate([self.model.prompt(0, 3)], _sampling(1), use_tqdm=False)

    def flush(self) -> None:
        if self.store and not self.store.flush(WAIT_S):
            raise SystemExit("the file tier was not written in time")

    def facts(self) -> dict[str, Any]:
        import torch
        import vllm

        config = self.llm.llm_engine.vllm_config
        layers = config.compilation_config.static_forward_context.values()
        backends = {layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")}
        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "attention": sorted(backends),
            "block_tokens": config.cache_config.block_size,
            "blocks": config.cache_config.num_gpu_blocks,
            "huge_page_bytes": self.store.stats()["cpu"]["huge_page_bytes"] if self.store else None,
        }

    def _warm_up(self) -> None:
        """Idle for IDLE_S, whatever the engine and the others did before, and a short prompt before and after that."""
        for pause_s in (IDLE_S, 0.0):
            prompt = self.model.prompt(WARM_UP_SEED, WARM_UP_TOKENS)
            self.llm.generate([prompt], _sampling(WARM_UP_ANSWER_TOKENS), use_tqdm=False)
            time.sleep(pause_s)

    def _timed_connector(self) -> ConnectorTime:
        from vllm.distributed.kv_transfer import get_kv_transfer_group
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

        sides = [self.llm.llm_engine.engine_core.engine_core.scheduler.connector, get_kv_transfer_group()]
        methods = [name for name in vars(KVConnectorBase_V1) if not name.startswith("_") and name != "role"]
        return ConnectorTime(sides, methods, [(self.store.coordinator.changed, "wait")] if self.store else [])

    def _connector_ms(self) -> dict[str, float]:
        """Milliseconds of the engine's thread in the connector, by method, since the last call."""
        return self._connector.take_ms() if self._connector else {}

    def _hits(self) -> dict[str, int]:
        return {name: int(tier["hits"]) for name, tier in self.store.stats().items()} if self.store else {}


def _thread_seconds() -> dict[str, float]:
    """CPU seconds of the threads of this process, by name."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    seconds: dict[str, float] = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            command, fields = (task / "stat").read_text().rsplit(")", 1)
            ticks = fields.split()[11:13]
            name = names.get(int(task.name)) or command.split("(", 1)[1]
            seconds[name] = seconds.get(name, 0.0) + sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return seconds


def _sampling(tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False)


def main() -> None:
    answers = claim_stdout()
    engine = Engine(Plan(**json.loads(sys.argv[1])))
    answer_requests(answers, engine.facts(), engine.carry_out)
    engine.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
