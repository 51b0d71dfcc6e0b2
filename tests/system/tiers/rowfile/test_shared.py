"""Movers on one directory of row files: they see each other's rows, only whole ones, and keep its capacity; readers."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from nixl_tiers.base.chunk import Geometry, Outcome, align, object_name
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.seal import Sealer, Verdict
from nixl_tiers.mover.protocol import Down, Heartbeat, Open, Opened, Store
from nixl_tiers.store import open_with
from nixl_tiers.tiers.base import Move
from nixl_tiers.tiers.disk import INCOMING
from nixl_tiers.tiers.existence import MAX_CONCURRENT
from nixl_tiers.tiers.rowfile.budget import Budget
from nixl_tiers.tiers.rowfile.contents import NAME_BYTES
from nixl_tiers.tiers.rowfile.names import TempNames
from nixl_tiers.tiers.rowfile.tier import MARGIN_BYTES
from tests.mover.harness import NAMESPACE, MoverProcess, key_of, payload, wait_until
from tests.support.disks import assert_never_exceeds, disk_bytes, refusing_mount, run, tmpfs, volume_bytes
from tests.support.file_tier import files_tier
from tests.support.load import get, put
from tests.support.times import changed
from tests.support.waiting import until, until_up

GEOMETRY = Geometry(1, 120_000)
CAPACITY = 64 << 20
ROWS = 64
FULL_BYTES = 24 << 20
ROW_BYTES = align(GEOMETRY.row_bytes) + NAME_BYTES
MANY = (FULL_BYTES - MARGIN_BYTES) // ROW_BYTES  # rows that a directory of FULL_BYTES holds
WINDOW_BYTES = Budget(FULL_BYTES, ROW_BYTES).window_bytes


def mover_on(path: Path, capacity: int = CAPACITY, region: HostRegion | None = None, **fields: object) -> MoverProcess:
    return MoverProcess(files_tier(path, capacity, **fields), GEOMETRY, ROWS, region)


def row_of(path: Path, number: int) -> Path:
    return path / NAMESPACE.hex() / f"{object_name(key_of(number))}.row"


def test_two_movers_see_each_others_stores_and_deletions(tmp_path: Path) -> None:
    with mover_on(tmp_path) as first, mover_on(tmp_path) as second:
        for mover in (first, second):
            mover.open()
            assert mover.listed_rows() == []
        assert set(first.store(range(20))) == {Outcome.OK}
        assert second.there(range(30)) == list(range(20))
        assert set(second.load(range(20))) == {Outcome.OK}
        assert set(second.store(range(20, 30))) == {Outcome.OK}
        assert first.there(range(20, 40)) == list(range(20, 30))
        assert set(first.load(range(30))) == {Outcome.OK}
        for number in (3, 25):
            row_of(tmp_path, number).unlink()
        assert second.there(range(30)) == [number for number in range(30) if number not in {3, 25}]
        assert second.load([3, 4]) == [Outcome.MISSING, Outcome.OK]
        # Either may store it again.
        assert second.store([3]) == [Outcome.OK]
        assert first.load([3]) == [Outcome.OK]
        assert first.store([3]) == [Outcome.FOUND]


def test_two_movers_may_store_the_same_row_at_once(tmp_path: Path) -> None:
    with mover_on(tmp_path) as first, mover_on(tmp_path) as second:
        for mover in (first, second):
            mover.open()
            mover.listed_rows()
        for _ in range(10):
            jobs = []
            for mover in (first, second):
                moves = []
                for row in range(16):
                    mover.region.rows_view[row] = payload(row, GEOMETRY)
                    moves.append(Move(row, row, key_of(row), tick=1, seal=True))
                jobs.append(mover.begin(Store, moves))
            assert set(first.finished(jobs[0]) + second.finished(jobs[1])) <= {Outcome.OK, Outcome.FOUND}
            assert set(first.load(range(16)) + second.load(range(16))) == {Outcome.OK}
            for path in tmp_path.rglob("*.row"):
                path.unlink()
        assert not any((tmp_path / INCOMING).iterdir())


def test_kill_during_stores_leaves_only_whole_rows(tmp_path: Path) -> None:
    rng = random.Random(3)
    sealer = Sealer(GEOMETRY, NAMESPACE, 0)
    stored, hits = 0, 0
    with HostRegion.create(GEOMETRY, ROWS) as region:
        for _ in range(6):
            with mover_on(tmp_path, region=region) as mover:
                mover.open()
                mover.listed_rows()
                found = mover.there(range(stored))
                for start in range(0, len(found), ROWS):
                    outcomes = mover.load(found[start : start + ROWS])
                    assert set(outcomes) == {Outcome.OK}  # SIGKILL loses no page: a file with a row name is whole
                    hits += len(outcomes)
                for row in range(ROWS):
                    region.rows_view[row] = payload(stored + row, GEOMETRY)
                for start in range(0, ROWS, 8):
                    rows = range(start, start + 8)
                    mover.begin(Store, [Move(n, n, key_of(stored + n), tick=stored + n, seal=True) for n in rows])
                stored += ROWS
                time.sleep(rng.uniform(0, 0.05))  # anywhere in it: the assertions hold wherever it is
                assert wait_until(lambda: any(tmp_path.rglob("*.row")))  # else no round might store any
                mover.kill()
            for path in tmp_path.rglob("*.row"):
                row = np.frombuffer(path.read_bytes(), np.uint8)
                assert sealer.verify(row, bytes.fromhex(path.stem)) is Verdict.OK
        assert hits > 0
        with mover_on(tmp_path, region=region) as mover:
            mover.open()
            mover.listed_rows()
            assert wait_until(lambda: list((tmp_path / INCOMING).iterdir()) == [])  # orphans are deleted


def test_unfinished_files_of_dead_processes_of_this_machine_go_at_once(tmp_path: Path) -> None:
    code = "from nixl_tiers.tiers.rowfile.names import TempNames; print(TempNames().prefix + '0.tmp')"
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    (tmp_path / INCOMING).mkdir(mode=0o700)
    dead, alive, foreign = (
        tmp_path / INCOMING / name for name in (ended.stdout.strip(), TempNames().prefix + "0.tmp", "thesis.tmp")
    )
    for path in (dead, alive, foreign):
        path.write_bytes(bytes(4096))
    os.utime(foreign, (1, 1))
    with mover_on(tmp_path) as mover:
        mover.open()
        mover.listed_rows()
        assert wait_until(lambda: not dead.exists())
    assert alive.exists()
    assert foreign.exists()


# --- capacity ---


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, so that one call measures it: a walk would count a row twice that is renamed
    meanwhile."""
    with tmpfs(tmp_path, "256m"):
        yield tmp_path


def fill(mover: MoverProcess, rows: range) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for start in range(rows.start, rows.stop, ROWS):
        outcomes += mover.store(range(start, min(start + ROWS, rows.stop)))
    return outcomes


@pytest.mark.parametrize("engines", [1, 3])
def test_movers_that_fill_one_directory_exceed_it_by_no_more_than_their_windows(disk: Path, engines: int) -> None:
    bound = FULL_BYTES + (engines - 1) * WINDOW_BYTES
    with assert_never_exceeds(disk, bound, volume_bytes) as looks, ExitStack() as stack:
        movers = [stack.enter_context(mover_on(disk, FULL_BYTES)) for _ in range(engines)]
        for mover in movers:
            mover.open()
            mover.listed_rows()
        with ThreadPoolExecutor(engines) as threads:
            ends = [
                threads.submit(fill, mover, range(first * 4 * MANY, (first + 1) * 4 * MANY))
                for first, mover in enumerate(movers)
            ]
            assert {outcome for end in ends for outcome in end.result()} == {Outcome.OK}
        if engines == 1:
            assert set(movers[0].load(range(ROWS))) == {Outcome.MISSING}
            for _ in range(2):
                movers[0].expect(lambda m: isinstance(m, Heartbeat))
            assert disk_bytes(disk) <= movers[0].used_bytes <= FULL_BYTES
    assert max(looks) > 0.6 * FULL_BYTES


# --- what does not answer, or may only be read ---


def test_mover_whose_questions_hang_is_killed_and_the_next_one_serves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that stops answers nothing, and no thread returns."""
    caplog.set_level(logging.INFO, "nixl_tiers")
    size, keys = 60_000, [b"key-%d" % number for number in range(4)]
    with refusing_mount(tmp_path, {}) as disk:
        files = files_tier(disk.place / "kv", 64 << 20)
        tiers: dict[str, object] = {"tiers": [{"type": "cpu", "capacity": 4 << 20}, files], "wait_s": 1, "probe_s": 1}
        with open_with(changed(file_check_s=0.2, file_stuck_s=0.5), tiers, size, "n") as store:
            until_up(store)
            put(store, keys)
            assert store.flush(60)
            os.kill(disk.pid, signal.SIGSTOP)
            try:
                missing = [b"missing-%d" % number for number in range(3 * MAX_CONCURRENT)]
                assert not any(get(store, missing)[0])
                until(lambda: "existence checks are stuck" in caplog.text, "the mover to be killed")
            finally:
                os.kill(disk.pid, signal.SIGCONT)
            until_up(store)
            assert get(store, keys) == ([True] * 4, [])


def write(path: Path) -> None:
    """A writer stores ROWS rows, and ends."""
    with mover_on(path) as mover:
        mover.open()
        assert set(mover.store(range(ROWS))) <= {Outcome.OK, Outcome.FOUND}
        mover.stop()


@contextmanager
def read_only(disk: Path) -> Iterator[None]:
    if not run("mount", "-o", "remount,ro", disk):
        pytest.skip("needs to remount a tmpfs")
    try:
        yield
    finally:
        run("mount", "-o", "remount,rw", disk)


def test_reader_of_a_directory_mounted_read_only(tmp_path: Path) -> None:
    place = tmp_path / "disk"
    place.mkdir()
    with tmpfs(place, "64m") as disk:
        path = disk / "kv"
        write(path)
        with read_only(disk), mover_on(path, write="off", max_age="1h") as mover:
            mover.open()
            assert mover.there(range(2 * ROWS)) == list(range(ROWS))
            assert set(mover.load(range(ROWS))) == {Outcome.OK}
            mover.stop()
            assert "Traceback" not in mover.log()
        write(path)  # a writer goes on there


def test_reader_waits_for_what_is_not_there(tmp_path: Path) -> None:
    """It makes nothing, and serves what comes."""
    path = tmp_path / "kv"
    with mover_on(path, write="off") as mover:
        mover.send(Open(NAMESPACE, 0))
        down = mover.expect(lambda m: isinstance(m, Down))
        assert isinstance(down, Down)
        assert str(path) in down.reason
        assert not path.exists()
        write(tmp_path / "elsewhere")
        (tmp_path / "elsewhere").rename(path)  # with all of its rows at once: it lists what is there when it looks
        mover.expect(lambda m: isinstance(m, Opened))
        assert mover.there(range(2 * ROWS)) == list(range(ROWS))
