"""Eviction policies: the invariants of all, and what each is good at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final, get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nixl_tiers.base.chunk import Key
from nixl_tiers.base.policies import Eviction
from nixl_tiers.core.eviction import EvictionPolicy, make_policy
from nixl_tiers.core.eviction.arc import Arc
from nixl_tiers.core.eviction.lru import ForwardBatches, LeafFirstLru, UpwardBatches
from nixl_tiers.core.eviction.s3fifo import S3Fifo
from nixl_tiers.core.host import HostTier
from nixl_tiers.core.rows import RowState

NAMES: tuple[Eviction, ...] = get_args(Eviction)
every_policy = pytest.mark.parametrize("name", NAMES)


def chain(name: str, length: int) -> list[Key]:
    return [f"{name}-{depth}".encode() for depth in range(length)]


def nothing_pinned(_key: Key) -> bool:
    return False


def add(policy: EvictionPolicy, keys: Iterable[Key], tick: int) -> None:
    for key in keys:
        policy.add(key, tick)


def touch(policy: EvictionPolicy, keys: Iterable[Key], tick: int) -> None:
    policy.touch(keys, tick)


def check_ghosts(policy: EvictionPolicy, rows: int) -> None:
    if isinstance(policy, S3Fifo):
        assert len(policy._ghosts) <= rows
    if isinstance(policy, Arc):
        assert len(policy._once_ghosts) + len(policy._often_ghosts) <= rows
        assert not policy._once_ghosts or len(policy._once) + len(policy._once_ghosts) <= rows


class Tier:
    """A tier as the manager drives its policy: `use` a prompt, get its hits."""

    def __init__(self, name: Eviction, rows: int) -> None:
        self.policy = make_policy(name, rows)
        self.rows = rows
        self.keys: set[Key] = set()
        self.tick = 0

    def use(self, keys: Sequence[Key]) -> int:
        self.tick += 1
        hits = next((depth for depth, key in enumerate(keys) if key not in self.keys), len(keys))
        touch(self.policy, [key for key in keys if key in self.keys], self.tick)
        fresh = [key for key in keys if key not in self.keys]
        wanted = set(keys)
        room = self.rows - len(self.keys)
        self.keys.difference_update(self.policy.evict(len(fresh) - room, wanted.__contains__))
        for key in fresh[: self.rows - len(self.keys)]:
            self.policy.add(key, self.tick)
            self.keys.add(key)
        return hits


# --- invariants of all ----------------------------------------------------------------------------------------------

KEYS = [bytes([number]) for number in range(24)]
some_key = st.sampled_from(KEYS)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("use"), some_key, st.integers(0, 2)),  # that many ticks later
        st.tuples(st.just("late"), some_key, st.integers(0, 30)),  # at a tick of long ago, as after a restart
        st.tuples(st.just("remove"), some_key, st.just(0)),
        st.tuples(st.just("evict"), st.frozensets(some_key), st.integers(0, 30)),
        st.tuples(st.just("put back"), st.frozensets(some_key), st.integers(0, 30)),
    ),
    max_size=80,
)


# A victim that comes back after its own ghost was forgotten for want of room.
BACK_WITHOUT_GHOST: Final[list[Any]] = [
    *[("use", bytes([number]), int(at == 1)) for at, number in enumerate((0, 0, 1, 2, 3, 4))],
    *[("evict", frozenset[Key](), 4), ("put back", frozenset[Key](), 1)],
]


@every_policy
@given(rows=st.integers(0, 30), steps=operations)
@example(rows=1, steps=BACK_WITHOUT_GHOST)
@settings(max_examples=300, deadline=None)
def test_no_key_is_lost_duplicated_or_evicted_while_pinned(
    name: Eviction, rows: int, steps: list[tuple[str, Key | frozenset[Key], int]]
) -> None:
    policy = make_policy(name, rows)
    known: set[Key] = set()
    tick = 0

    def evict(count: int, pinned: frozenset[Key]) -> None:
        asked: list[Key] = []

        def is_pinned(key: Key) -> bool:
            asked.append(key)
            return key in pinned

        before = set(known)
        victims = policy.evict(count, is_pinned)
        assert set(asked) <= before, "asked for a key that the tier does not have"
        assert len(asked) <= 2 * len(before)
        assert len(set(victims)) == len(victims)
        assert set(victims) <= before - pinned
        assert len(victims) == min(count, len(before - pinned))
        known.difference_update(victims)

    for verb, operand, number in steps:
        if verb == "evict":
            assert isinstance(operand, frozenset)
            evict(number, operand)
        elif verb == "put back":
            assert isinstance(operand, frozenset)
            for victim in reversed(policy.evict(number, operand.__contains__)):
                policy.put_back(victim, tick)
        else:
            assert isinstance(operand, bytes)
            if verb == "remove":
                if operand in known:
                    policy.remove(operand)
                    known.remove(operand)
            else:
                tick += number if verb == "use" else 0
                at = tick if verb == "use" else min(number, tick)
                if operand in known:
                    policy.touch([operand], at)
                else:
                    policy.add(operand, at)
                    known.add(operand)
        assert len(policy) == len(known)
        check_ghosts(policy, rows)
    evict(len(known), frozenset())
    assert len(policy) == 0


@every_policy
@given(uses=st.lists(st.tuples(st.sets(st.sampled_from(range(12))), st.integers(0, 8), st.integers(0, 3)), max_size=12))
@example(uses=[({0, 1, 2, 3}, 0, 3), ({0, 1, 2}, 1, 0)])  # of keys that are set aside
@settings(max_examples=200, deadline=None)
def test_a_batch_is_used_as_its_keys_would_be_one_by_one(name: Eviction, uses: list[tuple[set[int], int, int]]) -> None:
    """In prefix order. Before each use some keys are passed over as they are pinned, and some are put back."""
    batch, single = make_policy(name, 16), make_policy(name, 16)
    keys = chain("key", 12)
    for policy in (batch, single):
        add(policy, keys[:6], 1)
        add(policy, keys[6:], 3)
    for numbers, tick, evicted in uses:
        used = [keys[number] for number in sorted(numbers)]
        for policy in (batch, single):
            policy.evict(1, lambda _key: True)
            for victim in reversed(policy.evict(evicted, set(used).__contains__)):
                policy.put_back(victim, 2)
        batch.touch(used, tick)
        for key in used:
            single.touch([key], tick)
    assert batch.evict(12, nothing_pinned) == single.evict(12, nothing_pinned)


@every_policy
def test_nothing_is_evicted_while_all_is_pinned_and_all_afterwards(name: Eviction) -> None:
    policy = make_policy(name, 100)
    keys = chain("held", 100)
    add(policy, keys, 0)
    touch(policy, keys[:60], 1)
    touch(policy, keys[:30], 2)
    for _ in range(3):
        assert policy.evict(7, lambda _key: True) == []
    for key in keys[::9]:
        assert policy.evict(1, (set(keys) - {key}).__contains__) == [key]
    assert len(policy) == 88
    assert sorted(policy.evict(100, nothing_pinned)) == sorted(set(keys) - set(keys[::9]))


@every_policy
def test_pinned_oldest_keys_do_not_slow_every_eviction(name: Eviction) -> None:
    policy = make_policy(name, 3000)
    old = chain("old", 1000)
    add(policy, old, 0)
    for tick in range(1, 201):
        add(policy, chain(f"new{tick}", 10), tick)
    held = set(old)
    asked = 0

    def is_pinned(key: Key) -> bool:
        nonlocal asked
        asked += 1
        return key in held

    for _ in range(200):
        assert len(policy.evict(1, is_pinned)) == 1
    assert asked < 2 * (1000 + 200 * 20)  # a walk for each would be 200,000
    held.clear()
    assert set(policy.evict(2800, is_pinned)) >= set(old)


@every_policy
def test_deepest_chunk_of_a_prompt_is_evicted_first(name: Eviction) -> None:
    policy = make_policy(name, 10)
    keys = chain("a", 8)
    add(policy, keys, 0)
    assert [policy.evict(1, nothing_pinned)[0] for _ in range(8)] == keys[::-1]
    # Again as keys that are remembered, and as keys that several requests used.
    add(policy, keys, 1)
    assert policy.evict(8, nothing_pinned) == keys[::-1]
    add(policy, keys, 2)
    for tick in (3, 4):
        touch(policy, keys, tick)
    assert policy.evict(3, nothing_pinned) == keys[:4:-1]
    assert policy.evict(9, nothing_pinned) == keys[4::-1]


@every_policy
def test_prompt_that_was_pinned_is_still_evicted_leaf_first(name: Eviction) -> None:
    policy = make_policy(name, 16)
    held, free = chain("held", 8), chain("free", 8)
    add(policy, held, 0)
    add(policy, free, 1)
    assert policy.evict(8, set(held).__contains__) == free[::-1]
    assert policy.evict(8, nothing_pinned) == held[::-1]


@every_policy
def test_unknown_policy_name_raises(name: Eviction) -> None:
    with pytest.raises(ValueError, match=f"'{name}ish' is not one of lru, s3fifo, arc"):
        make_policy(f"{name}ish", 10)  # type: ignore[arg-type]


# --- what each is chosen for ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kept"), [("lru", False), ("s3fifo", True), ("arc", True)])
def test_scan_of_one_time_prompts_does_not_evict_used_keys(name: Eviction, kept: bool) -> None:
    tier = Tier(name, 100)
    popular = chain("system prompt", 20)
    for turn in range(4):
        tier.use([*popular, *chain(f"user{turn}", 5)])
    for turn in range(5):
        for number in range(8):
            tier.use(chain(f"scan{turn}.{number}", 25))
        assert tier.use(popular) == (20 if kept else 0)


@every_policy
def test_uses_by_one_request_count_once(name: Eviction) -> None:
    policy = make_policy(name, 20)
    first, second = chain("first", 10), chain("second", 10)
    add(policy, first, 0)
    add(policy, second, 1)
    for _ in range(5):
        touch(policy, first, 0)
    assert set(policy.evict(10, nothing_pinned)) == set(first)


def test_lru_evicts_the_oldest_request_first() -> None:
    policy = LeafFirstLru()
    first, second, third = (chain(name, 3) for name in ("first", "second", "third"))
    add(policy, second, 5)
    add(policy, third, 7)
    add(policy, first, 2)  # brought back by a restart
    touch(policy, third, 8)
    assert policy.evict(9, nothing_pinned) == [*first[::-1], *second[::-1], *third[::-1]]


@pytest.mark.parametrize("pinned", [False, True])
def test_lru_use_by_an_earlier_request_makes_no_key_older(pinned: bool) -> None:
    lru = LeafFirstLru()
    lru.add(b"shared", 7)
    lru.add(b"of one request", 5)
    if pinned:
        assert lru.evict(1, lambda key: True) == []
    lru.touch([b"shared"], 3)
    assert lru.evict(1, lambda key: False) == [b"of one request"]


def test_lru_evicts_unpinned_keys_before_newer_ones() -> None:
    policy = LeafFirstLru()
    old, new = chain("old", 3), chain("new", 3)
    add(policy, old, 0)
    add(policy, new, 1)
    assert policy.evict(1, set(old).__contains__) == [new[2]]
    policy.remove(old[0])
    touch(policy, [old[1]], 2)
    assert policy.evict(4, nothing_pinned) == [old[2], new[1], new[0], old[1]]


@pytest.mark.parametrize("name", ["lru", "arc"])
def test_victims_that_are_put_back_are_the_next_again(name: Eviction) -> None:
    policy = make_policy(name, 12)
    for tick in range(4):
        add(policy, chain(f"prompt {tick}", 3), tick)
    touch(policy, chain("prompt 1", 3), 9)
    victims = policy.evict(5, lambda _key: False)
    ticks = {key: tick for tick in range(4) for key in chain(f"prompt {tick}", 3)}
    for key in reversed(victims):
        policy.put_back(key, ticks[key])
    assert policy.evict(5, lambda _key: False) == victims


def test_arc_takes_no_victim_that_is_put_back_for_one_that_came_back() -> None:
    arc = Arc(4)
    add(arc, chain("once", 2), 0)
    add(arc, chain("often", 2), 0)
    touch(arc, chain("often", 2), 1)
    before = arc._recent_rows
    for _ in range(3):
        for key in reversed(arc.evict(4, lambda _key: False)):
            arc.put_back(key, 2)
        assert (len(arc._once), len(arc._often), arc._recent_rows) == (2, 2, before)
        assert not arc._once_ghosts
        assert not arc._often_ghosts


def test_s3fifo_takes_no_victim_that_is_put_back_for_one_that_came_back() -> None:
    fifo = S3Fifo(10)
    add(fifo, chain("new", 3), 0)
    touch(fifo, chain("new", 3)[:1], 1)
    for key in reversed(fifo.evict(3, lambda _key: False)):
        fifo.put_back(key, 1)
    assert len(fifo._small) == 3, "and not in the main queue, as what comes back after its eviction"
    touch(fifo, chain("new", 3)[:1], 2)
    assert fifo._uses[chain("new", 3)[0]] == 2, "what it was used for before counts"


def test_s3fifo_keeps_keys_used_twice_and_ghost_hits() -> None:
    policy = S3Fifo(20)
    keys = chain("k", 4)
    for tick, key in enumerate(keys):
        policy.add(key, tick)
    for tick in (4, 5):
        policy.touch([keys[0]], tick)
    policy.touch([keys[1]], 6)
    assert policy.evict(2, nothing_pinned) == [keys[1], keys[2]]  # one use is not enough
    policy.add(keys[2], 7)
    assert keys[2] in policy._main
    assert keys[0] in policy._main
    assert policy.evict(1, nothing_pinned) == [keys[2]]  # keys[0] has two uses to spend
    assert list(policy._ghosts) == [keys[1]]  # the main queue leaves none behind


def test_s3fifo_counts_three_uses_at_most() -> None:
    policy = S3Fifo(10)
    policy.add(b"used", 0)
    for tick in range(1, 50):
        policy.touch([b"used"], tick)
    assert policy._uses[b"used"] == 3


def test_arc_target_follows_ghost_hits() -> None:
    policy = Arc(8)
    often, once = chain("often", 4), chain("once", 4)
    add(policy, often, 0)
    touch(policy, often, 1)
    add(policy, once, 2)
    assert policy.evict(2, nothing_pinned) == [once[3], once[2]]
    add(policy, [once[2]], 3)  # T1 was too short: it may have one row now, and two remain in it
    assert policy._recent_rows == 1
    assert policy.evict(2, nothing_pinned) == [once[1], often[3]]
    add(policy, [often[3]], 4)  # T2 was
    assert policy._recent_rows == 0
    assert policy.evict(1, nothing_pinned) == [once[0]]


def test_arc_ghosts_shrink_as_its_first_list_grows() -> None:
    policy = Arc(8)
    old, new = chain("old", 8), chain("new", 8)
    add(policy, old, 0)
    policy.evict(4, nothing_pinned)
    assert list(policy._once_ghosts) == old[:3:-1]
    add(policy, new[:3], 1)
    assert list(policy._once_ghosts) == [old[4]]
    check_ghosts(policy, 8)


def test_a_victim_that_is_used_again_stays_behind_what_the_same_use_had_before_it() -> None:
    """In the order of the prefix, of which the leaf goes first."""
    host = HostTier(2, LeafFirstLru)
    root, leaf = host.insert(b"root", RowState.READY, 1), host.insert(b"leaf", RowState.READY, 5)
    assert host.select_victims(2) == [root, leaf]
    host.cancel_eviction(root, 1)
    host.touch([root, leaf], 5)
    assert not host.evicting
    assert host.make_room(1) == [leaf]


def steps_of(*more: str) -> st.SearchStrategy[list[tuple[str, int, int]]]:
    return st.lists(st.tuples(st.sampled_from(["leaf", "remove", "pop", *more]), st.integers(0, 2), st.integers(0, 30)))


@given(steps=steps_of("root"))
def test_keys_that_go_on_are_popped_by_batch_and_leaf_first(steps: list[tuple[str, int, int]]) -> None:
    check_order(UpwardBatches(), steps)


@given(steps=steps_of("move"))
def test_keys_that_move_are_popped_by_batch_and_leaf_first(steps: list[tuple[str, int, int]]) -> None:
    check_order(ForwardBatches(), steps)


def check_order(batches: Any, steps: list[tuple[str, int, int]]) -> None:
    model: dict[int, list[bytes]] = {}
    for count, (step, number, pick) in enumerate(steps):
        key = b"%d" % count
        here = [(key, number) for number, keys in model.items() for key in keys]
        if step == "leaf":
            batches.add(key, number)
            model.setdefault(number, []).append(key)
        elif step == "root":
            batches.add_root(key, number)
            model.setdefault(number, []).insert(0, key)
        elif here and step == "remove":
            key, place = here[pick % len(here)]
            batches.remove(key)
            model[place].remove(key)
        elif here and step == "move":
            moved = here[pick % len(here) :][:3]
            left = iter([*[key for key, _ in moved], b"unknown", b"behind it"])
            assert batches.move(left, number) == b"unknown"
            assert list(left) == [b"behind it"]
            for key, place in moved:
                if place < number:
                    model[place].remove(key)
                    model.setdefault(number, []).append(key)
        elif here:
            first = min(number for number, keys in model.items() if keys)
            assert batches.pop() == (model[first].pop(), first)
        assert len(batches) == sum(map(len, model.values()))
    while len(batches):
        number = min(number for number, keys in model.items() if keys)
        assert batches.pop() == (model[number].pop(), number)
