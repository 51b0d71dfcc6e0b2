"""How many bytes of KV cache a token has, by a model's config.json: what vLLM allocates for it, without vLLM.

Only for kinds of models whose layers in vLLM are known and tested (`tests/system/vllm/test_kv_bytes.py`): a number that
is wrong costs more than none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

_BYTES: Final = {
    "bfloat16": 2, "float16": 2, "float32": 4,
    "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1,
}  # fmt: skip
"""Of a number. Others (`nvfp4`, `int8_per_token_head`, `fp8_ds_mla`) have scales beside the numbers."""
DTYPES: Final = ("auto", *_BYTES)
_LATENT: Final = ("deepseek_v2", "deepseek_v3", "kimi_k2")
_HEADS: Final[Mapping[str, Mapping[str, Any]]] = {
    **{kind: {} for kind in ("cohere", "granite", "glm4_moe", "llama", "mixtral", "olmo2", "phi3")},
    "starcoder2": {},
    **{kind: {"use_sliding_window": False} for kind in ("qwen2", "qwen2_moe", "qwen3_moe", "smollm3")},
    "qwen3": {"use_sliding_window": False, "head_dim": 128},
    "mistral": {"sliding_window": 4096},
    **{kind: {"head_dim": 128} for kind in ("glm4", "ministral3", "seed_oss")},
    "gemma": {"head_dim": 256},
    "gpt_oss": {"head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2},
    "gemma2": {"head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 2},
    "gemma3_text": {
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "sliding_window": 4096, "sliding_window_pattern": 6,
    },
}  # fmt: skip
"""By model_type, what transformers has where the file is silent, if that is not the rule."""


class UnknownKv(ValueError):
    """The size cannot be told from this configuration. One sentence that says why."""


@dataclass(frozen=True, slots=True)
class Kv:
    """`full` layers keep every token, `windowed` ones the last `window`. `heads`: of K and V, or 1 of a latent, which
    every rank holds whole. `head_bytes`: of a token in one layer, keys and values together."""

    full: int
    windowed: int
    window: int
    heads: int
    head_bytes: int

    @property
    def layer_bytes(self) -> int:
        """Of a token in one layer, all heads."""
        return self.heads * self.head_bytes

    @property
    def token_bytes(self) -> int:
        """Of a token in all layers, with all ranks together and nothing counted twice."""
        return (self.full + self.windowed) * self.layer_bytes

    def copies(self, ranks: int) -> int:
        """How many tensor-parallel ranks hold the same bytes. Raises ValueError if they cannot divide the heads."""
        if self.heads % ranks and ranks % self.heads:
            raise ValueError(f"{ranks} tensor-parallel ranks cannot divide {self.heads} KV heads")
        return max(1, ranks // self.heads)

    @property
    def groups(self) -> tuple[int, int]:
        """How many KV groups vLLM makes, and of how many layers each: the last of a sort is padded."""
        sorts = [layers for layers in (self.full, self.windowed) if layers]
        layers = max(sorts) if max(sorts) < 1.5 * min(sorts) else min(sorts)
        return sum(-(-each // layers) for each in sorts), layers


def kv_of(config: Mapping[str, Any], dtype: str = "auto") -> Kv:
    """`config`: a model's config.json, read; `dtype`: one of DTYPES, as vLLM's --kv-cache-dtype, or the type of the
    engine's numbers. Layers that a speculator adds are not counted. Raises UnknownKv."""
    text = _mapping(config, "text_config") or config
    kind = str(text.get("model_type"))
    states = sorted({str(each) for each in _list(text, "layer_types")} - {"full_attention", "sliding_attention"})
    if config.get("is_encoder_decoder") or states or (kind not in _HEADS and kind not in _LATENT):
        what = f" with layers of {', '.join(states)}" if states else ""
        raise UnknownKv(f"the KV cache of a model of type {kind}{what} is not known here")
    layers = _number(text, "num_hidden_layers")
    number_bytes = _BYTES[_dtype(config, text) if dtype == "auto" else dtype]
    if kind in _LATENT:
        if "index_topk" in text:
            raise UnknownKv("the cache of a sparse index beside the latent is not known here")
        latent = _number(text, "kv_lora_rank") + _number(text, "qk_rope_head_dim")
        return Kv(layers, 0, 0, 1, latent * number_bytes)
    fields = {**_HEADS[kind], **text}
    queries = _number(fields, "num_attention_heads")
    head = _number(fields, "head_dim") if fields.get("head_dim") else _number(fields, "hidden_size") // queries
    window, windowed = _windows(fields, layers)
    return Kv(layers - windowed, windowed, window, _number(fields, "num_key_value_heads"), 2 * head * number_bytes)


def _windows(fields: Mapping[str, Any], layers: int) -> tuple[int, int]:
    """The window, and how many layers have it."""
    window = _number(fields, "sliding_window") if fields.get("sliding_window") else 0
    if not window or fields.get("use_sliding_window") is False:
        return 0, 0
    if types := _list(fields, "layer_types"):
        if len(types) != layers:
            raise UnknownKv(f"it has {layers} layers, and says of {len(types)} what they are")
        windowed = types.count("sliding_attention")
    elif pattern := fields.get("sliding_window_pattern"):
        windowed = layers - layers // pattern
    elif fields.get("use_sliding_window"):
        raise UnknownKv("which of its layers have a sliding window is not in this file")
    else:
        windowed = layers
    return (window, windowed) if windowed else (0, 0)


def _dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """As vLLM chooses it: what the checkpoint says of its KV cache, else numbers of 16 bits, also for float32."""
    quantised = _mapping(config, "quantization_config") or _mapping(text, "quantization_config")
    inner = _mapping(quantised, "quantization") or quantised
    scheme = inner.get("kv_cache_scheme") or inner.get("kv_cache_quant_algo")
    if isinstance(scheme, Mapping):
        scheme = "fp8" if (scheme.get("num_bits"), scheme.get("type")) == (8, "float") else scheme
    if scheme is not None and str(scheme).lower() != "fp8":
        raise UnknownKv(f"how this checkpoint quantises its KV cache ({scheme}) is not known here")
    return "bfloat16" if scheme is None else "fp8"


def _number(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or value < 1:
        raise UnknownKv(f"{name} is not in this file")
    return value


def _mapping(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = fields.get(name)
    return value if isinstance(value, Mapping) else {}


def _list(fields: Mapping[str, Any], name: str) -> list[Any]:
    value = fields.get(name)
    return value if isinstance(value, list) else []
