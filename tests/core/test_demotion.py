"""Write-back: tiers that are written when the tier above evicts. No writable row is lost, no store waits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.base.policies import Write
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.types import Job, Limits, TierSpec
from tests.support.core import opened, put, rows_of


def manager(rows: int, writes: Sequence[Write], slots: Sequence[int]) -> TierManager:
    specs = [TierSpec(f"tier{n}", write, physical_slots=True) for n, write in enumerate(writes)]
    core = TierManager(rows, 4096, specs, Limits(load_share=1.0, store_share=1.0, reserve_share=0.25))
    for tier, count in enumerate(slots):
        opened(core, tier, count, [])
    return core


def settle(core: TierManager) -> None:
    """Movers that keep up."""
    for _ in range(50):
        jobs = core.events.plan(0.0)
        if not jobs:
            return
        for job in jobs:
            core.events.finished(job.tier, job.id, [Outcome.OK] * len(job.moves), 0.0)
    raise AssertionError("write-back never ends")


def turns(core: TierManager, now: float) -> list[Job]:
    """What the supervisor does until nothing is left to do at once."""
    jobs: list[Job] = []
    for _ in range(100):
        jobs += core.turn(now, now)
        if not core.events.unfinished:
            return jobs
    raise AssertionError("work is left for ever")


def keys(count: int) -> list[Key]:
    return [b"%03d" % n for n in range(count)]


def test_store_never_waits_for_writeback() -> None:
    core = manager(4, (Write.ON_EVICT,), (100,))
    for key in keys(20):
        put(core, [key])  # no mover ever answers
        core.events.plan(0.0)
    # Rows that a mover reads are pinned, others are evicted unwritten, the oldest first, and each is counted.
    lost = [key for key in keys(20) if core.where([key])[0] is None]
    assert core.where([keys(20)[-1]])[0] == "cpu"
    assert core.tiers[0].counters.dropped == len(lost) > 0


def test_what_only_the_host_has_is_written_when_the_engine_ends() -> None:
    core = manager(8, (Write.ON_EVICT,), (100,))
    put(core, keys(6))
    settle(core)
    core.writeback.demote(list(core.host.index.values()))
    settle(core)
    assert rows_of(core.tiers[0]).keys() == {*keys(6)}


def test_victims_that_cannot_be_written_stay() -> None:
    core = manager(8, (Write.ON_EVICT,), (100,))
    for key in keys(7):
        put(core, [key])
    for job in core.events.plan(0.0):
        core.events.finished(job.tier, job.id, [Outcome.NO_SPACE] * len(job.moves), 0.0)
    core.events.down(0, 0.0)
    assert all(place == "cpu" for place in core.where(keys(7)))
    assert not core.host.evicting


@pytest.mark.parametrize("slots", [2, 100], ids=["small", "large"])
def test_row_that_came_up_to_be_demoted_is_not_written_to_the_tier_it_came_from(slots: int) -> None:
    """Its host row was the next to be evicted, to the tier above the one that it had just been written to. Without room
    for all of them below, rows went round through all tiers for ever."""
    core = manager(8, (Write.ON_EVICT, Write.ON_EVICT), (12, slots))
    for key in keys(60):
        put(core, [key])
        settle(core)
    first = core.tiers[0].counters
    assert first.bytes_written == 4096 * len({key for key in keys(60) if key not in core.host.index})
    assert core.tiers[1].counters.stored == first.evictions > 0


def test_victims_from_before_a_reset_that_keeps_the_tiers_are_written_after_it() -> None:
    """As many victims as there had been were given up, the newest first. The others waited for ever for somebody to
    write them, and what was stored next took the slots of rows that had been written nowhere."""
    specs = [TierSpec("above", Write.THROUGH, True), TierSpec("below", Write.ON_EVICT, True)]
    core = TierManager(300, 4096, specs, Limits(reserve_share=0.25, rows_per_slice=16))
    for tier, slots in enumerate((1000, 2000)):
        opened(core, tier, slots)
        held = keys(slots if tier == 0 else 0)
        core.events.listed(tier, [(slot, key, slot) for slot, key in enumerate(held)], last=True)
    above, below = core.tiers
    before = turns(core, 0.0)
    assert before
    assert above.index.rows.evicting() == 250
    core.reset(keep_tiers=True)
    for job in before:  # movers know nothing of it
        core.events.finished(job.tier, job.id, [Outcome.OK] * len(job.moves), 0.0)
    while jobs := turns(core, 0.0):
        for job in jobs:
            core.events.finished(job.tier, job.id, [Outcome.OK] * len(job.moves), 0.0)
    assert above.index.slots.free == 250
    assert not above.index.rows.evicting()
    assert all(key in above.index or key in below.index for key in keys(1000))
    assert all(key in below.index for key in keys(250)), "those that were used longest ago"
