"""bench.longdoc with few short documents: engines with our tiers and with vLLM's own, in both ways of running one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.longdoc_engine import QUICK

ROOT = Path(__file__).parents[2]


@pytest.mark.slow  # a minute, and test_restart runs the same engines by the same tools
@pytest.mark.vllm
def test_quick_run_of_long_documents_writes_figures_and_a_plot(tmp_path: Path) -> None:
    engines = {"in-process": ["file"], "own-process": ["vllm-fs"]}
    for way, kinds in engines.items():
        out = tmp_path / way
        command = [sys.executable, "-m", "bench.longdoc", "--quick", "--engines", *kinds, "--ways", way]
        subprocess.run([*command, "--out", str(out)], cwd=ROOT, check=True, stdout=subprocess.PIPE, timeout=500)
        found = json.loads((out / "longdoc.json").read_text())["passes"][way]
        assert list(found) == kinds
        for first, again in found.values():
            assert first["cached_tokens"] == 0
            assert 0 < again["cached_tokens"] <= QUICK.cacheable_tokens
        assert (out / "longdoc.png").stat().st_size > 1000
        assert not list(out.glob("scratch-*"))
