"""What a model computes positions and attention with, read off its layers once they are made.

vLLM chooses some of it while it builds them: the factors of long RoPE by a longest context that it shortens afterwards
(vllm#56311). Engines with equal configurations may then compute other keys of the same tokens.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import chain
from typing import Any, Final

import torch
from torch.nn import Module
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

from nixl_tiers.base.chunk import NAMESPACE_BYTES
from nixl_tiers.vllm.weights import READ_BYTES, sampled

_ATTENTION: Final = re.compile("attention|attn", re.IGNORECASE)
_ROTARY: Final = re.compile("rotary|rope", re.IGNORECASE)  # "RotaryEmbedding", "LongRoPE"
# Attributes that say nothing of the bytes, or what the namespace has elsewhere.
_LEFT_OUT: Final = {
    # How large a rank's part is: tensor-parallel sizes with the same rows share them.
    *("tp_size", "tp_rank", "rank", "num_heads", "num_kv_heads", "num_kv_head_replicas", "n_heads", "n_rep"),
    *("q_size", "kv_size", "k_size", "v_size", "qkv_size", "q_size_local", "kv_size_local", "key_value_groups"),
    *("num_attention_heads", "num_key_value_heads", "num_local_heads", "num_local_kv_heads", "local_num_heads"),
    *("num_local_attention_heads", "num_local_key_value_heads", "num_heads_per_partition", "num_heads_per_rank"),
    *("num_kv_heads_per_partition", "num_kv_heads_per_rank", "q_size_per_rank", "kv_size_per_rank"),
    *("num_queries_per_kv", "head_per_group", "tp_heads", "tp_kv_heads", "tp_hidden", "tped_conv_size"),
    *("tped_intermediate_size", "tped_dt_size", "local_projection_size", "projection_size_per_partition"),
    # Which kernels compute the same: with CUDA graphs others than without.
    *("use_aiter", "use_fused_qk_norm_rope_gate"),
    # How long a request may be, or has been so far.
    *("max_model_len", "max_seq_len_cached", "_seq_len_cached"),
}


def digest_of_layers(models: list[Any], layers: Mapping[str, object]) -> bytes:
    """16 bytes over the plain attributes (numbers, texts, lists of them) and the buffers of the rotary and attention
    modules of these models of vLLM's, and of `layers`, its layers by name. Of buffers the rotary ones are read whole,
    others as weights are (`weights.sampled`): parameters are the weights themselves."""
    digest = hashlib.blake2b(digest_size=NAMESPACE_BYTES)
    of = cache(_digest_of)  # layers share rotary modules
    for name, module in chain(*(model.named_modules(remove_duplicate=False) for model in models), layers.items()):
        kind = type(module).__name__
        if isinstance(module, AttentionLayerBase) or _ATTENTION.search(kind) or _ROTARY.search(kind):
            digest.update(f"{name}\0".encode() + of(module))
    return digest.digest()


def _digest_of(module: Any) -> bytes:
    kind = type(module).__name__
    plain = {name: value for name, value in vars(module).items() if name not in _LEFT_OUT and _is_plain(value)}
    digest = hashlib.blake2b(repr((kind, sorted(plain.items()))).encode())
    for name, buffer in module.named_buffers(recurse=False) if isinstance(module, Module) else ():
        digest.update(repr((name, buffer.dtype, tuple(buffer.shape))).encode())
        for part in _read(buffer, whole=bool(_ROTARY.search(kind))):
            digest.update(part)
    return digest.digest()


def _read(buffer: torch.Tensor, *, whole: bool) -> Iterator[bytes]:
    raw = buffer.detach().contiguous().reshape(-1).view(torch.uint8)
    pieces = ((at, at + READ_BYTES) for at in range(0, len(raw), READ_BYTES))
    for start, stop in pieces if whole else sampled((0, len(raw))):
        yield raw[start:stop].cpu().numpy().tobytes()


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
