"""Jobs: batches of row moves of one direction, which movers get; from their start to their end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from nixl_tiers.core.member import Member
from nixl_tiers.core.rows import LOADING
from nixl_tiers.core.state import CascadeState
from nixl_tiers.core.tier import Tier
from nixl_tiers.core.types import Burst, Direction, Job, PlannedMove

STORE_JOBS: Final = 4  # a job of stores takes so many times as long as one of loads
JOBS_A_WINDOW: Final = 4  # a job leaves room for so many in a window


class Jobs:
    """Those of all members; each has its own open ones (`Member.jobs`). Ids never start again."""

    def __init__(self, state: CascadeState) -> None:
        self._state = state
        self.last_id = 0

    def start(self, tier: Tier, direction: Direction, moves: list[PlannedMove], now: float, soon: int = 0) -> list[Job]:
        """Jobs of so many rows as are best for their direction, with their deadlines; call after the tier counts
        `moves`. `soon`: how many more rows the next slices start, beside which these jobs run."""
        if not moves:  # as at most turns: the estimates below sort their samples
            tier.ending_moves.clear()
            return []
        jobs: list[Job] = []
        for member, part in _by_member(tier, moves):
            jobs += self._start(tier, member, direction, part, now, soon // len(tier.members))
        for job in jobs:
            job.loaded_before = tier.loaded
        if direction is Direction.LOAD:
            self._join_burst(tier, jobs, now)
        for job in jobs:
            self._state.movers[job.mover].jobs[job.id] = job
        tier.ending_moves.clear()
        return jobs

    def _start(  # noqa: PLR0917
        self, tier: Tier, member: Member, direction: Direction, moves: list[PlannedMove], now: float, soon: int
    ) -> list[Job]:
        limits, throughput = self._state.limits, member.throughput[direction]
        nbytes = self._state.row_bytes * (soon + len(moves) + member.under_way(direction))
        soft_s = throughput.timeout_s(nbytes, min(limits.soft_deadline_min_s, limits.wait_s), limits.wait_s)
        hard_s = throughput.timeout_s(4 * nbytes, limits.hard_deadline_min_s, limits.hard_deadline_max_s)
        hard_s = max(hard_s, 2 * soft_s)  # a long `wait_s` is longer than the longest of these
        jobs = []
        most, number, mover = self._rows_a_job(tier, member, direction), tier.number, member.number
        for start in range(0, len(moves), most):
            self.last_id += 1
            part = moves[start : start + most]
            jobs.append(Job(self.last_id, number, mover, direction, part, nbytes, now, now + soft_s, now + hard_s))
        member.send_credits -= len(jobs)
        return jobs

    def _rows_a_job(self, tier: Tier, member: Member, direction: Direction) -> int:
        """As many as the member moves in `job_s`: a job costs the engine's process the same whatever its size."""
        limits, loads = self._state.limits, direction is Direction.LOAD
        job_s = limits.job_s if loads else STORE_JOBS * limits.job_s
        fast = int(member.throughput[direction].bytes_per_s * job_s) // self._state.row_bytes
        # Several jobs fill a window, whatever their size: else the tier idles between two of them.
        window = self._state.window(tier, direction) // (len(tier.members) * JOBS_A_WINDOW)
        return max(self._state.rows_per_job, min(fast, limits.moves_per_job, window))

    def _join_burst(self, tier: Tier, jobs: list[Job], now: float) -> None:
        burst = tier.burst
        if burst is None or burst.ended or now - burst.began_s > self._state.limits.burst_s:
            burst = tier.burst = Burst(now)
        for job in jobs:
            job.burst = burst
            burst.rows += len(job.moves)

    def leave_burst(self, job: Job) -> int:
        """A load was abandoned, or has ended: how many rows of its burst still run."""
        burst, job.burst = job.burst, None
        if burst is None:
            return 0
        burst.rows -= len(job.moves)
        burst.ended = True
        return burst.rows

    def of_ending_moves(self, tier: Tier, member: Member, now: float) -> list[Job]:
        """Jobs of the moves that an error left without one, for them to be ended."""
        jobs = []
        moves, tier.ending_moves = tier.ending_moves, []
        for move in moves:
            if tier.index.member_place_of_slot(move.slot) != member.place:
                tier.ending_moves.append(move)
                continue
            self.last_id += 1
            direction = Direction.LOAD if move.row.state is LOADING else Direction.STORE
            jobs.append(Job(self.last_id, tier.number, member.number, direction, [move], 0, now, now, now))
        return jobs

    def ended(self, tier: Tier, job: Job) -> None:
        """The mover is done with this job, or is dead: it holds nothing back any more."""
        self.leave_burst(job)
        if job.abandoned and job.direction is Direction.LOAD:
            self._state.movers[job.mover].quarantined -= len(job.moves)


def _by_member(tier: Tier, moves: list[PlannedMove]) -> Iterable[tuple[Member, list[PlannedMove]]]:
    """Each move belongs to the member that has its slot."""
    if len(tier.members) == 1:
        return ((tier.members[0], moves),)
    parts: dict[int, list[PlannedMove]] = {}
    for move in moves:
        parts.setdefault(tier.index.member_place_of_slot(move.slot), []).append(move)
    return [(tier.members[place], part) for place, part in parts.items()]
