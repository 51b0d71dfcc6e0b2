"""Offline inference that keeps what it has computed. Run it twice; the second run loads the document's KV cache.

python examples/offline.py MODEL examples/configs/laptop.json
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

DOCUMENT = " ".join(f"On day {day} the ship took {day * 37 % 89} barrels to port {day % 7}." for day in range(60))
QUESTIONS = ("How many barrels went to port 3?", "On which day was the ship first in port 5?")


def kv_transfer(config: str) -> dict[str, Any]:
    """The fields of vLLM's KVTransferConfig; `config` is a file of tiers."""
    return {
        "kv_connector": "NixlTiersConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"spec_name": "NixlTiersSpec", "config": config},
    }


def ask(llm: Any) -> Iterator[tuple[int, int, str]]:
    """Of each answer: tokens of the prompt, how many of them were not computed, and the text."""
    from vllm import SamplingParams

    for question in QUESTIONS:
        prompt = f"{DOCUMENT}\n{question}\n"  # what prompts share comes first
        (answer,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=16), use_tqdm=False)
        yield len(answer.prompt_token_ids), answer.num_cached_tokens or 0, answer.outputs[0].text


def main(model: str, config: str) -> None:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    llm = LLM(model=model, max_model_len=2048, kv_transfer_config=KVTransferConfig(**kv_transfer(config)))
    for tokens, cached, text in ask(llm):
        print(f"{cached} of {tokens} prompt tokens from the cache: {text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
