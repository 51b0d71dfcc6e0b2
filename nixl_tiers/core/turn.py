"""Turns: what movers report of their tiers and jobs, the jobs and existence checks that they get, and when."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import Enum
from typing import Final

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.core.existence import ExistenceCheck, ExistenceChecks
from nixl_tiers.core.health import Health
from nixl_tiers.core.jobs import Jobs
from nixl_tiers.core.listing import Steps, add_columns, begin_listing, end_listing, take_all
from nixl_tiers.core.member import Member
from nixl_tiers.core.probes import Measurements, Probes
from nixl_tiers.core.promotion import Promotion
from nixl_tiers.core.promotion_jobs import PromotionJobs
from nixl_tiers.core.retention import Retention
from nixl_tiers.core.rows import MOST_TICK
from nixl_tiers.core.state import CascadeState
from nixl_tiers.core.tier import Tier
from nixl_tiers.core.types import Columns, Direction, Job, PlannedMove, TierState
from nixl_tiers.core.writeback import WriteBack

_LISTING: Final = TierState.LISTING  # members of an enum are found by a slow attribute look-up before Python 3.12
PAUSE_SHARE: Final = 0.5  # of the time that a tier needs for what it is moving


class Due(Enum):
    """Whether a turn would do anything. What is under way needs none: its end brings one, and so does the time."""

    NO = "no"
    SOON = "soon"  # nobody waits for it: write-back, deletions, measurements
    NOW = "now"  # a request may wait for it, or the next allocation


NO, SOON, NOW = Due


class Events:
    """The movers' side of the core: what they report, and (`turn`) every job that they get. `mover`: its number among
    those of all tiers, from 0; `now`: in seconds."""

    def __init__(
        self,
        state: CascadeState,
        checks: ExistenceChecks,
        promotion: Promotion,
        promotion_jobs: PromotionJobs,
        writeback: WriteBack,
        *,
        jobs: Jobs,
        measurements: Measurements,
        probes: Probes,
        retention: Retention,
        health: Health,
    ) -> None:
        self._state = state
        self._jobs = jobs
        self._checks = checks
        self._promotion = promotion
        self._promotion_jobs = promotion_jobs
        self._writeback = writeback
        self._measurements = measurements
        self._probes = probes
        self._retention = retention
        self._health = health
        self._plan_put_off = False

    # --- tiers -------------------------------------------------------------------------------------------------

    def opened(self, mover: int, slots: int) -> Steps:
        """A mover serves its medium (again), with room for `slots` rows, perhaps fewer than before; the rows that it
        holds are listed next. None of these is a hit, and nothing is planned for it, before the last step."""
        return begin_listing(*self._of(mover), slots)

    def resized(self, mover: int, slots: int) -> None:
        """There is room for more or fewer rows, while it is open. Rows beyond it are listed as removed."""
        tier, member = self._of(mover)
        tier.index.set_limit(member, slots)

    def listed(self, mover: int, entries: Iterable[tuple[int, Key, int]], last: bool) -> None:
        """Rows that the medium holds: (slot, key, tick), or removed ones: a negative slot. They are verified when they
        are loaded. `last`: the listing is complete."""
        listed, member = self._of(mover)
        first, end = member.slot_range
        for slot, key, tick in entries:
            used = min(tick, MOST_TICK)
            if slot >= 0:
                if slot + first < end:  # else a defect's: it is no slot of this member
                    listed.index.add_listed(slot + first, key, used)
            elif listed.index.member_place_of(key) == member.place:  # another member's row of the same key stays
                listed.index.add_listed(slot, key, used)
            if not listed.spec.asked:
                listed.index.newest_listed = max(listed.index.newest_listed, used)
        self._go_on_from(listed)
        if last:
            take_all(self.listing_ends(mover))
            if member.state is TierState.LISTING:
                member.state = TierState.UP
                if self._state.announced is not None:
                    self._state.announced.listed()

    def columns_listed(self, mover: int, columns: Columns) -> Steps:
        """The same for many rows; the core owns `columns` from now on. No other event of this mover may come before the
        last step."""
        tier, member = self._of(mover)
        return self._going_on(tier, add_columns(tier, member, columns))

    def listing_ends(self, mover: int) -> Steps:
        """To be done before the last `listed`, if that is not to take long: rows of before the medium was opened again
        that were not listed are gone."""
        return end_listing(*self._of(mover))

    def gone_before(self, mover: int, tick: int) -> None:
        """Of an asked tier: rows that were written before are not there any more. They are forgotten in slices."""
        self._of(mover)[0].index.gone_before = min(tick, MOST_TICK)

    def existence_checked(self, mover: int, check: int, absent: Collection[Key], now: float) -> None:
        """An existence check was answered: what it found was listed before this, `absent` is not there."""
        self._checks.answered(self._state.movers[mover].tier, check, absent, now)

    def down(self, mover: int, now: float) -> None:
        """The medium does not answer. Its rows are misses until it is opened again. Of several members the others go
        on: what is queued to be loaded from this one is dropped as its turn comes."""
        lost, member = self._of(mover)
        self._state.begin_slice()
        member.shut()
        self._checks.lost(lost.number)
        if lost.refuses_stores:
            self._writeback.drop_stores(lost)
        if not lost.readable:
            self._promotion_jobs.drop_loads(lost)

    # --- movers ------------------------------------------------------------------------------------------------

    def killed(self, mover: int, now: float) -> None:
        """The mover was sent a kill. It may still write to its rows: these stay in quarantine until `lost`. Both
        circuits open: loads resume after two good probes."""
        tier, killed = self._of(mover)
        tier.counters.kills += 1
        self.down(mover, now)
        self._health.mover_killed(killed, now)
        self._work(now)

    def lost(self, mover: int, now: float) -> None:
        """The mover is dead and reaped: nothing writes to its rows any more. All its jobs have failed. For each
        circuit that is one failure: unless it was killed, its rows are hits as soon as the next mover has opened."""
        tier, lost = self._of(mover)
        tier.counters.deaths += 1
        self.down(mover, now)
        self._health.mover_died(lost, now)
        self._work(now)

    def work(self, now: float) -> None:
        """One slice of the work that concerns many rows or requests; what is left is done at the next turns."""
        self._state.begin_slice()
        self._work(now)

    # --- jobs --------------------------------------------------------------------------------------------------

    @property
    def unfinished(self) -> bool:
        """Whether the last turn (`TierManager.turn`) left work that can be done at once."""
        return self._state.unfinished

    def expire(self, now: float) -> None:
        """Apply the deadlines of jobs, and do a slice of what is left to do."""
        self._state.begin_slice()
        self._health.watch(now)
        self._work(now)
        self._promotion.expire(now)
        self._state.unfinished = self._state.slice_used_up

    def turn(self, received_s: float, now: float) -> list[Job]:
        """`expire` and `plan`, as one hold of the lock: jobs are planned at the next turn if the slice was used up.
        Deadlines are judged by `received_s`: what movers had sent by then has been handled."""
        self.expire(received_s)
        self._plan_put_off = self._state.slice_used_up and not self._plan_put_off
        return [] if self._plan_put_off else self.plan(now)

    def plan(self, now: float) -> list[Job]:
        """The jobs to start now, within every bound and one slice; promotions of all tiers first. Demotions and stores
        keep out of their way (`StoreThrottle`).

        Loads may be sent before the keys to delete (`Tier.delete_batches`); stores must be sent after them.
        """
        jobs: list[Job] = []
        self._state.begin_slice()
        self._writeback.clean(now)
        self._promotion_jobs.watch_room()
        tiers = [tier for tier in self._state.tiers if tier.recovered]
        for tier in tiers:
            if tier.readable and tier.to_load:
                jobs.extend(self._promotion_jobs.plan(tier, now))
        for tier in self._promotion_jobs.queue_prefetches(now):
            jobs.extend(self._promotion_jobs.plan(tier, now))
        for tier in tiers if self._measurements.to_come else ():
            jobs.extend(self._measurements.plan(tier, now))
        self._writeback.throttle.begin(self._promotion_jobs.under_way, now)
        # Before others seal these rows, whose end may be that they leave the host.
        for member in self._state.movers:
            if not (member.writable or member.dead) and member.store_credits > 0:
                jobs.extend(self._probes.plan_store(member, now))
        for tier in tiers:
            if tier.readable and tier.to_demote:
                jobs.extend(self._writeback.plan_demotions(tier, now))
            if tier.writable and tier.to_store:
                jobs.extend(self._writeback.plan_stores(tier, now))
            for member in tier.members:
                if not member.readable and member.store_credits > 0:
                    jobs.extend(self._probes.plan_load(member, now))
        self._state.unfinished |= self._state.slice_used_up
        return jobs

    def plan_checks(self, now: float) -> list[ExistenceCheck]:
        """The existence checks to send now."""
        return self._checks.plan(now)

    def finished(
        self,
        mover: int,
        job_id: int,
        outcomes: Sequence[Outcome],
        now: float,
        partial: Sequence[tuple[int, int]] = (),
        *,
        seconds: float | None = None,
    ) -> None:
        """A job has ended: its mover is done with the rows. `outcomes`: of those that have not ended before. An id of
        no open job is ignored. `seconds`: how long the mover took, if that is known; a pause may lie between its end
        and `now`.

        `partial`: of the rows that were loaded, those that lack sub-blocks: (place in `outcomes`, how many). Raises
        ValueError for a report that does not fit the job; it stays open then, until its mover is dead.
        """
        if (job := self._job(mover, job_id)) is None:
            return
        moved, moves = self._of(mover)[0], job.moves
        _check_report(job, len(moves), len(outcomes), partial)
        self._begin_report(moves, partial)
        took_s = now - job.started_s
        if seconds is not None and job.direction is Direction.STORE:  # a request waits for a load until `now`
            took_s = min(took_s, seconds)
        self._health.job_ended(moved, job, outcomes, now, took_s)
        self._end_job(moved, job, outcomes, now)

    def rows_ended(
        self,
        mover: int,
        job_id: int,
        rows: Sequence[int],
        outcomes: Sequence[Outcome],
        now: float,
        *,
        partial: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Its mover is done with these rows of a job, by their numbers in host memory, while it goes on with others:
        they end as with `finished`, and the job is about the others from now on. An id of no open job is ignored.

        `partial`: as of `finished`. Raises ValueError for a report that does not fit the job, such as of a row that has
        ended before, or of the last one: nothing has changed then.
        """
        if (job := self._job(mover, job_id)) is None:
            return
        left = {move.row.index: move for move in job.moves}
        moves = [move for row in rows if (move := left.pop(row, None)) is not None]
        if len(moves) != len(rows) or not left:
            raise ValueError(f"rows of job {job_id} that it does not have, or all of them")
        _check_report(job, len(moves), len(outcomes), partial)
        self._begin_report(moves, partial)
        moved = self._of(mover)[0]
        moved.ending_moves += reversed(moves)
        job.moves = [*left.values()]
        self._health.rows_ended(moved, job, moves, outcomes, now)
        self._end_moves(moved, job.direction, moves, outcomes, now)

    # --- when --------------------------------------------------------------------------------------------------

    @property
    def due(self) -> Due:
        """What is due; if nothing, what movers report, and time, may bring work."""
        state, writeback = self._state, self._writeback
        waits = self._promotion.prefetch_queue.busy or self._promotion_jobs.can_start or self._checks.to_send
        if waits or state.host.has_old:
            return NOW
        starts = bool(self._measurements.to_come)
        for member in state.movers:
            if member.dead and not member.dead[0].idle:
                return NOW
            starts = starts or bool(member.to_delete)
        starts = starts or any(map(writeback.can_start, state.tiers))
        # Stores that have ended since the last turn are room, too, though none can be started before that is known.
        short = any((starts or tier.rows_storing) and writeback.short_of_room(tier) for tier in state.tiers)
        return NOW if short else SOON if starts else NO

    def take_due(self) -> Due:
        """What is due, if a step, a store or a call has ended since this was asked last; look-ups wait for that."""
        if not self._state.turn_due:
            return NO
        self._state.turn_due = False
        # Without storage tiers no supervisor looks at the time.
        if not self._state.tiers and (self._promotion.busy or self._retention.waiting):
            return NOW
        due = self.due
        return SOON if due is NO and self._state.garbage else due

    @property
    def pause_s(self) -> float:
        """How long what is due SOON may wait, and the ends of jobs, so that one turn does all of it: each takes the
        interpreter's lock from the engine's step. 0 unless only write-back is under way. No tier idles meanwhile for
        want of rows that could be stored now; what is stored meanwhile may wait."""
        state = self._state
        running = [tier for tier in state.tiers if tier.jobs]
        if not running or self.due is NOW or self._checks.busy:
            return 0.0
        # Loads that no request waits for, too: their end measures the tier.
        if any(tier.rows_loading or tier.state is _LISTING for tier in state.tiers):
            return 0.0
        if any(tier.to_store or tier.waiting_for_seal or tier.to_demote for tier in state.tiers):
            return min(state.limits.pause_s, *(PAUSE_SHARE * state.running_s(tier) for tier in running))
        return state.limits.pause_s

    @property
    def busy(self) -> bool:
        """Whether deadlines run, or anything is due."""
        return self._checks.busy or any(member.jobs for member in self._state.movers) or self.due is not NO

    # --- inside ------------------------------------------------------------------------------------------------

    def _of(self, mover: int) -> tuple[Tier, Member]:
        member = self._state.movers[mover]
        return self._state.tiers[member.tier], member

    def _work(self, now: float) -> None:
        for member in self._state.movers:
            while (job := self._health.next_to_end(member, now)) is not None:
                self._end_job(self._state.tiers[member.tier], job, [Outcome.FAILED] * len(job.moves), now)
                if member.state is TierState.DOWN:
                    member.clear_deletes()  # the next mover lists what is there
        for tier in self._state.tiers:
            while tier.index.has_gone and self._state.take():
                tier.index.forget_gone()
        host = self._state.host
        while host.has_old and self._state.take():
            host.reclaim_old(1)
        if self._retention.waiting:
            self._retention.work(now)

    def _going_on(self, tier: Tier, steps: Steps) -> Steps:
        for _ in steps:
            self._go_on_from(tier)
            yield None

    def _go_on_from(self, tier: Tier) -> None:
        """Ticks go on from the newest that any process has given, so that recency survives restarts."""
        self._state.tick = max(self._state.tick, tier.index.newest_listed + 1)

    def _job(self, mover: int, job_id: int) -> Job | None:
        """The open job of this mover."""
        return self._state.movers[mover].jobs.get(job_id)

    def _begin_report(self, moves: Sequence[PlannedMove], partial: Sequence[tuple[int, int]]) -> None:
        self._state.begin_slice()
        self._state.take(len(moves))
        for place, missing in partial:
            moves[place].row.missing = missing

    def _end_job(self, tier: Tier, job: Job, outcomes: Sequence[Outcome], now: float) -> None:
        tier.ending_moves += reversed(job.moves)
        self._state.movers[job.mover].jobs.pop(job.id, None)
        self._jobs.ended(tier, job)
        self._end_moves(tier, job.direction, job.moves, outcomes, now)

    def _end_moves(
        self, tier: Tier, direction: Direction, moves: Sequence[PlannedMove], outcomes: Sequence[Outcome], now: float
    ) -> None:
        """These moves, which are in `tier.ending_moves`, the first one last, are in no job any more."""
        if direction is Direction.LOAD:
            for move, outcome in zip(moves, outcomes, strict=True):
                self._promotion_jobs.load_ended(tier, move, outcome, now)
            return
        self._writeback.stores_ended(tier, moves, outcomes, now)


def _check_report(job: Job, moves: int, outcomes: int, partial: Sequence[tuple[int, int]]) -> None:
    """Raises ValueError."""
    if outcomes != moves or any(place not in range(moves) for place, _ in partial):
        raise ValueError(f"a report about job {job.id} that does not fit its {moves} moves")
