"""Which storage tier a mover is to be: the one place that knows them all."""

from __future__ import annotations

import importlib
from typing import Any

from nixl_tiers.chunk import Geometry
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover.messages import Hello
from nixl_tiers.mover.tiers.base import StorageTier, TierRefused


def make_tier(hello: Hello, region: HostRegion) -> StorageTier:
    """The tier that hello.tier["type"] names: "file", "s3", or "package.module:Class" for somebody else's, which is
    called with (hello.tier, geometry, region). Raises TierRefused."""
    kind = str(hello.tier.get("type", ""))
    geometry = Geometry(hello.cells, hello.cell_payload, hello.sub_blocks)
    # One tier a process: the libraries of the others are not loaded.
    if ":" in kind:
        module, _, name = kind.partition(":")
        try:
            custom: Any = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise TierRefused(f"type: {kind} cannot be loaded ({error})") from error
        tier: StorageTier = custom(hello.tier, geometry, region)
        return tier
    from nixl_tiers.config import ConfigError, FileTier, S3Tier, tier_from_dict

    try:
        config = tier_from_dict(hello.tier)
    except ConfigError as error:
        raise TierRefused(str(error)) from error
    if isinstance(config, FileTier) and config.layout == "files":
        from nixl_tiers.mover.tiers.files import FilesStorage

        return FilesStorage(config, geometry, region)
    if isinstance(config, FileTier):
        from nixl_tiers.mover.tiers.file import FileStorage

        return FileStorage(config, geometry, region)
    if isinstance(config, S3Tier):
        from nixl_tiers.mover.tiers.object import ObjectStorage

        return ObjectStorage(config, geometry, region)
    raise TierRefused(f"type: {kind} is not a storage tier")
