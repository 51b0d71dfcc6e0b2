"""Rows in a directory, made by hand."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from nixl_tiers.base.chunk import object_name
from nixl_tiers.tiers.rowfile.contents import NAME_BYTES
from nixl_tiers.tiers.rowfile.names import RowPath

OURS, OTHER = "0" * 32, "f" * 32
FILE: Final = 4096
ROW: Final = FILE + NAME_BYTES
# Some share a fan-out directory.
KEYS: Final = [b"k%03d" % number for number in range(1000) if object_name(b"k%03d" % number)[:2] in ("00", "01", "02")]
PATHS: Final = [RowPath.of(namespace, key) for namespace in (OURS, OTHER) for key in KEYS]


class Here(ThreadPoolExecutor):
    """Calls at once."""

    def map(self, function: Any, *given: Any, **_: Any) -> Any:
        return map(function, *given)


def make(place: Path, path: RowPath, raw: bytes = bytes(FILE), used_s: float | None = None) -> Path:
    """As an engine of this user has stored it."""
    file = place / path.namespace / path.fanout / path.name
    for parent in (file.parent.parent, file.parent):
        parent.mkdir(0o700, exist_ok=True)
    file.write_bytes(raw)
    file.chmod(0o600)
    if used_s is not None:
        os.utime(file, (used_s, used_s))
    return file
