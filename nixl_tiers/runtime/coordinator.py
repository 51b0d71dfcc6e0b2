"""Coordinator: the core, its movers and the host region, from open to close.

A front end holds the core (`with coordinator.core() as core`) and asks it for what it wants. What needs the region or
the movers besides is a method here. None of that waits, as bytes are moved by workers and movers; only `open`, `start`,
`wait_ready`, `flush` and `close` may.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, Self

from nixl_tiers.base import native
from nixl_tiers.base.chunk import Key, Namespace, check_keys
from nixl_tiers.base.clock import RunningClock
from nixl_tiers.base.lifetime import ForkedLock, finalize_once
from nixl_tiers.base.manifest import Description
from nixl_tiers.base.times import PRODUCTION, Times
from nixl_tiers.config.here import Here
from nixl_tiers.config.quotas import Tenants
from nixl_tiers.config.schema import ConfigError, TiersConfig, format_size
from nixl_tiers.config.warnings import warnings_of
from nixl_tiers.core.copies import LoadPlan, StorePlan
from nixl_tiers.core.turn import NOW
from nixl_tiers.core.types import Limits
from nixl_tiers.runtime.blocking import Waits
from nixl_tiers.runtime.copies import OpenLoads, bad_rows, ended_rows, take_memory
from nixl_tiers.runtime.hold import Hold
from nixl_tiers.runtime.make_core import make_core
from nixl_tiers.runtime.mover_link import MoverLink
from nixl_tiers.runtime.numbers import counters, problems
from nixl_tiers.runtime.prefill_cache import PrefillCache, PrefillSpeed

if TYPE_CHECKING:
    from nixl_tiers.memory.region import HostRegion
    from nixl_tiers.mover.supervisor import Supervisor

log = logging.getLogger(__name__)

_coordinators: weakref.WeakSet[Coordinator] = weakref.WeakSet()
LOCATE_BATCH: Final = 64  # that are looked up in one hold
COUNT_BATCH: Final = 512  # whose misses are counted, or rows retained, which takes less


class TierRefusedError(RuntimeError):
    """A storage tier can never work as configured; one sentence that begins with the name of its field."""


class Coordinator:
    """The tiers of one scheduler. `changed` is notified when a mover has reported something, for callers that may wait.
    The region belongs to the coordinator, and is closed with it. Several threads may call.

    `now()`: the seconds in which this process ran, which the core takes as time: of a pause, as of a stopped machine,
    hardly anything counts, where there are storage tiers.
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
        here: Here | None = None,
        times: Times = PRODUCTION,
    ) -> None:
        """`description`: of the rows, for the manifests beside them. `here`: as of `open`."""
        self.here = here or Here()
        self.times = times
        self.tenants = Tenants(config.quotas)
        core = make_core(config, self.tenants, region, limits, times)
        if region.ranks.ready_rows is not None:
            core.host.limit = 0
            take_memory(core, region)
        lock = threading.RLock()
        self.config = config
        self.region = region
        self.changed = threading.Condition(lock)
        # Without storage tiers nothing reads a clock while the engine is idle, which would be taken for a pause.
        self.now = clock or (RunningClock() if config.storage else time.monotonic)
        self._core = core
        self._link = MoverLink(
            core,
            config,
            namespace,
            region,
            changed=self.changed,
            clock=self.now,
            description=(description or Description()).of(config.salt),
            times=times,
        )
        self._hold = Hold(core, self._link, lock, self.now)
        self._waits = Waits(core, self._link, self._hold)
        self._open_loads = OpenLoads(region)
        self._judge = partial(bad_rows, region)
        self.prefill = PrefillSpeed(self._hold)
        self._pid = os.getpid()
        self._end = finalize_once(self, partial(_end, self._link.supervisor, region, times.finalizer_s))
        _coordinators.add(self)

    @classmethod
    def open(
        cls,
        config: TiersConfig,
        namespace: Namespace,
        region: HostRegion,
        timeout_s: float | None = None,
        ready_s: float | None = None,
        *,
        device: str | None = None,
        description: Description | None = None,
        here: Here | None = None,
        times: Times = PRODUCTION,
    ) -> Self:
        """Start a coordinator over a region that the caller created or attached; it closes the region when it closes.

        Waits at most `timeout_s` seconds, by default `times.open_s`, for the tiers to judge their configuration, and
        for their listings at most `ready_s`, by default `timeout_s`. `device`: what computes prompts, for its speed to
        be kept between starts; None if that is not learned. `here`: what was found on this machine; tiers that did not
        answer then are down until they do, and not waited for.

        Raises ConfigError if a tier can never work (no such bucket), and NotBuilt; a tier that is down is retried.
        """
        native.require()
        coordinator = cls(config, namespace, region, description=description, here=here, times=times)
        for warning in (*warnings_of(config), *coordinator.here.warnings):
            log.warning("nixl_tiers: %s", warning)
        if device is not None and config.prefill_tokens_per_s is None:
            coordinator.prefill.keep(PrefillCache(namespace, device))
        try:
            timeout_s = times.open_s if timeout_s is None else timeout_s
            coordinator.start(timeout_s, timeout_s if ready_s is None else ready_s)
        except BaseException as error:
            coordinator._end()
            if isinstance(error, TierRefusedError):
                raise ConfigError(str(error)) from None
            raise
        return coordinator

    def start(self, timeout_s: float | None = None, ready_s: float = 0.0) -> None:
        """Start the movers. Wait up to the longer of both times, the first of which is by default `times.open_s`,
        for the tiers to judge their configuration, and up to `ready_s`, counted from the start too, for them to list
        what they hold (see wait_ready).

        Raises TierRefusedError if one can never work. One that is down is retried; until it is up its rows are misses.
        """
        log.info(
            "nixl_tiers: cpu tier, %s: %d rows of %s; storage tiers: %s; namespace %s",
            format_size(self.region.nbytes),
            self.region.rows,
            format_size(self.region.geometry.row_bytes),
            ", ".join(self.config.names) or "none",
            self.namespace.digest.hex(),
        )
        if not self.config.storage:
            return
        began_s = time.monotonic()
        self._link.without(self.here.silent)
        self._link.start()
        movers, names = self._link.movers, self.config.names
        with self.changed:
            timeout_s = self.times.open_s if timeout_s is None else timeout_s
            self.changed.wait_for(lambda: all(mover.answered for mover in movers), max(timeout_s, ready_s))
            refusals = [f"tiers[{names.index(each.tier) + 1}].{each.refusal}" for each in movers if each.refusal]
        if refusals:
            self._link.supervisor.close(1.0)
            raise TierRefusedError(refusals[0])
        with self.changed:
            self.changed.wait_for(lambda: self._link.ready, max(0.0, began_s + ready_s - time.monotonic()))

    @property
    def closed(self) -> bool:
        """Whether `close` has begun."""
        return self._waits.closed

    @property
    def ready(self) -> bool:
        """Whether each tier has listed all that it holds, or has reported that it is down."""
        with self._hold:
            return self._link.ready

    def wait_ready(self, timeout_s: float | None = None) -> bool:
        """Wait until the tiers are `ready`, or until `close` begins; whether that took no longer than `timeout_s`."""
        return self._waits.until_ready(timeout_s)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until every write to a storage tier has ended, or until `close` begins; whether that took no longer
        than `timeout_s`."""
        return self._waits.until_written(timeout_s)

    def close(self, timeout_s: float | None = None) -> None:
        """Write down what `flush_on_exit_s` of the configuration has time for, let the movers write their journals and
        exit, and close the region. Movers that have not exited after `timeout_s` (by default `close_s` of `times`) are
        killed; with 0 they are not waited for. A second call, and one in a forked child, does nothing."""
        if self.closed or os.getpid() != self._pid:  # a forked child leaves its parent's movers alone
            return
        self._waits.closed = True
        with self.changed:
            self.changed.notify_all()  # wake waiting threads
        try:
            if flush_s := self.config.flush_on_exit_s:
                self._waits.write_down(time.monotonic() + flush_s)
        finally:
            with self._hold:
                self._link.flush_recent_uses()
            self.prefill.close()
            self._end.detach()
            _end(self._link.supervisor, self.region, self.times.close_s if timeout_s is None else timeout_s)

    @property
    def mover_pids(self) -> list[int | None]:
        return self._link.supervisor.pids

    # --- what a scheduler, or a thread, asks for -------------------------------------------------------------------

    def core(self) -> Hold:
        """`with coordinator.core() as core`: ask the core (`TierManager`), for microseconds.

        A step is: any number of look-ups and loads, then `core.end_step`.
        """
        return self._hold

    @property
    def namespace(self) -> Namespace:
        return self._link.namespace

    def prepare_load(
        self,
        name: str,
        keys: Sequence[Key],
        *,
        tokens: Sequence[int] = (),
        end: int | None = None,
        call: bool = False,
    ) -> LoadPlan:
        """Host rows of keys that this step's look-ups called hits, pinned until complete_load; or, where `name` is the
        `call` of a thread, until end_call (`Copies.prepare_load`)."""
        with self._hold as core:
            plan = core.prepare_load(name, keys, self.now(), tokens=tokens, end=end, call=call)
            self._open_loads.begin(len(keys), name, call=call)
        return plan

    def complete_load(
        self, name: str, took_s: float | None = None, *, at_most: bool = False, failed: bool = False
    ) -> None:
        """Workers are done reading the rows that request `name` loaded, or could not (`Copies.complete_load`)."""
        with self._hold as core:
            core.complete_load(name, self.now(), took_s, at_most=at_most, failed=failed)
            self._open_loads.end(name)

    def prepare_store(self, name: str, keys: Sequence[Key], *, call: bool = False) -> StorePlan:
        """Rows to fill with the new ones of `keys`, in prefix order; fewer than asked when the host tier is full.

        The caller owns them until complete_store; or, if `name` is the `call` of a thread, until end_call.
        Raises TypeError or ValueError for an invalid key.
        """
        check_keys(keys)
        with self._hold as core:
            host = core.host
            take_memory(core, self.region)
            if host.free < len(keys):
                # After a reset vLLM may never complete the old store jobs, and no new one could end for them either:
                # take back the rows of those that the workers have ended by their control words.
                most = max(LOCATE_BATCH, len(keys))
                host.release_unflushed(ended_rows(self.region, host.unflushed_stores(most)))
            return core.prepare_store(name, keys, call=call)

    def has_memory(self, count: int) -> bool:
        """Whether so many rows are free, or no more rows are about to come."""
        with self._hold as core:
            take_memory(core, self.region)
            return not core.host.grows or core.host.free >= count

    def complete_store(self, keys: Collection[Key], dropped: Collection[Key] = ()) -> None:
        """Every worker has ended the store job of `keys`; the region's control words say which rows are good. What was
        copied of `dropped` is of no use."""
        with self._hold as core:
            core.complete_store(keys, self._judge, dropped)

    def end_call(self, call: str) -> None:
        """A thread's call has ended, successfully or not, and touches no row any more. Those that it was to fill are
        hits if the region's control words say so. Does nothing for a call without rows."""
        with self._hold as core:
            core.end_call(call, self._judge)
            self._open_loads.end_call(call)
            self.changed.notify_all()

    def look(self) -> None:
        """Have the supervisor look at once what has been written: a thread waits for it."""
        self._link.wake(NOW)

    def reset(self, *, changed: bool = False) -> None:
        """The bytes may no longer match the weights: nothing stored so far is a hit any more. `changed`: they certainly
        do not, so that `on_reset: keep` keeps nothing."""
        keep = self.config.on_reset == "keep" and not changed
        with self._hold as core:
            core.reset(keep, self.now())
            self._open_loads.reset()
            if not keep:
                # Epoch 0 stands for the weights as they were loaded; after a reset no other engine has the same ones.
                self._link.reopen(replace(self.namespace, epoch=secrets.randbits(63) | 1))

    # --- what an operator reads -----------------------------------------------------------------------------------

    def counters(self) -> dict[str, dict[str, float]]:
        """By tier: monotonic counters (rows, or bytes where the name says so) and gauges. What they are called as
        metrics, and which of them a tier has: `nixl_tiers/base/metrics.py`."""
        with self._hold as core:
            take_memory(core, self.region)
            return counters(core, self._link, self.config, self.region, self.tenants)

    def after_tick(self, callback: Callable[[], None]) -> None:
        """Have `callback` called on the supervisor's thread, without the lock, at least once a second while there are
        storage tiers; it must not wait, nor keep the coordinator alive."""
        self._link.after_tick = callback

    def problems(self) -> dict[str, str]:
        """By tier: why it is down or what its medium denies, in words; empty where nothing is known to be wrong."""
        with self._hold:
            return problems(self._link, self.config)

    def leave_to_parent(self) -> None:
        """In a forked child: release what belongs to the parent; every call raises RuntimeError from then on."""
        self._hold.lock = ForkedLock(self._pid)
        self.changed = self._link.changed = ForkedLock(self._pid)  # type: ignore[assignment]
        self._link.supervisor.leave_to_parent()


def _end(supervisor: Supervisor, region: HostRegion, timeout_s: float) -> None:
    supervisor.close(timeout_s)
    region.close()


def _leave_to_parent() -> None:
    for coordinator in list(_coordinators):
        coordinator.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
