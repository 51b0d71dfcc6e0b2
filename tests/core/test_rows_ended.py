"""Rows of a job that are reported while it runs: they end as if it had ended, and what it leaves behind is the rest."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.base.policies import Write
from nixl_tiers.core.lookup import Lookup
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.types import Direction, Job, Limits, TierSpec
from tests.support.core import look_up_key, opened

OK, FAILED, CORRUPT = Outcome.OK, Outcome.FAILED, Outcome.CORRUPT
KEYS = [b"%d" % number for number in range(4)]
LIMITS = Limits(load_share=1.0, store_share=1.0)


class Engine:
    """One tier of 16 slots below 16 host rows, which holds KEYS."""

    def __init__(self) -> None:
        self.core = TierManager(16, 1000, [TierSpec("file", Write.THROUGH, physical_slots=True)], LIMITS)
        self.tier = self.core.tiers[0]
        self.member = self.tier.members[0]
        self.now = 0.0
        self.open()

    def open(self) -> None:
        opened(self.core, 0, 16)
        self.core.events.listed(0, [(slot, key, 0) for slot, key in enumerate(KEYS)], last=True)

    def turn(self) -> list[Job]:
        return self.core.turn(self.now, self.now)

    def load(self, request: str = "request") -> Job:
        """The job that loads KEYS for a request."""
        for position, key in enumerate(KEYS):
            look_up_key(self.core, key, request, position, self.now)
        self.core.end_step()
        (job,) = self.turn()
        assert [move.key for move in job.moves] == KEYS
        assert job.direction is Direction.LOAD
        return job

    def rows_end(self, job: Job, places: Sequence[int], outcome: Outcome = OK) -> None:
        rows = [job.moves[place].row.index for place in places]
        self.core.events.rows_ended(0, job.id, rows, [outcome] * len(rows), self.now)

    def looks_up(self, key: bytes, request: str = "other") -> Lookup:
        return look_up_key(self.core, key, request, None, self.now)


def test_a_loaded_row_is_a_hit_before_its_job_has_ended() -> None:
    engine = Engine()
    job = engine.load()
    engine.rows_end(job, [1, 0])
    assert [engine.looks_up(key) for key in KEYS] == [Lookup.HIT, Lookup.HIT, Lookup.PENDING, Lookup.PENDING]
    assert [move.key for move in job.moves] == KEYS[2:]
    assert engine.tier.rows_loading == engine.member.under_way(Direction.LOAD) == 2
    engine.core.events.finished(0, job.id, [OK, OK], 1.0)
    assert [engine.looks_up(key) for key in KEYS] == [Lookup.HIT] * 4
    assert (engine.tier.rows_loading, engine.tier.loaded) == (0, 4)


@pytest.mark.parametrize(
    ("places", "outcomes", "partial"),
    [
        ([0], [OK], ()),  # reported before
        ([0, 1], [OK], ()),  # one of them
        ([1, 1], [OK, OK], ()),
        ([1, 2, 3], [OK, OK, OK], ()),  # all that are left: its end says that
        ([1, 2], [OK], ()),
        ([1], [OK], [(1, 1)]),
        ([99], [OK], ()),  # not the job's
    ],
)
def test_a_report_that_does_not_fit_its_job_is_refused(
    places: list[int], outcomes: list[Outcome], partial: Sequence[tuple[int, int]]
) -> None:
    engine = Engine()
    job = engine.load()
    rows = {place: move.row.index for place, move in enumerate(job.moves)}
    engine.rows_end(job, [0])
    with pytest.raises(ValueError, match=f"job {job.id}"):
        engine.core.events.rows_ended(
            0, job.id, [rows.get(place, place) for place in places], outcomes, 0.0, partial=partial
        )
    assert [move.key for move in job.moves] == KEYS[1:], "nothing has changed"
    assert engine.tier.rows_loading == 3
    with pytest.raises(ValueError, match=f"job {job.id}"):
        engine.core.events.finished(0, job.id, [OK] * 4, 0.0)  # with one that was reported


@pytest.mark.parametrize("first", [OK, FAILED])
def test_a_job_is_judged_by_all_of_its_rows(first: Outcome) -> None:
    """Three of four decide, in whichever order they were reported."""
    engine = Engine()
    breaker = engine.member.breakers[Direction.LOAD]
    recorded: list[bool] = []
    record = breaker.record
    breaker.record = lambda good, now: (recorded.append(good), record(good, now))[1]  # type: ignore[method-assign]
    job = engine.load()
    engine.rows_end(job, [0, 1, 2], first)
    engine.core.events.finished(0, job.id, [FAILED if first is OK else OK], 1.0)
    assert recorded == [first is OK]
