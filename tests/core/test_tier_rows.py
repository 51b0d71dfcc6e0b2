"""The native table of rows beside the same in Python, and both beside what least recently used says by definition."""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from nixl_tiers.base.chunk import Key
from nixl_tiers.base.policies import MOST_TENANTS
from nixl_tiers.core import rows as table
from nixl_tiers.core.rows import ALL_SLOTS, NO_ID, TierRows, make_rows
from tests.support.columns import PlainColumns
from tests.support.plain_rows import PlainTierRows

KEYS: Final = [bytes([number]) * length for number in range(8) for length in (1, 20, 36, 37, 112)]
USES: Final = 6
SLOTS: Final = 64
keys = st.sampled_from(KEYS)
ticks = st.integers(0, 12)
TENANTS: Final = (0, 1, MOST_TENANTS)
tenants = st.sampled_from(TENANTS)


def columns(rows: list[tuple[int, Key, int]]) -> tuple[bytes, bytes, bytes, int]:
    listed = PlainColumns(rows)
    return listed.slots, listed.ticks, listed.records, listed.width


some = st.lists(keys, max_size=6)
CALLS: Final = st.one_of(
    *(st.tuples(st.just(name), some) for name in ("pin_many", "unpin_many", "stored_many")),
    *(st.tuples(st.just(name), keys, st.just(NO_ID)) for name in ("unpin", "remove")),
    *(st.tuples(st.just(name), st.integers(0, 5)) for name in ("take_used", "select", "evict")),
    *(st.tuples(st.just(name)) for name in ("cancel_all", "begin_listing")),
    st.tuples(st.just("touch_many"), some, ticks),
    st.tuples(st.just("cancel"), keys, ticks),
    st.tuples(st.just("evict_of"), tenants, st.integers(0, 3)),
)


class Twins(RuleBasedStateMachine):
    """Whatever is called, both answer the same."""

    ids = Bundle("ids")

    def __init__(self) -> None:
        super().__init__()
        self.native: TierRows = table._table()(USES)
        self.plain = PlainTierRows(USES)
        self.taken = bytearray(SLOTS), bytearray(SLOTS)
        self.numbers: dict[int, int] = {}  # id of the native row -> id of the other

    def both(self, call: Callable[[TierRows], Any]) -> Any:
        native, plain = call(self.native), call(self.plain)
        assert native == plain
        return native

    @rule(target=ids, key=keys, slot=st.integers(0, SLOTS - 1), tick=ticks, stored=st.booleans(), tenant=tenants)
    def add(self, key: Key, slot: int, tick: int, stored: bool, tenant: int) -> Any:
        mine = self.native.add(key, slot, tick, stored, tenant)
        other = self.plain.add(key, slot, tick, stored, tenant)
        assert (mine == NO_ID) == (other == NO_ID)
        self.numbers[mine] = other
        return (key, mine) if mine else multiple()

    @rule(row=ids)
    def stored(self, row: tuple[Key, int]) -> None:
        key, number = row
        assert self.native.stored(key, number) == self.plain.stored(key, self.numbers[number])

    @rule(target=ids, key=keys)
    def pin(self, key: Key) -> Any:
        mine, other = self.native.pin(key), self.plain.pin(key)
        if mine is None or other is None:
            assert mine is other
            return multiple()
        assert mine[0] == other[0]
        assert self.numbers.setdefault(mine[1], other[1]) == other[1]
        return key, mine[1]

    @rule(row=ids)
    def unpin(self, row: tuple[Key, int]) -> None:
        key, number = row
        self.native.unpin(key, number)
        self.plain.unpin(key, self.numbers[number])

    @rule(calls=st.lists(CALLS, min_size=1, max_size=4))
    def call(self, calls: list[tuple[Any, ...]]) -> None:
        for name, *given in calls:
            self.both(lambda rows, name=name, given=given: getattr(rows, name)(*given))

    @rule(row=ids)
    def remove_this(self, row: tuple[Key, int]) -> None:
        key, number = row
        assert self.native.remove(key, number) == self.plain.remove(key, self.numbers[number])

    @rule(
        rows=st.lists(st.tuples(st.integers(0, SLOTS + 4), keys | st.just(b""), ticks), max_size=8),
        limit=st.integers(0, SLOTS),
        physical=st.booleans(),
    )
    def list_columns(self, rows: list[tuple[int, Key, int]], limit: int, physical: bool) -> None:
        listed = columns(rows)
        mine, other = (
            each.list_columns(*listed, 0, len(rows), taken if physical else None, limit)
            for each, taken in ((self.native, self.taken[0]), (self.plain, self.taken[1]))
        )
        assert mine == other
        assert self.taken[0] == self.taken[1]

    @rule(count=st.integers(1, 50), limit=st.integers(0, SLOTS), low=st.integers(0, 8), high=st.integers(8, SLOTS))
    def sweep(self, count: int, limit: int, low: int, high: int) -> None:
        """In parts: in which order is not said."""
        gone = []
        for rows in (self.native, self.plain):
            start, found = 0, list[tuple[Key, int]]()
            while start >= 0:
                start, some = rows.sweep(start, count, limit, low, high)
                assert len(some) <= count
                found += some
            gone.append(sorted(found))
        assert gone[0] == gone[1]

    @invariant()
    def are_alike(self) -> None:
        self.both(len)
        assert len(self.native) == sum(self.both(lambda rows, each=each: rows.count_of(each)) for each in TENANTS)
        self.both(lambda rows: rows.oldest())
        self.both(lambda rows: rows.evicting())
        self.both(lambda rows: rows.has_many(KEYS, True))
        self.both(lambda rows: rows.has_many(KEYS, False))
        for key in KEYS:
            assert (key in self.native) == (key in self.plain)
            self.both(lambda rows, key=key: rows.is_evicting(key))
            mine, other = self.native.get(key), self.plain.get(key)
            assert (mine and (*mine[:2], *mine[3:])) == (other and (*other[:2], *other[3:]))
        found = [set(rows.some(7, len(KEYS) + 64)[1]) for rows in (self.native, self.plain)]
        assert found[0] == found[1]


TestTwins = Twins.TestCase


def test_row_of_before_is_not_that_of_the_same_key_after() -> None:
    """A move that ends late must not unpin, store or remove another row: also not one of after a reset."""
    rows = make_rows(True)
    old = rows.add(b"key", 1, 5, True)
    assert rows.pin(b"key") == (1, old)
    assert rows.remove(b"key", old) == 1
    rows = make_rows(True)
    new = rows.add(b"key", 2, 6, False)
    assert new not in {old, NO_ID}
    assert rows.pin(b"key") == (2, new)
    rows.unpin(b"key", old)
    assert not rows.stored(b"key", old)
    assert rows.remove(b"key", old) == -1
    assert rows.stored(b"key", new)
    assert rows.evict(2) == []
    rows.unpin(b"key", new)
    assert rows.evict(2) == [(b"key", 2)]


def test_pinned_row_and_returned_victim_go_back_to_their_places() -> None:
    rows = make_rows(True)
    for number in range(6):
        rows.add(b"%d" % number, number, 7, True)  # one prefix: 5 is its leaf
    pinned = rows.pin(b"4")
    assert pinned is not None
    rows.touch_many([b"4"], 7)
    assert rows.select(2) == [b"5", b"3"]
    rows.unpin(b"4", pinned[1])
    assert rows.cancel(b"5", 0)
    assert rows.cancel(b"3", 0)
    assert [key for key, _ in rows.evict(6)] == [b"5", b"4", b"3", b"2", b"1", b"0"]


def test_what_needs_room_takes_rows_that_are_being_evicted_first_and_none_that_is_pinned() -> None:
    """Also room within a quota: else it would evict rows that are worth more."""
    rows = make_rows(True)
    for number in range(6):
        rows.add(b"%d" % number, number, number, True, number % 2)
    assert rows.select(4) == [b"0", b"1", b"2", b"3"]
    rows.pin_many([b"0", b"1"])
    assert rows.evict_of(1, 1) == [(b"3", 3)]
    assert rows.evict(2) == [(b"2", 2), (b"4", 4)]
    assert rows.evicting() == 2
    rows.unpin_many([b"1"])
    assert rows.evict_of(1, 5) == [(b"1", 1), (b"5", 5)]
    rows.cancel_all()
    assert rows.evict(1) == [], "it is pinned"
    rows.unpin_many([b"0"])
    assert rows.evict(1) == [(b"0", 0)]


def test_keys_that_are_no_bytes_or_too_long_are_refused() -> None:
    rows = make_rows(True)
    for call in (rows.is_stored, rows.get, rows.pin, lambda key: rows.has_many([key], True)):
        with pytest.raises(TypeError):
            call("text")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="more than 255 bytes"):
            call(bytes(256))
    with pytest.raises(OverflowError):
        rows.add(b"key", 1 << 32, 0, True)
    with pytest.raises(ValueError, match="shorter than they should be"):
        rows.list_columns(bytes(4), bytes(8), bytes(10), 10, 0, 2, None, ALL_SLOTS)
    with pytest.raises(TypeError, match="1 arguments instead of 2"):
        rows.has_many([])  # type: ignore[call-arg]
    assert len(rows) == 0


class _Cycle:
    """Garbage that only the collector finds; it calls the table when it is finalized."""

    def __init__(self, calls: Callable[[], object]) -> None:
        self.calls, self.me = calls, self

    def __del__(self) -> None:
        self.calls()


@pytest.fixture
def collector() -> Iterator[None]:
    """Runs wherever it may."""
    before = gc.get_threshold()
    gc.disable()
    yield
    gc.set_threshold(*before)
    gc.enable()


@pytest.mark.usefixtures("collector")
@pytest.mark.parametrize("call", ["evict", "evict_of", "sweep", "take_used", "list_columns"])
def test_a_finalizer_that_calls_the_table_never_runs_within_a_call(call: str) -> None:
    """It would take away the row that the call works on."""
    rows, count = make_rows(True), 8_000  # more pairs than Python keeps tuples for
    names = [b"%d" % number for number in range(count)]
    for slot, name in enumerate(names):
        rows.add(name, slot, slot, True)
    rows.touch_many(names, count)
    listed = columns([(slot + 1, name, 0) for slot, name in enumerate(names)])
    calls = {
        "evict": partial(rows.evict, count),
        "evict_of": partial(rows.evict_of, 0, count),
        "sweep": partial(rows.sweep, 0, count, 0, 0, count),
        "take_used": partial(rows.take_used, count),
        "list_columns": partial(rows.list_columns, *listed, 0, count, bytearray(count), ALL_SLOTS),
    }
    asked, ended, seen = calls[call], [], list[bool]()
    _Cycle(lambda: seen.append(not ended))
    gc.set_threshold(1, 1, 1)
    gc.enable()
    answer = asked()
    ended.append(answer)
    assert len(answer[-1] if isinstance(answer, tuple) else answer) == count
    assert seen != [True]
    assert gc.isenabled()


def trace() -> list[list[Key]]:
    """Prompts of the shape of a conversation: each goes on from one of before, or begins anew."""
    draw, prompts, fresh = random.Random(5), [list[Key]()], itertools.count()
    for _ in range(3000):
        head = draw.choice(prompts[-200:]) if draw.random() < 0.7 else []
        prompts.append(head[: draw.randint(0, 40)] + [b"%036d" % next(fresh) for _ in range(draw.randint(1, 12))])
    return prompts[1:]


def test_victims_are_those_used_least_recently_and_of_one_use_the_deepest() -> None:
    """Over a trace, with pins, returned victims, old ticks, and after a listing."""
    rows, draw, uses = make_rows(True), random.Random(7), itertools.count()
    pins: dict[Key, int] = {}
    order: dict[Key, tuple[int, int]] = {}  # by tick, and then the last of its uses first
    listed = [(slot, b"listed-%029d" % slot, slot // 3) for slot in range(900)]
    rows.list_columns(*columns(listed), 0, len(listed), None, ALL_SLOTS)
    order.update((key, (tick, -next(uses))) for _, key, tick in listed)
    evicted = 0
    for tick, prompt in enumerate(trace(), 400):
        used = tick - draw.choice((0, 0, 0, 3))  # of a request that began before others
        order.update((key, (used, -next(uses))) for key in prompt if key in order and used > order[key][0])
        rows.touch_many(prompt, used)
        for key in prompt:
            rows.add(key, 0, used, True)
            order.setdefault(key, (used, -next(uses)))
        for key in draw.sample(prompt, min(len(prompt), 2)):
            if len(pins) < 8 and key not in pins:
                pinned = rows.pin(key)
                assert pinned is not None
                pins[key] = pinned[1]
        for key in list(pins):
            if draw.random() < 0.3:
                rows.unpin(key, pins.pop(key))
        while len(rows) > 900:
            victim = min(order.keys() - pins.keys(), key=order.__getitem__)
            assert rows.select(1) == [victim]
            if draw.random() < 0.1:  # it cannot be written below
                assert rows.cancel(victim, 0)
                assert rows.select(1) == [victim], "it is the next again"
            assert rows.remove(victim, NO_ID) == 0 or victim.startswith(b"listed")
            del order[victim]
            evicted += 1
    assert evicted > 10_000
