"""One row's file, while other processes remove directories that they find empty, and delete rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from nixl_tiers.tiers.folder import Folder
from nixl_tiers.tiers.rowfile.directory import RowDirectory, TempFile
from nixl_tiers.tiers.rowfile.names import RowPath
from nixl_tiers.tiers.rowfile.quota import DirQuota, Reservation

NAMESPACE = bytes(16).hex()
PATH = RowPath.of(NAMESPACE, b"key")
LOSSES = 50
ROW = 4096


@pytest.fixture
def quota() -> DirQuota:
    return DirQuota(1 << 30, ROW)


@pytest.fixture
def written(directory: RowDirectory) -> Iterator[TempFile]:
    with closing(directory.temp_file()) as temporary:
        os.close(temporary.open())
        yield temporary


class Remover:
    """Another process that has just deleted the last row there, and removes what is empty now: so many times."""

    def __init__(self, path: Path, times: int) -> None:
        self._namespace = path / NAMESPACE
        self.left = times

    def __call__(self) -> None:
        if self.left:
            self.left -= 1
            with suppress(FileNotFoundError):
                (self._namespace / PATH.fanout).rmdir()
            self._namespace.rmdir()


def test_directory_removed_between_opening_it_and_the_rename(
    directory: RowDirectory, written: TempFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove, rename = Remover(directory.path, LOSSES), Folder.rename

    def late(folder: Folder, name: str, to: Folder, new: str) -> None:
        remove()
        rename(folder, name, to, new)

    monkeypatch.setattr(Folder, "rename", late)
    directory.publish(written, PATH, 1)
    assert remove.left == 0
    assert directory.absolute(PATH).is_file()


@pytest.mark.parametrize("level", [NAMESPACE, PATH.fanout])
def test_directory_removed_right_after_it_was_made(
    directory: RowDirectory, written: TempFile, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    remove, make = Remover(directory.path, LOSSES), Folder.make

    def late(folder: Folder, name: str) -> bool:
        made = make(folder, name)
        if name == level:
            remove()
        return made

    monkeypatch.setattr(Folder, "make", late)
    directory.publish(written, PATH, 1)
    assert remove.left == 0
    assert directory.absolute(PATH).is_file()


def test_file_that_was_deleted_is_not_waited_for(directory: RowDirectory, written: TempFile) -> None:
    written.path.unlink()
    with pytest.raises(FileNotFoundError):
        directory.publish(written, PATH, 1)


def test_path_that_was_removed_is_not_made_again(directory: RowDirectory, written: TempFile, tmp_path: Path) -> None:
    """The unfinished file may be elsewhere by then, and there."""
    (tmp_path / NAMESPACE).rmdir()
    (tmp_path / ".incoming").rename(tmp_path.with_name("elsewhere"))
    tmp_path.rmdir()
    with pytest.raises(FileNotFoundError):
        directory.publish(written, PATH, 1)


@pytest.fixture
def full(directory: RowDirectory, quota: DirQuota, written: TempFile) -> DirQuota:
    """No more may be taken of the file system, and there is one row."""
    number, added_bytes, _ = quota.begin_scan()
    quota.end_scan(number, added_bytes, set(), 0)
    os.truncate(written.path, ROW)
    directory.publish(written, PATH, 1)
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
