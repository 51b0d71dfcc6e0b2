"""What is said of the last run on a GPU: which code it was, and how much of that has changed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.swap import conftest
from tools import gpu_age


def test_the_sentence_counts_what_has_changed_since(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    last = {"commit": "0" * 40, "machine": "NVIDIA H200, driver 580", "date": "2026-11-27"}
    monkeypatch.setattr(gpu_age, "LAST_RUN", tmp_path / "run.json")
    gpu_age.LAST_RUN.write_text(json.dumps(last))
    asked: list[tuple[str, ...]] = []
    said = " 3 files changed, 10 insertions(+), 2 deletions(-)"
    monkeypatch.setattr(gpu_age, "git", lambda *arguments: asked.append(arguments) or said.strip())
    assert gpu_age.sentence().endswith("2026-11-27 (00000000); since then 10 insertions(+), 2 deletions(-)")
    assert set(gpu_age.CODE) <= set(asked[0])
    said = ""
    assert "since then nothing that this clone knows of changed" in gpu_age.sentence()


def test_a_whole_run_on_a_gpu_is_noted_and_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_age, "LAST_RUN", tmp_path / "run.json")
    monkeypatch.setattr(gpu_age, "git", lambda *_: "c" * 40)
    monkeypatch.setattr(conftest, "_passed_on_gpu", set())
    monkeypatch.setattr(conftest, "last_run", lambda commit: {"commit": commit})
    for number in range(gpu_age.WHOLE):
        conftest.pytest_sessionfinish(0)
        assert not gpu_age.LAST_RUN.exists()
        passed = SimpleNamespace(when="call", passed=True, keywords={"gpu": 1}, nodeid=f"test[{number}]")
        conftest.pytest_runtest_logreport(passed)  # type: ignore[arg-type]
    conftest.pytest_sessionfinish(1)
    assert not gpu_age.LAST_RUN.exists(), "one has failed"
    conftest.pytest_sessionfinish(0)
    assert json.loads(gpu_age.LAST_RUN.read_text()) == {"commit": "c" * 40}
