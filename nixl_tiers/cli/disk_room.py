"""How much of a file tier's capacity its file system can hold, for `nixl-tiers config` and for the doctor."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nixl_tiers.base.mounts import nearest
from nixl_tiers.config.fields import format_size, min_free_bytes
from nixl_tiers.config.file import FileConfig

_WALK_S: Final = 5.0


@dataclass(frozen=True)
class DiskRoom:
    """In bytes. `room`: what the tier can take while others keep what they have; `min_free`: what it leaves free."""

    size: int
    free: int
    min_free: int
    room: int

    @classmethod
    def of(cls, config: FileConfig) -> DiskRoom:
        """Of the file system that the tier's path is on, or will be on. May wait for it. Raises OSError."""
        status = os.statvfs(nearest(config.path))
        size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
        least = min_free_bytes(config.min_free, size)
        used, known = used_bytes(config.path)
        return cls(size, free, least, max(0, (min(size, used + free) if known else size) - least))

    def shortage(self, capacity: int) -> str:
        """What to change so that the tier can have this capacity; "" if it can, or if nothing is known."""
        if not self.size or capacity <= self.room:
            return ""
        keeps = f"`min_free` keeps {format_size(self.min_free)}"
        if self.free < self.min_free:
            return f"free space: {keeps}, so the tier does not grow"
        return (
            f"a capacity of {format_size(self.room)}, free space, or a smaller `min_free` (it keeps "
            f"{format_size(self.min_free)}): the tier stops growing there"
        )


def used_bytes(path: Path) -> tuple[int, bool]:
    """What is under a path as far as it is found in a few seconds, and whether that is all."""
    total, until_s = 0, time.monotonic() + _WALK_S
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += (Path(folder) / name).lstat().st_size
            except OSError:
                continue
        if time.monotonic() > until_s:
            return total, False
    return total, True
