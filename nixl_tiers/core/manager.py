"""TierManager: what a scheduler calls. Decides what is stored, promoted, written back and evicted; no I/O or clock.

Callers report what happened (a look-up, a finished job, a dead mover) and when (`now`, in seconds of any monotonic
clock), and carry out the jobs that it plans. The same code runs in the engine, in the stateful tests and in trace
replays. Rows come up in `promotion.py` and `promotion_jobs.py`, go down in `writeback.py`, and are copied to and from
the engine in `copies.py`; movers report to `turn.py`, which also plans all that they are sent; `health.py` keeps what
fails or hangs out of the way. A *load* of a request is a copy from host memory to the engine (`copies.py`), a load of a
tier one from its medium to host memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat

from nixl_tiers.base.chunk import Key
from nixl_tiers.base.policies import Prefer, Write
from nixl_tiers.core.announced import Announced
from nixl_tiers.core.chain_rows import Chain
from nixl_tiers.core.copies import Copies
from nixl_tiers.core.deferred_free import DeferredFree
from nixl_tiers.core.existence import ExistenceChecks
from nixl_tiers.core.health import Health
from nixl_tiers.core.host import HostTier
from nixl_tiers.core.jobs import Jobs
from nixl_tiers.core.lookup import Chains, KeyLookups, Lookup, Scan
from nixl_tiers.core.misses import Cause, Misses
from nixl_tiers.core.prefetch_queue import Rank
from nixl_tiers.core.prefill import PrefillEstimate
from nixl_tiers.core.probes import Measurements, Probes
from nixl_tiers.core.promotion import Promotion, RequestIndex
from nixl_tiers.core.promotion_jobs import PromotionJobs
from nixl_tiers.core.requests import FAILED, NO_WISHES, OPEN, RUNNING, RequestWishes
from nixl_tiers.core.retention import Retention
from nixl_tiers.core.rows import CPU, READY, Row
from nixl_tiers.core.state import CascadeState
from nixl_tiers.core.stats import EvictionHistory, Savings, TierStats
from nixl_tiers.core.tier import Tier
from nixl_tiers.core.turn import Events
from nixl_tiers.core.types import BreakerState, Job, Limits, TierSpec, TierState
from nixl_tiers.core.writeback import WriteBack


class TierManager:
    """The cascade over one host tier of `rows` rows of `row_bytes` bytes and any number of storage tiers, in order.

    A scheduler, or a thread that uses the store without an engine, asks it what can be hit, and for host rows to load
    from and to store to; movers report to `events`.
    """

    def __init__(
        self,
        rows: int,
        row_bytes: int,
        tiers: Sequence[TierSpec],
        limits: Limits | None = None,
        *,
        prefill: PrefillEstimate | None = None,
        prefer: Prefer = "latency",
        quotas: Sequence[float] = (),
    ) -> None:
        """`quotas`: which share of the host each tenant may have, from number 1 on (`set_tenant`)."""
        gone = EvictionHistory()
        self.host = HostTier(rows, gone, quotas)
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
        self._jobs = Jobs(self._state)
        self._misses = Misses(self._state)
        self.writeback = WriteBack(self._state, self._jobs)
        self._promotion = Promotion(self._state, self.checks)
        self._savings = Savings(self.prefill, self._state.counters_of)
        self._requests = RequestIndex(self.host, self._promotion, self._savings)
        self._promotion_jobs = PromotionJobs(self._state, self._jobs, self.checks, self.writeback, self._promotion)
        self._measurements = Measurements(self._state, self._requests, self._promotion_jobs)
        self._retention = Retention(self._state, self._promotion.prefetch_queue)
        self.health = Health(self._state, self._jobs, self._promotion_jobs, self.writeback)
        self.events = Events(
            self._state,
            self.checks,
            self._promotion,
            self._promotion_jobs,
            self.writeback,
            jobs=self._jobs,
            measurements=self._measurements,
            probes=Probes(self._state, self._jobs, self.writeback),
            retention=self._retention,
            health=self.health,
        )
        self._copies = Copies(self._state, self._requests, self._promotion, self.writeback, self._savings)
        self._keys = KeyLookups(self._state, self.checks, self._promotion)
        self._chains = Chains(self._state, self.checks, self._promotion, self._measurements, self._requests)
        # What one part does for a front end: its calls as they are.
        self.prepare_load = self._copies.prepare_load
        self.complete_load = self._copies.complete_load
        self.prepare_store = self._copies.prepare_store
        self.complete_store = self._copies.complete_store
        self.end_call = self._copies.end_call
        self.used = self._copies.used
        self.retain = self._retention.retain
        self.pressure = self.writeback.pressure
        self.flushed = self.host.flushed
        self.fit = self._state.fit
        self.take_samples = self._state.samples.take

    # --- requests ----------------------------------------------------------------------------------------------

    def arrive(self, name: str, wishes: RequestWishes = NO_WISHES) -> None:
        """A new request waits for its turn: its first look-up, or that it begins (`end_step`). It waits, too, while
        another one computes."""
        if wishes != NO_WISHES:
            self._requests.wishes[name] = wishes
        if self.tiers:
            self._requests.before_turn.add(name)

    def set_tenant(self, name: str, tenant: int) -> None:
        """Of a request that has arrived, before its first look-up."""
        self._requests.wishes[name] = self._requests.wishes.get(name, NO_WISHES)._replace(tenant=tenant)

    def anticipate(self, name: str, keys: Sequence[Key], rank: Rank) -> bool | None:
        """A request waits for its turn, which comes the sooner, the lower its `rank` is. Until then its chain is
        promoted in the background, up to the first key that no tier holds, behind what is promoted for requests whose
        turn has come, and kept for it as far as these leave room. `keys`: of its full-attention groups, in the order of
        their end tokens, from the first that the engine itself has not cached.

        Without keys it only says whether the request would be one of the next in line: for others it brings nothing.
        None, and nothing: its turn has come, or it has ended."""
        line = self._promotion.prefetch_queue
        if name not in self._requests.before_turn:
            return None
        if not keys:
            return line.has_room(rank)
        if not (request := self._requests.get(name)).queued:
            line.join(request, keys, rank)
        return True

    def look_up(self, name: str, chain: Chain, start: int, now: float, first: int = 0) -> Scan:
        """All look-ups of a request in this step at once, of its chain from token `start` on: what of it the request
        loads, and whether it waits for that. Keys of windowed groups are looked up besides (`look_up_keys`), after it
        in the same step. `first`: the first sub-block that the load is going to read of a chunk; one whose row lacks it
        is a miss."""
        known = self._requests.by_name.get(name)
        if known is not None and self._chains.shares(known, chain, start):
            return Scan(True, chain.end)
        request = self._requests.looked_up(name, now)
        if request.state is FAILED:
            return Scan(False, start)
        return self._chains.scan(request, chain, start, first, now)

    def look_up_keys(
        self,
        name: str,
        keys: Sequence[Key],
        now: float,
        first: int = 0,
        *,
        positions: Iterable[int | None] = repeat(None),
        check: bool = True,
    ) -> list[Lookup]:
        """Which of `keys`, whose ends are at these tokens of the request, are hits for it? O(1) a key. PENDING is
        answered within the request's deadline. `check`: whether the existence of unknown keys may be checked."""
        request = self._requests.looked_up(name, now)
        if request.state is FAILED:
            return [Lookup.MISS] * len(keys)
        look_up = self._keys.lookup
        places, hits = zip(keys, positions, strict=False), list[Row]()
        answers = [look_up(request, key, position, now, first, hits, check=check) for key, position in places]
        self.host.hit(hits)
        return answers

    def sources(self, keys: Iterable[Key]) -> list[str]:
        """Of hits: the tiers that their bytes came from."""
        rows = map(self.host.index.get, keys)
        return [CPU if row is None else row.source for row in rows]

    def count_misses(self, name: str, keys: Iterable[Key], now: float, last: Cause = None) -> Cause:
        """Count why the request has to compute these chunks, in prefix order from its first miss. Once a chunk.
        `last`: what this returned of the chunks before these."""
        return self._misses.count(keys, self._requests.get(name), now, last)

    def end_step(self, began: Iterable[str] = (), preempted: Iterable[str] = ()) -> None:
        """The scheduler's step is over: its hits that it did not load may be evicted again. `began`: requests that
        compute from now on; `preempted`: those that lost what they had computed, and come back."""
        self._state.turn_due = True
        self.host.end_step()
        self.checks.end_step()
        for name in began:
            self._requests.before_turn.discard(name)
            request = self._requests.by_name.get(name)
            if request is None:
                continue
            if request.queued:  # without a look-up: the engine's own cache had all of it
                self._promotion.prefetch_queue.leave(request)
            if request.waiting or request.gave_up:  # it loads nothing: or the engine's own cache has what it waited for
                self._promotion.observe_wait(request, loaded=False)
                self._promotion.release(request)
            request.become(RUNNING)
        for name in sorted(preempted):  # a set, in vLLM
            if (request := self._requests.by_name.get(name)) is not None:
                self._promotion.observe_wait(request, loaded=False)  # a later one begins anew
                self._promotion.release(request)
                request.weigh_anew(OPEN)  # what it computed is stored by now: it is weighed anew

    def pin(self, name: str, keys: Iterable[Key]) -> None:
        """Pin the rows of `keys` until the request ends, if no tier below can take them: a put of more than the host
        holds would otherwise evict its own beginning, without which the rest is worth little."""
        if any(tier.writable and tier.spec.write is not Write.OFF for tier in self.tiers):
            return
        request = self._requests.get(name)
        for key in keys:
            if (row := self.host.index.get(key)) is not None:
                request.pin(row)

    def finish(self, name: str) -> None:
        """The request has ended: unpin its rows."""
        self._requests.finish(name)

    def prefetch(self, keys: Sequence[Key], at_s: float | None = None, tenant: int = 0) -> bool:
        """Promote those of `keys` that storage tiers hold, in this order, behind all that requests wait for. Rows that
        have come are ordinary rows of the host tier; of those that `line_share` of it has no room for nothing comes.
        `at_s`: not before this time; False, and nothing, if more than the host can hold is planned, or there is nothing
        to promote from. Nobody may change `keys`."""
        if not self.tiers:
            return False
        if at_s is not None:
            return self._retention.plan(keys, at_s, tenant)
        if keys:
            self._promotion.prefetch_queue.prefetch(keys, tenant)
            self._state.turn_due = True
        return True

    # --- resets and time ---------------------------------------------------------------------------------------

    def reset(self, keep_tiers: bool, now: float = 0.0) -> None:
        """The bytes may no longer match the weights. Rows in use are held back (invalid, not yet free), all others
        become free in slices, and when they are needed. Those of workers become free after `flushed`, or when a job
        that began after the reset completes; those of a call when it ends. Storage tiers are emptied (of this epoch)
        unless `keep_tiers`, until `events.opened`.
        """
        self._savings.reset()
        self._copies.reset(self.garbage)
        self._promotion.reset(self.garbage)
        self._measurements.reset()
        self._retention.reset(self.garbage)
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

    def turn(self, received_s: float, now: float) -> list[Job]:
        """Apply what has timed out by `received_s` (jobs, existence checks, rows that were promoted for nothing), and
        plan the jobs to start now; one slice of that (`Events.turn`)."""
        self.checks.expire(received_s)
        return self.events.turn(received_s, now)

    # --- what is where -----------------------------------------------------------------------------------------

    def announce(self, most_stored: int) -> Announced:
        """From now on keep account of what followers of the tiers are to be told (`Announced`)."""
        self._state.announced = Announced(self.host, self.tiers, most_stored)
        return self._state.announced

    def where(self, keys: Iterable[Key]) -> list[str | None]:
        """Of each key the first tier in which it could be hit now."""
        return [self._where(key) for key in keys]

    def rows_to_come(self, names: Iterable[str]) -> list[tuple[int, int]]:
        """Of each of these requests: how many of the rows that it has asked storage tiers for have come so far, and for
        how many it waits."""
        return [(each.rows_come, each.rows_to_come) for each in map(self._requests.get, names)]

    def wait_on(self, names: Iterable[str], until_s: float) -> None:
        """Those of these requests that wait have this deadline from now on."""
        for name in names:
            request = self._requests.get(name)
            if request.deadline_s is not None:
                request.deadline_s = until_s

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
                queued_loads=tier.rows_to_load,
                queued_stores=len(tier.to_store) + len(tier.waiting_for_seal),
                loading=tier.rows_loading,
                storing=tier.rows_storing,
                listing=tier.state is TierState.LISTING,
            )
        return stats

    @property
    def waiting_requests(self) -> int:
        """Requests that wait for promotions."""
        return len(self._promotion.waiting)

    # --- inside ------------------------------------------------------------------------------------------------

    def _where(self, key: Key) -> str | None:
        row = self.host.index.get(key)
        if row is not None and row.state is READY:
            return CPU
        return next((tier.spec.name for tier in self.tiers if tier.can_load(key)), None)
