"""Weights are changed in place, on real engines, and vLLM's own prefix cache is reset as callers do it: without the
connector. What needs no engine is in test_weight_changes.py."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.support import vllm_cpu
from tests.support.file_tier import files_tier

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]

BLOCK = vllm_cpu.BLOCK_TOKENS
CPU = {"type": "cpu", "capacity": "64MiB"}
WHOLE = 700 // BLOCK * BLOCK
Engine = Callable[..., list[Any]]
RECOMPUTING = {"kv_connector": "NixlTiersConnector", "kv_load_failure_policy": "recompute"}


def ask(number: int) -> list[Any]:
    return ["generate", [[(7 * i * i + 3 * i + number) % 500 + 1 for i in range(700)]], 8]


@pytest.fixture(scope="module")
def models(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One, and another with other embeddings."""
    import torch
    from safetensors.torch import load_file, save_file

    other = shutil.copytree(small_model, tmp_path_factory.mktemp("models") / "other")
    file, name = other / "model.safetensors", "model.embed_tokens.weight"
    weights = load_file(file)
    weights[name] = weights[name][
        torch.randperm(len(weights[name]), generator=torch.Generator().manual_seed(1))
    ].clone()
    save_file(weights, file, metadata={"format": "pt"})
    return small_model, other


@pytest.fixture(scope="module")
def options() -> dict[str, Any]:
    return {"skip_tokenizer_init": True, "dtype": "float32", "max_num_seqs": 1}


def two_ranks() -> dict[str, Any]:
    cores = vllm_cpu.all_cores()
    if len(cores) < 2:
        pytest.skip("two ranks need two cores")
    return {
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "env": {"VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[1]}", "VLLM_CPU_KVCACHE_SPACE": "1"},
    }


@pytest.mark.parametrize("case", [("reload", 1), ("load", 1), ("reload", 2)], ids=str)
def test_no_answer_is_of_other_weights(
    engine: Engine, models: tuple[Path, Path], options: dict[str, Any], tmp_path: Path, case: tuple[str, int]
) -> None:
    model, other = models
    how, ranks = case
    settings = options if ranks == 1 else {**options, **two_ranks()}
    tiers = {"tiers": [CPU, files_tier(tmp_path / "kv", "64MiB")], "on_reset": "keep"}
    truth = engine(None, ask(0), ask(1), path=other, **settings)
    before, _, _, _, after, new, _, _, hit, fresh = engine(
        tiers,
        *(ask(0), ["flush"], ["change", how, str(other)], ["forget"]),
        *(ask(0), ask(1), ["flush"], ["forget"]),
        *(ask(0), ask(1)),
        path=model,
        transfer=RECOMPUTING,
        **settings,
    )
    assert before[0]["tokens"] != truth[0][0]["tokens"], "other weights must show"
    assert [after[0]["tokens"], new[0]["tokens"]] == [answer[0]["tokens"] for answer in truth]
    assert [after[0]["cached"], new[0]["cached"]] == [0, 0]
    assert [hit[0]["tokens"], fresh[0]["tokens"]] == [answer[0]["tokens"] for answer in truth]
    assert [hit[0]["cached"], fresh[0]["cached"]] == [WHOLE, WHOLE], "what is of the new weights is stored and found"
    again, never = engine(tiers, ask(0), ask(1), path=model, transfer=RECOMPUTING, **settings)
    assert (again[0]["tokens"], again[0]["cached"]) == (before[0]["tokens"], WHOLE), "with the weights of before"
    assert never[0]["cached"] == 0


def test_stale_blocks_of_vllms_own_cache_are_not_stored(
    engine: Engine, models: tuple[Path, Path], options: dict[str, Any]
) -> None:
    """The caller has reset nothing: vLLM itself answers from KV of before, and computes upon it."""
    model, other = models
    tiers, change = {"tiers": [CPU]}, ["change", "reload", str(other)]
    longer = ask(0)
    longer[1][0] = longer[1][0] + ask(1)[1][0]
    (truth,) = engine(None, longer, path=other, **options)
    for transfer, found in ((RECOMPUTING, True), ({}, False)):
        *_, stale, _, first, _, second, _, _, third, _, fourth = engine(
            tiers,
            *(ask(0), change, longer, ["forget"], longer, ["forget"], longer),
            *(["reset"], ["forget"], longer, ["forget"], longer),
            path=model,
            transfer=transfer,
            **options,
        )
        assert stale[0]["cached"] == WHOLE
        whole = 1400 // BLOCK * BLOCK
        assert [first[0]["cached"], second[0]["cached"]] == [0, whole if found else 0]
        assert [third[0]["cached"], fourth[0]["cached"]] == [0, whole], "in doubt until the connector is reset"
        assert [answer[0]["tokens"] for answer in (first, second, third, fourth)] == [truth[0]["tokens"]] * 4
