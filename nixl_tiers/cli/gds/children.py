"""Runs a step of a probe in a child with a deadline: what it found until it ended, and how it ended.

cuFile's driver has spun for ever while it opened, and has aborted the process: neither may reach the doctor.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import nixl_tiers

DEADLINE_S: Final = 10.0
_REAP_S: Final = 2.0
_LOG_LINES: Final = 5
_PACKAGES: Final = Path(nixl_tiers.__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Step:
    """What a child has found, in order, and why it did not end well, in one sentence, or ""."""

    findings: tuple[dict[str, Any], ...]
    error: str
    seconds: float
    log: tuple[str, ...] = ()
    """Last lines that libcufile and others have logged, if the step failed."""

    def get(self, name: str) -> Any:
        """The last finding of this name, or None."""
        return next((finding[name] for finding in reversed(self.findings) if name in finding), None)

    def all(self, name: str) -> list[Any]:
        return [finding[name] for finding in self.findings if name in finding]


class Children:
    """Starts children one at a time, in a scratch directory that takes their logs."""

    def __init__(self, scratch: Path, deadline_s: float = DEADLINE_S, module: str = "nixl_tiers.cli.gds.probe") -> None:
        """`module`: what runs a step, and writes what it finds by `findings.say`."""
        self._module = module
        self._scratch = scratch
        self._deadline_s = deadline_s

    def run(
        self, *arguments: str, environment: Mapping[str, str] | None = None, deadline_s: float | None = None
    ) -> Step:
        """Never raises for what the child does, and returns soon after the deadline whatever it does."""
        out, errors, log = (self._scratch / name for name in ("out", "errors", "cufile.log"))
        log.unlink(missing_ok=True)
        path = os.pathsep.join(filter(None, (str(_PACKAGES), os.environ.get("PYTHONPATH"))))
        settings = {**os.environ, "CUFILE_LOGFILE_PATH": str(log), **(environment or {}), "PYTHONPATH": path}
        limit_s = self._deadline_s if deadline_s is None else deadline_s
        began = time.monotonic()
        with out.open("wb") as stdout, errors.open("wb") as stderr:
            child = subprocess.Popen(
                [sys.executable, "-m", self._module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                cwd=self._scratch,
                env=settings,
                start_new_session=True,
            )
            try:
                child.wait(limit_s)
                ended = ""
            except subprocess.TimeoutExpired:
                ended = f"did not return within {limit_s:g} s"
            finally:
                killable = _kill(child)
        findings = _parse(out)
        seconds = time.monotonic() - began
        if not killable:
            ended += ", and cannot be killed: it waits in the kernel"
        error = _why(findings, ended, child.returncode)
        return Step(findings, error, seconds, _last_lines(log, errors) if error else ())


def _kill(child: subprocess.Popen[bytes]) -> bool:
    """End the child with all that it has started. False if it does not end, because it waits in the kernel."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    try:
        child.wait(_REAP_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _why(findings: tuple[dict[str, Any], ...], ended: str, status: int | None) -> str:
    named = next((finding["error"] for finding in reversed(findings) if "error" in finding), None)
    if named is not None:
        return str(named)
    at = next((finding["at"] for finding in reversed(findings) if "at" in finding), "the probe")
    if ended:
        return f"{at} {ended}"
    if status is not None and status < 0:
        return f"the process died in {at}: {signal.Signals(-status).name}"
    return f"the process ended in {at} with status {status}" if status else ""


def _parse(out: Path) -> tuple[dict[str, Any], ...]:
    """A killed child's last line may be incomplete."""
    found = []
    for line in out.read_bytes().splitlines():
        with contextlib.suppress(ValueError):
            finding = json.loads(line)
            if isinstance(finding, dict):
                found.append(finding)
    return tuple(found)


def _last_lines(*files: Path) -> tuple[str, ...]:
    lines: list[str] = []
    for file in files:
        with contextlib.suppress(OSError):
            lines += [line for line in file.read_text(errors="replace").splitlines() if line.strip()][-_LOG_LINES:]
    return tuple(lines)
