"""What a property test finds is printed at the end of the log, and replayed from there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROPERTY = """
    @{replay}
    @settings(database=None)
    @given(st.integers(0, 1 << 40))
    def test_found(number):
        assert number < {bound}
"""
MACHINE = """
    @{replay}
    class Machine(RuleBasedStateMachine):
        total = 0

        @rule(number=st.integers(1, 100))
        def add(self, number):
            self.total += number
            assert self.total < {bound}

    TestFound = Machine.TestCase
    TestFound.settings = settings(database=None)
"""
IMPORTS = """
from hypothesis import given, reproduce_failure, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
"""


def run(code: str, place: Path, replay: str) -> str:
    file = place / "test_it.py"
    lines = [line.removeprefix("    ") for line in code.splitlines() if replay or "{replay}" not in line]
    file.write_text(IMPORTS + "\n".join(lines).replace("{replay}", replay).replace("{bound}", "200"))
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.replay", "-p", "no:cacheprovider", file.name]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CI": "true"}
    done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, timeout=500, check=False)
    assert "1 failed" in done.stdout, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("code", [PROPERTY, MACHINE], ids=["property", "machine"])
def test_last_lines_of_a_failed_run_replay_it(code: str, tmp_path: Path) -> None:
    first = run(code, tmp_path, "")
    _, _, end = first.partition("replay a failure")
    (blob,) = set(re.findall(r"@(reproduce_failure\('[\d.]+', b'[^']*'\))", end))
    again = run(code, tmp_path, blob)
    steps = re.compile(r"^(?:E)? *(state\.\w+\(.*\)|number=\d+,)$", re.MULTILINE)
    found = [set(steps.findall(text)) for text in (first, again)]
    assert found[0]
    assert found[0] == found[1]
