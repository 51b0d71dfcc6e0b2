"""A file tier whose disk is not mounted is down and makes nothing, and comes up with the mount."""

from __future__ import annotations

from pathlib import Path

import pytest

from nixl_tiers.base import mounts
from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover.protocol import Heartbeat
from nixl_tiers.tiers.base import TierDown
from tests.mover.harness import NAMESPACE, MoverProcess, wait_until
from tests.support.disks import assert_never_exceeds, run, tmpfs, volume_bytes
from tests.support.file_tier import files_tier
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


def test_below_min_free_row_files_are_only_replaced(tmp_path: Path) -> None:
    """Slabs: tests/system/tiers/slab/test_budget.py."""
    geometry, batch = Geometry(1, 120_000), 32
    with (
        tmpfs(tmp_path, "64m"),
        MoverProcess(files_tier(tmp_path, 56 << 20, min_free="50%"), geometry, batch) as mover,
    ):
        mover.open()
        mover.listed_rows()
        assert set(mover.store(range(batch))) == {Outcome.OK}
        foreign = tmp_path / "foreign"
        foreign.write_bytes(bytes(30 << 20))
        heartbeat = mover.expect(lambda m: isinstance(m, Heartbeat) and bool(m.denials))
        assert isinstance(heartbeat, Heartbeat)
        sentence = (
            f"{tmp_path} is full: min_free keeps 32 MiB of its file system free, so rows are evicted to store others"
        )
        assert heartbeat.denials == {"full": sentence}
        held = volume_bytes(tmp_path)
        with assert_never_exceeds(tmp_path, held + (1 << 20), volume_bytes):
            for first in range(batch, 4 * batch, batch):
                numbers = range(first, first + batch)
                assert wait_until(lambda numbers=numbers: set(mover.store(numbers)) == {Outcome.OK})
                # Not all of them: free space that is measured while rows make room lowers what may be taken for good.
                assert Outcome.OK in mover.load(numbers)
        foreign.unlink()
        mover.expect(lambda m: isinstance(m, Heartbeat) and not m.denials)
        before = volume_bytes(tmp_path)
        assert set(mover.store(range(4 * batch, 5 * batch))) <= {Outcome.OK, Outcome.NO_SPACE}
        assert wait_until(lambda: set(mover.store(range(5 * batch, 6 * batch))) == {Outcome.OK})
        assert volume_bytes(tmp_path) > before
