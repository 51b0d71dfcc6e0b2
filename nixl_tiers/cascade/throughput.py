"""Throughput estimate: how fast a tier was lately, and so how long a job may take."""

from __future__ import annotations

from collections import deque
from typing import Final

MAX_SAMPLES: Final = 64
ENOUGH_SAMPLES: Final = 8  # with fewer, the assumed speed counts if it is lower
SLOWEST_PART: Final = 10  # the estimate is the speed that nine jobs in ten exceed
TIMEOUT_FACTOR: Final = 4  # a timeout is so many times the expected time


class ThroughputEstimate:
    """The speed of one tier in one direction: a low quantile of the last jobs' bytes a second.

    A job's bytes are those that were under way when it began, its own included, and its time includes the medium's
    latency. So small jobs look slow: latency is covered by the floor of a timeout, not by this.
    """

    __slots__ = ("_assumed", "_samples")

    def __init__(self, assumed_bytes_per_s: float) -> None:
        """`assumed_bytes_per_s`: until jobs have been seen."""
        self._assumed = assumed_bytes_per_s
        self._samples: deque[float] = deque(maxlen=MAX_SAMPLES)

    def record(self, nbytes: int, seconds: float) -> None:
        """A job has succeeded, late or not, after `seconds`, with `nbytes` under way when it began."""
        self._samples.append(nbytes / max(seconds, 1e-6))

    @property
    def bytes_per_s(self) -> float:
        """What nine jobs in ten exceed."""
        if not self._samples:
            return self._assumed
        slow = sorted(self._samples)[len(self._samples) // SLOWEST_PART]
        return slow if len(self._samples) >= ENOUGH_SAMPLES else min(slow, self._assumed)

    def timeout_s(self, nbytes: int, least_s: float, most_s: float) -> float:
        """The timeout of a job that has `nbytes` under way when it begins, its own included."""
        return min(most_s, max(least_s, TIMEOUT_FACTOR * nbytes / self.bytes_per_s))
