"""What `nixl-tiers inspect` and `purge` find in a directory of row files, and delete beside engines that use it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nixl_tiers.base.manifest import MANIFEST_NAME, Description, Manifest
from nixl_tiers.tiers.rowfile.stored import FileNamespace
from nixl_tiers.tiers.stored import Problems
from tests.tiers.rowfile.rows import FILE, KEYS, OURS, PATHS, make

MINE = PATHS[: len(KEYS)]
NOBODY = 1 << 23  # no process of Linux has this pid


def served(place: Path, engine: str) -> Path:
    about = place / OURS / MANIFEST_NAME
    about.write_bytes(Manifest(OURS, Description("org/model").checked(), FILE, 0, engine, 1, 1).encode())
    about.chmod(0o600)
    return about


def used(row: Path) -> None:
    os.utime(row, (5, 5))


def replaced(row: Path) -> None:
    row.with_suffix(".new").write_bytes(row.read_bytes())
    os.utime(row.with_suffix(".new"), ns=(row.stat().st_mtime_ns,) * 2)
    row.with_suffix(".new").rename(row)


@pytest.mark.parametrize("change", [used, replaced])
def test_purge_leaves_rows_that_were_used_or_stored_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    rows = [make(tmp_path, path, used_s=1) for path in MINE]
    served(tmp_path, f"{socket.gethostname()}/{NOBODY}/abcd")
    foreign = rows[0].with_name("thesis.tex")
    foreign.write_text("precious")
    found, counted = FileNamespace.found(tmp_path, OURS, None), FileNamespace.counted
    assert (found.rows, found.holder) == (len(rows), "")

    def meanwhile(namespace: FileNamespace, problems: Problems) -> Iterator[Any]:
        for row in counted(namespace, problems):
            if row.file == rows[0].name:
                change(rows[0])
            yield row

    with monkeypatch.context() as patch:
        patch.setattr(FileNamespace, "counted", meanwhile)
        found.delete(lambda _: None)
    assert [row for row in rows if row.exists()] == rows[:1]
    assert (tmp_path / OURS / MANIFEST_NAME).exists(), "of the row that is left"
    FileNamespace.found(tmp_path, OURS, None).delete(lambda _: None)
    assert [*tmp_path.rglob("*")] == [tmp_path / OURS, foreign.parent, foreign]


@pytest.mark.parametrize(("pid", "keeps"), [(os.getpid(), True), (NOBODY, False)], ids=["lives", "gone"])
def test_manifest_stays_while_its_engine_lives(tmp_path: Path, pid: int, keeps: bool) -> None:
    make(tmp_path, MINE[0])
    about = served(tmp_path, f"{socket.gethostname()}/{pid}/abcd")
    found = FileNamespace.found(tmp_path, OURS, None)
    assert bool(found.holder) == keeps
    found.delete(lambda _: None)
    assert about.exists() == keeps
    assert not [*tmp_path.rglob("*.row")]


@pytest.mark.parametrize("content", ["", "about me", '{"name": "mine"}'])
def test_a_manifest_that_is_none_of_ours_stays(tmp_path: Path, content: str) -> None:
    home = tmp_path / ("cd" * 16)
    home.mkdir(mode=0o700)
    about = home / MANIFEST_NAME
    about.write_text(content)
    about.chmod(0o600)
    FileNamespace.found(tmp_path, home.name, None).delete(lambda _: None)
    assert about.exists()
    assert about.read_text() == content
