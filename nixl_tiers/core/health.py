"""Health: deadlines of jobs, breakers of tiers, suspects and their trials, and when a mover must be killed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Final

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.base.policies import Write
from nixl_tiers.core.host import HostTier
from nixl_tiers.core.member import Member
from nixl_tiers.core.promotion_jobs import PromotionJobs
from nixl_tiers.core.rows import Row, RowState
from nixl_tiers.core.state import CascadeState
from nixl_tiers.core.tier import Tier
from nixl_tiers.core.tier_rows import Found
from nixl_tiers.core.types import Direction, Job, OrphanedJobs, PlannedMove, TierState
from nixl_tiers.core.writeback import WriteBack


class Health:
    """Keeps requests away from tiers and keys that fail or hang, and finds out when they work again.

    A job has two deadlines. After the soft one it is abandoned: its keys are misses, the mover is left alone. After the
    hard one its mover must be killed, since nothing else ends its access to the host rows.
    """

    def __init__(self, state: CascadeState, promotion_jobs: PromotionJobs, writeback: WriteBack) -> None:
        self._state = state
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
            if (tier.to_load or tier.to_demote) and not tier.readable:
                self._promotion_jobs.requeue(tier, now)
            if (tier.to_store or tier.waiting_for_seal) and tier.refuses_stores:
                self._writeback.drop_stores(tier)

    def abandon_late_jobs(self, now: float) -> None:
        """Jobs after their soft deadline: their keys are suspects, and rows of loads are quarantined (not allocated)
        until the mover is done with them, or dead. The mover is left alone."""
        for tier in self._state.tiers:
            for job in tier.jobs.values():
                if not job.abandoned and now > job.soft_deadline_s:
                    if not self._state.take(len(job.moves)):
                        return
                    if job.direction is Direction.LOAD:
                        tier.denylist.suspect((move.key for move in job.moves), now)
                    self._abandon(tier, job, now)

    def overdue(self, now: float) -> dict[int, str]:
        """Movers that must be killed, and why: a job after its hard deadline, or too many rows in quarantine."""
        killed: dict[int, str] = {}
        for tier in self._state.tiers:
            killed |= {job.mover: "a job is overdue" for job in tier.jobs.values() if job.hard_deadline_s < now}
        for member in self._state.movers:
            window = self._state.window(member.tier, Direction.LOAD) // len(member.tier.members)
            most = max(1, int(window * self._state.limits.quarantine_share))
            if member.readable and member.quarantined > most and member.number not in killed:
                loads = [job for job in _jobs_of(member) if job.abandoned and job.direction is Direction.LOAD]
                if any(now > 2 * job.soft_deadline_s - job.started_s for job in loads):
                    killed[member.number] = "too many rows are stuck"
        return killed

    # --- what movers report ------------------------------------------------------------------------------------

    def job_ended(self, tier: Tier, job: Job, outcomes: Sequence[Outcome], now: float, took_s: float) -> None:
        """Learn from the end of a job: about the tier's speed, its circuit, and the keys that were moved."""
        count = len(outcomes) + job.reported.total()
        moved = outcomes.count(Outcome.OK) + job.reported[Outcome.OK]
        failed = outcomes.count(Outcome.FAILED) + job.reported[Outcome.FAILED] if moved < count else 0
        beside = self._state.leave_burst(job)
        if moved:
            self._state.movers[job.mover].throughput[job.direction].record(job.nbytes, took_s)
            self._observe(tier, job, moved, now, took_s)
            if job.direction is Direction.LOAD:
                rows = tier.loaded - job.loaded_before + len(job.moves)
                if not beside:
                    tier.loads.record(rows * self._state.row_bytes, took_s, now)
        if job.abandoned:
            return  # it was a failure when it was abandoned
        self._learn_keys(tier, job, job.moves, outcomes, now)
        # A full medium is not a failing one: it refuses at once, and works again when there is room.
        full = not moved and outcomes.count(Outcome.NO_SPACE) + job.reported[Outcome.NO_SPACE] == count
        if not full or job.probe_episode is not None:
            self._record(job, 2 * failed < count, now)

    def rows_ended(
        self, tier: Tier, job: Job, moves: Sequence[PlannedMove], outcomes: Sequence[Outcome], now: float
    ) -> None:
        """Rows of a job have ended, which goes on without them: they are not stuck, and suspect of nothing."""
        job.reported.update(outcomes)
        if job.burst is not None:
            job.burst.rows -= len(moves)
            job.burst.ended = True
        if job.abandoned:
            if job.direction is Direction.LOAD:
                self._state.movers[job.mover].quarantined -= len(moves)
            return
        self._learn_keys(tier, job, moves, outcomes, now)

    def mover_killed(self, member: Member, now: float) -> None:
        """Its mover was sent a kill: its circuits open, its jobs are abandoned and have no deadline any more."""
        for breaker in member.breakers.values():
            breaker.trip(now)
        self._bury(member, now, reaped=False)

    def mover_died(self, member: Member, now: float) -> None:
        """Its mover is dead: a failure for both of its circuits, and for its open probes."""
        for breaker in member.breakers.values():
            breaker.record(False, now)
        for job in _jobs_of(member):
            if job.is_trial and job.probe_episode is not None:
                member.breakers[job.direction].end_probe(job.probe_episode, False, now)
        for dead in member.dead:
            dead.reaped = True
        self._bury(member, now, reaped=True)

    def next_to_end(self, member: Member, now: float) -> Job | None:
        """Work off the member's dead jobs while the slice has room. Returns one that has ended, for the caller to end
        its moves; None if there is none, or no room."""
        tier = member.tier
        while member.dead and not (dead := member.dead[0]).idle:
            if dead.to_suspect:
                if not self._state.take(len(dead.to_suspect[0].moves)):
                    return None
                suspect = dead.to_suspect.popleft()
                tier.denylist.suspect((move.key for move in suspect.moves), dead.since_s, dead.batch)
            elif dead.to_abandon:
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

    # --- trials ------------------------------------------------------------------------------------------------

    def plan_trials(self, tier: Tier, now: float) -> list[Job]:
        """A load of one suspect that was asked for, or a probe of a half-open circuit: no request waits for it."""
        jobs: list[Job] = []
        if tier.readable and not tier.trials_running:
            while tier.trials and not jobs:
                key, _ = tier.trials.popitem(last=False)
                found = tier.index.rows.get(key)
                member = tier.member_of(key)
                can = found is not None and _is_idle(Found(*found)) and member.readable and member.store_credits > 0
                if can and tier.denylist.trial_due(key, now):
                    jobs = self._start_trial_load(tier, key, now)
        for member in tier.members:
            if member.state is not TierState.DOWN and member.loads.wants_probe and member.store_credits > 0:
                jobs += self._plan_load_probe(member, now)
        return jobs

    def _plan_load_probe(self, member: Member, now: float) -> list[Job]:
        tier, loads = member.tier, member.loads
        suspects = (key for key in tier.trials if tier.member_of(key) is member and tier.denylist.trial_due(key, now))
        candidate = row_to_load(member, now) or next(suspects, None)
        if candidate is not None and tier.index.rows.is_stored(candidate):
            jobs = self._start_trial_load(tier, candidate, now)
            for job in jobs:
                job.probe_episode = loads.begin_probe()
            return jobs
        if not len(tier.index.slots_of(member)):  # no load can fail, and none was asked for while it was not readable
            loads.end_probe(loads.begin_probe(), True, now)
        return []

    def plan_store_probe(self, member: Member, now: float) -> list[Job]:
        """A store of one row, if the circuit is half-open and the host has any that the tier lacks."""
        tier, stores = member.tier, member.breakers[Direction.STORE]
        row = row_to_store(tier, self._state.host) if member.state is TierState.UP and stores.wants_probe else None
        if row is None:
            return []
        rooms = [int(each is member) for each in tier.members] if len(tier.members) > 1 else None
        moves = self._writeback.start_stores(tier, [(row, row.tick)], rooms)
        probes = self._state.start_trials(tier, Direction.STORE, moves, now)
        for job in probes:
            job.probe_episode = stores.begin_probe()
        return probes

    # --- inside ------------------------------------------------------------------------------------------------

    def _learn_keys(
        self, tier: Tier, job: Job, moves: Sequence[PlannedMove], outcomes: Sequence[Outcome], now: float
    ) -> None:
        if not tier.denylist.keys and Outcome.FAILED not in outcomes:
            return
        for move, outcome in zip(moves, outcomes, strict=True):
            if outcome is Outcome.OK:
                # Try the rest of its batch unasked: the request asks for one of them at a time.
                batch = tier.denylist.clear(move.key)
                tier.trials.update((key, None) for key in batch if tier.denylist.is_suspect(key))
            elif outcome is Outcome.FAILED and (job.direction is Direction.LOAD or tier.denylist.is_suspect(move.key)):
                tier.denylist.record_failure(move.key, now)

    def _bury(self, member: Member, now: float, *, reaped: bool) -> None:
        """Its open jobs are dead. The keys that most likely made its mover hang or die are suspects: those of
        overdue jobs, or else of a trial, or else of abandoned jobs, or else of all of them."""
        tier, jobs = member.tier, _jobs_of(member)
        ending = self._state.jobs_of_ending_moves(member, now)
        if not (jobs or ending):
            return
        for job in jobs:
            del tier.jobs[job.id]
        suspects = (
            deque(job for job in jobs if job.hard_deadline_s < now)
            or deque(job for job in jobs if job.is_trial)
            or deque(job for job in jobs if job.abandoned)
            or deque(jobs)
        )
        dead = [*jobs, *ending]
        # Of a mover that is reaped nothing needs to be abandoned first: its jobs end at once, as FAILED.
        member.dead.append(OrphanedJobs(suspects, deque(() if reaped else dead), deque(dead), now, reaped))

    def _abandon(self, tier: Tier, job: Job, now: float) -> None:
        job.abandoned = True
        self._record(job, False, now)
        if job.direction is Direction.STORE:
            return  # its rows are hits as before, and pinned
        self._state.leave_burst(job)
        self._state.movers[job.mover].quarantined += len(job.moves)
        tier.counters.late += len(job.moves)
        for move in job.moves:
            if tier.index.has(move.key, move.id):
                tier.index.cancel_eviction(move.key, self._state.tick)
            self._promotion_jobs.give_up(tier, move.row)

    def _record(self, job: Job, good: bool, now: float) -> None:
        """Record it in the breaker. The failure of a suspect that was tried alone says nothing about its tier."""
        member = self._state.movers[job.mover]
        breaker = member.breakers[job.direction]
        if job.probe_episode is not None:
            breaker.end_probe(job.probe_episode, good, now)
            if job.direction is Direction.STORE:
                slots = member.tier.index.slots_of(member)
                if breaker.closed:  # it was the medium, and not these slots
                    slots.restore()
                elif not good:  # the next probe tries it, rather than evict a row for another one
                    slots.restore(1)
        elif good or not job.is_trial:
            breaker.record(good, now)

    def _observe(self, tier: Tier, job: Job, moved: int, now: float, took_s: float) -> None:
        name, samples = tier.spec.name, self._state.samples
        samples.observe(name, f"{job.direction.value}_seconds", took_s)
        samples.observe(name, f"{job.direction.value}_bytes", moved * self._state.row_bytes)
        if job.direction is Direction.LOAD and (since_s := self._promotion_jobs.waited_since(job)) is not None:
            samples.observe(name, "promotion_seconds", now - since_s)

    def _start_trial_load(self, tier: Tier, key: Key, now: float) -> list[Job]:
        """A load into a scratch row, which no look-up finds; it may evict a row of a full host."""
        if not self._state.make_room(1):
            return []
        move = tier.start_load(self._state.host.allocate_scratch(key))
        return self._state.start_trials(tier, Direction.LOAD, [move], now)


MAX_SOUGHT: Final = 1024  # rows of a tier that are looked at; the first of them will do, as a rule
MAX_SAMPLED: Final = 64  # rows of the host


def row_to_load(member: Member, now: float) -> Key | None:
    """A stored row that is no suspect, nor has just failed, which would say nothing of its medium: the one asked for
    last while the circuit was not closed, or any other. Each call goes on from where the last one ended."""
    tier = member.tier
    is_denied, place_of = partial(tier.denylist.is_denied, now=now), tier.index.place_of_slot
    last = tier.last_refused
    if last is not None and tier.index.place_of(last) == member.place and not is_denied(last):
        return last
    tier.looked_at, keys = tier.index.rows.some(tier.looked_at, min(MAX_SOUGHT, len(tier.index)))
    rows = ((key, tier.index.rows.get(key)) for key in keys if not is_denied(key))
    found = ((key, Found(*row)) for key, row in rows if row is not None and place_of(row[0]) == member.place)
    return next((key for key, row in found if row.stored and not row.evicting), None)


def _jobs_of(member: Member) -> list[Job]:
    """Of its mover, the open ones."""
    return [job for job in member.tier.jobs.values() if job.mover == member.number]


def _is_idle(row: Found) -> bool:
    return row.stored and not row.pins


def row_to_store(tier: Tier, host: HostTier) -> Row | None:
    """One of the host's newest rows that `tier` lacks: if possible one that is sealed, as other tiers cannot be written
    while a probe seals it."""
    if tier.spec.write is Write.OFF:
        return None
    found: Row | None = None
    for key, row in islice(reversed(host.index.items()), MAX_SAMPLED):
        ready = row.state is RowState.READY and not row.sealing and not row.host_only
        if ready and (row.sealed or found is None) and key not in tier.index and not tier.denylist.is_suspect(key):
            if row.sealed:
                return row
            found = row
    return found
