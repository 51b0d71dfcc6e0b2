"""bench.ceiling with few small rows: each side that can run here has figures."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from nixl_tiers.tiers.slab.worker import available

ROOT = Path(__file__).parents[2]
OURS = ["native", "nixl"] if available() else ["nixl"]
SIDES = [*OURS, "files-16", *(["fio"] if shutil.which("fio") else [])]


def test_quick_run_has_figures_of_each_side(tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--quick", "--pages", "4k", "--paths", str(tmp_path), "--out", str(out), "--movers", "1", "2"]
    command = [sys.executable, "-m", "bench.ceiling", *options, "--sides", *SIDES]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=400)
    found = json.loads((out / "ceiling.json").read_text())["results"]
    measured = {(result["side"], result["movers"], result["direction"]) for result in found}
    assert measured == {(side, movers, what) for side in SIDES for movers in (1, 2) for what in ("store", "load")}
    for result in found:
        assert result["gb_s"][0] > 0
        assert result["cpu_s_a_gb"][0] >= 0
        assert (result["threads"] is not None) == (result["side"] in OURS)
        assert (result["fio"] is not None) == (result["side"] in OURS and "fio" in SIDES)
    assert str(tmp_path) in (out / "ceiling.md").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # what was stored is removed
