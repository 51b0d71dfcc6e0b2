"""A file tier whose disk is not mounted is down and makes nothing, and comes up with the mount."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nixl_tiers import mounts
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.base import TierDown
from nixl_tiers.tiers.disk import FreeSpace
from tests.mover.harness import NAMESPACE, wait_until
from tests.support.disks import run, tmpfs
from tests.tiers.file_tiers import FileTier, make_tier
from tests.tiers.test_folder import serves


@pytest.fixture(params=["slabs", "files"])
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def down(tier: FileTier) -> str:
    with pytest.raises(TierDown) as error:
        tier.open(NAMESPACE, 0)
    return str(error.value)


def test_free_space_is_asked_for_once_a_second_and_counted_down_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = os.statvfs(tmp_path)
    free_bytes = status.f_bavail * status.f_frsize
    asked: list[object] = []

    def statvfs(path: object) -> os.statvfs_result:
        asked.append(path)
        return status

    monkeypatch.setattr(os, "statvfs", statvfs)
    now = [100.0]
    free = FreeSpace(tmp_path, free_bytes - 1000, clock=lambda: now[0])
    assert [bool(free.lacks(nbytes)) for nbytes in (400, 600, 1, 0)] == [False, False, True, False]
    assert len(asked) == 1
    assert free.lacks(1) == free.problem
    assert f"{tmp_path}: min_free keeps" in free.problem
    now[0] += 1
    assert not free.lacks(1000)
    assert not free.problem
    assert len(asked) == 2
    free.measure_again()
    assert not free.lacks(1000)
    assert len(asked) == 3


@pytest.mark.parametrize("linked", [False, True])
def test_tier_without_its_mount_is_down_and_writes_nothing(
    tmp_path: Path, region: HostRegion, layout: str, linked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounts, "ROOT", tmp_path)  # as if this directory were on the file system of `/`
    place = tmp_path / "nvme"
    place.mkdir()
    path = place / "deep" / "kv"
    if linked:
        (tmp_path / "link").symlink_to(path)
        path = tmp_path / "link"
    tier = make_tier(layout, path, region, require_mount=True)
    wanted = f"{path} lies on the file system of {tmp_path}, and require_mount wants another: mount it"
    assert down(tier) == wanted
    assert list(place.iterdir()) == []
    with tmpfs(place, "64m"):
        if linked:
            (place / "deep" / "kv").mkdir(parents=True)
        tier.open(NAMESPACE, 0)
        serves(tier, region)
        assert run("umount", "-l", place)
        reasons: list[str] = []

        def gone() -> bool:
            try:
                tier.poll()
            except TierDown as error:
                reasons.append(str(error))
            return bool(reasons)

        assert wait_until(gone)
        assert "not mounted any more" in down(tier)
        again = make_tier(layout, path, region, require_mount=True)  # as of another mover
        assert down(again) == wanted
        assert list(place.iterdir()) == []
        with tmpfs(place, "64m"):
            for each in (tier, again):
                if linked:
                    (place / "deep" / "kv").mkdir(parents=True, exist_ok=True)
                each.open(NAMESPACE, 0)
                serves(each, region)
                each.close()


def test_capacity_beyond_the_file_system_is_logged(
    tmp_path: Path, region: HostRegion, layout: str, caplog: pytest.LogCaptureFixture
) -> None:
    with tmpfs(tmp_path, "64m"):
        for capacity in (32 << 20, 65 << 20):
            tier = make_tier(layout, tmp_path / "kv", region, capacity, require_mount=True)
            tier.open(NAMESPACE, 0)
            tier.open(NAMESPACE, 1)
            tier.close()
    warnings = [record.message for record in caplog.records if "capacity" in record.message]
    assert warnings == [f"capacity: 65 MiB is more than the file system at {tmp_path / 'kv'} has (64 MiB)"]
