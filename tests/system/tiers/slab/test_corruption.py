"""Damage to files: a damaged row is a miss, its neighbours are hits, and the mover survives."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.seal import Sealer
from nixl_tiers.mover.protocol import Delete, Down, Load, Opened, Store
from nixl_tiers.tiers.base import FinishedBatch, Move
from nixl_tiers.tiers.slab.journal import Header
from nixl_tiers.tiers.slab.tier import SlabTier
from tests.mover.harness import NAMESPACE, MoverProcess, key_of, payload, shard_dir, wait_until
from tests.support.file_tier import file_config, file_tier
from tests.support.journals import Record, encode, journal_in, overwrite_record, rows
from tests.support.times import changed
from tests.support.waiting import until

GEOMETRY = Geometry(2, 30_000, 3)  # both cells and the seal have padding
ROWS = 24
CAPACITY = 16 << 20


def slab(path: Path) -> Path:
    return shard_dir(path) / "slab-00000.kv"


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A directory that holds keys 0 to ROWS - 1 in slots 0 to ROWS - 1."""
    with MoverProcess(file_tier(tmp_path, CAPACITY), GEOMETRY, ROWS) as mover:
        mover.open()
        assert set(mover.store(range(ROWS))) == {Outcome.OK}
        mover.stop()
    return tmp_path


def outcomes_after(path: Path, damage: Callable[[], None]) -> list[Outcome]:
    damage()
    with MoverProcess(file_tier(path, CAPACITY), GEOMETRY, ROWS) as mover:
        mover.open()
        assert len(mover.listed_rows()) == ROWS
        outcomes = mover.load(range(ROWS))
        # Rows found corrupt are not listed again; the others are.
        mover.stop()
    with MoverProcess(file_tier(path, CAPACITY), GEOMETRY, ROWS) as mover:
        mover.open()
        good = [n for n, outcome in enumerate(outcomes) if outcome is Outcome.OK]
        assert [entry.key for entry in mover.listed_rows()] == [key_of(n) for n in good]
    return outcomes


def test_flipped_bit_is_corrupt(stored: Path) -> None:
    rng = random.Random(7)
    size = GEOMETRY.row_bytes
    places = [0, GEOMETRY.cell_payload, size - 1, size - GEOMETRY.seal_bytes, *(rng.randrange(size) for _ in range(8))]

    def damage() -> None:
        with slab(stored).open("r+b") as file:
            for slot, place in enumerate(places):
                file.seek(slot * size + place)
                byte = file.read(1)[0]
                file.seek(slot * size + place)
                file.write(bytes([byte ^ (1 << rng.randrange(8))]))

    outcomes = outcomes_after(stored, damage)
    assert outcomes == [Outcome.CORRUPT] * len(places) + [Outcome.OK] * (ROWS - len(places))


def test_swapped_rows_are_corrupt(stored: Path) -> None:
    size = GEOMETRY.row_bytes

    def damage() -> None:
        with slab(stored).open("r+b") as file:
            rows = file.read(2 * size)
            file.seek(0)
            file.write(rows[size:] + rows[:size])

    assert outcomes_after(stored, damage) == [Outcome.CORRUPT] * 2 + [Outcome.OK] * (ROWS - 2)


def test_row_of_another_epoch_or_namespace_is_corrupt(stored: Path) -> None:
    size = GEOMETRY.row_bytes

    def damage() -> None:
        for slot, sealer in enumerate((Sealer(GEOMETRY, NAMESPACE, 1), Sealer(GEOMETRY, bytes(16), 0))):
            row = payload(slot, GEOMETRY).copy()
            sealer.seal(row, key_of(slot))
            with slab(stored).open("r+b") as file:
                file.seek(slot * size)
                file.write(row.tobytes())

    assert outcomes_after(stored, damage)[:3] == [Outcome.CORRUPT, Outcome.CORRUPT, Outcome.OK]


def test_rows_of_a_truncated_slab_are_misses(stored: Path) -> None:
    keep = 10
    with slab(stored).open("r+b") as file:
        file.truncate(keep * GEOMETRY.row_bytes + 5000)
    with MoverProcess(file_tier(stored, CAPACITY), GEOMETRY, ROWS) as mover:
        mover.open()
        assert len(mover.listed_rows()) == keep
        assert mover.load(range(ROWS)) == [Outcome.OK] * keep + [Outcome.MISSING] * (ROWS - keep)
        assert set(mover.store(range(ROWS))) == {Outcome.OK}
        assert set(mover.load(range(ROWS))) == {Outcome.OK}


def test_rows_behind_the_end_of_a_slab_truncated_meanwhile_fail_alone(stored: Path) -> None:
    """NIXL fails the whole transfer; each row has an outcome of its own all the same."""
    later = changed(disk_check_s=3600.0)  # or the tier may notice it before that
    with HostRegion.create(GEOMETRY, ROWS) as region:
        tier = SlabTier(file_config(stored, CAPACITY), GEOMETRY, region, times=later)
        tier.open(NAMESPACE, 0)
        with slab(stored).open("r+b") as file:
            file.truncate(10 * GEOMETRY.row_bytes)
        tier.load([Move(n, n, key_of(n)) for n in range(ROWS)])
        ended: list[FinishedBatch] = []
        until(lambda: ended.extend(tier.poll()) or ended, "the batch to end")
        assert list(ended[0].outcomes) == [Outcome.OK] * 10 + [Outcome.FAILED] * (ROWS - 10)
        tier.close()


def test_slab_truncated_under_a_running_mover_is_reported_and_reopened(stored: Path) -> None:
    with MoverProcess(file_tier(stored, CAPACITY), GEOMETRY, ROWS) as mover:
        mover.open()
        with slab(stored).open("r+b") as file:
            file.truncate(10 * GEOMETRY.row_bytes)
        assert set(mover.load(range(ROWS))) <= {Outcome.OK, Outcome.FAILED}
        down = mover.expect(lambda m: isinstance(m, Down))
        assert isinstance(down, Down)
        assert down.reason == f"{slab(stored)} has been cut short"
        mover.expect(lambda m: isinstance(m, Opened))
        assert mover.load(range(ROWS)) == [Outcome.OK] * 10 + [Outcome.MISSING] * (ROWS - 10)


def test_rows_of_a_deleted_slab_are_misses(stored: Path) -> None:
    slab(stored).unlink()
    with MoverProcess(file_tier(stored, CAPACITY), GEOMETRY, ROWS) as mover:
        mover.open()
        assert mover.listed_rows() == []
        assert set(mover.load(range(ROWS))) == {Outcome.MISSING}
        assert set(mover.store(range(ROWS))) == {Outcome.OK}
        assert set(mover.load(range(ROWS))) == {Outcome.OK}


@pytest.mark.parametrize("damage", ["header", "some records", "deleted", "all of it deleted"])
def test_lost_journal_is_recovered_from_the_seals(stored: Path, damage: str) -> None:
    journal = journal_in(slab(stored).parent)
    if "deleted" in damage:
        journal.unlink()
        if damage != "deleted":
            slab(stored).with_name("namespace.json").unlink()
    else:
        with journal.open("r+b") as file:
            file.seek(0 if damage == "header" else 4096 + 16 * 128)
            file.write(b"\xa5" * 1000)
    for life in range(2):
        with MoverProcess(file_tier(stored, CAPACITY), GEOMETRY, ROWS) as mover:
            mover.open()
            listed = mover.listed_rows()
            assert [(entry.slot, entry.key) for entry in listed] == [(n, key_of(n)) for n in range(ROWS)]
            assert len({entry.tick for entry in listed}) == ROWS
            assert set(mover.load(range(ROWS))) == {Outcome.OK}
            mover.stop()
            assert ("by their seals" in mover.log()) is not bool(life)  # then the journal has them


def test_only_valid_seals_of_the_namespace_and_epoch_are_recovered(stored: Path) -> None:
    """Seals that are damaged, of another epoch or namespace, or cut off with their slab are not listed."""
    size = GEOMETRY.row_bytes
    others = [Sealer(GEOMETRY, NAMESPACE, 1), Sealer(GEOMETRY, bytes(16), 0), Sealer(Geometry(2, 30_001), NAMESPACE, 0)]
    with slab(stored).open("r+b") as file:
        for slot, sealer in enumerate(others):
            row = payload(slot, sealer.geometry).copy()
            sealer.seal(row, key_of(slot))
            file.seek(slot * size)
            file.write(row.tobytes())
        file.seek(4 * size - GEOMETRY.seal_bytes + 100)
        file.write(b"!")
        file.truncate((ROWS - 1) * size - 1)
    journal_in(slab(stored).parent).unlink()
    with MoverProcess(file_tier(stored, CAPACITY), GEOMETRY, ROWS) as mover:
        mover.open()
        assert {entry.slot for entry in mover.listed_rows()} == set(range(4, ROWS - 2))
        assert set(mover.load(range(4, ROWS - 2))) == {Outcome.OK}


def test_rows_missing_in_the_journal_are_recovered_but_not_deleted_ones(stored: Path) -> None:
    journal = journal_in(slab(stored).parent)
    for slot in range(20, ROWS):  # as after a kill: rows from 20 on not written yet
        overwrite_record(journal, slot)
    for _ in range(2):
        with MoverProcess(file_tier(stored, CAPACITY), GEOMETRY, ROWS) as mover:
            mover.open()
            assert [entry.slot for entry in mover.listed_rows()] == list(range(ROWS))  # the newest last
            mover.stop()
    with MoverProcess(file_tier(stored, CAPACITY), GEOMETRY, ROWS) as mover:
        mover.open()
        mover.listed_rows()
        mover.send(Delete([(n, key_of(n)) for n in range(4)]))
        assert wait_until(lambda: len(rows(journal)) == ROWS - 4)
        mover.kill()
    with MoverProcess(file_tier(stored, CAPACITY), GEOMETRY, ROWS) as mover:
        mover.open()
        assert [entry.slot for entry in mover.listed_rows()] == list(range(4, ROWS))


def test_records_older_than_the_rows_after_a_power_failure_are_corrected(stored: Path) -> None:
    """One says that its slot is empty, one names the key of another slot, one another key: no key is listed twice, no
    row is wrong, and the row in the slot that seemed empty is found."""
    journal = journal_in(slab(stored).parent)
    header = Header.read(journal.read_bytes())
    assert header is not None
    with journal.open("r+b") as file:
        file.write(header._replace(boot=bytes(16), flushed=False).pack())
    for slot, key in ((3, b""), (5, key_of(7)), (6, b"another key")):
        overwrite_record(journal, slot, encode(slot, Record(key, 0, 1), header.salt))
    with MoverProcess(file_tier(stored, CAPACITY), GEOMETRY, ROWS) as mover:
        mover.open()
        listed = {entry.slot: entry.key for entry in mover.listed_rows()}
        right = {n: key_of(n) for n in range(ROWS) if n not in (5, 6)}
        assert listed == {**right, 6: b"another key"}
        assert set(mover.load(sorted(right))) == {Outcome.OK}
        moves = [Move(0, 6, b"another key")]
        assert mover.finished(mover.begin(Load, moves)) == [Outcome.CORRUPT]


def test_lost_description_is_recovered_from_the_seals(stored: Path) -> None:
    (slab(stored).with_name("namespace.json")).write_text("{")
    with MoverProcess(file_tier(stored, CAPACITY), GEOMETRY, ROWS) as mover:
        mover.open()
        assert len(mover.listed_rows()) == ROWS
        assert set(mover.load(range(ROWS))) == {Outcome.OK}


def test_shard_without_description_and_valid_seals_is_emptied(stored: Path) -> None:
    (slab(stored).with_name("namespace.json")).unlink()
    slab(stored).write_bytes(b"x" * (8 * GEOMETRY.row_bytes))
    with MoverProcess(file_tier(stored, CAPACITY), GEOMETRY, ROWS) as mover:
        mover.open()
        assert mover.listed_rows() == []
        assert set(mover.store(range(ROWS))) == {Outcome.OK}


def test_slots_beyond_the_tier_fail_alone(tmp_path: Path) -> None:
    with MoverProcess(file_tier(tmp_path, CAPACITY), GEOMETRY, ROWS) as mover:
        slots = mover.open()
        moves = [Move(0, slots + 10**9, key_of(0), seal=True), Move(1, 1, key_of(1), seal=True)]
        assert mover.finished(mover.begin(Store, moves)) == [Outcome.FAILED, Outcome.OK]
        assert mover.finished(mover.begin(Load, moves)) == [Outcome.MISSING, Outcome.OK]
