"""Slabs through real movers and on real file systems: sizes, kills, full disks, what is reported."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover.protocol import Delete, Down, Heartbeat, Listed, Opened, Store
from nixl_tiers.tiers.base import Entry, Move
from nixl_tiers.tiers.slab.tier import SlabTier
from tests.mover.harness import NAMESPACE, MoverProcess, key_of, payload, shard_dir, wait_until
from tests.support.disks import disk_bytes, run, tmpfs
from tests.support.file_tier import file_config, file_tier
from tests.system.tiers.file_tiers import gone, outcomes

GEOMETRY = Geometry(1, 120_000)
BATCH = 64


SIZES = {
    "64KiB": Geometry(1, 64 << 10),
    "256KiB": Geometry(2, 128 << 10, 4),
    "2.95MB": Geometry(1, 2_949_120, 16),
    "8MiB": Geometry(4, 2 << 20, 8),
}


@pytest.mark.parametrize("geometry", SIZES.values(), ids=SIZES)
def test_rows_round_trip_and_survive_reopening(tmp_path: Path, geometry: Geometry) -> None:
    count = max(6, min(400, (24 << 20) // geometry.row_bytes))
    capacity = (count + 4) * geometry.row_bytes + (4 << 20)
    batch = min(count, 200)
    with MoverProcess(file_tier(tmp_path, capacity), geometry, batch) as mover:
        assert mover.open() >= count
        assert mover.listed_rows() == []
        for start in range(0, count, batch):
            numbers = range(start, min(start + batch, count))
            assert set(mover.store(numbers)) == {Outcome.OK}
        for start in range(0, count, batch):
            numbers = range(start, min(start + batch, count))
            assert set(mover.load(numbers)) == {Outcome.OK}
        mover.stop()
    with MoverProcess(file_tier(tmp_path, capacity), geometry, batch) as mover:
        mover.open()
        assert mover.listed_rows() == [Entry(n, key_of(n), n + 1) for n in range(count)]
        assert set(mover.load(range(count - batch, count))) == {Outcome.OK}
    assert disk_bytes(tmp_path) <= capacity


def test_loads_and_stores_run_at_once_with_more_rows_than_one_kernel_queue(tmp_path: Path) -> None:
    """More descriptors in flight than NIXL has in one kernel queue."""
    geometry = Geometry(1, 3000)
    rows = 4096
    with HostRegion.create(geometry, rows) as region:
        tier = SlabTier(file_config(tmp_path, 64 << 20), geometry, region)
        assert tier.open(NAMESPACE, 0) >= rows
        half = rows // 2
        region.rows_view[:, :3000] = 5
        first = [Move(row, row, key_of(row), seal=True) for row in range(half)]
        assert set(outcomes(tier, tier.store(first))[0]) == {Outcome.OK}
        second = [Move(row, row, key_of(row), seal=True) for row in range(half, rows)]
        region.rows_view[:half] = 0
        ended = outcomes(tier, tier.store(second), tier.load(first))
        assert [set(part) for part in ended] == [{Outcome.OK}, {Outcome.OK}]
        assert (region.rows_view[:half, :3000] == 5).all()
        tier.close()


def test_kill_during_stores_gives_no_wrong_row(tmp_path: Path) -> None:
    """Every mover overwrites, deletes and reads slots, and opens the journal that its killed predecessor left."""
    geometry, count, capacity = Geometry(1, 250_000), 96, 32 << 20
    rng = random.Random(20)
    stored = 0  # keys are never used twice: an old key over new bytes would be a wrong hit
    hits = 0
    with HostRegion.create(geometry, count) as region:
        for _ in range(8):
            with MoverProcess(file_tier(tmp_path, capacity), geometry, count, region) as mover:
                assert mover.open() >= count
                listed = mover.listed_rows()
                found = mover.load([int(entry.key[4:]) for entry in listed], [entry.slot for entry in listed])
                assert set(found) <= {Outcome.OK, Outcome.CORRUPT}  # the bytes of what is OK are compared
                hits += found.count(Outcome.OK)
                for row in range(count):
                    region.rows_view[row] = payload(stored + row, geometry)
                slots = rng.sample(range(count), count)
                jobs = []
                for start in range(0, count, 16):
                    moves = [
                        Move(row, slots[row], key_of(stored + row), tick=stored + row, seal=True)
                        for row in range(start, start + 16)
                    ]
                    jobs.append(mover.begin(Store, moves))
                    mover.send(Delete([(slots[start], key_of(stored + start))]))
                stored += count
                # Anywhere in it, on any machine: by time alone, no round might store any where it is busy.
                for job in jobs[: rng.randrange(len(jobs))]:
                    mover.finished(job)
                time.sleep(rng.uniform(0, 0.02))
                mover.kill()
    assert hits > 0
    assert disk_bytes(tmp_path) <= capacity


def test_slab_truncated_under_a_running_mover_is_reported_and_reopened(tmp_path: Path) -> None:
    slab = shard_dir(tmp_path) / "slab-00000.kv"
    with MoverProcess(file_tier(tmp_path, 16 << 20), GEOMETRY, 24) as mover:
        mover.open()
        assert set(mover.store(range(24))) == {Outcome.OK}
        os.truncate(slab, 10 * GEOMETRY.row_bytes)
        assert set(mover.load(range(24))) <= {Outcome.OK, Outcome.FAILED}
        down = mover.expect(lambda m: isinstance(m, Down))
        assert isinstance(down, Down)
        assert down.reason == f"{slab} has been cut short"
        mover.expect(lambda m: isinstance(m, Opened))
        assert mover.load(range(24)) == [Outcome.OK] * 10 + [Outcome.MISSING] * 14


def test_expired_rows_are_reported_as_gone(tmp_path: Path) -> None:
    with MoverProcess(file_tier(tmp_path, 16 << 20, max_age=1), GEOMETRY, 4) as mover:
        mover.open()
        mover.listed_rows()
        assert set(mover.store(range(4))) == {Outcome.OK}
        entries: list[Entry] = []
        while len(entries) < 4:
            message = mover.expect(lambda m: isinstance(m, Listed))
            assert isinstance(message, Listed)
            entries += message.entries
        assert gone(entries) == [0, 1, 2, 3]


def fill(mover: MoverProcess, slots: int) -> list[Outcome]:
    found: list[Outcome] = []
    for start in range(0, slots, BATCH):
        found += mover.store(range(start, min(start + BATCH, slots)))
    return found


def test_min_free_stops_growth_and_rows_are_served_and_replaced(tmp_path: Path) -> None:
    with tmpfs(tmp_path, "32m"):
        tier = file_tier(tmp_path, 64 << 20, min_free="50%")
        with MoverProcess(tier, GEOMETRY, BATCH) as mover:
            mover.open()
            found = fill(mover, 4 * BATCH)
            assert set(found) == {Outcome.OK, Outcome.NO_SPACE}
            free = os.statvfs(tmp_path)
            assert free.f_bavail * free.f_frsize >= 16 << 20
            kept = [number for number, outcome in enumerate(found) if outcome is Outcome.OK][:BATCH]
            assert len(kept) > 32
            assert set(mover.load(kept)) == {Outcome.OK}
            assert set(mover.store(kept)) == {Outcome.OK}  # in slots that are allocated
            heartbeat = mover.expect(lambda m: isinstance(m, Heartbeat) and bool(m.denials))
            assert isinstance(heartbeat, Heartbeat)
            assert heartbeat.denials["full"].startswith(f"{tmp_path} is full: min_free keeps 16 MiB of its file system")
            assert disk_bytes(tmp_path) <= mover.used_bytes <= 64 << 20
            assert run("mount", "-o", "remount,size=64m", tmp_path)
            wanted = range(len(kept), len(kept) + BATCH)
            assert wait_until(lambda: set(mover.store(wanted)) == {Outcome.OK})
            mover.expect(lambda m: isinstance(m, Heartbeat) and not m.denials)
            mover.stop()
            assert "no room" not in mover.log()  # the coordinator logs the denial, once
