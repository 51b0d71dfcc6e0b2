"""Coordinator: the cascade's core, its movers and the host region, from open to close.

What a scheduler calls never waits (`runtime/scheduler_calls.py`); bytes are moved by workers and movers. Only what
surrounds those calls may wait, and stands here: `open`, `start`, `wait_ready`, `flush` and `close`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, Self

from nixl_tiers.base.chunk import Namespace
from nixl_tiers.base.clock import RunningClock
from nixl_tiers.base.lifetime import ForkedLock, finalize_once
from nixl_tiers.base.manifest import Description
from nixl_tiers.config.schema import ConfigError, TiersConfig, format_size
from nixl_tiers.config.warnings import warnings_here, warnings_of
from nixl_tiers.core.limits import PIN_MARGIN_S, Limits
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.prefill import PrefillEstimate
from nixl_tiers.core.types import TierSpec
from nixl_tiers.runtime.interrupts import Interrupts
from nixl_tiers.runtime.mover_link import MoverLink
from nixl_tiers.runtime.prefill_cache import PrefillCache
from nixl_tiers.runtime.scheduler_calls import SchedulerCalls

if TYPE_CHECKING:
    from nixl_tiers.memory.region import HostRegion
    from nixl_tiers.mover.supervisor import Supervisor

log = logging.getLogger(__name__)

_coordinators: weakref.WeakSet[Coordinator] = weakref.WeakSet()
START_TIMEOUT_S: Final = 3.0
CLOSE_TIMEOUT_S: Final = 10.0
FINALIZER_TIMEOUT_S: Final = 1.0  # for a coordinator that was not closed: its process may be about to end
POLL_S: Final = 0.25  # deadlines pass without a notification


class TierRefusedError(RuntimeError):
    """A storage tier can never work as configured; one sentence that begins with the name of its field."""


class Coordinator(SchedulerCalls):
    """The tiers of one scheduler: its calls, and what surrounds them. `changed` is notified when a mover has reported
    something, for callers that may wait. The region belongs to the coordinator, and is closed with it.
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
        core = TierManager(
            region.rows,
            region.geometry.row_bytes,
            specs,
            limits,
            config.cpu.eviction,
            prefill=PrefillEstimate(config.prefill_tokens_per_s),
            prefer=config.prefer,
        )
        lock = threading.RLock()
        clock = clock or RunningClock()
        description = (description or Description()).of(config.salt)
        link = MoverLink(
            core, config, namespace, region, changed=threading.Condition(lock), clock=clock, description=description
        )
        super().__init__(config, region, core, link, lock=lock, clock=clock)
        self.closed = False
        self._names = config.names
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
        with self.awaiting_writes():
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
                with self.awaiting_writes():
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
    def mover_pids(self) -> list[int | None]:
        return self._link.supervisor.pids

    # --- what an operator reads -----------------------------------------------------------------------------------

    def counters(self) -> dict[str, dict[str, float]]:
        """By tier: monotonic counters (rows, or bytes where the name says so) and gauges. What they are called as
        metrics, and which of them a tier has: `nixl_tiers/base/metrics.py`."""
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
                    "listing": float(tier.listing),
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
