"""Manifests as a tier keeps them: its own, up to date on a thread that may wait, and what those of other namespaces say
of their rows, in one sentence in the log of its start."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

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


class OtherNamespaces:
    """Logs that sentence once in the life of a mover, whose resets make other namespaces of their own."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._told = False

    def first(self) -> bool:
        """Whether to find out and `tell` now: only once, even if that fails."""
        told, self._told = self._told, True
        return not told

    def tell(self, own: Manifest, nbytes: Mapping[str, int], read: Callable[[str], bytes | None]) -> None:
        """`own`: what the manifest of the namespace that is served says, or would say. `nbytes`: of the rows of each
        other one. `read` returns the bytes of its manifest, None if there is none; it is called for the largest."""
        largest = sorted((name for name in nbytes if nbytes[name]), key=lambda name: (-nbytes[name], name))
        raw = {name: read(name) for name in largest[:MAX_READ]}
        manifests = {name: Manifest.decode(each) for name, each in raw.items() if each is not None}
        if said := sentence(own, [Other(nbytes[name], manifests.get(name)) for name in largest]):
            self._logger.info("%s", said)


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
