"""Row files with `write: off`: such a tier changes nothing there, whatever the directory holds, and needs no right
to."""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover.protocol import Down, Open, Opened
from nixl_tiers.tiers.rowfile.directory import ServerTime
from tests.mover.harness import NAMESPACE, MoverProcess, key_of
from tests.support.disks import run, tmpfs
from tests.support.file_tier import files_tier
from tests.system.tiers.file_tiers import AGE_S, GEOMETRY, ROWS, FileTier, load, make_tier, run_until, store

OTHER = bytes(reversed(range(16)))
OK, MISSING, CORRUPT = Outcome.OK, Outcome.MISSING, Outcome.CORRUPT
MIB = 1 << 20


def found(tier: FileTier, count: int = 6 * ROWS) -> list[int]:
    """Which of so many rows are there."""
    tier.found()
    assert tier.check_existence(1, [key_of(number) for number in range(count)], False)
    run_until(tier, lambda: bool(tier.existence_answers()))
    return sorted(int(entry.key[4:]) for entry in tier.found())


def fill(path: Path, region: HostRegion, count: int = ROWS, namespace: bytes = NAMESPACE) -> None:
    """A writer stores `count` rows, and ends."""
    tier = make_tier("files", path, region)
    tier.open(namespace, 0)
    for first in range(0, count, ROWS):
        numbers = range(first, min(first + ROWS, count))
        assert set(store(tier, region, numbers)) <= {OK, Outcome.FOUND}
    tier.close()


def reader(path: Path, region: HostRegion, **fields: Any) -> FileTier:
    tier = make_tier("files", path, region, write="off", **fields)
    tier.open(NAMESPACE, 0)
    return tier


def contents(path: Path) -> dict[str, tuple[int, str]]:
    """Size and digest of each file, and the directories."""
    return {
        str(each.relative_to(path)): (0, "")
        if each.is_dir()
        else (each.stat().st_size, hashlib.blake2b(each.read_bytes()).hexdigest())
        for each in path.rglob("*")
    }


@contextmanager
def unchanged(path: Path) -> Iterator[None]:
    before = contents(path)
    yield
    assert contents(path) == before


def use(tier: FileTier, region: HostRegion) -> list[Outcome]:
    """Do what engines do to a tier: load, delete, maintain, ask again."""
    outcomes = load(tier, region, range(ROWS))
    tier.delete([(number, key_of(number)) for number in range(2)])
    for _ in range(3):
        assert list(tier.maintain()) == []
        tier.poll()
    found(tier)
    return outcomes


def test_reader_keeps_what_other_models_stored(tmp_path: Path, region: HostRegion) -> None:
    fill(tmp_path, region)
    fill(tmp_path, region, namespace=OTHER)
    with unchanged(tmp_path):
        tier = reader(tmp_path, region, capacity=2 * MIB)  # less than either takes
        assert found(tier) == list(range(ROWS))
        assert use(tier, region) == [OK] * ROWS
        tier.close()


def test_reader_of_a_smaller_capacity_serves_all_that_is_there(tmp_path: Path, region: HostRegion) -> None:
    count = 5 * ROWS
    fill(tmp_path, region, count)
    with unchanged(tmp_path):
        tier = reader(tmp_path, region, capacity=MIB)
        assert found(tier) == list(range(count))
        for first in range(0, count, ROWS):
            assert load(tier, region, range(first, first + ROWS)) == [OK] * ROWS
        tier.close()


def test_reader_hides_expired_rows_and_keeps_them(
    tmp_path: Path, region: HostRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, region)
    with unchanged(tmp_path), monkeypatch.context() as patched:
        tier = make_tier("files", tmp_path, region, write="off", max_age=AGE_S)
        patched.setattr(ServerTime, "now_s", lambda _: time.time() + 2 * AGE_S)
        tier._clock = lambda: time.time() + 2 * AGE_S
        tier.open(NAMESPACE, 0)
        assert found(tier) == []
        assert load(tier, region, range(ROWS)) == [MISSING] * ROWS
        tier.close()
    tier = reader(tmp_path, region)
    assert found(tier) == list(range(ROWS))
    assert load(tier, region, range(ROWS)) == [OK] * ROWS
    tier.close()


def test_reader_keeps_rows_that_do_not_verify(tmp_path: Path, region: HostRegion) -> None:
    fill(tmp_path, region)
    for file in tmp_path.rglob("*.row"):
        with file.open("r+b") as damaged:
            for at in range(0, file.stat().st_size, GEOMETRY.row_bytes):
                damaged.seek(at + 64)
                damaged.write(b"\xff" * 8)
    with unchanged(tmp_path):
        tier = reader(tmp_path, region)
        assert load(tier, region, range(ROWS)) == [CORRUPT] * ROWS
        assert load(tier, region, range(ROWS)) == [CORRUPT] * ROWS
        tier.close()


def test_reader_keeps_unfinished_files_of_others(tmp_path: Path, region: HostRegion) -> None:
    fill(tmp_path, region)
    orphan = tmp_path / ".incoming" / "elsewhere-00000000-1-00000000-0.tmp"
    orphan.write_bytes(b"half a row")
    os.utime(orphan, (1, 1))
    with unchanged(tmp_path):
        tier = reader(tmp_path, region)
        assert found(tier) == list(range(ROWS))
        tier.close()


# --- without the right to write -----------------------------------------------------------------------------------


WRITES = ("mkdir", "unlink", "rename", "rmdir", "utime", "ftruncate", "pwrite")


def forbid_writes(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """As on a file system that is mounted read-only."""
    real_open = os.open

    def refuse(*args: object, **_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def opened(name: Any, flags: int, *args: Any, **more: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            refuse()
        return real_open(name, flags, *args, **more)

    monkeypatch.setattr(os, "open", opened)
    for name in WRITES:
        monkeypatch.setattr(os, name, refuse)


def test_reader_needs_no_right_to_write(tmp_path: Path, region: HostRegion, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, region)
    tier = make_tier("files", tmp_path, region, write="off", max_age="1h")
    with unchanged(tmp_path), monkeypatch.context() as patched:
        forbid_writes(patched, tmp_path)
        tier.open(NAMESPACE, 0)
        assert found(tier) == list(range(ROWS))
        assert use(tier, region) == [OK] * ROWS
        tier.close()


@contextmanager
def read_only(disk: Path) -> Iterator[None]:
    if not run("mount", "-o", "remount,ro", disk):
        pytest.skip("needs to remount a tmpfs")
    try:
        yield
    finally:
        run("mount", "-o", "remount,rw", disk)


def mover_on(path: Path, **fields: Any) -> MoverProcess:
    return MoverProcess(files_tier(path, 16 * MIB, **fields), GEOMETRY, ROWS)


def test_reader_of_a_directory_mounted_read_only(tmp_path: Path, region: HostRegion) -> None:
    place = tmp_path / "disk"
    place.mkdir()
    with tmpfs(place, "64m") as disk:
        path = disk / "kv"
        fill(path, region)
        with read_only(disk), mover_on(path, write="off", max_age="1h") as mover:
            mover.open()
            assert mover.there(range(2 * ROWS)) == list(range(ROWS))
            assert set(mover.load(range(ROWS))) == {OK}
            mover.stop()
            assert "Traceback" not in mover.log()
        fill(path, region)  # a writer goes on there


def test_reader_waits_for_what_is_not_there(tmp_path: Path, region: HostRegion) -> None:
    """It makes nothing, and serves what comes."""
    path = tmp_path / "kv"
    with mover_on(path, write="off") as mover:
        mover.send(Open(NAMESPACE, 0))
        down = mover.expect(lambda m: isinstance(m, Down))
        assert isinstance(down, Down)
        assert str(path) in down.reason
        assert not path.exists()
        fill(tmp_path / "elsewhere", region)
        (tmp_path / "elsewhere").rename(path)  # with all of its rows at once: it lists what is there when it looks
        mover.expect(lambda m: isinstance(m, Opened))
        assert mover.there(range(2 * ROWS)) == list(range(ROWS))
