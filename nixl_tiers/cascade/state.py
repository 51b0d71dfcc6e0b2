"""What promotion, write-back, health and events share: the host tier, the tier indexes, windows, ticks and job ids."""

from __future__ import annotations

from collections.abc import Sequence

from nixl_tiers.cascade.garbage import Garbage
from nixl_tiers.cascade.host import HostTier
from nixl_tiers.cascade.limits import Limits
from nixl_tiers.cascade.requests import Request
from nixl_tiers.cascade.tier_index import TierIndex
from nixl_tiers.cascade.types import Direction, Job, PlannedMove
from nixl_tiers.policies import Write


class CascadeState:
    """The tiers of one cascade, in order, and what every flow between them needs.

    Windows are in rows, for each tier and direction: how many may be under way at once (back-pressure).
    """

    def __init__(
        self, host: HostTier, tiers: Sequence[TierIndex], limits: Limits, row_bytes: int, garbage: Garbage
    ) -> None:
        self.host = host
        self.tiers = list(tiers)
        self.limits = limits
        self.row_bytes = row_bytes
        self.garbage = garbage
        self.tick = 0  # logical clock of use: one tick a request
        self.last_job_id = 0
        self.unfinished = False  # whether the last turn left work that could be done at once
        self._slice_left = limits.rows_per_slice
        few = max(1, min(4, host.rows // 4))  # so that a small host tier still moves
        tier_count = max(1, len(self.tiers))
        self.load_window = max(few, int(host.rows * limits.load_share) // tier_count)
        self.store_window = max(few, int(host.rows * limits.store_share) // tier_count)
        # Rows that come up only to be written further down keep their host rows until they are written, however slow
        # that is. So they have a small window of their own.
        self.demote_window = max(1, min(self.store_window, self.load_window // 2))
        self.rows_per_job = max(1, min(limits.moves_per_job, limits.job_bytes // row_bytes))
        self.below_host: TierIndex | None = None  # the tier that is written when the host evicts
        self._below: dict[int, TierIndex] = {}
        self._above: dict[int, TierIndex | None] = {}
        above: TierIndex | None = None
        for tier in self.tiers:
            if tier.spec.write is Write.ON_EVICT:
                self._above[tier.number] = above
                if above is None:
                    self.below_host = tier
                else:
                    self._below[above.number] = tier
            if tier.spec.write is not Write.OFF:
                above = tier

    def begin_slice(self) -> None:
        """What follows holds the lock for as long as about `rows_per_slice` rows take; the next turn goes on."""
        self._slice_left = self.limits.rows_per_slice

    def take(self, rows: int = 1) -> bool:
        """Whether the slice has room for work on so many rows. Nothing follows in this slice once it has not."""
        if self._slice_left < min(rows, self.limits.rows_per_slice):
            self._slice_left = 0
            return False
        self._slice_left -= rows
        return True

    @property
    def slice_used_up(self) -> bool:
        return self._slice_left <= 0

    def below(self, tier: TierIndex) -> TierIndex | None:
        """The tier that is written when `tier` evicts, if there is one."""
        return self._below.get(tier.number)

    def above(self, tier: TierIndex) -> TierIndex | None:
        """The tier whose evictions are written to `tier`, which is written on eviction; None: the host."""
        return self._above[tier.number]

    def tick_of(self, request: Request) -> int:
        """The request's tick; it gets one at its first use of any row."""
        if request.tick is None:
            request.tick = self.tick
            self.tick += 1
        return request.tick

    def make_room(self, count: int) -> int:
        """Evict host rows until `count` are free, or all that are left are pinned; returns how many of `count` are.
        Victims that the tier below should have got, and has not, are counted as dropped there."""
        victims = self.host.make_room(count)
        below = self.below_host
        if below is not None:
            for key in victims:
                below.to_store.pop(key, None)
                below.counters.dropped += key not in below
        return min(count, self.host.free)

    def start_jobs(
        self, tier: TierIndex, direction: Direction, moves: list[PlannedMove], now: float, soon: int = 0
    ) -> list[Job]:
        """Jobs of at most rows_per_job rows each, with their deadlines; call after the tier counts `moves`. `soon`: how
        many more rows the next slices start, beside which these jobs run."""
        limits, throughput = self.limits, tier.throughput[direction]
        nbytes = self.row_bytes * (soon + (tier.rows_loading if direction is Direction.LOAD else tier.rows_storing))
        soft_s = throughput.timeout_s(nbytes, min(limits.soft_deadline_min_s, limits.wait_s), limits.wait_s)
        hard_s = throughput.timeout_s(4 * nbytes, limits.hard_deadline_min_s, limits.hard_deadline_max_s)
        jobs = []
        for start in range(0, len(moves), self.rows_per_job):
            self.last_job_id += 1
            part = moves[start : start + self.rows_per_job]
            jobs.append(Job(self.last_job_id, tier.number, direction, part, nbytes, now, now + soft_s, now + hard_s))
        tier.jobs.update((job.id, job) for job in jobs)
        tier.send_credits -= len(jobs)
        return jobs

    def start_trials(self, tier: TierIndex, direction: Direction, moves: list[PlannedMove], now: float) -> list[Job]:
        """The same for at most one row that is moved alone: a suspect, or a breaker's probe."""
        jobs = self.start_jobs(tier, direction, moves, now)
        for job in jobs:
            job.is_trial = True
            tier.trials_running += 1
        return jobs

    def job_ended(self, tier: TierIndex, job: Job) -> None:
        """The mover is done with this job, or is dead: it holds nothing back any more."""
        tier.trials_running -= job.is_trial
        if job.abandoned and job.direction is Direction.LOAD:
            tier.quarantined -= len(job.moves)
