"""How many rows a job has: of loads few, of stores to a fast tier more, never what a slow tier cannot end in time."""

from __future__ import annotations

import pytest

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.base.policies import Write
from nixl_tiers.core.limits import Limits
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.state import JOBS_A_WINDOW, STORE_JOBS
from nixl_tiers.core.types import Direction, TierSpec
from tests.support.core import opened, put

ROW = 2 << 20
LOAD_ROWS = Limits().job_bytes // ROW
ROWS = 20 * STORE_JOBS * LOAD_ROWS * JOBS_A_WINDOW  # its window has room for the largest jobs


def core_of(rows: int) -> TierManager:
    core = TierManager(rows, ROW, [TierSpec("file", Write.THROUGH, physical_slots=True)], Limits())
    opened(core, 0, rows)
    core.events.listed(0, [], last=True)
    return core


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def store_jobs(core: TierManager, first: int, bytes_per_s: float) -> list[int]:
    """The sizes of the jobs that store another 60 rows; each ends after what it would take at this speed."""
    put(core, [key_of(first + number) for number in range(60)], f"request {first}")
    sizes, now = [], float(first)
    while jobs := core.turn(now, now):
        for job in jobs:
            assert job.direction is Direction.STORE
            sizes.append(len(job.moves))
            core.events.finished(0, job.id, [Outcome.OK] * len(job.moves), now + job.nbytes / bytes_per_s)
    return sizes


def after_samples(rows: int, bytes_per_s: float) -> int:
    core = core_of(rows)
    for first in range(0, 1200, 60):
        sizes = store_jobs(core, first, bytes_per_s)
    return max(sizes)


def test_jobs_are_small_until_the_tier_is_known() -> None:
    assert max(store_jobs(core_of(ROWS), 0, 5e9)) == LOAD_ROWS


def test_jobs_of_stores_to_a_fast_tier_are_larger() -> None:
    assert after_samples(ROWS, 5e9) == STORE_JOBS * LOAD_ROWS


def test_jobs_of_stores_to_a_slow_tier_stay_small() -> None:
    assert after_samples(ROWS, LOAD_ROWS * ROW / Limits().pause_s) == LOAD_ROWS


def test_a_window_has_room_for_several_jobs() -> None:
    assert after_samples(ROWS // 4, 5e9) < STORE_JOBS * LOAD_ROWS


@pytest.mark.parametrize("wait_s", [1.0, 10.0, 300.0, 3600.0])
@pytest.mark.parametrize("seconds", [0.001, 1.0, 30.0, 75.0])
def test_a_job_is_given_up_before_its_mover_is_killed(wait_s: float, seconds: float) -> None:
    """Also with a `wait_s` that is longer than any hard deadline: a slow mover was killed before."""
    core = TierManager(ROWS, ROW, [TierSpec("file", Write.THROUGH, physical_slots=True)], Limits(wait_s=wait_s))
    opened(core, 0, ROWS)
    core.events.listed(0, [], last=True)
    for first in range(0, 300, 60):
        store_jobs(core, first, LOAD_ROWS * ROW / seconds)
    put(core, [key_of(number) for number in range(300, 360)], "last")
    jobs = core.turn(1e6, 1e6)
    assert jobs
    for job in jobs:
        assert 1e6 < job.soft_deadline_s < job.hard_deadline_s
