"""How many rows a job has: what the tier moves in `job_s`, and never what a slow tier cannot end in time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.base.policies import Write
from nixl_tiers.core.chain_rows import Chain, Group
from nixl_tiers.core.jobs import JOBS_A_WINDOW, STORE_JOBS
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.types import Direction, Job, Limits, TierSpec
from tests.support.core import look_up_key, opened, put

ROW = 2 << 20
LIMITS = Limits()
FEW = LIMITS.job_bytes // ROW
MOST = LIMITS.moves_per_job
ROWS = 20 * MOST * JOBS_A_WINDOW  # its windows have room for the largest jobs


def core_of(rows: int) -> TierManager:
    core = TierManager(rows, ROW, [TierSpec("file", Write.THROUGH, physical_slots=True)], Limits())
    opened(core, 0, ROWS, [])
    return core


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def store_jobs(core: TierManager, first: int, bytes_per_s: float) -> list[int]:
    """The sizes of the jobs that store another 60 rows; each ends after what it would take at this speed."""
    put(core, [key_of(first + number) for number in range(60)], f"request {first}")
    sizes, now = [], float(first)
    while jobs := core.turn(now, now):
        assert {job.direction for job in jobs} == {Direction.STORE}
        sizes += end(core, jobs, now, bytes_per_s)
    return sizes


def end(core: TierManager, jobs: Sequence[Job], now: float, bytes_per_s: float) -> list[int]:
    for job in jobs:
        core.events.finished(0, job.id, [Outcome.OK] * len(job.moves), now + job.nbytes / bytes_per_s)
    return [len(job.moves) for job in jobs]


def stored(rows: int, bytes_per_s: float) -> int:
    """How many rows jobs of stores have that know the tier's speed."""
    core = core_of(rows)
    for first in range(0, 1200, 60):
        sizes = store_jobs(core, first, bytes_per_s)
    return max(sizes)


def loaded(rows: int, bytes_per_s: float) -> int:
    """The same of loads."""
    core = core_of(rows)
    core.events.listed(0, [(slot, key_of(slot), 0) for slot in range(1200)], last=True)
    now, keys = 0.0, iter(range(1200))
    for request in range(20):
        for position in range(60):
            look_up_key(core, key_of(next(keys)), f"request {request}", position, now)
        core.end_step()
        sizes: list[int] = []
        while jobs := core.turn(now, now):
            sizes += end(core, jobs, now, bytes_per_s)
        core.finish(f"request {request}")
        now += 1.0
    return max(sizes)


@pytest.mark.parametrize(("job", "times"), [(stored, STORE_JOBS), (loaded, 1)])
def test_a_job_is_what_the_tier_moves_in_its_time(job: Callable[[int, float], int], times: int) -> None:
    speed = 40 * ROW / (times * LIMITS.job_s)
    assert FEW < job(ROWS, 1.01 * speed) == 40 < MOST


@pytest.mark.parametrize("job", [stored, loaded])
def test_jobs_have_a_least_and_a_largest_size(job: Callable[[int, float], int]) -> None:
    assert job(ROWS, 1e6) == FEW
    assert job(ROWS, 1e12) == min(MOST, 60)


@pytest.mark.parametrize("job", [stored, loaded])
def test_a_window_has_room_for_several_jobs(job: Callable[[int, float], int]) -> None:
    share = LIMITS.store_share if job is stored else LIMITS.load_share
    rows = int(20 * JOBS_A_WINDOW / share)
    assert job(rows, 1e12) == 20


@pytest.mark.parametrize("wait_s", [1.0, 10.0, 300.0, 3600.0])
@pytest.mark.parametrize("seconds", [0.001, 1.0, 30.0, 75.0])
def test_a_job_is_given_up_before_its_mover_is_killed(wait_s: float, seconds: float) -> None:
    """Also with a `wait_s` that is longer than any hard deadline: a slow mover was killed before."""
    core = TierManager(ROWS, ROW, [TierSpec("file", Write.THROUGH, physical_slots=True)], Limits(wait_s=wait_s))
    opened(core, 0, ROWS, [])
    for first in range(0, 300, 60):
        store_jobs(core, first, FEW * ROW / seconds)
    put(core, [key_of(number) for number in range(300, 360)], "last")
    jobs = core.turn(1e6, 1e6)
    assert jobs
    for job in jobs:
        assert 1e6 < job.soft_deadline_s < job.hard_deadline_s


def test_no_more_rows_are_under_way_than_the_death_of_a_mover_may_touch() -> None:
    """A tenth of a large host was millions of small rows, all of them to be ended when the mover died."""
    rows = 20_000
    core = TierManager(rows, 4096, [TierSpec("file", Write.THROUGH, physical_slots=True)])
    opened(core, 0, rows)
    keys = [b"key-%d" % number for number in range(5_000)]
    core.events.listed(0, [(slot, key, 0) for slot, key in enumerate(keys)], last=True)
    assert core.look_up("request", Chain([Group(keys, 64)]), 0, 0.0).waits
    for _ in range(100):
        core.turn(0.0, 0.0)
    assert core.tiers[0].rows_loading == core.limits.loads_under_way
    core = TierManager(rows, 4096, [TierSpec("file", Write.THROUGH, physical_slots=True)])
    opened(core, 0, rows, [])
    put(core, keys)
    for _ in range(100):
        core.turn(0.0, 0.0)
    assert core.tiers[0].rows_storing == core.limits.stores_under_way
