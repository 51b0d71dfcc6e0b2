"""The movers' side of the core: what is queued for them, what is under way, and what its end means."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from nixl_tiers.cascade.host import HostTier, Row, RowState
from nixl_tiers.cascade.outcome import Outcome
from nixl_tiers.cascade.requests import Request
from nixl_tiers.cascade.storage import Direction, Job, PlannedMove, Storage, TierState, Write
from nixl_tiers.chunk import Key

CLEANED_AT_ONCE: Final = 256


@dataclass(frozen=True)
class Limits:
    """The bounds that keep storage out of the way. Seconds, rows, and shares of a tier's rows."""

    wait_s: float = 10.0  # a request waits this long for promotions, then recomputes
    hold_s: float = 30.0  # after that, rows promoted for it may go even if it never came back
    job_s: float = 30.0  # a job may take this long, and longer by its bytes at
    slowest_bytes_per_s: float = 4e6
    retry_s: float = 5.0  # a stored row whose load failed is not tried again sooner
    load_share: float = 0.10  # of the host rows: what may be under promotion at once
    store_share: float = 0.05
    reserve_share: float = 0.05  # of a tier whose evictions are written below: what is kept free ahead of need
    moves_per_job: int = 64
    job_bytes: int = 16 << 20  # small jobs keep a window full: rows are free, or hits, when their own job ends


class Traffic:
    """Queues, windows and jobs between the host tier and the storage tiers."""

    def __init__(self, host: HostTier, storage: Sequence[Storage], limits: Limits, row_bytes: int) -> None:
        self.limits = limits
        self.row_bytes = row_bytes
        self.host = host
        self.storage = list(storage)
        self.generation = 0
        self._tick = 0
        self._job_id = 0
        self._holding: dict[str, Request] = {}  # requests that wait, or for which rows were promoted
        self._cleaner = Request("")  # in whose name rows come up only to be written further down
        few = max(1, min(4, host.rows // 4))  # so that a small host tier still moves
        tiers = max(1, len(self.storage))
        self._load_window = max(few, int(host.rows * limits.load_share) // tiers)
        self._store_window = max(few, int(host.rows * limits.store_share) // tiers)

    # --- what happens to tiers ---------------------------------------------------------------------------------

    def opened(self, tier: int, slots: int) -> None:
        """A mover serves this tier (again), with room for `slots` rows; what it already holds follows by `adopt`."""
        storage = self.storage[tier]
        storage.state = TierState.ADOPTING
        storage.resize(slots)

    def adopt(self, tier: int, entries: Iterable[tuple[int, Key, int]], last: bool) -> None:
        """Rows that the tier held before: (slot, key, tick), to be verified when they are loaded."""
        storage = self.storage[tier]
        for slot, key, tick in entries:
            storage.adopt(slot, key, tick)
            self._tick = max(self._tick, tick + 1)
        if last and storage.state is TierState.ADOPTING:
            storage.state = TierState.UP

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

    def finished(self, tier: int, job_id: int, outcomes: Sequence[Outcome], now: float) -> None:
        """A job ended; its rows are quiet. A job id that is not (or no longer) open is ignored."""
        storage = self.storage[tier]
        job = storage.jobs.pop(job_id, None)
        if job is None:
            return
        if len(outcomes) != len(job.moves):
            outcomes = [Outcome.FAILED] * len(job.moves)
        if job.direction is Direction.STORE:
            storage.rows_storing -= len(job.moves)
            for move, outcome in zip(job.moves, outcomes, strict=True):
                self._store_ended(tier, move, outcome)
        else:
            storage.rows_loading -= len(job.moves)
            for move, outcome in zip(job.moves, outcomes, strict=True):
                self._load_ended(tier, move, outcome, now)

    def demote_all(self) -> None:
        """Queue every row of the host that a tier written on eviction does not hold yet: the engine is leaving."""
        below = self._below(None)
        if below is not None and self.storage[below].state is TierState.UP:
            target = self.storage[below]
            for key, row in self.host.index.items():
                if row.state is RowState.READY and key not in target.index:
                    target.to_store.setdefault(key, row.tick)

    def backlog(self) -> int:
        """Rows queued for or being written to the tier that is furthest behind."""
        return max((len(storage.to_store) + storage.rows_storing for storage in self.storage), default=0)

    @property
    def busy(self) -> bool:
        """Whether deadlines run or jobs could be planned without anything else happening."""
        return bool(self._holding) or any(
            storage.jobs
            or (storage.readable and storage.to_load)
            or (storage.state is TierState.UP and (storage.to_store or self._to_clean(tier) > 0))
            for tier, storage in enumerate(self.storage)
        )

    # --- queueing ----------------------------------------------------------------------------------------------

    def _ask(self, key: Key, request: Request, now: float) -> bool:
        """Queue a stored key for promotion on the request's behalf; False where no tier can give it (now)."""
        if request.given_up or (key in request.asked and not request.asked[key]):
            return False
        for storage in self.storage:
            if storage.find(key, now) is not None:
                storage.to_load.append((request, key))
                request.asked[key] = True
                return True
        request.asked.pop(key, None)
        return False

    def _cascade(self, row: Row, storages: Iterable[Storage]) -> None:
        for storage in storages:
            if storage.spec.write is Write.THROUGH and row.key not in storage.index:
                if storage.state is TierState.DOWN or len(storage.to_store) >= self.host.rows:
                    storage.counters.dropped += 1
                else:
                    storage.to_store[row.key] = row.tick

    def _below(self, tier: int | None) -> int | None:
        """The tier that is written when `tier` (None: the host) evicts, if there is one."""
        for below in range(0 if tier is None else tier + 1, len(self.storage)):
            write = self.storage[below].spec.write
            if write is not Write.OFF:
                return below if write is Write.ON_EVICT else None
        return None

    def _above(self, tier: int) -> int | None:
        """The tier (None: the host) whose evictions are written to `tier`."""
        return next((above for above in reversed(range(tier)) if self.storage[above].spec.write is not Write.OFF), None)

    def _to_clean(self, tier: int) -> int:
        """How many more rows must leave the tier above `tier` so that its reserve stays free."""
        if self.storage[tier].spec.write is not Write.ON_EVICT:
            return 0
        above = self._above(tier)
        share = self.limits.reserve_share
        if above is None:
            return max(1, int(self.host.rows * share)) - self.host.free - len(self.host.leaving)
        source = self.storage[above]
        if source.state is not TierState.UP:
            return 0
        return max(1, int(source.slots.limit * share)) - source.slots.free - len(source.leaving)

    def _make_room(self, count: int) -> int:
        """Free host rows for `count` chunks, as far as that goes; what is evicted unwritten is counted."""
        below = self._below(None)
        gone = self.host.make_room(count)
        if below is not None:
            target = self.storage[below]
            for key in gone:
                target.to_store.pop(key, None)
                target.counters.dropped += key not in target.index
        return min(count, self.host.free)

    def _clean_all(self) -> None:
        for tier, storage in enumerate(self.storage):
            if storage.spec.write is Write.ON_EVICT and storage.state is TierState.UP:
                self._clean(tier, storage)

    def _clean(self, tier: int, target: Storage) -> None:
        """Keep a reserve free in the tier above `target`, so that nobody who needs room waits for a write."""
        missing = min(self._to_clean(tier), CLEANED_AT_ONCE)
        if missing <= 0:
            return
        above = self._above(tier)
        if above is None:
            for row in self.host.choose(missing):
                if row.key in target.index:
                    self.host.leave(row)
                else:
                    target.to_store[row.key] = row.tick
            return
        source = self.storage[above]
        for key in source.choose(missing):
            host_row = self.host.index.get(key)
            if key in target.index:
                source.release(key)
            elif host_row is not None and host_row.state is RowState.READY:
                target.to_store[key] = host_row.tick
            else:
                source.to_load.append((self._cleaner, key))

    # --- planning ----------------------------------------------------------------------------------------------

    def _plan_stores(self, tier: int, storage: Storage, now: float) -> list[Job]:
        wanted: list[tuple[Row, int]] = []
        put_off: dict[Key, int] = {}
        while storage.to_store and storage.rows_storing + len(wanted) < self._store_window:
            key, tick = storage.to_store.popitem(last=False)
            row = self.host.index.get(key)
            if key in storage.index:
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
            elif storage.find(key, now) is not None:
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

    def _tick_of(self, request: Request) -> int:
        if request.tick is None:
            request.tick = self._tick
            self._tick += 1
        return request.tick

    # --- what the end of a move means --------------------------------------------------------------------------

    def _store_ended(self, tier: int, move: PlannedMove, outcome: Outcome) -> None:
        storage, row = self.storage[tier], move.row
        row.mover -= 1
        if move.seal:
            row.sealing = False
            row.sealed = outcome is Outcome.OK
        ours = storage.index.get(move.key) is move.entry
        if outcome is Outcome.OK:
            move.entry.stored = True
            storage.counters.bytes_written += self.row_bytes
            if ours:
                self._written(tier, move.key)
        else:
            storage.counters.failed += 1
            storage.forget(move.key, move.entry)
            if ours:
                self._not_written(tier, move.key)
        self.host.settle(row)

    def _load_ended(self, tier: int, move: PlannedMove, outcome: Outcome, now: float) -> None:
        storage = self.storage[tier]
        row = move.row
        row.mover -= 1
        move.entry.readers -= 1
        if outcome is Outcome.OK:
            storage.counters.bytes_read += self.row_bytes
            if not row.gone:
                row.state = RowState.READY
                row.sealed = True
                if self._cleaner.held.get(move.key) is row:
                    self._demote(tier, move.key)
                else:
                    self._cascade(row, self.storage[:tier])
        else:
            if outcome in (Outcome.FAILED, Outcome.NO_SPACE):
                storage.counters.failed += 1
                move.entry.retry_at = now + self.limits.retry_s
                if storage.index.get(move.key) is move.entry:
                    storage.stay(move.key, self._tick)
            else:
                storage.counters.corrupt += outcome is Outcome.CORRUPT
                storage.forget(move.key, move.entry)
            if not row.gone:
                self.host.forget(row)
                self._retry(move.key, row, now)
        self.host.settle(row)

    def _demote(self, tier: int, key: Key) -> None:
        """A row has come up only to be written further down."""
        below = self._below(tier)
        if below is not None and self.storage[below].state is TierState.UP:
            self.storage[below].to_store[key] = self._tick
        else:
            self._let_go(tier, key, written=False)

    def _written(self, tier: int, key: Key) -> None:
        """`key` stands in this tier now: whoever above only waited for that may evict it."""
        self._above_may_go(tier, key, written=True)

    def _not_written(self, tier: int, key: Key) -> None:
        """`key` will not be written to this tier (now)."""
        self.storage[tier].counters.dropped += 1
        self._above_may_go(tier, key, written=False)

    def _above_may_go(self, tier: int, key: Key, written: bool) -> None:
        if self.storage[tier].spec.write is not Write.ON_EVICT:
            return
        above = self._above(tier)
        if above is not None:
            self._let_go(above, key, written)
            return
        row = self.host.index.get(key)
        if row is not None and row.leaving:
            if written:
                self.host.leave(row)
            else:
                self.host.stay(row, self._tick)

    def _let_go(self, tier: int, key: Key, written: bool) -> None:
        """A demotion out of a storage tier has ended: its host row is nobody's, its slot may be free."""
        row = self._cleaner.held.pop(key, None)
        if row is not None:
            row.holds -= 1
        storage = self.storage[tier]
        if key in storage.leaving:
            if written:
                storage.release(key)
            else:
                storage.stay(key, self._tick)

    def _retry(self, key: Key, row: Row, now: float) -> None:
        """A promotion failed: whoever waits for it asks the next tier that has the key."""
        if self._cleaner.held.get(key) is row:
            del self._cleaner.held[key]
        for request in self._holding.values():
            if request.held.get(key) is row:
                del request.held[key]
                row.holds -= 1
                request.asked.pop(key, None)
                self._ask(key, request, now)
