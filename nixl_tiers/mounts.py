"""Whether a path is on a file system other than `/`, for `require_mount`."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path("/")


def nearest(path: Path) -> Path:
    """The path itself, or its nearest parent that exists. Raises OSError."""
    return next(each for each in (path, *path.parents) if os.path.lexists(each))


def not_mounted(path: Path) -> str:
    """Why `require_mount` is not met, in one sentence, or "". Creates nothing; may wait for the medium. Raises
    OSError."""
    real = path.resolve()  # the target of a symbolic link, whether it exists or not
    if nearest(real).stat().st_dev != ROOT.stat().st_dev:
        return ""
    return f"{path} lies on the file system of {ROOT}, and require_mount wants another: mount it"
