"""bench.restart with a short prompt: new processes hit what others have stored, by our file tier and by vLLM's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.restart import LOCAL_HITS, QUICK

ROOT = Path(__file__).parents[2]


@pytest.mark.vllm
@pytest.mark.slow
def test_quick_run_of_restarts_writes_figures(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.restart", "--quick", "--engines", "file", "vllm-fs", "--out", str(tmp_path)]
    shown = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=500).stdout
    assert "file / vllm-fs" in shown
    (found,) = json.loads((tmp_path / "restart.json").read_text())["rounds"]
    assert list(found) == ["file", "vllm-fs"]
    for one in found.values():
        assert len(one["local"]) == LOCAL_HITS
        assert 0 < one["stored"]["cached_tokens"] <= QUICK.tokens
    assert not list(tmp_path.glob("scratch-*"))
