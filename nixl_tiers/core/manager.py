"""TierManager: what a scheduler calls. Decides what is stored, promoted, written back and evicted; no I/O or clock.

Callers report what happened (a look-up, a finished job, a dead mover) and when (`now`, in seconds of any monotonic
clock), and carry out the jobs that it plans. The same code runs in the engine, in the stateful tests and in trace
replays. Rows come up in `promotion.py` and `promotion_jobs.py`, go down in `writeback.py`, and are copied to and from
the engine in `copies.py`; movers report to `events.py`, which also plans all that they are sent; `health.py` keeps what
fails or hangs out of the way. A *load* is a copy from host memory to the engine in `copies.py`, and from a medium to
host memory everywhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from nixl_tiers.base.chunk import Key
from nixl_tiers.base.policies import Eviction, Prefer, Write
from nixl_tiers.core.announced import Announced
from nixl_tiers.core.breaker import BreakerState
from nixl_tiers.core.chain_rows import Chain
from nixl_tiers.core.copies import Copies
from nixl_tiers.core.deferred_free import DeferredFree
from nixl_tiers.core.engine_hits import EngineHits
from nixl_tiers.core.events import Events
from nixl_tiers.core.eviction import make_policy
from nixl_tiers.core.existence import ExistenceChecks
from nixl_tiers.core.health import Health
from nixl_tiers.core.host import HostTier
from nixl_tiers.core.key_lookup import KeyLookups, Lookup
from nixl_tiers.core.limits import Limits
from nixl_tiers.core.lookup import Chains, Scan
from nixl_tiers.core.measurements import Measurements
from nixl_tiers.core.misses import Misses
from nixl_tiers.core.prefetch_queue import Rank
from nixl_tiers.core.prefill import PrefillEstimate
from nixl_tiers.core.promotion import Promotion, RequestIndex
from nixl_tiers.core.promotion_jobs import PromotionJobs
from nixl_tiers.core.retention import Retention
from nixl_tiers.core.rows import CPU, Row, RowState
from nixl_tiers.core.state import CascadeState
from nixl_tiers.core.stats import EvictionHistory, Savings, TierStats
from nixl_tiers.core.tier import Tier
from nixl_tiers.core.types import Job, TierSpec, TierState
from nixl_tiers.core.urgency import Urgency
from nixl_tiers.core.worth import Worth
from nixl_tiers.core.writeback import WriteBack


class TierManager:
    """The cascade over one host tier of `rows` rows of `row_bytes` bytes and any number of storage tiers, in order.

    A scheduler asks it what can be hit, `copies` for host rows to load from and to store to, and movers report to
    `events`.
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
        quotas: Sequence[float] = (),
    ) -> None:
        """`quotas`: which share of the host each tenant may have, from number 1 on (`set_tenant`)."""
        gone = EvictionHistory()
        self.host = HostTier(rows, partial(make_policy, policy, rows), gone, quotas)
        self.garbage = DeferredFree()
        self.limits = limits or Limits()
        self.tiers = [
            Tier(spec, number, self.limits, self.garbage, gone, sum(each.members for each in tiers[:number]))
            for number, spec in enumerate(tiers)
        ]
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
        self.movers = self._state.movers
        self._misses = Misses(self._state)
        self._writeback = WriteBack(self._state)
        self._promotion = Promotion(self._state, self.checks)
        self.savings = Savings(self.prefill, self._state.counters_of)
        self._requests = RequestIndex(self.host, self._promotion, self.savings)
        self._promotion_jobs = PromotionJobs(self._state, self.checks, self._writeback, self._promotion)
        self._measurements = Measurements(self._state, self._requests, self._promotion_jobs)
        self.engine_hits = EngineHits(self._state, self._requests, self._writeback)
        self.retention = Retention(self._state, self._promotion.prefetch_queue)
        self.health = Health(self._state, self._promotion_jobs, self._writeback)
        self.events = Events(
            self._state,
            self.checks,
            self._promotion,
            self._promotion_jobs,
            self._writeback,
            measurements=self._measurements,
            engine_hits=self.engine_hits,
            retention=self.retention,
            health=self.health,
        )
        self.urgency = Urgency(
            self._state,
            self.checks,
            self._promotion,
            self._promotion_jobs,
            self._writeback,
            measurements=self._measurements,
            engine_hits=self.engine_hits,
            retention=self.retention,
        )
        self.copies = Copies(self._state, self._requests, self._promotion, self._writeback, self.savings)
        self._keys = KeyLookups(self._state, self.checks, self._promotion)
        worth = Worth(self._state, self._requests)
        self._chains = Chains(self._state, self.checks, self._promotion, self._measurements, worth=worth)

    # --- requests ----------------------------------------------------------------------------------------------

    def lookup(
        self, key: Key, name: str, position: int | None, now: float, first: int = 0, *, check: bool = True
    ) -> Lookup:
        """Is `key` a hit for request `name`? O(1). PENDING is answered within the request's deadline.

        `first`: the first sub-block that the load is going to read; a row that lacks it is a miss. `check`: whether the
        existence of an unknown key may be checked.
        """
        request = self._requests.looked_up(name, now)
        if request.load_failed:
            return Lookup.MISS
        return self._keys.lookup(request, key, position, now, first, check=check)

    def scan(self, name: str, chain: Chain, start: int, now: float, first: int = 0) -> Scan:
        """All look-ups of a request in this step at once, of its chain from token `start` on: what of it the request
        loads, and whether it waits for that. Instead of `lookup` for each key; keys of windowed groups are looked up
        besides, after it in the same step. `first`: as in `lookup`, of each chunk."""
        request = self._requests.looked_up(name, now)
        if request.load_failed:
            return Scan(False, start)
        return self._chains.scan(request, chain, start, first, now)

    def is_being_loaded(self, key: Key) -> bool:
        """Whether a worker is copying this row to the engine."""
        row = self.host.index.get(key)
        return row is not None and row.state is RowState.READY and row.worker_refs > 0

    def still_waits(self, name: str, now: float) -> bool:
        """Whether a request that waited in the step before waits in this one too, and need not be scanned for that: a
        long queue of such requests is looked up at every step."""
        request = self._requests.by_name.get(name)
        if request is None or request.load_failed or request.generation is not self.host.generation:
            return False
        return self._chains.still_waits(request, now)

    def queue(self, name: str) -> None:
        """A new request waits for its turn: its first look-up, or that it begins (`end_step`). It waits, too, while
        another one computes."""
        if self.tiers:
            self._requests.queued.add(name)

    def anticipate(self, name: str, keys: Sequence[Key], rank: Rank) -> None:
        """A new request waits for its turn: its first look-up, which comes the sooner, the lower its `rank` is. Until
        then its chain is promoted in the background, up to the first key that no tier holds, behind what is promoted
        for requests whose turn has come, and kept for it as far as these leave room. `keys`: of its full-attention
        groups, in the order of their end tokens, from the first that the engine itself has not cached."""
        request = self._requests.get(name)
        if self.tiers and keys and request.step < 0 and not request.in_prefetch_queue:
            self._promotion.prefetch_queue.join(request, keys, rank)

    def line_has_room(self, rank: Rank) -> bool:
        """Whether a request of this rank would be one of the next in line: for others `anticipate` brings nothing."""
        return self._promotion.prefetch_queue.has_room(rank)

    def is_queued(self, name: str) -> bool:
        """Whether the request still waits for its turn."""
        return name in self._requests.queued

    def prefetch(self, keys: Sequence[Key]) -> None:
        """Promote those of `keys` that storage tiers hold, in this order, behind all that requests wait for. Rows that
        have come are ordinary rows of the host tier; of those that `line_share` of it has no room for nothing comes."""
        if self.tiers and keys:
            self._promotion.prefetch_queue.prefetch(keys)
            self._state.turn_due = True

    def set_allowed_tiers(self, name: str, tiers: Iterable[int]) -> None:
        """Let a new request load from these storage tiers only, until it is finished. Host memory is always a hit."""
        self._requests.allowed[name] = frozenset(tiers)

    def keep_in_host(self, name: str) -> None:
        """Write nothing that a new request stores to storage tiers, on its behalf, until it is finished. A chunk that
        another request, without this, stores or uses too is written like any other from then on."""
        self._requests.host_only.add(name)

    def set_tenant(self, name: str, tenant: int) -> None:
        """What a new request stores and promotes counts against this tenant's quota, until it is finished. Requests of
        different tenants must have no key in common."""
        self._requests.tenants[name] = tenant

    def tenant_of(self, name: str) -> int:
        """Of a request that has not been finished; 0: none."""
        return self._requests.tenants.get(name, 0)

    def evict_first(self, name: str) -> None:
        """Let what a new request stores, or has promoted, be evicted first, until another request uses it, in host
        memory and in tiers of this engine's own. What it uses of others' rows makes these no younger."""
        self._requests.evicted_first.add(name)

    def be_patient(self, name: str) -> None:
        """Let this request wait for unknown keys as long as for any rows, while a tier may turn out to hold them: one
        that is being listed, or that is asked and has not answered yet."""
        self._requests.get(name).patient = True

    def rows_to_come(self, names: Iterable[str]) -> list[int]:
        """How many rows each of these requests has asked for, and waits for, of storage tiers. O(1) for each."""
        return [self._requests.get(name).rows_awaited for name in names]

    def wait_on(self, names: Iterable[str], until_s: float) -> None:
        """Those of these requests that wait have this deadline from now on."""
        for name in names:
            request = self._requests.get(name)
            if request.deadline_s is not None:
                request.deadline_s = until_s

    def sources(self, keys: Iterable[Key]) -> list[str]:
        """Of hits: the tiers that their bytes came from."""
        rows = map(self.host.index.get, keys)
        return [CPU if row is None else row.source for row in rows]

    def count_misses(self, keys: Iterable[Key], name: str, now: float) -> None:
        """Count why the request has to compute these chunks, in prefix order from its first miss. Once a chunk."""
        self._misses.count(keys, self._requests.get(name), now)

    def end_step(self, began: Iterable[str] = (), preempted: Iterable[str] = ()) -> None:
        """The scheduler's step is over: its hits that it did not load may be evicted again. `began`: requests that
        compute from now on; `preempted`: those that lost what they had computed, and come back."""
        self._state.turn_due = True
        self.host.step += 1
        self.checks.end_step()
        for name in began:
            self._requests.queued.discard(name)
            request = self._requests.by_name.get(name)
            if request is None:
                continue
            if request.in_prefetch_queue:  # without a look-up: the engine's own cache had all of it
                self._promotion.prefetch_queue.leave(request)
            if request.pending:  # it loads nothing: it gave up, or the engine's own cache has what it waited for
                self._promotion.observe_wait(request, loaded=False)
                self._promotion.release(request)
        for name in sorted(preempted):  # a set, in vLLM
            if (request := self._requests.by_name.get(name)) is not None:
                self._promotion.observe_wait(request, loaded=False)  # a later one begins anew
                self._promotion.release(request)
                request.rearm()  # what it computed is stored by now: it is weighed anew

    def pin(self, keys: Iterable[Key], name: str) -> None:
        """Pin the rows of `keys` until request `name` ends, if no tier below can take them: a put of more than the host
        holds would otherwise evict its own beginning, without which the rest is worth little."""
        if any(tier.writable and tier.spec.write is not Write.OFF for tier in self.tiers):
            return
        request = self._requests.get(name)
        for key in keys:
            if (row := self.host.index.get(key)) is not None:
                request.pin(row)

    def finish_request(self, name: str) -> None:
        """The request has ended: unpin its rows."""
        self._requests.finish(name)

    # --- writes to storage tiers -------------------------------------------------------------------------------

    def demote(self, rows: Iterable[Row]) -> None:
        """The engine shuts down: queue those of the host's rows that the tier below it lacks."""
        self._writeback.demote(rows)
        self._state.turn_due = True

    def await_writes(self, threads: int) -> None:
        """So many more threads wait for rows to be written (fewer, if negative)."""
        self._writeback.awaited += threads

    def backlog(self) -> int:
        """Rows queued for or being written to the tier that is furthest behind."""
        return self._writeback.backlog()

    def pressure(self) -> int:
        """The same of the tiers that are writable now."""
        return self._writeback.pressure()

    # --- resets and time ---------------------------------------------------------------------------------------

    def reset(self, keep_tiers: bool, now: float = 0.0) -> None:
        """The bytes may no longer match the weights. Rows in use are held back (invalid, not yet free), all others
        become free in slices, and when they are needed. Those of workers become free after `flushed`, or when a job
        that began after the reset completes; those of a call when it ends. Storage tiers are emptied (of this epoch)
        unless `keep_tiers`, until `events.opened`.
        """
        self.savings.reset()
        self.copies.reset(self.garbage)
        self._promotion_jobs.reset(self.garbage)
        self._promotion.reset(self.garbage)
        self._measurements.reset()
        self.engine_hits.reset(self.garbage)
        self.retention.reset(self.garbage)
        self._state.gone.clear()
        self.checks.reset(self.garbage)
        self.host.reset(self.garbage)
        for tier in self.tiers:
            tier.drop_queues()
            if not keep_tiers:
                tier.clear()
        if (announced := self._state.announced) is not None:
            announced.reset()
        self.events.work(now)

    def flushed(self) -> None:
        """Workers have ended every job that was open at the last reset."""
        self.host.flushed()

    def turn(self, received_s: float, now: float) -> list[Job]:
        """Apply what has timed out by `received_s` (jobs, existence checks, rows that were promoted for nothing), and
        plan the jobs to start now; one slice of that (`Events.turn`)."""
        self.checks.expire(received_s)
        return self.events.turn(received_s, now)

    def rows_of(self, tier: int | None, tenant: int) -> int:
        """How many rows a storage tier, or the host (None), has of one tenant, whatever their state."""
        return self.host.rows_of(tenant) if tier is None else self.tiers[tier].index.rows.count_of(tenant)

    # --- what is where -----------------------------------------------------------------------------------------

    def announce(self, most_stored: int) -> Announced:
        """From now on keep account of what followers of the tiers are to be told (`Announced`)."""
        self._state.announced = Announced(self.host, self.tiers, most_stored)
        return self._state.announced

    def where(self, key: Key, now: float) -> str | None:
        """The first tier in which `key` could be hit now."""
        row = self.host.index.get(key)
        if row is not None and row.state is RowState.READY:
            return CPU
        return next((tier.spec.name for tier in self.tiers if tier.can_load(key, now)), None)

    def fit(self, rows: int) -> None:
        """So many rows the host has, or will have when all memory is there."""
        self._state.fit(rows)

    def counters(self) -> Mapping[str, TierStats]:
        """By tier, including the host's."""
        host = self.host.counters
        stats = {CPU: TierStats(host, host.rows, self.host.used, True, BreakerState.CLOSED, 0)}
        for tier in self.tiers:
            stats[tier.spec.name] = TierStats(
                tier.counters,
                tier.counters.rows,
                len(tier.index.slots),
                tier.state is not TierState.DOWN,
                tier.circuit,
                tier.quarantined,
                queued_loads=len(tier.to_load),
                queued_stores=len(tier.to_store) + len(tier.waiting_for_seal),
                loading=tier.rows_loading,
                storing=tier.rows_storing,
                listing=tier.state is TierState.LISTING,
            )
        return stats

    def take_samples(self) -> dict[tuple[str, str], list[float]]:
        """Of histograms, since the last call: (tier, number) -> samples."""
        return self._state.samples.take()

    @property
    def waiting_requests(self) -> int:
        """Requests that wait for promotions."""
        return self._promotion.waiting_count
