"""Streams on real engines with several ranks, of which one is late, one runs out of time and one is cancelled: they
find different gaps, and no answer may show it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from nixl_tiers.vllm import compat
from nixl_tiers.vllm.chunk_size import CHUNK_TOKENS
from tests.support import vllm_cpu
from tests.support.file_tier import files_tier

FEW = 2  # rows in each copy of the rank whose stream is cancelled
CHUNKS = 10
PROMPTS = [[(7 * i * i + 3 * i + 11 * n) % 500 + 1 for i in range(CHUNKS * CHUNK_TOKENS + 9)] for n in range(5)]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif((compat.version() or (0, 32)) < (0, 32), reason="loads are not streamed before")
@pytest.mark.skipif(len(vllm_cpu.cores()) < 2, reason="several ranks need two cores")
@pytest.mark.parametrize("ranks", [2, 4])
def test_tokens_are_right_whatever_becomes_of_a_stream_on_each_rank(
    run_script: Callable[..., Any], small_model: Path, tmp_path: Path, ranks: int
) -> None:
    (tmp_path / "kv").mkdir()
    cases = {
        2: {("", "late"): CHUNKS, ("", "overdue"): CHUNKS // 2, ("cancelled", ""): FEW, ("cancelled", "late"): FEW},
        4: {
            ("", "", "", ""): CHUNKS,
            ("", "", "", "late"): CHUNKS,
            ("", "overdue", "", ""): CHUNKS // 2,
            ("cancelled", "overdue", "", "late"): FEW,
        },
    }[ranks]
    tiers = [{"type": "cpu", "capacity": "64MiB"}, files_tier(tmp_path / "kv", "256MiB")]
    plan = {
        "model": str(small_model),
        "transfer": vllm_cpu.recomputing_transfer(tiers, prefill_tokens_per_s=500, wait_s=60, on_reset="keep"),
        "settings": {
            "tensor_parallel_size": ranks,
            "distributed_executor_backend": "mp",
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "block_size": 32,
            "max_model_len": 1024,
            "num_gpu_blocks_override": 256,
        },
        "prompts": PROMPTS,
        "answer": 6,
        "there": CHUNKS // 2 * CHUNK_TOKENS,
        "cases": list(cases),
        "few": {"0": FEW},
        "file": str(tmp_path / "released"),
    }
    cores = vllm_cpu.cores()
    binding = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
    env = {"VLLM_CPU_OMP_THREADS_BIND": binding, "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    result = run_script("stream_ranks.py", plan, env, 1500)
    assert len(set(map(tuple, result["cold"]))) == len(PROMPTS), "equal answers would show nothing"
    for cold, hows, seen in zip(result["cold"][1:], cases, result["cases"], strict=True):
        expected = {"streamed": True, "tokens": cold, "loaded": [cases[hows]], "pinned": 0, "blocks": 0}
        assert seen == expected, hows
