"""What the thread that sweeps finds in a directory of row files of which a part cannot be read, or is foreign, or is
changed by others meanwhile; and what it deletes."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from nixl_tiers.base.chunk import object_name
from nixl_tiers.base.manifest import MANIFEST_NAME
from nixl_tiers.tiers.disk import INCOMING
from nixl_tiers.tiers.folder import Folder
from nixl_tiers.tiers.rowfile.budget import Budget
from nixl_tiers.tiers.rowfile.contents import Contents
from nixl_tiers.tiers.rowfile.directory import RowDirectory
from nixl_tiers.tiers.rowfile.evict import FANOUTS, Evictor, Row
from nixl_tiers.tiers.rowfile.names import ORPHAN_S, RowPath
from tests.tiers.rowfile.rows import FILE, KEYS, OTHER, OURS, PATHS, ROW, make

BAD = PATHS[0]


@pytest.fixture
def _rows(tmp_path: Path) -> None:
    for path in PATHS:
        make(tmp_path, path)


def found(contents: Contents) -> dict[RowPath, Row]:
    rows = [
        row for namespace in contents.namespaces() for fanout in FANOUTS for row in contents.rows(namespace, fanout)
    ]
    return {RowPath(row.namespace, row.fanout, bytes.fromhex(row.name[:-4])): row for row in rows}


def row_of(contents: Contents, path: RowPath) -> Row:
    return found(contents)[path]


def fail_in(monkeypatch: pytest.MonkeyPatch, method: str, bad: str) -> None:
    """A method of `Folder` fails for this name, with an error of the medium."""
    real = getattr(Folder, method)

    def failing(folder: Folder, *args: Any, **kwargs: Any) -> Any:
        if bad == (args[0] if args else folder.path.name):
            raise OSError(errno.EIO, os.strerror(errno.EIO), bad)
        return real(folder, *args, **kwargs)

    monkeypatch.setattr(Folder, method, failing)


def evict_all(contents: Contents) -> None:
    budget = Budget(0, ROW)
    for _ in range(2):
        budget.reserve()
        budget.begin_sweep()
        budget.end_sweep(contents.sweep())
    assert not any(Evictor(contents, budget, Random(0)).steps())


# --- a sweep ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_rows")
@pytest.mark.parametrize(
    ("method", "bad"),
    [("folder", BAD.fanout), ("names", BAD.fanout), ("folder", OURS), ("folder", INCOMING), ("names", INCOMING)],
)
def test_sweep_that_cannot_read_everything_is_none(
    contents: Contents, monkeypatch: pytest.MonkeyPatch, method: str, bad: str
) -> None:
    fail_in(monkeypatch, method, bad)
    assert contents.sweep() is None


@pytest.mark.usefixtures("_rows")
@pytest.mark.parametrize("what", ["directory", "namespace"])
def test_directory_of_another_user_or_open_to_others_is_left_alone(
    contents: Contents, tmp_path: Path, what: str
) -> None:
    place = tmp_path / OURS / (BAD.fanout if what == "directory" else "")
    place.chmod(0o777)
    left = {path for path in PATHS if path.namespace == OTHER or (what == "directory" and path.fanout != BAD.fanout)}
    assert set(found(contents)) == left
    assert contents.sweep().rows[OTHER][0] == len(KEYS)
    evict_all(contents)
    assert len(list(tmp_path.rglob("*.row"))) == len(PATHS) - len(left)


@pytest.mark.usefixtures("_rows")
@pytest.mark.parametrize("bad", [OTHER, BAD.fanout, INCOMING])
def test_directory_of_another_user_that_cannot_be_opened_hides_no_other(
    contents: Contents, monkeypatch: pytest.MonkeyPatch, bad: str
) -> None:
    """Whoever may write to the path may make one: else no row would be stored any more, in any engine."""
    opened = os.open

    def closed(name: Any, *args: Any, **kwargs: Any) -> int:
        if name == bad:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(name, *args, **kwargs)

    monkeypatch.setattr(os, "open", closed)
    assert contents.sweep() is None, "its own directories are to be opened"
    monkeypatch.setattr(Folder, "_wrong", lambda _, status: "is another's" if status is foreign else "")
    foreign = object()
    stat = Folder.stat
    monkeypatch.setattr(Folder, "stat", lambda folder, name: foreign if name == bad else stat(folder, name))
    swept = contents.sweep()
    assert swept is not None
    if bad == OTHER:
        assert swept.rows == {OURS: (len(KEYS), ROW)}


@pytest.mark.parametrize("level", ["namespace", "directory"])
def test_links_are_not_followed(contents: Contents, tmp_path: Path, level: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    make(tmp_path / "elsewhere", BAD)
    place = tmp_path / OURS
    if level == "namespace":
        place.rmdir()
        place.symlink_to(tmp_path / "elsewhere" / OURS)
    else:
        (place / BAD.fanout).symlink_to(tmp_path / "elsewhere" / OURS / BAD.fanout)
    assert found(contents) == {}
    assert contents.sweep().rows.get(OURS, (0, 0))[0] == 0
    assert contents.unlink([Row(*BAD[:2], BAD.name, 0, ROW)]) == []
    assert len(list((tmp_path / "elsewhere").rglob("*.row"))) == 1


@pytest.mark.usefixtures("_rows")
def test_foreign_file_with_the_name_of_a_row_in_another_directory_is_no_row(contents: Contents, tmp_path: Path) -> None:
    wrong = next(key for key in KEYS if object_name(key)[:2] != BAD.fanout)
    foreign = make(tmp_path, BAD, used_s=0).with_name(f"{wrong.hex()}.row")
    foreign.write_bytes(bytes(FILE))
    os.utime(foreign, (0, 0))  # the first to be evicted
    other = foreign.with_name("thesis.tex")
    other.write_bytes(b"")
    assert contents.sweep().rows[OURS] == (len(KEYS) + 1, ROW)
    assert set(found(contents)) == {*PATHS}
    evict_all(contents)
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted([foreign, other])


# --- unfinished files -------------------------------------------------------------------------------------------------


def test_own_unfinished_file_that_could_not_be_deleted_counts_and_is_deleted_later(
    directory: RowDirectory, contents: Contents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the engine that wrote it lives on."""
    numbers = directory.temp_names.take(1)
    name = f"{directory.temp_names.prefix}{numbers[0]}.tmp"
    path = tmp_path / INCOMING / name
    path.write_bytes(bytes(FILE))
    assert contents.sweep().other_bytes == 0, "it is being written, and its room is reserved"
    directory.temp_names.release(numbers)
    with monkeypatch.context() as patch:
        fail_in(patch, "unlink", name)
        assert contents.sweep().other_bytes == ROW
    assert contents.sweep().other_bytes == 0
    assert not path.exists()


def test_unfinished_files_of_others_count_until_they_are_old(
    directory: RowDirectory, contents: Contents, tmp_path: Path
) -> None:
    name = "elsewhere-" + f"{directory.temp_names.prefix}0.tmp".partition("-")[2]
    path = tmp_path / INCOMING / name
    path.write_bytes(b"")
    now_s = directory.server_time.now_s()
    os.utime(path, (now_s - ORPHAN_S + 60,) * 2)
    assert contents.sweep().other_bytes == ROW, "it may grow to a row"
    os.utime(path, (now_s - ORPHAN_S - 60,) * 2)
    directory.writes = False
    assert contents.sweep().other_bytes == ROW, "a reader deletes nothing"
    directory.writes = True
    assert contents.sweep().other_bytes == 0
    assert not path.exists()


def test_unfinished_files_of_dead_processes_of_this_machine_go_at_once(
    directory: RowDirectory, contents: Contents, tmp_path: Path
) -> None:
    host, namespace, own, token, _ = directory.temp_names.prefix.split("-")
    none = str(1 << 23)  # no process of Linux has this pid
    names = {
        f"{host}-{namespace}-{none}-01234567-0.tmp": True,
        f"{host}-{namespace}-{own}-01234567-0.tmp": False,
        f"{host}-01234567-{none}-01234567-0.tmp": False,  # of another container
        f"{host}-{namespace}-{none}-{token}-0.tmp.bak": False,
        "thesis.tmp": False,
    }
    for name in names:
        (tmp_path / INCOMING / name).write_bytes(b"")
    contents.sweep()
    assert {name: not (tmp_path / INCOMING / name).exists() for name in names} == names
    os.utime(tmp_path / INCOMING / "thesis.tmp", (1, 1))
    contents.sweep()
    assert (tmp_path / INCOMING / "thesis.tmp").exists()


# --- rows that are deleted --------------------------------------------------------------------------------------------


def used(file: Path) -> None:
    os.utime(file, (1, 1))


def replaced(file: Path) -> None:
    file.with_suffix(".new").write_bytes(bytes(FILE))
    file.with_suffix(".new").rename(file)


@pytest.mark.parametrize(("change", "stays"), [(used, True), (replaced, True), (Path.unlink, False)])
def test_row_that_was_used_since_or_is_another_by_now_is_not_deleted(
    contents: Contents, tmp_path: Path, change: Callable[[Path], object], stays: bool
) -> None:
    """Nor is one that another engine has deleted this one's."""
    files = [make(tmp_path, path, used_s=0) for path in PATHS[:2]]
    rows = [row_of(contents, path) for path in PATHS[:2]]
    change(files[0])
    assert contents.unlink(rows) == rows[1:]
    assert files[0].exists() == stays
    assert not files[1].exists()


@pytest.mark.usefixtures("_rows")
def test_directories_without_rows_go_but_for_those_that_are_served(contents: Contents, tmp_path: Path) -> None:
    for namespace in (OURS, OTHER):
        (tmp_path / namespace / MANIFEST_NAME).write_bytes(b"{}")
    contents.sweep()
    assert (tmp_path / OTHER / MANIFEST_NAME).exists()
    evict_all(contents)
    contents.sweep()
    assert not (tmp_path / OTHER).exists()
    assert (tmp_path / OURS / MANIFEST_NAME).exists()
    assert (tmp_path / OURS / BAD.fanout).exists()


# --- ages -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead_s", [86_400.0, -86_400.0])
def test_time_is_the_servers_whatever_this_machine_says(
    directory: RowDirectory, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    real_s = time.time()
    monkeypatch.setattr(time, "time", lambda: real_s + ahead_s)
    directory.server_time._read = None
    directory.refresh_time()
    assert abs(directory.server_time.now_s() - real_s) < 600
