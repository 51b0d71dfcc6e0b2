"""An error in the middle of the supervisor's work: its movers are killed, and what it had begun ends with them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.base.policies import Write
from nixl_tiers.core.lookup import Lookup
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.rows import RowState
from nixl_tiers.core.types import Job, Limits, TierSpec
from tests.support import inside
from tests.support.core import look_up_key, opened, put, rows_of

ROWS, LISTED = 16, 6
PLANNERS = tuple(
    f"core/{name}.py"
    for name in ("turn", "health", "jobs", "probes", "promotion", "promotion_jobs", "writeback", "state")
)


class UnexpectedError(Exception):
    pass


def fails_at_call(number: int, call: Callable[[], object]) -> bool:
    """Make the call, in which the nth call of a planner's code raises; whether there was such a one."""
    left = number

    def trace(frame: FrameType, event: str, _: Any) -> None:
        nonlocal left
        caller = frame.f_back
        planned = caller is not None and caller.f_code.co_filename.endswith(PLANNERS)
        if event == "call" and planned and frame.f_code.co_name != "<genexpr>":  # which ignores it while it is closed
            left -= 1
            if left == 0:
                raise UnexpectedError

    sys.settrace(trace)
    try:
        call()
    except UnexpectedError:
        pass
    finally:
        sys.settrace(None)
    return left <= 0


def opens(core: TierManager) -> None:
    for tier, slots in enumerate((10, 100)):
        opened(core, tier, slots, [(slot, b"listed-%d" % slot, 0) for slot in range(LISTED)])


def busy_core(write: Write) -> TierManager:
    """It has rows to store into both tiers, and a request that waits for rows of the first."""
    specs = [TierSpec("file", write, physical_slots=True), TierSpec("s3", Write.THROUGH, physical_slots=False)]
    core = TierManager(ROWS, 4096, specs, Limits(load_share=0.5, store_share=0.5, moves_per_job=3))
    opens(core)
    put(core, [b"row-%d" % number for number in range(ROWS - 2)])
    for position in range(LISTED):
        assert look_up_key(core, b"listed-%d" % position, "waits", position, 0.0) is not Lookup.MISS
    core.end_step()
    return core


def finish(core: TierManager, jobs: list[Job], now: float) -> None:
    for job in jobs:
        core.events.finished(job.tier, job.id, [Outcome.OK] * len(job.moves), now)


def turns(core: TierManager, now: float) -> None:
    for _ in range(30):
        finish(core, core.turn(now, now), now)


def kill_and_reap(core: TierManager) -> None:
    for report in (core.events.killed, core.events.lost):
        for tier in core.tiers:
            report(tier.number, 1.0)
        turns(core, 1.0)


@pytest.mark.parametrize("write", [Write.THROUGH, Write.ON_EVICT])
@pytest.mark.parametrize("what", ["turn", "finished"])
def test_error_at_any_call_leaves_nothing_pinned_after_the_movers_death(what: str, write: Write) -> None:
    number, later = 0, 2000.0  # when no circuit is open any more
    while True:
        number += 1
        core = busy_core(write)
        call = partial(core.turn, 0.0, 0.0) if what == "turn" else partial(finish, core, core.turn(0.0, 0.0), 0.5)
        if not fails_at_call(number, call):
            break
        kill_and_reap(core)
        for tier in core.tiers:
            assert not any((tier.rows_loading, tier.rows_storing, tier.quarantined, tier.ending_moves))
            assert not any(row.pins for row in rows_of(tier).values())
        assert not any(row.referenced or row.sealing for row in core.host.index.values())
        assert core.host.used == len(core.host.index) == len({row.index for row in core.host.index.values()})
        # The tiers come up again, and serve all requests.
        opens(core)
        turns(core, later)
        for position in range(LISTED):
            look_up_key(core, b"listed-%d" % position, "again", position, later)
        core.end_step()
        turns(core, later)
        for key in [b"listed-%d" % position for position in range(LISTED)]:
            assert look_up_key(core, key, "again", None, later) is Lookup.HIT
        core.finish("waits")
        core.finish("again")
        core.end_step()
        new = [b"new-%d" % place for place in range(ROWS)]
        put(core, new)
        assert core.host.index.keys() == {*new}
        turns(core, later)
        assert all(row.state is RowState.READY for row in core.host.index.values())
        assert not inside.pinned(core)
        assert core.writeback.backlog() == 0
    assert number > 60
