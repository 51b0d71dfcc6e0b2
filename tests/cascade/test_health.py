"""Health: how the circuits of a tier close again after its mover was killed."""

from __future__ import annotations

import pytest

from nixl_tiers.cascade.breaker import BreakerState
from nixl_tiers.cascade.manager import Lookup, TierManager
from nixl_tiers.cascade.types import TierSpec
from nixl_tiers.chunk import Key, Outcome
from nixl_tiers.policies import Write
from tests.support.core import opened


def killed(write: Write, rows: list[tuple[int, Key, int]]) -> TierManager:
    """A core with one shared tier whose mover was killed, and which was opened again with these rows."""
    core = TierManager(4, 4096, [TierSpec("s3", write, physical_slots=False, existence_checks=True)])
    for _ in range(2):
        opened(core, 0, 10)
        core.events.listed(0, rows, last=True)
        if not core.tiers[0].counters.kills:
            core.events.killed(0, 0.0)
            core.events.lost(0, 0.0)
    assert core.tiers[0].circuit is BreakerState.OPEN
    return core


@pytest.mark.parametrize("rows", [[], [(0, b"a", 1)]], ids=["empty", "with a row"])
def test_circuit_of_a_tier_that_is_only_read_closes(rows: list[tuple[int, Key, int]]) -> None:
    """No store probes it; and a medium that held nothing yet has no row to probe with either."""
    core = killed(Write.OFF, rows)
    for now in range(1, 5):
        for job in core.turn(now, now):
            assert rows
            core.events.finished(0, job.id, [Outcome.OK], now)
    assert core.tiers[0].circuit is BreakerState.CLOSED
    assert core.lookup(b"b", "request", None, 5.0) is Lookup.PENDING, "another engine may have stored it meanwhile"


def test_stores_of_an_empty_tier_are_probed() -> None:
    core = killed(Write.THROUGH, [])
    for now in range(1, 5):
        assert core.turn(now, now) == []
    assert core.tiers[0].readable
    assert core.tiers[0].circuit is BreakerState.HALF_OPEN
