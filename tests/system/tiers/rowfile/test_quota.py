"""A directory of row files stays within its capacity: always with one engine, nearly with several."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from nixl_tiers.base.chunk import Geometry, Outcome, align
from nixl_tiers.mover.protocol import Heartbeat, Open, Refused
from nixl_tiers.tiers.base import MAX_SLOTS
from nixl_tiers.tiers.rowfile.budget import Budget
from nixl_tiers.tiers.rowfile.contents import NAME_BYTES
from nixl_tiers.tiers.rowfile.tier import MARGIN_BYTES
from tests.mover.harness import NAMESPACE, MoverProcess
from tests.support.disks import assert_never_exceeds, disk_bytes, tmpfs, volume_bytes
from tests.support.file_tier import files_tier
from tests.system.tiers.rowfile.test_shared import mover_on

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


def test_any_capacity_has_a_number_of_slots(tmp_path: Path) -> None:
    with mover_on(tmp_path, 1 << 60) as mover:
        assert mover.open() == MAX_SLOTS


def test_capacity_below_one_row_is_refused(tmp_path: Path) -> None:
    with MoverProcess(files_tier(tmp_path, 2 << 20), Geometry(1, 1 << 20), 4) as mover:
        mover.send(Open(NAMESPACE, 0))
        refused = mover.expect(lambda m: isinstance(m, Refused))
        assert isinstance(refused, Refused)
        assert refused.reason.startswith("capacity: ")
