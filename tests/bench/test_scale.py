"""bench.scale with few rows: every part runs in a process of its own and reports its figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_run_with_few_rows_writes_figures_and_a_plot(tmp_path: Path) -> None:
    parts = ["stored", "journal", "row files"]
    command = [sys.executable, "-m", "bench.scale", "--rows", "2000", "--out", str(tmp_path), "--parts", *parts]
    table = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=300).stdout
    found = json.loads((tmp_path / "scale.json").read_text())["rows"]
    assert list(found) == ["2000"]
    for figures in found.values():
        assert set(parts) <= set(figures)
        assert all(figures[part]["bytes_a_row"] > 0 for part in parts)
        assert figures["stored, reset"]["hold_ms"] > 0
    assert "| 2000 rows | bytes a row |" in table
    assert (tmp_path / "scale.png").stat().st_size > 1000
