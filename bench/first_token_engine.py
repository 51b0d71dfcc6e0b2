"""An engine of a bench, in its child process: vLLM with scheduler and worker in one, asked for first tokens."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from demo import vllm_cpu


class FirstTokenEngine:
    """`carry_out` is what `answer_requests` calls: a request is the name of one of `VERBS`, and its arguments."""

    VERBS: tuple[str, ...] = ("ask",)

    def __init__(
        self, transfer: Mapping[str, Any] | None, tokens: int, ready_s: float, model: Path | None = None
    ) -> None:
        """`transfer`: the fields of KVTransferConfig, None without tiers; `tokens`: of the longest prompt and step;
        `ready_s`: how long to wait for the tiers; `model`: its folder, that of `vllm_cpu` by default."""
        model = model or vllm_cpu.build_model(vllm_cpu.cache_directory() / "model")
        limits = {"max_model_len": tokens, "max_num_batched_tokens": tokens, "skip_tokenizer_init": True}
        self.llm = vllm_cpu.in_process_llm(model, transfer, **limits)
        self.store: Any = None
        self.ready_s = ready_s
        self._asked = 0
        if transfer:
            from nixl_tiers.store import TieredStore

            core = self.llm.llm_engine.engine_core.engine_core
            self.store = TieredStore(core.scheduler.connector.connector_scheduler.manager._coordinator)
            assert self.store.wait_ready(ready_s)

    def carry_out(self, request: list[Any]) -> Any:
        verb, *arguments = request
        assert verb in self.VERBS
        return getattr(self, verb)(*arguments)

    def ask(self, prompts: list[list[int]], params: dict[str, Any] | None = None) -> list[float]:
        """Seconds to the first token of each prompt, all asked at once, with vLLM's own prefix cache empty. `params`:
        the requests' kv_transfer_params."""
        from vllm import SamplingParams

        assert self.llm.reset_prefix_cache()
        engine, first_s = self.llm.llm_engine, dict[str, float]()
        names = [f"r{self._asked + place}" for place in range(len(prompts))]
        self._asked += len(prompts)
        extra = {"kv_transfer_params": params} if params else None
        began_s = time.perf_counter()
        for name, prompt in zip(names, prompts, strict=True):
            sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False, extra_args=extra)
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.outputs and output.outputs[0].token_ids:
                    first_s.setdefault(output.request_id.split("-")[0], time.perf_counter() - began_s)
        if self.store is not None:
            self.store.flush(self.ready_s)
        return [first_s[name] for name in names]
