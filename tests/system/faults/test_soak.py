"""The soak test itself: a short run has no finding, and wrong bytes and leaked rows are findings."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak import RoundResult, Soak
from tests.support.proxy import FaultProxy

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]


@pytest.fixture
def soak(proxy: FaultProxy, bucket: str, tmp_path: Path) -> Soak:
    return Soak(tmp_path, proxy, bucket, seed=3, round_s=8.0)


def test_short_run_has_no_finding(soak: Soak) -> None:
    rounds: list[RoundResult] = []
    soak.run(10.0, rounds.append)
    assert soak.findings == []
    assert len(rounds) >= 2
    assert all(each.requests and each.faults for each in rounds)
    assert sum(each.hits for each in rounds) > 0
