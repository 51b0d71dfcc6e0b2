"""Which namespaces of a configuration's directories an engine would not find, before it is started or upgraded.

By their manifests and the facts that the namespace is made of (`vllm/fingerprint.py`), as far as both are known here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import packages_distributions, version

from nixl_tiers.base.chunk import NAMESPACE_NAME
from nixl_tiers.base.manifest import Manifest, minor_release, salt_digest
from nixl_tiers.config.schema import FileConfig, TiersConfig
from nixl_tiers.tiers.folder import Folder
from nixl_tiers.tiers.manifests import read_manifest

_PART = re.compile(r"part-\d+")


@dataclass(frozen=True)
class Stored:
    """One namespace below a tier's directory."""

    tier: str
    namespace: str
    model: str
    vllm: str
    last_used: int  # Unix seconds
    why_cold: str
    """Why it would not be found, in words; "": nothing that is known here speaks against it."""


def installed_vllm() -> str:
    """The version of vLLM in this environment, or ""."""
    names = packages_distributions().get("vllm", [])
    return version(names[0]) if names else ""


def stored(config: TiersConfig, vllm: str) -> Iterator[Stored]:
    """What the file tiers hold, for an engine with this version of vLLM ("": unknown). Reads manifests only."""
    for name, tier in zip(config.names, config.storage, strict=True):
        if not isinstance(tier, FileConfig):
            continue
        for member in tier.members:
            with suppress(OSError), Folder.to_inspect(member.path) as base:
                for manifest in _manifests(base):
                    about = manifest.description
                    why = why_cold(manifest, config.salt, vllm)
                    yield Stored(name, manifest.namespace, about.model, about.vllm, manifest.last_used, why)


def why_cold(manifest: Manifest, salt: str, vllm: str) -> str:
    about = manifest.description
    if manifest.epoch:
        return "its engine was reset after it began, so it is never used again"
    if about.salt != salt_digest(salt):
        return "it has another salt"
    ours, theirs = minor_release(vllm), minor_release(about.vllm)
    if ours and theirs and ours != theirs:
        return f"vLLM {theirs} wrote it, and {ours} may arrange a page of KV cache otherwise"
    return ""


def _manifests(folder: Folder, *, parts: bool = True) -> Iterator[Manifest]:
    """Below a directory of either layout."""
    for name in sorted(folder.names()):
        with suppress(OSError):
            if NAMESPACE_NAME.fullmatch(name):
                with folder.folder(name) as namespace:
                    raw = read_manifest(namespace)
                if raw is not None and (found := Manifest.decode(raw)) is not None:
                    yield found
            elif parts and _PART.fullmatch(name):
                with folder.folder(name) as part:
                    yield from _manifests(part, parts=False)
