"""`max_age` of slabs: an expired row is a miss, and its bytes are erased from the disk; clocks may jump."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.tiers.base import Move
from nixl_tiers.tiers.slab import expiry, slabs
from nixl_tiers.tiers.slab.journal import EMPTY, UNKNOWN, WRITE_S, Journal
from tests.mover.harness import key_of, payload
from tests.tiers.slab.stepped import GEOMETRY, SteppedSlabs, Threads, number_of

AGE_S = 3600
OK, MISSING = Outcome.OK, Outcome.MISSING


@pytest.fixture
def opened(make: Callable[..., SteppedSlabs]) -> Callable[[], SteppedSlabs]:
    def opened() -> SteppedSlabs:
        one = make(max_age=AGE_S)
        one.open()
        return one

    return opened


@pytest.fixture
def one(opened: Callable[[], SteppedSlabs]) -> SteppedSlabs:
    return opened()


def again(one: SteppedSlabs, opened: Callable[[], SteppedSlabs]) -> SteppedSlabs:
    """After a restart, with its clock as it was."""
    one.tier.close()
    after = opened()
    after.day_s = one.day_s
    return after


def gone(one: SteppedSlabs) -> list[int]:
    return sorted(number_of(entry) for entry in one.maintain())


def on_disk(path: Path, number: int) -> bool:
    """Whether any file below the path has bytes of the row."""
    part = payload(number, GEOMETRY)[2048:4096].tobytes()
    return any(part in file.read_bytes() for file in path.rglob("*") if file.is_file())


@pytest.mark.parametrize("ranges", [True, False], ids=["zeroed ranges", "written zeroes"])
def test_old_rows_are_erased_and_all_others_stay(
    one: SteppedSlabs, opened: Callable[[], SteppedSlabs], monkeypatch: pytest.MonkeyPatch, ranges: bool
) -> None:
    """Also of rows that were deleted, whose key may be in another slot."""
    order: list[object] = []
    forget, flush = Journal.forget, os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda file: (order.append("flushed"), flush(file)))
    monkeypatch.setattr(
        Journal, "forget", lambda it, slots, what=UNKNOWN: order.append(what) or forget(it, slots, what)
    )
    if not ranges:
        monkeypatch.setattr(slabs, "_ZERO_RANGE", 0x40)  # no file system has such a mode
    assert one.store(range(8)) == [OK] * 8
    one.tier.delete([(number, key_of(number)) for number in range(2)])
    one.day_s += AGE_S / 2
    assert one.store([0, 8, 9], [12, 8, 9]) == [OK] * 3
    assert gone(one) == []
    one.day_s += AGE_S / 2 + 1
    assert on_disk(one.path, 1)
    assert gone(one) == [*range(2, 8)]
    assert order == [UNKNOWN, "flushed", EMPTY]
    assert not any(on_disk(one.path, number) for number in range(1, 8))
    assert gone(one) == []
    assert one.load([0, *range(1, 10)], [12, *range(1, 10)]) == [OK, *[MISSING] * 7, OK, OK]
    assert one.store([2]) == [OK]
    after = again(one, opened)
    assert after.load([0, 2, 8], [12, 2, 8]) == [OK] * 3
    after.day_s += AGE_S / 2
    assert gone(after) == [0, 8, 9]


def test_row_that_is_too_old_is_a_miss_before_it_is_erased(one: SteppedSlabs) -> None:
    assert one.store([0]) == [OK]
    one.day_s += AGE_S / 2
    assert one.store([1]) == [OK]
    move = Move(0, 5, key_of(1), 1)
    assert one.end(one.tier.store([move])) == [OK], "with the seal that another tier has given it"
    one.day_s += AGE_S / 2
    assert one.load([0, 1, 1], [0, 1, 5]) == [MISSING, OK, OK]
    one.day_s += AGE_S / 2
    assert one.load([1], [5]) == [MISSING]
    gone(one)
    assert not on_disk(one.path, 1)


def test_row_sealed_ahead_of_the_clock_ages_from_when_it_was_first_seen(
    one: SteppedSlabs, opened: Callable[[], SteppedSlabs]
) -> None:
    """The clock was a year ahead and is corrected: by their seals alone, the rows would stay for a year."""
    one.day_s += 365 * 86400
    assert one.store(range(2)) == [OK] * 2
    one.day_s -= 365 * 86400
    assert gone(one) == []
    assert one.load(range(2)) == [OK] * 2
    one.clock.now += WRITE_S
    one.step()
    one.day_s += AGE_S / 2
    after = again(one, opened)  # a restart does not make them younger
    after.day_s += AGE_S / 2 - 1
    assert gone(after) == []
    assert after.load(range(2)) == [OK] * 2
    after.day_s += 1
    assert after.load(range(2)) == [MISSING] * 2
    after.day_s += 60
    gone(after)
    assert not on_disk(after.path, 0)


def test_clock_that_is_behind_for_a_while_expires_nothing_early(
    one: SteppedSlabs, opened: Callable[[], SteppedSlabs]
) -> None:
    right = one.day_s
    assert one.store(range(2)) == [OK] * 2
    one.day_s = 1000.0  # as after a boot, before time is synchronized
    after = again(one, opened)
    assert gone(after) == []
    assert after.store([2]) == [OK]
    after.day_s = right + AGE_S - 1
    assert gone(after) == [2]
    assert after.load(range(2)) == [OK] * 2
    after.day_s = right + AGE_S + 60
    assert gone(after) == [0, 1]
    assert not on_disk(after.path, 0)


def test_rows_in_use_are_left_for_the_next_sweep(one: SteppedSlabs) -> None:
    assert one.store(range(4)) == [OK] * 4
    one.day_s += AGE_S
    batch = one.tier.load([Move(row, row, key_of(row)) for row in range(2)])  # in flight
    assert [number_of(entry) for entries in one.tier.maintain() for entry in entries] == [2, 3]
    assert one.end(batch) == [MISSING] * 2
    gone(one)
    assert not on_disk(one.path, 0)


@pytest.fixture
def sweep(one: SteppedSlabs, threads: Threads, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of eight rows, four at a time: the first of them are about to be erased."""
    monkeypatch.setattr(expiry, "MAX_ENTRIES", 4)
    assert one.store(range(8)) == [OK] * 8
    one.day_s += AGE_S
    eraser = threads.pools["eraser"]
    eraser.at_once = False
    sweep = one.tier.maintain()
    while not one.tier.served.expiry.erasing:
        eraser.run()
        next(sweep)
    eraser.at_once = True
    return sweep


def test_store_into_a_slot_that_is_being_erased_waits(one: SteppedSlabs, sweep: Any, threads: Threads) -> None:
    waits = one.begin_store(range(50, 54), range(4))
    assert one.end(one.tier.load([Move(10, 0, key_of(0))])) == [MISSING]
    assert waits not in one.ended
    threads.pools["eraser"].run()
    for _ in sweep:
        assert one.tier.poll() == []
    # A kill in the middle of these stores must not leave records of erased slots over new bytes.
    assert not one.tier.served.journal.known[:4].any()
    assert one.end(waits) == [OK] * 4
    assert one.load(range(50, 54), range(4)) == [OK] * 4


def test_zeroes_are_written_on_after_a_short_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "_ZERO_RANGE", 0x40)
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, raw, offset: real(fd, raw[: len(raw) // 2 + 1], offset))
    nbytes = (5 << 20) // 2
    (tmp_path / "slab").write_bytes(b"x" * (nbytes + 200))
    with (tmp_path / "slab").open("r+b") as file:
        slabs._zero(file.fileno(), 100, nbytes)
    assert (tmp_path / "slab").read_bytes() == b"x" * 100 + bytes(nbytes) + b"x" * 100
