"""Failures that users of KV caches reported, on vLLM's own tiers, LMCache and nixl_tiers: docs/guide/torture.md.

    python -m tools.torture [--only CELL ...] [--sides SIDE ...] [--repeats 3] [--resume]
        [--out bench/results/torture.json]

Each cell with its fault, as often as `--repeats` says, if all answers were right and there were hits without it, in its
control. Rows of a file that exists stay, unless they are measured again; each says its commit. Needs root for the cells
with file systems. What a side needs is installed below .cache/torture, which `make torture` does.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from bench.machine import machine
from tools.torture.cells import STEPS
from tools.torture.rig import NO_ANSWER_S, NOT_APPLICABLE, Models, Outcome, carry_out
from tools.torture.sides import CACHE, LMCACHE, LMCACHE_VERSION, SIDES, LMCache, Side

ROOT: Final = Path(__file__).resolve().parents[2]
CELLS: Final = tomllib.loads(Path(__file__).with_name("cells.toml").read_text())
# `hits`: tokens from the cache, in the control; in each run. `seconds`: of the slowest request, in the same way.
COLUMNS: Final = ["cell", "side", "class", "runs", "control", "hits", "seconds", "note", "date", "commit"]
ENVIRONMENT: Final = {
    # Of each engine: more threads spin, and on a busy machine all engines wait for them.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_TRACK_USAGE": "false",
}
SLOWER: Final = 10
"""A machine may slow down by so much between the control and a repeat."""


class Measuring:
    """Rows of the table. A control of a side is run once, and counts for all cells that have it."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self._options, self._work, self._models = options, work, Models(work)
        self._controls: dict[tuple[str, str], Outcome] = {}

    def row(self, cell: str, side: Side) -> list[Any]:
        key = (CELLS[cell].get("control", cell), side.name)
        if key not in self._controls:
            self._controls[key] = self._once(key[0], side, False, None)
        control = self._controls[key]
        about = [datetime.now(UTC).date().isoformat(), self._options.commit]
        if control.name == NOT_APPLICABLE:
            return [cell, side.name, control.note, "", "", "0", "", "", *about]
        if control.name != "right" or not control.cached:
            note = f"control: {control.name}, {control.cached} tokens cached; {control.note}"
            return [cell, side.name, "void", "", control.name, str(control.cached), "", note, *about]
        found: list[Outcome] = []
        while len(found) < self._options.repeats and not (found and found[0].name == NOT_APPLICABLE):
            found.append(self._once(cell, side, True, control))
        names = Counter(one.name.partition(" (")[0] for one in found).most_common()
        name = found[0].name if len(names) == 1 else "; ".join(f"{each}: {count}" for each, count in names)
        times = ", ".join(f"{one.seconds:.2f}" for one in found)
        notes = "; ".join(dict.fromkeys(f"{one.wrong} of {one.asked} wrong. {one.note}".strip() for one in found))
        runs = f"{names[0][1]} of {len(found)}" if name != NOT_APPLICABLE else ""
        seconds = f"{control.seconds:.2f}; {times}"
        hits = f"{control.cached}; {', '.join(str(one.cached) for one in found)}"
        return [cell, side.name, name, runs, control.name, hits, seconds, notes, *about]

    def _once(self, cell: str, side: Side, fault: bool, control: Outcome | None) -> Outcome:
        limit_s = NO_ANSWER_S + SLOWER * (control.seconds if control else NO_ANSWER_S)
        cached = control.cached if control else None
        base = self._work / side.name
        base.mkdir(exist_ok=True)
        alone = locked(CACHE, fcntl.LOCK_EX if CELLS[cell].get("alone") else fcntl.LOCK_SH)
        with alone, tempfile.TemporaryDirectory(dir=base, prefix=f"{cell}-", ignore_cleanup_errors=True) as folder:
            about: dict[str, Any] = {"folder": Path(folder), "base": base, "models": self._models, "limit_s": limit_s}
            return carry_out(STEPS[cell], fault, cached, side=side, **about)


def commit() -> str:
    """Of the checkout, `-dirty` if code is changed in it; what is measured and generated changes with each run."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results", ":!docs")
    return (git("rev-parse", "--short=8", "HEAD") or "unknown") + ("-dirty" if changed else "")


def beside(python: Path, sides: Sequence[str], options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """A process that measures these and writes to the same file. Others wait for hangs meanwhile, so that it gains
    more than the processors are shared."""
    command = [python, "-m", "tools.torture", "--here", "--only", *options.only, "--sides", *sides]
    command += ["--repeats", str(options.repeats), "--out", options.out, "--commit", options.commit]
    command += [*(["--work", options.work] if options.work else []), *(["--resume"] if options.resume else [])]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return subprocess.Popen(command, env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}, cwd=ROOT)


def say_missing(sides: Sequence[str], options: argparse.Namespace) -> None:
    about = ["", "", "0", "", "", datetime.now(UTC).date().isoformat(), options.commit]
    tried = [(cell, side) for cell in options.only for side in sides if side in CELLS[cell]["sides"]]
    why = f"not run: LMCache {LMCACHE_VERSION} is missing"
    if tried:
        write([[cell, side, why, *about] for cell, side in tried], options.out)


def here(sides: Sequence[str], options: argparse.Namespace) -> bool:
    """Whether the suite itself had no error. One ends no more than its cell."""
    done, whole = finished(options) if options.resume else set(), True
    with tempfile.TemporaryDirectory(prefix="torture-", dir=options.work, ignore_cleanup_errors=True) as work:
        measuring = Measuring(options, Path(work))
        for cell in options.only:
            for side in [side for side in CELLS[cell]["sides"] if side in sides and (cell, side) not in done]:
                begun = time.monotonic()
                try:
                    row = measuring.row(cell, SIDES[side])
                except Exception as error:  # noqa: BLE001 - of the suite, or of what it needs
                    traceback.print_exc()
                    about = ["", "", "0", "", repr(error)[:300], datetime.now(UTC).date().isoformat(), options.commit]
                    row, whole = [cell, side, "not run: error of the suite", *about], False
                write([row], options.out)
                took = f"{time.monotonic() - begun:.0f} s"
                print(f"{cell:14} {side:14} {row[2]} {row[3]} ({took})\n{'':30}{row[7]}"[:300], flush=True)
    return whole


def finished(options: argparse.Namespace) -> set[tuple[str, str]]:
    """What a run of this commit that was interrupted has measured, with as many repeats."""
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in known(options.out).values()]
    runs = ("", *(f"{most} of {options.repeats}" for most in range(options.repeats + 1)))
    return {
        (row["cell"], row["side"])
        for row in rows
        if row["commit"] == options.commit and not row["commit"].endswith("-dirty")
        if row["control"] == "right" and row["runs"] in runs and "void" not in row["class"]
    }


def known(out: Path) -> dict[tuple[str, str], list[Any]]:
    rows = json.loads(out.read_text())["tables"][0]["rows"] if out.exists() else []
    return {(row[0], row[1]): row for row in rows}


@contextlib.contextmanager
def locked(folder: Path, how: int) -> Iterator[None]:
    """Between the processes of the suite."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)


def write(rows: list[list[Any]], out: Path) -> None:
    with locked(out.parent, fcntl.LOCK_EX):
        _write(known(out) | {(row[0], row[1]): row for row in rows}, out)


def _write(all_rows: dict[tuple[str, str], list[Any]], out: Path) -> None:
    ordered = [all_rows[cell, side] for cell in CELLS for side in SIDES if (cell, side) in all_rows]
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
        "tables": [{"columns": COLUMNS, "rows": ordered}],
    }
    out.write_text(json.dumps(result, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CELLS), default=list(CELLS))
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/torture.json")
    parser.add_argument("--work", type=Path, help="a directory for models, rows and logs; default: of this machine's")
    parser.add_argument("--resume", action="store_true", help="keep what this commit has measured as often")
    parser.add_argument("--here", action="store_true", help="in this process; LMCache's sides need its environment")
    parser.add_argument("--commit", default=commit(), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out = options.out.resolve()
    os.environ.update(ENVIRONMENT)
    if options.here:
        return 0 if here(options.sides, options) else 1
    lmcache = [name for name in options.sides if isinstance(SIDES[name], LMCache)]
    s3 = [name for name in options.sides if SIDES[name].on == "s3" and name not in lmcache]
    others = []
    if lmcache and LMCACHE.exists():
        others.append(beside(LMCACHE, lmcache, options))
    elif lmcache:
        say_missing(lmcache, options)
    if s3:
        others.append(beside(Path(sys.executable), s3, options))
    whole = here([name for name in options.sides if name not in (*lmcache, *s3)], options)
    ended = [other.wait() for other in others]
    return 0 if whole and not any(ended) else 1


if __name__ == "__main__":
    sys.exit(main())
