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
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from nixl_tiers.cascade.limits import PIN_MARGIN_S, Limits
from nixl_tiers.cascade.manager import Lookup, StorePlan, TierManager
from nixl_tiers.cascade.types import TierSpec
from nixl_tiers.chunk import Key, Namespace, check_key
from nixl_tiers.clock import RunningClock
from nixl_tiers.config.schema import ConfigError, TiersConfig, format_size
from nixl_tiers.config.warnings import warnings_here, warnings_of
from nixl_tiers.interrupts import Interrupts
from nixl_tiers.lifetime import ForkedLock, finalize_once
from nixl_tiers.mover_link import DROPPED_PER_TURN, MoverLink
from nixl_tiers.store_results import bad_rows, ended_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from nixl_tiers.memory.region import HostRegion
    from nixl_tiers.mover.supervisor import Supervisor

log = logging.getLogger(__name__)

_coordinators: weakref.WeakSet[Coordinator] = weakref.WeakSet()
START_TIMEOUT_S: Final = 3.0
CLOSE_TIMEOUT_S: Final = 10.0
FINALIZER_TIMEOUT_S: Final = 1.0  # for a coordinator that was not closed: its process may be about to end
POLL_S: Final = 0.25  # deadlines pass without a notification
LOCATE_BATCH: Final = 64  # keys that are looked up while the lock is held


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
    ) -> None:
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
        self._core = TierManager(region.rows, geometry.row_bytes, specs, limits, config.cpu.eviction)
        self._lock = threading.RLock()
        self.changed = threading.Condition(self._lock)
        self._link = MoverLink(self._core, config, namespace, region, changed=self.changed, clock=self._clock)
        self._tiers = self._link.tiers
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
    ) -> Self:
        """Start a coordinator over a region that the caller created or attached; it closes the region when it closes.

        Waits at most `timeout_s` seconds for the tiers to judge their configuration, and for their listings at most
        `ready_s` of the configuration, else `ready_s`, else `timeout_s` seconds.

        Raises ConfigError if a tier can never work (no such bucket); a tier that is down is retried.
        """
        for warning in (*warnings_of(config), *warnings_here(config)):
            log.warning("nixl_tiers: %s", warning)
        coordinator = cls(config, namespace, region)
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
            self._end.detach()
            _end(self._link.supervisor, self.region, timeout_s)

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

    def wait_for_listing(self, request: str) -> None:
        """Have a request wait for unknown keys while a tier is being listed. Call it before the first look-up."""
        with self._lock:
            self._core.wait_for_listing(request)

    def set_allowed_tiers(self, request: str, tiers: Iterable[int]) -> None:
        """Have a new request load from these storage tiers only (numbered as configured, from 0), until it is
        finished. Host memory is always a hit."""
        with self._lock:
            self._core.set_allowed_tiers(request, tiers)

    def source(self, key: Key) -> str:
        """ "cpu", or the storage tier that the bytes of this hit were promoted from."""
        with self._lock:
            return self._core.source(key)

    def end_step(self) -> None:
        with self._lock:
            self._core.end_step()
            work = self._core.events.busy or bool(self._core.garbage)
            if work and not self._tiers:
                self._core.expire(self._clock())
        if work and self._tiers:
            self._link.supervisor.wake()
        elif work:
            self._core.garbage.drop(DROPPED_PER_TURN)

    def prepare_load(self, keys: Sequence[Key], request: str, *, call: bool = False) -> NDArray[np.int64]:
        """Host rows of keys that this step's look-ups called hits, pinned until complete_load; or, where `request` is
        the `call` of a thread, until end_call."""
        with self._lock:
            return np.array(self._core.prepare_load(keys, request, call=call), np.int64)

    def partial(self, keys: Sequence[Key]) -> dict[int, int]:
        """Which rows of a prepared load lack sub-blocks: place in `keys` -> how many at the row's beginning."""
        with self._lock:
            return self._core.partial(keys) if self.region.geometry.sub_blocks > 1 else {}

    def complete_load(self, keys: Collection[Key]) -> None:
        with self._lock:
            self._core.complete_load(keys)

    def fail_load(self, keys: Collection[Key], request: str) -> None:
        """Instead of complete_load, if a worker could not copy all of them: `request` gets no more hits."""
        with self._lock:
            self._core.fail_load(keys, request)

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
                host.release_unflushed(ended_rows(self.region, host.unflushed_stores(LOCATE_BATCH)))
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
            work = self._core.events.busy
            self.changed.notify_all()
        if work:
            self._link.supervisor.wake()

    def pin(self, keys: Sequence[Key], request: str) -> None:
        """Keep the host's rows of `keys` from eviction until `request` ends, if no tier below could take them."""
        with self._lock:
            self._core.pin(keys, request)

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
        with self._lock:
            rows = list(self._core.host.index.values())
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
        """By tier: monotonic counters (rows, or bytes where the name says so) and gauges."""
        with self._lock:
            gauges = {tier.name: tier.gauges() for tier in self._tiers}
            gauges["cpu"] = {
                "used_bytes": self._core.host.used * self.region.geometry.row_bytes,
                "capacity_bytes": self.config.cpu.capacity,
                "denials": 0.0,
                "huge_page_bytes": float(self.region.huge_bytes or 0),
                "listed_rows": 0.0,
            }
            return {
                name: {
                    **asdict(tier.counters),
                    "rows": tier.rows,
                    "up": float(tier.up),
                    "breaker": float(tier.circuit),
                    "quarantined": float(tier.quarantined),
                    **gauges[name],
                }
                for name, tier in self._core.counters().items()
            }

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
