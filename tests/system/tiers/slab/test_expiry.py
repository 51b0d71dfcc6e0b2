"""`max_age` of slabs: an expired row is a miss, and its bytes are erased from the disk."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.mover.protocol import Listed, Load
from nixl_tiers.tiers.base import Entry, Move, expire_if_due, expired, sweep_s
from nixl_tiers.tiers.slab import expiry, slabs
from nixl_tiers.tiers.slab.tier import SlabTier
from tests.mover.harness import NAMESPACE, MoverProcess, key_of, payload, shard_dir, wait_until
from tests.support.file_tier import file_config, file_tier
from tests.support.journals import records
from tests.system.tiers.file_tiers import AGE_S, CAPACITY, DAY_S, GEOMETRY, ROWS, Clock, gone, load, outcomes, store


def open_tier(path: Path, region: HostRegion, clock: Clock, namespace: bytes = NAMESPACE) -> SlabTier:
    tier = SlabTier(file_config(path, CAPACITY, max_age=AGE_S), GEOMETRY, region, clock)
    tier.open(namespace, 0)
    return tier


def listing(tier: SlabTier) -> list[Entry]:
    """The rows, the first time; after that, the entries of a round of upkeep."""
    batches = tier.maintain() if tier.served.listed else tier.list_rows()
    return [entry for batch in batches for entry in batch]


def on_disk(path: Path, number: int) -> bool:
    """Whether any file below the path has bytes of the row."""
    part = payload(number, GEOMETRY)[2048:4096].tobytes()
    return any(part in file.read_bytes() for file in path.rglob("*") if file.is_file())


def test_expire_if_due_and_sweep_interval() -> None:
    now = 1_800_000_000.0
    ages = [0.0, now - AGE_S - 1, now - AGE_S, now - AGE_S + 1, now, now + 1e8]
    old = [True, True, True, False, False, False]
    assert [expire_if_due(sealed_at, now, AGE_S) for sealed_at in ages] == old
    assert expired(np.array(ages, np.uint32), now, AGE_S).tolist() == old
    assert not expire_if_due(0.0, now, None)
    assert [sweep_s(age_s) for age_s in (1.0, 600.0, 86400.0)] == [0.1, 60.0, 60.0]


def test_zeroes_are_written_on_after_a_short_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "_ZERO_RANGE", 0x40)  # no file system has such a mode
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, raw, offset: real(fd, raw[: len(raw) // 2 + 1], offset))
    nbytes = (5 << 20) // 2
    (tmp_path / "slab").write_bytes(b"x" * (nbytes + 200))
    with (tmp_path / "slab").open("r+b") as file:
        slabs._zero(file.fileno(), 100, nbytes)
    assert (tmp_path / "slab").read_bytes() == b"x" * 100 + bytes(nbytes) + b"x" * 100


@pytest.mark.parametrize("ranges", [True, False], ids=["zeroed ranges", "written zeroes"])
def test_expired_rows_are_erased_from_the_disk(
    tmp_path: Path, region: HostRegion, clock: Clock, monkeypatch: pytest.MonkeyPatch, ranges: bool
) -> None:
    if not ranges:
        monkeypatch.setattr(slabs, "_ZERO_RANGE", 0x40)  # no file system has such a mode
    tier = open_tier(tmp_path, region, clock)
    assert listing(tier) == []
    store(tier, region, range(8))
    clock.now += 1800
    store(tier, region, range(8, 12))
    assert listing(tier) == []
    clock.now += 1801
    assert on_disk(tmp_path, 7)
    assert gone(listing(tier)) == list(range(8))
    assert not any(on_disk(tmp_path, number) for number in range(8))
    assert listing(tier) == []
    assert load(tier, region, range(12)) == [Outcome.MISSING] * 8 + [Outcome.OK] * 4
    assert set(store(tier, region, range(8))) == {Outcome.OK}
    assert set(load(tier, region, range(12))) == {Outcome.OK}
    tier.close()
    tier = open_tier(tmp_path, region, clock)
    assert sorted(entry.slot for entry in listing(tier)) == list(range(12))
    clock.now += 1801
    assert gone(listing(tier)) == [8, 9, 10, 11]
    tier.close()


def test_expired_row_is_a_miss_before_the_sweep(tmp_path: Path, region: HostRegion, clock: Clock) -> None:
    tier = open_tier(tmp_path, region, clock)
    listing(tier)
    store(tier, region, range(4))
    clock.now += AGE_S
    assert load(tier, region, range(4)) == [Outcome.MISSING] * 4
    listing(tier)
    assert not on_disk(tmp_path, 0)
    tier.close()


def test_deleted_row_is_erased_but_its_key_in_another_slot_is_kept(
    tmp_path: Path, region: HostRegion, clock: Clock
) -> None:
    tier = open_tier(tmp_path, region, clock)
    listing(tier)
    store(tier, region, range(4))
    tier.delete([(n, key_of(n)) for n in range(2)])
    clock.now += 1800
    region.rows_view[0] = payload(0, GEOMETRY)
    (ended,) = outcomes(tier, tier.store([Move(0, 9, key_of(0), 9, seal=True)]))  # in another slot, later
    assert list(ended) == [Outcome.OK]
    tier.close()
    tier = open_tier(tmp_path, region, clock)
    assert len(listing(tier)) == 3
    clock.now += 1801
    assert gone(listing(tier)) == [2, 3]
    assert not on_disk(tmp_path, 1)
    (ended,) = outcomes(tier, tier.load([Move(0, 9, key_of(0))]))
    assert list(ended) == [Outcome.OK]
    tier.close()


def test_row_sealed_by_another_tier_keeps_its_age(tmp_path: Path, region: HostRegion, clock: Clock) -> None:
    """It was sealed by another tier's mover, long before it is stored here."""
    tier = open_tier(tmp_path, region, clock)
    listing(tier)
    store(tier, region, range(1))
    clock.now += 1800
    (ended,) = outcomes(tier, tier.store([Move(0, 5, key_of(0), 1)]))  # with the seal that it has in the region
    assert list(ended) == [Outcome.OK]
    clock.now += 1801
    listing(tier)
    assert not on_disk(tmp_path, 0)
    tier.close()


def test_recovered_rows_keep_the_age_of_their_seals(tmp_path: Path, region: HostRegion, clock: Clock) -> None:
    tier = open_tier(tmp_path, region, clock)
    listing(tier)
    store(tier, region, range(4))
    tier.close()
    clock.now += 3000
    for path in tmp_path.rglob("manifest.*"):
        path.unlink()
    tier = open_tier(tmp_path, region, clock)
    assert len(listing(tier)) == 4
    clock.now += 601
    assert gone(listing(tier)) == [0, 1, 2, 3]
    tier.close()


def test_row_sealed_ahead_of_the_clock_ages_from_when_it_was_first_seen(
    tmp_path: Path, region: HostRegion, clock: Clock
) -> None:
    """The clock was a year ahead and is corrected: by their seals alone, the rows would stay for a year."""
    right, clock.now = clock.now, clock.now + 365 * DAY_S
    tier = open_tier(tmp_path, region, clock)
    listing(tier)
    store(tier, region, range(2))
    clock.now = right
    assert listing(tier) == []
    assert set(load(tier, region, range(2))) == {Outcome.OK}
    journal = shard_dir(tmp_path) / "manifest.journal"
    assert wait_until(lambda: tier.poll() == [] and latest(journal) == right)
    tier.close()
    clock.now += AGE_S / 2
    tier = open_tier(tmp_path, region, clock)  # a restart does not make them younger
    assert len(listing(tier)) == 2
    clock.now += AGE_S / 2 - 1
    assert listing(tier) == []
    assert set(load(tier, region, range(2))) == {Outcome.OK}
    clock.now += 1
    assert load(tier, region, range(2)) == [Outcome.MISSING] * 2
    clock.now += 60
    listing(tier)
    assert not on_disk(tmp_path, 0)
    tier.close()


def test_clock_that_is_behind_for_a_while_expires_nothing_early(
    tmp_path: Path, region: HostRegion, clock: Clock
) -> None:
    right = clock.now
    tier = open_tier(tmp_path, region, clock)
    listing(tier)
    store(tier, region, range(2))
    tier.close()
    clock.now = 1000.0  # as after a boot, before time is synchronized
    tier = open_tier(tmp_path, region, clock)
    assert len(listing(tier)) == 2
    assert listing(tier) == []
    store(tier, region, range(2, 3))
    clock.now = right + AGE_S - 1
    assert gone(listing(tier)) == [2]
    assert set(load(tier, region, range(2))) == {Outcome.OK}
    clock.now = right + AGE_S + 60
    assert gone(listing(tier)) == [0, 1]
    assert not on_disk(tmp_path, 0)
    tier.close()


def latest(journal: Path) -> int:
    return max((record.sealed_at for record in records(journal).values()), default=0)


def test_rows_stored_during_a_sweep_stay(
    tmp_path: Path, region: HostRegion, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expiry, "MAX_ENTRIES", 4)
    tier = open_tier(tmp_path, region, clock)
    listing(tier)
    store(tier, region, range(12))
    clock.now += AGE_S
    sweep = tier.maintain()
    while not tier.served.expiry.erasing:
        next(sweep)
    tier.delete([(n, key_of(n)) for n in range(4, 10)])
    for row in range(6):
        region.rows_view[row] = payload(50 + row, GEOMETRY)
    batch_id = tier.store([Move(row, 4 + row, key_of(50 + row), 9, seal=True) for row in range(6)])
    assert set(outcomes(tier, batch_id)[0]) == {Outcome.OK}
    assert gone([entry for batch in sweep for entry in batch]) == [0, 1, 2, 3, 10, 11]
    assert not on_disk(tmp_path, 11)
    for _ in range(2):  # also after a restart, from the journal
        (ended,) = outcomes(tier, tier.load([Move(row, 4 + row, key_of(50 + row)) for row in range(6)]))
        assert set(ended) == {Outcome.OK}
        tier.close()
        tier = open_tier(tmp_path, region, clock)
        assert sorted(entry.slot for entry in listing(tier)) == list(range(4, 10))
    tier.close()


def test_expired_shard_without_a_mover_is_deleted(tmp_path: Path, region: HostRegion, clock: Clock) -> None:
    other = bytes(reversed(NAMESPACE))
    tier = open_tier(tmp_path, region, clock, other)
    listing(tier)
    store(tier, region, range(2))
    tier.open(NAMESPACE, 0)
    listing(tier)
    clock.now = max(file.stat().st_mtime for file in shard_dir(tmp_path, other).rglob("*")) + AGE_S - 60
    listing(tier)
    assert shard_dir(tmp_path, other).exists()
    clock.now += 61
    listing(tier)
    assert not shard_dir(tmp_path, other).exists()
    assert shard_dir(tmp_path).exists()
    tier.close()


def test_shard_written_ahead_of_the_clock_ages_from_when_it_was_first_seen(
    tmp_path: Path, region: HostRegion, clock: Clock
) -> None:
    other = bytes(reversed(NAMESPACE))
    tier = open_tier(tmp_path, region, clock, other)
    listing(tier)
    store(tier, region, range(2))
    tier.open(NAMESPACE, 0)
    listing(tier)
    for file in shard_dir(tmp_path, other).rglob("*"):
        os.utime(file, (clock.now + 365 * DAY_S,) * 2)
    for _ in range(10):
        listing(tier)
        assert shard_dir(tmp_path, other).exists()
        clock.now += AGE_S / 10
    listing(tier)
    assert not shard_dir(tmp_path, other).exists()
    tier.close()


def test_rows_in_use_are_left_for_the_next_sweep(tmp_path: Path, region: HostRegion, clock: Clock) -> None:
    tier = open_tier(tmp_path, region, clock)
    listing(tier)
    store(tier, region, range(4))
    clock.now += AGE_S
    batch_id = tier.load([Move(row, row, key_of(row)) for row in range(2)])  # in flight
    assert gone(listing(tier)) == [2, 3]
    assert [list(part) for part in outcomes(tier, batch_id)] == [[Outcome.MISSING] * 2]
    listing(tier)
    assert not on_disk(tmp_path, 0)
    tier.close()


def test_store_into_a_slot_being_erased_waits(tmp_path: Path, region: HostRegion, clock: Clock) -> None:
    tier = open_tier(tmp_path, region, clock)
    listing(tier)
    store(tier, region, range(4))
    clock.now += AGE_S
    sweep = tier.maintain()
    while not tier.served.expiry.erasing:
        next(sweep)
    for row in range(4):
        region.rows_view[row] = payload(50 + row, GEOMETRY)
    batch_id = tier.store([Move(row, row, key_of(50 + row), seal=True) for row in range(4)])
    for _ in sweep:
        assert tier.poll() == []
    # A kill in the middle of these stores must not leave records of erased slots over new bytes.
    assert (~tier.served.journal.known[:4]).all()
    assert set(outcomes(tier, batch_id)[0]) == {Outcome.OK}
    (ended,) = outcomes(tier, tier.load([Move(row, row, key_of(50 + row)) for row in range(4)]))
    assert set(ended) == {Outcome.OK}
    tier.close()


def test_mover_reports_expired_rows_as_gone(tmp_path: Path) -> None:
    with MoverProcess(file_tier(tmp_path, 16 << 20, max_age=1), GEOMETRY, ROWS) as mover:
        mover.open()
        mover.listed_rows()
        assert set(mover.store(range(4))) == {Outcome.OK}
        entries: list[Entry] = []
        while len(entries) < 4:
            message = mover.expect(lambda m: isinstance(m, Listed))
            assert isinstance(message, Listed)
            entries += message.entries
        assert gone(entries) == [0, 1, 2, 3]
        assert wait_until(lambda: not on_disk(tmp_path, 0))
        moves = [Move(row, row, key_of(row)) for row in range(4)]
        assert Outcome.OK not in mover.finished(mover.begin(Load, moves))
