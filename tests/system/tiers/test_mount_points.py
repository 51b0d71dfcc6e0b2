"""A file tier makes nothing where its path has come to lead to another directory, as after an unmount."""

from __future__ import annotations

from pathlib import Path

import pytest

from nixl_tiers.base.mounts import is_mount
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.base import TierDown
from tests.mover.harness import NAMESPACE
from tests.support.disks import run, tmpfs
from tests.support.file_tier import LAYOUTS
from tests.system.tiers.file_tiers import make_tier


@pytest.mark.parametrize("layout", LAYOUTS)
def test_next_mover_wants_the_mount_point_of_the_first(layout: str, tmp_path: Path, region: HostRegion) -> None:
    path = tmp_path / "kv"
    first = make_tier(layout, path, region)
    first.open(NAMESPACE, 0)
    first.close()
    assert is_mount(Path(first.mount_point.decode()))
    empty = tmp_path / "unmounted"
    empty.mkdir()
    second = make_tier(layout, empty, region)
    second.mount_point = str(empty).encode()
    with pytest.raises(TierDown, match=f"{empty} is not mounted any more"):
        second.open(NAMESPACE, 0)
    second.close()
    assert list(empty.iterdir()) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_disk_that_was_mounted_later_is_the_mount_point_from_then_on(
    layout: str, tmp_path: Path, region: HostRegion
) -> None:
    """The engine started before the disk was there."""
    path = tmp_path / "kv"
    tier = make_tier(layout, path, region)
    tier.open(NAMESPACE, 0)
    tier.close()
    before = contents(path)
    with tmpfs(path, "64m"):
        second = make_tier(layout, path, region)
        second.mount_point = tier.mount_point
        second.open(NAMESPACE, 0)
        second.close()
    third = make_tier(layout, path, region)
    third.mount_point = second.mount_point
    with pytest.raises(TierDown, match=f"{path} is not mounted any more"):
        third.open(NAMESPACE, 0)
    third.close()
    assert contents(path) == before


@pytest.mark.parametrize("layout", LAYOUTS)
def test_path_that_was_linked_to_another_disk_needs_the_old_one_no_more(
    layout: str, tmp_path: Path, region: HostRegion
) -> None:
    disks = [tmp_path / "old", tmp_path / "new"]
    path = tmp_path / "kv"
    mount_point = b""
    for disk in disks:
        disk.mkdir()
    with tmpfs(disks[1], "64m"):
        for disk in disks:
            with tmpfs(disks[0], "64m"):
                path.unlink(missing_ok=True)
                path.symlink_to(disk)
                tier = make_tier(layout, path, region)
                tier.mount_point = mount_point
                tier.open(NAMESPACE, 0)
                tier.close()
                mount_point = tier.mount_point
        tier = make_tier(layout, path, region)
        tier.mount_point = mount_point
        tier.open(NAMESPACE, 0)
        tier.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bind_mount_of_the_same_file_system_is_a_mount_point(layout: str, tmp_path: Path, region: HostRegion) -> None:
    place, path = tmp_path / "elsewhere", tmp_path / "with a blank"
    place.mkdir()
    path.mkdir()
    if not run("mount", "--bind", place, path):
        pytest.skip("needs to mount")
    try:
        tier = make_tier(layout, path, region)
        tier.open(NAMESPACE, 0)
        tier.close()
    finally:
        run("umount", "-l", path)
    second = make_tier(layout, path, region)
    second.mount_point = tier.mount_point
    with pytest.raises(TierDown, match=f"{path} is not mounted any more"):
        second.open(NAMESPACE, 0)
    second.close()
    assert contents(path) == []


def contents(path: Path) -> list[Path]:
    return sorted(path.rglob("*"))
