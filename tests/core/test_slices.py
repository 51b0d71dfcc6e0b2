"""Work that concerns many rows or requests is done in slices: one call touches a bounded number of them."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.base.policies import Write
from nixl_tiers.core.host import HostTier
from nixl_tiers.core.lookup import Lookup
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.promotion import Promotion
from nixl_tiers.core.types import Job, Limits, TierSpec, TierState
from tests.support import inside
from tests.support.core import all_good, expire, look_up_key, opened, put

SLICE = 4
ROWS = 1000
CHAIN = [b"key-%d" % number for number in range(60)]
MOST = SLICE


def manager(rows: int = ROWS) -> TierManager:
    specs = [TierSpec(f"tier{number}", Write.THROUGH, physical_slots=False) for number in range(2)]
    core = TierManager(rows, 4096, specs, Limits(rows_per_slice=SLICE, moves_per_job=SLICE, load_share=0.5))
    for tier in range(2):
        opened(core, tier, 10_000, [(0, key, 0) for key in CHAIN])
    return core


def turns(core: TierManager, now: float = 0.0) -> list[Job]:
    """What the supervisor does until nothing is left to do at once."""
    jobs: list[Job] = []
    for _ in range(5000):
        expire(core, now)
        jobs += core.events.plan(now)
        if not core.events.unfinished:
            return jobs
    raise AssertionError("work is left for ever")


def scan(core: TierManager, name: str, now: float = 0.0) -> list[Lookup]:
    """One step's look-ups, as vLLM makes them: up to the first miss."""
    answers = []
    for position, key in enumerate(CHAIN):
        answers.append(look_up_key(core, key, name, position, now))
        if answers[-1] is Lookup.MISS:
            break
    core.end_step()
    return answers


def fill(core: TierManager, count: int) -> None:
    keys = [b"filled-%d" % number for number in range(count)]
    core.prepare_store("filler", keys)
    core.complete_store(keys, all_good)
    core.finish("filler")


@pytest.fixture
def most_work(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs a call and says how many rows were freed or invalidated, and requests retried, in it."""
    done = 0

    def count(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def counted(*arguments: Any) -> Any:
            nonlocal done
            done += 1
            return original(*arguments)

        monkeypatch.setattr(owner, name, counted)

    count(HostTier, "invalidate")
    count(HostTier, "reclaim")
    count(Promotion, "enqueue")

    def measure(call: Callable[..., Any], *arguments: Any) -> int:
        nonlocal done
        done = 0
        call(*arguments)
        return done

    return measure


def test_kill_is_worked_off_in_slices(most_work: Callable[..., int]) -> None:
    core = manager()
    for number in range(20):
        scan(core, f"request-{number}")
    assert sum(len(job.moves) for job in turns(core)) == len(CHAIN)
    assert most_work(core.events.killed, 0, 1.0) <= 3 * MOST
    while core.tiers[0].members[0].dead[0].to_abandon:
        assert most_work(expire, core, 1.0) <= 3 * MOST
    assert core.tiers[0].quarantined == len(CHAIN), "rows are quarantined until their mover is reaped"
    assert most_work(core.events.lost, 0, 1.0) <= 3 * MOST
    while core.tiers[0].members[0].dead:
        assert most_work(expire, core, 1.0) <= 3 * MOST
    assert not core.tiers[0].quarantined
    assert not turns(core, 1.0), "nobody has looked up"
    for number in range(20):
        scan(core, f"request-{number}", 1.0)
    retried = [move.key for job in turns(core, 1.0) for move in job.moves if job.tier == 1]
    assert sorted(retried) == sorted(CHAIN), "the requests did not ask the next tier"


def test_reset_touches_a_slice_of_rows(most_work: Callable[..., int]) -> None:
    core = manager()
    fill(core, ROWS)
    assert most_work(core.reset, False, 0.0) <= 3 * MOST
    assert core.host.used >= ROWS - MOST
    assert not core.host.index
    assert core.tiers[0].state is TierState.DOWN
    assert core.counters()["cpu"].rows == 0
    while core.host.has_old:
        assert most_work(expire, core, 0.0) <= 3 * MOST
    assert core.host.used == 0


def test_a_turn_deletes_a_bounded_number_of_rows_and_stores_nothing_before_they_are_sent() -> None:
    """Else 300,000 of them, as when a tier has become smaller, were put into messages in one hold of the lock."""
    spec = TierSpec("file", Write.THROUGH, physical_slots=True)
    core = TierManager(16, 4096, [spec], Limits(deletes_per_batch=4, deletes_per_turn=8))
    opened(core, 0, 200, [(slot, b"%d" % slot, slot) for slot in range(100)])
    tier = core.tiers[0]
    for slot in range(50):
        tier.index.queue_delete(slot, b"%d" % slot)
    put(core, [b"new"])
    sent: list[int] = []
    while tier.members[0].to_delete:
        assert core.turn(0.0, 0.0) == [], "a store would overtake deletes"
        batches = tier.members[0].delete_batches(core.limits.deletes_per_batch)
        assert max(map(len, batches)) == 4
        sent.append(sum(map(len, batches)))
    assert max(sent) <= 2 * 8
    assert sum(sent) == 50
    assert len(core.turn(0.0, 0.0)) == 1


def test_what_stores_evict_is_deleted_before_them_however_much_waits_already() -> None:
    spec = TierSpec("file", Write.THROUGH, physical_slots=True)
    core = TierManager(16, 4096, [spec], Limits(deletes_per_batch=4, deletes_per_turn=8))
    opened(core, 0, 20, [(slot, b"%d" % slot, slot) for slot in range(20)])
    tier = core.tiers[0]
    for number in range(8):
        tier.index.queue_delete(100 + number, b"other %d" % number)
    put(core, [b"new", b"newer"])
    (job,) = core.turn(0.0, 0.0)
    assert len(job.moves) == 2
    assert sum(map(len, tier.members[0].delete_batches(4))) == 10
    assert not tier.members[0].to_delete


def test_many_resets_without_a_flush_leave_nothing_behind() -> None:
    core = manager()
    fill(core, 3)
    plan = core.prepare_store("job", [b"open"])
    for _ in range(1000):
        core.reset(keep_tiers=True)
    while core.garbage:
        core.garbage.drop(100)
    turns(core)
    assert core.host.has_unflushed
    assert core.host.used == len(plan.rows), "the row of an open job stays until that has ended"
    core.flushed()
    turns(core)
    assert not core.host.has_unflushed
    assert core.host.used == 0
    assert sum(len(each) for each in vars(core.host).values() if isinstance(each, (list, deque, dict))) == 0


def test_requests_whose_deadlines_pass_together_are_released_in_slices() -> None:
    core = manager()
    for number in range(20):
        scan(core, f"request-{number}")
    turns(core)
    late = core.limits.pin_s + core.limits.wait_s + 1
    expire(core, late)
    waiting = len(inside.waiting(core))
    turns(core, late)
    assert not inside.waiting(core)
    assert waiting >= 20 - MOST


def test_garbage_collector_does_not_track_rows() -> None:
    """A full collection stops the scheduler."""
    rows, chunks = 4096, 16  # of a request
    core = TierManager(rows, 4096, [TierSpec("file", Write.THROUGH, physical_slots=True)])
    opened(core, 0, rows, [])
    before, walked_before = tracked(), walked()
    for number in range(rows // chunks):
        keys = [b"%d %d" % (number, chunk) for chunk in range(chunks)]
        plan = core.prepare_store(f"{number}", keys)
        core.complete_store(plan.keys, all_good)
        core.finish(f"{number}")
        core.end_step()
        for job in core.events.plan(0.0):
            core.events.finished(0, job.id, [Outcome.OK] * len(job.moves), 0.0)
    del job, keys, plan
    core.take_samples()  # of histograms, which a scheduler takes in every step
    assert core.host.used == len(core.tiers[0].index) == rows
    assert tracked() - before < 100
    assert walked() - walked_before < rows // 2, "a container that the collector walks over has all rows"


def tracked() -> int:
    gc.collect()
    return len(gc.get_objects())


def walked() -> int:
    """What a full collection looks at."""
    return sum(len(gc.get_referents(one)) for one in gc.get_objects())
