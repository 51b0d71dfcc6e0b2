"""Files and links that other users placed below a tier's path are not followed, not overwritten and not deleted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.base import Move, TierDown, TierRefused
from nixl_tiers.tiers.slab.tier import SlabTier
from tests.mover.harness import NAMESPACE, key_of, wait_until
from tests.system.tiers.file_tiers import ROWS, FileTier, load, make_tier, store

HOME = NAMESPACE.hex()
OTHER_UID = 65534


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Writable by everybody, as an emptyDir is."""
    path = tmp_path / "kv"
    path.mkdir()
    path.chmod(0o777)
    return path


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A directory of the engine's user, with files of the names that a tier uses, which must not change."""
    victim = tmp_path / "victim"
    names = ["probe.tmp", ".lock", "namespace.json", "slab-00000.kv", "ab/abcd.row"]
    names += [f"{HOME}/namespace.json", f"{HOME}/slab-00000.kv"]
    for name in names:
        file = victim / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"precious" * 2048)
    yield victim
    found = [str(file.relative_to(victim)) for file in victim.rglob("*") if file.is_file()]
    assert sorted(found) == sorted(names)
    assert all((victim / name).read_bytes() == b"precious" * 2048 for name in names)


@pytest.fixture(params=["slabs", "files"])
def tier(request: pytest.FixtureRequest, path: Path, region: HostRegion) -> Iterator[FileTier]:
    tier = make_tier(str(request.param), path, region)
    yield tier
    tier.close()


def serves(tier: FileTier, region: HostRegion) -> None:
    for _ in tier.list_rows():
        pass
    assert set(store(tier, region, range(ROWS))) <= {Outcome.OK, Outcome.FOUND}
    assert set(load(tier, region, range(ROWS))) == {Outcome.OK}


def refused(tier: FileTier) -> str:
    with pytest.raises(TierRefused) as refusal:
        tier.open(NAMESPACE, 0)
    assert str(refusal.value).startswith("path: ")
    return str(refusal.value)


def test_path_may_be_a_link_and_belong_to_another_user(tmp_path: Path, path: Path, region: HostRegion) -> None:
    with suppress(PermissionError):
        os.chown(path, OTHER_UID, OTHER_UID)
    link = tmp_path / "link"
    link.symlink_to(path)
    for layout in ("slabs", "files"):
        tier = make_tier(layout, link, region)
        tier.open(NAMESPACE, 0)
        serves(tier, region)
        tier.close()
        for place in path.rglob("*"):
            assert place.stat().st_mode & 0o077 == 0, place
            place.is_dir() or place.unlink()
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(exist_ok=True)


def test_foreign_namespaces_are_not_deleted_to_make_room(path: Path, region: HostRegion, victim: Path) -> None:
    (path / "part-1").symlink_to(victim)
    open_to_all = path / "part-2"
    foreign = open_to_all / ("cd" * 16)
    foreign.mkdir(parents=True)
    open_to_all.chmod(0o777)
    (open_to_all / ".lock").touch()
    (foreign / "slab-00000.kv").write_bytes(bytes(2 << 20))
    os.mkfifo(foreign / "namespace.json")  # reading it must not block
    (path / ".gone-x").symlink_to(victim)
    tier = make_tier("slabs", path, region, 8 << 20)
    slots = tier.open(NAMESPACE, 0)
    for start in range(0, slots, ROWS):
        store(tier, region, range(start, min(start + ROWS, slots)))
    assert (foreign / "slab-00000.kv").exists()
    tier.close()


def test_foreign_row_files_are_not_evicted(path: Path, region: HostRegion, victim: Path) -> None:
    (path / ("ab" * 16)).symlink_to(victim)
    open_to_all = path / ("cd" * 16)
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    (open_to_all / "ab").symlink_to(victim / "ab")
    ours = path / ("ef" * 16)
    ours.mkdir(mode=0o700)
    (ours / "ab").symlink_to(victim / "ab")
    tier = make_tier("files", path, region, 8 << 20)
    slots = tier.open(NAMESPACE, 0)
    for _ in tier.list_rows():
        pass
    for start in range(0, 2 * slots, ROWS):
        assert set(store(tier, region, range(start, start + ROWS))) == {Outcome.OK}
    tier.close()


def test_directory_replaced_under_a_running_tier_takes_it_down(
    path: Path, region: HostRegion, victim: Path, tier: FileTier
) -> None:
    """Others may rename entries of a directory that they can write to. The tier does not follow the new name."""
    home = path / ("part-0" if isinstance(tier, SlabTier) else HOME)
    slots = tier.open(NAMESPACE, 0)
    serves(tier, region)
    home.rename(path / "elsewhere")
    home.symlink_to(victim)
    start, down = ROWS, ""
    while not down:
        try:
            moves = [Move(row, start + row, key_of(start + row), seal=True) for row in range(ROWS)]
            batch = tier.store(moves)  # slabs grow, row files are created
            assert wait_until(lambda batch=batch: any(done.batch_id == batch for done in tier.poll()))
            tier.delete([(number, key_of(number)) for number in range(start, start + ROWS)])
            tier.poll()
        except TierDown as error:
            down = str(error)
        start = (start + ROWS) % (slots - ROWS)
    assert str(home) in down
    assert str(home) in refused(tier)
    home.unlink()
    (path / "elsewhere").rename(home)
    tier.open(NAMESPACE, 0)
    serves(tier, region)
