"""bench.features_beside: what its table says of answers that are wrong, and of engines that end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import features_beside
from bench.features_beside import SIDES, Rig, again, settle, show, table


def test_wrong_tokens_are_never_shown_as_a_hit() -> None:
    cold = {"tokens": [1, 2], "cached": 0}
    assert again(cold, {"tokens": [1, 2], "cached": 640}) == "640 of 640"
    assert again(cold, {"tokens": [1, 3], "cached": 640}) == "640 cached, and **other tokens**"


def test_an_engine_that_ends_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(rig: Rig, scratch: Path) -> dict[str, str]:
        if not rig.ours:
            raise SystemExit("an engine ended with code 1")
        return {"files": "640 of 640"}

    monkeypatch.setitem(features_beside.SHOWN, "files", ends)
    server: Any = None
    found = {side: show("files", Rig(ours, tmp_path, tmp_path, server), tmp_path) for side, ours in SIDES.items()}
    assert table(found) == [["files", "the engine ends", "640 of 640"]]
    assert not list(tmp_path.iterdir())


def test_settling_waits_until_nothing_is_written_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    asked: list[Any] = []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr("bench.features_beside.time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    engine: Any = SimpleNamespace(call=asked.append)
    settle(engine, lambda: min(len(asked), 30))
    assert len(asked) > 30
    assert all(request[0] == "ask" for request in asked), "vLLM's own tiers store with the steps"
