"""Spilling the coldest rows of a tier's index into tables: against a plain LRU, with changes between all its steps."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from nixl_tiers.base.chunk import Key
from nixl_tiers.base.policies import Write
from nixl_tiers.core import spill
from nixl_tiers.core.cold_rows import MAX_TABLES, ColdTable, Spill, Steps, take_all
from nixl_tiers.core.limits import Limits
from nixl_tiers.core.listing import add_table, begin_listing, end_listing
from nixl_tiers.core.spill import Build, cancel_steps, spill_steps
from nixl_tiers.core.tier import TierIndex
from nixl_tiers.core.types import Entry, TierSpec, TierState
from nixl_tiers.memory.key_hash import KeyHash
from nixl_tiers.memory.row_table import Rows, RowTable
from tests.support.cold_table import PlainColdTable, build_table

HOT = 8
LIMITS = Limits(hot_rows=HOT, rows_per_slice=2)
HASH = KeyHash.random()
KEYS = [b"key-%d" % n for n in range(24)]
SLOTS = 20


def build_row_table(parts, sources):  # type: ignore[no-untyped-def]
    rows = Rows()
    for part in parts:
        rows.add(*part)
    return RowTable.build(rows, sources, key_hash=HASH)


def new_index(physical: bool) -> TierIndex:
    index = TierIndex(TierSpec("tier", Write.THROUGH, physical_slots=physical), 0, LIMITS)
    take_all(begin_listing(index, SLOTS))
    index.state = TierState.UP
    return index


def store(index: TierIndex, key: Key, tick: int) -> None:
    index.make_room(1)
    entry = index.reserve(key, tick)
    assert entry is not None
    entry.stored = True


def rows_of(index: TierIndex) -> set[Key]:
    return {key for key in KEYS if key in index}


STEP = st.one_of(
    st.tuples(st.sampled_from(["store", "touch", "load", "invalidate", "removed"]), st.sampled_from(KEYS)),
    st.tuples(st.just("store_all"), st.none()),
    st.tuples(st.just("spill"), st.integers(1, 6)),
    st.tuples(st.sampled_from(["evict", "victims"]), st.integers(1, 4)),
    st.tuples(st.sampled_from(["reset", "reopen", "shrink"]), st.none()),
)


class Rig:
    """An index, a model of it (key -> tick, the coldest first), and a spill that goes on step by step."""

    def __init__(self, physical: bool, build: Build) -> None:
        self.index = new_index(physical)
        self.model: dict[Key, int] = {}
        self.tick = 0
        self.build = build
        self.steps: Steps | None = None
        self.spilled = 0

    def use(self, key: Key) -> None:
        self.model.pop(key, None)
        self.model[key] = self.tick
        self.tick += 1

    def apply(self, name: str, argument: object) -> None:
        getattr(self, name)(argument) if argument is not None else getattr(self, name)()
        self.check()

    def store(self, key: Key) -> None:
        if key not in self.index:
            if len(self.model) == self.index.slots.limit:
                del self.model[next(iter(self.model))]
            store(self.index, key, self.tick)
            self.use(key)

    def store_all(self) -> None:
        for key in KEYS:
            self.store(key)

    def touch(self, key: Key) -> None:
        self.index.touch(key, self.tick)
        if key in self.model:
            self.use(key)
        while self.index.take_recent_uses(100):
            pass

    def load(self, key: Key) -> None:
        entry = self.index.open_for_load(key, 0.0)
        assert (entry is not None) == (key in self.model)
        if entry is not None:
            entry.readers += 1
            self.spill(3)  # it is pinned all the while
            assert self.index.index.get(key) is entry
            entry.readers -= 1

    def invalidate(self, key: Key) -> None:
        entry = self.index.open_for_trial(key)
        if entry is not None:
            assert self.index.invalidate(key, entry)
            del self.model[key]

    def removed(self, key: Key) -> None:
        self.index.add_listed(-1, key, 0)
        self.model.pop(key, None)

    def evict(self, count: int) -> None:
        victims = self.index.make_room(self.index.slots.free + count)
        assert victims == list(self.model)[:count]
        for key in victims:
            del self.model[key]

    def victims(self, count: int) -> None:
        keys = self.index.select_victims(count)
        assert keys == list(self.model)[:count]
        for key in keys[1:]:
            self.index.cancel_eviction(key, self.tick)
            self.use(key)
        if keys:
            self.index.evict(keys[0])
            del self.model[keys[0]]

    def reset(self) -> None:
        self.index.clear()
        self.model.clear()
        take_all(begin_listing(self.index, SLOTS))
        self.index.state = TierState.UP

    def reopen(self) -> None:
        """The mover lists again all that it had listed, in tables of five."""
        listed = [(self.slot(key), key, tick) for key, tick in self.model.items()]
        take_all(begin_listing(self.index, self.index.slots.limit))
        self.spill(1)
        for start in range(0, len(listed), 5):
            slots, keys, ticks = zip(*listed[start : start + 5], strict=True)
            table = self.build([(keys, slots, ticks)], ())
            take_all(add_table(self.index, table))
            self.spill(1)
        take_all(end_listing(self.index))
        self.index.state = TierState.UP

    def shrink(self) -> None:
        if self.index.spec.physical_slots:
            return  # rows beyond the limit would have to go, whatever their recency
        self.index.set_limit(max(1, self.index.slots.limit - 1))
        while len(self.model) > self.index.slots.limit:
            self.evict(1)

    def spill(self, count: int) -> None:
        for _ in range(count):
            if self.steps is None:
                if not self.index.needs_spill:
                    return  # now; the first step may come when it does not need one any more
                self.steps = spill_steps(self.index, self.build)
            try:
                work = next(self.steps)
            except StopIteration:
                self.steps = None
                self.spilled += 1
            else:
                if work is not None:
                    work()

    def slot(self, key: Key) -> int:
        entry = self.index.index.get(key)
        found = next((hit for table in self.index.cold.tables if (hit := table.find(key))), (0, 0))
        return found[0] if entry is None else entry.slot

    def check(self) -> None:
        index = self.index
        assert rows_of(index) == set(self.model)
        assert len(index.slots) == len(self.model)
        if index.spec.physical_slots:
            assert len({self.slot(key) for key in self.model}) == len(self.model)
        for retired in index.cold.take_retired() if self.steps is None else ():
            retired.close()


def behaves_like_a_plain_lru(steps: list[tuple[str, object]], physical: bool, build: Build) -> None:
    rig = Rig(physical, build)
    for step in steps:
        rig.apply(*step)
    rig.spill(100)
    while rig.model:
        rig.evict(1)


HISTORIES = st.lists(STEP, min_size=20, max_size=60)
BUILDS = st.sampled_from([build_table, build_row_table])


@settings(max_examples=40, deadline=None)
@given(steps=HISTORIES, physical=st.booleans(), build=BUILDS)
@example(  # a row that was pinned while warmer ones were collected
    steps=[("store_all", None), ("load", b"key-5"), ("spill", 2), *[("store", b"key-0")] * 10, ("victims", 1)],
    physical=False,
    build=build_table,
)
def test_spilling_index_behaves_like_a_plain_lru(steps: list[tuple[str, object]], physical: bool, build: Build) -> None:
    behaves_like_a_plain_lru(steps, physical, build)


def keep_without_log(self: Spill, _key: Key, entry: Entry) -> int:
    place, entry.spilled_at = entry.spilled_at, -1
    self.leaving -= 1
    return self.ticks[place]


def replay_nothing(_table: ColdTable, _changes: list[Key], _batch: int) -> Steps:
    return iter(())


MUTANTS = {
    "a row that is used while it is spilled is not replayed": (Spill, "keep", keep_without_log),
    "nothing is replayed": (spill, "replay", replay_nothing),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bug_in_spilling_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, mutant = MUTANTS[name]
    monkeypatch.setattr(owner, method, mutant)

    @settings(
        max_examples=5000,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(steps=HISTORIES, physical=st.booleans())
    def run(steps: list[tuple[str, object]], physical: bool) -> None:
        behaves_like_a_plain_lru(steps, physical, build_table)

    with pytest.raises((AssertionError, KeyError)):
        run()


@pytest.mark.parametrize("when", ["before the copy", "after the copy"])
def test_row_that_leaves_a_table_while_that_is_merged_is_not_in_the_new_table(when: str) -> None:
    index = new_index(physical=True)
    for number, key in enumerate(KEYS[:SLOTS]):
        store(index, key, number)
        if number == HOT:
            take_all(spill_steps(index, build_table))
    assert KEYS[0] not in index.index
    steps = spill_steps(index, build_table)
    while (work := next(steps)) is None:
        pass
    if when == "before the copy":
        index.touch(KEYS[0], 100)
        work()
    else:
        work()
        index.touch(KEYS[0], 100)
    take_all(steps)
    assert len(index.cold.tables) == 1
    assert index.cold.tables[0].find(KEYS[0]) is None
    assert len(index.index) + len(index.cold) == SLOTS
    assert index.make_room(SLOTS) == [*KEYS[1:SLOTS], KEYS[0]]


def test_row_that_is_stored_anew_while_rows_are_collected_is_found_in_its_new_slot() -> None:
    """Its first slot, which was collected, belongs to another row by now."""
    index = new_index(physical=True)
    for number, key in enumerate(KEYS[:10]):
        store(index, key, 100 + number)
    steps = spill_steps(index, build_row_table)
    next(steps)  # two rows are collected
    first = index.index[KEYS[0]]
    assert index.invalidate(KEYS[0], first)
    store(index, b"other", 200)
    store(index, KEYS[0], 5)  # by a request that began long ago
    assert index.index[b"other"].slot == first.slot != index.index[KEYS[0]].slot
    slot = index.index[KEYS[0]].slot
    take_all(steps)
    entry = index.open_for_load(KEYS[0], 0.0)
    assert entry is not None
    assert entry.slot == slot


def test_nothing_is_spilled_if_the_tier_is_opened_again_before_the_first_step() -> None:
    index = new_index(physical=True)
    for number, key in enumerate(KEYS[:SLOTS]):
        store(index, key, number)
    steps = spill_steps(index, build_table)
    take_all(begin_listing(index, SLOTS))
    take_all(steps)
    assert not index.cold.tables


def test_other_policies_do_not_spill() -> None:
    index = TierIndex(TierSpec("tier", Write.THROUGH, physical_slots=True, policy="arc"), 0, LIMITS)
    take_all(begin_listing(index, SLOTS))
    index.state = TierState.UP
    for key in KEYS[:SLOTS]:
        store(index, key, 0)
    assert not index.needs_spill


def test_index_is_bounded_and_there_are_few_tables() -> None:
    index = TierIndex(TierSpec("tier", Write.THROUGH, physical_slots=True), 0, LIMITS)
    take_all(begin_listing(index, 1000))
    index.state = TierState.UP
    for number in range(1000):
        store(index, b"row-%d" % number, number)
        while index.needs_spill:
            take_all(spill_steps(index, build_table))
        assert len(index.index) <= HOT
        assert len(index.cold.tables) <= MAX_TABLES
    assert all(b"row-%d" % number in index for number in range(1000))
    assert index.make_room(1000) == [b"row-%d" % number for number in range(1000)]


def test_suspects_and_pinned_rows_are_not_spilled() -> None:
    index = new_index(physical=True)
    for number, key in enumerate(KEYS[:SLOTS]):
        store(index, key, number)
    index.denylist.suspect([KEYS[0]], 0.0)
    index.index[KEYS[1]].readers = 1
    index.index[KEYS[2]].stored = False
    index.recent_uses.add(KEYS[3], 3)
    take_all(spill_steps(index, build_table))
    assert list(index.index)[:4] == KEYS[:4]
    assert len(index.index) == HOT // 2


def test_victims_that_wait_for_the_tier_below_do_not_make_others_spill() -> None:
    index = new_index(physical=True)
    for number, key in enumerate(KEYS[:16]):
        store(index, key, number)
    assert index.select_victims(8) == KEYS[:8]
    take_all(spill_steps(index, build_table))
    assert len(index.policy) == HOT // 2
    assert set(index.index) == {*KEYS[:8], *KEYS[12:16]}
    assert not index.needs_spill


def test_spill_that_finds_no_row_builds_no_table() -> None:
    index = new_index(physical=True)
    for number, key in enumerate(KEYS[:SLOTS]):
        store(index, key, number)
        index.index[key].readers = 1

    def build(*_: object) -> PlainColdTable:
        raise AssertionError("a table is built")

    take_all(spill_steps(index, build))
    assert index.spill is None
    assert len(index.index) == SLOTS


def test_a_step_passes_over_a_bounded_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    index = TierIndex(TierSpec("file", Write.THROUGH, physical_slots=True), 0, Limits(hot_rows=800, rows_per_slice=10))
    take_all(begin_listing(index, 1000))
    index.state = TierState.UP
    for number in range(1000):
        store(index, b"%d" % number, number)
    for number in range(300):
        index.recent_uses.add(b"%d" % number, number)
    checked: list[Key] = []
    must_stay = spill._must_stay

    def count(index: TierIndex, key: Key) -> bool:
        checked.append(key)
        return must_stay(index, key)

    monkeypatch.setattr(spill, "_must_stay", count)
    steps = 0
    for work in spill_steps(index, build_table):
        assert len(checked) <= 50
        checked.clear()
        steps += 1
        if work is not None:
            work()
    assert steps > 60
    assert len(index.index) == 400
    assert all(b"%d" % number in index.index for number in range(300))


@pytest.mark.parametrize("pinned", [True, False])
def test_victims_are_the_coldest_of_all_though_a_colder_row_was_pinned(pinned: bool) -> None:
    index = new_index(physical=True)
    for number, key in enumerate(KEYS[:SLOTS]):
        store(index, key, 10 * number)
    take_all(spill_steps(index, build_table))
    index.touch(KEYS[0], 55)
    index.index[KEYS[0]].readers = 1
    assert index.make_room(3) == KEYS[1:4]
    if pinned:
        assert index.make_room(SLOTS) == KEYS[4:SLOTS]
    else:
        assert index.make_room(6) == [KEYS[4], KEYS[5], KEYS[6]]
        index.index[KEYS[0]].readers = 0
        assert index.make_room(SLOTS) == [KEYS[0], *KEYS[7:SLOTS]]


def test_row_that_was_passed_over_by_a_spill_keeps_its_place_in_the_order() -> None:
    index = new_index(physical=True)
    for number, key in enumerate(KEYS[:10]):
        store(index, key, number)
    stays = KEYS[2]
    index.denylist.suspect([stays], 0.0)
    take_all(spill_steps(index, build_table))
    assert stays in index.index
    for key in KEYS[:2]:
        index.touch(key, 1)  # in `index`, and as cold as before
    assert index.make_room(SLOTS) == [KEYS[1], KEYS[0], *KEYS[2:10]]


def test_no_memory_for_a_table_leaves_the_rows_in_the_index() -> None:
    index = new_index(physical=True)
    for number, key in enumerate(KEYS[:SLOTS]):
        store(index, key, number)

    def no_memory(*_: object) -> PlainColdTable:
        raise MemoryError

    with pytest.raises(MemoryError):
        take_all(spill_steps(index, no_memory))
    assert index.spill is not None
    take_all(cancel_steps(index))
    assert index.spill is None
    assert index.needs_spill
    assert len(index.index) == SLOTS
    assert index.make_room(SLOTS) == KEYS[:SLOTS]


def test_row_that_warms_while_a_table_is_listed_again_is_counted_once() -> None:
    """Where rows are found by key, the table that replaces the stale one has it too."""
    index = new_index(physical=False)
    listed = [(0, key, number) for number, key in enumerate(KEYS[:6])]
    take_all(add_table(index, PlainColdTable(listed)))
    take_all(begin_listing(index, SLOTS))
    steps = add_table(index, PlainColdTable(listed))
    work = next(steps)
    assert work is not None
    work()
    index.touch(KEYS[3], 100)
    take_all(steps)
    take_all(end_listing(index))
    assert KEYS[3] in index.index
    assert len(index.slots) == index.counters.rows == 6
    assert index.make_room(SLOTS) == [*KEYS[:3], *KEYS[4:6], KEYS[3]]
