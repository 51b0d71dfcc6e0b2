"""Circuit breaker: keeps requests away from a tier while it fails, and probes whether it works again."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import IntEnum


class BreakerState(IntEnum):
    """The numbers are those of the `breaker` gauge."""

    CLOSED = 0  # works
    HALF_OPEN = 1  # only probes are let through
    OPEN = 2  # nothing is let through until its back-off has passed


@dataclass(frozen=True)
class BreakerLimits:
    """When a circuit opens, and when it is probed. Times are in seconds. Each job, each request that expired and each
    mover that died is one result, good or a failure.

    Half of the last eight rather than a run of failures: a medium that fails every other time costs requests as much
    as one that always fails, and a single bad row in a good medium costs only requests for that row.
    """

    results: int = 8  # how many of the last results count
    failures_to_open: int = 4
    window_s: float = 60.0  # older results do not count
    min_backoff_s: float = 1.0  # the first back-off; it doubles while the circuit keeps opening
    max_backoff_s: float = 60.0
    probes_to_close: int = 2  # consecutive good probes that close it


class Breaker:
    """One circuit. Closed: all requests are let through. Open: none. Half-open: one probe at a time."""

    def __init__(self, limits: BreakerLimits | None = None) -> None:
        self.limits = limits or BreakerLimits()
        self.state = BreakerState.CLOSED
        self.episode = 0  # how often it has opened
        self._results: deque[tuple[float, bool]] = deque(maxlen=self.limits.results)
        self._closed_at = float("-inf")
        self._backoff_s = 0.0
        self._retry_at = 0.0
        self._good = 0
        self._probing = False

    @property
    def closed(self) -> bool:
        return self.state is BreakerState.CLOSED

    @property
    def backoff_s(self) -> float:
        """How long it stays open this time."""
        return self._backoff_s

    @property
    def wants_probe(self) -> bool:
        return self.state is BreakerState.HALF_OPEN and not self._probing

    def record(self, good: bool, now: float) -> None:
        """One more result. While the circuit is not closed only those of probes count (end_probe)."""
        if self.state is not BreakerState.CLOSED:
            return
        self._results.append((now, good))
        if good:
            return
        bad = sum(not was_good for when, was_good in self._results if now - when <= self.limits.window_s)
        if bad >= self.limits.failures_to_open:
            self.trip(now)

    def trip(self, now: float) -> None:
        """Open the circuit; does nothing if it is open."""
        if self.state is BreakerState.OPEN:
            return
        calm = self.state is BreakerState.CLOSED and now - self._closed_at > max(self.limits.window_s, self._backoff_s)
        self._backoff_s = self.limits.min_backoff_s if calm else min(2 * self._backoff_s, self.limits.max_backoff_s)
        self._retry_at = now + self._backoff_s
        self.state = BreakerState.OPEN
        self.episode += 1
        self._results.clear()

    def watch(self, now: float) -> None:
        """Call at every turn: an open circuit whose back-off has passed becomes half-open."""
        if self.state is BreakerState.OPEN and now >= self._retry_at:
            self.state = BreakerState.HALF_OPEN
            self._good = 0
            self._probing = False

    def begin_probe(self) -> int:
        """A probe was sent; returns the number to pass to `end_probe`. Only while `wants_probe`."""
        assert self.wants_probe, "a probe of a circuit that wants none"
        self._probing = True
        return self.episode

    def end_probe(self, episode: int, good: bool, now: float) -> None:
        """A probe of another episode, or one that has ended already, is ignored."""
        if self.state is not BreakerState.HALF_OPEN or episode != self.episode or not self._probing:
            return
        self._probing = False
        if not good:
            self.trip(now)
            return
        self._good += 1
        if self._good >= self.limits.probes_to_close:
            self.state = BreakerState.CLOSED
            self._closed_at = now
