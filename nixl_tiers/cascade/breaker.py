"""Breaker: takes a tier out of the way while it fails, and finds out by itself when it is well again."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import IntEnum


class BreakerState(IntEnum):
    """The numbers are those of the `breaker` gauge."""

    CLOSED = 0  # all is well
    HALF_OPEN = 1  # closed to everybody but probes
    OPEN = 2  # closed to everybody, until its back-off has passed


@dataclass(frozen=True)
class BreakerLimits:
    """When a circuit opens, and when it is tried again. Seconds, and verdicts: one for each job, each request that
    waited in vain, and each mover that died.

    Half of the last eight, rather than a run of failures: a medium that fails every other time costs requests as much
    as one that fails always, and a single bad row in a good medium costs nobody but those who want it.
    """

    results: int = 8
    failures_to_open: int = 4
    window_s: float = 60.0  # older verdicts say nothing about now
    min_backoff_s: float = 1.0  # the first back-off; each one soon after another is twice as long
    max_backoff_s: float = 60.0
    probes_to_close: int = 2  # good ones, one after the other, that close it


class Breaker:
    """One circuit. Closed: everybody is let through. Open: nobody. Half-open: one probe at a time."""

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
        """Something that went through has ended. What began before the circuit opened is old news."""
        if self.state is not BreakerState.CLOSED:
            return
        self._results.append((now, good))
        bad = sum(not was_good for when, was_good in self._results if now - when <= self.limits.window_s)
        if bad >= self.limits.failures_to_open:
            self.trip(now)

    def trip(self, now: float) -> None:
        """Open. Does nothing if it is open already."""
        if self.state is BreakerState.OPEN:
            return
        calm = self.state is BreakerState.CLOSED and now - self._closed_at > max(self.limits.window_s, self._backoff_s)
        self._backoff_s = self.limits.min_backoff_s if calm else min(2 * self._backoff_s, self.limits.max_backoff_s)
        self._retry_at = now + self._backoff_s
        self.state = BreakerState.OPEN
        self.episode += 1
        self._results.clear()

    def watch(self, now: float) -> None:
        """Call now and then: an open circuit whose back-off has passed is half-open."""
        if self.state is BreakerState.OPEN and now >= self._retry_at:
            self.state = BreakerState.HALF_OPEN
            self._good = 0
            self._probing = False

    def begin_probe(self) -> int:
        """A probe is on its way; `end_probe` wants the number back. Only while `wants_probe`."""
        assert self.wants_probe, "a probe that nobody asked for"
        self._probing = True
        return self.episode

    def end_probe(self, episode: int, good: bool, now: float) -> None:
        """A probe of another episode, or one that was given up before, is ignored."""
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
