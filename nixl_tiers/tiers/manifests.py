"""Manifests as every tier keeps them: its own, up to date, and what those of other namespaces say of their rows, in one
sentence in the log of its start."""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple

import msgspec

from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.base.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    REFRESH_S,
    RETRY_S,
    Description,
    Manifest,
    minor_release,
    refreshed,
)
from nixl_tiers.config.fields import format_size
from nixl_tiers.tiers.folder import Folder, NotOwned

CHECK_S: Final = 2.0  # how often it is looked whether there are rows to describe
CLOSE_S: Final = 1.0  # how long closing waits for the manifest: a medium that hangs must not hang the close
_READ_BYTES: Final = 8 * MAX_MANIFEST_BYTES

logger = logging.getLogger(__name__)


class ManifestMedium(ABC):
    """The manifests of one medium. Called on a keeper's thread: may wait for the medium, and raise what it raises."""

    @abstractmethod
    def is_wanted(self) -> bool:
        """Whether the namespace that is served is to have one now: it has rows, and this engine may write."""

    @abstractmethod
    def read(self, namespace: str) -> bytes | None:
        """The bytes of a namespace's manifest; None if there is none."""

    @abstractmethod
    def write(self, raw: bytes) -> bool:
        """Replace that of the namespace that is served, whole or not at all. False: there is no room now."""

    @abstractmethod
    def other_bytes(self) -> Mapping[str, int] | None:
        """Of the rows of each namespace that is not served; None: not known yet."""


class ManifestKeeper:
    """The manifests of one tier: that of the namespace that is served is written as soon as there are rows, again each
    hour, and at close; what others say is logged once. On a thread of its own, which alone waits for a medium that
    hangs: nothing here takes a tier down."""

    def __init__(self, row_bytes: int, engine: str = "") -> None:
        """The manifest names `engine`, and says `description`; without one, none is kept."""
        self.engine = engine
        self.description: Description | None = None
        self._row_bytes = row_bytes
        self._log_once = LogOnce(logger)
        self._others_told = False  # once in the life of a mover, whose resets make other namespaces of their own
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
        used_s = pause_s = 0.0
        while last is None:
            with suppress(Empty):
                last = stops.get(timeout=pause_s)
            if last is not False:
                used_s, pause_s = self.step(own, medium, clock, used_s, last=bool(last))

    def step(
        self, own: Manifest, medium: ManifestMedium, clock: Callable[[], float], used_s: float, *, last: bool = False
    ) -> tuple[float, float]:
        """Write it if it is due, or the `last` time; `used_s`: its `last_used`, as far as that is known. Returns that,
        and the pause until the next step."""
        try:
            wanted = medium.is_wanted()
            if not last:
                self._tell_others(own, medium)
            if not wanted:
                return used_s, CHECK_S
            now = int(clock())
            if last or not 0 <= now - used_s < REFRESH_S:
                used_s = self._update(own, medium, now, 0.0 if last else REFRESH_S)
        except Exception as error:  # noqa: BLE001 (nothing relies on a manifest)
            why = (error.strerror if isinstance(error, OSError) else "") or type(error).__name__
            self._log_once.report("manifest", f"{MANIFEST_NAME} of {own.namespace} cannot be written ({why})")
        return used_s, RETRY_S

    def _update(self, own: Manifest, medium: ManifestMedium, now: int, refresh_s: float) -> int:
        """Write it unless it says the same, and that less than `refresh_s` ago. Returns its `last_used`; 0: there is no
        room."""
        raw = medium.read(own.namespace)
        found = None if raw is None else Manifest.decode(raw)
        wanted = refreshed(found, msgspec.structs.replace(own, created=now, last_used=now), refresh_s)
        if wanted is None:
            assert found is not None
            return found.last_used
        return now if medium.write(wanted.encode()) else 0

    def _tell_others(self, own: Manifest, medium: ManifestMedium) -> None:
        if not self._others_told and (nbytes := medium.other_bytes()) is not None:
            self._others_told = True
            if said := others_sentence(own, nbytes, medium.read):
                logger.info("%s", said)


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


# --- what a medium holds of other namespaces --------------------------------------------------------------------------

# None of it is ever a hit here. Whether a certain chunk is among it is not known, as nothing of another namespace is
# listed: each miss counts as `never_stored`. So this explains misses after a change of the model or of an option.

MAX_NAMED: Final = 3
MAX_READ: Final = 16  # manifests

_FACTS: Final = {
    "model": "model",
    "revision": "revision",
    "dtype": "dtype",
    "layout": "layout of the KV cache",
    "chunk_tokens": "chunk size",
}


class Other(NamedTuple):
    """The rows of another namespace. `manifest`: None if it has none that can be read."""

    nbytes: int
    manifest: Manifest | None


def others_sentence(own: Manifest, nbytes: Mapping[str, int], read: Callable[[str], bytes | None]) -> str:
    """Empty if there is nothing to say. `nbytes`: of the rows of each other namespace. `read`: the bytes of a manifest,
    None if there is none; it is called for those with most rows."""
    largest = sorted((name for name in nbytes if nbytes[name]), key=lambda name: (-nbytes[name], name))
    raw = {name: _read(read, name) for name in largest[:MAX_READ]}
    manifests = {name: Manifest.decode(each) for name, each in raw.items() if each is not None}
    return sentence(own, [Other(nbytes[name], manifests.get(name)) for name in largest])


def _read(read: Callable[[str], bytes | None], namespace: str) -> bytes | None:
    with suppress(Exception):  # of whatever medium
        return read(namespace)
    return None


def sentence(own: Manifest, others: Sequence[Other]) -> str:
    """Empty if there is nothing to say."""
    if not others:
        return ""
    others = sorted(
        others, key=lambda each: (each.manifest is None, -(each.manifest.last_used if each.manifest else 0))
    )
    sizes = [f"{format_size(each.nbytes)} " if len(others) > 1 else "" for each in others[:MAX_NAMED]]
    named = [size + _about(own, each.manifest) for size, each in zip(sizes, others, strict=False)]
    rest = [f"{len(others) - MAX_NAMED} more"] if len(others) > MAX_NAMED else []
    count = "another namespace" if len(others) == 1 else f"{len(others)} other namespaces"
    total = format_size(sum(each.nbytes for each in others))
    return f"{total} here are of {count}, which this engine does not find: {'; '.join([*named, *rest])}"


def differences(own: Manifest, other: Manifest) -> list[str]:
    """In what the other manifest is known to differ, of that which makes other namespaces, or goes with it."""
    ours, theirs = own.description, other.description
    found = []
    for field, words in _FACTS.items():
        before, now = getattr(theirs, field), getattr(ours, field)
        if before and now and before != now:
            found.append(f"{words} {before}, now {now}")
    before, now = minor_release(theirs.vllm), minor_release(ours.vllm)
    if before and now and before != now:
        found.append(f"vLLM {before}, now {now}")
    if theirs.salt != ours.salt:
        found.append("another salt")
    if other.row_bytes != own.row_bytes:
        found.append(f"rows of {other.row_bytes} bytes, now {own.row_bytes}")
    if other.epoch:
        found.append("weights that were replaced while the engine ran")
    return found


def _about(own: Manifest, other: Manifest | None) -> str:
    if other is None:
        return "without a manifest"
    used = time.strftime("%Y-%m-%d", time.gmtime(other.last_used))
    differs = ", ".join(differences(own, other)) or "no difference in its manifest: the weights, or an option"
    return f"last used on {used} ({differs})"
