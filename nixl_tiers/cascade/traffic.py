"""The movers' side of the core: what happens to tiers, and which jobs their movers get."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from nixl_tiers.cascade.cold_index import ColdIndex
from nixl_tiers.cascade.existence import ExistenceCheck
from nixl_tiers.cascade.host import Row, RowState
from nixl_tiers.cascade.jobs import Jobs
from nixl_tiers.cascade.requests import Request
from nixl_tiers.cascade.tier_index import TierIndex
from nixl_tiers.cascade.types import Direction, Job, PlannedMove, TierState
from nixl_tiers.chunk import Key, Outcome


class Traffic(Jobs):
    """Tiers that come and go, and the jobs between them and the host tier."""

    # --- what happens to tiers ---------------------------------------------------------------------------------

    def opened(self, tier: int, slots: int) -> None:
        """A mover serves this tier (again), with room for `slots` rows; what it already holds follows by `listed`."""
        storage = self.tiers[tier]
        storage.clear_deletes()
        storage.state = TierState.LISTING
        storage.resize(slots)

    def resized(self, tier: int, slots: int) -> None:
        """The tier has room for more or fewer rows, while it is open. Rows beyond are told of as gone, by `listed`."""
        self.tiers[tier].set_limit(slots)

    def listed(self, tier: int, entries: Iterable[tuple[int, Key, int]], last: bool) -> None:
        """Rows that the tier held before: (slot, key, tick), to be verified when they are loaded."""
        storage = self.tiers[tier]
        for slot, key, tick in entries:
            storage.add_listed(slot, key, tick)
            self._tick = max(self._tick, tick + 1)
        if last:
            self._listing_ended(storage)

    def index_listed(self, tier: int, rows: ColdIndex, newest: int) -> None:
        """The same for millions of rows, the most recent of which was used at tick `newest`; they are the core's from
        now on. Rows whose keys are `known` are better removed before: they would take two slots of the budget."""
        storage = self.tiers[tier]
        storage.add_cold(rows)
        self._tick = max(self._tick, newest + 1)

    def known_keys(self, tier: int) -> list[Key]:
        """Keys that the tier's book holds and that a table may tell of again, since the tier was opened again."""
        storage = self.tiers[tier]
        return list(storage.index) if storage.rows_at_open else []

    def down(self, tier: int, now: float) -> None:
        """The tier's medium does not answer. Its rows are not lost, they are misses until it is opened again."""
        storage = self.tiers[tier]
        storage.state = TierState.DOWN
        storage.clear_deletes()
        self.checks.lost(tier)
        self._forget_stores(tier)
        self._forget_loads(storage, now)

    def killed(self, tier: int, now: float) -> None:
        """The tier's mover is about to die, or will never: its jobs are nobody's, and its rows stay in quarantine
        until `lost` says that it was reaped."""
        storage = self.tiers[tier]
        storage.counters.kills += 1
        self._accuse(storage, now)
        self.down(tier, now)
        for breaker in storage.breakers.values():
            breaker.trip(now)
        for job in storage.jobs.values():
            job.hard_deadline_s = float("inf")
            if not job.abandoned:
                self._abandon(tier, job, now, accuse=False)

    def lost(self, tier: int, now: float) -> None:
        """The tier's mover is dead and reaped: nothing writes into its rows any more. All its jobs have failed."""
        storage = self.tiers[tier]
        storage.counters.deaths += 1
        if any(job.hard_deadline_s != float("inf") for job in storage.jobs.values()):  # it died of itself
            self._accuse(storage, now)
        self.down(tier, now)
        for breaker in storage.breakers.values():
            breaker.record(False, now)
        for job in list(storage.jobs.values()):
            del storage.jobs[job.id]
            if job.probe_episode is not None:
                storage.breakers[job.direction].end_probe(job.probe_episode, False, now)
            self._end(tier, job, [Outcome.FAILED] * len(job.moves), now)
        storage.clear_deletes()  # nobody is there to be told, and the next mover tells what stands there

    def existence_checked(self, tier: int, probe: int, absent: Collection[Key], now: float) -> None:
        """A probe has been answered: what it found has been adopted, `absent` is not there."""
        self.checks.answered(tier, probe, absent, now)

    def overdue(self, now: float) -> dict[int, str]:
        """Tiers whose movers must be killed, for nothing else makes rows quiet; and why."""
        late: dict[int, str] = {}
        most = max(1, int(self._load_window * self.limits.quarantine_share))
        for tier, storage in enumerate(self.tiers):
            if any(job.hard_deadline_s < now for job in storage.jobs.values()):
                late[tier] = "a job is overdue"
            elif storage.readable and storage.quarantined > most:
                loads = [job for job in storage.jobs.values() if job.abandoned and job.direction is Direction.LOAD]
                if any(now > 2 * job.soft_deadline_s - job.started_s for job in loads):
                    late[tier] = "too many rows are stuck"
        return late

    def watch(self, now: float) -> None:
        """Let go of late jobs, and of what is queued for a tier whose circuit has opened."""
        self.abandon(now)
        for tier, storage in enumerate(self.tiers):
            for breaker in storage.breakers.values():
                breaker.watch(now)
            if (storage.to_load or storage.to_demote) and not storage.readable:
                self._forget_loads(storage, now)
            if storage.to_store and not storage.breakers[Direction.STORE].closed:
                self._forget_stores(tier)

    # --- jobs --------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> list[Job]:
        """The jobs to start now, within every bound; promotions before demotions, and both before cascades.

        Loads may be sent before what the medium must forget (`TierIndex.delete_batches`), stores must be sent after it.
        """
        jobs: list[Job] = []
        self._clean_all()
        for tier, storage in enumerate(self.tiers):
            if storage.readable and storage.to_load:
                jobs.extend(self._plan_loads(tier, storage, now))
            if storage.readable and storage.to_demote:
                jobs.extend(self._plan_demotions(tier, storage, now))
            if storage.writable and storage.to_store:
                jobs.extend(self._plan_stores(tier, storage, now))
            if (storage.trials or not (storage.readable and storage.writable)) and storage.store_credits > 0:
                jobs.extend(self._plan_alone(tier, storage, now))
        return jobs

    def plan_checks(self, now: float) -> list[ExistenceCheck]:
        """What to ask of media that others store to."""
        return self.checks.plan(now)

    # --- inside ------------------------------------------------------------------------------------------------

    def _listing_ended(self, storage: TierIndex) -> None:
        storage.retire_stale()
        if storage.state is TierState.LISTING:
            storage.state = TierState.UP

    def _plan_stores(self, tier: int, storage: TierIndex, now: float) -> list[Job]:
        wanted: list[tuple[Row, int]] = []
        put_off: dict[Key, int] = {}
        alone: tuple[Row, int] | None = None
        most = min(self._store_window - storage.rows_storing, storage.store_credits * self._job_rows)
        while storage.to_store and len(wanted) < most:
            key, tick = storage.to_store.popitem(last=False)
            row = self.host.index.get(key)
            if key in storage:
                self._written(tier, key)
                continue
            if row is None or row.state is not RowState.READY:
                self._not_written(tier, key)
                continue
            if storage.denylist.is_suspect(key):
                if alone is None and not storage.trial_running and storage.denylist.trial_due(key, now):
                    alone = (row, tick)
                else:
                    self._not_written(tier, key)
                continue
            if row.sealing:
                put_off[key] = tick  # another tier's mover seals it right now: one sealer at a time
                continue
            wanted.append((row, tick))
        for key, tick in reversed(put_off.items()):
            storage.to_store[key] = tick
            storage.to_store.move_to_end(key, last=False)
        jobs = self._jobs(tier, storage, Direction.STORE, self._begin_stores(tier, storage, wanted), now)
        if alone is not None:
            tried = self._jobs(tier, storage, Direction.STORE, self._begin_stores(tier, storage, [alone]), now)
            for job in tried:
                job.is_trial = True
            jobs += tried
        return jobs

    def _plan_loads(self, tier: int, storage: TierIndex, now: float) -> list[Job]:
        wanted: dict[Key, list[Request]] = {}
        most = min(self._load_window - storage.rows_loading, storage.send_credits * self._job_rows)
        if self._cleaner_helps(now):
            most = min(most, self.host.free)
        while storage.to_load and len(wanted) < most:
            request, key = storage.to_load.popleft()
            if not (request.waiting and request.asked.get(key)):
                continue  # it has loaded, given up or ended since it asked
            row = self.host.index.get(key)
            if row is not None:
                request.pin(row)
            elif storage.open_for_load(key, now) is not None:
                wanted.setdefault(key, []).append(request)
            else:
                request.asked.pop(key, None)
        room = self._make_room(len(wanted))
        moves: list[PlannedMove] = []
        for key, requests in wanted.items():
            if len(moves) == room:
                # The host is full of rows that others count on: this prefix ends here.
                for request in requests:
                    request.asked[key] = False
                continue
            row = self.host.insert(key, RowState.LOADING, self._tick_of(requests[0]), self.generation)
            row.source = storage.spec.name
            for request in requests:
                request.pin(row)
            moves.append(self._begin_load(storage, row))
        return self._jobs(tier, storage, Direction.LOAD, moves, now)

    def _cleaner_helps(self, now: float) -> bool:
        """Whether a promotion waits for rows that the cleaner frees, rather than cost unwritten ones: only for so long
        that a tier below which is slow, or hangs, is in nobody's way."""
        if self._below(None) is None or not (self.host.free or self.host.evicting):
            return False
        if self.host.free:
            self._short_since_s = None
            return True
        if self._short_since_s is None:
            self._short_since_s = now
        return now - self._short_since_s < self.limits.clean_s

    def _plan_demotions(self, tier: int, storage: TierIndex, now: float) -> list[Job]:
        """Bring up what leaves the tier, to write it below: in the room that requests have left in the windows."""
        below = self._below(tier)
        target = None if below is None else self.tiers[below]
        if target is None or not target.writable:
            self._forget_demotions(storage)
            return []
        most = min(
            self._load_window - storage.rows_loading,
            self._demote_window - len(storage.staged),
            storage.send_credits * self._job_rows,
        )
        if self._below(None) is not None:
            most = min(most, self.host.free)  # not at the cost of the host's own unwritten rows
        wanted: list[Key] = []
        while storage.to_demote and len(wanted) < most:
            key = storage.to_demote.popleft()
            if key not in storage.evicting or self._written_from_here(storage, target, key):
                continue
            if key not in self.host.index and storage.open_for_load(key, now) is not None:
                wanted.append(key)
            else:
                storage.cancel_eviction(key, self._tick)  # somebody has wanted it meanwhile, or it cannot be had now
        room = self._make_room(len(wanted))
        for key in wanted[room:]:
            storage.cancel_eviction(key, self._tick)
        moves: list[PlannedMove] = []
        for key in wanted[:room]:
            row = self.host.insert(key, RowState.LOADING, 0, self.generation)  # the first to go again
            row.source = storage.spec.name
            row.request_pins += 1
            storage.staged[key] = row
            moves.append(self._begin_load(storage, row))
        return self._jobs(tier, storage, Direction.LOAD, moves, now)

    def _forget_demotions(self, storage: TierIndex) -> None:
        while storage.to_demote:
            storage.cancel_eviction(storage.to_demote.popleft(), self._tick)

    def _forget_stores(self, tier: int) -> None:
        storage = self.tiers[tier]
        while storage.to_store:
            self._not_written(tier, storage.to_store.popitem()[0])

    def _forget_loads(self, storage: TierIndex, now: float) -> None:
        """Whoever is in the queue asks the next tier."""
        storage.trials.clear()
        self._forget_demotions(storage)
        queue, storage.to_load = storage.to_load, deque()
        for request, key in queue:
            if request.waiting and request.asked.get(key):
                self._ask(key, request, now)
