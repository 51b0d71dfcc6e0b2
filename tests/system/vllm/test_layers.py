"""What layers compute with, of the models of the tests: vLLM makes them as an engine does, without weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.support import vllm_cpu
from tests.support.models import save_random
from tests.vllm.test_layers import LINEAR, YARN

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 32, "long_factor": [4.0] * 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("LlamaForCausalLM", {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}),
    "one head": ("LlamaForCausalLM", {"num_key_value_heads": 1}),
    "long": ("LlamaForCausalLM", {"rope_scaling": {**LONG, "original_max_position_embeddings": 256}}),
    "windowed": (
        "Gemma3ForCausalLM",
        {"head_dim": 64, "sliding_window": 200, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "recurrent": (
        "Lfm2ForCausalLM",
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
        | {"conv_dim": 256, "conv_dim_out": 256, "block_dim": 256, "block_ff_dim": 512},
    ),
    "latent": (
        "DeepseekV2ForCausalLM",
        {"num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 512, "first_k_dense_replace": 2}
        | {"qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32},
    ),
}
Digests = Callable[..., list[str]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    place = tmp_path_factory.mktemp("layers")
    made = {name: str(save_random(kind, place / name, **fields)) for name, (kind, fields) in MODELS.items()}
    return made | {"default": str(vllm_cpu.build_model(vllm_cpu.cache_directory() / "model"))}


@pytest.fixture
def digests(models: dict[str, str], run_script: Callable[..., Any]) -> Digests:
    """Of each (model, options, ranks, rank)."""

    def of(*asked: tuple[str, dict[str, Any], int, int], new_process: bool = False) -> list[str]:
        plan = [(models[name], {"dtype": "bfloat16", **options}, *ranks) for name, options, *ranks in asked]
        made: list[str] = run_script("model_layers.py", plan, new_process=new_process)
        return made

    return of


def test_equal_starts_of_each_model_are_alike(digests: Digests, models: dict[str, str]) -> None:
    asked = [(name, {}, 1, 0) for name in models]
    first, second, third = (digests(*asked, new_process=new) for new in (False, False, True))
    assert first == second == third
    assert len(set(first)) == len(models)


def test_ranks_that_share_rows_are_alike(digests: Digests) -> None:
    for name, sizes in (("latent", (1, 2, 4)), ("one head", (1, 2, 4)), ("plain", (4, 8))):
        asked = [(name, {}, size, rank) for size in sizes for rank in {0, size - 1}]
        assert len(set(digests(*asked))) == 1, name


def test_a_length_counts_where_layers_take_something_from_it(digests: Digests) -> None:
    def of(name: str, *lengths: int) -> list[str]:
        return digests(*((name, {"max_model_len": length}, 1, 0) for length in lengths))

    long, longest, short, shorter = of("long", 1024, 4096, 256, 128)
    assert (long, short) == (longest, shorter)
    assert long != short
    for name in MODELS.keys() - {"long"}:
        assert len(set(of(name, 4096, 256))) == 1, name


def test_rope_that_is_overridden_counts(digests: Digests) -> None:
    ropes = [{}, LINEAR, {**LINEAR, "factor": 4.0}, YARN, {**YARN, "factor": 4.0}]
    overrides = [{"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", **rope}} for rope in ropes]
    made = digests(*(("plain", {"hf_overrides": each, "max_model_len": 256}, 1, 0) for each in overrides))
    assert len(set(made)) == len(ropes)
