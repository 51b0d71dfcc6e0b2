"""How much of the code that only a GPU runs has changed since it ran on one: `python -m tools.gpu_age`, in `make lint`.

The last run is what the GPU tests write at their end (tests/swap/conftest.py).
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
LAST_RUN: Final = ROOT / "bench/results/gpu-last-run.json"
WHOLE: Final = 50  # of so many GPU tests that passed, the run is one of them all
CODE: Final = (
    *("nixl_tiers/swap", "csrc/swap*", "nixl_tiers/vllm/worker.py", "nixl_tiers/vllm/copier.py"),
    "nixl_tiers/vllm/copy_jobs.py",
)


def git(*arguments: str) -> str:
    """Its output; empty where it fails, as outside of a clone with all commits, or without git."""
    if shutil.which("git") is None:
        return ""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def sentence() -> str:
    last: dict[str, Any] = json.loads(LAST_RUN.read_text())
    changed = git("diff", "--shortstat", last["commit"], "--", *CODE)
    since = changed.split(", ", 1)[-1] if changed else "nothing that this clone knows of changed"
    return f"the GPU's code last ran on {last['machine']} on {last['date']} ({last['commit'][:8]}); since then {since}"


if __name__ == "__main__":
    print(sentence())
