"""What the scanner finds in a directory of row files of which a part cannot be read, or is unusual."""

from __future__ import annotations

import os

import pytest

from nixl_tiers.base.chunk import object_name
from nixl_tiers.tiers.rowfile.directory import RowDirectory
from nixl_tiers.tiers.rowfile.quota import DirQuota
from nixl_tiers.tiers.rowfile.scanner import DirScanner
from tests.tiers.rowfile.test_scanner import BAD, KEYS, PATHS, ROW, known


@pytest.mark.usefixtures("_impossible")
def test_file_of_an_impossible_time_and_size_is_evicted_like_others(
    directory: RowDirectory, scanner: DirScanner, quota: DirQuota
) -> None:
    scanner._scan_all()
    assert known(quota) == {*PATHS}
    assert quota.used_bytes >= 1 << 40
    quota._limit_bytes = 0
    quota._requested_bytes = 1
    scanner._evictor.make_room(scanner._scan_all)
    assert known(quota) == set()
    assert not directory.absolute(BAD).exists()


@pytest.mark.usefixtures("_rows")
def test_foreign_file_with_the_name_of_a_row_in_another_directory_is_no_row(
    directory: RowDirectory, scanner: DirScanner, quota: DirQuota
) -> None:
    wrong = next(key for key in KEYS if object_name(key)[:2] != BAD.fanout)
    foreign = directory.absolute(BAD).with_name(f"{wrong.hex()}.row")
    foreign.write_bytes(bytes(ROW))
    os.utime(foreign, (0, 0))  # the first to be evicted
    scanner._scan_all()
    assert known(quota) == {*PATHS}
    assert quota.used_bytes >= ROW * (len(PATHS) + 1)
    quota.limit_growth(0)
    quota.reserve(len(PATHS))
    scanner._evictor.make_room(scanner._scan_all)
    assert foreign.exists()
    assert not directory.absolute(BAD).exists()
