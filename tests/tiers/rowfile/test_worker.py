"""The native worker of row files (csrc/row_files.c): what becomes of a row, whatever its calls answer."""

from __future__ import annotations

import errno
import os
import select
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.seal import Sealer, Verdict
from nixl_tiers.tiers.base import Move
from nixl_tiers.tiers.disk import direct_works
from nixl_tiers.tiers.folder import Folder
from nixl_tiers.tiers.rowfile.names import RowPath, TempNames
from nixl_tiers.tiers.rowfile.worker import Moved, Place, Trouble, Worker
from tests.mover.harness import NAMESPACE, key_of
from tests.support.hooked import files_calls

GEOMETRY = Geometry(2, 66_000, 4)
ROWS = 8
NOW = 1_700_000_000
KEY = key_of(0)
PATH = RowPath.of(NAMESPACE.hex(), KEY)
LOSSES = 50


class Rig:
    """A worker, and a region over the rows of a directory. `hook`: what a test has calls do."""

    def __init__(self, path: Path) -> None:
        path.mkdir(mode=0o700, exist_ok=True)
        self.path = path
        self.region = HostRegion.create(GEOMETRY, ROWS)
        self.worker = Worker(self.region, GEOMETRY)
        self.sealer = Sealer(GEOMETRY, NAMESPACE, 7)
        self.names = TempNames()
        base = Folder.base(path)
        self.base = base
        self.place = Place(base.descriptor, base.uid, self.names.prefix, direct_works(base), NOW)
        self.calls: list[tuple[str, str, str, int]] = []
        self.answer: Callable[[str, str, int], int] = lambda *_: 0

    def hook(self, call: str, descriptor: int, name: str, flags: int) -> int:
        """`place`: which descriptor, by its path."""
        place = ""
        with suppress(OSError):
            place = Path(f"/proc/self/fd/{descriptor}").readlink().name
        self.calls.append((call, place, name, flags))
        return self.answer(call, name or place, flags)

    @property
    def row(self) -> Path:
        return self.path / PATH.namespace / PATH.fanout / PATH.name

    @property
    def unfinished(self) -> list[str]:
        with suppress(FileNotFoundError):
            return [file.name for file in (self.path / ".incoming").iterdir()]
        return []

    def begin(self, moves: Sequence[Move], *, write: bool, **place: Any) -> Callable[[], list[Moved]]:
        steps = self.worker.move(
            moves, self.names.take(len(moves)), replace(self.place, **place), self.sealer, write=write
        )
        condition = next(steps)

        def end() -> list[Moved]:
            while not condition():
                assert select.select([self.worker.fd], [], [], 60.0)[0], "a unit does not end"
                self.worker.poll()
            try:
                next(steps)
            except StopIteration as ended:
                return list(ended.value)
            raise AssertionError("one step too many")

        return end

    def store(self, number: int = 0, **place: Any) -> Moved:
        self.region.rows_view[number] = noise(number)
        (moved,) = self.begin([Move(number, 0, key_of(number), seal=True)], write=True, **place)()
        return moved

    def load(self, number: int = 0, **place: Any) -> Moved:
        self.region.rows_view[number] = 0xEE
        (moved,) = self.begin([Move(number, 0, key_of(number))], write=False, **place)()
        return moved

    def close(self) -> None:
        self.worker.close()
        self.worker.close()
        self.base.close()
        self.region.close()


@pytest.fixture
def rig(tmp_path: Path, hooked: str) -> Iterator[Rig]:
    made: list[Rig] = []
    with files_calls(hooked, lambda *call: made[0].hook(*call) if made else 0):
        made.append(Rig(tmp_path / "kv"))
        yield made[0]
        made[0].answer = lambda *_: 0
        made[0].close()


def noise(number: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(number).integers(0, 256, GEOMETRY.row_bytes, np.uint8)


def walking(answer: Callable[[str, str, int], int] = lambda *_: 0) -> Callable[[str, str, int], int]:
    """Each directory is opened in the one above it, since the kernel, or a sandbox, has no openat2."""
    return lambda call, name, flags: errno.ENOSYS if call == "openat2" else answer(call, name, flags)


def first(answer: int, *wanted: str) -> Callable[[str, str, int], int]:
    """The first call of this name, or with names that end like that, is answered so."""
    left = [answer]

    def said(call: str, name: str, _: int) -> int:
        fits = call == wanted[0] and (len(wanted) == 1 or name.endswith(wanted[1]))
        return left.pop() if left and fits else 0

    return said


# --- whole rows -------------------------------------------------------------------------------------------------------


def test_rows_are_stored_and_loaded_as_python_seals_them(rig: Rig) -> None:
    wanted = [noise(number) for number in range(ROWS)]
    moves = []
    for number, row in enumerate(wanted):
        rig.region.rows_view[number] = row
        missing = number % (GEOMETRY.sub_blocks + 1)
        rig.sealer.seal(row, key_of(number), present=GEOMETRY.present(missing), sealed_at=NOW)
        moves.append(Move(number, 0, key_of(number), seal=True, missing=missing))
    stored = rig.begin(moves, write=True)()
    assert [each.verdict for each in stored] == [Verdict.OK] * ROWS
    for number, row in enumerate(wanted):
        path = RowPath.of(NAMESPACE.hex(), key_of(number))
        file = rig.path / path.namespace / path.fanout / path.name
        assert file.read_bytes() == row.tobytes()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert [stat.S_IMODE(parent.stat().st_mode) for parent in (file.parent, file.parents[1])] == [0o700] * 2
    rig.region.rows_view[:] = 0xEE
    loaded = rig.begin(moves, write=False)()
    assert [(each.verdict, each.sealed_at) for each in loaded] == [(Verdict.OK, NOW)] * ROWS
    assert np.array_equal(rig.region.rows_view, wanted)
    assert not rig.unfinished


def test_name_of_a_row_is_only_read_and_gets_a_file_that_is_whole_and_closed(rig: Rig) -> None:
    for _ in range(2):  # the second one replaces the first
        assert rig.store().verdict is Verdict.OK
    assert rig.load().verdict is Verdict.OK
    written = [(place, name) for call, place, name, flags in rig.calls if call == "openat" and flags & 3 != os.O_RDONLY]
    assert [place for place, _ in written] == [".incoming"] * 2
    assert all(name.startswith(rig.names.prefix) for _, name in written)
    for _, name in written:
        own = [call for call, place, named, _ in rig.calls if name in (place, named)]
        assert own[0] == "openat"
        assert own[-1] == "close"
    order = [call for call, place, *_ in rig.calls if call == "renameat" or place.endswith(".tmp")]
    assert [call for call in order if call in ("close", "renameat")] == ["close", "renameat"] * 2
    assert all(flags & os.O_NOFOLLOW for call, _, _, flags in rig.calls if call == "openat")
    assert all(flags & os.O_DIRECTORY for call, _, name, flags in rig.calls if call == "openat" and "." not in name[1:])


@pytest.mark.parametrize("at", [0, 66_001, -1, -20, -160])
def test_verdicts_are_those_of_python(rig: Rig, at: int) -> None:
    rig.store()
    raw = bytearray(rig.row.read_bytes())
    raw[at] ^= 1
    rig.row.write_bytes(raw)
    wanted = rig.sealer.verify(np.frombuffer(raw, np.uint8), KEY)
    assert wanted is not Verdict.OK
    assert rig.load().verdict is wanted


def test_row_that_cannot_be_read_leaves_the_region_alone(rig: Rig) -> None:
    """What a server sends after the mover was killed lands in no row."""
    rig.store()
    rig.answer = lambda call, *_: -errno.EIO if call == "pread" else 0
    assert rig.load()[:2] == (Trouble.NOT_MOVED, errno.EIO)
    assert set(rig.region.rows_view[0].tolist()) == {0xEE}


def test_rows_outside_the_region_are_refused(rig: Rig) -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        rig.begin([Move(ROWS, 0, KEY)], write=False)


# --- stores that fail -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("openat", errno.ENOSPC),
        ("openat", errno.ESTALE),
        ("pwrite", errno.EIO),
        ("close", -errno.EDQUOT),
        ("renameat", errno.EROFS),
        ("fstat", errno.EIO),
    ],
)
@pytest.mark.parametrize("replaced", [False, True])
def test_store_that_fails_leaves_the_row_as_it_was(rig: Rig, call: str, error: int, *, replaced: bool) -> None:
    if replaced:
        rig.store()
    before = rig.row.stat().st_ino if replaced else None
    rig.answer = first(error, call, ".row" if call == "renameat" else ".tmp")
    assert rig.store()[:2] == (Trouble.NOT_MOVED, abs(error))
    assert (rig.row.stat().st_ino if rig.row.exists() else None) == before
    assert not rig.unfinished


def test_name_of_an_unfinished_file_that_exists_is_left_to_it(rig: Rig) -> None:
    (rig.path / ".incoming").mkdir(mode=0o700)
    other = rig.path / ".incoming" / f"{rig.names.prefix}0.tmp"
    other.write_text("another's")
    assert rig.store().verdict is Verdict.OK
    assert other.read_text() == "another's"
    (name,) = [name for call, _, name, _ in rig.calls if call == "openat" and name.endswith(".tmp")][1:]
    assert rig.names.is_in_use(name)


@pytest.mark.parametrize(("when", "level"), [("renameat", ""), ("openat", PATH.namespace), ("openat", PATH.fanout)])
def test_directories_that_others_remove_meanwhile_are_made_again(rig: Rig, when: str, level: str) -> None:
    """Whoever deletes the last row there removes what is empty, at any moment before the rename."""
    left = LOSSES

    def removed(call: str, name: str, _: int) -> int:
        nonlocal left
        if left and call == when and name.endswith(level or ".row"):
            left -= 1
            with suppress(OSError):
                (rig.path / PATH.namespace / PATH.fanout).rmdir()
            with suppress(OSError):
                (rig.path / PATH.namespace).rmdir()
        return 0

    rig.answer = removed
    moved = rig.store()
    assert left == 0
    assert moved.verdict is Verdict.OK
    assert len([call for call, *_ in rig.calls if call == "mkdirat"]) >= LOSSES // 2
    rig.answer = lambda *_: 0
    assert rig.load().verdict is Verdict.OK


# --- what is foreign --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [".incoming", PATH.namespace, PATH.fanout])
@pytest.mark.parametrize("foreign", ["link", "file", "open to all"])
def test_directory_that_may_be_foreign_is_neither_written_nor_read(
    rig: Rig, tmp_path: Path, level: str, foreign: str
) -> None:
    rig.store()
    before = rig.row.read_bytes()
    where = rig.path / PATH.namespace / PATH.fanout if level == PATH.fanout else rig.path / level
    if foreign == "open to all":
        where.chmod(0o777)
    else:
        where.rename(tmp_path / "moved")
        where.symlink_to(tmp_path / "moved") if foreign == "link" else where.write_text("")
    error = errno.EPERM if foreign == "open to all" else errno.ENOTDIR
    assert rig.store()[:2] == (Trouble.NOT_MOVED, error)
    if level != ".incoming":
        if foreign == "open to all":
            assert rig.load().verdict is Verdict.OK, "the file is this user's, and its seal is good"
            rig.answer = walking()
        assert rig.load()[:2] == (Trouble.NOT_MOVED, error)
    assert next(tmp_path.rglob(PATH.name)).read_bytes() == before


def test_what_is_no_file_of_this_user_is_a_miss_and_stays(rig: Rig, tmp_path: Path) -> None:
    rig.store()
    raw = rig.row.read_bytes()

    def link() -> None:
        (tmp_path / "row").write_bytes(raw)
        rig.row.symlink_to(tmp_path / "row")

    def another_user() -> None:
        rig.row.write_bytes(raw)
        os.chown(rig.row, 12345, -1)

    kinds: list[Callable[[], object]] = [link, lambda: os.mkfifo(rig.row)]
    kinds += [another_user] if os.geteuid() == 0 else []
    for make in (*kinds, rig.row.mkdir):
        rig.row.unlink()
        make()
        assert rig.load().verdict is Trouble.FOREIGN
        assert os.path.lexists(rig.row)


# --- loads that fail --------------------------------------------------------------------------------------------------


def test_nothing_is_missing_where_the_path_itself_is_stale(rig: Rig) -> None:
    rig.store()
    for level in (PATH.name, PATH.namespace):
        stale = (("openat", level), ("fstat", "kv"))
        rig.answer = walking(lambda call, name, _, stale=stale: errno.ESTALE if (call, name) in stale else 0)  # type: ignore[misc]
        assert rig.load()[:2] == (Trouble.NOT_MOVED, errno.ESTALE)


@pytest.mark.parametrize("call", ["openat", "pread", "fstat"])
@pytest.mark.parametrize("error", [errno.EIO, errno.EACCES])
def test_row_that_cannot_be_read_has_failed_and_is_not_missing(rig: Rig, call: str, error: int) -> None:
    rig.store()
    rig.answer = first(error, call, ".row")
    assert rig.load()[:2] == (Trouble.NOT_MOVED, error)


@pytest.mark.parametrize("size", [0, 4096, GEOMETRY.row_bytes - 4096])
def test_file_that_is_cut_while_it_is_read_is_no_row(rig: Rig, size: int) -> None:
    rig.store()
    before = rig.row.stat().st_ino

    def cut(call: str, *_: object) -> int:
        if call == "pread":
            os.truncate(rig.row, size)
        return 0

    rig.answer = cut
    moved = rig.load()
    assert moved.verdict is Trouble.CUT
    assert moved.inode == before


@pytest.mark.parametrize("call", ["openat", "pread"])
@pytest.mark.parametrize("error", [errno.EINVAL, errno.EOPNOTSUPP])
def test_file_that_takes_no_direct_read_is_read_without(rig: Rig, call: str, error: int) -> None:
    rig.store()
    direct = []

    def refusing(called: str, name: str, flags: int) -> int:
        if called == "openat" and name == PATH.name:
            direct.append(bool(flags & os.O_DIRECT))
        return error if called == call and name == PATH.name and direct[-1] else 0

    rig.answer = refusing
    assert rig.load(direct=True).verdict is Verdict.OK
    assert direct == [True, False]
    rig.answer = lambda called, name, _: error if (called, name) == (call, PATH.name) else 0
    assert rig.load(direct=True)[:2] == (Trouble.NOT_MOVED, error), "it is tried once without"
