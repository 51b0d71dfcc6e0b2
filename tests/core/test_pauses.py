"""When the ends of jobs may wait, so that a turn of the supervisor applies several: while nobody waits for any."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.base.policies import Write
from nixl_tiers.core.lookup import Lookup
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.pricing import ENOUGH_SAMPLES
from nixl_tiers.core.types import Direction, Job, Limits, TierSpec
from nixl_tiers.core.urgency import PAUSE_SHARE
from tests.support.core import look_up_key, opened, put

ROW = 1 << 20
ROWS = 400
WINDOW = RESERVE = 20  # a twentieth of them
LIMITS = Limits()
KEYS = [b"key-%d" % number for number in range(2 * ROWS)]


def core_of(write: Write = Write.THROUGH) -> TierManager:
    core = TierManager(ROWS, ROW, [TierSpec("file", write, physical_slots=True)], LIMITS)
    opened(core, 0, 4 * ROWS)
    core.events.listed(0, [(3 * ROWS, b"stored", 0)], last=True)
    return core


def end(core: TierManager, jobs: Sequence[Job], now: float) -> None:
    for job in jobs:
        core.events.finished(0, job.id, [Outcome.OK] * len(job.moves), now)


def measured(core: TierManager, seconds: float) -> None:
    """It is known that the tier stores a window in so many seconds."""
    for number in range(20):
        now = 100.0 * number
        put(core, KEYS[WINDOW * number : WINDOW * (number + 1)], f"request {number}")
        jobs = core.turn(now, now)
        assert sum(len(job.moves) for job in jobs) == WINDOW
        end(core, jobs, now + seconds)


def test_nothing_under_way_is_no_reason_for_a_pause() -> None:
    core = core_of()
    assert core.urgency.pause_s == 0
    assert not core.urgency.can_start


def test_the_ends_of_stores_may_wait() -> None:
    core = core_of()
    measured(core, seconds=10 * LIMITS.pause_s)
    put(core, KEYS[ROWS : ROWS + WINDOW])
    assert core.urgency.can_start
    assert core.turn(1e4, 1e4)
    assert core.urgency.pause_s == LIMITS.pause_s
    assert core.urgency.busy
    assert not core.urgency.urgent


def test_a_quick_tier_does_not_idle_while_rows_are_queued() -> None:
    core = core_of()
    measured(core, seconds=0.04)
    put(core, KEYS[ROWS : ROWS + WINDOW + 1])
    core.turn(1e4, 1e4)
    assert core.urgency.pause_s == pytest.approx(PAUSE_SHARE * 0.04)


def test_a_tier_that_was_slow_for_a_while_does_not_idle_either() -> None:
    core = core_of()
    measured(core, seconds=0.04)
    for _ in range(ENOUGH_SAMPLES):
        core.tiers[0].members[0].throughput[Direction.STORE].record(WINDOW * ROW, 10.0)
    put(core, KEYS[ROWS : ROWS + WINDOW + 1])
    core.turn(1e4, 1e4)
    assert core.urgency.pause_s == pytest.approx(PAUSE_SHARE * 0.04)


def test_the_ends_of_stores_may_wait_longer_than_they_take_while_none_is_queued() -> None:
    core = core_of()
    measured(core, seconds=0.04)
    put(core, KEYS[ROWS : ROWS + WINDOW])
    core.turn(1e4, 1e4)
    assert core.urgency.pause_s == LIMITS.pause_s


def test_a_quick_tier_does_not_idle_while_victims_wait_to_be_brought_up_for_it() -> None:
    """As many of them as may come up are being written: the others are queued only when some of these are done."""
    specs = [
        TierSpec("file", Write.THROUGH, physical_slots=True),
        TierSpec("s3", Write.ON_EVICT, physical_slots=False),
    ]
    core = TierManager(ROWS, ROW, specs, LIMITS)
    opened(core, 0, 1000)
    core.events.listed(0, [(slot, b"stored-%d" % slot, slot) for slot in range(970)], last=True)
    opened(core, 1, 4 * ROWS)
    core.events.listed(1, [], last=True)
    file, s3 = core.tiers
    for _ in range(ENOUGH_SAMPLES):
        s3.members[0].throughput[Direction.STORE].record(WINDOW // 2 * ROW, 0.04)
    for _ in range(3):
        end(core, [job for job in core.turn(0.0, 0.0) if job.direction is Direction.LOAD], 0.0)
    assert (len(file.to_demote), s3.rows_storing, len(s3.to_store)) == (10, WINDOW // 2, 0)
    assert not core.urgency.short_of_room
    assert core.urgency.pause_s == pytest.approx(PAUSE_SHARE * 0.04)


def test_who_waits_for_writes_waits_for_no_long_pause() -> None:
    core = core_of()
    measured(core, seconds=0.04)
    put(core, KEYS[ROWS : ROWS + WINDOW])
    core.turn(1e4, 1e4)
    core.writeback.awaited += 1
    assert core.urgency.pause_s == pytest.approx(PAUSE_SHARE * 0.04)
    core.writeback.awaited -= 1
    assert core.urgency.pause_s == LIMITS.pause_s


def test_a_tier_is_waited_for_while_it_is_not_known_how_quick_it_is() -> None:
    core = core_of()
    put(core, KEYS[: WINDOW + 1])
    assert core.turn(0.0, 0.0)
    assert core.urgency.pause_s == 0


@pytest.mark.parametrize(("open_s", "mover_s"), [(50.0, 0.5), (0.5, 1e9)], ids=["a pause", "no honest mover"])
def test_a_store_took_what_its_mover_says_but_no_longer_than_its_job_was_open(open_s: float, mover_s: float) -> None:
    core = core_of()
    for number in range(ENOUGH_SAMPLES):
        now = 100.0 * number
        put(core, KEYS[WINDOW * number : WINDOW * (number + 1)], f"request {number}")
        for job in core.turn(now, now):
            core.events.finished(0, job.id, [Outcome.OK] * len(job.moves), now + open_s, seconds=mover_s)
    assert core.tiers[0].members[0].throughput[Direction.STORE].bytes_per_s == pytest.approx(WINDOW * ROW / 0.5)


def test_a_full_window_is_no_work_for_a_turn() -> None:
    core = core_of()
    put(core, KEYS[: WINDOW + 1])
    jobs = core.turn(0.0, 0.0)
    assert core.tiers[0].to_store
    assert not core.urgency.can_start
    end(core, jobs, 1.0)
    assert core.urgency.can_start


def test_no_request_waits_for_a_pause_to_end() -> None:
    core = core_of()
    measured(core, seconds=1.0)
    put(core, KEYS[ROWS : ROWS + WINDOW])
    stores = core.turn(1e4, 1e4)
    assert core.urgency.pause_s > 0
    assert look_up_key(core, b"stored", "request", 0, 1e4) is Lookup.PENDING
    core.end_step()
    assert core.urgency.urgent
    assert core.urgency.pause_s == 0
    loads = core.turn(1e4, 1e4)
    core.finish("request")  # its row still comes, and another may ask for it
    assert core.urgency.urgent
    assert core.urgency.pause_s == 0
    end(core, loads, 1e4 + 0.1)
    assert not core.urgency.urgent
    assert core.urgency.pause_s > 0
    end(core, stores, 1e4 + 1)


def test_a_step_brings_no_turn_while_all_that_requests_wait_for_is_under_way() -> None:
    """Each turn takes the interpreter's lock from a step, and the end of a load brings one anyway."""
    core = core_of()
    assert look_up_key(core, b"stored", "request", 0, 1e4) is Lookup.PENDING
    core.end_step()
    assert core.urgency.wants_turn == (True, True)
    loads = core.turn(1e4, 1e4)
    assert look_up_key(core, b"stored", "request", 0, 1e4) is Lookup.PENDING
    core.end_step()
    assert core.urgency.wants_turn == (False, False)
    assert core.urgency.urgent
    end(core, loads, 1e4 + 0.1)
    assert look_up_key(core, b"stored", "request", 0, 1e4 + 0.1) is Lookup.HIT


def test_no_allocation_waits_for_a_pause_to_end() -> None:
    """Rows are free as soon as they are written, where the host has hardly any that are."""
    core = core_of(Write.ON_EVICT)
    for _ in range(ENOUGH_SAMPLES):
        core.tiers[0].members[0].throughput[Direction.STORE].record(ROW, 1.0)
    put(core, KEYS[: ROWS - RESERVE // 2])
    core.turn(0.0, 0.0)
    assert core.urgency.pause_s > 0
    put(core, KEYS[ROWS : ROWS + 1])
    assert core.tiers[0].jobs
    assert core.urgency.pause_s == 0


def test_an_allocation_that_leaves_hardly_any_room_ends_a_pause() -> None:
    core = core_of(Write.ON_EVICT)
    put(core, KEYS[: ROWS - RESERVE + 2])
    core.turn(0.0, 0.0)
    put(core, KEYS[ROWS : ROWS + 1])
    assert core.urgency.wants_turn == (True, False)
    put(core, KEYS[ROWS + 1 : ROWS + RESERVE // 2])
    assert core.urgency.wants_turn == (True, True)


def test_stores_that_may_have_ended_in_a_pause_end_it_when_allocations_leave_hardly_any_room() -> None:
    """Their window is full, so that no other can start; but theirs is the room that the next allocations need."""
    specs = [
        TierSpec("file", Write.ON_EVICT, physical_slots=True),
        TierSpec("s3", Write.OFF, physical_slots=False),
    ]
    core = TierManager(ROWS, ROW, specs, LIMITS)
    for tier in range(2):
        opened(core, tier, 4 * ROWS)
        core.events.listed(tier, [], last=True)
    put(core, KEYS[: ROWS - RESERVE // 2])
    core.turn(0.0, 0.0)
    assert (core.tiers[0].rows_storing, len(core.tiers[0].to_store), core.host.free) == (10, 0, 10)
    assert core.urgency.wants_turn == (False, False)
    put(core, KEYS[ROWS : ROWS + 1])
    assert not core.urgency.can_start
    assert core.urgency.wants_turn == (True, True)
