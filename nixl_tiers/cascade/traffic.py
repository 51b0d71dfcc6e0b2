"""The movers' side of the core: what happens to tiers, and which jobs their movers get."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from nixl_tiers.cascade.adopted import AdoptedRows
from nixl_tiers.cascade.endings import Endings
from nixl_tiers.cascade.host import Row, RowState
from nixl_tiers.cascade.outcome import Outcome
from nixl_tiers.cascade.requests import Request
from nixl_tiers.cascade.storage import Direction, Job, PlannedMove, Storage, TierState
from nixl_tiers.chunk import Key


class Traffic(Endings):
    """Tiers that come and go, and the jobs between them and the host tier."""

    # --- what happens to tiers ---------------------------------------------------------------------------------

    def opened(self, tier: int, slots: int) -> None:
        """A mover serves this tier (again), with room for `slots` rows; what it already holds follows by `adopt`."""
        storage = self.storage[tier]
        storage.state = TierState.ADOPTING
        storage.resize(slots)

    def resized(self, tier: int, slots: int) -> None:
        """The tier has room for more or fewer rows, while it is open. Rows beyond are told of as gone, by `adopt`."""
        self.storage[tier].limit_to(slots)

    def adopt(self, tier: int, entries: Iterable[tuple[int, Key, int]], last: bool) -> None:
        """Rows that the tier held before: (slot, key, tick), to be verified when they are loaded."""
        storage = self.storage[tier]
        for slot, key, tick in entries:
            storage.adopt(slot, key, tick)
            self._tick = max(self._tick, tick + 1)
        if last:
            self._adopted(storage)

    def adopt_rows(self, tier: int, rows: AdoptedRows, newest: int) -> None:
        """The same for millions of rows, the most recent of which was used at tick `newest`; they are the core's from
        now on. Rows whose keys are `known` are better removed before: they would take two slots of the budget."""
        storage = self.storage[tier]
        storage.adopt_rows(rows)
        self._tick = max(self._tick, newest + 1)

    def known(self, tier: int) -> list[Key]:
        """Keys that the tier's book holds and that a table may tell of again, since the tier was opened again."""
        storage = self.storage[tier]
        return list(storage.index) if storage.opened_with else []

    def down(self, tier: int, now: float) -> None:
        """The tier's medium does not answer. Its rows are not lost, they are misses until it is opened again."""
        storage = self.storage[tier]
        storage.state = TierState.DOWN
        while storage.to_store:
            self._not_written(tier, storage.to_store.popitem()[0])
        queue, storage.to_load = storage.to_load, deque()
        for request, key in queue:
            if request is self._cleaner:
                storage.stay(key, self._tick)
            else:
                self._ask(key, request, now)

    def lost(self, tier: int, now: float) -> None:
        """The tier's mover is dead and reaped: nothing writes into its rows any more. All its jobs have failed."""
        self.down(tier, now)
        storage = self.storage[tier]
        for job in list(storage.jobs.values()):
            self.finished(tier, job.id, [Outcome.FAILED] * len(job.moves), now)

    def overdue(self, now: float) -> list[int]:
        """Tiers with a job past its deadline: their movers must be killed, for nothing else makes rows quiet."""
        return [
            tier
            for tier, storage in enumerate(self.storage)
            if any(job.deadline_s < now for job in storage.jobs.values())
        ]

    # --- jobs --------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> list[Job]:
        """The jobs to start now, within every bound; promotions before cascades."""
        jobs: list[Job] = []
        self._clean_all()
        for tier, storage in enumerate(self.storage):
            if storage.readable and storage.to_load:
                jobs.extend(self._plan_loads(tier, storage, now))
            if storage.state is TierState.UP and storage.to_store:
                jobs.extend(self._plan_stores(tier, storage, now))
        return jobs

    # --- inside ------------------------------------------------------------------------------------------------

    def _adopted(self, storage: Storage) -> None:
        storage.forget_told_before()
        if storage.state is TierState.ADOPTING:
            storage.state = TierState.UP

    def _plan_stores(self, tier: int, storage: Storage, now: float) -> list[Job]:
        wanted: list[tuple[Row, int]] = []
        put_off: dict[Key, int] = {}
        while storage.to_store and storage.rows_storing + len(wanted) < self._store_window:
            key, tick = storage.to_store.popitem(last=False)
            row = self.host.index.get(key)
            if key in storage:
                self._written(tier, key)
                continue
            if row is None or row.state is not RowState.READY:
                self._not_written(tier, key)
                continue
            if row.sealing:
                put_off[key] = tick  # another tier's mover seals it right now: one sealer at a time
                continue
            wanted.append((row, tick))
        storage.make_room(len(wanted))
        moves: list[PlannedMove] = []
        for row, tick in wanted:
            entry = storage.reserve(row.key, tick)
            if entry is None:
                self._not_written(tier, row.key)
                continue
            row.mover += 1
            seal = row.sealing = not row.sealed
            moves.append(PlannedMove(row, entry, row.key, tick, seal))
        for key, tick in reversed(put_off.items()):
            storage.to_store[key] = tick
            storage.to_store.move_to_end(key, last=False)
        storage.rows_storing += len(moves)
        return self._jobs(tier, storage, Direction.STORE, moves, now)

    def _plan_loads(self, tier: int, storage: Storage, now: float) -> list[Job]:
        wanted: dict[Key, list[Request]] = {}
        most = self._load_window - storage.rows_loading
        if self._below(None) is not None and (self.host.free or self.host.leaving):
            most = min(most, self.host.free)  # a promotion waits for the cleaner, rather than cost unwritten rows
        while storage.to_load and len(wanted) < most:
            request, key = storage.to_load.popleft()
            if request.given_up:
                continue
            row = self.host.index.get(key)
            if row is not None:
                if request is self._cleaner:
                    storage.stay(key, self._tick)  # somebody else has wanted it meanwhile
                else:
                    request.hold(row)
            elif storage.fetch(key, now) is not None:
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
                if self._cleaner in requests:
                    self._cleaner.asked.clear()
                    storage.stay(key, self._tick)
                continue
            tick = 0 if requests == [self._cleaner] else self._tick_of(requests[0])  # the first to go again
            row = self.host.insert(key, RowState.LOADING, tick, self.generation)
            row.mover = 1
            row.source = storage.spec.name
            for request in requests:
                request.hold(row)
            entry = storage.index[key]
            entry.readers += 1
            moves.append(PlannedMove(row, entry, key))
        storage.rows_loading += len(moves)
        return self._jobs(tier, storage, Direction.LOAD, moves, now)

    def _jobs(
        self, tier: int, storage: Storage, direction: Direction, moves: list[PlannedMove], now: float
    ) -> list[Job]:
        under_way = (storage.rows_storing + storage.rows_loading) * self.row_bytes
        deadline_s = now + self.limits.job_s + under_way / self.limits.slowest_bytes_per_s
        size = max(1, min(self.limits.moves_per_job, self.limits.job_bytes // self.row_bytes))
        jobs = []
        for start in range(0, len(moves), size):
            self._job_id += 1
            jobs.append(Job(self._job_id, tier, direction, moves[start : start + size], deadline_s))
        storage.jobs.update((job.id, job) for job in jobs)
        return jobs
