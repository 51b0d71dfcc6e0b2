"""KV bytes a token of models as they are published, and what is not told. Equality with vLLM: tests/vllm."""

from __future__ import annotations

from typing import Any

import pytest

from nixl_tiers.base.kv_bytes import UnknownKv, kv_of

HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
LLAMA_8B = {"model_type": "llama", "num_hidden_layers": 32, **HEADS}
LLAMA_70B = {**LLAMA_8B, "num_hidden_layers": 80, "num_attention_heads": 64, "hidden_size": 8192}
LATENT = {"model_type": "deepseek_v3", "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
GEMMA = {"model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560, "sliding_window": 1024}


@pytest.mark.parametrize(
    ("config", "dtype", "token_bytes"),
    [
        (LLAMA_8B, "auto", 131_072),
        (LLAMA_70B, "auto", 327_680),
        (LLAMA_70B, "fp8", 163_840),
        (LLAMA_8B, "float32", 262_144),
        (LATENT, "auto", 61 * 576 * 2),
        (GEMMA, "auto", 34 * 2 * 4 * 256 * 2),
        ({**LLAMA_8B, "quantization_config": {"quantization": {"kv_cache_quant_algo": "FP8"}}}, "auto", 65_536),
        ({**LLAMA_8B, "quantization_config": {"quantization": {"kv_cache_quant_algo": "FP8"}}}, "bfloat16", 131_072),
    ],
)
def test_bytes_of_published_models(config: dict[str, Any], dtype: str, token_bytes: int) -> None:
    assert kv_of(config, dtype).token_bytes == token_bytes
    assert kv_of({"model_type": "a_wrapper", "text_config": config}, dtype) == kv_of(config, dtype)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "nemotron_h", **HEADS}, "a model of type nemotron_h is not known"),
        ({"model_type": "qwen3_next", **HEADS}, "a model of type qwen3_next is not known"),
        (
            {**LLAMA_8B, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
            "layers of linear_attention is no",
        ),
        ({**LLAMA_8B, "layer_types": ["mamba", "full_attention"]}, "layers of mamba is not known"),
        ({**LLAMA_8B, "is_encoder_decoder": True}, "is not known"),
        ({}, "a model of type None is not known"),
        ({**LATENT, "index_topk": 2048}, "sparse index"),
        ({k: v for k, v in LLAMA_8B.items() if k != "num_key_value_heads"}, "num_key_value_heads is not in"),
        ({k: v for k, v in LLAMA_8B.items() if k != "num_hidden_layers"}, "num_hidden_layers is not in"),
        ({k: v for k, v in LLAMA_8B.items() if k != "hidden_size"}, "hidden_size is not in"),
        ({k: v for k, v in LATENT.items() if k != "kv_lora_rank"}, "kv_lora_rank is not in"),
        ({**LLAMA_8B, "num_key_value_heads": [8, 4]}, "num_key_value_heads is not in"),
        ({**LLAMA_8B, "quantization_config": {"kv_cache_scheme": {"num_bits": 4}}}, "quantises its KV cache"),
        ({**LLAMA_8B, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 9}, "sliding window is not"),
        ({**GEMMA, "layer_types": ["full_attention"] * 33}, "has 34 layers, and says of 33"),
    ],
)
def test_what_is_not_known_is_no_number(config: dict[str, Any], why: str) -> None:
    with pytest.raises(UnknownKv, match=why):
        kv_of(config)


@pytest.mark.parametrize(("ranks", "copies"), [(1, 1), (2, 1), (8, 1), (16, 2), (32, 4)])
def test_ranks_beyond_the_heads_hold_copies(ranks: int, copies: int) -> None:
    assert kv_of(LLAMA_8B).copies(ranks) == copies
    assert kv_of(LATENT).copies(ranks) == ranks


@pytest.mark.parametrize("ranks", [3, 12])
def test_ranks_that_cannot_divide_the_heads_are_refused(ranks: int) -> None:
    with pytest.raises(ValueError, match=f"^{ranks} tensor-parallel ranks cannot divide 8 KV heads$"):
        kv_of(LLAMA_8B).copies(ranks)
