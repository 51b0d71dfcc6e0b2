"""What keeps requests away from what fails: a circuit breaker for a tier, a denylist for keys."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
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


MAX_KEYS: Final = 4096


class _Record:
    __slots__ = ("batch", "failures", "retry_at", "suspected")

    def __init__(self) -> None:
        self.failures = 0
        self.retry_at = 0.0
        self.suspected = False
        self.batch: list[Key] = []


class Denylist:
    """Keys whose last move failed, hung or killed a mover, and when they may be tried again: at most MAX_KEYS, with
    exponential back-off; the oldest are forgotten first.

    A key whose move *failed* is a miss until its back-off has passed. A *suspect* (poison key) was in a job that hung,
    or that its mover died of: no request waits for it until it was tried alone and succeeded, lest one bad row
    takes the tier from all others. Most of its batch are innocent: when one of them succeeds, the others are tried.
    """

    __slots__ = ("_first_s", "_most_s", "keys")

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s = first_s
        self._most_s = most_s
        # Public to be asked for its truth, which costs less than a call.
        self.keys: OrderedDict[Key, _Record] = OrderedDict()

    def __len__(self) -> int:
        return len(self.keys)

    def is_denied(self, key: Key, now: float) -> bool:
        """Whether `key` is a miss now."""
        record = self.keys.get(key) if self.keys else None
        return record is not None and (record.suspected or record.retry_at > now)

    def is_suspect(self, key: Key) -> bool:
        record = self.keys.get(key) if self.keys else None
        return record is not None and record.suspected

    def trial_due(self, key: Key, now: float) -> bool:
        """Whether `key` is a suspect that may be tried now, alone."""
        record = self.keys.get(key) if self.keys else None
        return record is not None and record.suspected and record.retry_at <= now

    def record_failure(self, key: Key, now: float) -> None:
        """Its move ended in an error. So its mover is alive, and the key is no suspect."""
        self._record(key, now).suspected = False

    def suspect(self, keys: Iterable[Key], now: float, batch: list[Key] | None = None) -> None:
        """Their moves did not end in time, or their mover died before they ended. `batch`: keys of before that were
        suspected together with them; `keys` are added to it."""
        keys = list(keys)
        batch = [] if batch is None else batch
        batch += keys
        for key in keys:
            record = self._record(key, now)
            record.suspected = True
            record.batch = batch

    def clear(self, key: Key) -> Sequence[Key]:
        """Its move succeeded. Returns, once, the keys that were suspected together with it: they may be tried now."""
        record = self.keys.pop(key, None) if self.keys else None
        if record is None:
            return ()
        batch = [*record.batch]
        record.batch.clear()
        return batch

    def reset(self) -> None:
        self.keys.clear()

    def _record(self, key: Key, now: float) -> _Record:
        record = self.keys.pop(key, None) or _Record()
        record.retry_at = now + min(self._most_s, self._first_s * 2.0 ** min(record.failures, 30))
        record.failures += 1
        self.keys[key] = record
        if len(self.keys) > MAX_KEYS:
            self.keys.popitem(last=False)
        return record
