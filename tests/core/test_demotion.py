"""Write-back: tiers that are written when the tier above evicts. No writable row is lost, no store waits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.base.policies import Write
from nixl_tiers.core.lookup import Lookup
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.requests import RequestWishes
from nixl_tiers.core.rows import RowState
from nixl_tiers.core.types import Direction, Job, Limits, TierSpec
from tests.support import inside
from tests.support.core import all_good, look_up_key, opened, rows_of


def manager(rows: int, writes: Sequence[Write], slots: Sequence[int]) -> TierManager:
    specs = [TierSpec(f"tier{n}", write, physical_slots=True) for n, write in enumerate(writes)]
    core = TierManager(rows, 4096, specs, Limits(load_share=1.0, store_share=1.0, reserve_share=0.25))
    for tier, count in enumerate(slots):
        opened(core, tier, count)
        core.events.listed(tier, [], last=True)
    return core


def put(core: TierManager, key: Key, now: float) -> None:
    plan = core.prepare_store(key.decode(), [key])
    core.complete_store(plan.keys, all_good)
    core.finish(key.decode())
    core.end_step()


def settle(core: TierManager, outcome: Outcome = Outcome.OK) -> None:
    """Movers that keep up."""
    for _ in range(50):
        jobs = core.events.plan(0.0)
        if not jobs:
            return
        for job in jobs:
            core.events.finished(job.tier, job.id, [outcome] * len(job.moves), 0.0)
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


@pytest.mark.parametrize("writes", [(Write.ON_EVICT,), (Write.OFF, Write.ON_EVICT)])
def test_host_victims_are_written_to_the_tier_below(writes: tuple[Write, ...]) -> None:
    core = manager(8, writes, [100] * len(writes))
    for key in keys(40):
        put(core, key, 0.0)
        settle(core)
    assert all(place for place in core.where(keys(40)))
    assert core.tiers[-1].counters.dropped == 0
    assert len(core.tiers[-1].index) <= 40 - 8 + 3  # lazily: what still fits the host was not written


def test_no_more_victims_are_selected_than_the_tier_below_can_take() -> None:
    """All its slots are in use: victims beyond that were dropped, and selected again, at every turn and at once."""
    core = manager(16, (Write.ON_EVICT,), (2,))
    for key in keys(16):
        put(core, key, 0.0)
    jobs = [job for _ in range(5) for job in core.events.plan(0.0)]
    assert sum(len(job.moves) for job in jobs) == core.host.evicting == 2
    assert core.tiers[0].counters.dropped == 0
    for job in jobs:
        core.events.finished(job.tier, job.id, [Outcome.OK] * len(job.moves), 0.0)
    assert core.host.free == 2
    assert sum(len(job.moves) for job in core.events.plan(0.0)) == 2


def test_victims_wait_while_the_host_is_full_of_pinned_rows() -> None:
    """They were cancelled and selected again at every turn, which used up its slice, so that the next came at once."""
    specs = [TierSpec("above", Write.THROUGH, physical_slots=True), TierSpec("below", Write.ON_EVICT, True)]
    core = TierManager(8, 4096, specs, Limits(load_share=1.0, store_share=1.0, reserve_share=0.25, rows_per_slice=1))
    for tier in range(2):
        opened(core, tier, 4)
        core.events.listed(tier, [], last=True)
    for key in keys(3):
        put(core, key, 0.0)
        settle(core)
    filling = [b"filling-%d" % number for number in range(8)]
    assert len(core.prepare_store("request", filling).keys) == 8
    core.events.resized(0, 3)
    for _ in range(20):
        assert core.turn(0.0, 0.0) == []
    assert inside.evicting(core.tiers[0].index.rows) == keys(1)
    assert not core.events.unfinished
    core.complete_store(filling, all_good)
    assert [move.key for _ in range(20) for job in core.turn(1.0, 1.0) for move in job.moves if job.tier == 0]


@pytest.mark.parametrize("first", [Write.THROUGH, Write.ON_EVICT])
def test_victims_of_a_storage_tier_are_demoted_further_down(first: Write) -> None:
    core = manager(8, (first, Write.ON_EVICT), (12, 100))
    for key in keys(60):
        put(core, key, 0.0)
        settle(core)
    assert all(place for place in core.where(keys(60)))
    assert [tier.counters.dropped for tier in core.tiers] == [0, 0]
    assert len(core.tiers[0].index.slots) <= 12
    assert not inside.pinned(core)


def test_store_never_waits_for_writeback() -> None:
    core = manager(4, (Write.ON_EVICT,), (100,))
    for key in keys(20):
        put(core, key, 0.0)  # no mover ever answers
        core.events.plan(0.0)
    # Rows that a mover reads are pinned, others are evicted unwritten, the oldest first, and each is counted.
    lost = [key for key in keys(20) if core.where([key])[0] is None]
    assert core.where([keys(20)[-1]])[0] == "cpu"
    assert core.tiers[0].counters.dropped == len(lost) > 0


def test_victims_that_cannot_be_written_stay() -> None:
    core = manager(8, (Write.ON_EVICT,), (100,))
    for key in keys(7):
        put(core, key, 0.0)
    for job in core.events.plan(0.0):
        core.events.finished(job.tier, job.id, [Outcome.NO_SPACE] * len(job.moves), 0.0)
    core.events.down(0, 0.0)
    assert all(place == "cpu" for place in core.where(keys(7)))
    assert not core.host.evicting


def test_shutdown_can_write_all_dirty_rows() -> None:
    core = manager(8, (Write.ON_EVICT,), (100,))
    for key in keys(6):
        put(core, key, 0.0)
    core.writeback.demote(list(core.host.index.values()))
    settle(core)
    assert rows_of(core.tiers[0]).keys() == set(keys(6))


def test_victims_evicted_unwritten_are_counted_as_dropped() -> None:
    core = manager(8, (Write.THROUGH, Write.ON_EVICT), (8, 100))
    for key in keys(24):
        put(core, key, 0.0)
        for job in core.events.plan(0.0):  # of the tier below, no mover ever answers
            if job.tier == 0:
                core.events.finished(job.tier, job.id, [Outcome.OK] * len(job.moves), 0.0)
    nowhere = [key for key in keys(24) if core.where([key])[0] is None]
    assert nowhere
    under_way = {move.key for job in core.tiers[1].jobs for move in job.moves}
    lost = [key for key in keys(24) if key not in core.tiers[0].index and key not in under_way]
    queued = [key for key in lost if key in core.tiers[1].to_store]
    assert core.tiers[1].counters.dropped == len(lost) - len(queued)


@pytest.mark.parametrize("slots", [2, 100], ids=["small", "large"])
def test_row_that_came_up_to_be_demoted_is_not_written_to_the_tier_it_came_from(slots: int) -> None:
    """Its host row was the next to be evicted, to the tier above the one that it had just been written to. Without room
    for all of them below, rows went round through all tiers for ever."""
    core = manager(8, (Write.ON_EVICT, Write.ON_EVICT), (12, slots))
    for key in keys(60):
        put(core, key, 0.0)
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


def test_an_old_place_in_the_queue_ends_a_demotion_and_not_its_load() -> None:
    """Its victim was used and evicted meanwhile, and selected again. A look-up then asked a tier "cpu" for the row."""
    core = manager(8, (Write.THROUGH, Write.ON_EVICT), (12, 100))
    above, below = core.tiers
    loads: list[Job] = []
    for key in keys(60):
        put(core, key, 0.0)
        while (jobs := core.events.plan(0.0)) and not loads:
            loads = [job for job in jobs if job.direction is Direction.LOAD]
            for job in jobs:
                if job.direction is Direction.STORE:
                    core.events.finished(job.tier, job.id, [Outcome.OK] * len(job.moves), 0.0)
        if loads:
            break
    (key, *_) = above.staged
    assert core.host.index[key].state is RowState.LOADING
    below.to_store[key] = 0
    below.to_store.move_to_end(key, last=False)
    core.events.plan(0.0)
    assert key not in above.staged
    assert core.host.index[key].source == "tier0"
    assert look_up_key(core, key, "request", None, 0.0) is Lookup.PENDING
    core.events.finished(0, loads[0].id, [Outcome.OK] * len(loads[0].moves), 0.0)
    assert look_up_key(core, key, "request", None, 0.0) is Lookup.HIT


def test_promotion_that_waited_for_a_full_host_waits_for_writeback_too() -> None:
    """It took the first row that was unpinned, though that was not written yet."""
    core = manager(8, (Write.OFF, Write.ON_EVICT), (100, 100))
    core.events.listed(0, [(0, b"old", 0)], last=True)
    filling = [b"filling-%d" % number for number in range(8)]
    core.prepare_store("filling", filling)
    assert look_up_key(core, b"old", "request", 0, 0.0) is Lookup.PENDING
    core.end_step()
    assert core.turn(0.0, 0.0) == []
    core.complete_store(filling, all_good)
    core.end_step()
    for now in (0.1, 0.2, 0.3):
        for job in core.turn(now, now):
            core.events.finished(job.tier, job.id, [Outcome.OK] * len(job.moves), now)
    assert look_up_key(core, b"old", "request", 0, 0.3) is Lookup.HIT
    assert core.tiers[1].counters.dropped == 0
    assert all(place for place in core.where(filling))


def test_a_victim_that_is_selected_again_before_it_is_brought_up_comes_once() -> None:
    """A use that is no later than its last one ends its eviction, and has it stay the next victim."""
    core = manager(64, (Write.THROUGH, Write.ON_EVICT), (40, 100))
    core.events.listed(0, [(slot, key, slot) for slot, key in enumerate(keys(40))], last=True)
    file = core.tiers[0]
    core.movers[0].send_credits = 0  # its socket is full for a moment
    core.arrive("low", RequestWishes(evict_first=True))
    for now in range(3):
        assert core.turn(now, now) == []
        assert len(file.to_demote) == 10
        core.used("low", [keys(40)[2]])
    core.movers[0].send_credits = 100
    settle(core)
    assert core.host.used == len(core.host.index)
    assert not file.to_demote
