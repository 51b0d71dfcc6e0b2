"""`max_age` of row files: a row that is older is a miss, and its file goes, however often it was used since."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from nixl_tiers.config import FileTier
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover.messages import Entry, Move, Outcome
from nixl_tiers.mover.tiers.files import FilesStorage
from tests.mover.harness import NAMESPACE, key_of, payload, wait_until
from tests.mover.test_file_age import AGE_S, GEOMETRY, ROWS, Clock, gone
from tests.mover.test_file_storage import outcomes


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def region() -> Iterator[HostRegion]:
    with HostRegion.create(GEOMETRY, ROWS) as region:
        yield region


def open_tier(
    path: Path, region: HostRegion, clock: Clock, namespace: bytes = NAMESPACE, write: str = "through"
) -> FilesStorage:
    config = FileTier(type="file", layout="files", path=path, capacity=16 << 20, max_age=AGE_S, write=write)  # type: ignore[arg-type]
    tier = FilesStorage(config, GEOMETRY, region, clock)
    tier.open(namespace, 0)
    return tier


def listing(tier: FilesStorage) -> list[Entry]:
    """What a listing tells, and then what the sweep that it began has taken away."""
    entries = [entry for batch in tier.adopt() for entry in batch]
    assert wait_until(tier._sweeping.done)
    return entries + [entry for batch in tier.adopt() for entry in batch]


def store(tier: FilesStorage, region: HostRegion, numbers: range) -> None:
    for row, number in enumerate(numbers):
        region.rows_view[row] = payload(number, GEOMETRY)
    moves = [Move(row, number, key_of(number), seal=True) for row, number in enumerate(numbers)]
    assert set(outcomes(tier, tier.store(moves))[0]) == {Outcome.OK}  # type: ignore[arg-type]


def load(tier: FilesStorage, numbers: range) -> list[Outcome]:
    moves = [Move(row, number, key_of(number)) for row, number in enumerate(numbers)]
    return list(outcomes(tier, tier.load(moves))[0])  # type: ignore[arg-type]


def rows_in(path: Path) -> int:
    return len(list(path.rglob("*.row")))


def test_old_rows_are_swept_also_those_that_are_used(tmp_path: Path, region: HostRegion, clock: Clock) -> None:
    tier = open_tier(tmp_path, region, clock)
    assert listing(tier) == []
    store(tier, region, range(4))
    clock.now += 1800
    store(tier, region, range(4, 6))
    for path in tmp_path.rglob("*.row"):
        os.utime(path, (clock.now + 500,) * 2)  # just used
    clock.now += 1799
    assert listing(tier) == []
    clock.now += 61
    assert gone(listing(tier)) == [0, 1, 2, 3]
    assert rows_in(tmp_path) == 2
    assert set(load(tier, range(4, 6))) == {Outcome.OK}
    tier.close()


def test_rows_of_other_engines_and_namespaces_are_swept_too(tmp_path: Path, region: HostRegion, clock: Clock) -> None:
    other = bytes(reversed(NAMESPACE))
    for namespace in (other, NAMESPACE):
        tier = open_tier(tmp_path, region, clock, namespace)
        listing(tier)
        store(tier, region, range(3))
        tier.close()
    (tmp_path / NAMESPACE.hex() / "00").mkdir(exist_ok=True)
    (tmp_path / NAMESPACE.hex() / "00" / "abcd.row").write_bytes(bytes(5000))  # ages by its time
    clock.now += 3000
    tier = open_tier(tmp_path, region, clock)  # knows them only from the directory
    assert len(listing(tier)) == 3
    clock.now += 700
    assert gone(listing(tier)) == [0, 1, 2]
    assert rows_in(tmp_path) == 0
    tier.close()


def test_an_old_row_is_a_miss_and_goes(tmp_path: Path, region: HostRegion, clock: Clock) -> None:
    tier = open_tier(tmp_path, region, clock)
    listing(tier)
    store(tier, region, range(4))
    clock.now += AGE_S
    assert load(tier, range(2)) == [Outcome.MISSING] * 2
    assert wait_until(lambda: rows_in(tmp_path) == 2)
    tier.close()


def test_a_reader_forgets_old_rows_and_deletes_none(tmp_path: Path, region: HostRegion, clock: Clock) -> None:
    tier = open_tier(tmp_path, region, clock)
    listing(tier)
    store(tier, region, range(2))
    tier.close()
    reader = open_tier(tmp_path, region, clock, write="off")
    assert len(listing(reader)) == 2
    clock.now += AGE_S
    assert load(reader, range(2)) == [Outcome.MISSING] * 2
    assert wait_until(lambda: listing(reader) == [])  # and does not take them up again
    assert rows_in(tmp_path) == 2
    reader.close()


def test_a_row_that_is_stored_again_is_as_young_as_its_seal(tmp_path: Path, region: HostRegion, clock: Clock) -> None:
    first, second = (open_tier(tmp_path, region, clock) for _ in range(2))
    listing(first)
    store(first, region, range(2))
    assert len(listing(second)) == 2
    clock.now += 3000
    store(second, region, range(2))
    clock.now += 700
    assert listing(first) == []  # it knew the seals of before
    assert set(load(first, range(2))) == {Outcome.OK}
    assert rows_in(tmp_path) == 2
    first.close()
    second.close()
