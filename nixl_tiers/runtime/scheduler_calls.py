"""SchedulerCalls: all that a scheduler, or a thread, asks of the cascade without waiting.

Every call takes the coordinator's lock for microseconds and returns; a call over many keys takes it for a part of them
at a time.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from nixl_tiers.base.chunk import Key, Namespace, check_key, check_keys
from nixl_tiers.config.schema import TiersConfig
from nixl_tiers.core.chain_rows import Chain
from nixl_tiers.core.copies import StorePlan
from nixl_tiers.core.lookup import Scan
from nixl_tiers.core.manager import Lookup, TierManager
from nixl_tiers.core.prefetch_queue import Rank
from nixl_tiers.core.prefill import MIN_SAMPLES
from nixl_tiers.core.stats import Load
from nixl_tiers.runtime.mover_link import DROPPED_PER_TURN, MoverLink
from nixl_tiers.runtime.open_loads import OpenLoads
from nixl_tiers.runtime.prefill_cache import PrefillCache
from nixl_tiers.runtime.store_results import bad_rows, ended_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nixl_tiers.core.host import Row
    from nixl_tiers.memory.region import HostRegion

REMEMBER_EVERY: Final = 1024  # steps that computed prompts; sooner while there were few
LOCATE_BATCH: Final = 64  # keys that are looked up while the lock is held
COUNT_BATCH: Final = 512  # and whose misses are counted, which takes less
TURNS_A_STEP: Final = 8  # of a cascade without storage tiers, which no supervisor turns


class SchedulerCalls:
    """The calls of a coordinator that never wait, over its core, its line to the movers and the region.

    A step is: any number of lookup and prepare_load calls, then end_step. Several threads may call.
    """

    def __init__(
        self,
        config: TiersConfig,
        region: HostRegion,
        core: TierManager,
        link: MoverLink,
        *,
        lock: threading.RLock,
        clock: Callable[[], float],
    ) -> None:
        """`lock`: guards everything; `link.changed` is a condition on it."""
        self.config = config
        self.region = region
        self.changed = link.changed
        self._core = core
        self._copies = core.copies
        self._link = link
        self._tiers = link.tiers
        self._lock = lock
        self._clock = clock
        self._open_loads = OpenLoads(region)
        self._prefill_cache: PrefillCache | None = None
        # Steps that computed prompts: as soon as a speed is known, since vLLM kills an engine that is to end at once.
        self._remember_at = MIN_SAMPLES

    @property
    def namespace(self) -> Namespace:
        return self._link.namespace

    def lookup(
        self, key: Key, request: str, position: int | None = None, first: int = 0, *, check: bool = True
    ) -> Lookup:
        """Is `key` (the chunk that ends at token `position` of the request) a hit? PENDING ends within wait_s.

        `first`: the first sub-block of the chunk that a load is going to read. `check`: whether the existence of an
        unknown key may be checked. Raises TypeError or ValueError for an invalid key.
        """
        check_key(key)
        with self._lock:
            return self._core.lookup(key, request, position, self._clock(), first, check=check)

    def scan(self, request: str, chain: Chain, start: int, first: int = 0) -> Scan:
        """All look-ups of a request in this step at once, of its chain from token `start` on: what of it to load, and
        whether the request waits for that, which ends within wait_s, or when to compute the rest is quicker.

        The keys are the caller's to check (`check_key`).
        """
        with self._lock:
            return self._core.scan(request, chain, start, self._clock(), first)

    def is_being_loaded(self, key: Key) -> bool:
        """Whether a worker is copying this row to the engine."""
        with self._lock:
            return self._core.is_being_loaded(key)

    def still_waits(self, request: str) -> bool:
        """Whether this step's `scan` of a request would say that it waits, as in the step before (TierManager)."""
        with self._lock:
            return self._core.still_waits(request, self._clock())

    def running_s(self) -> float:
        """The time in which this process ran: of a pause, as of a stopped machine, hardly anything counts."""
        return self._clock()

    def copied(self, rows: int, began_s: float, *, at_most: bool = False) -> None:
        """A load of so many rows has ended, as the engine reports, whose prepare_load was at `began_s` (`running_s`);
        `at_most`: or before, since the engine reports it at the end of a step that computed something."""
        with self._lock:
            now = self._clock()
            self._copies.copied(rows, now - began_s, now, at_most=at_most)

    def wait_for_listing(self, request: str) -> None:
        """Have a request wait for unknown keys while a tier is being listed. Call it before the first look-up."""
        with self._lock:
            self._core.wait_for_listing(request)

    def rows_to_come(self, requests: Iterable[str]) -> list[int]:
        """How many rows each of them has asked for, and waits for, of storage tiers."""
        with self._lock:
            return self._core.rows_to_come(requests)

    def wait_on(self, requests: Iterable[str], seconds: float) -> None:
        """Have those of them that wait do so for so long from now on."""
        with self._lock:
            self._core.wait_on(requests, self._clock() + seconds)

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

    def queue(self, request: str) -> None:
        """A new request waits for its turn (TierManager.queue)."""
        with self._lock:
            self._core.queue(request)

    def anticipate(self, request: str, keys: Sequence[Key], rank: Rank) -> None:
        """A new request waits for its turn: have its chain promoted before it comes (TierManager.anticipate)."""
        if not self._tiers:
            return
        with self._lock:  # the step that passes it over wakes the supervisor
            self._core.anticipate(request, keys, rank)

    def line_has_room(self, rank: Rank) -> bool:
        """Whether a request of this rank would be one of those next in line, for which anything is promoted."""
        with self._lock:
            return self._core.line_has_room(rank)

    def is_queued(self, request: str) -> bool:
        """Whether a request for which `queue` was called still waits for its turn."""
        with self._lock:
            return self._core.is_queued(request)

    def prefetch(self, keys: Sequence[Key]) -> None:
        """Promote what storage tiers hold of `keys`, in the background. Raises as `lookup`."""
        check_keys(keys)
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
            work, at_once = self._core.events.wants_turn
            work = work or bool(self._core.garbage)
            if work and not self._tiers:
                self._turns(self._clock())
        if work and self._tiers:
            self._link.wake(at_once)
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
            rows = np.array(self._copies.prepare_load(keys, request, call=call, tokens=tokens, load=load), np.int64)
            self._open_loads.begin(len(keys), request if call else None)
        return rows

    def partial(self, keys: Sequence[Key]) -> dict[int, int]:
        """Which rows of a prepared load lack sub-blocks: place in `keys` -> how many at the row's beginning."""
        with self._lock:
            return self._copies.partial(keys) if self.region.geometry.sub_blocks > 1 else {}

    def complete_load(self, keys: Collection[Key], request: str = "") -> None:
        """Workers are done reading these rows. `request`: which loaded them, for the metrics."""
        with self._lock:
            self._copies.complete_load(keys)
            self._core.savings.load_ended(request, self._clock())
            self._open_loads.end(len(keys))

    def fail_load(self, keys: Collection[Key], request: str) -> None:
        """Instead of complete_load, if a worker could not copy all of them: `request` gets no more hits."""
        with self._lock:
            self._copies.fail_load(keys, request)
            self._core.savings.load_failed(request, self._clock())
            self._open_loads.end(len(keys))

    def prepare_store(self, keys: Sequence[Key], request: str, *, call: bool = False) -> StorePlan:
        """Rows to fill with the new ones of `keys`, in prefix order; fewer than asked when the host tier is full.

        The caller owns them until complete_store; or, if `request` is the `call` of a thread, until end_call.
        Raises TypeError or ValueError for an invalid key.
        """
        check_keys(keys)
        with self._lock:
            if self._core.host.free < len(keys):
                # After a reset vLLM may never complete the old store jobs, and no new one could end for them either:
                # take back the rows of those that the workers have ended by their control words.
                host = self._core.host
                most = max(LOCATE_BATCH, len(keys))
                host.release_unflushed(ended_rows(self.region, host.unflushed_stores(most)))
            return self._copies.prepare_store(keys, request, call=call)

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
            rows = self._copies.rows_being_filled(keys)
            self._copies.complete_store(rows, *bad_rows(self.region, rows))
            work, at_once = self._core.events.wants_turn
        if work:
            self._link.wake(at_once)

    def drop_store(self, keys: Collection[Key]) -> None:
        """Instead of complete_store, if what the workers copied is of no use: these rows are no hits."""
        with self._lock:
            self._copies.drop_store(self._copies.rows_being_filled(keys))

    def end_call(self, call: str) -> None:
        """A thread's call has ended, successfully or not, and touches no row any more. Those that it was to fill are
        hits if the region's control words say so. Does nothing for a call without rows."""
        with self.changed:
            rows = self._copies.rows_being_filled_by_call(call)
            self._copies.end_call(call, *bad_rows(self.region, rows))
            self._open_loads.end_call(call)
            work, at_once = self._core.events.wants_turn
            self.changed.notify_all()
        if work:
            self._link.wake(at_once)

    def pin(self, keys: Sequence[Key], request: str) -> None:
        """Keep the host's rows of `keys` from eviction until `request` ends, if no tier below could take them."""
        with self._lock:
            self._core.pin(keys, request)

    def limit_step(self, tokens: int) -> None:
        """The engine computes no more tokens of a request in a step."""
        with self._lock:
            self._core.prefill.limit_step(tokens)

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

    def touch(self, keys: Sequence[Key], request: str) -> None:
        """vLLM used these chunks (in prefix order) from its own cache: they are marked as used within the next turns.
        Nobody may change `keys` from now on."""
        with self._lock:
            self._core.engine_hits.add(keys, request)

    def finish_request(self, request: str) -> None:
        with self._lock:
            self._core.finish_request(request)

    def take_evicted(self) -> list[Key]:
        """Keys evicted from the host tier since the last call, without those that prepare_store returned."""
        with self._lock:
            return self._core.take_evicted()

    def reset(self, *, changed: bool = False) -> None:
        """The bytes may no longer match the weights: nothing stored so far is a hit any more. `changed`: they certainly
        do not, so that `on_reset: keep` keeps nothing."""
        keep = self.config.on_reset == "keep" and not changed
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

    @contextmanager
    def awaiting_writes(self) -> Iterator[None]:
        """For as long as a thread waits for rows to be written: the supervisor looks sooner whether they are."""
        with self._lock:
            self._core.await_writes(1)
        try:
            self._link.wake(at_once=True)
            yield
        finally:
            with self._lock:
                self._core.await_writes(-1)

    def pressure(self) -> int:
        """The same, without the rows that wait for a tier to be listed: a measure for back-pressure."""
        with self._lock:
            return self._core.pressure()

    # --- inside ------------------------------------------------------------------------------------------------

    def _turns(self, now: float) -> None:
        for _ in range(TURNS_A_STEP):
            self._core.turn(now, now)
            if not self._core.events.unfinished:
                break
