"""Health: deadlines of jobs, breakers of tiers, what is set aside, and when a mover must be killed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from nixl_tiers.base.chunk import Outcome
from nixl_tiers.core.jobs import Jobs
from nixl_tiers.core.member import Member
from nixl_tiers.core.promotion_jobs import PromotionJobs
from nixl_tiers.core.state import CascadeState
from nixl_tiers.core.tier import Tier
from nixl_tiers.core.types import Direction, Job, OrphanedJobs, PlannedMove
from nixl_tiers.core.writeback import WriteBack


class Health:
    """Keeps requests away from tiers and places that fail or hang, and finds out when they work again.

    A job has two deadlines. After the soft one it is abandoned: rows of loads are misses, the mover is left alone.
    After the hard one its mover must be killed, since nothing else ends its access to the host rows.
    """

    def __init__(self, state: CascadeState, jobs: Jobs, promotion_jobs: PromotionJobs, writeback: WriteBack) -> None:
        self._state = state
        self._jobs = jobs
        self._promotion_jobs = promotion_jobs
        self._writeback = writeback

    # --- deadlines ---------------------------------------------------------------------------------------------

    def watch(self, now: float) -> None:
        """Call at every turn: abandons late jobs, and drops what is queued for a tier that is down or whose circuit has
        opened, as much as the slice has room for."""
        self.abandon_late_jobs(now)
        for member in self._state.movers:
            for breaker in member.breakers.values():
                breaker.watch(now)
        for tier in self._state.tiers:
            tier.index.watch(now)
            if (tier.to_load or tier.to_demote) and not tier.readable:
                self._promotion_jobs.drop_loads(tier)
            if (tier.to_store or tier.waiting_for_seal) and tier.refuses_stores:
                self._writeback.drop_stores(tier)

    def abandon_late_jobs(self, now: float) -> None:
        """Jobs after their soft deadline: rows of loads are left alone, and quarantined (not allocated) until the mover
        is done with them, or dead. The mover is left alone, too."""
        for tier in self._state.tiers:
            for job in tier.jobs:
                if not job.abandoned and now > job.soft_deadline_s:
                    if not self._state.take(len(job.moves)):
                        return
                    if job.direction is Direction.LOAD:
                        tier.index.hold(job.moves, job.hard_deadline_s)
                    self._abandon(tier, job, now)

    def overdue(self, now: float) -> dict[int, str]:
        """Movers that must be killed, and why: a job after its hard deadline, or too many rows in quarantine."""
        killed: dict[int, str] = {}
        for member in self._state.movers:
            tier, jobs = self._state.tiers[member.tier], member.jobs.values()
            window = self._state.window(tier, Direction.LOAD) // len(tier.members)
            most = max(1, int(window * self._state.limits.quarantine_share))
            if any(job.hard_deadline_s < now for job in jobs):
                killed[member.number] = "a job is overdue"
            elif member.readable and member.quarantined > most:
                loads = [job for job in jobs if job.abandoned and job.direction is Direction.LOAD]
                if any(now > 2 * job.soft_deadline_s - job.started_s for job in loads):
                    killed[member.number] = "too many rows are stuck"
        return killed

    # --- what movers report ------------------------------------------------------------------------------------

    def job_ended(self, tier: Tier, job: Job, outcomes: Sequence[Outcome], now: float, took_s: float) -> None:
        """Learn from the end of a job: about the tier's speed, its circuit, and the places that were moved."""
        count = len(outcomes) + job.reported.total()
        moved = outcomes.count(Outcome.OK) + job.reported[Outcome.OK]
        failed = outcomes.count(Outcome.FAILED) + job.reported[Outcome.FAILED] if moved < count else 0
        beside = self._jobs.leave_burst(job)
        if moved:
            self._state.movers[job.mover].throughput[job.direction].record(job.nbytes, took_s)
            self._observe(tier, job, moved, now, took_s)
            if job.direction is Direction.LOAD:
                rows = tier.loaded - job.loaded_before + len(job.moves)
                if not beside:
                    tier.loads.record(rows * self._state.row_bytes, took_s, now)
        self._learn(tier, job, job.moves, outcomes, now)
        if job.abandoned:
            return  # it was a failure when it was abandoned
        # A full medium is not a failing one: it refuses at once, and works again when there is room.
        full = not moved and outcomes.count(Outcome.NO_SPACE) + job.reported[Outcome.NO_SPACE] == count
        if not full or job.probe_episode is not None:
            self._record(job, 2 * failed < count, now)

    def rows_ended(
        self, tier: Tier, job: Job, moves: Sequence[PlannedMove], outcomes: Sequence[Outcome], now: float
    ) -> None:
        """Rows of a job have ended, which goes on without them: they are not stuck."""
        job.reported.update(outcomes)
        if job.burst is not None:
            job.burst.rows -= len(moves)
            job.burst.ended = True
        self._learn(tier, job, moves, outcomes, now)
        if job.abandoned and job.direction is Direction.LOAD:
            self._state.movers[job.mover].quarantined -= len(moves)

    def mover_killed(self, member: Member, now: float) -> None:
        """Its mover was sent a kill: its circuits open, its jobs are abandoned and have no deadline any more."""
        for breaker in member.breakers.values():
            breaker.trip(now)
        self._bury(member, now, reaped=False)

    def mover_died(self, member: Member, now: float) -> None:
        """Its mover is dead: a failure for both of its circuits, and for its open probes."""
        for breaker in member.breakers.values():
            breaker.record(False, now)
        for job in member.jobs.values():
            if job.probe_episode is not None:
                member.breakers[job.direction].end_probe(job.probe_episode, False, now)
        for dead in member.dead:
            dead.reaped = True
        self._bury(member, now, reaped=True)

    def next_to_end(self, member: Member, now: float) -> Job | None:
        """Work off the member's dead jobs while the slice has room. Returns one that has ended, for the caller to end
        its moves; None if there is none, or no room."""
        tier = self._state.tiers[member.tier]
        while member.dead and not (dead := member.dead[0]).idle:
            if dead.to_abandon:
                if not self._state.take(len(dead.to_abandon[0].moves)):
                    return None
                if not (job := dead.to_abandon.popleft()).abandoned:
                    self._abandon(tier, job, now)
            elif not dead.to_end:
                member.dead.popleft()
            elif self._state.take(len(dead.to_end[0].moves)):
                return dead.to_end.popleft()
            else:
                return None
        return None

    # --- inside ------------------------------------------------------------------------------------------------

    def _learn(
        self, tier: Tier, job: Job, moves: Sequence[PlannedMove], outcomes: Sequence[Outcome], now: float
    ) -> None:
        load = job.direction is Direction.LOAD
        if tier.index.aside.known:
            well = {Outcome.OK, Outcome.CORRUPT, Outcome.MISSING} if load else {Outcome.OK}
            tier.index.moved(move for move, outcome in zip(moves, outcomes, strict=True) if outcome in well)
        if load and Outcome.FAILED in outcomes:
            failed = [move for move, outcome in zip(moves, outcomes, strict=True) if outcome is Outcome.FAILED]
            tier.index.set_aside(failed, self._state.limits.retry_s, now)

    def _bury(self, member: Member, now: float, *, reaped: bool) -> None:
        """Its open jobs are dead. What most likely made its mover hang is set aside: places of overdue jobs, or else of
        a probe, or else of abandoned jobs. If there are none, those of all of them, for a moment, as one may be what it
        died of."""
        tier, limits, jobs = self._state.tiers[member.tier], self._state.limits, [*member.jobs.values()]
        ending = self._jobs.of_ending_moves(tier, member, now)
        if not (jobs or ending):
            return
        member.jobs = {}
        guilty = (
            [job for job in jobs if job.hard_deadline_s < now]
            or [job for job in jobs if job.probe_episode is not None]
            or [job for job in jobs if job.abandoned]
        )
        for job in guilty or jobs:
            tier.index.set_aside(job.moves, limits.aside_s if guilty else limits.retry_s, now)
        dead = [*jobs, *ending]
        # Of a mover that is reaped nothing needs to be abandoned first: its jobs end at once, as FAILED.
        member.dead.append(OrphanedJobs(deque(() if reaped else dead), deque(dead), reaped))

    def _abandon(self, tier: Tier, job: Job, now: float) -> None:
        job.abandoned = True
        self._record(job, False, now)
        if job.direction is Direction.STORE:
            return  # its rows are hits as before, and pinned
        self._jobs.leave_burst(job)
        self._state.movers[job.mover].quarantined += len(job.moves)
        tier.counters.late += len(job.moves)
        for move in job.moves:
            if tier.index.has(move.key, move.id):
                tier.index.cancel_eviction(move.key, self._state.tick)
            self._promotion_jobs.give_up(tier, move.row)

    def _record(self, job: Job, good: bool, now: float) -> None:
        """Record it in the breaker."""
        member = self._state.movers[job.mover]
        breaker = member.breakers[job.direction]
        if job.probe_episode is not None:
            breaker.end_probe(job.probe_episode, good, now)
            if job.direction is Direction.STORE:
                index = self._state.tiers[member.tier].index
                if breaker.closed:  # it was the medium, and not these slots
                    index.write_again(member)
                elif not good:  # the next probe tries it, rather than evict a row for another one
                    index.write_again(member, 1)
        else:
            breaker.record(good, now)

    def _observe(self, tier: Tier, job: Job, moved: int, now: float, took_s: float) -> None:
        name, samples = tier.spec.name, self._state.samples
        samples.observe(name, f"{job.direction.value}_seconds", took_s)
        samples.observe(name, f"{job.direction.value}_bytes", moved * self._state.row_bytes)
        if job.direction is Direction.LOAD and (since_s := self._promotion_jobs.waited_since(job)) is not None:
            samples.observe(name, "promotion_seconds", now - since_s)
