"""A file tier whose disk is not mounted, or fails, is down and makes nothing, and comes up with the disk."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from nixl_tiers.base import mounts
from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover.protocol import Down, Opened
from nixl_tiers.tiers.base import TierDown
from tests.mover.harness import NAMESPACE, MoverProcess, wait_until
from tests.support.disks import Ext4, ext4, run, tmpfs
from tests.support.file_tier import LAYOUTS
from tests.system.tiers.file_tiers import FileTier, make_tier
from tests.system.tiers.test_folder import serves

MOVED = Geometry(1, 120_000)
CAPACITY = 24 << 20
ROWS = 24
EXT4_SHUTDOWN = 0x8004587D


@pytest.fixture(params=["slabs", "files"])
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def down(tier: FileTier) -> str:
    with pytest.raises(TierDown) as error:
        tier.open(NAMESPACE, 0)
    return str(error.value)


def test_tier_without_its_mount_is_down_and_writes_nothing(
    tmp_path: Path, region: HostRegion, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounts, "ROOT", tmp_path)  # as if this directory were on the file system of `/`
    place = tmp_path / "nvme"
    place.mkdir()
    path = place / "deep" / "kv"
    tier = make_tier(layout, path, region, require_mount=True)
    wanted = f"{path} lies on the file system of {tmp_path}, and require_mount wants another: mount it"
    assert down(tier) == wanted
    assert list(place.iterdir()) == []
    with tmpfs(place, "64m"):
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
                each.open(NAMESPACE, 0)
                serves(each, region)
                each.close()


def mover_on(path: Path, layout: str = "slabs") -> MoverProcess:
    tier = LAYOUTS[layout](path, CAPACITY, type="tests.mover.stub_tiers:DecidedConfig", staged=False)
    return MoverProcess(tier, MOVED, ROWS)


def stored(mover: MoverProcess, rows: int = ROWS) -> MoverProcess:
    """The mover, serving keys 0 to rows - 1."""
    mover.open()
    mover.listed_rows()
    assert set(mover.store(range(rows))) == {Outcome.OK}
    return mover


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Ext4]:
    with ext4(tmp_path) as disk:
        yield disk


def served_again(mover: MoverProcess, layout: str) -> None:
    """The tier is up again with all its rows."""
    mover.expect(lambda m: isinstance(m, Opened))
    if layout == "slabs":
        assert len(mover.listed_rows()) == ROWS
    else:
        assert mover.there(range(2 * ROWS)) == [*range(ROWS)]
    assert set(mover.load(range(ROWS))) == {Outcome.OK}
    assert set(mover.store(range(ROWS))) == {Outcome.OK if layout == "slabs" else Outcome.FOUND}


def test_failed_disk_is_served_again_after_a_remount(disk: Ext4, layout: str) -> None:
    """A real file system is shut down: every access fails with EIO."""
    path = disk.place / "kv"
    path.mkdir()
    with stored(mover_on(path, layout)) as mover:
        os.sync()
        handle = os.open(disk.place, os.O_RDONLY)
        try:
            fcntl.ioctl(handle, EXT4_SHUTDOWN, struct.pack("I", 0))
        except OSError:
            pytest.skip("needs a file system that can be shut down")
        finally:
            os.close(handle)
        for _ in range(3):
            assert set(mover.store(range(ROWS))) == {Outcome.FAILED}
            assert set(mover.load(range(ROWS))) <= {Outcome.OK, Outcome.FAILED}
        assert disk.unmount()
        mover.expect(lambda m: isinstance(m, Down) and "not mounted" in m.reason)
        assert list(disk.place.iterdir()) == []  # and it does not fill the disk below the mount point
        disk.remount()
        served_again(mover, layout)
        mover.stop()
        log = mover.log()
        assert len(log.splitlines()) < 12, log
