"""A feature of vLLM is claimed only with tests that exist and can pass: docs/features.toml."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import matrix

TESTS = sorted({test for feature in matrix.features().values() for test in feature.get("tests", ())})


@pytest.fixture(scope="module")
def runs_an_engine() -> Callable[[str], bool]:
    function: Callable[[str], bool] = runpy.run_path(str(matrix.ROOT / "docs/generate.py"))["runs_an_engine"]
    return function


@pytest.mark.parametrize("test", TESTS)
def test_what_shows_a_feature_exists_and_is_not_skipped_everywhere(
    test: str, runs_an_engine: Callable[[str], bool]
) -> None:
    """Else run `make matrix`: what it has not run yet shows in the table as a feature without a version."""
    runs_an_engine(test)
    rows = json.loads(matrix.RESULT.read_text())["tables"][1]["rows"]
    outcomes = {outcome for row in rows if row[0] == test for outcome in row[1:]} - {"not run"}
    assert {matrix.ending(outcome) for outcome in outcomes} <= {"passed", "skipped"}
    assert "skipped: " not in outcomes
    assert "passed" in outcomes or not outcomes


REPORT = """<testsuites><testsuite><testcase classname="tests.vllm.test_a" name="test_b[1]"/>
<testcase classname="tests.vllm.test_a" name="test_b[2]"><failure/></testcase>
<testcase classname="tests.vllm.test_a" name="test_c">
<skipped message="no such thing"/></testcase></testsuite></testsuites>"""


def test_a_test_counts_as_the_worst_of_its_cases_and_versions_are_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix, "RESULT", tmp_path / "matrix.json")
    (tmp_path / "report.xml").write_text(REPORT)
    cases = matrix.ended(tmp_path / "report.xml")
    named = ["test_a.py::test_b", "test_a.py::test_c", "test_a.py::test_d"]
    for version in ("0.10.0", "0.9.0"):
        matrix.record(version, version, cases, named)
    versions, tests = json.loads(matrix.RESULT.read_text())["tables"]
    first: dict[str, Any] = dict(zip(versions["columns"], versions["rows"][0], strict=True))
    assert [first[name] for name in ("vLLM", "passed", "skipped", "failed")] == ["0.9.0", "1", "1", "1"]
    assert tests["columns"] == ["test", "0.9.0", "0.10.0"]
    assert [row[1:] for row in tests["rows"]] == [["failed"] * 2, ["skipped: no such thing"] * 2, ["not run"] * 2]
