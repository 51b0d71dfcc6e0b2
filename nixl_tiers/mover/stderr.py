"""What a mover writes to its standard error, as its engine reads it: never waiting, in lines, and without secrets."""

from __future__ import annotations

import logging
import os
import re
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

READ_BYTES: Final = 64 << 10  # in one look
LINE_BYTES: Final = 2000  # what is longer is cut
LAST_LINES: Final = 20  # of what is not ours, kept for the case that the mover dies

FORMAT: Final = "nixl_tiers mover[%s] %%(levelname)s: %%(message)s"
_OURS: Final = re.compile(r"nixl_tiers mover\[[^\]]*\] ([A-Z]+): (.*)")
_SECRET_NAME: Final = re.compile(r"SECRET|TOKEN|PASSW|CREDENTIAL|ACCESS_KEY|API_?KEY", re.IGNORECASE)
_PLACE_NAME: Final = re.compile(r"_(FILE|PATH|DIR|URI|URL)$", re.IGNORECASE)
_SECRET_FIELD: Final = re.compile(
    r"((?:secret|token|passw|credential|signature|authorization|access.?key)[\w-]*[\"']?\s*[=:]\s*).*", re.IGNORECASE
)
_SHORT: Final = 8  # shorter values are ordinary words


def secrets_of(environment: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """Values that must not be shown: of variables that sound secret, and of these `names`."""
    named = set(names)
    sound = [
        value
        for name, value in environment.items()
        if name in named or (_SECRET_NAME.search(name) and not _PLACE_NAME.search(name))
    ]
    return sorted((value for value in sound if len(value) >= _SHORT), key=len, reverse=True)


class Stderr:
    """The engine's end of the pipe. `last`: lines that are not log lines of ours, the newest LAST_LINES."""

    def __init__(self, fd: int, secrets: Iterable[str]) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.ended = False
        self.last: deque[str] = deque(maxlen=LAST_LINES)
        self._secrets = list(secrets)
        self._part = b""
        self._skips = False  # the rest of a line that was too long

    def read(self) -> list[tuple[int, str]]:
        """(level, text) of the lines that have come; those of libraries and tracebacks are DEBUG."""
        try:
            raw = os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            raw = b""
        self.ended = not raw
        *lines, self._part = (self._part + (raw or b"\n")).split(b"\n")
        if self._skips and lines:
            del lines[0]
            self._skips = False
        if len(self._part) > LINE_BYTES:
            if not self._skips:
                lines.append(self._part)
            self._skips, self._part = True, b""
        return [self._take(line) for line in lines if line.strip()]

    def _take(self, line: bytes) -> tuple[int, str]:
        text = line.decode(errors="replace")
        for secret in self._secrets:
            text = text.replace(secret, "***")
        if len(line) > LINE_BYTES:  # what stands at its end may be the beginning of a secret
            text = text[: LINE_BYTES - max(map(len, self._secrets), default=0)]
        ours = _OURS.fullmatch(text)
        level = logging.getLevelNamesMapping().get(ours[1]) if ours else None
        if ours and level is not None:
            return level, ours[2]
        text = _SECRET_FIELD.sub(r"\1***", text)
        self.last.append(text)
        return logging.DEBUG, text
