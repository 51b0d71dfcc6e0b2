"""Everything below a path stays within its capacity, sampled all the time."""

from __future__ import annotations

import os
from pathlib import Path

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.mover.protocol import Heartbeat, Open, Refused, Store
from nixl_tiers.tiers.base import Move
from tests.mover.harness import NAMESPACE, MoverProcess, key_of, payload, shard_dir, wait_until
from tests.support.disks import assert_never_exceeds, disk_bytes, run, tmpfs
from tests.support.file_tier import file_tier

GEOMETRY = Geometry(1, 120_000)
CAPACITY = 24 << 20
BATCH = 64


def namespace(number: int) -> bytes:
    return number.to_bytes(16, "big")


def fill(mover: MoverProcess, slots: int) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for start in range(0, slots, BATCH):
        outcomes += mover.store(range(start, min(start + BATCH, slots)))
    return outcomes


def test_namespaces_in_turn_stay_within_the_capacity(tmp_path: Path) -> None:
    with (
        assert_never_exceeds(tmp_path, CAPACITY),
        MoverProcess(file_tier(tmp_path, CAPACITY), GEOMETRY, BATCH) as mover,
    ):
        for number in range(4):
            slots = mover.open(namespace(number), epoch=number)
            mover.listed_rows()
            for _ in range(2):
                assert set(fill(mover, slots)) == {Outcome.OK}
            assert set(mover.load(range(BATCH))) == {Outcome.OK}
        # At least three quarters are rows: the capacity is used.
        assert disk_bytes(tmp_path) > 0.75 * CAPACITY
    # No process holds them now: the next one may use all of it, and deletes the least recently used first.
    with MoverProcess(file_tier(tmp_path, CAPACITY), GEOMETRY, BATCH) as mover:
        mover.open(namespace(9))
        mover.store(range(4))
        assert not shard_dir(tmp_path, namespace(0)).exists()


def test_two_shards_of_three_namespaces_in_turn_stay_within_the_capacity(tmp_path: Path) -> None:
    """Two replicas fill their parts at once, and reopen."""
    stored = 0
    tier = file_tier(tmp_path, CAPACITY)
    with (
        assert_never_exceeds(tmp_path, CAPACITY),
        MoverProcess(tier, GEOMETRY, BATCH, replicas=2) as first,
        MoverProcess(tier, GEOMETRY, BATCH, replicas=2) as second,
    ):
        for number in range(3):
            slots = min(mover.open(namespace(number), epoch=number) for mover in (first, second))
            for start in range(0, slots, 32):
                moves = range(start, min(start + 32, slots))
                jobs = []
                for mover in (first, second):
                    for row, slot in enumerate(moves):
                        mover.region.rows_view[row] = payload(slot, GEOMETRY)
                    batch = [Move(row, slot, key_of(slot), seal=True) for row, slot in enumerate(moves)]
                    jobs.append((mover, mover.begin(Store, batch)))
                for mover, job in jobs:
                    outcomes = mover.finished(job)
                    assert set(outcomes) == {Outcome.OK}
                    stored += outcomes.count(Outcome.OK)
            for mover in (first, second):
                assert set(mover.load(range(16))) == {Outcome.OK}
        assert disk_bytes(tmp_path) > 0.7 * CAPACITY
    assert stored > 3 * 0.7 * CAPACITY / GEOMETRY.row_bytes


def test_foreign_files_do_not_count_and_stay(tmp_path: Path) -> None:
    foreign = tmp_path / "notes" / "diary.txt"
    foreign.parent.mkdir()
    foreign.write_bytes(os.urandom(8 << 20))
    with (
        assert_never_exceeds(tmp_path, CAPACITY + (8 << 20) + 8192),
        MoverProcess(file_tier(tmp_path, CAPACITY), GEOMETRY, BATCH) as mover,
    ):
        slots = mover.open()
        assert set(fill(mover, slots)) == {Outcome.OK}
        assert slots * GEOMETRY.row_bytes > 0.75 * CAPACITY
    assert foreign.stat().st_size == 8 << 20


def test_heartbeats_report_used_bytes(tmp_path: Path) -> None:
    with MoverProcess(file_tier(tmp_path, CAPACITY), GEOMETRY, BATCH) as mover:
        mover.open()
        fill(mover, BATCH)
        for _ in range(2):
            mover.expect(lambda m: isinstance(m, Heartbeat))
        assert disk_bytes(tmp_path) <= mover.used_bytes <= CAPACITY


def test_capacity_below_one_row_is_refused(tmp_path: Path) -> None:
    with MoverProcess(file_tier(tmp_path, 1 << 20), Geometry(1, 1 << 20), 4) as mover:
        mover.send(Open(NAMESPACE, 0))
        refused = mover.expect(lambda m: isinstance(m, Refused))
        assert isinstance(refused, Refused)
        assert refused.reason.startswith("capacity: ")
        assert mover.process.wait(120) == 0


def test_min_free_stops_growth_and_rows_are_served_and_replaced(tmp_path: Path) -> None:
    with tmpfs(tmp_path, "32m"):
        tier = file_tier(tmp_path, 64 << 20, min_free="50%")
        with MoverProcess(tier, GEOMETRY, BATCH) as mover:
            mover.open()
            outcomes = fill(mover, 4 * BATCH)
            assert set(outcomes) == {Outcome.OK, Outcome.NO_SPACE}
            free = os.statvfs(tmp_path)
            assert free.f_bavail * free.f_frsize >= 16 << 20
            kept = [number for number, outcome in enumerate(outcomes) if outcome is Outcome.OK][:BATCH]
            assert len(kept) > 32
            assert set(mover.load(kept)) == {Outcome.OK}
            assert set(mover.store(kept)) == {Outcome.OK}  # in slots that are allocated
            heartbeat = mover.expect(lambda m: isinstance(m, Heartbeat) and bool(m.denials))
            assert isinstance(heartbeat, Heartbeat)
            sentence = (
                f"{tmp_path} is full: min_free keeps 16 MiB of its file system free, so rows are evicted to store"
            )
            sentence += " others"
            assert heartbeat.denials == {"full": sentence}
            assert run("mount", "-o", "remount,size=64m", tmp_path)
            wanted = range(len(kept), len(kept) + BATCH)
            assert wait_until(lambda: set(mover.store(wanted)) == {Outcome.OK})
            mover.expect(lambda m: isinstance(m, Heartbeat) and not m.denials)
            mover.stop()
            assert "no room" not in mover.log()  # the coordinator logs the denial, once


def test_stores_work_again_after_a_full_disk(tmp_path: Path) -> None:
    with tmpfs(tmp_path, "12m"):
        with MoverProcess(file_tier(tmp_path, 64 << 20), GEOMETRY, BATCH) as mover:
            mover.open()
            outcomes = mover.store(range(BATCH)) + mover.store(range(BATCH, 2 * BATCH))
            assert set(outcomes) == {Outcome.OK, Outcome.NO_SPACE}
            kept = [number for number, outcome in enumerate(outcomes) if outcome is Outcome.OK]
            assert len(kept) > 32
            assert set(mover.load(kept[:BATCH])) == {Outcome.OK}
            assert run("mount", "-o", "remount,size=64m", tmp_path)
            assert wait_until(lambda: set(mover.store(range(BATCH, 2 * BATCH))) == {Outcome.OK})
            assert set(mover.load(range(BATCH, 2 * BATCH))) == {Outcome.OK}
            mover.stop()
            assert mover.log().count("no room for more rows") == 1
        with MoverProcess(file_tier(tmp_path, 64 << 20), GEOMETRY, BATCH) as mover:
            mover.open()
            assert len(mover.listed_rows()) >= BATCH
            mover.stop()
