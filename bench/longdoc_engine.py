"""The engines of bench.longdoc: real vLLM on the CPU with one connector or none, in this process or in its own.

    python -m bench.longdoc_engine PLAN       the fields of `Plan` as JSON; requests as lines of JSON on standard input

Requests: ["ask", number] asks all documents at once, each with a question of that number; ["flush"] waits until our
tiers are written.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from bench.engine_process import answer_requests, claim_stdout
from bench.ttft_engine import MODELS
from demo import vllm_cpu

IN_PROCESS, OWN_PROCESS = "in-process", "own-process"
WAYS: Final = (IN_PROCESS, OWN_PROCESS)
KINDS: Final = ("plain", "cpu", "file", "memory", "s3", "vllm-cpu", "vllm-fs", "vllm-obj")
QUESTION_TOKENS: Final = 16
ANSWER_TOKENS: Final = 8
FLUSH_S: Final = 300.0


@dataclass(frozen=True)
class Workload:
    documents: int
    tokens: int
    """Of a document with its question."""
    host_bytes: int
    """Host memory for offloading: less than all documents take."""
    cached_documents: int
    """How many have room in the engine's own KV cache."""
    real_model: bool
    """The model that vllm_cpu builds. Otherwise a tiny one with random weights."""

    @property
    def blocks(self) -> int:
        """Of a document, with its answer."""
        return -(-(self.tokens + ANSWER_TOKENS) // vllm_cpu.BLOCK_TOKENS)

    @property
    def cacheable_tokens(self) -> int:
        whole = (self.tokens - QUESTION_TOKENS) // vllm_cpu.BLOCK_TOKENS * vllm_cpu.BLOCK_TOKENS
        return self.documents * whole

    def of(self, documents: int | None) -> Workload:
        """With so many documents, and as much room for each; None: itself."""
        if documents is None:
            return self
        host_bytes = self.host_bytes * documents // self.documents
        cached = max(1, self.cached_documents * documents // self.documents)
        return replace(self, documents=documents, host_bytes=host_bytes, cached_documents=cached)

    def prompts(self, question: int) -> list[dict[str, list[int]]]:
        asked = _tokens(1_000_000 + question, QUESTION_TOKENS)
        return [
            {"prompt_token_ids": _tokens(number, self.tokens - QUESTION_TOKENS) + asked}
            for number in range(self.documents)
        ]


FULL: Final = Workload(48, 1500, 512 << 20, 16, real_model=True)
QUICK: Final = Workload(6, 420, 1 << 20, 2, real_model=False)


@dataclass(frozen=True)
class Plan:
    kind: str
    way: str
    quick: bool
    scratch: str
    """A directory of this engine's own, for its tier and model."""
    s3: dict[str, str] | None = None
    """Endpoint and bucket, for the kinds that need them. Credentials are in the environment."""
    documents: int | None = None
    """How many, where they are not the workload's."""

    @property
    def workload(self) -> Workload:
        return (QUICK if self.quick else FULL).of(self.documents)

    @property
    def tier(self) -> Path:
        return Path(self.scratch) / "tier"

    @property
    def ours(self) -> bool:
        return self.kind in ("cpu", "file", "memory", "s3")

    def connector(self) -> dict[str, Any] | None:
        """The fields of KVTransferConfig."""
        if self.kind == "plain":
            return None
        if self.ours:
            waits = {"wait_s": FLUSH_S} if self.quick else {}
            return vllm_cpu.recomputing_transfer(self._tiers(), model_id="bench.longdoc", **waits)
        extra: dict[str, Any] = {
            "spec_name": "CPUOffloadingSpecOnCPU" if self.kind == "vllm-cpu" else "TieringOffloadingSpecOnCPU",
            "spec_module_path": "tests.support.vllm_spec_on_cpu",
            "cpu_bytes_to_use": self.workload.host_bytes,
        }
        if self.kind == "vllm-fs":
            extra["secondary_tiers"] = [{"type": "fs", "root_dir": str(self.tier)}]
        elif self.kind == "vllm-obj":
            assert self.s3
            scheme, _, host = self.s3["endpoint"].partition("://")
            store = {"bucket": self.s3["bucket"], "endpoint_override": host, "scheme": scheme}
            extra["secondary_tiers"] = [{"type": "obj", "store_config": store}]
        return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}

    def _tiers(self) -> list[dict[str, Any]]:
        host = {"type": "cpu", "capacity": self.workload.host_bytes}
        if self.kind == "file":
            return [host, {"type": "file", "path": str(self.tier), "capacity": "8GiB", "min_free": 0}]
        if self.kind == "memory":
            shared = {"layout": "files", "path": str(self.tier), "capacity": "8GiB", "min_free": 0}
            return [host, {"type": "file", **shared}]
        if self.kind == "s3":
            assert self.s3
            return [host, {"type": "s3", **self.s3, "capacity": "8GiB"}]
        return [host]

    def llm(self) -> Any:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if self.way == OWN_PROCESS else "0"
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # `flush_tiers` is sent to the engine's process
        if self.kind == "vllm-obj":
            os.environ["NIXL_TELEMETRY_ENABLE"] = "y"  # without it the tier of vLLM 0.32 ends the engine
        if self.workload.real_model:
            model, weights = vllm_cpu.build_model(vllm_cpu.cache_directory() / "model"), "auto"
        else:
            model, weights = MODELS["tiny"].write(Path(self.scratch) / "model"), "dummy"
        return vllm_cpu.in_process_llm(
            model,
            self.connector(),
            load_format=weights,
            skip_tokenizer_init=True,
            generation_config="vllm",
            max_model_len=self.workload.blocks * vllm_cpu.BLOCK_TOKENS,
            num_gpu_blocks_override=self.workload.cached_documents * self.workload.blocks + 1,
        )


def _tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, MODELS["tiny"].vocab_size), k=count)


def flush_tiers(_worker: object, timeout_s: float) -> bool:
    """Runs in the engine's process, where the scheduler is as well."""
    from nixl_tiers.runtime.coordinator import _coordinators

    return all(coordinator.flush(timeout_s) for coordinator in list(_coordinators))


def ready_tiers(_worker: object, timeout_s: float) -> bool:
    """Also in the engine's process: whether all tiers are up."""
    from nixl_tiers.runtime.coordinator import _coordinators

    def up(coordinator: Any) -> bool:
        return coordinator.wait_ready(timeout_s) and all(tier["up"] for tier in coordinator.counters().values())

    return all(map(up, list(_coordinators)))


class Engine:
    def __init__(self, plan: Plan) -> None:
        self.workload = plan.workload
        self.llm = plan.llm()
        if not all(self.llm.collective_rpc(ready_tiers, args=(FLUSH_S,))):
            raise SystemExit("a tier is not up")

    def carry_out(self, request: list[Any]) -> Any:
        verb, *arguments = request
        return {"ask": self.ask, "flush": self.flush}[verb](*arguments)

    def ask(self, question: int) -> dict[str, float]:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True, detokenize=False)
        prompts = self.workload.prompts(question)
        began = time.perf_counter()
        outputs = self.llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "cached_tokens": sum(output.num_cached_tokens or 0 for output in outputs)}

    def flush(self) -> None:
        if not all(self.llm.collective_rpc(flush_tiers, args=(FLUSH_S,))):
            raise SystemExit("a tier was not written in time")


def main() -> None:
    answers = claim_stdout()
    plan = Plan(**json.loads(sys.argv[1]))
    engine = Engine(plan)
    answer_requests(answers, "ready", engine.carry_out)
    engine.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
