"""What both layouts of the file tier begin with: NIXL for files, and what a directory's errors mean."""

from __future__ import annotations

import errno
from typing import Final

from nixl_tiers.config import FileTier
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover.agent import Agent, AgentError, Registration
from nixl_tiers.mover.tiers.base import TierDown, TierRefused
from nixl_tiers.mover.tiers.watch import describe

_NEVER: Final = (errno.EEXIST, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ENAMETOOLONG)


def connect(config: FileTier, region: HostRegion) -> tuple[Agent, Registration]:
    """An agent of the wanted backend, and the region registered with it. Raises TierRefused if it cannot be had."""
    try:
        agent = Agent.gds_mt() if config.backend == "gds_mt" else Agent.posix()
        return agent, agent.register_region(region)
    except AgentError as error:
        raise TierRefused(f"backend: {error}") from error


def unopened(error: OSError) -> TierDown | TierRefused:
    """What to raise when a tier's directory cannot be opened: some errors do not go away by themselves."""
    if isinstance(error, TierRefused):
        return error
    return TierRefused(f"path: {describe(error)}") if error.errno in _NEVER else TierDown(describe(error))
