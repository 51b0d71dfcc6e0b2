"""What keeps requests away from what fails: a circuit breaker for a tier; slots and keys that are set aside."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from enum import IntEnum
from itertools import islice
from typing import Final

from nixl_tiers.base.chunk import Key


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
    """One tier's circuit in one direction, which is probed to see whether it works again.

    Closed: all requests are let through. Open: none. Half-open: one probe at a time.
    """

    def __init__(self, limits: BreakerLimits | None = None) -> None:
        self.limits = limits or BreakerLimits()
        self.state = BreakerState.CLOSED
        self.episode = 0  # how often it has opened
        self._results: deque[tuple[float, bool]] = deque(maxlen=self.limits.results)
        self._closed_at = float("-inf")
        self.backoff_s = 0.0  # how long it stays open this time
        self._retry_at = 0.0
        self._good = 0
        self._probing = False

    @property
    def closed(self) -> bool:
        return self.state is BreakerState.CLOSED

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
        calm = self.state is BreakerState.CLOSED and now - self._closed_at > max(self.limits.window_s, self.backoff_s)
        self.backoff_s = self.limits.min_backoff_s if calm else min(2 * self.backoff_s, self.limits.max_backoff_s)
        self._retry_at = now + self.backoff_s
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


NEVER: Final = float("inf")
MAX_PLACES: Final = 4096
MOST_ASIDE_S: Final = 86400.0

Place = int | Key


class SetAside:
    """Places of a tier that are left alone for a while: a slot, or a key where slots only count, whose move failed, is
    late, or that a mover most likely died of. A mover that reads one bad sector again after each restart would die for
    ever. For twice as long if it happens again, unless it has been moved well meanwhile. At most MAX_PLACES: the first
    ones are used again.
    """

    __slots__ = ("_lasted_s", "_next_s", "until_s")

    def __init__(self) -> None:
        # By place, those set aside first in front. Public to be asked for its truth, which costs less than a call.
        self.until_s: dict[Place, float] = {}
        self._lasted_s: OrderedDict[Place, float] = OrderedDict()  # also of places that are used again
        self._next_s = NEVER

    def add(self, place: Place, least_s: float, now: float) -> None:
        """Leave it alone for `least_s`; longer, if it was before."""
        again = 1 if place in self.until_s else 2
        lasted_s = min(MOST_ASIDE_S, max(least_s, again * self._lasted_s.pop(place, 0.0)))
        self._lasted_s[place] = lasted_s
        if len(self._lasted_s) > MAX_PLACES:
            self._lasted_s.popitem(last=False)
        self.until_s.pop(place, None)
        self.until_s[place] = now + lasted_s
        self._next_s = min(self._next_s, now + lasted_s)

    @property
    def known(self) -> bool:
        """Whether any was ever set aside, and nothing shows that nothing is wrong with it."""
        return bool(self._lasted_s)

    def moved(self, place: Place) -> None:
        """A move of it has succeeded: nothing is wrong with it."""
        self._lasted_s.pop(place, None)
        if place in self.until_s:
            self.until_s[place] = self._next_s = -NEVER

    def end(self, now: float) -> list[Place]:
        """Those that may be used again from now on, of those that are set aside."""
        if now < self._next_s and len(self.until_s) <= MAX_PLACES:
            return []
        first = set(islice(self.until_s, max(0, len(self.until_s) - MAX_PLACES)))
        ended = [place for place, until_s in self.until_s.items() if until_s <= now or place in first]
        for place in ended:
            del self.until_s[place]
        self._next_s = min(self.until_s.values(), default=NEVER)
        return ended
