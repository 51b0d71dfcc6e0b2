"""Movers on one directory of row files: they see each other's rows, only whole ones, and keep its capacity; readers."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover.protocol import Store
from nixl_tiers.store import open_with
from nixl_tiers.tiers.base import Move
from nixl_tiers.tiers.disk import INCOMING
from nixl_tiers.tiers.existence import MAX_CONCURRENT
from tests.mover.harness import MoverProcess, key_of, payload
from tests.support.disks import refusing_mount, run, tmpfs
from tests.support.file_tier import files_tier
from tests.support.load import get, put
from tests.support.times import changed
from tests.support.waiting import until, until_up

GEOMETRY = Geometry(1, 120_000)
CAPACITY = 64 << 20
ROWS = 64


def mover_on(path: Path, capacity: int = CAPACITY, region: HostRegion | None = None, **fields: object) -> MoverProcess:
    return MoverProcess(files_tier(path, capacity, **fields), GEOMETRY, ROWS, region)


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
