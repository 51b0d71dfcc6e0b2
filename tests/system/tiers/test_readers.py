"""Tiers with `write: off`: they change nothing on the medium, whatever it holds, and need no right to."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover.protocol import Down, Open, Opened
from nixl_tiers.tiers.base import Entry, Move, TierDown, TierRefused
from nixl_tiers.tiers.folder import Folder
from nixl_tiers.tiers.rowfile.directory import ServerTime
from tests.mover.harness import NAMESPACE, MoverProcess, shard_dir
from tests.support.disks import run, tmpfs
from tests.support.file_tier import LAYOUTS
from tests.system.tiers.file_tiers import AGE_S, GEOMETRY, ROWS, FileTier, gone, load, make_tier, outcomes, store

OTHER = bytes(reversed(range(16)))
OK, MISSING, CORRUPT = Outcome.OK, Outcome.MISSING, Outcome.CORRUPT
MIB = 1 << 20


@pytest.fixture(params=list(LAYOUTS))
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def listed(tier: FileTier) -> list[Entry]:
    entries = []
    for batch in tier.list_rows():
        entries += list(batch)
        time.sleep(0.0 if batch else 0.001)
    return entries


def maintained(tier: FileTier) -> list[Entry]:
    """One round of upkeep."""
    entries = []
    for batch in tier.maintain():
        entries += batch
        time.sleep(0.0 if batch else 0.001)
    return entries


def fill(layout: str, path: Path, region: HostRegion, count: int = ROWS, namespace: bytes = NAMESPACE) -> None:
    """A writer stores `count` rows, and ends."""
    tier = make_tier(layout, path, region)
    tier.open(namespace, 0)
    listed(tier)
    for first in range(0, count, ROWS):
        numbers = range(first, min(first + ROWS, count))
        assert store(tier, region, numbers) == [OK] * len(numbers)
    tier.close()


def reader(layout: str, path: Path, region: HostRegion, **fields: Any) -> FileTier:
    tier = make_tier(layout, path, region, write="off", **fields)
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


def numbers(entries: list[Entry]) -> list[int]:
    return sorted(int(entry.key[4:]) for entry in entries)


def use(tier: FileTier, region: HostRegion, entries: list[Entry]) -> list[Outcome]:
    """Do what engines do to a tier: load, delete, maintain, list again."""
    found = load_entries(tier, region, entries[:ROWS])
    tier.delete([(entry.slot, entry.key) for entry in entries[:2]])
    for _ in range(3):
        maintained(tier)
        tier.poll()
    if tier.relist_s is not None:
        listed(tier)
    return found


def load_entries(tier: FileTier, region: HostRegion, entries: list[Entry]) -> list[Outcome]:
    moves = [Move(row, max(0, entry.slot), entry.key) for row, entry in enumerate(entries)]
    return list(outcomes(tier, tier.load(moves))[0])


def test_reader_keeps_what_other_models_stored(layout: str, tmp_path: Path, region: HostRegion) -> None:
    fill(layout, tmp_path, region)
    fill(layout, tmp_path, region, namespace=OTHER)
    with unchanged(tmp_path):
        tier = reader(layout, tmp_path, region, capacity=2 * MIB)  # less than either takes
        entries = listed(tier)
        assert numbers(entries) == list(range(ROWS))
        assert use(tier, region, entries) == [OK] * ROWS
        tier.close()


def test_reader_of_a_smaller_capacity_serves_all_that_is_there(layout: str, tmp_path: Path, region: HostRegion) -> None:
    count = 5 * ROWS
    fill(layout, tmp_path, region, count)
    with unchanged(tmp_path):
        tier = reader(layout, tmp_path, region, capacity=MIB)
        entries = listed(tier)
        assert numbers(entries) == list(range(count))
        for first in range(0, count, ROWS):
            assert load_entries(tier, region, entries[first : first + ROWS]) == [OK] * ROWS
        tier.close()


def test_reader_hides_expired_rows_and_keeps_them(
    layout: str, tmp_path: Path, region: HostRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(layout, tmp_path, region)
    with unchanged(tmp_path), monkeypatch.context() as patched:
        tier = make_tier(layout, tmp_path, region, write="off", max_age=AGE_S)
        patched.setattr(ServerTime, "now_s", lambda _: time.time() + 2 * AGE_S)
        tier._clock = lambda: time.time() + 2 * AGE_S
        tier.open(NAMESPACE, 0)
        listed(tier)
        assert load(tier, region, range(ROWS)) == [MISSING] * ROWS
        maintained(tier)
        if tier.relist_s is not None:
            assert listed(tier) == []
        assert load(tier, region, range(ROWS)) == [MISSING] * ROWS
        tier.close()
    tier = reader(layout, tmp_path, region)
    assert numbers(listed(tier)) == list(range(ROWS))
    assert load(tier, region, range(ROWS)) == [OK] * ROWS
    tier.close()


def test_reader_reports_rows_that_expire_while_it_runs(tmp_path: Path, region: HostRegion) -> None:
    fill("slabs", tmp_path, region)
    with unchanged(tmp_path):
        tier = reader("slabs", tmp_path, region, max_age=AGE_S)
        assert numbers(listed(tier)) == list(range(ROWS))
        assert maintained(tier) == []
        served = tier._open  # type: ignore[union-attr]
        served._clock = lambda: time.time() + AGE_S + 1
        assert gone(maintained(tier)) == list(range(ROWS))
        tier.close()


def test_reader_keeps_rows_that_do_not_verify(layout: str, tmp_path: Path, region: HostRegion) -> None:
    fill(layout, tmp_path, region)
    for file in [*tmp_path.rglob("*.row"), *tmp_path.rglob("slab-*")]:
        with file.open("r+b") as damaged:
            for at in range(0, file.stat().st_size, GEOMETRY.row_bytes):
                damaged.seek(at + 64)
                damaged.write(b"\xff" * 8)
    with unchanged(tmp_path):
        tier = reader(layout, tmp_path, region)
        listed(tier)
        assert load(tier, region, range(ROWS)) == [CORRUPT] * ROWS
        assert load(tier, region, range(ROWS)) in ([CORRUPT] * ROWS, [MISSING] * ROWS)
        if tier.relist_s is not None:
            assert listed(tier) == [], "it was a hit again"
        tier.close()


def test_reader_keeps_unfinished_files_of_others(tmp_path: Path, region: HostRegion) -> None:
    fill("files", tmp_path, region)
    orphan = tmp_path / ".incoming" / "elsewhere-00000000-1-00000000-0.tmp"
    orphan.write_bytes(b"half a row")
    os.utime(orphan, (1, 1))
    with unchanged(tmp_path):
        tier = reader("files", tmp_path, region)
        assert len(listed(tier)) == ROWS
        tier.close()


@pytest.mark.parametrize("lost", ["namespace.json", "manifest.journal"])
def test_reader_does_not_mend_a_damaged_shard(tmp_path: Path, region: HostRegion, lost: str) -> None:
    fill("slabs", tmp_path, region)
    (shard_dir(tmp_path) / lost).unlink()
    with unchanged(tmp_path), pytest.raises(TierDown, match=lost):
        reader("slabs", tmp_path, region)


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


def test_reader_needs_no_right_to_write(
    layout: str, tmp_path: Path, region: HostRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(layout, tmp_path, region)
    tier = make_tier(layout, tmp_path, region, write="off", max_age="1h")
    with unchanged(tmp_path), monkeypatch.context() as patched:
        forbid_writes(patched, tmp_path)
        tier.open(NAMESPACE, 0)
        entries = listed(tier)
        assert numbers(entries) == list(range(ROWS))
        assert use(tier, region, entries) == [OK] * ROWS
        tier.close()


@contextmanager
def read_only(disk: Path) -> Iterator[None]:
    if not run("mount", "-o", "remount,ro", disk):
        pytest.skip("needs to remount a tmpfs")
    try:
        yield
    finally:
        run("mount", "-o", "remount,rw", disk)


def mover_on(path: Path, layout: str, **fields: Any) -> MoverProcess:
    return MoverProcess(LAYOUTS[layout](path, 16 * MIB, **fields), GEOMETRY, ROWS)


def test_reader_of_a_directory_mounted_read_only(layout: str, tmp_path: Path, region: HostRegion) -> None:
    place = tmp_path / "disk"
    place.mkdir()
    with tmpfs(place, "64m") as disk:
        path = disk / "kv"
        fill(layout, path, region)
        with read_only(disk):
            for lock in [*path.rglob(".lock")]:
                assert lock.exists()
            with mover_on(path, layout, write="off", max_age="1h") as mover:
                mover.open()
                assert numbers(mover.listed_rows()) == list(range(ROWS))
                assert set(mover.load(range(ROWS))) == {OK}
                mover.stop()
                assert "Traceback" not in mover.log()
        fill(layout, path, region)  # a writer goes on there


def test_reader_waits_for_what_is_not_there(layout: str, tmp_path: Path, region: HostRegion) -> None:
    """It makes nothing, and serves what comes."""
    path = tmp_path / "kv"
    with mover_on(path, layout, write="off") as mover:
        mover.send(Open(NAMESPACE, 0))
        down = mover.expect(lambda m: isinstance(m, Down))
        assert isinstance(down, Down)
        assert str(path) in down.reason
        assert not path.exists()
        fill(layout, tmp_path / "elsewhere", region)
        (tmp_path / "elsewhere").rename(path)  # with all of its rows at once: it lists what is there when it looks
        mover.expect(lambda m: isinstance(m, Opened))
        assert numbers(mover.listed_rows()) == list(range(ROWS))


# --- beside others (slabs) ----------------------------------------------------------------------------------------


def test_readers_share_a_part_and_no_writer_takes_it_meanwhile(tmp_path: Path, region: HostRegion) -> None:
    fill("slabs", tmp_path, region)
    tiers = [reader("slabs", tmp_path, region) for _ in range(2)]
    for tier in tiers:
        assert numbers(listed(tier)) == list(range(ROWS))
    writer = make_tier("slabs", tmp_path, region)
    with pytest.raises(TierDown, match=r"part-0 by processes that only read it"):
        writer.open(NAMESPACE, 0)
    for tier in tiers:
        tier.close()
    writer.open(NAMESPACE, 0)
    with pytest.raises(TierDown, match=rf"part-0 by process {os.getpid()}"):
        reader("slabs", tmp_path, region)
    writer.close()


def test_readers_take_parts_of_their_own_first(tmp_path: Path, region: HostRegion) -> None:
    """As engines do whose `write` is switched off: together they serve the rows of all."""
    writers = [make_tier("slabs", tmp_path, region, replicas=2) for _ in range(2)]
    for number, tier in enumerate(writers):
        tier.open(NAMESPACE, 0)
        listed(tier)
        store(tier, region, range(number, number + 1))
    for tier in writers:
        tier.close()
    readers = [reader("slabs", tmp_path, region) for _ in range(3)]
    found = [numbers(listed(tier)) for tier in readers]
    assert sorted(found[:2]) == [[0], [1]]
    assert found[2] in found[:2]
    for tier in readers:
        tier.close()


LIVING = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.mark.parametrize("living", [True, False])
def test_without_locks_a_reader_is_refused_only_beside_a_living_writer(
    tmp_path: Path, region: HostRegion, monkeypatch: pytest.MonkeyPatch, living: bool
) -> None:
    fill("slabs", tmp_path, region)
    holder = subprocess.Popen(LIVING)
    try:
        if not living:
            holder.kill()
            holder.wait()
        about = {"host": socket.gethostname(), "pid": holder.pid, "engine": 1}
        (tmp_path / "part-0" / ".lock").write_text(json.dumps(about))

        def no_locks(*_: object) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr(fcntl, "flock", no_locks)
        if living:
            with pytest.raises(TierDown, match=f"by process {holder.pid}"):
                reader("slabs", tmp_path, region)
            return
        tier = reader("slabs", tmp_path, region)
        assert numbers(listed(tier)) == list(range(ROWS))
        assert load(tier, region, range(ROWS)) == [OK] * ROWS
        tier.close()
    finally:
        holder.kill()
        holder.wait()


def test_lock_file_that_a_reader_may_not_open_is_named(
    tmp_path: Path, region: HostRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill("slabs", tmp_path, region)
    real = Folder.open

    def open_file(folder: Folder, name: str, flags: int) -> int:
        if name == ".lock":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder.path / name))
        return real(folder, name, flags)

    monkeypatch.setattr(Folder, "open", open_file)
    with pytest.raises(TierRefused, match=r"part-0/\.lock: Permission denied"):
        reader("slabs", tmp_path, region)


def test_reader_without_a_lock_file(tmp_path: Path, region: HostRegion) -> None:
    fill("slabs", tmp_path, region)
    (tmp_path / "part-0" / ".lock").unlink()
    with unchanged(tmp_path):
        tier = reader("slabs", tmp_path, region)
        assert numbers(listed(tier)) == list(range(ROWS))
        tier.close()
