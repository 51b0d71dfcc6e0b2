"""TierManager: decides what is stored, cascaded, promoted and evicted. Pure: no I/O, no threads, no clock.

Its callers tell it what happened (a look-up, a finished job, a mover that died) and when (`now`, seconds of any
monotonic clock), and carry out the jobs that it plans. The same code runs in the engine, under the property tests'
state machine and in trace replays.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from nixl_tiers.cascade.breaker import BreakerState
from nixl_tiers.cascade.counters import Counters
from nixl_tiers.cascade.eviction import PolicyName, make_policy
from nixl_tiers.cascade.host import CPU, HostTier, Row, RowState
from nixl_tiers.cascade.limits import Limits
from nixl_tiers.cascade.requests import Request
from nixl_tiers.cascade.tier_index import TierIndex
from nixl_tiers.cascade.traffic import Traffic
from nixl_tiers.cascade.types import Direction, TierSpec, TierState, Write
from nixl_tiers.chunk import Key


class Lookup(Enum):
    HIT = "hit"
    PENDING = "pending"
    MISS = "miss"


@dataclass(frozen=True)
class StorePlan:
    """What prepare_store accepted: `keys[i]` goes into host row `rows[i]`; workers mark it with `store_seq`."""

    keys: list[Key]
    rows: list[int]
    store_seq: int
    evicted: list[Key] = field(default_factory=list)


@dataclass(frozen=True)
class TierStats:
    """A tier's numbers: running totals; rows that can be hit; places in use, those too that are being written; whether
    it serves; the state of its circuit; host rows that its mover may still write to although nobody waits for them."""

    counters: Counters
    rows: int
    used: int
    up: bool
    circuit: BreakerState
    quarantined: int


class TierManager(Traffic):
    """The cascade over one host tier of `rows` rows of `row_bytes` bytes and any number of storage tiers, in order.

    Here stands the engine's side; the movers' side is Traffic.

    A job on host rows ends in one of two ways. An engine's scheduler says which keys its workers are done with, and
    says it never for jobs of before a reset. A thread that uses the store without an engine (`call`) has its job end
    by the call's own name, whatever was reset meanwhile, and its rows are given away then and no sooner.
    """

    def __init__(
        self,
        rows: int,
        row_bytes: int,
        tiers: Sequence[TierSpec],
        limits: Limits | None = None,
        policy: PolicyName = "lru",
    ) -> None:
        host = HostTier(rows, make_policy(policy, rows))
        limits = limits or Limits()
        super().__init__(host, [TierIndex(spec, limits) for spec in tiers], limits, row_bytes)
        self.cpu_counters = host.counters
        self._requests: dict[str, Request] = {}
        self._allowed: dict[str, frozenset[int]] = {}  # of the requests that are not to load from every storage tier
        self._unflushed: list[Row] = []
        self._calls: dict[str, list[Row]] = {}  # the rows that each call reads or writes
        self._store_seq = 0

    @property
    def events(self) -> TierManager:
        """What movers report, and the jobs that they get."""
        return self

    @property
    def health(self) -> TierManager:
        """Deadlines and breakers."""
        return self

    def lookup(self, key: Key, name: str, position: int | None, now: float, first: int = 0) -> Lookup:
        """Is `key` a hit for request `name`? O(1). PENDING promises an answer within the request's deadline.

        `first`: the first sub-block that the load is going to read; a row that lacks it is a miss.
        """
        request = self._request(name)
        if request.load_failed:
            return Lookup.MISS
        request.begin(self.host.step, position)
        row = self.host.index.get(key)
        if row is not None and row.state is RowState.READY:
            if row.missing > first:
                return Lookup.MISS
            row.step = self.host.step
            if request.waiting:
                request.pin(row)
            else:
                request.scan_hits.append(row)
            return Lookup.HIT
        if request.stopped or self._gives_up(request, now):
            return Lookup.MISS
        if row is not None or request.asked.get(key, False) or self._ask(key, request, now):
            return self._wait(request, now)
        if self.checks.should_wait(key, request, now) or (
            request.waits_for_listing and self._may_be_told(key, request, now)
        ):
            return self._wait(request, now)
        if request.waiting and not request.pinned and not request.asked:
            self._release(request)  # it has waited for an answer, and nothing came of it
        return Lookup.MISS

    def set_allowed_tiers(self, name: str, tiers: Iterable[int]) -> None:
        """Have a new request load from these storage tiers only, until it is finished. Host memory is always a hit."""
        self._allowed[name] = frozenset(tiers)

    def wait_for_listing(self, name: str) -> None:
        """Have this request wait for keys that nobody knows yet, while a tier is being listed that may hold them."""
        self._request(name).waits_for_listing = True

    def source(self, key: Key) -> str:
        """The tier that the bytes of a hit came from."""
        row = self.host.index.get(key)
        return CPU if row is None else row.source

    def end_step(self) -> None:
        """The engine's step is over: what it called a hit and did not load may be evicted again."""
        self.host.step += 1
        self.checks.end_step()

    def prepare_load(self, keys: Sequence[Key], name: str, *, call: bool = False) -> list[int]:
        """Pin the rows of `keys`, which this step's look-ups called hits; returns them in order.

        Until complete_load or, where a `call` is to read them, end_call.
        """
        request = self._request(name)
        tick = self._tick_of(request)
        rows = []
        for key in keys:
            row = self.host.index[key]
            assert row.state is RowState.READY, "load of a row that is not ready"
            self._take(row, name, call)
            self.host.touch(key, tick)
            counters = self._counters(row.source)
            counters.hits += 1
            for storage in self.tiers:
                storage.touch(key, tick)
            rows.append(row.index)
        self._release(request)
        request.rearm()
        return rows

    def partial(self, keys: Sequence[Key]) -> dict[int, int]:
        """Of the host's rows of `keys`, those that lack sub-blocks: place in `keys` -> how many at the beginning."""
        missing = (self.host.index[key].missing for key in keys)
        return {place: count for place, count in enumerate(missing) if count}

    def complete_load(self, keys: Collection[Key]) -> None:
        """Workers are done reading these rows."""
        for key in keys:
            row = self.host.index.get(key)
            if row is not None and row.worker_refs:
                row.worker_refs -= 1
                self._read(row)
                self._flushed(row.generation)

    def fail_load(self, keys: Collection[Key], name: str) -> None:
        """Workers are done with these rows and could not read them: they are misses, and so is all that `name` asks
        for from now on. Otherwise what failed would be hit, and fail, again at once and for ever."""
        request = self._requests.get(name)
        if request is not None:
            request.load_failed = True
        for key in keys:
            row = self.host.index.get(key)
            if row is None or not row.worker_refs:
                continue
            row.worker_refs -= 1
            row.source = CPU
            self._flushed(row.generation)
            self.cpu_counters.failed += 1
            if not row.worker_refs:  # another load may still count on it, and has its own end
                self.cpu_counters.unreadable += row.state is RowState.READY
                self.host.invalidate(row)

    def prepare_store(self, keys: Sequence[Key], name: str, *, call: bool = False) -> StorePlan:
        """Rows for those of `keys` (in prefix order) that the host does not hold; for their prefix if it is full.

        To be written until complete_store or, where a `call` is to write them, end_call.
        """
        fresh = [key for key in keys if key not in self.host.index]
        tick = self._tick_of(self._request(name))
        for key in keys:
            if key in self.host.index:
                self.host.touch(key, tick)
        room = self._make_room(len(fresh))
        self._store_seq += 1
        plan = StorePlan(fresh[:room], [], self._store_seq)
        for key in plan.keys:
            row = self.host.insert(key, RowState.FILLING, tick, self.generation)
            self._take(row, name, call)
            row.store_seq = self._store_seq
            plan.rows.append(row.index)
        self.cpu_counters.misses += len(fresh)
        for storage in self.tiers:
            storage.counters.misses += sum(key not in storage for key in fresh)
        self.cpu_counters.dropped += len(fresh) - room
        plan.evicted.extend(self.take_evicted())
        return plan

    def rows_being_filled(self, keys: Iterable[Key]) -> list[Row]:
        """The rows of `keys` that workers fill now, in prefix order (`keys` may be a set)."""
        rows = (self.host.index.get(key) for key in keys)
        filling = (r for r in rows if r is not None and r.worker_refs and r.state is RowState.FILLING)
        return sorted(filling, key=lambda r: r.order)

    def rows_being_filled_by_call(self, name: str) -> list[Row]:
        """The rows that a call fills now and that somebody could find afterwards, in prefix order."""
        return [row for row in self._calls.get(name, ()) if row.state is RowState.FILLING and not row.invalidated]

    def end_call(self, name: str, failed: Collection[Key], incomplete: Collection[Key] = ()) -> None:
        """A call is over, well or not: from now on it neither reads nor writes any row, and is no request any more.
        Of the rows that it was to fill, those of `failed` and `incomplete` are as complete_store says."""
        for row in self._calls.pop(name, ()):
            row.call_refs -= 1
            if row.invalidated:
                self.host.reclaim(row)
            elif row.state is RowState.FILLING:
                self._filled(row, failed, incomplete)
            else:
                self._read(row)
        self._clean_all()
        self.finish_request(name)

    def complete_store(self, rows: Iterable[Row], failed: Collection[Key], incomplete: Collection[Key] = ()) -> None:
        """Workers are done writing these rows. Those of `failed` hold nothing usable; in those of `incomplete` there is
        something missing from the first, so that no load could do with them."""
        for row in rows:
            row.worker_refs = 0
            if self._filled(row, failed, incomplete):
                self._flushed(row.generation)
        self._clean_all()

    def pin(self, keys: Iterable[Key], name: str) -> None:
        """Spare the rows of `keys` from eviction until request `name` ends, if no tier below could take them: a put of
        more than the host holds would otherwise throw out its own beginning, without which the rest is worth little."""
        if any(storage.writable and storage.spec.write is not Write.OFF for storage in self.tiers):
            return
        request = self._request(name)
        for key in keys:
            if (row := self.host.index.get(key)) is not None:
                request.pin(row)

    def finish_request(self, name: str) -> None:
        self._allowed.pop(name, None)
        request = self._requests.pop(name, None)
        if request is not None:
            request.expired = True
            self._release(request)

    def touch(self, keys: Iterable[Key], name: str) -> None:
        """The engine used these chunks (in prefix order) from its own memory: roots stay as recent as leaves.

        Call it before the request's deeper chunks are touched by a load or a store.
        """
        tick = self._tick_of(self._request(name))
        for key in keys:
            if key in self.host.index:
                self.host.touch(key, tick)
            for storage in self.tiers:
                storage.touch(key, tick)

    def reset(self, keep_tiers: bool) -> None:
        """The bytes may no longer match the weights. Rows with open jobs are quarantined, all others are free: those of
        workers until `flushed`, or until a job of after the reset completes; those of a call until it ends.

        Storage tiers are emptied (of this epoch) unless `keep_tiers`; they come back through `opened`.
        """
        self.generation += 1
        for request in self._requests.values():  # they live on, with the deadlines that they have
            self._release(request)
        self.checks.reset()
        for row in list(self.host.index.values()):
            if row.worker_refs:
                self._unflushed.append(row)
            self.cpu_counters.reset += row.state is RowState.READY
            self.host.invalidate(row)
        for storage in self.tiers:
            storage.to_load.clear()
            storage.to_store.clear()
            storage.to_demote.clear()
            storage.staged.clear()
            for key in list(storage.evicting):
                storage.cancel_eviction(key, self._tick)
            if not keep_tiers:
                storage.clear()

    def flushed(self) -> None:
        """Workers have ended every job that was open at the last reset."""
        self.release_unflushed(self._unflushed)

    def unflushed_stores(self) -> list[Row]:
        """Rows that workers filled at the last reset, as far as is known."""
        return [row for row in self._unflushed if row.state is RowState.FILLING]

    def release_unflushed(self, rows: Collection[Row]) -> None:
        """Of these, workers have turned out to be done."""
        for row in rows:
            row.worker_refs = 0
            self.host.reclaim(row)
        self._unflushed = [row for row in self._unflushed if row.worker_refs]

    def expire(self, now: float) -> None:
        """Let go of late jobs and answers, and of rows that were promoted for requests that never came for them."""
        self.watch(now)
        self.checks.expire(now)
        limit = now - self.limits.pin_s
        for request in [r for r in self._holding.values() if r.deadline_s is None or r.deadline_s < limit]:
            request.expired = True
            self._release(request)

    def take_evicted(self) -> list[Key]:
        """Keys that have left the host tier since the last call."""
        evicted = list(self.host.evicted)
        self.host.evicted.clear()
        return evicted

    def where(self, key: Key, now: float) -> str | None:
        """The first tier in which `key` could be hit now."""
        row = self.host.index.get(key)
        if row is not None and row.state is RowState.READY:
            return CPU
        return next((s.spec.name for s in self.tiers if s.can_load(key, now)), None)

    def counters(self) -> Mapping[str, TierStats]:
        """By tier, the host's too."""
        cpu = self.cpu_counters
        book = {CPU: TierStats(cpu, cpu.rows, self.host.used, True, BreakerState.CLOSED, 0)}
        for storage in self.tiers:
            book[storage.spec.name] = TierStats(
                storage.counters,
                storage.counters.rows,
                len(storage.slots),
                storage.state is TierState.UP,
                storage.circuit,
                storage.quarantined,
            )
        return book

    # --- inside ------------------------------------------------------------------------------------------------

    def _request(self, name: str) -> Request:
        request = self._requests.get(name)
        if request is None:
            request = self._requests[name] = Request(name, self._allowed.get(name))
        return request

    def _take(self, row: Row, name: str, call: bool) -> None:
        """Somebody is going to read or write this row."""
        if call:
            row.call_refs += 1
            self._calls.setdefault(name, []).append(row)
        else:
            row.worker_refs += 1

    def _filled(self, row: Row, failed: Collection[Key], incomplete: Collection[Key]) -> bool:
        if row.key in failed or row.key in incomplete:
            self.cpu_counters.failed += row.key in failed
            self.cpu_counters.incomplete += row.key not in failed
            self.host.invalidate(row)
            return False
        row.state = RowState.READY
        self.cpu_counters.stored += 1
        self.cpu_counters.bytes_written += self.row_bytes
        self._cascade(row, self.tiers)
        return True

    def _read(self, row: Row) -> None:
        row.source = CPU
        self.cpu_counters.bytes_read += self.row_bytes

    def _counters(self, name: str) -> Counters:
        for storage in self.tiers:
            if storage.spec.name == name:
                return storage.counters
        return self.cpu_counters

    def _wait(self, request: Request, now: float) -> Lookup:
        if request.deadline_s is None:
            request.deadline_s = now + self.limits.wait_s
        if not request.pending:
            request.pending = True
            self._holding[request.name] = request
            for row in request.scan_hits:
                if not row.invalidated:
                    request.pin(row)
        request.stopped = not request.first_scan and request.ascending
        return Lookup.PENDING

    def _may_be_told(self, key: Key, request: Request, now: float) -> bool:
        return any(
            storage.state is TierState.LISTING
            and storage.readable
            and key not in storage
            and (request.allowed is None or tier in request.allowed)
            and not self.checks.known_absent(tier, key, now)
            for tier, storage in enumerate(self.tiers)
        )

    def _gives_up(self, request: Request, now: float) -> bool:
        """Whether the request's deadline has passed. What is held for it stays so: it may come for that."""
        if not request.expired and request.deadline_s is not None and now > request.deadline_s:
            request.expired = True
            self._waited_in_vain(request, now)
        return request.expired

    def _waited_in_vain(self, request: Request, now: float) -> None:
        """Slower than its jobs' deadlines would tell: a tier that lets requests wait and recompute is no help."""
        sources = {row.source for row in request.pinned.values() if row.state is RowState.LOADING}
        queued = any(request.asked.values())
        for storage in self.tiers:
            if storage.spec.name in sources or (queued and not sources and storage.to_load):
                storage.breakers[Direction.LOAD].record(False, now)

    def _release(self, request: Request) -> None:
        request.release()
        self._holding.pop(request.name, None)

    def _flushed(self, generation: int) -> None:
        # The engine flushes the jobs of before a reset ahead of any job that it prepared after it.
        if self._unflushed and generation == self.generation:
            self.flushed()
