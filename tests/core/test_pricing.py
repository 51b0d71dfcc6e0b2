"""Estimates of a tier's speed: they follow a change, and do not follow noise."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nixl_tiers.core.pricing import TransferEstimate

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
