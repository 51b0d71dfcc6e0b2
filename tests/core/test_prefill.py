"""The prefill estimate: learned from noisy steps, robust, never negative."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nixl_tiers.core.prefill import PrefillEstimate

GPU = (0.012, 2e-5, 1.2e-9)  # seconds of a step, of a token, of a token's attention to one other
CPU = (0.02, 4e-3, 4e-7)
MACHINES = [GPU, CPU, (0.0, 1e-3, 0.0), (0.01, 1e-4, 0.0), (0.0, 1e-4, 1e-8)]
STEP = 2048


def step_seconds(machine, tokens, context):
    return machine[0] + tokens * (machine[1] + machine[2] * context)


def prompts(draw, count, longest=16_000):
    """Steps (tokens, mean context) of so many prompts, each after a local hit of any length."""
    for _ in range(count):
        end = draw.randint(32, longest)
        start = draw.randint(0, end - 16) if draw.random() < 0.5 else 0
        while start < end:
            tokens = min(STEP, end - start)
            yield tokens, start + tokens / 2
            start += tokens


def learned(machine, seed, noise=0.05, bad=0.0, count=40):
    draw, estimate = random.Random(seed), PrefillEstimate(step_tokens=STEP)
    for tokens, context in prompts(draw, count):
        seconds = step_seconds(machine, tokens, context) * draw.lognormvariate(0, noise)
        if draw.random() < bad:
            seconds *= draw.uniform(5, 500)  # it compiled, or another process had the machine
        estimate.observe(tokens, context, seconds)
    return estimate


def true_seconds(machine, start, end):
    total = 0.0
    while start < end:
        tokens = min(STEP, end - start)
        total += step_seconds(machine, tokens, start + tokens / 2)
        start += tokens
    return total


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(("bad", "error"), [(0.0, 0.1), (0.2, 0.2)])
def test_known_machine_is_learned_from_noisy_steps_though_some_are_far_off(machine, bad, error):
    for seed in range(5):
        estimate = learned(machine, seed, bad=bad)
        for start, end in [(0, 500), (0, 2000), (0, 7000), (6000, 7000), (1000, 8000)]:
            assert estimate.seconds(start, end) == pytest.approx(true_seconds(machine, start, end), rel=error)


def test_no_term_is_negative_where_the_best_fit_would_have_one():
    estimate = PrefillEstimate()
    for tokens, seconds in [(100, 0.01), (1000, 1.0), (2000, 4.0)] * 3:
        estimate.observe(tokens, 0, seconds)
    assert 0 <= estimate.seconds(0, 1) <= estimate.seconds(0, 50) <= estimate.seconds(0, 100)


def test_prompt_takes_as_many_steps_as_the_engine_says():
    samples = learned(CPU, 8).samples()
    estimate, whole = PrefillEstimate(), PrefillEstimate(step_tokens=1 << 20)
    estimate.limit_step(256)
    estimate.restore(samples)  # of larger steps, as another process had them
    whole.restore(samples)
    more = estimate.seconds(0, 8192) - whole.seconds(0, 8192)
    assert more == pytest.approx(31 * CPU[0], rel=0.5)


SAMPLES = st.lists(
    st.tuples(st.integers(-1, 10**5), st.floats(-1, 1e6), st.floats(allow_nan=True, allow_infinity=True)), max_size=60
)


@given(SAMPLES, st.integers(0, 10**5), st.integers(0, 10**5), st.integers(0, 10**4))
def test_whatever_was_observed_seconds_are_monotone_and_not_negative(samples, start, tokens, more):
    estimate = PrefillEstimate()
    for sample in samples:
        estimate.observe(*sample)
    seconds, longer = estimate.seconds(start, start + tokens), estimate.seconds(start, start + tokens + more)
    assert (seconds is None) == (longer is None)
    if seconds is not None:
        assert 0 <= seconds <= longer < float("inf")


def test_speed_that_is_set_is_not_learned():
    estimate = PrefillEstimate(tokens_per_s=1000)
    for _ in range(10):
        estimate.observe(1000, 500, 60.0)
    assert estimate.seconds(500, 1500) == 1.0
    assert estimate.tokens_per_s == 1000
