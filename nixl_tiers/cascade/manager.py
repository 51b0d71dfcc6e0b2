"""TierManager: decides what is stored, cascaded, promoted and evicted. Pure: no I/O, no threads, no clock.

Its callers tell it what happened (a look-up, a finished job, a mover that died) and when (`now`, seconds of any
monotonic clock), and carry out the jobs that it plans. The same code runs in the engine, under the property tests'
state machine and in trace replays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from nixl_tiers.cascade.host import CPU, HostTier, Row, RowState
from nixl_tiers.cascade.outcome import Outcome
from nixl_tiers.cascade.policies.lru import LeafFirstLru
from nixl_tiers.cascade.requests import Request
from nixl_tiers.cascade.storage import Counters, Direction, Job, PlannedMove, Storage, TierSpec, TierState
from nixl_tiers.chunk import Key


class Lookup(Enum):
    HIT = "hit"
    PENDING = "pending"
    MISS = "miss"


@dataclass(frozen=True)
class Limits:
    """The bounds that keep storage out of the way. Seconds and rows."""

    wait_s: float = 10.0  # a request waits this long for promotions, then recomputes
    hold_s: float = 30.0  # after that, rows promoted for it may go even if it never came back
    job_s: float = 30.0  # a job may take this long, and longer by its bytes at
    slowest_bytes_per_s: float = 4e6
    retry_s: float = 5.0  # a stored row whose load failed is not tried again sooner
    load_share: float = 0.10  # of the host rows: what may be under promotion at once
    store_share: float = 0.05
    moves_per_job: int = 64


@dataclass(frozen=True)
class StorePlan:
    """What prepare_store accepted: `keys[i]` goes into host row `rows[i]`; workers quote `ticket` when it is done."""

    keys: list[Key]
    rows: list[int]
    ticket: int
    evicted: list[Key] = field(default_factory=list)


class TierManager:
    """The cascade over one host tier of `rows` rows of `row_bytes` bytes and any number of storage tiers, in order."""

    def __init__(self, rows: int, row_bytes: int, tiers: Sequence[TierSpec], limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.row_bytes = row_bytes
        self.host = HostTier(rows, LeafFirstLru())
        self.storage = [Storage(spec) for spec in tiers]
        self.cpu_counters = Counters()
        self.generation = 0
        self._requests: dict[str, Request] = {}
        self._holding: dict[str, Request] = {}
        self._unflushed: list[Row] = []
        self._tick = 0
        self._ticket = 0
        self._job_id = 0
        few = max(1, min(4, rows // 4))  # so that a small host tier still moves
        self._load_window = max(few, int(rows * self.limits.load_share) // max(1, len(tiers)))
        self._store_window = max(few, int(rows * self.limits.store_share) // max(1, len(tiers)))

    # --- the engine's side -------------------------------------------------------------------------------------

    def lookup(self, key: Key, name: str, position: int | None, now: float) -> Lookup:
        """Is `key` a hit for request `name`? O(1). PENDING promises an answer within the request's deadline."""
        request = self._request(name)
        request.begin(self.host.step, position)
        row = self.host.index.get(key)
        if row is not None and row.state is RowState.READY:
            row.step = self.host.step
            if request.waiting:
                request.hold(row)
            else:
                request.seen.append(row)
            return Lookup.HIT
        if request.given_up or request.stopped:
            return Lookup.MISS
        if row is None and not request.asked.get(key, False) and not self._ask(key, request, now):
            return Lookup.MISS
        return self._wait(request, now)

    def source(self, key: Key) -> str:
        """The tier that the bytes of a hit came from."""
        row = self.host.index.get(key)
        return CPU if row is None else row.source

    def end_step(self) -> None:
        """The engine's step is over: what it called a hit and did not load may be evicted again."""
        self.host.step += 1

    def prepare_load(self, keys: Sequence[Key], name: str) -> list[int]:
        """Pin the rows of `keys`, which this step's look-ups called hits; returns them in order."""
        request = self._request(name)
        tick = self._tick_of(request)
        rows = []
        for key in keys:
            row = self.host.index[key]
            assert row.state is RowState.READY, "load of a row that is not ready"
            row.worker += 1
            self.host.touch(key, tick)
            counters = self._counters(row.source)
            counters.hits += 1
            for storage in self.storage:
                if key in storage.index:
                    storage.policy.touch(key, tick)
            rows.append(row.index)
        self._release(request)
        return rows

    def complete_load(self, keys: Collection[Key]) -> None:
        """Workers are done reading these rows."""
        for key in keys:
            row = self.host.index.get(key)
            if row is not None and row.worker:
                row.worker -= 1
                row.source = CPU
                self._flushed(row.generation)

    def prepare_store(self, keys: Sequence[Key], name: str) -> StorePlan:
        """Rows for those of `keys` (in prefix order) that the host does not hold; for their prefix if it is full."""
        fresh = [key for key in keys if key not in self.host.index]
        tick = self._tick_of(self._request(name))
        for key in keys:
            if key in self.host.index:
                self.host.touch(key, tick)
        room = self.host.make_room(len(fresh))
        self._ticket += 1
        plan = StorePlan(fresh[:room], [], self._ticket)
        for key in plan.keys:
            row = self.host.insert(key, RowState.FILLING, tick, self.generation)
            row.worker = 1
            row.ticket = self._ticket
            plan.rows.append(row.index)
        self.cpu_counters.misses += len(fresh)
        for storage in self.storage:
            storage.counters.misses += sum(key not in storage.index for key in fresh)
        self.cpu_counters.dropped += len(fresh) - room
        plan.evicted.extend(self.take_evicted())
        return plan

    def filling(self, keys: Iterable[Key]) -> list[Row]:
        """The rows of `keys` that a store job fills now, in prefix order (`keys` may be a set)."""
        rows = (self.host.index.get(key) for key in keys)
        return sorted((r for r in rows if r is not None and r.state is RowState.FILLING), key=lambda r: r.order)

    def complete_store(self, rows: Iterable[Row], failed: Collection[Key]) -> None:
        """Workers are done writing these rows; those of `failed` hold nothing usable."""
        for row in rows:
            row.worker = 0
            if row.key in failed:
                self.cpu_counters.failed += 1
                self.host.forget(row)
                continue
            row.state = RowState.READY
            self.cpu_counters.bytes_written += self.row_bytes
            self._cascade(row.key, self.storage)
            self._flushed(row.generation)

    def finish_request(self, name: str) -> None:
        request = self._requests.pop(name, None)
        if request is not None:
            request.given_up = True
            self._release(request)

    def touch(self, keys: Iterable[Key], name: str) -> None:
        """The engine used these chunks from its own memory: keep the lower copies as recent as their leaves."""
        tick = self._tick_of(self._request(name))
        for key in keys:
            if key in self.host.index:
                self.host.touch(key, tick)

    def reset(self, keep_storage: bool) -> None:
        """The bytes may no longer match the weights. Rows with open jobs are quarantined, all others are free.

        Storage tiers are emptied (of this epoch) unless `keep_storage`; they come back through `opened`.
        """
        self.generation += 1
        for request in list(self._requests.values()):
            request.given_up = True
            self._release(request)
        self._requests.clear()
        for row in list(self.host.index.values()):
            if row.worker:
                self._unflushed.append(row)
            self.host.forget(row)
        for storage in self.storage:
            storage.to_load.clear()
            storage.to_store.clear()
            if not keep_storage:
                storage.clear()

    def flushed(self) -> None:
        """Workers have ended every job that was open at the last reset."""
        for row in self._unflushed:
            row.worker = 0
            self.host.settle(row)
        self._unflushed.clear()

    # --- the movers' side --------------------------------------------------------------------------------------

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
        storage.counters.dropped += len(storage.to_store)
        storage.to_store.clear()
        queue, storage.to_load = storage.to_load, deque()
        for request, key in queue:
            self._ask(key, request, now)

    def lost(self, tier: int, now: float) -> None:
        """The tier's mover is dead and reaped: nothing writes into its rows any more. All its jobs have failed."""
        self.down(tier, now)
        storage = self.storage[tier]
        for job in list(storage.jobs.values()):
            self.finished(tier, job.id, [Outcome.FAILED] * len(job.moves), now)

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
                self._store_ended(storage, move, outcome)
        else:
            storage.rows_loading -= len(job.moves)
            for move, outcome in zip(job.moves, outcomes, strict=True):
                self._load_ended(tier, move, outcome, now)

    def plan(self, now: float) -> list[Job]:
        """The jobs to start now, within every bound; promotions before cascades."""
        jobs: list[Job] = []
        for tier, storage in enumerate(self.storage):
            if storage.readable and storage.to_load:
                jobs.extend(self._plan_loads(tier, storage, now))
            if storage.state is TierState.UP and storage.to_store:
                jobs.extend(self._plan_stores(tier, storage, now))
        return jobs

    def overdue(self, now: float) -> list[int]:
        """Tiers with a job past its deadline: their movers must be killed, for nothing else makes rows quiet."""
        return [
            tier
            for tier, storage in enumerate(self.storage)
            if any(job.deadline_s < now for job in storage.jobs.values())
        ]

    def expire(self, now: float) -> None:
        """Let go of rows that were promoted for requests that never came for them."""
        limit = now - self.limits.hold_s
        for request in [r for r in self._holding.values() if r.deadline_s is None or r.deadline_s < limit]:
            request.given_up = True
            self._release(request)

    @property
    def busy(self) -> bool:
        """Whether deadlines run or jobs could be planned without anything else happening."""
        return bool(self._holding) or any(
            s.jobs or (s.readable and s.to_load) or (s.state is TierState.UP and s.to_store) for s in self.storage
        )

    def backlog(self) -> int:
        """Rows queued for or being written to the tier that is furthest behind."""
        return max((len(storage.to_store) + storage.rows_storing for storage in self.storage), default=0)

    def take_evicted(self) -> list[Key]:
        """Keys that have left the host tier since the last call."""
        evicted, self.host.evicted = self.host.evicted, []
        return evicted

    def where(self, key: Key, now: float) -> str | None:
        """The first tier in which `key` could be hit now."""
        row = self.host.index.get(key)
        if row is not None and row.state is RowState.READY:
            return CPU
        return next((s.spec.name for s in self.storage if s.find(key, now) is not None), None)

    def counters(self) -> Mapping[str, tuple[Counters, int, TierState]]:
        """By tier: counters, rows in use, state."""
        book: dict[str, tuple[Counters, int, TierState]] = {CPU: (self.cpu_counters, self.host.used, TierState.UP)}
        for storage in self.storage:
            book[storage.spec.name] = (storage.counters, len(storage.slots), storage.state)
        return book

    # --- inside ------------------------------------------------------------------------------------------------

    def _request(self, name: str) -> Request:
        request = self._requests.get(name)
        if request is None:
            request = self._requests[name] = Request(name)
        return request

    def _tick_of(self, request: Request) -> int:
        if request.tick is None:
            request.tick = self._tick
            self._tick += 1
        return request.tick

    def _counters(self, name: str) -> Counters:
        for storage in self.storage:
            if storage.spec.name == name:
                return storage.counters
        return self.cpu_counters

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

    def _wait(self, request: Request, now: float) -> Lookup:
        if request.deadline_s is None:
            request.deadline_s = now + self.limits.wait_s
            self._holding[request.name] = request
            for row in request.seen:
                if not row.gone:
                    request.hold(row)
        elif now > request.deadline_s:
            request.given_up = True
            return Lookup.MISS
        request.stopped = not request.first_scan and request.ascending
        return Lookup.PENDING

    def _release(self, request: Request) -> None:
        request.release()
        request.deadline_s = None
        self._holding.pop(request.name, None)

    def _flushed(self, generation: int) -> None:
        # The engine flushes the jobs of before a reset ahead of any job that it prepared after it.
        if self._unflushed and generation == self.generation:
            self.flushed()

    def _cascade(self, key: Key, storages: Iterable[Storage]) -> None:
        for storage in storages:
            if storage.spec.writes and key not in storage.index:
                if storage.state is TierState.DOWN or len(storage.to_store) >= self.host.rows:
                    storage.counters.dropped += 1
                else:
                    storage.to_store[key] = self._tick

    def _plan_stores(self, tier: int, storage: Storage, now: float) -> list[Job]:
        moves: list[PlannedMove] = []
        put_off: dict[Key, int] = {}
        while storage.to_store and storage.rows_storing + len(moves) < self._store_window:
            key, tick = storage.to_store.popitem(last=False)
            row = self.host.index.get(key)
            if key in storage.index:
                continue
            if row is None or row.state is not RowState.READY:
                storage.counters.dropped += 1
                continue
            if row.sealing:
                put_off[key] = tick  # another tier's mover seals it right now: one sealer at a time
                continue
            entry = storage.reserve(key, tick)
            if entry is None:
                storage.counters.dropped += 1
                continue
            row.mover += 1
            seal = row.sealing = not row.sealed
            moves.append(PlannedMove(row, entry, key, tick, seal))
        for key, tick in reversed(put_off.items()):
            storage.to_store[key] = tick
            storage.to_store.move_to_end(key, last=False)
        storage.rows_storing += len(moves)
        return self._jobs(tier, storage, Direction.STORE, moves, now)

    def _plan_loads(self, tier: int, storage: Storage, now: float) -> list[Job]:
        wanted: dict[Key, list[Request]] = {}
        while storage.to_load and storage.rows_loading + len(wanted) < self._load_window:
            request, key = storage.to_load.popleft()
            if request.given_up:
                continue
            row = self.host.index.get(key)
            if row is not None:
                request.hold(row)
            elif storage.find(key, now) is not None:
                wanted.setdefault(key, []).append(request)
            else:
                request.asked.pop(key, None)
        room = self.host.make_room(len(wanted))
        moves: list[PlannedMove] = []
        for key, requests in wanted.items():
            if len(moves) == room:
                # The host is full of rows that others count on: this prefix ends here.
                for request in requests:
                    request.asked[key] = False
                continue
            row = self.host.insert(key, RowState.LOADING, self._tick_of(requests[0]), self.generation)
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
        size = self.limits.moves_per_job
        jobs = []
        for start in range(0, len(moves), size):
            self._job_id += 1
            jobs.append(Job(self._job_id, tier, direction, moves[start : start + size], deadline_s))
        storage.jobs.update((job.id, job) for job in jobs)
        return jobs

    def _store_ended(self, storage: Storage, move: PlannedMove, outcome: Outcome) -> None:
        row = move.row
        row.mover -= 1
        if move.seal:
            row.sealing = False
            row.sealed = outcome is Outcome.OK
        if outcome is Outcome.OK:
            move.entry.stored = True
            storage.counters.bytes_written += self.row_bytes
        else:
            storage.counters.failed += 1
            storage.counters.dropped += 1
            storage.forget(move.key, move.entry)
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
                self._cascade(move.key, self.storage[:tier])
        else:
            if outcome in (Outcome.FAILED, Outcome.NO_SPACE):
                storage.counters.failed += 1
                move.entry.retry_at = now + self.limits.retry_s
            else:
                storage.counters.corrupt += outcome is Outcome.CORRUPT
                storage.forget(move.key, move.entry)
            if not row.gone:
                self.host.forget(row)
                self._retry(move.key, row, now)
        self.host.settle(row)

    def _retry(self, key: Key, row: Row, now: float) -> None:
        """A promotion failed: whoever waits for it asks the next tier that has the key."""
        for request in self._holding.values():
            if request.held.get(key) is row:
                del request.held[key]
                row.holds -= 1
                request.asked.pop(key, None)
                self._ask(key, request, now)
