"""How jobs begin, with their deadlines; and those that nobody waits for: probes of a tier, and suspects on trial."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from nixl_tiers.cascade.endings import Endings
from nixl_tiers.cascade.host import Row, RowState
from nixl_tiers.cascade.tier_index import SAMPLED, TierIndex
from nixl_tiers.cascade.types import Direction, Job, PlannedMove, TierState, Write
from nixl_tiers.chunk import Key


class Jobs(Endings):
    """Gives rows and slots into the hands of a job."""

    def _jobs(
        self, tier: int, storage: TierIndex, direction: Direction, moves: list[PlannedMove], now: float
    ) -> list[Job]:
        rows = storage.rows_loading if direction is Direction.LOAD else storage.rows_storing
        nbytes = rows * self.row_bytes
        pace, limits = storage.throughput[direction], self.limits
        late_s = now + pace.timeout_s(nbytes, min(limits.soft_deadline_min_s, limits.wait_s), limits.wait_s)
        overdue_s = now + pace.timeout_s(4 * nbytes, limits.hard_deadline_min_s, limits.hard_deadline_max_s)
        size = self._job_rows
        jobs = []
        for start in range(0, len(moves), size):
            self._job_id += 1
            part = moves[start : start + size]
            jobs.append(Job(self._job_id, tier, direction, part, nbytes, now, late_s, overdue_s))
        storage.jobs.update((job.id, job) for job in jobs)
        storage.send_credits -= len(jobs)
        return jobs

    def _begin_stores(self, tier: int, storage: TierIndex, rows: Sequence[tuple[Row, int]]) -> list[PlannedMove]:
        self._lost_unwritten(tier, storage.make_room(len(rows)))
        moves: list[PlannedMove] = []
        for row, tick in rows:
            entry = storage.reserve(row.key, tick)
            if entry is None:
                self._not_written(tier, row.key)
                continue
            row.mover_refs += 1
            seal = row.sealing = not row.sealed
            moves.append(PlannedMove(row, entry, row.key, tick, seal))
        storage.rows_storing += len(moves)
        return moves

    def _begin_load(self, storage: TierIndex, row: Row) -> PlannedMove:
        row.mover_refs = 1
        entry = storage.index[row.key]
        entry.readers += 1
        storage.rows_loading += 1
        return PlannedMove(row, entry, row.key)

    def _plan_alone(self, tier: int, storage: TierIndex, now: float) -> list[Job]:
        """One suspect that somebody has asked for; or one probe for each half-open circuit. No request waits for it."""
        jobs: list[Job] = []
        loads, stores = storage.breakers[Direction.LOAD], storage.breakers[Direction.STORE]
        if storage.readable and not storage.trial_running:
            while storage.trials and not jobs:
                key, _ = storage.trials.popitem(last=False)
                entry = storage.open_for_trial(key)
                if entry is not None and not entry.readers and storage.denylist.trial_due(key, now):
                    jobs = self._try_load(tier, storage, key, now)
        elif storage.state is not TierState.DOWN and loads.wants_probe:
            sampled = storage.probe_candidate()
            if sampled is not None and storage.open_for_trial(sampled) is not None:
                jobs = self._try_load(tier, storage, sampled, now)
                for job in jobs:
                    job.probe_episode = loads.begin_probe()
        if storage.state is TierState.UP and stores.wants_probe:
            row = self._unwritten(storage)
            if row is not None:
                probes = self._jobs(
                    tier, storage, Direction.STORE, self._begin_stores(tier, storage, [(row, row.tick)]), now
                )
                for job in probes:
                    job.is_trial = True
                    job.probe_episode = stores.begin_probe()
                jobs += probes
        return jobs

    def _try_load(self, tier: int, storage: TierIndex, key: Key, now: float) -> list[Job]:
        """A load whose bytes nobody will see; it costs the least valuable row of a full host."""
        if not self._make_room(1):
            return []
        move = self._begin_load(storage, self.host.allocate_scratch(key, self.generation))
        jobs = self._jobs(tier, storage, Direction.LOAD, [move], now)
        for job in jobs:
            job.is_trial = True
        return jobs

    def _unwritten(self, storage: TierIndex) -> Row | None:
        """One of the host's newest rows that `storage` does not hold, to see whether stores work."""
        if storage.spec.write is Write.OFF:
            return None
        for key, row in islice(reversed(self.host.index.items()), SAMPLED):
            ready = row.state is RowState.READY and not row.sealing
            if ready and key not in storage and not storage.denylist.is_suspect(key):
                return row
        return None

    def _accuse(self, storage: TierIndex, now: float) -> None:
        """Its mover dies with jobs in hand. Whoever is known to have gone wrong is to blame, and nobody else: first
        overdue jobs, then a suspect on trial, then late jobs; if nobody is, all of them may be."""
        jobs = list(storage.jobs.values())
        blamed = (
            [job for job in jobs if job.hard_deadline_s < now]
            or [job for job in jobs if job.is_trial]
            or [job for job in jobs if job.abandoned]
            or jobs
        )
        storage.denylist.suspect((move.key for job in blamed for move in job.moves), now)
