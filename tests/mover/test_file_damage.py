"""Whatever happens to the files: a damaged row is a miss, its neighbours are hits, and the mover lives."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from nixl_tiers.chunk import Geometry
from nixl_tiers.memory.seal import Sealer
from nixl_tiers.mover.messages import Load, Move, Outcome, Store
from tests.mover.harness import NAMESPACE, MoverProcess, file_tier, key_of, payload

GEOMETRY = Geometry(2, 30_000, 3)  # both cells and the seal have padding
ROWS = 24
CAPACITY = 16 << 20


def slab(path: Path) -> Path:
    return path / NAMESPACE.hex() / "0" / "slab-00000.kv"


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
        assert len(mover.adopted()) == ROWS
        outcomes = mover.load(range(ROWS))
        # What was found bad is not offered again; what was good still is.
        mover.stop()
    with MoverProcess(file_tier(path, CAPACITY), GEOMETRY, ROWS) as mover:
        mover.open()
        good = [n for n, outcome in enumerate(outcomes) if outcome is Outcome.OK]
        assert [entry.key for entry in mover.adopted()] == [key_of(n) for n in good]
    return outcomes


def test_one_flipped_bit_anywhere(stored: Path) -> None:
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


def test_swapped_slots(stored: Path) -> None:
    size = GEOMETRY.row_bytes

    def damage() -> None:
        with slab(stored).open("r+b") as file:
            rows = file.read(2 * size)
            file.seek(0)
            file.write(rows[size:] + rows[:size])

    assert outcomes_after(stored, damage) == [Outcome.CORRUPT] * 2 + [Outcome.OK] * (ROWS - 2)


def test_the_same_key_of_another_epoch(stored: Path) -> None:
    size = GEOMETRY.row_bytes

    def damage() -> None:
        for slot, sealer in enumerate((Sealer(GEOMETRY, NAMESPACE, 1), Sealer(GEOMETRY, bytes(16), 0))):
            row = payload(slot, GEOMETRY).copy()
            sealer.seal(row, key_of(slot))
            with slab(stored).open("r+b") as file:
                file.seek(slot * size)
                file.write(row.tobytes())

    assert outcomes_after(stored, damage)[:3] == [Outcome.CORRUPT, Outcome.CORRUPT, Outcome.OK]


def test_a_slab_that_was_cut_short(stored: Path) -> None:
    keep = 10
    with slab(stored).open("r+b") as file:
        file.truncate(keep * GEOMETRY.row_bytes + 5000)
    with MoverProcess(file_tier(stored, CAPACITY), GEOMETRY, ROWS) as mover:
        mover.open()
        assert len(mover.adopted()) == keep
        assert mover.load(range(ROWS)) == [Outcome.OK] * keep + [Outcome.MISSING] * (ROWS - keep)
        assert set(mover.store(range(ROWS))) == {Outcome.OK}
        assert set(mover.load(range(ROWS))) == {Outcome.OK}


def test_a_slab_cut_short_under_a_running_mover(stored: Path) -> None:
    """NIXL fails the whole transfer; every row speaks for itself all the same."""
    with MoverProcess(file_tier(stored, CAPACITY), GEOMETRY, ROWS) as mover:
        mover.open()
        with slab(stored).open("r+b") as file:
            file.truncate(10 * GEOMETRY.row_bytes)
        assert mover.load(range(ROWS)) == [Outcome.OK] * 10 + [Outcome.FAILED] * (ROWS - 10)
        assert set(mover.load(range(10))) == {Outcome.OK}


def test_a_deleted_slab(stored: Path) -> None:
    slab(stored).unlink()
    with MoverProcess(file_tier(stored, CAPACITY), GEOMETRY, ROWS) as mover:
        mover.open()
        assert mover.adopted() == []
        assert set(mover.load(range(ROWS))) == {Outcome.MISSING}
        assert set(mover.store(range(ROWS))) == {Outcome.OK}
        assert set(mover.load(range(ROWS))) == {Outcome.OK}


@pytest.mark.parametrize("at", ["start", "middle"])
def test_a_damaged_journal_costs_the_rows_and_nothing_else(stored: Path, at: str) -> None:
    journal = slab(stored).with_name("manifest.sqlite")
    with journal.open("r+b") as file:
        file.seek(0 if at == "start" else 4096)
        file.write(b"\xa5" * 4096)
    with MoverProcess(file_tier(stored, CAPACITY), GEOMETRY, ROWS) as mover:
        mover.open()
        assert mover.adopted() == []
        assert set(mover.store(range(ROWS))) == {Outcome.OK}
        mover.stop()
        assert "is damaged" in mover.log()
    with MoverProcess(file_tier(stored, CAPACITY), GEOMETRY, ROWS) as mover:
        mover.open()
        assert len(mover.adopted()) == ROWS
        assert set(mover.load(range(ROWS))) == {Outcome.OK}


def test_a_lost_description_gives_the_namespace_up(stored: Path) -> None:
    (slab(stored).with_name("namespace.json")).write_text("{")
    with MoverProcess(file_tier(stored, CAPACITY), GEOMETRY, ROWS) as mover:
        mover.open()
        assert mover.adopted() == []
        assert set(mover.store(range(ROWS))) == {Outcome.OK}


def test_rows_outside_the_tier_are_refused_without_harm(tmp_path: Path) -> None:
    with MoverProcess(file_tier(tmp_path, CAPACITY), GEOMETRY, ROWS) as mover:
        slots = mover.open()
        moves = [Move(0, slots + 10**9, key_of(0), seal=True), Move(1, 1, key_of(1), seal=True)]
        assert mover.finished(mover.begin(Store, moves)) == [Outcome.FAILED, Outcome.OK]
        assert mover.finished(mover.begin(Load, moves)) == [Outcome.MISSING, Outcome.OK]
