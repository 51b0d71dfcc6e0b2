"""Health: how circuits close again after a mover was killed, and suspects are tried."""

from __future__ import annotations

import pytest

from nixl_tiers.cascade.breaker import BreakerState
from nixl_tiers.cascade.chain_rows import Chain, Group
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


def test_suspect_probes_a_circuit_if_no_other_row_is_known() -> None:
    core = killed(Write.OFF, [(0, b"a", 1)])
    tier, now = core.tiers[0], core.limits.retry_s
    tier.denylist.suspect([b"a"], 0.0)
    core.turn(now, now)
    assert tier.circuit is BreakerState.HALF_OPEN
    assert core.lookup(b"a", "request", None, now) is Lookup.MISS
    (job,) = core.turn(now, now)
    assert [move.key for move in job.moves] == [b"a"]
    core.events.finished(0, job.id, [Outcome.OK], now)
    assert not tier.denylist.keys


@pytest.mark.parametrize("groups", [1, 2])
def test_suspect_of_any_full_attention_group_is_tried_again(groups: int) -> None:
    core = TierManager(4, 4096, [TierSpec("file", Write.THROUGH, physical_slots=True)])
    opened(core, 0, 10)
    keys = [b"%d" % number for number in range(groups)]
    core.events.listed(0, [(slot, key, 1) for slot, key in enumerate(keys)], last=True)
    core.tiers[0].denylist.suspect(keys[-1:], 0.0)
    now = core.limits.retry_s
    assert not core.scan("request", Chain([Group([key], 16) for key in keys]), 0, now).waits
    (job,) = core.turn(now, now)
    assert [move.key for move in job.moves] == keys[-1:]
