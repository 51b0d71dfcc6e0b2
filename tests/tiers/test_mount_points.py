"""A file tier makes nothing where its path has come to lead to another directory, as after an unmount."""

from __future__ import annotations

import logging
from pathlib import Path
from unittest.mock import Mock

import pytest

from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.tiers import disk
from nixl_tiers.tiers.base import TierDown
from nixl_tiers.tiers.disk import MountGuard, prepare_path
from nixl_tiers.tiers.rowfile.directory import RowDirectory
from nixl_tiers.tiers.slab.shards import Shards
from tests.mover.harness import NAMESPACE
from tests.support.file_tier import file_config


def replace(path: Path) -> None:
    """What the directory below the mount point looks like to a process that goes by the path."""
    path.rename(path.with_name("elsewhere"))
    path.mkdir()


def test_row_file_is_made_only_in_the_directory_that_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    path.mkdir()
    directory = RowDirectory(path)
    directory.prepare(NAMESPACE.hex())
    replace(path)
    with pytest.raises(OSError, match="is not the directory that was opened"):
        directory.write_manifest(NAMESPACE.hex(), b"{}")
    assert list(path.iterdir()) == []
    directory.prepare(NAMESPACE.hex())  # as the next open does
    directory.write_manifest(NAMESPACE.hex(), b"{}")
    assert directory.read_manifest(NAMESPACE.hex()) == b"{}"
    directory.close()


def test_slabs_grow_only_in_the_directory_that_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    path.mkdir()
    quota = Shards(path, 1 << 30)
    with quota.locked():
        pass
    replace(path)
    with pytest.raises(OSError, match="is not the directory that was opened"), quota.locked():
        pass
    assert list(path.iterdir()) == []


def test_path_whose_mount_has_gone_is_down_and_nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted = [tmp_path]
    monkeypatch.setattr(disk, "is_mount", lambda path: path in (*mounted, Path("/")))
    config, tier, log = file_config(tmp_path / "kv", 1 << 20), Mock(mount_point=b""), LogOnce(logging.getLogger())
    prepare_path(config, MountGuard(tier), log)
    MountGuard(tier).remember(config.path)
    config.path.rmdir()
    mounted.clear()
    with pytest.raises(TierDown, match=f"^{tmp_path} is not mounted any more$"):
        prepare_path(config, MountGuard(tier), log)
    assert not config.path.exists()
    mounted.append(tmp_path)
    prepare_path(config, MountGuard(tier), log)
