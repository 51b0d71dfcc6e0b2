"""What both layouts of the file tier begin with: NIXL for files, and what a directory's errors mean."""

from __future__ import annotations

import errno
import os
from typing import Final

from nixl_tiers.config.fields import format_size
from nixl_tiers.config.schema import FileConfig
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mounts import not_mounted
from nixl_tiers.tiers.base import TierDown, TierRefused
from nixl_tiers.tiers.disk import MountGuard, describe
from nixl_tiers.tiers.nixl_agent import Agent, AgentError, Registration

_NEVER: Final = (errno.EEXIST, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ENAMETOOLONG)


def connect(config: FileConfig, region: HostRegion) -> tuple[Agent, Registration]:
    """An agent of the wanted backend, and the region registered with it. Raises TierRefused if it cannot be had."""
    try:
        agent = Agent.gds_mt() if config.backend == "gds_mt" else Agent.posix()
        return agent, agent.register_region(region)
    except AgentError as error:
        raise TierRefused(f"backend: {error}") from error


def make_path(config: FileConfig, mount: MountGuard) -> None:
    """Make the tier's directory if it is missing, unless what it should stand on is missing too. Raises TierDown,
    OSError."""
    if trouble := mount.trouble() or (not_mounted(config.path) if config.require_mount else ""):
        raise TierDown(trouble)
    # Parents too, where they are not those of a medium that has gone.
    config.path.mkdir(mode=0o700, parents=config.require_mount, exist_ok=True)


def too_large(config: FileConfig) -> str:
    """What is wrong if the file system is smaller than the tier's capacity, or "". Raises OSError."""
    status = os.statvfs(config.path)
    size = status.f_blocks * status.f_frsize
    if not size or config.capacity <= size:  # some network file systems do not tell
        return ""
    capacity = format_size(config.capacity)
    return f"capacity: {capacity} is more than the file system at {config.path} has ({format_size(size)})"


def unopened(error: OSError) -> TierDown | TierRefused:
    """What to raise when a tier's directory cannot be opened: some errors do not go away by themselves."""
    if isinstance(error, TierRefused):
        return error
    return TierRefused(f"path: {describe(error)}") if error.errno in _NEVER else TierDown(describe(error))
