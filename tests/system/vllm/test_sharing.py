"""Engines that were started separately: with the same weights each finds what the other stored, with any other never.

What needs no engine is in test_fingerprint.py; these tests run real ones.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.support import vllm_cpu
from tests.support.file_tier import files_tier
from tests.support.models import save_random
from tests.support.servers import MotoServer
from tests.support.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]

BLOCK = vllm_cpu.BLOCK_TOKENS
CPU = {"type": "cpu", "capacity": "64MiB"}
Engine = Callable[..., list[Any]]


def prompt(number: int) -> list[int]:
    return [(7 * i * i + 3 * i + number) % 500 + 1 for i in range(700)]


def ask(number: int = 0) -> list[Any]:
    return ["generate", [prompt(number)], 4]


WHOLE = 700 // BLOCK * BLOCK
CHUNKS = WHOLE // BLOCK


@pytest.fixture(scope="module")
def options(small_model: Path) -> dict[str, Any]:
    return {"path": small_model, "skip_tokenizer_init": True, "dtype": "float32", "max_num_seqs": 1}


def test_the_same_weights_hit_what_was_stored_before_a_reset_and_others_nothing(
    engine: Engine, options: dict[str, Any], small_model: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    tiers = {"tiers": [CPU, files_tier(tmp_path / "kv", "64MiB")]}
    first, _, _, _, _, stats = engine(tiers, ask(0), ["flush"], ["reset"], ask(1), ["flush"], ["stats"], **options)
    assert stats["file"]["rows"] == CHUNKS, "rows stored after the reset are in another namespace"
    again, after_reset, stats = engine(tiers, ask(0), ask(1), ["stats"], **options)
    assert [again[0]["cached"], after_reset[0]["cached"]] == [WHOLE, 0]
    assert again[0]["tokens"] == first[0]["tokens"]
    assert stats["file"]["hits"] == CHUNKS

    revision = shutil.copytree(small_model, tmp_path / "revision")
    (file,) = revision.glob("*.safetensors")
    save_file({name: tensor * 1.01 for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    answer, stats = engine(tiers, ask(0), ["stats"], **{**options, "path": revision})
    assert answer[0]["cached"] == 0
    assert stats["file"]["hits"] == stats["file"]["corrupt"] == 0, "not even looked at"


def test_long_rope_that_was_made_for_a_longer_context_is_not_shared(engine: Engine, tmp_path: Path) -> None:
    """vllm#56311: the layers of the first engine have the long factors, since it was asked for the longest context that
    fits; then it has the context of the second, whose layers have the short ones."""
    factors = {"rope_theta": 1e4, "short_factor": [1.0] * 32, "long_factor": [4.0] * 32}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 256, **factors}
    model = save_random("LlamaForCausalLM", tmp_path / "long", rope_scaling=rope, initializer_range=0.2)
    tiers = {"tiers": [CPU, files_tier(tmp_path / "kv", "64MiB")]}
    options: dict[str, Any] = {"path": model, "skip_tokenizer_init": True, "dtype": "float32"}
    options["num_gpu_blocks_override"] = 256 // BLOCK + 1  # of which vLLM keeps one
    ask = ["generate", [prompt(0)[:200]], 4]
    long, _ = engine(tiers, ask, ["flush"], max_model_len=-1, **options)
    short, _, stats = engine(tiers, ask, ["flush"], ["stats"], max_model_len=256, **options)
    assert (short[0]["cached"], stats["file"]["hits"]) == (0, 0)
    assert short[0]["tokens"] != long[0]["tokens"]
    shorter, _ = engine(tiers, ask, ["stats"], max_model_len=224, **options)
    assert shorter[0]["cached"] == 200 // BLOCK * BLOCK, "the same factors"
    assert shorter[0]["tokens"] == short[0]["tokens"]


@pytest.mark.parametrize("medium", ["files", "bucket"])
def test_engines_find_each_others_chunks_while_both_run(
    engine: Engine, options: dict[str, Any], tmp_path: Path, medium: str, moto: MotoServer
) -> None:
    """What was there at its start, and what has come since: nothing is listed there."""
    if medium == "files":
        shared: dict[str, Any] = files_tier(tmp_path / "kv", "64MiB")
    else:
        shared = {
            "type": "s3",
            "bucket": moto.make_bucket(f"sharing-{os.getpid()}"),
            "endpoint": moto.endpoint,
            "capacity": "1GiB",  # an engine uploads a 64th of it before the prefix is counted again
        }
    tiers = {"tiers": [CPU, shared], "probe_s": 10}
    settings: dict[str, Any] = {**options, "env": {**moto.env, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}}
    stored, looked, more = (str(tmp_path / name) for name in ("stored", "looked", "more"))
    with ThreadPoolExecutor(1) as other:
        steps = [ask(0), ["flush"], ["touch", stored], ["await", looked], ask(1), ["flush"], ["touch", more]]
        running = other.submit(engine, tiers, *steps, **settings)
        try:
            until(lambda: Path(stored).exists() or running.done(), "the first engine", timeout_s=500)
            assert Path(stored).exists(), running.exception()
            one, _, _, two, stats = engine(
                tiers, ask(0), ["touch", looked], ["await", more], ask(1), ["stats"], **settings
            )
        finally:
            Path(looked).touch()
        cold = running.result()
    assert [answer[0]["cached"] for answer in (cold[0], cold[4], one, two)] == [0, 0, WHOLE, WHOLE]
    assert [one[0]["tokens"], two[0]["tokens"]] == [cold[0][0]["tokens"], cold[4][0]["tokens"]]
    assert stats["file" if medium == "files" else "s3"]["hits"] == 2 * CHUNKS
