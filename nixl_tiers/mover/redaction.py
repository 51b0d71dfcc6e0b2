"""Secrets in what movers write and send: they are replaced before anything is logged or reported."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

_SECRET_NAME: Final = re.compile(
    r"SECRET|TOKEN|PASSW|PASSPHRASE|CREDENTIAL|API_?KEY|(PASS|AUTH|KEYS?)(_|$)", re.IGNORECASE
)
_PLACE_NAME: Final = re.compile(r"_(FILE|PATH|DIR)$", re.IGNORECASE)  # and not _URL: some URLs are secrets
_USER_OF_URL: Final = re.compile(r"://[^/@\s]+@")
_SHORT: Final = 8  # shorter values are ordinary words


def secrets_of(environment: Mapping[str, str], names: Iterable[str]) -> list[str]:
    """Values to be redacted: of variables whose names look secret, and of these `names`."""
    named = set(names)
    return [
        value
        for name, value in environment.items()
        if name in named or (_SECRET_NAME.search(name) and not _PLACE_NAME.search(name))
    ]


class Redactor:
    """Replaces secrets, and each line of a secret that has several, such as a private key; what is shorter than 8
    characters is left. `longest`: of what is replaced, in characters."""

    def __init__(self, secrets: Iterable[str]) -> None:
        lines = {line.strip() for secret in secrets for line in secret.splitlines()}
        known = sorted((line for line in lines if len(line) >= _SHORT), key=len, reverse=True)
        self.longest = len(known[0]) if known else 0
        self._secrets = re.compile("|".join(map(re.escape, known))) if known else None

    def __call__(self, text: str) -> str:
        if self._secrets is not None:
            text = self._secrets.sub("***", text)
        return _USER_OF_URL.sub("://***@", text)
