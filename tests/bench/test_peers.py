"""bench.peers with few small rows: each side either has figures or says why it cannot run here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SIDES = ["slabs-auto", "files-on", "threads", "lmcache", "fio", "s3", "boto3", "lmcache-s3"]
ALWAYS = {"slabs-auto", "files-on", "threads", "s3", "boto3"}


@pytest.mark.slow
def test_quick_run_has_figures_of_each_side_or_the_reason_why_not(tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--quick", "--pages", "4k", "--server", "moto", "--path", str(tmp_path), "--out", str(out)]
    command = [sys.executable, "-m", "bench.peers", *options, "--sides", *SIDES]
    text = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=400).stdout
    found = json.loads((out / "peers.json").read_text())
    measured = {result["side"] for result in found["results"]}
    assert measured >= ALWAYS
    assert measured | set(found["unavailable"]) == set(SIDES)
    assert not measured & set(found["unavailable"])
    for result in found["results"]:
        assert result["gb_s"][0] > 0
        assert result["cpu_s_a_gb"] >= 0
        assert (result["server_cpu_s_a_gb"] > 0) == (result["medium"] == "S3")
        assert len(result["turns"]) == 1
        assert result["huge_share"] == 0
    for name, peer in (("slabs-auto", "threads"), ("s3", "boto3")):
        ours = [result for result in found["results"] if result["side"] == name]
        assert {result["direction"] for result in ours} == {"store", "load"}
        assert all(result["against"][peer] > 0 for result in ours)
    assert all(f"{name}: unavailable: {reason}" in text for name, reason in found["unavailable"].items())
    assert any(note.startswith("slabs-auto, 4k: ") for note in found["notes"])
    assert (out / "peers.png").stat().st_size > 1000
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # what was stored is removed
