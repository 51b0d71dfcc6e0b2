"""Tiers that are written when the tier above evicts: nothing that could be written is lost, and no store waits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nixl_tiers.cascade.limits import Limits
from nixl_tiers.cascade.manager import TierManager
from nixl_tiers.cascade.outcome import Outcome
from nixl_tiers.cascade.tier import TierSpec, Write
from nixl_tiers.chunk import Key


def manager(rows: int, writes: Sequence[Write], slots: Sequence[int]) -> TierManager:
    specs = [TierSpec(f"tier{n}", write, physical_slots=True) for n, write in enumerate(writes)]
    core = TierManager(rows, 4096, specs, Limits(load_share=1.0, store_share=1.0, reserve_share=0.25))
    for tier, count in enumerate(slots):
        core.opened(tier, count)
        core.adopt(tier, [], last=True)
    return core


def put(core: TierManager, key: Key, now: float) -> None:
    plan = core.prepare_store([key], key.decode())
    core.complete_store(core.filling(plan.keys), set())
    core.finish_request(key.decode())
    core.end_step()


def settle(core: TierManager, outcome: Outcome = Outcome.OK) -> None:
    """Movers that keep up."""
    for _ in range(50):
        jobs = core.plan(0.0)
        if not jobs:
            return
        for job in jobs:
            core.finished(job.tier, job.id, [outcome] * len(job.moves), 0.0)
    raise AssertionError("the cleaner never comes to an end")


def keys(count: int) -> list[Key]:
    return [b"%03d" % n for n in range(count)]


@pytest.mark.parametrize("writes", [(Write.ON_EVICT,), (Write.OFF, Write.ON_EVICT)])
def test_what_the_host_evicts_is_in_the_tier_below(writes: tuple[Write, ...]) -> None:
    core = manager(8, writes, [100] * len(writes))
    for key in keys(40):
        put(core, key, 0.0)
        settle(core)
    assert all(core.where(key, 0.0) for key in keys(40))
    assert core.storage[-1].counters.dropped == 0
    assert len(core.storage[-1].index) <= 40 - 8 + 3  # lazily: what still fits the host was not written


def test_nothing_is_written_while_the_host_has_room() -> None:
    core = manager(8, (Write.ON_EVICT,), (100,))
    for key in keys(5):
        put(core, key, 0.0)
        settle(core)
    assert core.storage[0].counters.bytes_written == 0


@pytest.mark.parametrize("first", [Write.THROUGH, Write.ON_EVICT])
def test_what_a_storage_tier_evicts_goes_further_down(first: Write) -> None:
    core = manager(8, (first, Write.ON_EVICT), (12, 100))
    for key in keys(60):
        put(core, key, 0.0)
        settle(core)
    assert all(core.where(key, 0.0) for key in keys(60))
    assert [storage.counters.dropped for storage in core.storage] == [0, 0]
    assert len(core.storage[0].slots) <= 12
    rows = core.host.index.values()
    assert not any(row.holds or row.mover for row in rows)


def test_a_store_never_waits_for_the_cleaner() -> None:
    core = manager(4, (Write.ON_EVICT,), (100,))
    for key in keys(20):
        put(core, key, 0.0)  # no mover ever answers
        core.plan(0.0)
    # What a mover reads is pinned, the rest is given up, newest wins, and every loss is counted.
    lost = [key for key in keys(20) if core.where(key, 0.0) is None]
    assert core.where(keys(20)[-1], 0.0) == "cpu"
    assert core.storage[0].counters.dropped == len(lost) > 0


def test_rows_that_cannot_be_written_stay_where_they_are() -> None:
    core = manager(8, (Write.ON_EVICT,), (100,))
    for key in keys(7):
        put(core, key, 0.0)
    for job in core.plan(0.0):
        core.finished(job.tier, job.id, [Outcome.NO_SPACE] * len(job.moves), 0.0)
    core.down(0, 0.0)
    assert all(core.where(key, 0.0) == "cpu" for key in keys(7))
    assert not core.host.leaving


def test_a_row_that_is_wanted_again_is_not_evicted_when_its_write_ends() -> None:
    core = manager(8, (Write.ON_EVICT,), (100,))
    for key in keys(8):
        put(core, key, 0.0)
    jobs = core.plan(0.0)
    leaving = next(iter(core.host.leaving))
    core.lookup(leaving, "again", 0, 0.0)
    core.prepare_load([leaving], "again")
    core.complete_load([leaving])
    core.end_step()
    for job in jobs:
        core.finished(job.tier, job.id, [Outcome.OK] * len(job.moves), 0.0)
    assert core.where(leaving, 0.0) == "cpu"


def test_leaving_the_engine_can_write_all_that_is_dirty() -> None:
    core = manager(8, (Write.ON_EVICT,), (100,))
    for key in keys(6):
        put(core, key, 0.0)
    core.demote_all()
    settle(core)
    assert set(core.storage[0].index) == set(keys(6))
