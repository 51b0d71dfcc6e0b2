"""Kill -9 at any moment, then reopen: every hit is the row that was stored under its key."""

from __future__ import annotations

import random
import time
from pathlib import Path

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover.protocol import Delete, Store
from nixl_tiers.tiers.base import Move
from tests.mover.harness import MoverProcess, key_of, payload, shard_dir, wait_until
from tests.support.disks import disk_bytes
from tests.support.file_tier import file_tier
from tests.support.journals import journal_in, rows

GEOMETRY = Geometry(1, 250_000)
SLOTS = 96
CAPACITY = 32 << 20


def test_kill_during_stores_gives_no_wrong_row(tmp_path: Path) -> None:
    """Every mover overwrites, deletes and reads slots, and opens the journal that its killed predecessor left."""
    rng = random.Random(20)
    stored = 0  # keys are never used twice: an old key over new bytes would be a wrong hit
    hits = 0
    with HostRegion.create(GEOMETRY, SLOTS) as region:
        for _ in range(8):
            with MoverProcess(file_tier(tmp_path, CAPACITY), GEOMETRY, SLOTS, region) as mover:
                assert mover.open() >= SLOTS
                for entries in _batches(mover.listed_rows(), 32):
                    numbers = [int(entry.key[4:]) for entry in entries]
                    outcomes = mover.load(numbers, [entry.slot for entry in entries])  # compares what is OK
                    assert set(outcomes) <= {Outcome.OK, Outcome.CORRUPT}
                    hits += outcomes.count(Outcome.OK)
                for row in range(SLOTS):
                    region.rows_view[row] = payload(stored + row, GEOMETRY)
                slots = rng.sample(range(SLOTS), SLOTS)
                jobs = []
                for start in range(0, SLOTS, 16):
                    moves = [
                        Move(row, slots[row], key_of(stored + row), tick=stored + row, seal=True)
                        for row in range(start, start + 16)
                    ]
                    jobs.append(mover.begin(Store, moves))
                    mover.send(Delete([(slots[start], key_of(stored + start))]))
                stored += SLOTS
                # Anywhere in it, on any machine: by time alone, no round might store any where it is busy.
                for job in jobs[: rng.randrange(len(jobs))]:
                    mover.finished(job)
                time.sleep(rng.uniform(0, 0.02))
                mover.kill()
    assert hits > 0
    assert disk_bytes(tmp_path) <= CAPACITY


def test_journalled_rows_survive_a_kill(tmp_path: Path) -> None:
    with MoverProcess(file_tier(tmp_path, CAPACITY), GEOMETRY, SLOTS) as mover:
        mover.open()
        assert set(mover.store(range(SLOTS))) == {Outcome.OK}
        journal = journal_in(shard_dir(tmp_path))
        assert wait_until(lambda: journal.exists() and len(rows(journal)) == SLOTS)
        mover.kill()
    with MoverProcess(file_tier(tmp_path, CAPACITY), GEOMETRY, SLOTS) as mover:
        mover.open()
        assert len(mover.listed_rows()) == SLOTS
        assert set(mover.load(range(SLOTS))) == {Outcome.OK}


def test_rows_missing_in_the_journal_after_a_kill_are_recovered(tmp_path: Path) -> None:
    """Every row reported as stored survives, with 6 kills right after the last report."""
    for life in range(6):
        with MoverProcess(file_tier(tmp_path, CAPACITY), GEOMETRY, SLOTS) as mover:
            mover.open()
            listed = {entry.slot: entry.key for entry in mover.listed_rows()}
            numbers = range(1000 * life, 1000 * life + SLOTS)
            if life:
                before = range(1000 * (life - 1), 1000 * (life - 1) + SLOTS)
                assert listed == {slot: key_of(number) for slot, number in enumerate(before)}
                assert set(mover.load(before, range(SLOTS))) == {Outcome.OK}
            assert set(mover.store(numbers, range(SLOTS))) == {Outcome.OK}
            mover.kill()


def _batches(entries: list, size: int) -> list[list]:
    return [entries[start : start + size] for start in range(0, len(entries), size)]
