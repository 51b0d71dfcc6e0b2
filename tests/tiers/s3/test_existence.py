"""Existence checks: the galloping search, and checks with timeouts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nixl_tiers.tiers.existence import (
    MAX_CONCURRENT,
    MAX_WAVES,
    Presence,
    Search,
    galloping_search,
    one_by_one,
)


def run(search: Search, presence: list[Presence]) -> tuple[list[int], list[int], list[list[int]]]:
    """(found, absent, waves) of a search over keys of this presence."""
    waves = [next(search)]
    while True:
        assert all(0 <= position < len(presence) for position in waves[-1])
        assert len(waves[-1]) <= MAX_CONCURRENT
        try:
            waves.append(search.send([presence[position] for position in waves[-1]]))
        except StopIteration as end:
            return *end.value, waves


@given(count=st.integers(1, 3000), data=st.data())
def test_a_chain_without_holes_is_found_to_its_end(count: int, data: st.DataObject) -> None:
    reach = data.draw(st.integers(0, count))
    found, absent, waves = run(galloping_search(count), [int(place < reach) for place in range(count)])
    assert found == list(range(reach))
    assert absent == ([reach] if reach < count else [])
    assert len(waves) <= MAX_WAVES


def test_a_chain_that_does_not_exist_costs_one_request() -> None:
    assert run(galloping_search(500), [0] * 500) == ([], [0], [[0]])


@pytest.mark.parametrize("count", [1, 2, 3, 16, 17, 500, 512])
def test_a_chain_that_exists_costs_two_waves(count: int) -> None:
    found, absent, waves = run(galloping_search(count), [1] * count)
    assert (found, absent) == (list(range(count)), [])
    assert len(waves) <= 2


@given(there=st.lists(st.sampled_from([1, 1, 1, 0, None]), min_size=1, max_size=600))
def test_answers_are_right_with_holes_and_without_answers(there: list[Presence]) -> None:
    found, absent, waves = run(galloping_search(len(there)), there)
    asked = {place for wave in waves for place in wave}
    assert found == list(range(len(found)))
    assert all(there[place] for place in asked if place < len(found)), "no key behind a known hole is found"
    assert len(waves) <= MAX_WAVES
    assert all(there[place] == 0 and place in asked for place in absent)
    assert len(absent) <= 1


@given(there=st.lists(st.sampled_from([5, 0, None]), min_size=1, max_size=100))
def test_unrelated_keys_are_checked_in_waves(there: list[Presence]) -> None:
    found, absent, waves = run(one_by_one(len(there)), there)
    assert found == [place for place, exists in enumerate(there) if exists]
    assert absent == [place for place, exists in enumerate(there) if exists == 0]
    assert len(waves) == -(-len(there) // MAX_CONCURRENT)
