"""What a path stands on: a directory below which nothing is mounted is on the file system of the machine itself."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path("/")


def nearest(path: Path) -> Path:
    """The path itself, or the lowest directory above it that there is. Raises OSError."""
    return next(place for place in (path, *path.parents) if os.path.lexists(place))


def not_mounted(path: Path) -> str:
    """Why `require_mount` is not met, in one sentence, or "". Creates nothing; may wait for the medium. Raises
    OSError."""
    real = path.resolve()  # what a link leads to, there or not
    if nearest(real).stat().st_dev != ROOT.stat().st_dev:
        return ""
    return f"{path} lies on the file system of {ROOT}, and require_mount wants another: mount it"
