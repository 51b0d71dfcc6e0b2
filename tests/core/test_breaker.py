"""Breaker, throughput estimate and denylist."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nixl_tiers.core.breaker import MAX_KEYS, Breaker, BreakerLimits, BreakerState, Denylist
from nixl_tiers.core.pricing import ThroughputEstimate

EVENTS = st.lists(
    st.tuples(st.sampled_from(["good", "bad", "trip", "probe good", "probe bad"]), st.floats(0, 100)), max_size=60
)


def opened(limits: BreakerLimits | None = None) -> Breaker:
    breaker = Breaker(limits)
    for _ in range(breaker.limits.failures_to_open):
        breaker.record(False, 0.0)
    assert breaker.state is BreakerState.OPEN
    return breaker


@given(EVENTS)
def test_circuit_closes_after_good_probes_whatever_happened_before(events: list[tuple[str, float]]) -> None:
    breaker, now = Breaker(), 0.0
    for event, seconds in events:
        now += seconds
        breaker.watch(now)
        if event.startswith("probe"):
            if breaker.wants_probe:
                breaker.end_probe(breaker.begin_probe(), event == "probe good", now)
        elif event == "trip":
            breaker.trip(now)
        else:
            breaker.record(event == "good", now)
        assert 0 <= breaker.backoff_s <= breaker.limits.max_backoff_s
    now += breaker.limits.max_backoff_s
    breaker.watch(now)
    assert breaker.state is not BreakerState.OPEN
    while breaker.wants_probe:
        breaker.end_probe(breaker.begin_probe(), True, now)
    assert breaker.closed


def test_one_failure_in_three_does_not_open_the_circuit() -> None:
    breaker = Breaker()
    for number in range(100):
        breaker.record(number % 3 != 0, float(number))
    assert breaker.closed


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


@given(st.lists(st.tuples(st.integers(1, 1 << 30), st.floats(0, 1000)), max_size=100), st.integers(1, 1 << 30))
def test_timeout_has_a_minimum_and_a_maximum(jobs: list[tuple[int, float]], nbytes: int) -> None:
    estimate = ThroughputEstimate(4e6)
    for size, seconds in jobs:
        estimate.record(size, seconds)
    assert 5.0 <= estimate.timeout_s(nbytes, 5.0, 10.0) <= 10.0


def test_timeout_follows_the_slower_jobs() -> None:
    estimate = ThroughputEstimate(4e6)
    for _ in range(18):
        estimate.record(100_000_000, 1.0)
    assert estimate.timeout_s(1_000_000_000, 1.0, 1e9) == 40.0
    for _ in range(18):
        estimate.record(10_000_000, 1.0)
    assert estimate.timeout_s(1_000_000_000, 1.0, 1e9) == 400.0


def test_failed_key_is_denied_for_its_backoff_and_suspect_until_its_trial() -> None:
    denylist = Denylist(5.0, 12.0)
    denylist.record_failure(b"failed", 0.0)
    denylist.suspect([b"suspect"], 0.0)
    assert denylist.is_denied(b"failed", 4.0)
    assert not denylist.is_denied(b"failed", 5.0)
    assert denylist.is_denied(b"suspect", 1000.0)
    assert not denylist.trial_due(b"suspect", 4.0)
    assert denylist.trial_due(b"suspect", 5.0)
    for at, wait in ((5.0, 10.0), (15.0, 12.0), (27.0, 12.0)):
        denylist.suspect([b"suspect"], at)
        assert not denylist.trial_due(b"suspect", at + wait - 0.1)
        assert denylist.trial_due(b"suspect", at + wait)
    denylist.clear(b"suspect")
    assert not denylist.is_denied(b"suspect", 27.0)


def test_denylist_is_bounded() -> None:
    denylist = Denylist(5.0, 12.0)
    for number in range(MAX_KEYS + 10):
        denylist.suspect([b"%d" % number], 0.0)
    assert len(denylist) == MAX_KEYS
    assert not denylist.is_suspect(b"0")
