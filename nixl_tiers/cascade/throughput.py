"""Throughput estimate: how fast a tier was lately, and so how long a job may take."""

from __future__ import annotations

from collections import deque
from typing import Final

MAX_SAMPLES: Final = 64
ENOUGH_SAMPLES: Final = 8  # with fewer, the assumed speed counts if it is lower
SLOWEST_PART: Final = 10  # the estimate is the speed that nine jobs in ten exceed
TIMEOUT_FACTOR: Final = 4  # a timeout is so many times the expected time
MB: Final = 1e6
FADE: Final = 0.9  # the weight of a transfer after the next one: the last ten or so count
SAME_SIZE: Final = 0.1  # sizes that differ by less than this share say nothing about latency
LEAST_SLOPE: Final = 0.2  # of the time: what is the bytes'


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


class TransferEstimate:
    """How long transfers of a tier take by their size: a latency, and a time for each byte.

    A line through the last transfers by least squares. One is the bytes that were moved in the lifetime of a job, those
    of other jobs included: many that run side by side are as many points on the line of one that moves all of them.
    """

    __slots__ = ("_latency_s", "_s_per_byte", "_sums", "last_s")

    def __init__(self) -> None:
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # of weight, x, y, xx, xy: MB and seconds
        self._latency_s = self._s_per_byte = 0.0
        self.last_s: float | None = None  # when the last transfer ended

    def record(self, nbytes: int, seconds: float, now: float) -> None:
        """A transfer of `nbytes` has taken `seconds`."""
        x, y = nbytes / MB, max(seconds, 1e-6)
        self.last_s = now
        new = (1.0, x, y, x * x, x * y)
        w, sx, sy, sxx, sxy = self._sums = tuple(  # type: ignore[assignment]
            FADE * old + one for old, one in zip(self._sums, new, strict=True)
        )
        mean_x, mean_y = sx / w, sy / w
        spread, whole = sxx / w - mean_x * mean_x, mean_y / mean_x
        # Of sizes that are nearly the same, all of the time counts as the bytes'. Latency is never negative, and bytes
        # always take a part of the time: a line through noise would make the largest transfers the cheapest.
        slope = (sxy / w - mean_x * mean_y) / spread if spread > (SAME_SIZE * mean_x) ** 2 else whole
        slope = min(whole, max(LEAST_SLOPE * whole, slope))
        self._s_per_byte, self._latency_s = slope / MB, mean_y - slope * mean_x

    @property
    def known(self) -> bool:
        return self.last_s is not None

    @property
    def latency_s(self) -> float:
        return self._latency_s

    @property
    def s_per_byte(self) -> float:
        return self._s_per_byte

    def seconds(self, nbytes: int) -> float:
        """0 while unknown."""
        return self._latency_s + self._s_per_byte * nbytes
