"""The torture suite's first cell, at its smallest: one byte of every second row is changed, under our slabs and under
vLLM's own `fs` tier, in which the same change is seen to matter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.torture.engine import Answer, Plan
from tools.torture.places import flip, wait_until_stored
from tools.torture.rig import PROMPT_ROWS, PROMPT_TOKENS, Models, prompts
from tools.torture.sides import SIDES

COUNT = 3
LIMIT_S = 300.0


@pytest.mark.vllm
@pytest.mark.parametrize("name", ["slabs", "vllm-fs"])
def test_flipped_byte_reaches_no_answer_of_ours(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    plan, place = Plan(str(Models(tmp_path).path())), tmp_path / "place"
    place.mkdir()
    asked: list[list[Answer]] = []
    for again in (False, True):
        running = SIDES[name].start(plan, place, tmp_path, None, 1)
        try:
            asked.append(running.engine.ask(prompts(COUNT), LIMIT_S))
            if not again:
                running.engine.ask([[5], [6]], LIMIT_S, 1)
                rows = wait_until_stored(running.place, COUNT * PROMPT_ROWS)
        finally:
            running.stop()
        if not again:
            assert rows == flip(running.place, every=2) == COUNT * PROMPT_ROWS
    first, second = asked
    same = [one.tokens == other.tokens for one, other in zip(first, second, strict=True)]
    assert all(same) == (name == "slabs")
    assert sum(answer.cached for answer in first) == 0
    assert 0 < sum(answer.cached for answer in second) <= COUNT * PROMPT_TOKENS
