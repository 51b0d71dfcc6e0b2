"""Directories that are made for a tier, and for what is kept between starts."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from nixl_tiers.base import mounts
from nixl_tiers.base.cache import write_whole
from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.config.file import FileConfig
from nixl_tiers.tiers.disk import MountGuard, prepare_path


def _config(path: Path) -> FileConfig:
    fields = {"type": "file", "path": path, "capacity": "1GiB", "min_free": 0, "require_mount": True}
    return FileConfig.model_validate(fields)


def at_startup(path: Path) -> None:
    _config(path).prepare_here()


def in_the_mover(path: Path) -> None:
    prepare_path(_config(path), MountGuard(Mock(mount_point=b"")), LogOnce(logging.getLogger()))


def in_the_cache(path: Path) -> None:
    write_whole(path / "choice", b"fast")


@pytest.mark.parametrize("mask", [0o000, 0o022])
@pytest.mark.parametrize("make", [at_startup, in_the_mover, in_the_cache])
def test_missing_directories_are_private_whatever_the_umask(
    make: Callable[[Path], None], mask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounts, "ROOT", Path("/proc"))  # so that `require_mount` is met
    tmp_path.chmod(0o755)
    path = tmp_path / "very" / "deep" / "kv"
    before = os.umask(mask)
    try:
        make(path)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(made.stat().st_mode) for made in (path, *path.parents[:2])] == [0o700] * 3
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755, "what was there stays as it is"
