"""`make gpu-day`, which runs once on a machine that nobody has for long: rehearsed over the fake CUDA driver."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.no_gpu import NoCuFileError, libraries
from tools.gpu_day.__main__ import SECTIONS, TOTAL_S
from tools.gpu_day.report import ROOT

NAMES = ["gpu_tests", "registering", "storing", "file_tier", "pinning", "hit_beside", "cufile", "vmm"]


@pytest.mark.smoke
def test_rehearsal_ends_with_a_complete_report(tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    try:
        libraries()
    except NoCuFileError as error:
        pytest.skip(str(error))
    command = [sys.executable, "-m", "tools.gpu_day", "--rehearse", "--out", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    log = (tmp_path / "log.txt").read_text()
    report = json.loads((tmp_path / "report.json").read_text())
    sections = report["sections"]
    assert {name: entry["status"] for name, entry in sections.items()} == dict.fromkeys(NAMES, "rehearsed"), log
    assert ended.returncode == 0, ended.stderr
    assert report["complete"]
    assert all(entry["figures"] and entry["left_out"] for entry in sections.values())
    assert "WRONG" not in json.dumps(report)
    beside = sections["hit_beside"]["figures"]
    assert [found["as_wanted"] for found in beside.values() if isinstance(found, dict)] == [True] * 4


def test_all_limits_fit_into_ten_minutes() -> None:
    assert [section.name for section in SECTIONS] == NAMES
    assert sum(section.limit_s for section in SECTIONS) <= TOTAL_S < 600
