"""A mover's standard error as the supervisor reads it: non-blocking, in lines, and with secrets redacted."""

from __future__ import annotations

import logging
import os
import re
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

READ_BYTES: Final = 64 << 10  # in one call
LINE_BYTES: Final = 2000  # longer lines are cut
LAST_LINES: Final = 20  # errors, and what is not in our log format: kept to explain the mover's death

FORMAT: Final = "nixl_tiers mover[%s] %%(levelname)s: %%(message)s"
_OURS: Final = re.compile(r"nixl_tiers mover\[[^\]]*\] ([A-Z]+): (.*)")
_SECRET_NAME: Final = re.compile(r"SECRET|TOKEN|PASSW|CREDENTIAL|ACCESS_KEY|API_?KEY", re.IGNORECASE)
_PLACE_NAME: Final = re.compile(r"_(FILE|PATH|DIR|URI|URL)$", re.IGNORECASE)
_SECRET_FIELD: Final = re.compile(
    r"((?:secret|token|passw|credential|signature|authorization|access.?key)[\w-]*[\"']?\s*[=:]\s*).*", re.IGNORECASE
)
_SHORT: Final = 8  # shorter values are ordinary words


def secrets_of(environment: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """Values to be redacted: of variables whose names look secret, and of these `names`."""
    named = set(names)
    secrets = [
        value
        for name, value in environment.items()
        if name in named or (_SECRET_NAME.search(name) and not _PLACE_NAME.search(name))
    ]
    return sorted((value for value in secrets if len(value) >= _SHORT), key=len, reverse=True)


class Stderr:
    """The reading end of the pipe. `last`: the last LAST_LINES lines that are errors, without their tracebacks, or not
    in our log format (libraries)."""

    def __init__(self, fd: int, secrets: Iterable[str]) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.eof = False
        self.last: deque[str] = deque(maxlen=LAST_LINES)
        self._secrets = list(secrets)
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
        text = line.decode(errors="replace")
        for secret in self._secrets:
            text = text.replace(secret, "***")
        if len(line) > LINE_BYTES:  # it may end with the beginning of a secret
            text = text[: LINE_BYTES - max(map(len, self._secrets), default=0)]
        ours = _OURS.fullmatch(text)
        level = logging.getLevelNamesMapping().get(ours[1]) if ours else None
        if ours and level is not None:
            if level >= logging.ERROR:
                self.last.append(ours[2].partition(" | ")[0])
            return level, ours[2]
        text = _SECRET_FIELD.sub(r"\1***", text)
        self.last.append(text)
        return logging.DEBUG, text
