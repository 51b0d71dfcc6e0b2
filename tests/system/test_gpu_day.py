"""`make gpu-day`, which runs once on a machine that nobody has for long: rehearsed over the fake CUDA driver."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.support.no_gpu import NoCuFileError, libraries
from tools.gpu_day.__main__ import SECTIONS, TOTAL_S
from tools.gpu_day.report import ROOT, Report, Section, run

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


CASES = {
    "crashes": """
        def run(here):
            here.tell("before", 1)
            raise RuntimeError("as planned")
    """,
    "dies": """
        import os
        def run(here):
            here.tell("before", 2)
            os.abort()
    """,
    "hangs": """
        import subprocess, time
        def run(here):
            child = subprocess.Popen(["sleep", "1000"])
            here.tell("before", child.pid)
            time.sleep(1000)
    """,
    "lacks": """
        def run(here):
            import vllm
    """,
    "works": """
        def run(here):
            here.tell("speed", 1.5)
    """,
}


def test_a_section_that_hangs_or_crashes_ends_itself_alone_and_keeps_its_figures(tmp_path: Path) -> None:
    for name, text in CASES.items():
        (tmp_path / f"case_{name}.py").write_text(textwrap.dedent(text))
    limits = dict.fromkeys(CASES, 60.0) | {"hangs": 4.0}
    sections = [Section(f"case_{name}", name, limits[name]) for name in CASES]
    report = Report(tmp_path / "report.json", {}, sections)
    paths = os.pathsep.join((str(tmp_path), str(ROOT)))
    environment = {**os.environ, "PYTHONPATH": paths, "NIXL_TIERS_GPU_DAY_OUT": str(tmp_path)}
    begin_s = time.monotonic()
    run(sections, report, tmp_path / "log.txt", total_s=300, environment=environment)
    assert time.monotonic() - begin_s < 60
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["complete"]
    status = {name: found["sections"][f"case_{name}"]["status"] for name in CASES}
    assert status["crashes"] == "failed with code 1: RuntimeError: as planned"
    assert status["dies"] == "failed: Aborted"
    assert status["hangs"] == "killed at its limit of 4 s: log.txt says where it was"
    assert status["lacks"].startswith("skipped: ")
    assert status["works"] == "ok"
    figures = {name: found["sections"][f"case_{name}"]["figures"] for name in CASES}
    child = figures["hangs"]["before"]
    assert figures["crashes"] == {"before": 1}
    assert figures["works"] == {"speed": 1.5}
    assert not Path(f"/proc/{child}").exists() or "zombie" in Path(f"/proc/{child}/status").read_text()
    assert "case_hangs.py" in (tmp_path / "log.txt").read_text(), "where it was"
    assert set(report.broken) == {"case_crashes", "case_dies", "case_hangs"}
