"""What may hang or crash runs in a child with a deadline: `Children` starts it and reads what it found until it ended,
and how it ended; `run_step` and `say` are the child's side.

cuFile's driver has spun for ever while it opened, and has aborted the process; a disk or a server may never answer:
none of that may reach the doctor. Needs nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import nixl_tiers

_PDEATHSIG: Final = 1
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

    def __init__(self, scratch: Path, module: str, deadline_s: float) -> None:
        """`module`: calls `run_step` when it is run."""
        self._module = module
        self._scratch = scratch
        self._deadline_s = deadline_s
        self.environment: dict[str, str] = {}
        """Variables of all children."""

    def run(
        self, *arguments: str, environment: Mapping[str, str] | None = None, deadline_s: float | None = None
    ) -> Step:
        """Never raises for what the child does, and returns soon after the deadline whatever it does."""
        out, errors, log = (self._scratch / name for name in ("out", "errors", "cufile.log"))
        log.unlink(missing_ok=True)
        path = os.pathsep.join(filter(None, (str(_PACKAGES), os.environ.get("PYTHONPATH"))))
        given = self.environment | dict(environment or {})
        settings = {**os.environ, "CUFILE_LOGFILE_PATH": str(log), **given, "PYTHONPATH": path}
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


# --- in the child -----------------------------------------------------------------------------------------------------


class ProbeFailed(Exception):
    """A call failed: one sentence."""


_descriptors = [1]


def say(**finding: Any) -> None:
    """Write what was found, as one JSON object a line and at once, since the next call may never return. `at` names
    that call, `error` what failed."""
    os.write(_descriptors[0], json.dumps(finding).encode() + b"\n")


def run_step(
    steps: Mapping[str, Callable[[list[str]], None]], given: Sequence[str], failed: type[Exception] = ProbeFailed
) -> NoReturn:
    """Run the step that the arguments name, and end this process, which ends with its parent, too. `failed` and OSError
    are findings: one sentence."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    # Findings go to what is standard output now, and what libraries print there goes to stderr.
    _descriptors[0] = os.dup(1)
    os.dup2(2, 1)
    say(pid=os.getpid())
    status = 0
    try:
        steps[given[0]](list(given[1:]))
    except (failed, OSError) as error:
        say(error=str(error))
        status = 1
    # At once: destructors of these libraries have crashed, and threads of theirs may still run.
    os._exit(status)
