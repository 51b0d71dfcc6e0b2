"""TierManager: what a scheduler calls. Decides what is stored, promoted, written back and evicted; no I/O or clock.

Callers report what happened (a look-up, a finished job, a dead mover) and when (`now`, in seconds of any monotonic
clock), and carry out the jobs that it plans. The same code runs in the engine, in the stateful tests and in trace
replays. Rows come up in `promotion.py` and go down in `writeback.py`; movers report to `events.py`; `health.py` keeps
what fails or hangs out of the way.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from nixl_tiers.cascade.breaker import BreakerState
from nixl_tiers.cascade.chains import Chain, Chains, Scan
from nixl_tiers.cascade.counters import Counters, TierStats
from nixl_tiers.cascade.events import Events
from nixl_tiers.cascade.eviction import make_policy
from nixl_tiers.cascade.existence import ExistenceChecks
from nixl_tiers.cascade.garbage import Garbage
from nixl_tiers.cascade.gone_keys import GoneKeys
from nixl_tiers.cascade.health import Health
from nixl_tiers.cascade.host import CPU, Generation, HostTier, Row, RowState
from nixl_tiers.cascade.limits import Limits
from nixl_tiers.cascade.line import AFTER_ALL, Rank
from nixl_tiers.cascade.misses import Misses
from nixl_tiers.cascade.prefill import PrefillEstimate
from nixl_tiers.cascade.promotion import Promotion
from nixl_tiers.cascade.requests import Request
from nixl_tiers.cascade.savings import Load, Savings
from nixl_tiers.cascade.state import CascadeState
from nixl_tiers.cascade.tier_index import TierIndex
from nixl_tiers.cascade.types import Job, TierSpec, TierState
from nixl_tiers.cascade.writeback import WriteBack
from nixl_tiers.chunk import Key
from nixl_tiers.policies import Eviction, Prefer, Write


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


class TierManager:
    """The cascade over one host tier of `rows` rows of `row_bytes` bytes and any number of storage tiers, in order.

    Two kinds of callers use host rows. A vLLM scheduler reports the keys that its workers are done with, and reports
    nothing of jobs that began before a reset. A thread that uses the store without an engine (`call`) ends its call by
    name: its rows are released then and not before, whatever was reset meanwhile.
    """

    def __init__(
        self,
        rows: int,
        row_bytes: int,
        tiers: Sequence[TierSpec],
        limits: Limits | None = None,
        policy: Eviction = "lru",
        *,
        prefill: PrefillEstimate | None = None,
        prefer: Prefer = "latency",
    ) -> None:
        gone = GoneKeys()
        self.host = HostTier(rows, partial(make_policy, policy, rows), gone)
        self.garbage = Garbage()
        self.limits = limits or Limits()
        self.tiers = [TierIndex(spec, number, self.limits, self.garbage, gone) for number, spec in enumerate(tiers)]
        self.checks = ExistenceChecks(self.tiers, self.limits)
        self.prefill = prefill or PrefillEstimate()
        self._state = CascadeState(
            self.host,
            self.tiers,
            self.limits,
            row_bytes,
            self.garbage,
            prefill=self.prefill,
            gone=gone,
            prefer=prefer,
        )
        self._misses = Misses(self._state)
        self._writeback = WriteBack(self._state)
        self._promotion = Promotion(self._state, self.checks, self._writeback)
        self.health = Health(self._state, self._promotion, self._writeback)
        self.events = Events(self._state, self.checks, self._promotion, self._writeback, self.health)
        self.savings = Savings(self.prefill, self._counters)
        self._requests: dict[str, Request] = {}
        self._chains = Chains(self._state, self.checks, self._promotion, self._requests)
        self._allowed: dict[str, frozenset[int]] = {}  # requests that may not load from every storage tier
        self._host_only: set[str] = set()  # requests on whose behalf nothing is written to storage tiers
        self._calls: dict[str, list[Row]] = {}  # the rows that each call reads or writes
        self._store_seq = 0
        self._prefetches = 0

    # --- requests ----------------------------------------------------------------------------------------------

    def lookup(self, key: Key, name: str, position: int | None, now: float, first: int = 0) -> Lookup:
        """Is `key` a hit for request `name`? O(1). PENDING is answered within the request's deadline.

        `first`: the first sub-block that the load is going to read; a row that lacks it is a miss.
        """
        request = self._looked_up(name, now)
        if request.load_failed:
            return Lookup.MISS
        waits = request.begin(self.host.step, position)
        if request.answered:
            return Lookup.MISS
        if waits and self._promotion.still_waits(request, position, first, now):
            request.answered = True
            return Lookup.PENDING
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
        if request.stopped or self._promotion.has_expired(request, now):
            return Lookup.MISS
        if row is not None and row.state is RowState.LOADING and not row.mover_refs:
            self.host.invalidate(row)  # an error has ended its load
            row = None
        if (
            row is not None
            or request.asked.get(key, False)
            or self._promotion.enqueue(key, request, now)
            or self.checks.should_wait(key, request, now)
            or (request.waits_for_listing and self._promotion.may_be_listed(key, request, now))
        ):
            self._promotion.wait(request, now)
            request.note_missing(key)
            return Lookup.PENDING
        if request.waiting and not request.pinned and not request.asked:
            self._promotion.release(request)  # it has waited for an existence check, which found nothing
        return Lookup.MISS

    def scan(self, name: str, chain: Chain, start: int, now: float, first: int = 0) -> Scan:
        """All look-ups of a request in this step at once, of its chain from token `start` on: what of it the request
        loads, and whether it waits for that. Instead of `lookup` for each key; keys of windowed groups are looked up
        besides, after it in the same step. `first`: as in `lookup`, of each chunk."""
        request = self._looked_up(name, now)
        if request.load_failed:
            return Scan(False, start)
        return self._chains.scan(request, chain, start, first, now)

    def copied(self, rows: int, seconds: float, now: float) -> None:
        """Workers have taken so long to copy these rows to the engine, and the engine to take notice."""
        self._state.copies.record(rows * self._state.row_bytes, seconds, now)

    def anticipate(self, name: str, keys: Sequence[Key], rank: Rank) -> None:
        """A new request waits for its turn: its first look-up, which comes the sooner, the lower its `rank` is. Until
        then its chain is promoted in the background, up to the first key that no tier holds, behind what is promoted
        for requests whose turn has come, and kept for it as far as these leave room. `keys`: of its full-attention
        groups, in the order of their end tokens, from the first that the engine itself has not cached."""
        request = self._request(name)
        if self.tiers and keys and request.step < 0 and not request.in_line:
            self._promotion.line.join(request, keys, rank)

    def prefetch(self, keys: Sequence[Key]) -> None:
        """Promote those of `keys` that storage tiers hold, in this order, behind all that requests wait for. Rows that
        have come are ordinary rows of the host tier; of those that `line_share` of it has no room for nothing comes."""
        self._prefetches += 1
        if self.tiers and keys:
            request = Request(f"prefetch {self._prefetches}", self.host.generation)
            self._promotion.line.join(request, keys, AFTER_ALL)

    def set_allowed_tiers(self, name: str, tiers: Iterable[int]) -> None:
        """Let a new request load from these storage tiers only, until it is finished. Host memory is always a hit."""
        self._allowed[name] = frozenset(tiers)

    def keep_in_host(self, name: str) -> None:
        """Write nothing that a new request stores to storage tiers, on its behalf, until it is finished. A chunk that
        another request, without this, stores or uses too is written like any other from then on."""
        self._host_only.add(name)

    def wait_for_listing(self, name: str) -> None:
        """Let this request wait for unknown keys while a tier is being listed that may hold them."""
        self._request(name).waits_for_listing = True

    def source(self, key: Key) -> str:
        """The tier that the bytes of a hit came from."""
        row = self.host.index.get(key)
        return CPU if row is None else row.source

    def count_misses(self, keys: Iterable[Key], name: str, now: float) -> None:
        """Count why the request has to compute these chunks, in prefix order from its first miss. Once a chunk."""
        self._misses.count(keys, self._request(name), now)

    def end_step(self, began: Iterable[str] = (), preempted: Iterable[str] = ()) -> None:
        """The scheduler's step is over: its hits that it did not load may be evicted again. `began`: requests that
        compute from now on; `preempted`: those that lost what they had computed, and come back."""
        self.host.step += 1
        self.checks.end_step()
        for name in began:
            request = self._requests.get(name)
            if request is not None and request.in_line:  # without a look-up: the engine's own cache had all of it
                self._promotion.line.leave(request)
                self._promotion.release(request)
        for name in preempted:
            if (request := self._requests.get(name)) is not None:
                self._promotion.release(request)
                request.rearm()  # what it computed is stored by now: it is weighed anew

    def pin(self, keys: Iterable[Key], name: str) -> None:
        """Pin the rows of `keys` until request `name` ends, if no tier below can take them: a put of more than the host
        holds would otherwise evict its own beginning, without which the rest is worth little."""
        if any(tier.writable and tier.spec.write is not Write.OFF for tier in self.tiers):
            return
        request = self._request(name)
        for key in keys:
            if (row := self.host.index.get(key)) is not None:
                request.pin(row)

    def touch(self, keys: Iterable[Key], name: str) -> None:
        """The engine used these chunks (in prefix order) from its own memory: roots stay as recent as leaves.

        Call it before the request's deeper chunks are touched by a load or a store.
        """
        tick = self._state.tick_of(self._request(name))
        for key in keys:
            if (row := self.host.index.get(key)) is not None:
                self._use(row, name, tick)
            for tier in self.tiers:
                tier.touch(key, tick)

    def finish_request(self, name: str) -> None:
        """The request has ended: unpin its rows."""
        self._allowed.pop(name, None)
        self._host_only.discard(name)
        self.savings.forget(name)
        request = self._requests.pop(name, None)
        if request is not None:
            if request.in_line:
                self._promotion.line.leave(request)
            self._promotion.observe_wait(request, loaded=False)
            request.expired = True
            self._promotion.release(request)

    # --- loads -------------------------------------------------------------------------------------------------

    def prepare_load(
        self,
        keys: Sequence[Key],
        name: str,
        *,
        call: bool = False,
        tokens: Sequence[int] = (),
        load: Load | None = None,
    ) -> list[int]:
        """Pin the rows of `keys`, all of them hits of this step; returns them in order. `tokens`: how many each key
        saves the engine from computing, and `load`: which ones they are and when their copy began, for the metrics.

        They are pinned until complete_load or, if a `call` is to read them, end_call.
        """
        request = self._request(name)
        tick = self._state.tick_of(request)
        rows = []
        for place, key in enumerate(keys):
            row = self.host.index[key]
            assert row.state is RowState.READY, "load of a row that is not ready"
            self._reference(row, name, call)
            self._use(row, name, tick)
            counters = self._counters(row.source)
            counters.hits += 1
            if tokens:
                counters.hit_tokens += tokens[place]
                if load is not None:
                    load.tokens[row.source] = load.tokens.get(row.source, 0) + tokens[place]
            for tier in self.tiers:
                tier.touch(key, tick)
            rows.append(row.index)
        waited = self._promotion.observe_wait(request, loaded=True)
        if load is not None:
            load.waited = waited
            self.savings.load_began(name, load)
        self._promotion.release(request)
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
                self._count_read(row)
                self._flushed_before(row.generation)

    def fail_load(self, keys: Collection[Key], name: str) -> None:
        """Workers are done with these rows and could not read them: they are misses, and so is every key to `name` from
        now on. Otherwise it would hit the same row, and fail, again and again."""
        request = self._requests.get(name)
        if request is not None:
            request.load_failed = True
        for key in keys:
            row = self.host.index.get(key)
            if row is None or not row.worker_refs:
                continue
            row.worker_refs -= 1
            row.source = CPU
            self._flushed_before(row.generation)
            self.host.counters.failed_loads += 1
            if not row.worker_refs:  # else another load reads it too, and has its own end
                self.host.counters.unreadable += row.state is RowState.READY
                self.host.invalidate(row)

    # --- stores ------------------------------------------------------------------------------------------------

    def prepare_store(self, keys: Sequence[Key], name: str, *, call: bool = False) -> StorePlan:
        """Rows for those of `keys` (in prefix order) that the host does not hold; for their prefix if it is full.

        They are written until complete_store or, if a `call` is to write them, end_call.
        """
        fresh = [key for key in keys if key not in self.host.index]
        tick = self._state.tick_of(self._request(name))
        if len(fresh) < len(keys):
            for key in keys:
                if (row := self.host.index.get(key)) is not None:
                    self._use(row, name, tick)
        room = self._state.make_room(len(fresh))
        self._store_seq += 1
        plan = StorePlan(fresh[:room], [], self._store_seq)
        for key in plan.keys:
            row = self.host.insert(key, RowState.FILLING, tick)
            self._reference(row, name, call)
            row.host_only = name in self._host_only
            row.store_seq = self._store_seq
            plan.rows.append(row.index)
        self.host.counters.dropped_no_room += len(fresh) - room
        plan.evicted.extend(self.take_evicted())
        return plan

    def rows_being_filled(self, keys: Iterable[Key]) -> list[Row]:
        """The rows of `keys` that workers fill now, in prefix order (`keys` may be a set)."""
        rows = (self.host.index.get(key) for key in keys)
        filling = (r for r in rows if r is not None and r.worker_refs and r.state is RowState.FILLING)
        return sorted(filling, key=lambda r: r.order)

    def complete_store(self, rows: Iterable[Row], failed: Collection[Key], incomplete: Collection[Key] = ()) -> None:
        """Workers are done writing these rows. Those of `failed` hold nothing usable; those of `incomplete` lack their
        first sub-blocks, so that no load can use them."""
        filled = []
        for row in rows:
            row.worker_refs = 0
            if self._filled(row, failed, incomplete):
                filled.append(row)
                self._flushed_before(row.generation)
        self._writeback.write_through(filled, self.tiers)
        self._writeback.clean()

    def rows_being_filled_by_call(self, name: str) -> list[Row]:
        """The rows that a call fills now and that a look-up could find afterwards, in prefix order."""
        return [row for row in self._calls.get(name, ()) if row.state is RowState.FILLING and not row.invalidated]

    def end_call(self, name: str, failed: Collection[Key], incomplete: Collection[Key] = ()) -> None:
        """A call has ended, well or not: it neither reads nor writes any row from now on, and its request is finished.
        Of the rows that it was to fill, `failed` and `incomplete` are as in complete_store."""
        filled = []
        for row in self._calls.pop(name, ()):
            row.call_refs -= 1
            if row.invalidated:
                self.host.reclaim(row)
            elif row.state is not RowState.FILLING:
                self._count_read(row)
            elif self._filled(row, failed, incomplete):
                filled.append(row)
        self._writeback.write_through(filled, self.tiers)
        self._writeback.clean()
        self.finish_request(name)

    def demote(self, rows: Iterable[Row]) -> None:
        """The engine shuts down: queue those of the host's rows that the tier below it lacks."""
        self._writeback.demote(rows)

    def backlog(self) -> int:
        """Rows queued for or being written to the tier that is furthest behind."""
        return self._writeback.backlog()

    def pressure(self) -> int:
        """The same of the tiers that are writable now."""
        return self._writeback.pressure()

    # --- resets and time ---------------------------------------------------------------------------------------

    def reset(self, keep_tiers: bool, now: float = 0.0) -> None:
        """The bytes may no longer match the weights. Rows in use are quarantined (invalid, not yet free), all others
        become free in slices, and when they are needed. Those of workers become free after `flushed`, or when a job
        that began after the reset completes; those of a call when it ends. Storage tiers are emptied (of this epoch)
        unless `keep_tiers`, until `events.opened`. `take_evicted` does not return the keys that a reset removes.
        """
        self.savings.reset()
        self._promotion.reset(self.garbage)
        self._state.gone.clear()
        self.checks.reset(self.garbage)
        self.host.reset(self.garbage)
        for tier in self.tiers:
            tier.drop_queues()
            if not keep_tiers:
                tier.clear()
        self.events.work(now)

    def flushed(self) -> None:
        """Workers have ended every job that was open at the last reset."""
        self.host.flushed()

    def turn(self, received_s: float, now: float) -> list[Job]:
        """Apply what has timed out by `received_s` (jobs, existence checks, rows that were promoted for nothing), and
        plan the jobs to start now; one slice of that (`Events.turn`)."""
        self.checks.expire(received_s)
        return self.events.turn(received_s, now)

    # --- what is where -----------------------------------------------------------------------------------------

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
        return next((tier.spec.name for tier in self.tiers if tier.can_load(key, now)), None)

    def counters(self) -> Mapping[str, TierStats]:
        """By tier, including the host's."""
        host = self.host.counters
        stats = {CPU: TierStats(host, host.rows, self.host.used, True, BreakerState.CLOSED, 0)}
        for tier in self.tiers:
            up = tier.state is TierState.UP
            stats[tier.spec.name] = TierStats(
                tier.counters,
                tier.counters.rows,
                len(tier.slots),
                up,
                tier.circuit,
                tier.quarantined,
                queued_loads=len(tier.to_load),
                queued_stores=len(tier.to_store) + len(tier.parked),
                loading=tier.rows_loading,
                storing=tier.rows_storing,
            )
        return stats

    def take_samples(self) -> dict[tuple[str, str], list[float]]:
        """Of histograms, since the last call: (tier, number) -> samples."""
        return self._state.samples.take()

    @property
    def waiting_requests(self) -> int:
        """Requests that wait for promotions."""
        return self._promotion.waiting_count

    # --- inside ------------------------------------------------------------------------------------------------

    def _request(self, name: str) -> Request:
        request = self._requests.get(name)
        if request is None:
            request = self._requests[name] = Request(name, self.host.generation, self._allowed.get(name))
        request.belongs_to(self.host.generation)
        return request

    def _looked_up(self, name: str, now: float) -> Request:
        """The request, whose turn has come if it was in line."""
        request = self._request(name)
        if request.in_line:
            self._promotion.turn_comes(request, now)
        if not request.expired:
            request.seen_s = now
        return request

    def _use(self, row: Row, name: str, tick: int) -> None:
        self.host.touch(row.key, tick)
        if row.host_only and name not in self._host_only:
            self._writeback.allow(row)

    def _reference(self, row: Row, name: str, call: bool) -> None:
        """A worker, or a call, is going to read or write this row."""
        if call:
            row.call_refs += 1
            self._calls.setdefault(name, []).append(row)
        else:
            row.worker_refs += 1

    def _filled(self, row: Row, failed: Collection[Key], incomplete: Collection[Key]) -> bool:
        if row.key in failed or row.key in incomplete:
            self.host.counters.failed_stores += row.key in failed
            self.host.counters.incomplete += row.key not in failed
            self.host.invalidate(row)
            return False
        row.state = RowState.READY
        self.host.counters.stored += 1
        self.host.counters.bytes_written += self._state.row_bytes
        return True

    def _count_read(self, row: Row) -> None:
        row.source = CPU
        self.host.counters.bytes_read += self._state.row_bytes

    def _counters(self, name: str) -> Counters:
        for tier in self.tiers:
            if tier.spec.name == name:
                return tier.counters
        return self.host.counters

    def _flushed_before(self, generation: Generation) -> None:
        """A job of `generation` has ended: an engine flushes jobs of before a reset ahead of those that began after."""
        if self.host.has_unflushed and generation is self.host.generation:
            self.host.flushed()
