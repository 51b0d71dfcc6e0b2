"""What the scanner finds in a directory of row files of which a part cannot be read, or is unusual."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from nixl_tiers.base.chunk import object_name
from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.base.manifest import MANIFEST_NAME
from nixl_tiers.tiers.disk import INCOMING
from nixl_tiers.tiers.folder import Folder
from nixl_tiers.tiers.rowfile.directory import RowDirectory
from nixl_tiers.tiers.rowfile.eviction import Evictor
from nixl_tiers.tiers.rowfile.names import RowPath
from nixl_tiers.tiers.rowfile.quota import DirQuota, Reservation, age_from
from nixl_tiers.tiers.rowfile.scanner import DirScanner

NAMESPACE, OTHER = "0" * 32, "f" * 32
ROW = 4096
CAPACITY = 64 << 20
KEYS = [b"k%03d" % number for number in range(1000) if object_name(b"k%03d" % number)[:2] in ("00", "01", "02")]
PATHS = [RowPath.of(namespace, key) for namespace in (NAMESPACE, OTHER) for key in KEYS]
BAD = PATHS[0]


@pytest.fixture
def quota() -> DirQuota:
    return DirQuota(CAPACITY, ROW)


@pytest.fixture
def scanner(directory: RowDirectory, quota: DirQuota) -> DirScanner:
    log_once = LogOnce(logging.getLogger(__name__))
    scanner = DirScanner(directory, quota, Evictor(directory, quota, log_once), log_once)
    scanner.served = NAMESPACE
    return scanner


@pytest.fixture
def _rows(directory: RowDirectory) -> None:
    """Another engine has stored these."""
    for path in PATHS:
        file = directory.absolute(path)
        for parent in (file.parent.parent, file.parent):
            parent.mkdir(0o700, exist_ok=True)
        file.write_bytes(bytes(ROW))
    for path in PATHS:  # else they were changed too recently to be skipped in the next scan
        os.utime(directory.absolute(path).parent, (0, 0))


def fail_in(monkeypatch: pytest.MonkeyPatch, method: str, bad: str) -> None:
    """A method of `Folder` fails for this name, with an error of the medium."""
    real = getattr(Folder, method)

    def failing(folder: Folder, *args: Any, **kwargs: Any) -> Any:
        if bad == (args[0] if args else folder.path.name):
            raise OSError(errno.EIO, os.strerror(errno.EIO), bad)
        return real(folder, *args, **kwargs)

    monkeypatch.setattr(Folder, method, failing)


def known(quota: DirQuota) -> set[RowPath]:
    return {path for path in PATHS if quota.get(path) is not None}


@pytest.mark.usefixtures("_rows")
@pytest.mark.parametrize(
    "fault",
    [
        ("stat", BAD.name, {path for path in PATHS if path.key == BAD.key}),
        ("folder", BAD.fanout, {path for path in PATHS if path.fanout == BAD.fanout}),
        ("names", BAD.fanout, {path for path in PATHS if path.fanout == BAD.fanout}),
        ("stat", NAMESPACE, set()),
        ("folder", NAMESPACE, {path for path in PATHS if path.namespace == NAMESPACE}),
    ],
)
def test_entry_that_cannot_be_read_hides_no_others(
    scanner: DirScanner,
    quota: DirQuota,
    monkeypatch: pytest.MonkeyPatch,
    fault: tuple[str, str, set[RowPath]],
) -> None:
    method, bad, hidden = fault
    monkeypatch.setattr("nixl_tiers.tiers.rowfile.scanner._DISTRUSTED_DIRS", 0)
    with monkeypatch.context() as patch:
        fail_in(patch, method, bad)
        scanner._scan_all()
        assert known(quota) == {*PATHS} - hidden
        used_bytes = quota.used_bytes
    scanner._scan_all()
    assert known(quota) == {*PATHS}
    assert method != "stat" or quota.used_bytes == used_bytes  # a name counted as a row
    with monkeypatch.context() as patch:
        fail_in(patch, method, bad)
        scanner._scan_all()
        assert known(quota) == {*PATHS}
    assert quota._rows_bytes == ROW * len(PATHS)


@pytest.mark.parametrize("method", ["stat", "unlink"])
def test_unfinished_file_that_cannot_be_deleted_counts(
    scanner: DirScanner, quota: DirQuota, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    scanner._scan_all()
    before = quota.used_bytes
    orphan = tmp_path / INCOMING / f"probe-{16 * '0'}.tmp"
    orphan.write_bytes(bytes(ROW))
    os.utime(orphan, (0, 0))
    with monkeypatch.context() as patch:
        fail_in(patch, method, orphan.name)
        scanner._scan_all()
    assert quota.used_bytes >= before + ROW
    scanner._scan_all()
    assert quota.used_bytes == before
    assert not orphan.exists()


def test_own_unfinished_file_that_could_not_be_deleted_counts_and_is_deleted_later(
    directory: RowDirectory, scanner: DirScanner, quota: DirQuota, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the engine that wrote it lives on."""
    temporary = directory.temp_file()
    os.close(temporary.open())
    os.truncate(temporary.path, ROW)
    path = temporary.path
    scanner._scan_all()
    assert path.exists()  # it is being written, and its room is reserved
    before = quota.used_bytes
    temporary.close()
    with monkeypatch.context() as patch:
        fail_in(patch, "unlink", path.name)
        scanner._scan_all()
        assert quota.used_bytes == before + ROW
    scanner._scan_all()
    assert not path.exists()
    assert quota.used_bytes == before


@pytest.fixture(params=[-(1 << 34), 0, 1 << 33, 1 << 34])  # int64 nanoseconds end at 9.2 * 10**9 seconds
def _impossible(_rows: None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that has a row's name has an absurd time and size."""
    real, looks = Folder.stat, iter(range(20))

    def stat(folder: Folder, name: str) -> os.stat_result:
        status = real(folder, name)
        if name != BAD.name:
            return status
        assert next(looks, None) is not None  # not without end
        times = {"st_mtime_ns": request.param * 10**9, "st_blocks": 0}
        return os.stat_result((*status[:6], 3 << 40, 0, request.param, 0), times)

    monkeypatch.setattr(Folder, "stat", stat)


@pytest.mark.usefixtures("_impossible")
def test_file_of_an_impossible_time_and_size_is_recorded_and_deleted(
    directory: RowDirectory, scanner: DirScanner, quota: DirQuota
) -> None:
    scanner._scan_all()
    status = directory.stat(BAD)
    assert status is not None
    quota.record(BAD, status, begins := age_from(None, status))
    quota.record_age(BAD, begins)
    row = quota.get(BAD)
    assert row is not None
    assert row.age_from == begins
    directory.delete_unless_used(BAD)
    assert not directory.absolute(BAD).exists()


def reserve_all(quota: DirQuota) -> int:
    """How many rows find room now."""
    rows = 0
    while quota.reserve(1) is Reservation.GRANTED:
        rows += 1
    return rows


def test_scans_that_fail_give_no_room(scanner: DirScanner, quota: DirQuota, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may have filled the directory since one succeeded."""
    most = quota._max_unscanned_bytes // ROW
    with monkeypatch.context() as patch:
        fail_in(patch, "folder", INCOMING)
        scanner._scan_all()
        assert reserve_all(quota) == 0
    scanner._scan_all()
    assert reserve_all(quota) == most
    with monkeypatch.context() as patch:
        fail_in(patch, "folder", INCOMING)
        for _ in range(3):
            scanner._scan_all()
            assert reserve_all(quota) == 0
        assert quota.reserve(1) is Reservation.REFUSED
        quota.begin_scan()
        assert reserve_all(quota) == 0
    scanner._scan_all()
    assert reserve_all(quota) == most


def test_stores_go_on_while_a_scan_runs(scanner: DirScanner, quota: DirQuota) -> None:
    most = quota._max_unscanned_bytes // ROW
    scanner._scan_all()
    assert reserve_all(quota) == most
    number, added_bytes, everything = quota.begin_scan()
    assert everything
    assert reserve_all(quota) == most
    quota.end_scan(number, added_bytes, set(), 0)
    assert reserve_all(quota) == 0  # it did not see these


@pytest.mark.usefixtures("_rows")
def test_a_manifest_that_is_purged_during_a_scan_hides_no_rows(
    scanner: DirScanner, quota: DirQuota, directory: RowDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = directory.absolute(BAD).parent.parent / MANIFEST_NAME
    manifest.write_bytes(b"{}")
    scandir = os.scandir

    def purged(path: str) -> list[os.DirEntry[str]]:
        entries = sorted(scandir(path), key=lambda entry: entry.name != MANIFEST_NAME)
        manifest.unlink(missing_ok=True)
        return entries

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", purged)
        scanner._scan_all()
    assert known(quota) == set(PATHS)
