"""The engines of bench.features_beside: real vLLM on the CPU, in this process, with our tiers or with vLLM's own.

    python -m bench.features_engine PLAN       the fields of `Plan` as JSON; requests as lines of JSON on standard input

Requests: ["ask", prompt, {...}] generates, with a "salt", an "adapter" [name, number, path], or "params", which are
kv_transfer_params; ["forget"] empties the engine's own prefix cache, and ["reset"] the connector's too; ["seen"] says
what metrics and KV events tell so far.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from bench.engine_process import answer_requests, claim_stdout
from demo import vllm_cpu

HOST_BYTES: Final = 64 << 20
ANSWER_TOKENS: Final = 8
EVENTS_MS: Final = 500  # without one: all have come


@dataclass(frozen=True)
class Plan:
    ours: bool
    model: str
    scratch: str
    """A directory for files, which a restarted engine has again."""
    s3: dict[str, str] | None = None
    """Endpoint and bucket, instead of files."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of LLM."""
    events: str | None = None
    """Where to publish them."""

    def connector(self) -> dict[str, Any]:
        """The fields of KVTransferConfig."""
        if self.ours:
            file = {"type": "file", "path": f"{self.scratch}/kv", "capacity": "1GiB", "min_free": 0}
            lower = {"type": "s3", "capacity": "1GiB", **self.s3} if self.s3 else file
            cpu = {"type": "cpu", "capacity": HOST_BYTES}
            return vllm_cpu.recomputing_transfer([cpu, lower], wait_s=120, lora_storage=True)
        second: dict[str, Any] = {"type": "fs", "root_dir": f"{self.scratch}/kv"}
        if self.s3:
            scheme, _, host = self.s3["endpoint"].partition("://")
            store = {"bucket": self.s3["bucket"], "endpoint_override": host, "scheme": scheme}
            second = {"type": "obj", "store_config": store}
        extra = {
            "spec_name": "TieringOffloadingSpecOnCPU",
            "spec_module_path": "tests.support.vllm_spec_on_cpu",
            "cpu_bytes_to_use": HOST_BYTES,
            "secondary_tiers": [second],
        }
        return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}

    def llm(self) -> Any:
        if self.s3 and not self.ours:
            os.environ["NIXL_TELEMETRY_ENABLE"] = "y"  # without it the obj tier of vLLM 0.32 ends the engine
        settings = {"dtype": "float32", "max_model_len": 1024, "skip_tokenizer_init": True, **self.settings}
        if self.events:
            from vllm.config import KVEventsConfig

            settings["kv_events_config"] = KVEventsConfig(True, publisher="zmq", endpoint=self.events)
        return vllm_cpu.in_process_llm(Path(self.model), self.connector(), disable_log_stats=False, **settings)


class Engine:
    def __init__(self, plan: Plan) -> None:
        from bench.longdoc_engine import FLUSH_S, ready_tiers

        self.llm = plan.llm()
        if plan.ours and not all(self.llm.collective_rpc(ready_tiers, args=(FLUSH_S,))):
            raise SystemExit("a tier is not up")
        self._events: Any = None
        if plan.events:
            import zmq

            self._events = zmq.Context.instance().socket(zmq.SUB)
            self._events.connect(plan.events)
            self._events.setsockopt(zmq.SUBSCRIBE, b"")

    def carry_out(self, request: list[Any]) -> Any:
        verb, *arguments = request
        if verb == "ask":
            return self.ask(*arguments)
        if verb == "seen":
            return {"metrics": self.metrics(), "events": self.events()}
        return self.llm.reset_prefix_cache(reset_connector=verb == "reset")

    def ask(self, prompt: list[int], wish: dict[str, Any]) -> dict[str, Any]:
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        sampling = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True, detokenize=False)
        sampling.extra_args = {"kv_transfer_params": wish["params"]} if "params" in wish else None
        lora = LoRARequest(*wish["adapter"]) if "adapter" in wish else None
        asked = {"prompt_token_ids": prompt} | ({"cache_salt": wish["salt"]} if "salt" in wish else {})
        (output,) = self.llm.generate([asked], sampling, use_tqdm=False, lora_request=lora)
        return {"tokens": list(output.outputs[0].token_ids), "cached": output.num_cached_tokens}

    def metrics(self) -> dict[str, Any]:
        """Tokens that were cached, by source, and which metrics of the tiers are not zero."""
        from prometheus_client import REGISTRY

        sources: dict[str, int] = {}
        names = set()
        for family in REGISTRY.collect():
            for sample in family.samples:
                if not sample.value or sample.name.endswith("_created"):
                    continue
                if sample.name == "vllm:prompt_tokens_cached_by_source_total":
                    sources[sample.labels["source"]] = int(sample.value)
                elif family.name.startswith(("vllm:kv_offload", "nixl_tiers:")):
                    names.add(family.name)
        return {"sources": sources, "names": sorted(names)}

    def events(self) -> dict[str, int]:
        """Blocks that were stored so far, by medium."""
        import msgspec
        from vllm.distributed.kv_events import BlockStored, KVEventBatch

        counts: Counter[str] = Counter()
        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        while self._events is not None and self._events.poll(EVENTS_MS):
            for event in decoder.decode(self._events.recv_multipart()[-1]).events:
                if isinstance(event, BlockStored):
                    counts[str(event.medium)] += len(event.block_hashes)
        return dict(counts)


def main() -> None:
    answers = claim_stdout()
    engine = Engine(Plan(**json.loads(sys.argv[1])))
    answer_requests(answers, "ready", engine.carry_out)
    engine.llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
