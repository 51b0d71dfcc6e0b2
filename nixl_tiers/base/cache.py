"""Where compiled kernels and measured choices are kept between starts."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from nixl_tiers.base.mounts import make_private


def write_whole(path: Path, data: bytes) -> None:
    """Write a file of the cache so that readers see all of it or none. Raises OSError."""
    make_private(path.parent)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as out:
        try:
            out.write(data)
            out.flush()
            Path(out.name).replace(path)
        except BaseException:
            Path(out.name).unlink(missing_ok=True)
            raise


def cache_folder() -> Path | None:
    """Where this user's compiled kernels and measured choices are kept; None for a user without a home, as containers
    have them."""
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(root) if root else Path("~/.cache").expanduser()) / "nixl_tiers"
    except RuntimeError:
        return None
