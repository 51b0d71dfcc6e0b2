"""What a medium holds of other namespaces: one sentence in the log of a tier's start.

None of it is ever a hit here. Whether a certain chunk is among it is not known, as nothing of another namespace is
listed: each miss counts as `never_stored`. So this is what explains misses after a change of the model or of an option.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from nixl_tiers.base.manifest import Manifest, minor_release
from nixl_tiers.config.fields import format_size

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
