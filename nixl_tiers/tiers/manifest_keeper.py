"""Keeps the manifest of the namespace that a tier serves up to date, on a thread that may wait."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from nixl_tiers.base.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    REFRESH_S,
    RETRY_S,
    Description,
    Manifest,
    refreshed,
)
from nixl_tiers.tiers.folder import Folder, NotOwned

CLOSE_S: Final = 1.0
"""How long closing waits for a manifest that has not been written yet, of an engine that ran for seconds only. A medium
that hangs must not hang the close."""
_READ_BYTES: Final = 8 * MAX_MANIFEST_BYTES


@dataclass
class ManifestAuthor:
    """What a tier was told of its engine, for the manifests of the namespaces that it serves."""

    row_bytes: int
    engine: str = ""
    description: Description | None = None

    def manifest(self, namespace: str, epoch: int) -> Manifest | None:
        """Without times. `namespace` in hexadecimal. None if nothing was said: then none is kept."""
        if self.description is None:
            return None
        return Manifest(namespace, self.description.checked(), self.row_bytes, epoch, self.engine)


class ManifestKeeper:
    """Of one namespace while it is served."""

    def __init__(self, manifest: Manifest, clock: Callable[[], float]) -> None:
        """`manifest`: of an author. `clock`: Unix seconds."""
        self._manifest = manifest
        self._clock = clock
        self._next_s = 0.0

    @property
    def due(self) -> bool:
        """Whether to call `update` now."""
        return time.monotonic() >= self._next_s

    @property
    def wait_s(self) -> float:
        return max(0.0, self._next_s - time.monotonic())

    def update(self, read: Callable[[], bytes | None], write: Callable[[bytes], bool]) -> None:
        """`read` returns the manifest's bytes, None if there is none; `write` replaces it, False: there is no room.
        Raises what these raise; the next attempt is due in RETRY_S then."""
        self._next_s = time.monotonic() + RETRY_S
        raw, now = read(), int(self._clock())
        found = None if raw is None else Manifest.decode(raw)
        wanted = refreshed(found, msgspec.structs.replace(self._manifest, created=now, last_used=now))
        if wanted is not None:
            written_s = now if write(wanted.encode()) else None
        else:
            written_s = found.last_used if found is not None else now
        if written_s is not None:
            self._next_s = time.monotonic() + max(RETRY_S, REFRESH_S - (now - written_s))


def read_manifest(folder: Folder) -> bytes | None:
    """The first bytes of a directory's manifest, as many as one may have; None if there is none, or something else in
    its place, which a rename replaces. Raises OSError."""
    try:
        descriptor = folder.open(MANIFEST_NAME, os.O_RDONLY)
    except (FileNotFoundError, NotOwned):
        return None
    try:
        return os.read(descriptor, _READ_BYTES)
    finally:
        os.close(descriptor)
