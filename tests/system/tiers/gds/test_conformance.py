"""The file tier with `backend: gds_mt`: NVIDIA's cuFile and NIXL's plugin, the real ones.

cuFile compatibility mode, no GPU: says nothing about GPU-direct speed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.mover.protocol import Down, Opened
from nixl_tiers.testing.conformance import StorageTierTests
from tests.mover.harness import MoverProcess, shard_dir
from tests.support.file_tier import file_tier
from tests.support.no_gpu import LABEL, NoGpu

CASES = Path(__file__).with_name("conformance_cases.py")
TIMEOUT_S = 500.0
METHODS = sum(name.startswith("test_") for name in vars(StorageTierTests))
GEOMETRY = Geometry(1, 120_000)
ROWS = 24


def run_cases(no_gpu: NoGpu, place: Path, report: Path, *arguments: str, backend: str) -> tuple[ET.Element, str]:
    """In a pytest of their own, since cuFile must find its libraries and configuration in the environment of its
    process. What that reports, and what it says."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment |= no_gpu.environment(place) | {"GDS_CASES_BACKEND": backend}
    command = [
        *(sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "-q"),
        *("--junitxml", str(report), "--basetemp", str(place / "pytest"), *arguments, str(CASES)),
    ]
    ended = subprocess.run(
        command, env=environment, cwd=CASES.parents[4], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert report.exists(), ended.stdout + ended.stderr
    return next(ET.parse(report).iter("testsuite")), f"{LABEL}\n{ended.stdout}\n{ended.stderr}"


def test_contract_is_kept_through_cufile(no_gpu: NoGpu, cufile_place: Path, tmp_path: Path) -> None:
    suite, output = run_cases(no_gpu, cufile_place, tmp_path / "report.xml", backend="gds_mt")
    assert [suite.attrib[name] for name in ("failures", "errors", "skipped")] == ["0"] * 3, output
    assert int(suite.attrib["tests"]) >= METHODS
    through = {node.attrib["name"]: int(node.attrib["value"]) for node in suite.iter("property")}
    assert min(through["cufile_read"], through["cufile_written"]) > 1 << 20


def test_fallback_to_posix_is_caught(no_gpu: NoGpu, cufile_place: Path, tmp_path: Path) -> None:
    """Without cuFile's own statistics these cases would pass."""
    only = ("-k", "one_row_at_a_time")
    suite, output = run_cases(no_gpu, cufile_place, tmp_path / "report.xml", *only, backend="posix")
    assert suite.attrib["failures"] != "0" or suite.attrib["errors"] != "0"
    assert "cuFile's own statistics have 0 bytes" in output


def test_slab_cut_short_takes_the_tier_down_and_the_rest_is_served(
    no_gpu: NoGpu, cufile_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short read is never a hit."""
    for name, value in no_gpu.environment(cufile_place).items():
        monkeypatch.setenv(name, value)
    with MoverProcess(file_tier(cufile_place, 24 << 20, backend="gds_mt"), GEOMETRY, ROWS) as mover:
        mover.open()
        mover.listed_rows()
        assert set(mover.store(range(ROWS))) == {Outcome.OK}
        assert "libcufile.so.0" in Path(f"/proc/{mover.process.pid}/maps").read_text()
        slab = shard_dir(cufile_place) / "slab-00000.kv"
        os.truncate(slab, ROWS // 2 * GEOMETRY.row_bytes + 4096)
        outcomes = mover.load(range(ROWS))
        assert set(outcomes[: ROWS // 2]) <= {Outcome.OK, Outcome.FAILED}  # FAILED: the tier has noticed it before
        assert Outcome.OK not in outcomes[ROWS // 2 :]
        down = mover.expect(lambda m: isinstance(m, Down))
        assert isinstance(down, Down)
        assert down.reason == f"{slab} has been cut short"
        mover.expect(lambda m: isinstance(m, Opened))
        mover.listed_rows()
        outcomes = mover.load(range(ROWS))
        assert set(outcomes[: ROWS // 2]) == {Outcome.OK}
        assert Outcome.OK not in outcomes[ROWS // 2 :]
        assert set(mover.store(range(ROWS))) == set(mover.load(range(ROWS))) == {Outcome.OK}
