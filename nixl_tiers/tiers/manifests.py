"""Manifests as every tier keeps them: written once there are rows to describe, and again when the tier is closed."""

from __future__ import annotations

import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final

import msgspec

from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.base.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, RETRY_S, Description, Manifest, renewed
from nixl_tiers.tiers.folder import Folder, NotOwned

CHECK_S: Final = 2.0  # how often it is looked whether there are rows to describe
CLOSE_S: Final = 1.0  # how long closing waits for the manifest: a medium that hangs must not hang the close
_READ_BYTES: Final = 8 * MAX_MANIFEST_BYTES

logger = logging.getLogger(__name__)


class ManifestMedium(ABC):
    """The manifest of the namespace that is served. Called on a keeper's thread: may wait for the medium, and raise
    what it raises."""

    @abstractmethod
    def is_wanted(self) -> bool:
        """Whether there is to be one now: the namespace has rows, and this engine may write."""

    @abstractmethod
    def read(self) -> bytes | None:
        """The bytes that are there; None if there is none."""

    @abstractmethod
    def write(self, raw: bytes) -> bool:
        """Replace it, whole or not at all. False: there is no room now."""


class ManifestKeeper:
    """The manifest of one tier's namespace: written as soon as there are rows, and at close. On a thread of its own,
    which alone waits for a medium that hangs: nothing here takes a tier down."""

    def __init__(self, row_bytes: int, engine: str = "") -> None:
        """The manifest names `engine`, and says `description`; without one, none is kept."""
        self.engine = engine
        self.description: Description | None = None
        self._row_bytes = row_bytes
        self._log_once = LogOnce(logger)
        self._thread: threading.Thread | None = None
        self._stops: SimpleQueue[bool] = SimpleQueue()

    def serve(self, namespace: str, epoch: int, medium: ManifestMedium, clock: Callable[[], float]) -> None:
        """Keep the manifest of this namespace (in hexadecimal) from now on, after `stop` for the one before. `clock`:
        Unix seconds."""
        if self.description is None:
            return
        own = Manifest(namespace, self.description.checked(), self._row_bytes, epoch, self.engine)
        self._stops = SimpleQueue()
        serving = (own, medium, clock, self._stops)
        self._thread = threading.Thread(target=self._keep, args=serving, name="manifest", daemon=True)
        self._thread.start()

    def stop(self, *, last: bool = False) -> bool:
        """`last`: after writing it once more. Returns within CLOSE_S; False: the medium hangs, and is still used."""
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        self._stops.put(last)
        thread.join(CLOSE_S)
        return not thread.is_alive()

    def _keep(
        self, own: Manifest, medium: ManifestMedium, clock: Callable[[], float], stops: SimpleQueue[bool]
    ) -> None:
        """`stops`: gets what `stop` was called with."""
        last: bool | None = None
        pause_s: float | None = 0.0
        while last is None:
            with suppress(Empty):
                last = stops.get(timeout=pause_s)
            if last is not False:
                pause_s = self.step(own, medium, clock)

    def step(self, own: Manifest, medium: ManifestMedium, clock: Callable[[], float]) -> float | None:
        """Write it if there are rows. Returns the pause until the next step; None: it is written."""
        try:
            if not medium.is_wanted():
                return CHECK_S
            raw, now = medium.read(), int(clock())
            found = None if raw is None else Manifest.decode(raw)
            if medium.write(renewed(found, msgspec.structs.replace(own, created=now, last_used=now)).encode()):
                return None
        except Exception as error:  # noqa: BLE001 (nothing relies on a manifest)
            why = (error.strerror if isinstance(error, OSError) else "") or type(error).__name__
            self._log_once.report("manifest", f"{MANIFEST_NAME} of {own.namespace} cannot be written ({why})")
        return RETRY_S


def read_manifest(folder: Folder) -> bytes | None:
    """The first bytes of a directory's manifest, as many as one may have; None if there is none, or something else in
    its place, which a rename replaces. Raises OSError."""
    try:
        with folder.opened(MANIFEST_NAME, os.O_RDONLY) as descriptor:
            return os.read(descriptor, _READ_BYTES)
    except (FileNotFoundError, NotOwned):
        return None
