"""The jobs that a mover runs: begun with its tier, and reported when they, or some of their rows, have ended."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.seal import missing_of
from nixl_tiers.mover.protocol import Finished, Load, RowsEnded, Store
from nixl_tiers.tiers.base import FinishedBatch, StorageTier

REPORT_S: Final = 0.02
"""So long after a row of a job has ended that is reported, though others go on: each report costs the engine's process
as much as one of a whole job, so a job that ends in its time has one."""


class _Job:
    """`open`: the places of its moves that were not reported. `ended`: outcomes of some of these, to be reported at
    `report_at_s`. `missing`: of the loaded rows that lack sub-blocks, by place, how many."""

    def __init__(self, message: Store | Load, now: float) -> None:
        self.message = message
        self.began_s = now
        self.open = dict.fromkeys(range(len(message.moves)))
        self.ended: dict[int, Outcome] = {}
        self.missing: dict[int, int] = {}
        self.report_at_s = math.inf


class RunningJobs:
    """Belongs to the mover's loop."""

    def __init__(self, tier: StorageTier, region: HostRegion, send: Callable[[RowsEnded | Finished], None]) -> None:
        self._tier = tier
        self._region = region
        self._send = send
        self._jobs: dict[int, _Job] = {}  # by batch_id
        self.report_at_s = math.inf
        """When `report` has something to do next."""

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def storing(self) -> bool:
        """Whether a job of stores runs."""
        return any(isinstance(job.message, Store) for job in self._jobs.values())

    def begin(self, message: Store | Load, now: float) -> None:
        """Raises ValueError for rows that are not in the region."""
        if any(move.row >= self._region.rows for move in message.moves):
            raise ValueError("a job with rows outside the region")
        begin = self._tier.store if isinstance(message, Store) else self._tier.load
        self._jobs[begin(message.moves)] = _Job(message, now)

    def report(self, finished: Sequence[FinishedBatch], now: float) -> None:
        """Report these, and rows of others that have ended a while ago."""
        for done in finished:
            job = self._jobs.pop(done.batch_id)
            outcomes = {place: done.outcomes[place] for place in job.open}
            self._arrived(job, {place: outcome for place, outcome in outcomes.items() if place not in job.ended})
            codes = bytes(outcomes.values())
            self._send(Finished(job.message.job, codes, now - job.began_s, _partial(job, outcomes)))
        for ended in self._tier.ended_moves():
            if (running := self._jobs.get(ended.batch_id)) is not None:
                self._arrived(running, ended.outcomes)
                running.ended.update(ended.outcomes)
                running.report_at_s = min(running.report_at_s, now + REPORT_S)
                self.report_at_s = min(self.report_at_s, running.report_at_s)
        if now >= self.report_at_s:
            for running in self._jobs.values():
                if running.report_at_s <= now:
                    self._report_rows(running)
            self.report_at_s = min((job.report_at_s for job in self._jobs.values()), default=math.inf)

    def _report_rows(self, job: _Job) -> None:
        outcomes, job.ended, job.report_at_s = job.ended, {}, math.inf
        moves = job.message.moves
        rows = [moves[place].row for place in outcomes]
        self._send(RowsEnded(job.message.job, rows, bytes(outcomes.values()), _partial(job, outcomes)))
        for place in outcomes:
            del job.open[place]

    def _arrived(self, job: _Job, outcomes: Mapping[int, Outcome]) -> None:
        """These moves have ended. Of a load, note the rows that lack sub-blocks, by their seals: before they are
        reported, since the core may then give their numbers to other keys."""
        region, moves = self._region, job.message.moves
        if isinstance(job.message, Store) or region.geometry.sub_blocks == 1:
            return
        for place, outcome in outcomes.items():
            if outcome is Outcome.OK and (missing := missing_of(region.rows_view[moves[place].row], region.geometry)):
                job.missing[place] = missing


def _partial(job: _Job, places: Iterable[int]) -> list[tuple[int, int]]:
    """Of these moves the loaded rows that lack sub-blocks: (position, number of missing ones)."""
    return [(position, job.missing[place]) for position, place in enumerate(places) if place in job.missing]
