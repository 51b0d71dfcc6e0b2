"""A file tier whose disk is not mounted is down and makes nothing, and comes up with the mount."""

from __future__ import annotations

from pathlib import Path

import pytest

from nixl_tiers.base import mounts
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.base import TierDown
from tests.mover.harness import NAMESPACE, wait_until
from tests.support.disks import run, tmpfs
from tests.system.tiers.file_tiers import FileTier, make_tier
from tests.system.tiers.test_folder import serves


@pytest.fixture(params=["slabs", "files"])
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def down(tier: FileTier) -> str:
    with pytest.raises(TierDown) as error:
        tier.open(NAMESPACE, 0)
    return str(error.value)


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
            if linked:
                (place / "deep" / "kv").mkdir(parents=True, exist_ok=True)
            for each in (tier, again):
                each.open(NAMESPACE, 0)
                serves(each, region)
                each.close()
