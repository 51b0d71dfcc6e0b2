"""Streams of a connector that is one of several of vLLM's MultiConnector, on a real engine."""

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

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif((compat.version() or (0, 32)) < (0, 32), reason="loads are not streamed before"),
]

CHUNKS = 10
PROMPTS = [[(7 * i * i + 3 * i + 11 * n) % 500 + 1 for i in range(CHUNKS * CHUNK_TOKENS + 9)] for n in range(4)]
ANSWER = 6
Engine = Callable[..., list[Any]]


@pytest.mark.parametrize("first", [True, False])
def test_tokens_are_right_beside_another_connector(
    engine: Engine, small_model: Path, tmp_path: Path, first: bool
) -> None:
    """The other one has whole prompts in files. If it is asked behind ours, it loads what our stream brought nothing
    of; if before, vLLM takes its hit although ours was told early."""
    (tmp_path / "kv").mkdir()
    tiers = [{"type": "cpu", "capacity": "64MiB"}, files_tier(tmp_path / "kv", "256MiB")]
    ours = vllm_cpu.recomputing_transfer(tiers, prefill_tokens_per_s=500, on_reset="keep", wait_s=30)
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [ours, other] if first else [other, ours]},
    }
    learn = [["evict"], ["generate", [PROMPTS[0]], ANSWER]]
    half = PROMPTS[1][: CHUNKS // 2 * CHUNK_TOKENS + 1]
    streams: list[list[Any]] = [
        ["evict"],
        ["ask", half, 1, {"options": {"load": "none"}}],  # the first half is in host memory, the other is not
        ["forget"],
        ["stream", PROMPTS[1], ANSWER, "kill"],
        *learn,
        ["evict"],
        ["stream", PROMPTS[2], ANSWER, "kill"],
        *learn,
        ["evict"],
        ["stream", PROMPTS[3], ANSWER, "whole"],
    ]
    steps: list[list[Any]] = [
        *(["generate", [prompt], ANSWER] for prompt in PROMPTS),
        ["flush"],
        *(learn * 2),
        *(streams if first else [["evict"], ["stats"], ["generate", [PROMPTS[1]], ANSWER], ["stats"]]),
    ]
    answers = engine(
        {"tiers": []},
        *steps,
        path=small_model,
        transfer=transfer,
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=32,
        max_model_len=1024,
        num_gpu_blocks_override=256,
    )
    done = list(zip(steps, answers, strict=True))
    cold = {tuple(step[1][0]): answer[0]["tokens"] for step, answer in done[: len(PROMPTS)]}
    assert len(set(map(tuple, cold.values()))) == len(PROMPTS), "equal answers would show nothing"
    ends = []
    for step, answer in done:
        if step[0] == "generate":
            assert answer[0]["tokens"] == cold[tuple(step[1][0])]
        elif step[0] == "stream":
            assert answer["tokens"] == cold[tuple(step[1])]
            assert (answer["streamed"], answer["pinned"], answer["blocks"]) == (True, 0, 0)
            ends.append(answer["loaded"])
    assert ends == ([[CHUNKS // 2], [0], [CHUNKS]] if first else [])
    if not first:
        before, _, after = answers[-3:]
        assert after["file"]["streams"] == 0
        assert after["cpu"]["promoted"] == before["cpu"]["promoted"], "it was not told early, and waited"
