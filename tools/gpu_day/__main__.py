"""What a GPU machine is asked in its first ten minutes: `make gpu-day`, and docs/internals/gpu.md says how to read it.

Needs Python with torch and numpy, this tree, and what `make gpu-day-wheels` has packed elsewhere; neither vLLM nor a
network. Writes report.json and log.txt to --out.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from bench.machine import gpu, machine
from tools.gpu_age import git
from tools.gpu_day.carried import complete_tree, unpacked
from tools.gpu_day.report import FAKE, OUT, ROOT, Report, Section, run

TOTAL_S: Final = 570.0
SECTIONS: Final = tuple(
    Section(f"tools.gpu_day.{module}", title, limit_s)
    for module, title, limit_s in (
        ("gpu_tests", "all tests that need a GPU", 115),
        ("registering", "launches beside registering, and registering during a capture", 40),
        ("storing", "what storing takes from decode steps", 130),
        ("file_tier", "does a file tier pay", 70),
        ("pinning", "page-locking by piece, page size and process", 75),
        ("hit_beside", "a hit beside a running step", 30),
        ("cufile", "cuFile in compatibility mode, with the GPU's memory", 55),
        ("vmm", "blocks in VMM memory", 25),
    )
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-day"))
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, over the fake driver of the tests")
    parser.add_argument("--only", nargs="+", metavar="SECTION", choices=[section.name for section in SECTIONS])
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    log = out / "log.txt"
    log.unlink(missing_ok=True)
    complete_tree()
    places = [str(ROOT), *unpacked(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "PYTHONUNBUFFERED": "1", OUT: str(out)}
    chosen = [section for section in SECTIONS if not arguments.only or section.name in arguments.only]
    report = Report(out / "report.json", about(rehearsed=arguments.rehearse), chosen)
    with tempfile.TemporaryDirectory(prefix="gpu-day-") as folder:
        environment["TMPDIR"] = folder  # what a killed section leaves goes too
        if arguments.rehearse:
            subprocess.run(
                [sys.executable, "-m", "tools.gpu_day.rehearsal", folder], env=environment, cwd=ROOT, check=True
            )
            before = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
            environment |= {FAKE: folder, "LD_LIBRARY_PATH": os.pathsep.join((folder, *before))}
        done = "rehearsed" if arguments.rehearse else "ok"
        run(chosen, report, log, total_s=TOTAL_S, environment=environment, done=done)
    print(f"the report: {out / 'report.json'}")
    return 1 if report.broken else 0


def about(*, rehearsed: bool) -> dict[str, Any]:
    return {
        "title": "gpu-day, rehearsed over a fake driver: no figure means anything" if rehearsed else "gpu-day",
        "commit": git("rev-parse", "HEAD") or os.environ.get("NIXL_TIERS_COMMIT", "unknown"),
        "gpu": gpu() or "none",
        "linux": platform.release(),
        **machine(),
    }


if __name__ == "__main__":
    sys.exit(main())
