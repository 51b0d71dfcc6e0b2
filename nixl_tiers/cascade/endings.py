"""What the end of a move means: for its row, for its slot, and for whoever waited for it."""

from __future__ import annotations

from collections.abc import Sequence

from nixl_tiers.cascade.host import Row, RowState
from nixl_tiers.cascade.queues import Queues
from nixl_tiers.cascade.tier_index import TierIndex
from nixl_tiers.cascade.types import Direction, Job, PlannedMove, Write
from nixl_tiers.chunk import Key, Outcome


class Endings(Queues):
    """Applies what movers report, and what they fail to report in time."""

    def finished(
        self,
        tier: int,
        job_id: int,
        outcomes: Sequence[Outcome],
        now: float,
        partial: Sequence[tuple[int, int]] = (),
    ) -> None:
        """A job ended; its rows are quiet. A job id that is not (or no longer) open is ignored.

        `partial`: of the rows that were loaded, those that lack sub-blocks: (place in the job, how many).
        Raises ValueError for what cannot be the end of that job; it is still open then, until its mover is dead.
        """
        storage = self.tiers[tier]
        job = storage.jobs.get(job_id)
        if job is None:
            return
        places = range(len(job.moves))
        if len(outcomes) != len(places) or any(place not in places for place, _ in partial):
            raise ValueError(f"an end of job {job_id} that does not fit its {len(places)} moves")
        del storage.jobs[job_id]
        if any(outcome is Outcome.OK for outcome in outcomes):
            storage.throughput[job.direction].record(job.nbytes, now - job.started_s)
        for place, missing in partial:
            job.moves[place].row.missing = missing
        if not job.abandoned:
            self._learn(storage, job, outcomes, now)
        self._end(tier, job, outcomes, now)

    def abandon(self, now: float) -> None:
        """Nobody waits for late jobs any longer: their keys are misses, and the rows of loads are quarantined until
        the mover is done with them, or dead. The mover is left alone."""
        for tier, storage in enumerate(self.tiers):
            for job in storage.jobs.values():
                if not job.abandoned and now > job.soft_deadline_s:
                    self._abandon(tier, job, now)

    # --- inside ------------------------------------------------------------------------------------------------

    def _learn(self, storage: TierIndex, job: Job, outcomes: Sequence[Outcome], now: float) -> None:
        """What the end of a job says about its keys and its tier; of a late one, that was said when it was late."""
        for move, outcome in zip(job.moves, outcomes, strict=True):
            if outcome is Outcome.OK:
                # The request that asked for it will ask for the next of them only when it comes again.
                company = storage.denylist.clear(move.key)
                storage.trials.update((key, None) for key in company if storage.denylist.is_suspect(key))
            elif outcome is Outcome.FAILED and (
                job.direction is Direction.LOAD or storage.denylist.is_suspect(move.key)
            ):
                storage.denylist.record_failure(move.key, now)
        failed = sum(outcome is Outcome.FAILED for outcome in outcomes)
        # A full medium is no failing one: it says so at once, and is well when there is room.
        full = all(outcome is Outcome.NO_SPACE for outcome in outcomes)
        if not full or job.probe_episode is not None:
            self._judge(storage, job, 2 * failed < len(outcomes), now)

    def _abandon(self, tier: int, job: Job, now: float, accuse: bool = True) -> None:
        storage = self.tiers[tier]
        job.abandoned = True
        self._judge(storage, job, False, now)
        if job.direction is Direction.STORE:
            return  # its rows can be read as ever; they are only pinned
        storage.counters.late += len(job.moves)
        if accuse:
            storage.denylist.suspect((move.key for move in job.moves), now)
        for move in job.moves:
            if storage.index.get(move.key) is move.entry:
                storage.cancel_eviction(move.key, self._tick)
            if not move.row.invalidated:
                self.host.invalidate(move.row)
                self._retry(storage, move.key, move.row, now)

    def _judge(self, storage: TierIndex, job: Job, good: bool, now: float) -> None:
        """A suspect that was tried alone says nothing about its tier unless it came through."""
        breaker = storage.breakers[job.direction]
        if job.probe_episode is not None:
            breaker.end_probe(job.probe_episode, good, now)
        elif good or not job.is_trial:
            breaker.record(good, now)

    def _end(self, tier: int, job: Job, outcomes: Sequence[Outcome], now: float) -> None:
        storage = self.tiers[tier]
        if job.direction is Direction.STORE:
            storage.rows_storing -= len(job.moves)
            for move, outcome in zip(job.moves, outcomes, strict=True):
                self._store_ended(tier, move, outcome)
        else:
            storage.rows_loading -= len(job.moves)
            for move, outcome in zip(job.moves, outcomes, strict=True):
                self._load_ended(tier, move, outcome, now)

    def _store_ended(self, tier: int, move: PlannedMove, outcome: Outcome) -> None:
        storage, row = self.tiers[tier], move.row
        row.mover_refs -= 1
        if move.seal:
            row.sealing = False
            row.sealed = outcome is Outcome.OK
        ours = storage.index.get(move.key) is move.entry
        if outcome is Outcome.OK:
            move.entry.stored = True
            storage.counters.bytes_written += self.row_bytes
            if ours:
                storage.counters.stored += 1
                self._written(tier, move.key)
        else:
            storage.counters.failed += 1
            storage.invalidate(move.key, move.entry)
            if ours:
                self._not_written(tier, move.key)
        self.host.reclaim(row)

    def _load_ended(self, tier: int, move: PlannedMove, outcome: Outcome, now: float) -> None:
        storage = self.tiers[tier]
        row = move.row
        row.mover_refs -= 1
        move.entry.readers -= 1
        if outcome is Outcome.OK:
            storage.counters.bytes_read += self.row_bytes
            if not row.invalidated:
                row.state = RowState.READY
                row.sealed = True
                self.host.counters.promoted += 1
                if storage.staged.get(move.key) is row:
                    self._demote(tier, move.key)
                else:
                    self._cascade(row, self.tiers[:tier])
        else:
            if outcome in (Outcome.FAILED, Outcome.NO_SPACE):
                storage.counters.failed += 1
                if storage.index.get(move.key) is move.entry:
                    storage.cancel_eviction(move.key, self._tick)
            elif storage.invalidate(move.key, move.entry):
                storage.counters.corrupt += outcome is Outcome.CORRUPT
                storage.counters.missing += outcome is Outcome.MISSING
                self.checks.mark_absent(tier, move.key, now)
            if not row.invalidated:
                self.host.invalidate(row)
                self._retry(storage, move.key, row, now)
        self.host.reclaim(row)

    def _demote(self, tier: int, key: Key) -> None:
        """A row has come up only to be written further down."""
        below = self._below(tier)
        if below is not None and self.tiers[below].writable:
            self.tiers[below].to_store[key] = self._tick
        else:
            self._let_go(tier, key, written=False)

    def _written(self, tier: int, key: Key) -> None:
        """`key` stands in this tier now: whoever above only waited for that may evict it."""
        self._above_may_go(tier, key, written=True)

    def _not_written(self, tier: int, key: Key) -> None:
        """`key` will not be written to this tier (now)."""
        self.tiers[tier].counters.dropped += 1
        self._above_may_go(tier, key, written=False)

    def _above_may_go(self, tier: int, key: Key, written: bool) -> None:
        if self.tiers[tier].spec.write is not Write.ON_EVICT:
            return
        above = self._above(tier)
        if above is not None:
            self._let_go(above, key, written)
            return
        row = self.host.index.get(key)
        if row is not None and row.evicting:
            if written:
                self.host.finish_eviction(row)
            else:
                self.host.cancel_eviction(row, self._tick)

    def _let_go(self, tier: int, key: Key, written: bool) -> None:
        """A demotion out of a storage tier has ended: its host row is nobody's, its slot may be free."""
        storage = self.tiers[tier]
        row = storage.staged.pop(key, None)
        if row is not None:
            row.request_pins -= 1
        if key in storage.evicting:
            if written:
                storage.release(key)
            else:
                storage.cancel_eviction(key, self._tick)

    def _retry(self, storage: TierIndex, key: Key, row: Row, now: float) -> None:
        """A promotion failed: whoever waits for it asks the next tier that has the key."""
        if storage.staged.get(key) is row:
            del storage.staged[key]
        for request in self._holding.values():
            if request.pinned.get(key) is row:
                del request.pinned[key]
                row.request_pins -= 1
                request.asked.pop(key, None)
                self._ask(key, request, now)
