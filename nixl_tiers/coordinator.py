"""Coordinator: the cascade's core, its movers and the host region, behind calls that a scheduler makes without waiting.

Every call of a scheduler takes the lock for microseconds and returns; bytes are moved by workers and movers. Only
what surrounds the calls may wait: `open`, `start`, `wait_ready`, `flush` and `close`.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from nixl_tiers.cascade.chains import Chain, Scan
from nixl_tiers.cascade.limits import PIN_MARGIN_S, Limits
from nixl_tiers.cascade.line import Rank
from nixl_tiers.cascade.manager import Lookup, StorePlan, TierManager
from nixl_tiers.cascade.prefill import PrefillEstimate
from nixl_tiers.cascade.savings import Load
from nixl_tiers.cascade.types import TierSpec
from nixl_tiers.chunk import Key, Namespace, check_key
from nixl_tiers.clock import RunningClock
from nixl_tiers.config.schema import ConfigError, TiersConfig, format_size
from nixl_tiers.config.warnings import warnings_here, warnings_of
from nixl_tiers.interrupts import Interrupts
from nixl_tiers.lifetime import ForkedLock, finalize_once
from nixl_tiers.manifest import Description
from nixl_tiers.mover_link import DROPPED_PER_TURN, MoverLink
from nixl_tiers.open_loads import OpenLoads
from nixl_tiers.prefill_cache import PrefillCache
from nixl_tiers.store_results import bad_rows, ended_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nixl_tiers.cascade.host import Row
    from nixl_tiers.memory.region import HostRegion
    from nixl_tiers.mover.supervisor import Supervisor

log = logging.getLogger(__name__)

_coordinators: weakref.WeakSet[Coordinator] = weakref.WeakSet()
START_TIMEOUT_S: Final = 3.0
CLOSE_TIMEOUT_S: Final = 10.0
FINALIZER_TIMEOUT_S: Final = 1.0  # for a coordinator that was not closed: its process may be about to end
POLL_S: Final = 0.25  # deadlines pass without a notification
REMEMBER_EVERY: Final = 1024  # steps that computed prompts; sooner while there were few
LOCATE_BATCH: Final = 64  # keys that are looked up while the lock is held
COUNT_BATCH: Final = 512  # and whose misses are counted, which takes less


class TierRefusedError(RuntimeError):
    """A storage tier can never work as configured; one sentence that begins with the name of its field."""


class Coordinator:
    """The non-blocking interface to the tiers. One for a scheduler; several threads may call it.

    A step is: any number of lookup and prepare_load calls, then end_step. `changed` is notified when a mover has
    reported something, for callers that may wait. The region belongs to the coordinator, and is closed with it.
    """

    def __init__(
        self,
        config: TiersConfig,
        namespace: Namespace,
        region: HostRegion,
        *,
        limits: Limits | None = None,
        clock: Callable[[], float] | None = None,
        description: Description | None = None,
    ) -> None:
        """`description`: of the rows, for the manifests beside them."""
        self.region = region
        self.closed = False
        self.config = config
        self._clock = clock or RunningClock()
        self._names = config.names
        geometry = region.geometry
        specs = [
            TierSpec(
                name,
                tier.write,
                physical_slots=tier.physical_slots,
                policy=tier.eviction,
                existence_checks=tier.existence_checks,
            )
            for name, tier in zip(config.names, config.storage, strict=True)
        ]
        limits = limits or replace(
            Limits(), wait_s=config.wait_s, pin_s=config.wait_s + PIN_MARGIN_S, check_timeout_s=config.probe_s
        )
        self._core = TierManager(
            region.rows,
            geometry.row_bytes,
            specs,
            limits,
            config.cpu.eviction,
            prefill=PrefillEstimate(config.prefill_tokens_per_s),
            prefer=config.prefer,
        )
        self._prefill_cache: PrefillCache | None = None
        self._remember_at = 16  # steps that computed prompts
        self._lock = threading.RLock()
        self.changed = threading.Condition(self._lock)
        self._link = MoverLink(
            self._core,
            config,
            namespace,
            region,
            changed=self.changed,
            clock=self._clock,
            description=(description or Description()).of(config.salt),
        )
        self._tiers = self._link.tiers
        self._open_loads = OpenLoads(region)
        self._pid = os.getpid()
        self._end = finalize_once(self, partial(_end, self._link.supervisor, region))
        _coordinators.add(self)

    @classmethod
    def open(
        cls,
        config: TiersConfig,
        namespace: Namespace,
        region: HostRegion,
        timeout_s: float = START_TIMEOUT_S,
        ready_s: float | None = None,
        *,
        device: str | None = None,
        description: Description | None = None,
    ) -> Self:
        """Start a coordinator over a region that the caller created or attached; it closes the region when it closes.

        Waits at most `timeout_s` seconds for the tiers to judge their configuration, and for their listings at most
        `ready_s` of the configuration, else `ready_s`, else `timeout_s` seconds. `device`: what computes prompts, for
        its speed to be kept between starts; None if nothing does.

        Raises ConfigError if a tier can never work (no such bucket); a tier that is down is retried.
        """
        for warning in (*warnings_of(config), *warnings_here(config)):
            log.warning("nixl_tiers: %s", warning)
        coordinator = cls(config, namespace, region, description=description)
        if device is not None and config.prefill_tokens_per_s is None:
            coordinator.keep_prefill_speed(PrefillCache(namespace, device))
        try:
            given_s = timeout_s if ready_s is None else ready_s
            coordinator.start(timeout_s, given_s if config.ready_s is None else config.ready_s)
        except BaseException as error:
            coordinator._end()
            if isinstance(error, TierRefusedError):
                raise ConfigError(str(error)) from None
            raise
        return coordinator

    def start(self, timeout_s: float = START_TIMEOUT_S, ready_s: float = 0.0) -> None:
        """Start the movers. Wait up to `timeout_s` for the tiers to judge their configuration, and up to `ready_s`,
        counted from the start too, for them to list what they hold (see wait_ready).

        Raises TierRefusedError if one can never work. One that is down is retried; until it is up its rows are misses.
        """
        log.info(
            "nixl_tiers: cpu tier, %s: %d rows of %s; storage tiers: %s; namespace %s",
            format_size(self.region.nbytes),
            self.region.rows,
            format_size(self.region.geometry.row_bytes),
            ", ".join(self._names) or "none",
            self.namespace.digest.hex(),
        )
        if not self.config.storage:
            return
        began_s = time.monotonic()
        self._link.start()
        with self.changed:
            self.changed.wait_for(lambda: all(tier.answered for tier in self._tiers), max(timeout_s, ready_s))
            refusals = [f"tiers[{place}].{tier.refusal}" for place, tier in enumerate(self._tiers, 1) if tier.refusal]
        if refusals:
            self._link.supervisor.close(1.0)
            raise TierRefusedError(refusals[0])
        with self.changed:
            self.changed.wait_for(lambda: self._link.ready, max(0.0, began_s + ready_s - time.monotonic()))

    @property
    def ready(self) -> bool:
        """Whether each tier has listed all that it holds, or has reported that it is down."""
        with self._lock:
            return self._link.ready

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        """Wait until the tiers are `ready`, or until `close` begins; whether that took no longer than `timeout_s`."""
        return self._wait_for(lambda: self.closed or self.ready, timeout_s)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until every write to a storage tier has ended, or until `close` begins; whether that took no longer
        than `timeout_s`."""
        return self._wait_for(lambda: self.closed or self.backlog() == 0, timeout_s)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Write down what `flush_on_exit_s` of the configuration has time for, let the movers write their journals and
        exit, and close the region. Movers that have not exited after `timeout_s` are killed; with 0 they are not
        waited for. A second call, and one in a forked child, does nothing."""
        if self.closed or os.getpid() != self._pid:  # a forked child leaves its parent's movers alone
            return
        self.closed = True
        with self.changed:
            self.changed.notify_all()  # wake waiting threads
        try:
            if flush_s := self.config.flush_on_exit_s:
                until_s = time.monotonic() + flush_s
                self._wait_for(lambda: self.ready, flush_s)  # nothing is written to a tier before it is listed
                self.demote_all()
                self._wait_for(lambda: self.backlog() == 0, max(0.0, until_s - time.monotonic()))
        finally:
            with self._lock:
                self._link.flush_recent_uses()
                samples = self._core.prefill.samples()
            if self._prefill_cache is not None and samples:
                self._prefill_cache.remember(samples)
            self._end.detach()
            _end(self._link.supervisor, self.region, timeout_s)

    def keep_prefill_speed(self, cache: PrefillCache) -> None:
        """Go on with the prefill estimate of the last start, and keep it for the next."""
        samples = cache.recall()
        with self._lock:
            self._core.prefill.restore(samples)
            self._prefill_cache = cache
            speed = self._core.prefill.tokens_per_s
        if speed is not None:
            log.info("nixl_tiers: at the last start %s computed %.0f tokens of prompts a second", cache.device, speed)

    @property
    def namespace(self) -> Namespace:
        return self._link.namespace

    @property
    def mover_pids(self) -> list[int | None]:
        return self._link.supervisor.pids

    # --- what a scheduler calls --------------------------------------------------------------------------------

    def lookup(self, key: Key, request: str, position: int | None = None, first: int = 0) -> Lookup:
        """Is `key` (the chunk that ends at token `position` of the request) a hit? PENDING ends within wait_s.

        `first`: the first sub-block of the chunk that a load is going to read. Raises TypeError or ValueError for an
        invalid key.
        """
        check_key(key)
        with self._lock:
            return self._core.lookup(key, request, position, self._clock(), first)

    def scan(self, request: str, chain: Chain, start: int, first: int = 0) -> Scan:
        """All look-ups of a request in this step at once, of its chain from token `start` on: what of it to load, and
        whether the request waits for that, which ends within wait_s, or when to compute the rest is quicker.

        The keys are the caller's to check (`check_key`).
        """
        with self._lock:
            return self._core.scan(request, chain, start, self._clock(), first)

    def copied(self, rows: int, seconds: float) -> None:
        """A load of so many rows has taken so long, from prepare_load to the engine's report that it has ended."""
        with self._lock:
            self._core.copied(rows, seconds, self._clock())

    def wait_for_listing(self, request: str) -> None:
        """Have a request wait for unknown keys while a tier is being listed. Call it before the first look-up."""
        with self._lock:
            self._core.wait_for_listing(request)

    def count_misses(self, keys: Sequence[Key], request: str) -> None:
        """Count why the request has to compute these chunks, in prefix order from its first miss. Once a chunk."""
        for start in range(0, len(keys), COUNT_BATCH):
            with self._lock:
                self._core.count_misses(keys[start : start + COUNT_BATCH], request, self._clock())

    def set_allowed_tiers(self, request: str, tiers: Iterable[int]) -> None:
        """Have a new request load from these storage tiers only (numbered as configured, from 0), until it is
        finished. Host memory is always a hit."""
        with self._lock:
            self._core.set_allowed_tiers(request, tiers)

    def anticipate(self, request: str, keys: Sequence[Key], rank: Rank) -> None:
        """A new request waits for its turn: have its chain promoted before it comes (TierManager.anticipate)."""
        if not self._tiers:
            return
        with self._lock:
            self._core.anticipate(request, keys, rank)
        self._link.supervisor.wake()

    def prefetch(self, keys: Sequence[Key]) -> None:
        """Promote what storage tiers hold of `keys`, in the background. Raises as `lookup`."""
        for key in keys:
            check_key(key)
        if not self._tiers:
            return
        with self._lock:
            self._core.prefetch(keys)
        self._link.supervisor.wake()

    def keep_in_host(self, request: str) -> None:
        """Have nothing that a new request stores written to storage tiers on its behalf, until it is finished. Another
        request that stores or uses a chunk of it lifts that for the chunk."""
        with self._lock:
            self._core.keep_in_host(request)

    def source(self, key: Key) -> str:
        """ "cpu", or the storage tier that the bytes of this hit were promoted from."""
        with self._lock:
            return self._core.source(key)

    def end_step(self, began: Iterable[str] = (), preempted: Iterable[str] = ()) -> None:
        with self._lock:
            self._core.end_step(began, preempted)
            work = self._core.events.busy or bool(self._core.garbage)
            if work and not self._tiers:
                now = self._clock()
                self._core.turn(now, now)
        if work and self._tiers:
            self._link.supervisor.wake()
        elif work:
            self._core.garbage.drop(DROPPED_PER_TURN)

    def prepare_load(
        self,
        keys: Sequence[Key],
        request: str,
        *,
        call: bool = False,
        tokens: Sequence[int] = (),
        end: int | None = None,
    ) -> NDArray[np.int64]:
        """Host rows of keys that this step's look-ups called hits, pinned until complete_load; or, where `request` is
        the `call` of a thread, until end_call. `tokens`: of each key, and `end`: the token of the request before which
        they end, for the metrics."""
        with self._lock:
            load = None if end is None else Load(max(0, end - sum(tokens)), end, self._clock())
            rows = np.array(self._core.prepare_load(keys, request, call=call, tokens=tokens, load=load), np.int64)
            self._open_loads.begin(len(keys), request if call else None)
        return rows

    def partial(self, keys: Sequence[Key]) -> dict[int, int]:
        """Which rows of a prepared load lack sub-blocks: place in `keys` -> how many at the row's beginning."""
        with self._lock:
            return self._core.partial(keys) if self.region.geometry.sub_blocks > 1 else {}

    def complete_load(self, keys: Collection[Key], request: str = "") -> None:
        """Workers are done reading these rows. `request`: which loaded them, for the metrics."""
        with self._lock:
            self._core.complete_load(keys)
            self._core.savings.load_ended(request, self._clock())
            self._open_loads.end(len(keys))

    def fail_load(self, keys: Collection[Key], request: str) -> None:
        """Instead of complete_load, if a worker could not copy all of them: `request` gets no more hits."""
        with self._lock:
            self._core.fail_load(keys, request)
            self._core.savings.load_failed(request, self._clock())
            self._open_loads.end(len(keys))

    def prepare_store(self, keys: Sequence[Key], request: str, *, call: bool = False) -> StorePlan:
        """Rows to fill with the new ones of `keys`, in prefix order; fewer than asked when the host tier is full.

        The caller owns them until complete_store; or, if `request` is the `call` of a thread, until end_call.
        Raises TypeError or ValueError for an invalid key.
        """
        for key in keys:
            check_key(key)
        with self._lock:
            if self._core.host.free < len(keys):
                # After a reset vLLM may never complete the old store jobs, and no new one could end for them either:
                # take back the rows of those that the workers have ended by their control words.
                host = self._core.host
                most = max(LOCATE_BATCH, len(keys))
                host.release_unflushed(ended_rows(self.region, host.unflushed_stores(most)))
            return self._core.prepare_store(keys, request, call=call)

    def look_on(self) -> bool:
        """Whether the last prepare_store found too little room only because it looks at a bounded number of pinned
        rows, and there are others behind them: prepare_store finds them now."""
        while True:
            with self._lock:
                if not self._core.host.searching:
                    return False
                if self._core.host.look_on():
                    return True

    def complete_store(self, keys: Collection[Key]) -> None:
        """Every worker has ended the store job of `keys`; the region's control words say which rows are good."""
        with self._lock:
            rows = self._core.rows_being_filled(keys)
            self._core.complete_store(rows, *bad_rows(self.region, rows))
            work = self._core.events.busy
        if work:
            self._link.supervisor.wake()

    def end_call(self, call: str) -> None:
        """A thread's call has ended, successfully or not, and touches no row any more. Those that it was to fill are
        hits if the region's control words say so. Does nothing for a call without rows."""
        with self.changed:
            rows = self._core.rows_being_filled_by_call(call)
            self._core.end_call(call, *bad_rows(self.region, rows))
            self._open_loads.end_call(call)
            work = self._core.events.busy
            self.changed.notify_all()
        if work:
            self._link.supervisor.wake()

    def pin(self, keys: Sequence[Key], request: str) -> None:
        """Keep the host's rows of `keys` from eviction until `request` ends, if no tier below could take them."""
        with self._lock:
            self._core.pin(keys, request)

    def observe_prefill(self, tokens: int, context: float, seconds: float) -> None:
        """A step has computed `tokens` tokens of prompts, with `context` tokens up to each on average, in `seconds`."""
        with self._lock:
            prefill = self._core.prefill
            prefill.observe(tokens, context, seconds)
            if self._prefill_cache is None or prefill.seen < self._remember_at:
                return
            self._remember_at = prefill.seen + min(prefill.seen, REMEMBER_EVERY)
            samples = prefill.samples()
        # A file system may take its time, and this is the scheduler's thread.
        threading.Thread(
            target=self._prefill_cache.remember, args=(samples,), name="nixl_tiers prefill", daemon=True
        ).start()

    def touch(self, keys: Iterable[Key], request: str) -> None:
        """vLLM used these chunks (in prefix order) from its own cache: mark them as used. Call it before deeper
        keys."""
        with self._lock:
            self._core.touch(keys, request)

    def finish_request(self, request: str) -> None:
        with self._lock:
            self._core.finish_request(request)

    def take_evicted(self) -> list[Key]:
        """Keys evicted from the host tier since the last call, without those that prepare_store returned."""
        with self._lock:
            return self._core.take_evicted()

    def reset(self) -> None:
        """The bytes may no longer match the weights: nothing stored so far is a hit any more."""
        keep = self.config.on_reset == "keep"
        with self._lock:
            self._core.reset(keep, self._clock())
            self._open_loads.reset()
            if not keep:
                # Epoch 0 stands for the weights as they were loaded; after a reset no other engine has the same ones.
                self._link.reopen(replace(self.namespace, epoch=secrets.randbits(63) | 1))

    def flushed(self) -> None:
        """Workers have ended every job of before the last reset (reported by vLLM 0.33; on older versions it is found
        out from the jobs that complete)."""
        with self._lock:
            self._core.flushed()

    def where(self, key: Key) -> str | None:
        """The first tier that holds `key` now. Starts no promotion. Raises as `lookup`."""
        check_key(key)
        with self._lock:
            return self._core.where(key, self._clock())

    def locate(self, keys: Sequence[Key]) -> list[str | None]:
        """`where` for many keys."""
        places: list[str | None] = []
        for start in range(0, len(keys), LOCATE_BATCH):
            with self._lock:
                now = self._clock()
                places += [self._core.where(key, now) for key in keys[start : start + LOCATE_BATCH]]
        return places

    def demote_all(self) -> None:
        """Queue all rows that a tier with `write: on_evict` does not hold yet, because the process is about to exit."""
        rows: list[Row] = []
        slices = self._core.host.in_slices(LOCATE_BATCH)
        part: list[Row] | None = []
        while part is not None:
            rows += part
            with self._lock:
                part = next(slices, None)
        for start in range(0, len(rows), LOCATE_BATCH):
            with self._lock:
                self._core.demote(rows[start : start + LOCATE_BATCH])
        self._link.supervisor.wake()

    def backlog(self) -> int:
        """Rows that are still to be written to some tier; 0 when all writes have ended, successfully or not."""
        with self._lock:
            return self._core.backlog()

    def pressure(self) -> int:
        """The same, without the rows that wait for a tier to be listed: a measure for back-pressure."""
        with self._lock:
            return self._core.pressure()

    def counters(self) -> dict[str, dict[str, float]]:
        """By tier: monotonic counters (rows, or bytes where the name says so) and gauges. What they are called as
        metrics, and which of them a tier has: `nixl_tiers/metrics.py`."""
        with self._lock:
            gauges = {tier.name: tier.gauges() for tier in self._tiers}
            gauges["cpu"] = {
                "used_bytes": self._core.host.used * self.region.geometry.row_bytes,
                "capacity_bytes": self.config.cpu.capacity,
                "denials": 0.0,
                "huge_page_bytes": float(self.region.huge_bytes or 0),
                "listed_rows": 0.0,
                "waiting_requests": float(self._core.waiting_requests),
                "prefill_tokens_per_s": self._core.prefill.tokens_per_s or 0.0,
            }
            return {
                name: {
                    **vars(tier.counters),
                    "dropped": tier.counters.dropped,
                    "failed": tier.counters.failed,
                    "missed": tier.counters.missed,
                    "rows": tier.rows,
                    "up": float(tier.up),
                    "breaker": float(tier.circuit),
                    "quarantined": float(tier.quarantined),
                    "queued_loads": float(tier.queued_loads),
                    "queued_stores": float(tier.queued_stores),
                    "loading": float(tier.loading),
                    "storing": float(tier.storing),
                    **gauges[name],
                }
                for name, tier in self._core.counters().items()
            }

    def after_tick(self, callback: Callable[[], None]) -> None:
        """Have `callback` called on the supervisor's thread, without the lock, at least once a second while there are
        storage tiers; it must not wait, nor keep the coordinator alive."""
        self._link.after_tick = callback

    def take_samples(self) -> dict[tuple[str, str], list[float]]:
        """Of histograms, since the last call: (tier, number) -> samples."""
        with self._lock:
            return self._core.take_samples()

    def problems(self) -> dict[str, str]:
        """By tier: why it is down or what its medium denies, in words; empty where nothing is known to be wrong."""
        with self._lock:
            return {"cpu": "", **{tier.name: tier.log.problem for tier in self._tiers}}

    def leave_to_parent(self) -> None:
        """In a forked child: release what belongs to the parent; every call raises RuntimeError from then on."""
        self._lock = ForkedLock(self._pid)  # type: ignore[assignment]
        self.changed = self._link.changed = ForkedLock(self._pid)  # type: ignore[assignment]
        self._link.supervisor.leave_to_parent()

    # --- inside ------------------------------------------------------------------------------------------------

    def _wait_for(self, condition: Callable[[], bool], timeout_s: float | None) -> bool:
        """Poll `condition` with the lock held, and at every change. May be interrupted by Ctrl-C."""
        until_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        with Interrupts() as interrupts, self.changed:
            while not condition():
                if (left_s := until_s - time.monotonic()) <= 0:
                    return False
                self.changed.wait(min(POLL_S, left_s))
                interrupts.point()
        return True


def _end(supervisor: Supervisor, region: HostRegion, timeout_s: float = FINALIZER_TIMEOUT_S) -> None:
    supervisor.close(timeout_s)
    region.close()


def _leave_to_parent() -> None:
    for coordinator in list(_coordinators):
        coordinator.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
