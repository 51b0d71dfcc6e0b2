"""Sections in processes of their own, each with a limit, and a report that is written anew with every line of theirs:
what hangs or crashes loses nothing of what was measured before, and ends no other section."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]
LEAST_S: Final = 5.0  # a section is not begun with less
REAP_S: Final = 5.0  # a process that hangs inside the kernel's driver ends later than it is killed, or never
BROKEN: Final = ("failed", "killed")
FAKE: Final = "NIXL_TIERS_GPU_DAY_FAKE"  # the folder of the fake driver, in a rehearsal
OUT: Final = "NIXL_TIERS_GPU_DAY_OUT"


class Section(NamedTuple):
    module: str  # its `run(here)` is the section
    title: str
    limit_s: float

    @property
    def name(self) -> str:
        return self.module.rpartition(".")[2]


class Report:
    """The file that is sent home. `sections` of it: by name `title`, `status`, `seconds`, `figures`, `left_out`."""

    def __init__(self, path: Path, about: dict[str, Any], sections: Sequence[Section]) -> None:
        self._path = path
        self.sections: dict[str, dict[str, Any]] = {
            section.name: {"title": section.title, "status": "not begun", "figures": {}} for section in sections
        }
        self._content = {**about, "complete": False, "sections": self.sections}
        self.flush()

    def flush(self, *, complete: bool = False) -> None:
        self._content["complete"] = complete
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self._content, indent=1) + "\n")
        part.replace(self._path)

    def take(self, name: str, line: bytes) -> None:
        """A line of a section: what kind it is, its name if it is a figure, and what it says."""
        kind, what, value = json.loads(line)
        entry = self.sections[name]
        if kind == "figure":
            entry["figures"][what] = value
        elif kind == "skipped":
            entry["status"] = f"skipped: {value}"
        else:
            entry.setdefault("left_out", []).append(value)
        self.flush()

    @property
    def broken(self) -> list[str]:
        return [name for name, entry in self.sections.items() if entry["status"].startswith(BROKEN)]


def run(
    sections: Sequence[Section],
    report: Report,
    log: Path,
    *,
    total_s: float,
    environment: dict[str, str],
    done: str = "ok",
) -> None:
    """Run them in order. `log`: takes all that they print. `done`: the status of one that ended well."""
    end_s = time.monotonic() + total_s
    for section in sections:
        entry = report.sections[section.name]
        limit_s = min(section.limit_s, end_s - time.monotonic())
        if limit_s < min(LEAST_S, section.limit_s):
            entry["status"] = f"skipped: of {total_s:.0f} s for all sections too few were left"
        else:
            begin_s = time.monotonic()
            entry["status"] = "begun"
            report.flush()
            problem = _run(section, report, log, limit_s, environment)
            entry["seconds"] = round(time.monotonic() - begin_s, 1)
            if problem:
                entry["status"] = problem
            elif entry["status"] == "begun":
                entry["status"] = done
        report.flush()
        print(f"{section.name}: {entry['status']}", flush=True)
    report.flush(complete=True)


def _run(section: Section, report: Report, log: Path, limit_s: float, environment: dict[str, str]) -> str:
    """One section; "", or what became of it."""
    ours, theirs = os.pipe()
    command = [sys.executable, "-m", "tools.gpu_day.section", section.module, str(theirs), str(limit_s)]
    with log.open("ab") as out:
        out.write(f"== {section.name}\n".encode())
        out.flush()
        begin = out.tell()
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, pass_fds=[theirs], stdout=out, stderr=out, start_new_session=True
        )
    os.close(theirs)
    end_s = time.monotonic() + limit_s
    try:
        _read(ours, section.name, report, end_s)
        process.wait(max(0.0, end_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        return f"killed at its limit of {limit_s:.0f} s: log.txt says where it was"
    finally:
        os.close(ours)
        with contextlib.suppress(ProcessLookupError):  # all of the section's processes
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(REAP_S)
    if process.returncode < 0:
        return f"failed: {signal.strsignal(-process.returncode)}"
    if process.returncode:
        lines = log.read_bytes()[begin:].decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
        return f"failed with code {process.returncode}: {last}"
    return ""


def _read(pipe: int, name: str, report: Report, end_s: float) -> None:
    """Lines until the process has closed its end, or the time is over."""
    rest = b""
    while (left_s := end_s - time.monotonic()) > 0:
        if not select.select([pipe], [], [], left_s)[0]:
            return
        read = os.read(pipe, 1 << 16)
        if not read:
            return
        *lines, rest = (rest + read).split(b"\n")
        for line in lines:
            report.take(name, line)
