"""A probing child: it ends with its parent, and what libraries print is not what it found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from nixl_tiers.cli.children import Children
from tests.mover.harness import has_exited
from tests.support.waiting import until

STEPS = """
import os, sys, time
from pathlib import Path
from nixl_tiers.cli.children import ProbeFailed, run_step, say

def wait(given):
    Path(given[0]).write_text(str(os.getpid()))
    time.sleep(300)  # longer than the test waits

def chatter(given):
    print('{"error": "printed by a library"}', flush=True)
    say(found=1)
    raise ProbeFailed("the call failed")

run_step({"wait": wait, "chatter": chatter}, sys.argv[1:])
"""


def test_child_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(STEPS)
    number = tmp_path / "pid"
    start = f"Children(Path({str(tmp_path)!r}), 'steps', 600).run('wait', {str(number)!r})"
    code = f"from pathlib import Path; from nixl_tiers.cli.children import Children; {start}"
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        try:
            until(lambda: number.exists() and number.read_text(), "the child to start")
        finally:
            parent.kill()
    until(lambda: has_exited(int(number.read_text())), "the child to end")


def test_what_a_library_prints_is_no_finding(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(STEPS)
    step = Children(tmp_path, "steps", 120).run("chatter")
    assert (step.error, step.get("found")) == ("the call failed", 1)
    assert '{"error": "printed by a library"}' in step.log
