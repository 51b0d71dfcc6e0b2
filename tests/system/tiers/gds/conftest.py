"""Runs cases in a pytest of their own, since cuFile must find its libraries and configuration in the environment of its
process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.support.no_gpu import LABEL, Counters, NoGpu

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
TIMEOUT_S = 500.0


class Cases:
    """What a pytest of their own has reported of some cases."""

    def __init__(self, report: Path, output: str) -> None:
        self.output = output
        suite = next(ET.parse(report).iter("testsuite"))
        self.total, failures, errors, self.skipped = (
            int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")
        )
        self.failed = failures + errors
        through = {node.attrib["name"]: int(node.attrib["value"]) for node in suite.iter("property")}
        self.through_cufile = Counters(*(through.get(f"cufile_{name}", 0) for name in Counters._fields))


Run = Callable[..., Cases]


@pytest.fixture
def run(no_gpu: NoGpu, cufile_place: Path, tmp_path: Path) -> Run:
    """run("conformance_cases.py::TestSlabsThroughCuFile", "-k", "one_row", backend="gds_mt")"""

    def run_cases(cases: str, *arguments: str, backend: str = "gds_mt") -> Cases:
        report = tmp_path / "report.xml"
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
        environment |= no_gpu.environment(cufile_place) | {"GDS_CASES_BACKEND": backend}
        command = [
            *(sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "-q"),
            *("--junitxml", str(report), "--basetemp", str(cufile_place / "pytest"), *arguments),
            str(HERE / cases),
        ]
        ended = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert report.exists(), ended.stdout + ended.stderr
        return Cases(report, f"{LABEL}\n{ended.stdout}\n{ended.stderr}")

    return run_cases
