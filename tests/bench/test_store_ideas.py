"""The model of what is stored: a prefix, and of what never comes back nothing but the sample."""

from __future__ import annotations

from random import Random

import pytest

from bench.eviction import Prompt
from bench.store_ideas import SAMPLE, WINDOW, Ghost, Order, Sample, replay, store_all
from nixl_tiers.base.chunk import Key


def prompt(name: str, blocks: int) -> list[Key]:
    return [f"{name}-{place}".encode() for place in range(blocks)]


def test_the_deepest_block_of_the_oldest_prompt_leaves_first() -> None:
    order = Order(4)
    old, new = prompt("old", 3), prompt("new", 2)
    order.use(old)
    order.use(new)
    assert [key in order for key in (*old, *new)] == [True, True, False, True, True]


@pytest.mark.parametrize("samples", [True, False])
def test_what_is_stored_follows_what_is_held(samples: bool) -> None:
    """A chunk behind a gap is never found."""
    random = Random(1)
    cache, rule = Order(60), Ghost(90, None, samples=samples)
    for _ in range(3000):
        keys = prompt(f"p{random.randrange(40)}", random.randint(1, 9))
        hits = cache.run(keys)
        held = rule(keys, hits)
        assert hits <= held <= len(keys)
        cache.use(keys[:held])
    assert not samples or rule._wholly


def test_prompts_that_never_come_back_are_stored_as_far_as_they_are_sampled() -> None:
    whole, none, some = (Ghost(1 << 20, percent, samples=samples) for percent, samples in ((0, 0), (5, 0), (5, 1)))
    stored = [0, 0, 0]
    count = WINDOW  # prompts, of which the first tell that none comes back
    for number in range(count):
        keys = prompt(f"p{number}", 8)
        for place, rule in enumerate((whole, none, some)):
            stored[place] += rule(keys, 0)
    assert stored[0] == 8 * count
    assert stored[1] < 0.05 * stored[0]
    assert 0.5 / SAMPLE < stored[2] / stored[0] < 2 / SAMPLE


def test_a_second_use_is_a_hit_only_of_what_was_stored() -> None:
    prompts = [Prompt(str(number), 0.0, prompt(f"p{number % 10}", 5)) for number in range(30)]
    shares = {
        name: replay(prompts, 0, 1000, make)
        for name, make in {
            "all": lambda _: store_all,
            "second": lambda _: Ghost(1000, None),
            "sample": lambda cache: Sample(cache, 5),
        }.items()
    }
    assert shares["all"] == pytest.approx((100 * 2 / 3, 100))
    assert shares["second"] == pytest.approx((100 / 3, 50)), "the third use is the first hit"
    assert shares["sample"] == shares["all"], "until something has left the cache"
