"""Loads that begin before their rows have come, on a real engine: whatever happens to them, the tokens are right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from nixl_tiers.vllm import compat
from nixl_tiers.vllm.chunk_size import CHUNK_TOKENS
from tests.support.file_tier import files_tier

Engine = Callable[..., list[Any]]

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif((compat.version() or (0, 32)) < (0, 32), reason="loads are not streamed before"),
]

CHUNKS = 10
PROMPTS = [[(7 * i * i + 3 * i + 11 * n) % 500 + 1 for i in range(CHUNKS * CHUNK_TOKENS + 9)] for n in range(7)]
ANSWER = 6
TRANSFER = {"kv_connector": "NixlTiersConnector", "kv_load_failure_policy": "recompute"}
PREFILL = 500  # tokens a second: a chunk takes longer to compute than to load, and a stopped mover is late after 1.3 s


def test_tokens_are_right_whatever_happens_to_a_stream(engine: Engine, small_model: Path, tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    config = {
        "tiers": [{"type": "cpu", "capacity": "64MiB"}, files_tier(tmp_path / "kv", "256MiB")],
        "prefill_tokens_per_s": PREFILL,
        "on_reset": "keep",
        "wait_s": 30,
    }
    learn = [["evict"], ["generate", [PROMPTS[0]], ANSWER]]  # what the tier gives when its mover is not stopped

    def streamed(number: int, what: str) -> list[list[Any]]:
        return [["evict"], ["stream", PROMPTS[number], ANSWER, what], *learn]

    half = PROMPTS[1][: CHUNKS // 2 * CHUNK_TOKENS + 1]
    steps: list[list[Any]] = [
        *(["generate", [prompt], ANSWER] for prompt in PROMPTS),
        ["flush"],
        *(learn * 2),
        *streamed(0, "whole"),
        ["evict"],
        ["ask", half, 1, {"options": {"load": "none"}}],  # the first half is in host memory, the other is not
        ["forget"],
        ["stream", PROMPTS[1], ANSWER, "kill"],
        *learn,
        *streamed(2, "kill"),
        *streamed(3, "abort"),
        ["generate", [PROMPTS[3]], ANSWER],
        ["evict"],
        ["stats"],
        ["generate", [PROMPTS[5], [*PROMPTS[5], 5]], ANSWER],  # they share all chunks: neither is kept back
        ["stats"],
        *streamed(6, "late"),
        *streamed(4, "reset"),
        ["generate", [PROMPTS[4]], ANSWER],
        ["stats"],
    ]
    answers = engine(
        config,
        *steps,
        path=small_model,
        transfer=TRANSFER,
        skip_tokenizer_init=True,
        dtype="float32",
        block_size=32,
        max_model_len=1024,
        num_gpu_blocks_override=256,
    )
    done = list(zip(steps, answers, strict=True))
    cold = {tuple(step[1][0]): answer[0]["tokens"] for step, answer in done[: len(PROMPTS)]}
    assert len(set(map(tuple, cold.values()))) == len(PROMPTS), "equal answers would show nothing"
    ends = {}
    for step, answer in done:
        if step[0] == "stream":
            expected = [] if step[3] == "abort" else cold[tuple(step[1])]
            assert (step[3], answer["streamed"], answer["tokens"]) == (step[3], True, expected)
            assert (answer["pinned"], answer["blocks"]) == (0, 0)
            ends[PROMPTS.index(step[1])] = step[3], answer["loaded"], answer["stored"]
        elif step[0] == "generate":
            assert answer[0]["tokens"] == cold[tuple(step[1][0])]
    # What vLLM does not take it computes, and offers again what it had taken for stored.
    late = ends.pop(6)
    assert late[:2] == ("late", [0])
    assert ends == {
        0: ("whole", [CHUNKS], 0),
        1: ("kill", [CHUNKS // 2], CHUNKS // 2),
        2: ("kill", [0], CHUNKS),
        3: ("abort", [0], 0),
        4: ("reset", [], CHUNKS),  # vLLM reports no job of before a reset; the request computes all of it after that
    }
    before, after, last = (answer["file"] for step, answer in done if step[0] == "stats")
    assert after["streams"] == before["streams"]
    assert [last[f"streams_cut_{reason}"] for reason in ("failed", "aborted", "reset")] == [2, 1, 1]
    assert sum(count for name, count in last.items() if name.startswith("streams_cut")) == 5
