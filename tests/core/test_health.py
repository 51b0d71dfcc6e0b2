"""Health: how circuits close again after a mover was killed, what is set aside, and which reports count."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.base.policies import Write
from nixl_tiers.core.lookup import Lookup
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.probes import _row_to_store
from nixl_tiers.core.types import BreakerState, Direction, Job, Limits, TierSpec
from tests.support.core import look_up_key, opened, put


@pytest.mark.parametrize("rows", [[], [(0, b"a", 1)]], ids=["empty", "with a row"])
def test_circuit_of_a_tier_that_is_only_read_closes(rows: list[tuple[int, Key, int]]) -> None:
    """No store probes it; and a medium that held nothing yet has no row to probe with either."""
    core = TierManager(4, 4096, [TierSpec("s3", Write.OFF, physical_slots=False, asked=True)])
    opened(core, 0, 10, rows)
    core.events.killed(0, 0.0)
    core.events.lost(0, 0.0)
    opened(core, 0, 10, rows)
    assert core.tiers[0].circuit is BreakerState.OPEN
    for now in range(1, 5):
        for job in core.turn(now, now):
            assert rows
            core.events.finished(0, job.id, [Outcome.OK], now)
    assert core.tiers[0].circuit is BreakerState.CLOSED
    assert look_up_key(core, b"b", "request", None, 5.0) is Lookup.PENDING, (
        "another engine may have stored it meanwhile"
    )


KEYS = [b"key-%04d" % number for number in range(2000)]


def of_a_disk(slots: int) -> TierManager:
    core = TierManager(1, 4096, [TierSpec("file", Write.THROUGH, physical_slots=True)])
    opened(core, 0, slots, [])
    return core


def store(core: TierManager, key: Key, bad: Sequence[int], now: float) -> None:
    """Of a disk that cannot write these slots."""
    put(core, [key])
    for job in core.turn(now, now):
        outcomes = [Outcome.FAILED if move.slot in bad else Outcome.OK for move in job.moves]
        core.events.finished(0, job.id, outcomes, now)


def test_one_bad_block_costs_one_row_of_five_hundred() -> None:
    """Its slot would be the next to be handed out, until the circuit opens, and be what each probe of that writes."""
    core = of_a_disk(600)
    for number, key in enumerate(KEYS[:500]):
        store(core, key, [15], number / 100)
    tier = core.tiers[0]
    assert (tier.counters.stored, tier.counters.failed_stores) == (499, 1)
    assert tier.circuit is BreakerState.CLOSED
    assert len(tier.index.slots) == 499
    opened(core, 0, 600, [(slot, key, 1) for slot, key in enumerate(KEYS[:15])])
    store(core, b"after a listing", [], 6.0)
    store(core, b"later", [], core.limits.aside_s + 1.0)
    slots = [tier.index.rows.get(key)[0] for key in (b"after a listing", b"later")]  # type: ignore[index]
    assert slots == [16, 15]


def test_writes_that_fail_now_and_then_shrink_a_full_disk_by_one_in_a_hundred() -> None:
    """Its circuit stays closed, so none of these slots would be tried again before it is opened again."""
    core = of_a_disk(500)
    for number, key in enumerate(KEYS[:1500]):
        store(core, key, range(500) if number % 20 == 0 else [], number)
    tier = core.tiers[0]
    assert tier.circuit is BreakerState.CLOSED
    assert tier.counters.failed_stores == 75
    assert len(tier.index.slots) == 495


@pytest.mark.parametrize("hangs", list(Direction))
def test_what_a_killed_mover_moved_is_set_aside_and_not_tried_again_after_the_next_listing(hangs: Direction) -> None:
    """A slot that hangs whoever moves it would take a mover a minute."""
    core, now = of_a_disk(3), 0.0
    held = [(0, KEYS[0], 1)] if hangs is Direction.LOAD else []
    core.events.listed(0, held, last=False)
    if hangs is Direction.LOAD:
        assert look_up_key(core, KEYS[0], "first", None, now) is Lookup.PENDING
        core.end_step()
    else:
        put(core, [KEYS[1]])
    (job,) = core.turn(now, now)
    assert job.direction is hangs
    now = job.hard_deadline_s + 1.0
    assert core.health.overdue(now)
    core.events.killed(0, now)
    core.events.lost(0, now)
    opened(core, 0, 3, held)
    for number in range(2, 12):
        now += 5.0
        assert look_up_key(core, KEYS[0], f"request {number}", None, now) is Lookup.MISS
        put(core, [KEYS[number]])
        for each in core.turn(now, now):
            assert job.moves[0].slot not in [move.slot for move in each.moves]
            core.events.finished(0, each.id, [Outcome.OK] * len(each.moves), now)
    assert core.tiers[0].counters.stored, "the others are used"


def loading() -> tuple[TierManager, Job]:
    """A job that loads four rows for a request."""
    spec = TierSpec("file", Write.THROUGH, physical_slots=True)
    core = TierManager(16, 4096, [spec], Limits(load_share=1.0))
    opened(core, 0, 16, [(slot, key, 0) for slot, key in enumerate(KEYS[:4])])
    for position, key in enumerate(KEYS[:4]):
        look_up_key(core, key, "request", position, 0.0)
    core.end_step()
    (job,) = core.turn(0.0, 0.0)
    assert [move.key for move in job.moves] == KEYS[:4]
    return core, job


@pytest.mark.parametrize(
    ("places", "outcomes", "partial"),
    [
        ([0], [Outcome.OK], ()),  # reported before
        ([0, 1], [Outcome.OK], ()),  # one of them
        ([1, 1], [Outcome.OK] * 2, ()),
        ([1, 2, 3], [Outcome.OK] * 3, ()),  # all that are left: its end says that
        ([1, 2], [Outcome.OK], ()),
        ([1], [Outcome.OK], [(1, 1)]),
        ([99], [Outcome.OK], ()),  # not the job's
    ],
)
def test_a_report_that_does_not_fit_its_job_is_refused(
    places: list[int], outcomes: list[Outcome], partial: Sequence[tuple[int, int]]
) -> None:
    core, job = loading()
    rows = {place: move.row.index for place, move in enumerate(job.moves)}
    core.events.rows_ended(0, job.id, [rows[0]], [Outcome.OK], 0.0)
    with pytest.raises(ValueError, match=f"job {job.id}"):
        core.events.rows_ended(0, job.id, [rows.get(place, place) for place in places], outcomes, 0.0, partial=partial)
    assert [move.key for move in job.moves] == KEYS[1:4], "nothing has changed"
    assert core.tiers[0].rows_loading == 3
    with pytest.raises(ValueError, match=f"job {job.id}"):
        core.events.finished(0, job.id, [Outcome.OK] * 4, 0.0)  # with one that was reported


@pytest.mark.parametrize("first", [Outcome.OK, Outcome.FAILED])
def test_a_job_is_judged_by_all_of_its_rows(first: Outcome) -> None:
    """Three of four decide, in whichever order they were reported."""
    core, job = loading()
    breaker = core.movers[0].breakers[Direction.LOAD]
    recorded: list[bool] = []
    record = breaker.record
    breaker.record = lambda good, now: (recorded.append(good), record(good, now))[1]  # type: ignore[method-assign]
    core.events.rows_ended(0, job.id, [move.row.index for move in job.moves[:3]], [first] * 3, 0.0)
    core.events.finished(0, job.id, [Outcome.FAILED if first is Outcome.OK else Outcome.OK], 1.0)
    assert recorded == [first is Outcome.OK]


def test_a_probe_stores_a_row_that_is_sealed_if_there_is_one() -> None:
    """Other tiers cannot be written while a probe seals a row."""
    core = TierManager(4, 4096, [TierSpec("file", Write.THROUGH, physical_slots=True)])
    put(core, KEYS[:3])
    newest = _row_to_store(core.tiers[0], core.host)
    assert newest is not None
    assert newest.key == KEYS[2]
    core.host.index[KEYS[0]].sealed = True
    assert _row_to_store(core.tiers[0], core.host) is core.host.index[KEYS[0]]
