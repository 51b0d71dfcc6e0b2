"""From a tier's configuration to its implementation: which is imported here, in the mover, and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.config.kinds import import_object, in_one_line
from nixl_tiers.config.schema import ConfigError, StorageConfig, tier_from_dict
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.base import StorageTier, TierRefused


def make_tier(tier: Mapping[str, object], geometry: Geometry, region: HostRegion) -> StorageTier:
    """The tier of a configuration as `tier_to_dict` gives it. Raises TierRefused."""
    try:
        config = tier_from_dict(tier)
    except ConfigError as error:
        if not str(error).startswith("type: "):
            raise TierRefused(str(error)) from error
        # The scheduler's process could read it, so its path has something that a mover's has not.
        what = f'type: "{tier.get("type")}" cannot be imported by its mover process, so its package must be installed'
        raise TierRefused(f"{what} ({str(error).removeprefix('type: ')})") from error
    return implement(config, geometry, region)


def implement(config: StorageConfig, geometry: Geometry, region: HostRegion) -> StorageTier:
    """A tier of the class, or from the function, that `config.implementation` names. Raises TierRefused."""
    # One tier a process: the libraries of the others are not loaded.
    try:
        make = import_object(config.implementation)
    except Exception as error:
        where = f'its implementation "{config.implementation}" cannot be imported by its mover process'
        raise TierRefused(f'type: "{config.type}": {where} ({in_one_line(error)})') from error
    tier = make(config, geometry, region)
    if not isinstance(tier, StorageTier):
        raise TierRefused(f'type: "{config.type}": its implementation "{config.implementation}" makes no StorageTier')
    return tier
