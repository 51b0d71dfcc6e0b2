"""Rows through a real mover and the file tier: loads return what was stored, also after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.mover.protocol import Delete, Touch
from nixl_tiers.tiers.base import Entry
from tests.mover.harness import MoverProcess, key_of
from tests.support.disks import disk_bytes
from tests.support.file_tier import file_tier

SIZES = {
    "64KiB": Geometry(1, 64 << 10),
    "256KiB": Geometry(2, 128 << 10, 4),
    "2.95MB": Geometry(1, 2_949_120, 16),
    "8MiB": Geometry(4, 2 << 20, 8),
}


@pytest.mark.parametrize("geometry", SIZES.values(), ids=SIZES)
def test_rows_round_trip_and_survive_reopening(tmp_path: Path, geometry: Geometry) -> None:
    count = max(6, min(400, (24 << 20) // geometry.row_bytes))
    capacity = (count + 4) * geometry.row_bytes + (4 << 20)
    batch = min(count, 200)
    with MoverProcess(file_tier(tmp_path, capacity), geometry, batch) as mover:
        assert mover.open() >= count
        assert mover.listed_rows() == []
        for start in range(0, count, batch):
            numbers = range(start, min(start + batch, count))
            assert set(mover.store(numbers)) == {Outcome.OK}
        for start in range(0, count, batch):
            numbers = range(start, min(start + batch, count))
            assert set(mover.load(numbers)) == {Outcome.OK}
        mover.stop()
    with MoverProcess(file_tier(tmp_path, capacity), geometry, batch) as mover:
        mover.open()
        assert mover.listed_rows() == [Entry(n, key_of(n), n + 1) for n in range(count)]
        assert set(mover.load(range(count - batch, count))) == {Outcome.OK}
    assert disk_bytes(tmp_path) <= capacity


def test_files_are_private_to_the_user(tmp_path: Path) -> None:
    with MoverProcess(file_tier(tmp_path / "kv", 16 << 20), SIZES["64KiB"], 4) as mover:
        mover.open()
        mover.store(range(4))
        mover.stop()
    for path in (tmp_path / "kv", *(tmp_path / "kv").rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_deleted_and_overwritten_rows_are_not_listed(tmp_path: Path) -> None:
    with MoverProcess(file_tier(tmp_path, 16 << 20), SIZES["64KiB"], 8) as mover:
        mover.open()
        mover.store(range(8))
        mover.send(Delete([(3, key_of(3)), (4, key_of(99))]))  # slot 4 does not hold that key: nothing happens
        mover.store([20, 21], slots=[0, 3])
        mover.stop()
    with MoverProcess(file_tier(tmp_path, 16 << 20), SIZES["64KiB"], 8) as mover:
        mover.open()
        found = {entry.slot: entry.key for entry in mover.listed_rows()}
        assert found == {0: key_of(20), 3: key_of(21)} | {n: key_of(n) for n in (1, 2, 4, 5, 6, 7)}


def test_recently_used_row_is_listed_later(tmp_path: Path) -> None:
    with MoverProcess(file_tier(tmp_path, 16 << 20), SIZES["64KiB"], 8) as mover:
        mover.open()
        mover.store(range(4))
        mover.send(Touch([(1, 100), (6, 101), (1 << 20, 102)]))  # there is no row in slot 6, and no slot 2^20
        mover.stop()
    with MoverProcess(file_tier(tmp_path, 16 << 20), SIZES["64KiB"], 8) as mover:
        mover.open()
        assert [entry.slot for entry in mover.listed_rows()] == [0, 2, 3, 1]


def test_namespaces_are_separate_and_both_stay(tmp_path: Path) -> None:
    with MoverProcess(file_tier(tmp_path, 32 << 20), SIZES["64KiB"], 8) as mover:
        mover.open(epoch=0)
        mover.listed_rows()
        mover.store(range(8))
        mover.open(bytes(16), epoch=1)
        assert mover.listed_rows() == []
        assert set(mover.load(range(8))) == {Outcome.MISSING}
        mover.store([30])
        mover.open(epoch=0)
        assert len(mover.listed_rows()) == 8
        assert set(mover.load(range(8))) == {Outcome.OK}


def test_rows_of_another_geometry_are_dropped(tmp_path: Path) -> None:
    with MoverProcess(file_tier(tmp_path, 32 << 20), SIZES["64KiB"], 8) as mover:
        mover.open()
        mover.store(range(8))
        mover.stop()
    with MoverProcess(file_tier(tmp_path, 32 << 20), SIZES["256KiB"], 8) as mover:
        mover.open()
        assert mover.listed_rows() == []
        assert set(mover.store(range(8))) == {Outcome.OK}
        assert set(mover.load(range(8))) == {Outcome.OK}


def test_a_smaller_capacity_keeps_what_fits(tmp_path: Path) -> None:
    geometry = SIZES["256KiB"]
    with MoverProcess(file_tier(tmp_path, 32 << 20), geometry, 64) as mover:
        assert mover.open() > 64
        mover.store(range(64))
        mover.stop()
    capacity = 12 << 20
    with MoverProcess(file_tier(tmp_path, capacity), geometry, 64) as mover:
        slots = mover.open()
        assert disk_bytes(tmp_path) <= capacity
        assert [entry.slot for entry in mover.listed_rows()] == list(range(slots))
        assert set(mover.load(range(slots))) == {Outcome.OK}
        mover.stop()
    with MoverProcess(file_tier(tmp_path, 32 << 20), geometry, 64) as mover:
        assert mover.open() > 64
        assert set(mover.store(range(64))) == {Outcome.OK}
