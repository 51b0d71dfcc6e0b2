"""Breaker, throughput estimate, and what is set aside."""

from __future__ import annotations

from nixl_tiers.core.aside import A_TURN, MAX_PLACES, SetAside
from nixl_tiers.core.member import Breaker
from nixl_tiers.core.pricing import ThroughputEstimate
from nixl_tiers.core.types import BreakerLimits, BreakerState


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


def test_timeout_follows_the_slower_jobs() -> None:
    estimate = ThroughputEstimate(4e6)
    for _ in range(18):
        estimate.record(100_000_000, 1.0)
    assert estimate.timeout_s(1_000_000_000, 1.0, 1e9) == 40.0
    for _ in range(18):
        estimate.record(10_000_000, 1.0)
    assert estimate.timeout_s(1_000_000_000, 1.0, 1e9) == 400.0


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
