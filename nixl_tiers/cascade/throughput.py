"""Pace: how fast a tier has been lately, and so when a job that it has not finished is late."""

from __future__ import annotations

from collections import deque
from typing import Final

REMEMBERED: Final = 64
ENOUGH: Final = 8  # before that, the assumed speed counts if it is lower
SLOW_SHARE: Final = 10  # a tenth of the jobs were slower than what is expected
PATIENCE: Final = 4  # times as long as expected is late


class ThroughputEstimate:
    """The speed of one tier in one direction: a low quantile of the last jobs' bytes a second.

    A job's bytes are those that were under way when it began, its own included, and its time includes the medium's
    latency. So small jobs look slow: the floor of a deadline is what covers latency, not this.
    """

    __slots__ = ("_assumed", "_samples")

    def __init__(self, assumed_bytes_per_s: float) -> None:
        """`assumed_bytes_per_s`: until jobs have been seen."""
        self._assumed = assumed_bytes_per_s
        self._samples: deque[float] = deque(maxlen=REMEMBERED)

    def record(self, nbytes: int, seconds: float) -> None:
        """A job has ended well (late or not) after `seconds`, with `nbytes` under way when it began."""
        self._samples.append(nbytes / max(seconds, 1e-6))

    @property
    def bytes_per_s(self) -> float:
        """What nine jobs in ten exceed."""
        if not self._samples:
            return self._assumed
        slow = sorted(self._samples)[len(self._samples) // SLOW_SHARE]
        return slow if len(self._samples) >= ENOUGH else min(slow, self._assumed)

    def timeout_s(self, nbytes: int, least_s: float, most_s: float) -> float:
        """After how long a job is late that has `nbytes` under way when it begins, its own included."""
        return min(most_s, max(least_s, PATIENCE * nbytes / self.bytes_per_s))
