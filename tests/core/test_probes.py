"""Probes: a row is found by which a circuit closes, however many suspects are before it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.base.policies import Eviction, Write
from nixl_tiers.core.cold_table import take_all
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.probes import MAX_COLDEST
from nixl_tiers.core.types import TierSpec
from nixl_tiers.memory.key_hash import KeyHash
from nixl_tiers.memory.row_table import Rows, RowTable
from tests.support.core import opened

KEYS = [b"key-%04d" % number for number in range(2000)]
PROBES = 2  # that close a circuit


def listed(core: TierManager, *, table: bool) -> None:
    """The tier is opened (again), and lists all keys, the first of which is the coldest."""
    opened(core, 0, 2 * len(KEYS))
    ticks = range(1, len(KEYS) + 1)
    if table:
        rows = Rows()
        rows.add(KEYS, list(range(len(KEYS))), list(ticks))
        take_all(core.events.table_listed(0, RowTable.build(rows, key_hash=KeyHash.random()), len(KEYS)))
    else:
        core.events.listed(0, list(zip(range(len(KEYS)), KEYS, ticks, strict=True)), last=False)
    core.events.listed(0, [], last=True)


def killed(policy: Eviction, suspects: Sequence[Key], *, physical_slots: bool, table: bool) -> TierManager:
    """A core whose mover was killed while it loaded `suspects`; its tier has been opened again."""
    spec = TierSpec("tier", Write.OFF, physical_slots, existence_checks=not physical_slots, policy=policy)
    core = TierManager(4, 4096, [spec])
    listed(core, table=table)
    core.events.killed(0, 0.0)
    core.events.lost(0, 0.0)
    core.tiers[0].denylist.suspect(suspects, 0.0)
    listed(core, table=table)
    return core


def turns_until_closed(core: TierManager, most: int) -> int:
    probes = 0
    for turn in range(1, most + 1):
        now = 1.0 + turn / 20
        for job in core.turn(now, now):
            probes += 1
            core.events.finished(0, job.id, [Outcome.OK], now)
        if core.tiers[0].readable:
            assert probes == PROBES
            return turn
    pytest.fail(f"the circuit has not closed after {most} turns and {probes} probes")


@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo"])
@pytest.mark.parametrize("physical_slots", [True, False])
@pytest.mark.parametrize("count", [1, 63, 64, 65, 500])
def test_a_circuit_closes_though_the_coldest_rows_are_suspects(
    policy: Eviction, physical_slots: bool, count: int
) -> None:
    core = killed(policy, KEYS[:count], physical_slots=physical_slots, table=True)
    assert turns_until_closed(core, PROBES + count // MAX_COLDEST) >= PROBES


@pytest.mark.parametrize("count", [64, 500])
def test_a_circuit_closes_though_the_newest_rows_are_suspects(count: int) -> None:
    core = killed("lru", KEYS[-count:], physical_slots=True, table=False)
    assert turns_until_closed(core, PROBES) == PROBES


def test_rows_looked_at_for_a_probe_are_as_cold_as_before() -> None:
    core = killed("lru", KEYS[:100], physical_slots=False, table=True)
    turns_until_closed(core, 5)
    looked_at = 2 * MAX_COLDEST
    assert sorted(core.tiers[0].select_victims(looked_at)) == KEYS[:looked_at]
    assert core.tiers[0].select_victims(len(KEYS)) == KEYS[looked_at:]
