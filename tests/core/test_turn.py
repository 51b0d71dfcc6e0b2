"""When a turn of the supervisor is due, and how long the ends of jobs may wait, so that one turn applies several."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.base.policies import Write
from nixl_tiers.core.lookup import Lookup
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.pricing import ENOUGH_SAMPLES
from nixl_tiers.core.turn import NO, NOW, SOON, Due
from nixl_tiers.core.types import Direction, Job, Limits, TierSpec
from tests.support import inside
from tests.support.core import look_up_key, opened, put

ROW = 1 << 20
ROWS = 400
WINDOW = RESERVE = 20  # a twentieth of them
LIMITS = Limits()
KEYS = [b"key-%d" % number for number in range(2 * ROWS)]


def core_of(write: Write = Write.THROUGH) -> TierManager:
    core = TierManager(ROWS, ROW, [TierSpec("file", write, physical_slots=True)], LIMITS)
    opened(core, 0, 4 * ROWS, [(3 * ROWS, b"stored", 0)])
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


def asks(core: TierManager) -> None:
    """A step of a request that waits for the tier."""
    assert look_up_key(core, b"stored", "request", 0, 0.0) is Lookup.PENDING
    core.end_step()


def loads(core: TierManager) -> None:
    asks(core)
    assert core.turn(0.0, 0.0)


def loads_a_window(core: TierManager) -> None:
    core.events.listed(0, [(slot, key, 0) for slot, key in enumerate(KEYS[:100])], last=True)
    for place, key in enumerate(KEYS[:100]):
        assert look_up_key(core, key, "request", place, 0.0) is Lookup.PENDING
    while core.turn(0.0, 0.0) or core.events.unfinished:
        pass
    assert core.tiers[0].to_load


def queues(core: TierManager) -> None:
    """A request waits for its turn, and a step has passed it over."""
    core.arrive("request")
    core.anticipate("request", [b"stored"], (1.0,))
    core.end_step()


def asks_for_unknown(core: TierManager) -> None:
    assert look_up_key(core, b"unknown", "request", 0, 0.0) is Lookup.PENDING
    core.end_step()


def waits_for_an_answer(core: TierManager) -> None:
    asks_for_unknown(core)
    assert core.events.plan_checks(0.0)


def resets(core: TierManager) -> None:
    put(core, KEYS[:WINDOW])
    core.reset(keep_tiers=True)
    core.garbage.drop(1 << 20)


def fills_the_window(core: TierManager) -> None:
    put(core, KEYS[: 2 * WINDOW])
    while core.turn(0.0, 0.0) or core.events.unfinished:
        pass


def kills(core: TierManager) -> None:
    fills_the_window(core)
    core.events.killed(0, 0.0)


def waits_for_the_end_of_a_mover(core: TierManager) -> None:
    kills(core)
    for _ in range(WINDOW):
        core.turn(0.0, 0.0)
    core.garbage.drop(1 << 20)


def reaps(core: TierManager) -> None:
    waits_for_the_end_of_a_mover(core)
    core.events.lost(0, 0.0)


def takes_nothing_more(core: TierManager) -> None:
    put(core, KEYS[:WINDOW])
    core.movers[0].send_credits = 0


def is_refused(core: TierManager) -> None:
    core.events.down(0, 0.0)
    core.tiers[0].to_store[b"key"] = 1
    core.garbage.drop(1 << 20)


def is_listed(core: TierManager) -> None:
    put(core, KEYS[:WINDOW])
    opened(core, 0, 4 * ROWS)
    core.garbage.drop(1 << 20)


def lacks_clean_rows(core: TierManager) -> None:
    core.prepare_store("request", KEYS[: ROWS - RESERVE // 2])


def lacks_room(core: TierManager) -> None:
    core.prepare_store("request", KEYS[: ROWS - RESERVE // 2 + 1])


def cannot_clean(core: TierManager) -> None:
    core.events.down(0, 0.0)
    lacks_room(core)
    core.garbage.drop(1 << 20)


SHARED = TierSpec("s3", Write.THROUGH, physical_slots=False, asked=True)
DEMOTED = TierSpec("file", Write.ON_EVICT, physical_slots=True)
WRITTEN = TierSpec("file", Write.THROUGH, physical_slots=True)


@pytest.mark.parametrize(
    ("happens", "due", "spec"),
    [
        (lambda _: None, NO, WRITTEN),
        (asks, NOW, WRITTEN),
        (loads, NO, WRITTEN),
        (loads_a_window, NO, WRITTEN),
        (queues, NOW, WRITTEN),
        (asks_for_unknown, NOW, SHARED),
        (waits_for_an_answer, NO, SHARED),
        (resets, NOW, WRITTEN),
        (kills, NOW, WRITTEN),
        (waits_for_the_end_of_a_mover, NO, WRITTEN),
        (reaps, NOW, WRITTEN),
        (lambda core: put(core, KEYS[:1]), SOON, WRITTEN),
        (fills_the_window, NO, WRITTEN),
        (takes_nothing_more, NO, WRITTEN),
        (is_refused, SOON, WRITTEN),
        (is_listed, NO, WRITTEN),
        (lacks_clean_rows, SOON, DEMOTED),
        (cannot_clean, NO, DEMOTED),
        (lacks_room, NOW, DEMOTED),
        (lambda core: core.tiers[0].to_demote.setdefault(b"key"), SOON, WRITTEN),
        (lambda core: core.movers[0].to_delete.append((0, b"key")), SOON, WRITTEN),
        (lambda core: inside.measurements(core).to_come.add(0), SOON, WRITTEN),
        (lambda core: core.garbage.add({b"key": 1}), SOON, WRITTEN),
    ],
)
def test_a_turn_is_due(happens: Callable[[TierManager], None], due: Due, spec: TierSpec) -> None:
    core = TierManager(ROWS, ROW, [spec], Limits(rows_per_slice=8))
    opened(core, 0, 4 * ROWS, [(3 * ROWS, b"stored", 0)])
    core.garbage.drop(1 << 20)
    happens(core)
    core.end_step()
    assert core.events.take_due() is due


@pytest.mark.parametrize(("open_s", "mover_s"), [(50.0, 0.5), (0.5, 1e9)], ids=["a pause", "no honest mover"])
def test_a_store_took_what_its_mover_says_but_no_longer_than_its_job_was_open(open_s: float, mover_s: float) -> None:
    core = core_of()
    for number in range(ENOUGH_SAMPLES):
        now = 100.0 * number
        put(core, KEYS[WINDOW * number : WINDOW * (number + 1)], f"request {number}")
        for job in core.turn(now, now):
            core.events.finished(0, job.id, [Outcome.OK] * len(job.moves), now + open_s, seconds=mover_s)
    assert core.tiers[0].members[0].throughput[Direction.STORE].bytes_per_s == pytest.approx(WINDOW * ROW / 0.5)


def test_no_request_waits_for_a_pause_to_end() -> None:
    core = core_of()
    measured(core, seconds=1.0)
    put(core, KEYS[ROWS : ROWS + WINDOW])
    stores = core.turn(1e4, 1e4)
    assert core.events.pause_s > 0
    assert look_up_key(core, b"stored", "request", 0, 1e4) is Lookup.PENDING
    core.end_step()
    assert core.events.pause_s == 0
    loads = core.turn(1e4, 1e4)
    core.finish("request")  # its row still comes, and another may ask for it
    assert core.events.pause_s == 0
    end(core, loads, 1e4 + 0.1)
    assert core.events.pause_s > 0
    end(core, stores, 1e4 + 1)
