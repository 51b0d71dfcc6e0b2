"""Engines of a bench: each is a process that takes requests as lines of JSON and answers each with one line."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TextIO

ROOT: Final = Path(__file__).resolve().parent.parent
EXIT_S: Final = 60.0
STEADY_MALLOC: Final = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""With glibc's own settings a process of vLLM on the CPU gives its large tensors back to the kernel after each step and
faults them in again, or does not, by what happens to lie at the end of its heap: 700,000 page faults or none in 5 s,
and a sixth of its speed. No two engines can be compared unless none does, so all of them have these settings."""


class EngineProcess:
    """`python -m MODULE ARGUMENTS...`, idle between requests. Several of them start at the same time if the first
    answers are read after the last constructor."""

    def __init__(self, module: str, *arguments: str, log: Path | None = None) -> None:
        """`log`: the file for its standard error, by default the caller's."""
        paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        stderr = log.open("a") if log else None
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                env=os.environ | STEADY_MALLOC | {"PYTHONPATH": os.pathsep.join(paths)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        finally:
            if stderr:
                stderr.close()
        self._log = log

    def call(self, request: Any) -> Any:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `answer` says how it ended
            print(json.dumps(request), file=self._process.stdin, flush=True)
        return self.answer()

    def answer(self) -> Any:
        """The next answer. The first one says that the engine is ready. SystemExit if the process has ended."""
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            where = f", see {self._log}" if self._log else ""
            raise SystemExit(f"an engine ended with code {self._process.wait()}{where}")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def claim_stdout() -> TextIO:
    """In the child, before vLLM is imported: a stream for answers. All other output goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def answer_requests(answers: TextIO, ready: Any, handle: Callable[[Any], Any]) -> None:
    """In the child: `ready` as the first answer, then `handle(request)` for each request until there are no more."""
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(handle(json.loads(line))), file=answers, flush=True)
