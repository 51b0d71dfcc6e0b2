"""Loads that begin before their rows have come, on a real engine: whatever happens to them, the tokens are right."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from nixl_tiers.vllm import compat
from nixl_tiers.vllm.chunk_size import CHUNK_TOKENS
from tests.support.file_tier import files_tier
from tests.support.leaks import MARK, processes_with_mark, shared_memory_names
from tests.support.waiting import until
from tests.system.vllm.one_stream import CORRUPT, TORN
from tests.system.vllm.stream_mutants import IN_C, CarelessConfig, mutated_library

Engine = Callable[..., list[Any]]

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif((compat.version() or (0, 32)) < (0, 32), reason="loads are not streamed before"),
]

TIMEOUT_S = 300.0
CHUNKS = 10
HALF = CHUNKS // 2
PROMPTS = [[(7 * i * i + 3 * i + 11 * n) % 500 + 1 for i in range(CHUNKS * CHUNK_TOKENS + 9)] for n in range(10)]
ANSWER = 6
TRANSFER = {"kv_connector": "NixlTiersConnector", "kv_load_failure_policy": "recompute"}
# Tokens a second: a chunk takes longer to compute than a busy machine's mover to load, and a stopped one is late after
# 6.5 s.
PREFILL = 100
LEARN: list[list[Any]] = [["evict"], ["generate", [PROMPTS[0]], ANSWER]]  # what the tier gives with its mover running
EACH: list[list[Any]] = [["generate", [prompt], ANSWER] for prompt in PROMPTS]
SETTINGS: dict[str, Any] = {
    "transfer": TRANSFER,
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "block_size": 32,
    "max_model_len": 1024,
    "num_gpu_blocks_override": 256,
}
FAULTS = {
    "no deadline": "hang",
    "limit not looked at behind a copy": "torn",
    "verdict not looked at": "corrupt",
    "gap one too far": "corrupt",
    "no invalid blocks": "corrupt",
    "stores not set back": "corrupt",
    "words of before stay": "late",
}
"""Of stream_mutants.py, and what happens to the request that shows it."""


def streamed(number: int, what: str, *fault: list[str], half: bool = False) -> list[list[Any]]:
    """`half`: the first half is in host memory."""
    first: list[list[Any]] = [
        ["ask", PROMPTS[number][: HALF * CHUNK_TOKENS + 1], 1, {"options": {"load": "none"}}],
        ["forget"],
    ]
    return [["evict"], *(first if half else []), ["stream", PROMPTS[number], ANSWER, what, *fault], *LEARN]


def config(tier: dict[str, Any]) -> dict[str, Any]:
    return {
        "tiers": [{"type": "cpu", "capacity": "64MiB"}, tier],
        "prefill_tokens_per_s": PREFILL,
        "on_reset": "keep",
        "wait_s": 30,
    }


def asked(
    engine: Engine, model: Path, tier: dict[str, Any], steps: list[list[Any]], **options: Any
) -> list[tuple[list[Any], Any]]:
    """Each step with its answer, behind those that fill the tier; and right tokens of all that generate any."""
    steps = [*EACH, ["flush"], *(LEARN * 2), *steps]
    answers = engine(config(tier), *steps, path=model, **SETTINGS, **options)
    done = list(zip(steps, answers, strict=True))
    cold = {tuple(step[1][0]): answer[0]["tokens"] for step, answer in done[: len(PROMPTS)]}
    assert len(set(map(tuple, cold.values()))) == len(PROMPTS), "equal answers would show nothing"
    for step, answer in done[len(PROMPTS) :]:
        if step[0] == "generate":
            assert answer[0]["tokens"] == cold[tuple(step[1][0])]
        elif step[0] == "stream":
            answer["right"] = answer["tokens"] == ([] if step[3] == "abort" else cold[tuple(step[1])])
    return done[len(PROMPTS) :]


def test_tokens_are_right_whatever_happens_to_a_stream(engine: Engine, small_model: Path, tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    steps: list[list[Any]] = [
        *streamed(0, "whole"),
        *streamed(1, "kill", half=True),
        *streamed(2, "kill"),
        *streamed(7, "corrupt"),
        *streamed(8, "torn", half=True),
        *streamed(9, "hang"),
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
    done = asked(engine, small_model, files_tier(tmp_path / "kv", "256MiB"), steps)
    ends = {}
    for step, answer in done:
        if step[0] == "stream":
            assert (step[3], answer["streamed"], answer["right"]) == (step[3], True, True)
            assert (step[3], answer["pinned"], answer["blocks"], answer["held_up"]) == (step[3], 0, 0, False)
            ends[PROMPTS.index(step[1])] = step[3], answer["loaded"], answer["stored"]
    # What vLLM does not take it computes, and offers again what it had taken for stored.
    # How much, of these two depends on whether what is to come has been sent for by then.
    assert [ends.pop(number)[:2] for number in (6, 8)] == [("late", [0]), ("torn", [TORN])]
    assert ends == {
        0: ("whole", [CHUNKS], 0),
        1: ("kill", [HALF], HALF),
        2: ("kill", [0], CHUNKS),
        3: ("abort", [0], 0),
        4: ("reset", [], CHUNKS),  # vLLM reports no job of before a reset; the request computes all of it after that
        7: ("corrupt", [CORRUPT], 1),
        9: ("hang", [0], 0),  # what is to come does so in the end
    }
    before, after, last = (answer["file"] for step, answer in done if step[0] == "stats")
    assert after["streams"] == before["streams"]
    assert [last[f"streams_cut_{reason}"] for reason in ("failed", "aborted", "reset")] == [3, 2, 1]
    assert sum(count for name, count in last.items() if name.startswith("streams_cut")) == 7


@pytest.mark.slow
def test_an_engine_that_dies_with_a_stream_open_leaves_its_rows_and_nothing_else(
    engine: Engine, small_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "kv").mkdir()
    mark, names = uuid.uuid4().hex, shared_memory_names()
    tier = files_tier(tmp_path / "kv", "256MiB")
    with pytest.raises(AssertionError, match=f"^{-signal.SIGKILL}:"):
        asked(engine, small_model, tier, streamed(0, "die"), env={MARK: mark})
    # The mover whose rows the stream waits for is stopped: Linux wakes what nobody else could any more.
    until(lambda: "nixl_tiers/mover" not in str(processes_with_mark(mark)), "the movers to end", timeout_s=TIMEOUT_S)
    assert shared_memory_names() <= names

    cold = engine(None, *EACH, path=small_model, **SETTINGS)
    *again, stats = engine(config(tier), ["evict"], *EACH, ["stats"], path=small_model, **SETTINGS)
    assert [answer[0]["tokens"] for answer in again[1:]] == [answer[0]["tokens"] for answer in cold]
    assert stats["file"]["hits"] == CHUNKS * len(PROMPTS)


@pytest.mark.slow
def test_planted_faults_show(engine: Engine, small_model: Path, tmp_path: Path) -> None:
    """Of each, the request ends in another way than above."""
    (tmp_path / "kv").mkdir()
    careless = str(tmp_path / "careless")
    tier = files_tier(tmp_path / "kv", "256MiB", type=f"{CarelessConfig.__module__}:CarelessConfig", careless=careless)
    steps: list[list[Any]] = []
    for number, (fault, what) in enumerate(FAULTS.items(), 1):
        argument = mutated_library(fault, tmp_path) if fault in IN_C else careless
        steps += streamed(number, what, [fault, argument], half=what == "torn")
    right = {"hang": [0], "torn": [TORN], "corrupt": [CORRUPT], "late": [0]}
    unseen = [
        step[4][0]
        for step, answer in asked(engine, small_model, tier, steps)
        if step[0] == "stream"
        and (answer["right"], answer["loaded"], answer["held_up"]) == (True, right[step[3]], False)
        and (step[3] != "corrupt" or answer["stored"] == 1)
    ]
    assert not unseen
