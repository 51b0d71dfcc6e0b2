"""The replay of what is stored: a prefix, and of what never comes back nothing but the sample."""

from __future__ import annotations

import pytest

from bench.store_ideas import Order, replay
from nixl_tiers.base.chunk import Key
from nixl_tiers.cli.trace import Prompt
from nixl_tiers.core.ghost import SAMPLE


def prompt(name: str, blocks: int) -> list[Key]:
    return [f"{name}-{place}".encode() for place in range(blocks)]


def prompts(count: int, different: int) -> list[Prompt]:
    return [Prompt(str(number), 0.0, prompt(f"p{number % different}", 8)) for number in range(count)]


def test_the_deepest_block_of_the_oldest_prompt_leaves_first() -> None:
    order = Order(4)
    old, new = prompt("old", 3), prompt("new", 2)
    order.use(old)
    order.use(new)
    assert [key in order for key in (*old, *new)] == [True, True, False, True, True]


def test_prompts_that_never_come_back_are_stored_as_far_as_they_are_sampled() -> None:
    new = prompts(4000, 4000)
    assert replay(new, 0, 1 << 14, None) == (0, 100, 0)
    hits, stored, again = replay(new, 0, 1 << 14, 5)
    assert hits == again == 0
    assert 0.5 / SAMPLE < stored / 100 < 2 / SAMPLE, "after a few, by which it is known that none comes back"


def test_prompts_that_come_back_are_all_stored_while_that_pays() -> None:
    again = prompts(3000, 1000)
    everything = pytest.approx((100 * 2 / 3, 100, 0))
    assert replay(again, 0, 1 << 14, None) == everything
    assert replay(again, 0, 1 << 14, 0) == everything
    hits, stored, computed_again = replay(again, 0, 1 << 14, 200)
    assert 100 / 3 < hits < 100 * 2 / 3, "the third use is the first hit of most"
    assert stored < 100
    assert 25 < computed_again < 50


def test_others_that_never_come_back_do_not_count_as_the_traces_own() -> None:
    hits, stored, _ = replay(prompts(3000, 1000), 50, 1 << 14, None)
    assert (hits, stored) == pytest.approx((100 * 2 / 3, 100), rel=0.1)
