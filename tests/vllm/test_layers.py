"""What a model's layers compute with: engines that would compute other keys of the same tokens find nothing of each
other, whatever their configurations say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("vllm")

from vllm.config import CompilationConfig, set_current_vllm_config
from vllm.model_executor.layers import rotary_embedding

from nixl_tiers.vllm.layers import digest_of_layers
from nixl_tiers.vllm.weights import SAMPLE_BYTES, STRIDE_BYTES

LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 16,
    "long_factor": [4.0] * 16,
    "original_max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}
LINEAR = {"rope_type": "linear", "factor": 2.0}


class Attention(nn.Module):
    """As models have it: a rank's part of the heads, and what all ranks compute with."""

    def __init__(self, rotary: nn.Module | None = None, **plain: Any) -> None:
        super().__init__()
        self.__dict__ |= {"scaling": 0.125, "sliding_window": None, "num_heads": 8, "tp_rank": 0} | plain
        self.rotary_emb = rotary
        self.register_buffer("_k_scale", torch.tensor(1.0), persistent=False)
        self.weight = nn.Parameter(torch.zeros(4))


class Norm(nn.Module):
    eps = 1e-5


def rotary(max_model_len: int, ops: str = "all", **parameters: Any) -> nn.Module:
    """vLLM's own, as it is made for a model with 512 positions."""
    rotary_embedding._ROPE_DICT.clear()  # a process that starts two engines gets the layers of the first one
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=max_model_len),
        compilation_config=CompilationConfig(custom_ops=[ops]),
    )
    with set_current_vllm_config(config):
        made: nn.Module = rotary_embedding.get_rope(32, 512, rope_parameters=parameters, dtype=torch.bfloat16)
    return made


def model(layer: nn.Module | None = None) -> nn.Module:
    return nn.ModuleDict({"attn": layer or Attention(), "norm": Norm()})


def digest(*models: nn.Module, **layers: object) -> bytes:
    return digest_of_layers(list(models), layers)


def of_rope(max_model_len: int, **parameters: Any) -> bytes:
    return digest(model(Attention(rotary(max_model_len, **parameters))))


def test_the_factors_that_long_rope_was_made_with_count_not_the_longest_context() -> None:
    """vLLM makes the layers for one length, and may then shorten it to what fits: the configuration says no more which
    factors they have. The tables are the same."""
    long, short = of_rope(512, **LONG), of_rope(256, **LONG)
    assert long != short
    assert of_rope(4096, **LONG) == long
    assert of_rope(200, **LONG) == short


def test_kinds_and_factors_of_rope_share_nothing() -> None:
    kinds = [{}, LINEAR, {**LINEAR, "factor": 4.0}, YARN, {**YARN, "factor": 4.0}, {**YARN, "beta_fast": 16}]
    assert len({of_rope(512, **kind) for kind in kinds}) == len(kinds)
    assert of_rope(512, **LONG) != of_rope(512, **LONG | {"long_factor": [4.0] * 15 + [5.0]})


@pytest.mark.parametrize(
    "change",
    [{"scaling": 0.25}, {"sliding_window": 64}, {"new": True}, {"sections": [1, 2]}, {"kind": "decoder"}],
    ids=str,
)
def test_plain_attributes_of_attention_count(change: dict[str, Any]) -> None:
    assert digest(model(Attention(**change))) != digest(model())


def test_what_is_one_ranks_part_or_no_plain_value_does_not_count() -> None:
    """Tensor-parallel sizes with the same rows share them."""
    rank = Attention(num_heads=2, tp_rank=3, q_size=64, max_model_len=4096, impl=object(), mixed=[1, object()])
    rank.weight.data += 1  # known by the files that it is from
    assert digest(model(rank)) == digest(model())
    other = model()
    other["norm"].extra = 2
    assert digest(other) == digest(model()), "not of attention"


def test_which_layer_has_which_rotary_module_counts() -> None:
    near, far = rotary(512), rotary(512, rope_theta=1e6)

    def of(*ropes: nn.Module) -> bytes:
        return digest(nn.ModuleList(Attention(rope) for rope in ropes))

    ropes = [(near, far), (far, near), (near, near), (near,), (near, far, far), (near, far, near)]
    assert len({of(*each) for each in ropes}) == len(ropes)


class RotaryTable(nn.Module):
    pass


def test_other_buffers_are_sampled_as_weights_are_and_rotary_ones_whole() -> None:
    def of(*changed: int, kind: type[nn.Module] = Attention) -> bytes:
        layer = kind()
        table = torch.zeros(3 * STRIDE_BYTES, dtype=torch.uint8)
        table[list(changed)] = 1
        layer.register_buffer("table", table)
        return digest(model(layer))

    plain = of()
    assert all(of(at) != plain for at in (0, STRIDE_BYTES + SAMPLE_BYTES - 1, 3 * STRIDE_BYTES - 1))
    assert of(SAMPLE_BYTES) == plain, "between two samples"
    assert of(SAMPLE_BYTES, kind=RotaryTable) != of(kind=RotaryTable)
    scaled = Attention()
    scaled._k_scale.fill_(2)
    assert digest(model(scaled)) != digest(model())
