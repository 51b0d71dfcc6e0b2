"""File tiers for tests, that store on a nearly full disk too: `min_free` is 0, unless a test gives another.

With the default a tier stores nothing new while less than 5 % of the file system is free, and every test that waits for
its rows would fail there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from nixl_tiers.config.schema import FileConfig


def file_tier(path: Path | str, capacity: int | str, **fields: Any) -> dict[str, Any]:
    """A file tier, as in a configuration."""
    return {"type": "file", "path": str(path), "capacity": capacity, "min_free": 0, **fields}


def files_tier(path: Path | str, capacity: int | str, **fields: Any) -> dict[str, Any]:
    return file_tier(path, capacity, layout="files", **fields)


def file_config(path: Path | str, capacity: int | str, **fields: Any) -> FileConfig:
    """The same, checked and parsed."""
    return FileConfig.model_validate(file_tier(path, capacity, **fields))


LAYOUTS: Final[dict[str, Callable[..., dict[str, Any]]]] = {"slabs": file_tier, "files": files_tier}
