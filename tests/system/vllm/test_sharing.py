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
NO_BIND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
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


@pytest.fixture(scope="module")
def stored(
    engine: Engine, options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], list[Any]]:
    """The tiers in which an engine, gone by now, has stored one prompt before a reset and one after it; its answers."""
    files = files_tier(tmp_path_factory.mktemp("kv"), "64MiB")
    tiers = {"tiers": [CPU, files]}
    first, _, _, second, _, stats = engine(tiers, ask(0), ["flush"], ["reset"], ask(1), ["flush"], ["stats"], **options)
    assert stats["file"]["rows"] == CHUNKS, "rows stored after the reset are in another namespace"
    return tiers, [first, second]


def test_the_same_weights_hit_everything(
    engine: Engine, options: dict[str, Any], stored: tuple[dict[str, Any], list[Any]]
) -> None:
    tiers, answers = stored
    answer, stats = engine(tiers, ask(0), ["stats"], **options)
    assert answer[0]["cached"] == WHOLE
    assert answer[0]["tokens"] == answers[0][0]["tokens"]
    assert stats["file"]["hits"] == CHUNKS


def test_chunks_stored_after_a_reset_are_not_shared(
    engine: Engine, options: dict[str, Any], stored: tuple[dict[str, Any], list[Any]]
) -> None:
    tiers, _ = stored
    answer, stats = engine(tiers, ask(1), ["stats"], **options)
    assert answer[0]["cached"] == 0
    assert stats["file"]["hits"] == 0


def test_another_revision_of_the_weights_misses_everything(
    engine: Engine, options: dict[str, Any], stored: tuple[dict[str, Any], list[Any]], small_model: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    tiers, _ = stored
    revision = shutil.copytree(small_model, tmp_path / "revision")
    (file,) = revision.glob("*.safetensors")
    tensors = load_file(file)
    save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, file, {"format": "pt"})
    answer, stats = engine(tiers, ask(0), ["stats"], **{**options, "path": revision})
    assert answer[0]["cached"] == 0
    assert stats["file"]["hits"] == stats["file"]["corrupt"] == 0


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
    cold, hits, stats = both(engine, tiers, tmp_path, **{**options, "env": {**moto.env, **NO_BIND}})
    assert [answer["cached"] for answer in [*cold, *hits]] == [0, 0, WHOLE, WHOLE]
    assert [answer["tokens"] for answer in hits] == [answer["tokens"] for answer in cold]
    assert stats["file" if medium == "files" else "s3"]["hits"] == 2 * CHUNKS


def both(engine: Engine, tiers: dict[str, Any], place: Path, **settings: Any) -> tuple[list[Any], list[Any], Any]:
    """Two engines that run at the same time: what one computes, one prompt before the other starts and one after it,
    the other is asked for. The answers of each, and the statistics of the other."""
    stored, looked, more = (str(place / name) for name in ("stored", "looked", "more"))
    with ThreadPoolExecutor(1) as other:
        steps = [ask(0), ["flush"], ["touch", stored], ["await", looked], ask(1), ["flush"], ["touch", more]]
        first = other.submit(engine, tiers, *steps, **settings)
        try:
            until(lambda: Path(stored).exists() or first.done(), "the first engine", timeout_s=500)
            assert Path(stored).exists(), first.exception()
            one, _, _, two, stats = engine(
                tiers, ask(0), ["touch", looked], ["await", more], ask(1), ["stats"], **settings
            )
        finally:
            Path(looked).touch()
        cold = first.result()
    return [cold[0][0], cold[4][0]], [one[0], two[0]], stats
