"""A directory of row files stays within its capacity: always with one engine, nearly with several."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from nixl_tiers.base.chunk import Geometry, Outcome, align
from nixl_tiers.mover.protocol import Heartbeat, Open, Refused
from nixl_tiers.tiers.base import MAX_SLOTS
from nixl_tiers.tiers.rowfile.budget import WINDOW_ROWS, Budget
from nixl_tiers.tiers.rowfile.contents import NAME_BYTES
from nixl_tiers.tiers.rowfile.tier import MARGIN_BYTES
from tests.mover.harness import NAMESPACE, MoverProcess, wait_until
from tests.support.disks import assert_never_exceeds, disk_bytes, tmpfs, volume_bytes
from tests.support.file_tier import files_tier
from tests.system.tiers.rowfile.test_shared import mover_on, row_of

GEOMETRY = Geometry(1, 120_000)
CAPACITY = 24 << 20
BATCH = 64
ROW_BYTES = align(GEOMETRY.row_bytes) + NAME_BYTES
ROWS = (CAPACITY - MARGIN_BYTES) // ROW_BYTES
WINDOW_BYTES = Budget(CAPACITY, ROW_BYTES).window_bytes


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, so that one call measures it: a walk would count a row twice that is renamed
    meanwhile."""
    with tmpfs(tmp_path, "256m"):
        yield tmp_path


def fill(mover: MoverProcess, rows: range) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for start in range(rows.start, rows.stop, BATCH):
        outcomes += mover.store(range(start, min(start + BATCH, rows.stop)))
    return outcomes


def test_ten_times_the_capacity(disk: Path) -> None:
    """The tier itself evicts rows that were not used lately."""
    with assert_never_exceeds(disk, CAPACITY, volume_bytes) as looks, mover_on(disk, CAPACITY) as mover:
        mover.open()
        mover.listed_rows()
        assert set(fill(mover, range(10 * ROWS))) == {Outcome.OK}
        assert set(mover.load(range(10 * ROWS - 16, 10 * ROWS))) == {Outcome.OK}
        assert set(mover.load(range(BATCH))) == {Outcome.MISSING}
        for _ in range(2):
            mover.expect(lambda m: isinstance(m, Heartbeat))
        assert disk_bytes(disk) <= mover.used_bytes <= CAPACITY
    assert looks[-1] > 0.7 * CAPACITY  # and the capacity is used


def test_rows_of_all_namespaces_that_were_not_used_lately_are_evicted_first(disk: Path) -> None:
    with assert_never_exceeds(disk, CAPACITY, volume_bytes), mover_on(disk, CAPACITY) as mover:
        for number in range(4):
            mover.open(number.to_bytes(16, "big"), epoch=number)
            mover.listed_rows()
            assert set(fill(mover, range(ROWS // 2))) == {Outcome.OK}
    held = [len(list((disk / number.to_bytes(16, "big").hex()).glob("*/*.row"))) for number in range(4)]
    assert held[0] == 0
    assert held == sorted(held)
    assert held[3] == ROWS // 2


def test_recently_used_rows_are_not_evicted(tmp_path: Path) -> None:
    with mover_on(tmp_path, CAPACITY) as mover:
        mover.open()
        mover.listed_rows()
        fill(mover, range(ROWS // 2))
        for path in tmp_path.rglob("*.row"):
            os.utime(path, (time.time() - 3600,) * 2)
        assert set(mover.load(range(16))) == {Outcome.OK}
        assert time.time() - row_of(tmp_path, 15).stat().st_mtime < 600
        assert set(fill(mover, range(ROWS, ROWS + ROWS // 2 + 16))) == {Outcome.OK}
        assert set(mover.load(range(16))) == {Outcome.OK}
        assert len(mover.there(range(16, ROWS // 2))) < ROWS // 2 - 16


@pytest.mark.parametrize("engines", [2, 3])
def test_movers_that_fill_one_directory_exceed_it_by_no_more_than_their_windows(disk: Path, engines: int) -> None:
    bound = CAPACITY + (engines - 1) * WINDOW_BYTES
    with assert_never_exceeds(disk, bound, volume_bytes) as looks, ExitStack() as stack:
        movers = [stack.enter_context(mover_on(disk, CAPACITY)) for _ in range(engines)]
        for mover in movers:
            mover.open()
            mover.listed_rows()
        with ThreadPoolExecutor(engines) as threads:
            ends = [
                threads.submit(fill, mover, range(first * 4 * ROWS, (first + 1) * 4 * ROWS))
                for first, mover in enumerate(movers)
            ]
            assert {outcome for end in ends for outcome in end.result()} == {Outcome.OK}
    assert max(looks) > 0.6 * CAPACITY


def test_foreign_files_do_not_count_and_stay(disk: Path) -> None:
    foreign = disk / "notes" / "diary.txt"
    foreign.parent.mkdir()
    foreign.write_bytes(os.urandom(8 << 20))
    before = volume_bytes(disk)
    with assert_never_exceeds(disk, CAPACITY + before, volume_bytes) as looks, mover_on(disk, CAPACITY) as mover:
        mover.open()
        mover.listed_rows()
        assert set(fill(mover, range(2 * ROWS))) == {Outcome.OK}
    assert foreign.stat().st_size == 8 << 20
    assert max(looks) > CAPACITY, "the rows alone fill it"


def test_smaller_capacity_holds_as_soon_as_a_row_is_stored(tmp_path: Path) -> None:
    with mover_on(tmp_path, CAPACITY) as mover:
        mover.open()
        mover.listed_rows()
        fill(mover, range(ROWS))
    with mover_on(tmp_path, CAPACITY // 2) as mover:
        mover.open()
        mover.listed_rows()
        assert mover.store([ROWS]) == [Outcome.OK]
        assert disk_bytes(tmp_path) <= CAPACITY // 2
        assert mover.load([ROWS]) == [Outcome.OK]


def test_reader_deletes_nothing(tmp_path: Path) -> None:
    with mover_on(tmp_path, CAPACITY) as mover:
        mover.open()
        mover.listed_rows()
        fill(mover, range(ROWS - 2 * WINDOW_ROWS))  # what is written while it is swept may count twice
    reader = files_tier(tmp_path, CAPACITY // 2, write="off")
    with MoverProcess(reader, GEOMETRY, BATCH) as mover:
        assert mover.open() == MAX_SLOTS
        mover.listed_rows()
        assert mover.there(range(BATCH)) == list(range(BATCH))
        assert set(mover.load(range(BATCH))) == {Outcome.OK}
        assert wait_until(lambda: mover.expect(lambda m: isinstance(m, Heartbeat)) and mover.used_bytes > CAPACITY // 2)
    assert len(list(tmp_path.rglob("*.row"))) == ROWS - 2 * WINDOW_ROWS


def test_any_capacity_has_a_number_of_slots(tmp_path: Path) -> None:
    with mover_on(tmp_path, 1 << 60) as mover:
        assert mover.open() == MAX_SLOTS


def test_capacity_below_one_row_is_refused(tmp_path: Path) -> None:
    with MoverProcess(files_tier(tmp_path, 2 << 20), Geometry(1, 1 << 20), 4) as mover:
        mover.send(Open(NAMESPACE, 0))
        refused = mover.expect(lambda m: isinstance(m, Refused))
        assert isinstance(refused, Refused)
        assert refused.reason.startswith("capacity: ")
