"""KV bytes a token by a model's config.json are those of vLLM's own layers, for every kind of model that we claim."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from demo import vllm_cpu
from nixl_tiers.base.kv_bytes import _HEADS, _LATENT, kv_of
from nixl_tiers.vllm.compat import version

KINDS: Final = (*_HEADS, *_LATENT)
SMALL: Final = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 64,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "dtype": "bfloat16",
    "max_position_embeddings": 2048, "sliding_window": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "shared_expert_intermediate_size": 64, "n_shared_experts": 1, "topk_group": 1,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "q_lora_rank": None,
}  # fmt: skip
"""Each configuration has what transformers has of it."""
LATENT: Final = {"deepseek_v2", "deepseek_v3", "kimi_k2"}


def configuration(kind: str, **changes: Any) -> dict[str, Any]:
    """As a checkpoint's config.json."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as ARCHITECTURES

    of = "deepseek_v3" if kind == "kimi_k2" else kind
    default = transformers.CONFIG_MAPPING[of]().to_dict()
    heads = {"num_key_value_heads": 8} if kind in LATENT else {}
    fields = {name: value for name, value in {**SMALL, **heads}.items() if name in default or name == "head_dim"}
    if kind in LATENT:
        del fields["head_dim"]  # transformers has another number by that name
    return {"model_type": kind, "architectures": [ARCHITECTURES[of]], **fields, **changes}


def cases() -> dict[str, tuple[dict[str, Any], str, int]]:
    """Configuration, --kv-cache-dtype and ranks, by name."""
    said = ("head_dim", "sliding_window")
    silent = {
        kind: {name: value for name, value in configuration(kind).items() if name not in said}
        for kind in KINDS
        if kind != "glm4_moe"  # no default of transformers'
    }
    for name in ("num_attention_heads", "num_key_value_heads"):  # as Gemma 3 is published
        del silent["gemma3_text"][name]
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    fp8 = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}, "ignore": []}
    types = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    return {
        **{kind: (configuration(kind), "auto", 1) for kind in KINDS},
        "float32 checkpoint": (configuration("llama", dtype="float32"), "auto", 1),
        "fp8": (configuration("llama"), "fp8", 1),
        "fp8 checkpoint": (configuration("llama", quantization_config={**fp8, "kv_cache_scheme": scheme}), "auto", 1),
        "one window for all": (configuration("llama", sliding_window=256), "auto", 1),
        "no window": (configuration("mistral", sliding_window=None), "auto", 1),
        "window not used": (configuration("qwen2", use_sliding_window=False), "auto", 1),
        "layers by name": (configuration("gemma3_text", layer_types=types * 2), "auto", 1),
        **{f"silent {kind}": (config, "auto", 1) for kind, config in silent.items()},
        "no head size": ({k: v for k, v in configuration("llama").items() if k != "head_dim"}, "auto", 1),
        # vLLM 0.33 has none on a CPU.
        **({"latent in fp8": (configuration("deepseek_v3"), "fp8", 1)} if (version() or (0, 33)) < (0, 33) else {}),
        "8 ranks": (configuration("qwen3"), "auto", 8),
        "latent on 8 ranks": (configuration("deepseek_v2"), "auto", 8),
    }


def test_every_layer_keeps_what_vllm_keeps_in_its_groups(
    run_apart: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    plan, given = [], cases()
    for config, dtype, ranks in given.values():
        place: Path = tmp_path_factory.mktemp("model")
        (place / "config.json").write_text(json.dumps(config))
        plan.append((str(place), {"kv_cache_dtype": dtype}, ranks))
    for (name, (config, dtype, ranks)), theirs in zip(given.items(), run_apart(layers_of, plan), strict=True):
        kv = kv_of(config, dtype)
        of_rank = kv.layer_bytes * kv.copies(ranks) // ranks
        ours = +Counter({(of_rank, None): kv.full, (of_rank, kv.window): kv.windowed})
        assert ours == Counter(map(tuple, theirs["layers"])), name
        assert kv.groups == (len(theirs["groups"]), max(theirs["groups"])), name


# --- in a process that builds layers, without weights and without an engine ---


def layers_of(plan: list[Any]) -> list[dict[str, Any]]:
    """Of each model, its options and tensor-parallel ranks: the bytes of a token on one rank and the window of each
    layer, and how many layers each KV group has."""
    vllm_cpu.supply_metadata()
    os.environ.update(vllm_cpu.environment())
    import torch
    from vllm.model_executor.models import registry

    torch.cpu._is_avx512_supported = lambda: True  # or vLLM 0.33 refuses fp8, with which nothing is computed here

    # Instead of in a process of its own for each model, which takes seconds.
    registry._LazyRegisteredModel.inspect_model_cls = lambda self: registry._ModelInfo.from_model_cls(
        self.load_model_cls()
    )
    return [layers(*given) for given in plan]


def layers(directory: str, options: dict[str, Any], ranks: int) -> dict[str, Any]:
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    try:
        from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
    except ImportError:  # its place since 0.33
        from vllm.v1.core.kv_cache_planning import get_kv_cache_groups

    with built(directory, options, ranks) as config:
        context = config.compilation_config.static_forward_context
        made = {name: layer for name, layer in context.items() if isinstance(layer, AttentionLayerBase)}
        specs = {name: spec for name, layer in made.items() if (spec := layer.get_kv_cache_spec(config))}
        # Workers and the engine's core agree on one. All pages of a model are of one size here: any will do.
        config.cache_config.kv_cache_layout = "LBNHC"
        kept = [[s.page_size_bytes // s.block_size, getattr(s, "sliding_window", None)] for s in specs.values()]
        groups = [len(group.layer_names) for group in get_kv_cache_groups(config, specs)]
    return {"layers": kept, "groups": groups}


@contextmanager
def built(directory: str, options: dict[str, Any], ranks: int) -> Iterator[Any]:
    """vLLM's configuration for the model, while that of the first rank is there."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.model_loader.utils import initialize_model

    arguments = EngineArgs(model=directory, skip_tokenizer_init=True, enforce_eager=True, **options)
    config = arguments.create_engine_config()
    rotary_embedding._ROPE_DICT.clear()  # of the model before
    numbers = torch.get_default_dtype()
    with tempfile.TemporaryDirectory() as place, set_current_vllm_config(config):
        parallel_state.init_distributed_environment(1, 0, f"file://{place}/rendezvous", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
        # The layers ask the group for its size and make their own part, without the others.
        parallel_state.get_tp_group().world_size = ranks
        torch.set_default_dtype(config.model_config.dtype)
        try:
            with torch.device("meta"):
                model = initialize_model(config)
        finally:
            torch.set_default_dtype(numbers)
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
        yield config
        del model
