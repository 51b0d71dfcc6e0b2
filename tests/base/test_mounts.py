"""Directories that are made for a tier, and for what is kept between starts; which of them are one."""

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


ROOT_OF_A_NODE = "27 1 259:1 / / rw - ext4 /dev/nvme0n1p1 rw"
ROOT_OF_A_POD = "900 1 0:{pod} / / rw - overlay overlay rw,lowerdir=/l"


@pytest.fixture
def identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What a path is on a node where that is mounted."""

    def of(path: str, *mounted: str, node: str = "one") -> str:
        (tmp_path / "mountinfo").write_text("".join(f"{line}\n" for line in mounted))
        (tmp_path / "boot_id").write_text(f"{node}\n")
        monkeypatch.setattr(mounts, "_MOUNTS", tmp_path / "mountinfo")
        monkeypatch.setattr(mounts, "_BOOT", tmp_path / "boot_id")
        return mounts.identity(Path(path))

    return of


def test_a_disks_directory_is_one_wherever_its_node_mounts_it_and_another_on_each_node(
    identity: Callable[..., str],
) -> None:
    disk = "40 27 259:3 / /mnt/nvme rw shared:9 - xfs /dev/nvme1n1 rw"
    here = identity("/mnt/nvme/kv", ROOT_OF_A_NODE, disk)
    pods = [ROOT_OF_A_POD.format(pod=pod) for pod in (71, 72)]
    hostpath = "901 900 259:3 /kv /kv rw - xfs /dev/nvme1n1 rw"
    assert {identity("/kv", pod, hostpath) for pod in pods} == {here}
    assert len({identity("/kv", pods[0], hostpath, node=node) for node in ("one", "two")}) == 2
    assert len({identity("/kv", pod) for pod in pods}) == 2, "without a volume each container has its own"
    assert identity("/kv/nvme", pods[0], hostpath) != here


@pytest.mark.parametrize(
    ("kind", "source", "shared"),
    [
        ("nfs4", "files:/export", True),
        ("fuse.juicefs", "JuiceFS:kv", True),
        ("ceph", "mon1,mon2:/", True),
        ("fuse.fuse-overlayfs", "fuse-overlayfs", False),
        ("zfs", "pool/kv", False),
    ],
)
def test_a_servers_directory_is_one_on_all_nodes(
    kind: str, source: str, shared: bool, identity: Callable[..., str]
) -> None:
    share = f"50 27 0:55 / /mnt/a\\040share rw - {kind} {source} rw"
    found = {identity("/mnt/a share/kv", ROOT_OF_A_NODE, share, node=node) for node in ("one", "two")}
    assert len(found) == (1 if shared else 2)
    below = f"50 27 0:61 / /kv rw - {kind} {source}/kv rw"  # as NFS shows a part of an export
    assert shared is (identity("/kv", ROOT_OF_A_NODE, below) in found)


def test_a_directory_of_a_file_system_is_no_mount(tmp_path: Path) -> None:
    assert not mounts.is_mount(tmp_path)
    assert mounts.is_mount(Path("/proc"))
