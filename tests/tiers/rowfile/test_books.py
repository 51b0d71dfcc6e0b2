"""What a tier knows of a directory of row files, compared with a plain model: this engine and others store, replace and
delete rows in any order, also while a directory is read; rows are listed, expire and are evicted."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from nixl_tiers.base.chunk import Geometry, object_name
from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.tiers.disk import INCOMING
from nixl_tiers.tiers.folder import Folder
from nixl_tiers.tiers.rowfile.directory import RowDirectory
from nixl_tiers.tiers.rowfile.eviction import Evictor
from nixl_tiers.tiers.rowfile.names import RowPath
from nixl_tiers.tiers.rowfile.packed_rows import BLOCK_BYTES, COLUMNS, encoded, key_array
from nixl_tiers.tiers.rowfile.quota import MARGIN_BYTES, DirQuota, FoundRows, Reservation
from nixl_tiers.tiers.rowfile.scanner import _DISTRUSTED_DIRS, DirScanner

GEOMETRY = Geometry(1, 100)
ROW = GEOMETRY.row_bytes
OURS, OTHER = "0" * 32, "f" * 32
CAPACITY = 1 << 30
# Few, so that engines meet; some share a fan-out directory.
KEYS = [b"k%03d" % number for number in range(1000) if object_name(b"k%03d" % number)[:2] in ("00", "01", "02")]


def row_status() -> os.stat_result:
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(ROW)
        return Path(file.name).stat()


NOTHING = FoundRows(key_array([]), np.empty(0, COLUMNS), np.empty(0, np.uint8))


def test_row_stored_again_while_its_directory_is_read_stays_known() -> None:
    """It was deleted by another engine when the names were read, and stored when they are recorded."""
    quota, path = DirQuota(CAPACITY, ROW), RowPath.of(OURS, KEYS[0])
    quota.record(path, row_status())
    directory, known = quota.begin_dir(path[:2], 1, trust=False)
    assert known is not None
    quota.record(path, row_status(), stored=True)
    quota.end_dir(directory, NOTHING, known, 0, 1)
    assert quota.get(path) is not None


def test_row_deleted_while_its_directory_is_read_stays_unknown() -> None:
    """It was there when the names were read."""
    quota, path = DirQuota(CAPACITY, ROW), RowPath.of(OURS, KEYS[0])
    directory, _ = quota.begin_dir(path[:2], 1, trust=False)
    quota.record(path, row_status())
    quota.record(path, None)
    found = FoundRows(key_array([encoded(path.key)]), np.zeros(1, COLUMNS), np.zeros(1, np.uint8))
    quota.end_dir(directory, found, key_array([]), 0, 1)
    assert quota.get(path) is None


def test_row_that_is_found_before_its_store_has_ended_counts_once() -> None:
    """Its file has the name some time before the mover's loop learns of it: else others are evicted for it."""
    quota, path = DirQuota(CAPACITY, ROW), RowPath.of(OURS, KEYS[0])
    number, added_bytes, _ = quota.begin_scan()
    quota.end_scan(number, added_bytes, set(), 0)
    assert quota.reserve(1) is Reservation.GRANTED
    used_bytes = quota.used_bytes
    quota.begin_stores([path])
    directory, _ = quota.begin_dir(path[:2], 1, trust=False)
    columns = np.zeros(1, COLUMNS)
    columns["blocks"] = ROW // BLOCK_BYTES
    found = FoundRows(key_array([encoded(path.key)]), columns, np.zeros(1, np.uint8))
    quota.end_dir(directory, found, key_array([]), 0, 1)
    assert quota.used_bytes == used_bytes
    quota.record(path, row_status(), stored=True)
    quota.release(path)
    assert quota.used_bytes == used_bytes
    assert quota.get(path) is not None


def test_room_that_was_granted_is_not_made_again() -> None:
    """While it is made for all rows that wait, a part of them may begin."""
    quota = DirQuota(MARGIN_BYTES + 20 * ROW, ROW)
    number, added_bytes, _ = quota.begin_scan()
    quota.end_scan(number, added_bytes, set(), 10 * ROW)
    assert quota.reserve(12, 12) is Reservation.WAIT
    assert quota.excess_bytes() == 2 * ROW
    number, added_bytes, _ = quota.begin_scan()
    quota.end_scan(number, added_bytes, set(), 6 * ROW)  # four rows were deleted
    assert quota.reserve(12, 8) is Reservation.GRANTED
    assert quota.excess_bytes() <= 8 * 512, "what names in directories may take"


def test_unchanged_directories_are_not_read_but_all_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At rest a scan costs one `open` a fan-out directory, and reads the names in a few of them."""
    quota = DirQuota(CAPACITY, ROW)
    directory = RowDirectory(tmp_path, quota)
    directory.prepare(OURS)
    long_ago_s = time.time() - 3600
    for number in range(64):
        fanout = tmp_path / OURS / f"{number:02x}"
        fanout.mkdir(0o700)
        os.utime(fanout, (long_ago_s,) * 2)
    log_once = LogOnce(logging.getLogger(__name__))
    scanner = DirScanner(directory, quota, Evictor(directory, quota, log_once), log_once)
    scanner.served = OURS
    scanner._scan()
    read: list[str] = []
    names = Folder.names

    def read_names(folder: Folder) -> list[str]:
        read.append(folder.path.name)
        return names(folder)

    monkeypatch.setattr(Folder, "names", read_names)
    for _ in range(3):
        read.clear()
        scanner._scan()
        assert len(set(read) - {INCOMING}) == _DISTRUSTED_DIRS
    assert len({name for name, known in quota.directories() if known.read_in > 1}) == 64
    directory.close()


def test_other_namespaces_are_scanned_in_turn_at_rest_and_all_before_stores_go_on(tmp_path: Path) -> None:
    quota = DirQuota(CAPACITY, ROW)
    directory = RowDirectory(tmp_path, quota)
    directory.prepare(OURS)
    others = [f"{number:032x}" for number in range(1, 5)]
    log_once = LogOnce(logging.getLogger(__name__))
    scanner = DirScanner(directory, quota, Evictor(directory, quota, log_once), log_once)
    scanner.served = OURS

    def add_row_everywhere() -> None:
        for namespace in (OURS, *others):
            path = directory.absolute(RowPath.of(namespace, KEYS[len(list((tmp_path / namespace).rglob("*.row")))]))
            path.parent.mkdir(0o700, parents=True, exist_ok=True)
            path.parent.parent.chmod(0o700)
            path.write_bytes(bytes(ROW))

    def known() -> int:
        return sum(rows.rows.present for _, rows in quota.directories())

    add_row_everywhere()
    scanner._scan()
    assert known() == 5
    add_row_everywhere()
    for expected in (7, 8, 9, 10):
        scanner._scan()
        assert known() == expected
    add_row_everywhere()
    assert quota._unscanned_bytes == 0
    quota._unscanned_bytes = quota._max_unscanned_bytes
    assert quota.reserve(1) is Reservation.WAIT
    scanner._scan()
    assert known() == 15
    assert quota._unscanned_bytes == 0
    directory.close()
