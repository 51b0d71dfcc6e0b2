"""All tests that need a GPU, those under compute-sanitizer last: it takes what time is left."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree as ET

from nixl_tiers.swap.driver import open_driver
from tools.gpu_age import LAST_RUN
from tools.gpu_day.here import Here
from tools.gpu_day.report import ROOT

SANITIZERS = "compute_sanitizer"


def run(here: Here) -> None:
    if here.rehearsed:
        _pytest(here, "tests", "")
        here.left_out("the tests themselves: all are skipped without a GPU")
        return
    open_driver()  # without one all tests would be skipped, which looks like a good run
    before = LAST_RUN.stat().st_mtime_ns
    _pytest(here, "tests", f"not {SANITIZERS}")
    if LAST_RUN.stat().st_mtime_ns != before:
        shutil.copy(LAST_RUN, here.out)
        here.tell("gpu_last_run", "written")
    _pytest(here, "sanitizers", SANITIZERS)


def _pytest(here: Here, name: str, chosen: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-k", chosen, "-p", "no:cacheprovider"]
        command += ["-p", "no:xdist", f"--junitxml={report}", "tests/swap/test_gpu.py", "tests/swap/test_ranks.py"]
        subprocess.run(command, cwd=ROOT, check=False)
        if not report.exists():
            raise RuntimeError(f"pytest wrote no report of {name}")
        about = next(ET.parse(report).iter("testsuite")).attrib
    here.tell(name, {key: int(about[key]) for key in ("tests", "failures", "errors", "skipped")})
    if int(about["failures"]) + int(about["errors"]):
        here.tell(f"{name}_failed", "log.txt says which")
