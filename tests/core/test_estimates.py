"""What is learned: the speed of the engine, and of a tier, whether that works, and which places of it do not."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nixl_tiers.core.aside import A_TURN, MAX_PLACES, SetAside
from nixl_tiers.core.member import Breaker
from nixl_tiers.core.prefill import PrefillEstimate
from nixl_tiers.core.pricing import TransferEstimate
from nixl_tiers.core.types import BreakerLimits, BreakerState

GPU = (0.012, 2e-5, 1.2e-9)  # seconds of a step, of a token, of a token's attention to one other
CPU = (0.02, 4e-3, 4e-7)
MACHINES = [GPU, CPU, (0.0, 1e-3, 0.0), (0.01, 1e-4, 0.0), (0.0, 1e-4, 1e-8)]
STEP = 2048


def step_seconds(machine, tokens, context):
    return machine[0] + tokens * (machine[1] + machine[2] * context)


def prompts(draw):
    """Steps (tokens, mean context) of forty prompts, each after a local hit of any length."""
    for _ in range(40):
        end = draw.randint(32, 16_000)
        start = draw.randint(0, end - 16) if draw.random() < 0.5 else 0
        while start < end:
            tokens = min(STEP, end - start)
            yield tokens, start + tokens / 2
            start += tokens


def learned(machine, seed, bad=0.0):
    draw, estimate = random.Random(seed), PrefillEstimate(step_tokens=STEP)
    for tokens, context in prompts(draw):
        seconds = step_seconds(machine, tokens, context) * draw.lognormvariate(0, 0.05)
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


MB = 10**6


@given(st.lists(st.tuples(st.integers(1, 10**9), st.floats(1e-6, 100.0)), min_size=1, max_size=30))
def test_estimate_is_never_free_and_never_negative(transfers: list[tuple[int, float]]) -> None:
    estimate = TransferEstimate()
    for nbytes, seconds in transfers:
        estimate.record(nbytes, seconds, now=0.0)
    assert estimate.latency_s >= -1e-9
    assert estimate.s_per_byte > 0


class Tier:
    """Transfers one after the other, of a tier with a latency and a bandwidth."""

    def __init__(self, s_per_mb: float, latency_s: float = 0.0) -> None:
        self.s_per_mb, self.latency_s = s_per_mb, latency_s
        self.estimate = TransferEstimate()
        self.now = 0.0

    def transfer(self, megabytes: int, times: float = 1.0) -> None:
        seconds = times * (self.latency_s + self.s_per_mb * megabytes)
        self.now += seconds
        self.estimate.record(megabytes * MB, seconds, self.now)

    def error(self, megabytes: int) -> float:
        """The expected time of a transfer, in times of what it takes."""
        return self.estimate.seconds(megabytes * MB) / (self.latency_s + self.s_per_mb * megabytes)


@pytest.mark.parametrize(("before", "after"), [(0.05, 0.0005), (0.0005, 0.05)], ids=["faster", "slower"])
def test_three_transfers_show_that_a_tier_in_use_has_another_speed(before: float, after: float) -> None:
    tier = Tier(s_per_mb=before)
    for _ in range(100):
        tier.transfer(64)
    tier.s_per_mb = after
    for _ in range(3):
        tier.transfer(64)
    assert tier.error(64) == pytest.approx(1.0, rel=0.1)


def test_one_stall_of_many_transfers_side_by_side_is_noise() -> None:
    tier = Tier(s_per_mb=0.01)
    for _ in range(100):
        tier.transfer(4)
    for _ in range(4):
        tier.estimate.record(4 * MB, 2.0, tier.now + 2.0)
    assert tier.error(4) < 1.6
    tier.now += 2.0
    for _ in range(3):
        tier.transfer(4)
    for _ in range(4):
        tier.estimate.record(4 * MB, 2.0, tier.now + 2.0)
    assert tier.error(4) < 1.6, "two stalls of the last five"


def opened(limits: BreakerLimits | None = None) -> Breaker:
    breaker = Breaker(limits)
    for _ in range(breaker.limits.failures_to_open):
        breaker.record(False, 0.0)
    assert breaker.state is BreakerState.OPEN
    return breaker


def test_results_older_than_the_window_do_not_count() -> None:
    breaker = Breaker()
    for number in range(20):
        breaker.record(False, 30.0 * number)
    assert breaker.closed


def test_backoff_doubles_up_to_its_maximum_and_resets_after_a_calm_time() -> None:
    breaker, now, seen = opened(), 0.0, []
    for _ in range(8):
        seen.append(breaker.backoff_s)
        now += breaker.backoff_s
        breaker.watch(now)
        breaker.end_probe(breaker.begin_probe(), False, now)
    assert seen == [1, 2, 4, 8, 16, 32, 60, 60]
    breaker.watch(now + 60)
    for _ in range(2):
        breaker.end_probe(breaker.begin_probe(), True, now + 60)
    breaker.trip(now + 500)
    assert breaker.backoff_s == 1


def test_one_probe_at_a_time_and_stale_probes_are_ignored() -> None:
    breaker = opened()
    breaker.watch(1.0)
    stale = breaker.begin_probe()
    assert not breaker.wants_probe
    breaker.trip(1.0)
    breaker.watch(10.0)
    breaker.begin_probe()
    breaker.end_probe(stale, False, 10.0)
    assert breaker.state is BreakerState.HALF_OPEN


def test_a_place_is_set_aside_for_twice_as_long_each_time() -> None:
    aside = SetAside()
    at = 0.0
    for lasts in (5.0, 10.0, 20.0):
        aside.add(7, 5.0, at)
        aside.add(7, 5.0, at)  # by the same incident, which is not once more
        assert not aside.end(at + lasts - 0.1)
        assert aside.end(at + lasts) == [7]
        assert not aside.until_s
        at += lasts
    aside.add(7, 600.0, at)
    assert aside.end(at + 600.0) == [7]


def test_of_too_many_places_the_first_ones_are_used_again() -> None:
    aside = SetAside()
    for number in range(MAX_PLACES + 10):
        aside.add(number, 600.0, 0.0)
    assert aside.end(0.0) == [*range(10)]
    assert len(aside.until_s) == MAX_PLACES
    assert [len(aside.end(600.0)) for _ in range(MAX_PLACES // A_TURN + 1)] == [A_TURN] * (MAX_PLACES // A_TURN) + [0]
