"""Which storage tier a mover is to be: the one place that knows them all."""

from __future__ import annotations

import importlib
from typing import Any

from nixl_tiers.chunk import Geometry
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover.protocol import Configure
from nixl_tiers.tiers.base import StorageTier, TierRefused


def make_tier(hello: Configure, region: HostRegion) -> StorageTier:
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
    from nixl_tiers.config.schema import ConfigError, FileConfig, S3Config, tier_from_dict

    try:
        config = tier_from_dict(hello.tier)
    except ConfigError as error:
        raise TierRefused(str(error)) from error
    if isinstance(config, FileConfig) and config.layout == "files":
        from nixl_tiers.tiers.rowfile.tier import RowFileTier

        return RowFileTier(config, geometry, region)
    if isinstance(config, FileConfig):
        from nixl_tiers.tiers.slab.tier import SlabTier

        return SlabTier(config, geometry, region)
    if isinstance(config, S3Config):
        from nixl_tiers.tiers.s3.tier import S3Tier

        return S3Tier(config, geometry, region)
    raise TierRefused(f"type: {kind} is not a storage tier")
