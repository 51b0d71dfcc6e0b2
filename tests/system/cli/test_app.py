"""The command line as a whole: completion in shells, and help on every terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_shells_complete_commands() -> None:
    """What the script of `--install-completion` runs."""
    words = {"_NIXL_TIERS_COMPLETE": "complete_bash", "COMP_WORDS": "nixl-tiers re", "COMP_CWORD": "1"}
    command = [sys.executable, "-m", "nixl_tiers.cli"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | words, capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (["report"], "")


def test_generated_reference_is_alike_on_every_terminal() -> None:
    code = "import runpy; print(runpy.run_path('docs/generate.py')['command_line'](), end='')"
    terminals = [{"COLUMNS": "40", "FORCE_COLOR": "1", "TERM": "xterm-256color"}, {"NO_COLOR": "1", "TERM": "dumb"}]
    command = [sys.executable, "-c", code]
    texts = [
        subprocess.run(
            command, cwd=ROOT, env=os.environ | terminal, stdout=subprocess.PIPE, text=True, check=True
        ).stdout
        for terminal in terminals
    ]
    assert texts[0] == texts[1]
    assert "\x1b" not in texts[0]
    assert texts[0] in (ROOT / "docs/reference/command-line.md").read_text()
