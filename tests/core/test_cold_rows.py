"""Cold rows: found, used, evicted and retired without an entry of their own."""

from __future__ import annotations

from itertools import islice
from unittest import mock

import pytest

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.base.policies import Write
from nixl_tiers.core.cold_rows import take_all
from nixl_tiers.core.listing import EVICTED_A_STEP
from nixl_tiers.core.manager import Lookup, TierManager
from nixl_tiers.core.tier import TierIndex
from nixl_tiers.core.types import Direction, TierSpec, TierState
from tests.support.cold_table import PlainColdTable
from tests.support.core import opened, touched

PLACES = TierSpec("file", Write.THROUGH, physical_slots=True)
COUNT = TierSpec("s3", Write.THROUGH, physical_slots=False)


def key(number: int) -> Key:
    return b"key-%d" % number


def rows(numbers: range) -> PlainColdTable:
    """Row n in slot n, last used at tick n."""
    return PlainColdTable([(number, key(number), number) for number in numbers])


def list_table(core: TierManager, table: PlainColdTable, newest: int) -> None:
    take_all(core.events.table_listed(0, table, newest))


def open_core(spec: TierSpec, slots: int = 10, held: int = 6) -> TierManager:
    core = TierManager(8, 4096, [spec])
    opened(core, 0, slots)
    list_table(core, rows(range(held)), newest=held - 1)
    core.events.listed(0, [], last=True)
    return core


def store(core: TierManager, *numbers: int) -> None:
    plan = core.copies.prepare_store([key(number) for number in numbers], f"store {numbers}")
    core.copies.complete_store(core.copies.rows_being_filled(plan.keys), set())
    core.finish_request(f"store {numbers}")
    core.end_step()
    finish(core)


def finish(core: TierManager) -> None:
    while jobs := core.events.plan(0.0):
        for job in jobs:
            core.events.finished(job.tier, job.id, [Outcome.OK] * len(job.moves), 0.0)


def dropped(tier: TierIndex) -> set[tuple[int, Key]]:
    return {pair for batch in tier.delete_batches(2) for pair in batch}


@pytest.mark.parametrize("spec", [PLACES, COUNT], ids=["places", "count"])
class TestAnyTier:
    def test_cold_row_is_loaded_from_its_slot_and_indexed_from_then_on(self, spec: TierSpec) -> None:
        core = open_core(spec)
        assert core.tiers[0].state is TierState.UP
        assert core.where(key(3), 0.0) == spec.name
        assert not core.tiers[0].index  # a look-up does not warm it
        assert core.lookup(key(3), "request", 0, 0.0) is Lookup.PENDING
        (job,) = core.events.plan(0.0)
        assert job.direction is Direction.LOAD
        assert spec is COUNT or job.moves[0].entry.slot == 3
        core.events.finished(0, job.id, [Outcome.OK], 0.0)
        assert core.lookup(key(3), "request", 0, 0.0) is Lookup.HIT
        assert list(core.tiers[0].index) == [key(3)]
        assert len(core.tiers[0].cold.tables[0]) == 5
        assert len(core.tiers[0].slots) == 6

    def test_cold_row_is_not_stored_again(self, spec: TierSpec) -> None:
        core = open_core(spec)
        store(core, 2, 7)
        assert key(7) in core.tiers[0].index
        assert core.tiers[0].counters.bytes_written == 4096

    def test_coldest_rows_are_evicted_first_and_deleted_by_key(self, spec: TierSpec) -> None:
        core = open_core(spec, slots=6)
        touched(core, [key(0)], "request")
        store(core, 10, 11)
        tier = core.tiers[0]
        assert {name for _, name in dropped(tier)} == {key(1), key(2)}
        assert tier.counters.evictions == 2
        assert len(tier.slots) == 6
        assert core.where(key(0), 0.0) == spec.name
        store(core, 12, 13, 14, 15)
        assert tier.cold.tables == []
        assert {name for _, name in dropped(tier)} == {key(3), key(4), key(5), key(0)}

    def test_row_listed_as_removed_is_a_miss(self, spec: TierSpec) -> None:
        core = open_core(spec)
        core.events.listed(0, [(-1, key(4), 0)], last=False)
        assert core.where(key(4), 0.0) is None
        assert len(core.tiers[0].slots) == 5

    def test_new_epoch_misses_and_retires_cold_rows(self, spec: TierSpec) -> None:
        core = open_core(spec)
        (held,) = core.tiers[0].cold.tables
        core.reset(keep_tiers=False)
        assert core.where(key(1), 0.0) is None
        assert held in core.tiers[0].cold.take_retired()
        opened(core, 0, 10)
        core.events.listed(0, [], last=True)
        assert core.where(key(1), 0.0) is None
        assert len(core.tiers[0].slots) == 0

    def test_reopened_tier_serves_stale_rows_until_they_are_listed_again(self, spec: TierSpec) -> None:
        core = open_core(spec, slots=8)
        store(core, 6)
        touched(core, [key(0)], "request")
        core.events.lost(0, 0.0)
        assert core.where(key(3), 0.0) is None
        opened(core, 0, 8)
        assert core.where(key(3), 0.0) == spec.name
        touched(core, [key(3)], "request")
        again = rows(range(7))
        list_table(core, again, newest=6)
        assert len(core.tiers[0].cold.take_retired()) == 1
        assert core.tiers[0].cold.tables == [again]
        core.events.listed(0, [], last=True)
        assert [n for n in range(7) if core.where(key(n), 0.0) is None] == []
        assert len(core.tiers[0].slots) == 7
        assert dropped(core.tiers[0]) == set()

    def test_tier_reopened_with_fewer_slots_misses_until_listed_again(self, spec: TierSpec) -> None:
        core = open_core(spec)
        opened(core, 0, 4)
        assert core.where(key(1), 0.0) is None
        list_table(core, rows(range(6)), newest=5)
        assert len(core.tiers[0].slots) == 4
        if spec is COUNT:
            assert dropped(core.tiers[0]) == {(0, key(0)), (1, key(1))}

    def test_tier_that_is_reset_while_it_is_reopened_with_fewer_slots_stays_down(self, spec: TierSpec) -> None:
        for taken in range(12):
            core = open_core(spec, slots=1200)
            store(core, *range(100, 110))
            steps = core.events.opened(0, 4)
            for work in islice(steps, taken):
                assert core.tiers[0].state is TierState.DOWN
                if work is not None:
                    work()
            done = core.tiers[0].state is TierState.LISTING
            core.reset(keep_tiers=False)
            take_all(steps)
            assert core.tiers[0].state is TierState.DOWN
            assert len(core.tiers[0].slots) == core.tiers[0].counters.rows == 0
            if done:
                return
        pytest.fail("it takes too many steps")

    def test_reopening_with_fewer_slots_evicts_a_few_rows_a_step(self, spec: TierSpec) -> None:
        core = open_core(spec, slots=2000)
        for start in range(100, 1600, 8):
            store(core, *range(start, start + 8))
        before = core.tiers[0].counters.evictions
        for work in core.events.opened(0, 4):
            if work is not None:
                work()
            evicted = core.tiers[0].counters.evictions - before
            assert evicted <= EVICTED_A_STEP
            before += evicted
        assert len(core.tiers[0].index) <= 4


@pytest.mark.parametrize("spec", [PLACES, COUNT], ids=["places", "count"])
@pytest.mark.parametrize("taken", [0, 1, 2])
def test_table_from_before_a_reset_is_retired(spec: TierSpec, taken: int) -> None:
    core = open_core(spec, held=0)
    table = rows(range(6))
    steps = core.events.table_listed(0, table, newest=5)
    for work in islice(steps, taken):
        if work is not None:
            work()
    core.reset(keep_tiers=False)
    take_all(steps)
    tier = core.tiers[0]
    assert table in tier.cold.take_retired() or not len(table)
    assert not len(tier.slots)
    assert not tier.to_delete  # the mover would delete rows of the next namespace
    assert tier.counters.rows == 0


def test_cold_row_in_an_allocated_slot_is_ignored() -> None:
    core = TierManager(8, 4096, [PLACES])
    opened(core, 0, 10)
    core.events.listed(0, [(2, b"other", 1)], last=False)
    list_table(core, rows(range(12)), newest=11)
    assert [n for n in range(12) if core.where(key(n), 0.0) is None] == [2, 10, 11]
    assert len(core.tiers[0].slots) == 10


def test_slots_of_retired_cold_rows_are_free() -> None:
    core = open_core(PLACES, slots=6)
    opened(core, 0, 6)
    core.events.listed(0, [], last=True)  # the medium holds nothing any more
    assert len(core.tiers[0].slots) == 0
    store(core, *range(10, 16))
    assert sorted(entry.slot for entry in core.tiers[0].index.values()) == list(range(6))


def test_cold_rows_with_keys_are_demoted_before_eviction() -> None:
    core = TierManager(8, 4096, [PLACES, TierSpec("s3", Write.ON_EVICT, physical_slots=False)])
    opened(core, 1, 100)
    core.events.listed(1, [], last=True)
    opened(core, 0, 40)
    list_table(core, rows(range(40)), newest=39)
    core.events.listed(0, [], last=True)
    finish(core)
    upper, lower = core.tiers
    assert set(lower.index) == {key(0), key(1)}  # a twentieth is kept free
    assert {name for _, name in dropped(upper)} == {key(0), key(1)}
    assert len(upper.slots) == 38


@pytest.mark.parametrize("spec", [PLACES, COUNT], ids=["places", "count"])
def test_row_listed_twice_is_demoted_once(spec: TierSpec) -> None:
    core = TierManager(8, 4096, [spec, TierSpec("below", Write.ON_EVICT, physical_slots=False)])
    opened(core, 1, 100)
    core.events.listed(1, [], last=True)
    opened(core, 0, 20 if spec is PLACES else 19)
    core.events.listed(0, [(19, key(0), 0)], last=False)
    list_table(core, rows(range(19)), newest=18)
    core.events.listed(0, [], last=True)
    finish(core)
    upper, lower = core.tiers
    assert set(lower.index) == {key(0)}
    assert len(upper.slots) == len(upper.index) + len(upper.cold) == 18
    assert {name for _, name in dropped(upper)} == {key(0)}


def test_row_opened_for_load_keeps_its_recency() -> None:
    core = open_core(PLACES, slots=6)
    tier = core.tiers[0]
    for number in (5, 1, 3):
        assert tier.open_for_load(key(number), 0.0) is not None
    tier.make_room(6)
    order = [name for batch in tier.delete_batches(9) for _, name in batch]
    assert order == [key(number) for number in range(6)]


@pytest.mark.parametrize("spec", [PLACES, COUNT], ids=["places", "count"])
def test_warm_row_is_evicted_while_a_table_passes_over_removed_rows(spec: TierSpec) -> None:
    core = open_core(spec, held=10)
    tier = core.tiers[0]
    for number in (8, 9):
        assert tier.open_for_load(key(number), 0.0)
    with (
        mock.patch.object(PlainColdTable, "coldest", return_value=[]),
        mock.patch.object(PlainColdTable, "coldest_tick", return_value=0),
    ):
        assert tier.make_room(1) == [key(8)]
        assert tier.make_room(4) == [key(9)]  # and no other: the table has not found one yet
    assert tier.make_room(4) == [key(0), key(1)]
    assert len(tier.slots) == 6
