"""A mover's standard error as the supervisor reads it: non-blocking, in lines, and with secrets redacted."""

from __future__ import annotations

import logging
import os
import re
from collections import deque
from typing import Final

from nixl_tiers.mover.redaction import Redactor

READ_BYTES: Final = 64 << 10  # in one call
LINE_BYTES: Final = 2000  # longer lines are cut
LAST_LINES: Final = 20  # errors, and what is not in our log format: kept to explain the mover's death

FORMAT: Final = "nixl_tiers mover[%s] %%(levelname)s: %%(message)s"
_OURS: Final = re.compile(r"nixl_tiers mover\[[^\]]*\] ([A-Z]+): (.*)")
_SECRET_FIELD: Final = re.compile(
    r"((?:secret|token|passw|credential|signature|authorization|access.?key)[\w-]*[\"']?\s*[=:]\s*).*", re.IGNORECASE
)


class Stderr:
    """The reading end of the pipe. `last`: the last LAST_LINES lines that are errors, without their tracebacks, or not
    in our log format (libraries)."""

    def __init__(self, fd: int, redact: Redactor) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.eof = False
        self.last: deque[str] = deque(maxlen=LAST_LINES)
        self._redact = redact
        self._partial = b""
        self._skipping = False  # the rest of a line that was too long

    def read(self) -> list[tuple[int, str]]:
        """(level, text) of the lines that have come; tracebacks and lines of libraries are DEBUG."""
        try:
            raw = os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            raw = b""
        self.eof = not raw
        *lines, self._partial = (self._partial + (raw or b"\n")).split(b"\n")
        if self._skipping and lines:
            del lines[0]
            self._skipping = False
        if len(self._partial) > LINE_BYTES:
            if not self._skipping:
                lines.append(self._partial)
            self._skipping, self._partial = True, b""
        return [self._parse(line) for line in lines if line.strip()]

    def _parse(self, line: bytes) -> tuple[int, str]:
        text = self._redact(line.decode(errors="replace"))
        if len(line) > LINE_BYTES:  # it may end with the beginning of a secret
            text = text[: max(0, LINE_BYTES - self._redact.longest)]
        ours = _OURS.fullmatch(text)
        level = logging.getLevelNamesMapping().get(ours[1]) if ours else None
        if ours and level is not None:
            if level >= logging.ERROR:
                self.last.append(ours[2].partition(" | ")[0])
            return level, ours[2]
        text = _SECRET_FIELD.sub(r"\1***", text)
        self.last.append(text)
        return logging.DEBUG, text
