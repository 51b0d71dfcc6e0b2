"""A file tier makes nothing where its path has come to lead to another directory, as after an unmount."""

from __future__ import annotations

from pathlib import Path

import pytest

from nixl_tiers.mover.protocol import Configure, Opened, decode_to_coordinator, decode_to_mover, encode
from nixl_tiers.tiers.rowfile.directory import RowDirectory
from nixl_tiers.tiers.slab.shards import Shards
from tests.mover.harness import NAMESPACE


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


def test_mount_point_goes_to_the_engine_and_to_the_next_mover() -> None:
    opened = decode_to_coordinator(encode(Opened(0, 1, b"/mnt/\xff")))
    assert isinstance(opened, Opened)
    configure = decode_to_mover(encode(Configure({}, 1, 1, 1, 1, mount_point=opened.mount_point)))
    assert isinstance(configure, Configure)
    assert configure.mount_point == b"/mnt/\xff"
