"""One row's file, and the room that it takes, while other processes delete rows, too."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nixl_tiers.tiers.rowfile.directory import RowDirectory
from nixl_tiers.tiers.rowfile.names import RowPath
from nixl_tiers.tiers.rowfile.quota import DirQuota, Reservation

NAMESPACE = bytes(16).hex()
PATH = RowPath.of(NAMESPACE, b"key")
ROW = 4096


@pytest.fixture
def quota() -> DirQuota:
    return DirQuota(1 << 30, ROW)


@pytest.fixture
def full(directory: RowDirectory, quota: DirQuota) -> DirQuota:
    """No more may be taken of the file system, and there is one row."""
    number, added_bytes, _ = quota.begin_scan()
    quota.end_scan(number, added_bytes, set(), 0)
    file = directory.absolute(PATH)
    file.parent.mkdir(0o700)
    file.write_bytes(bytes(ROW))
    quota.record(PATH, file.stat(), 1, stored=True)
    quota.limit_growth(0)
    return quota


def test_row_that_this_process_deletes_makes_room(directory: RowDirectory, full: DirQuota) -> None:
    assert full.reserve(1) is Reservation.WAIT
    directory.delete(PATH)
    assert full.reserve(1) is Reservation.GRANTED


@pytest.mark.parametrize("notice", [RowDirectory.stat, RowDirectory.open_row, RowDirectory.delete])
def test_row_that_another_process_deleted_is_no_room_for_this_one(
    directory: RowDirectory, full: DirQuota, notice: Callable[[RowDirectory, RowPath], object]
) -> None:
    """That process has written another row instead: with each counting what both evict, free space would drain."""
    directory.absolute(PATH).unlink()
    assert notice(directory, PATH) is None
    assert full.get(PATH) is None
    assert full.reserve(1) is Reservation.WAIT
    assert full.excess_bytes() == ROW
