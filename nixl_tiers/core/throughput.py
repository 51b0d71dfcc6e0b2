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
CONTRADICTS: Final = 2.0  # times as long as others of its size, or a part of it: no noise, if the next ones agree
ENOUGH: Final = 3  # contradictions in succession are a change
# Much makes a transfer slower by accident, but nothing makes it that much quicker. And a tier that is believed to be
# slow is hardly used any more, so that there are few to learn from.
CLEARLY_FASTER: Final = 4.0  # two of these are enough
ALONE: Final = 0.9  # of its time: what a transfer has for itself that does not run beside another
MAX_ODD: Final = 16
KEPT: Final = 0.3  # of the weight of transfers before the speed has changed

_Transfer = tuple[float, float]  # MB and seconds
_Odd = tuple[_Transfer, float]  # and how many times longer than expected it took


class ThroughputEstimate:
    """The speed of one tier in one direction: a low quantile of the last jobs' bytes a second.

    A job's bytes are those that were under way when it began, its own included, and its time includes the medium's
    latency. So small jobs look slow: latency is covered by the floor of a timeout, not by this.
    """

    __slots__ = ("_assumed", "_median", "_samples", "bytes_per_s")

    def __init__(self, assumed_bytes_per_s: float) -> None:
        """`assumed_bytes_per_s`: until jobs have been seen."""
        self._assumed = assumed_bytes_per_s
        self._samples: deque[float] = deque(maxlen=MAX_SAMPLES)
        self._median = assumed_bytes_per_s
        self.bytes_per_s = assumed_bytes_per_s
        """What nine jobs in ten exceed."""

    def record(self, nbytes: int, seconds: float) -> None:
        """A job has succeeded, late or not, after `seconds`, with `nbytes` under way when it began."""
        self._samples.append(nbytes / max(seconds, 1e-6))
        ordered = sorted(self._samples)
        slow, self._median = ordered[len(ordered) // SLOWEST_PART], ordered[len(ordered) // 2]
        self.bytes_per_s = slow if len(self._samples) >= ENOUGH_SAMPLES else min(slow, self._assumed)

    def seconds(self, nbytes: int) -> float:
        """How long half of all transfers of `nbytes` would take less than; 0 while that is hardly known."""
        return nbytes / self._median if len(self._samples) >= ENOUGH_SAMPLES else 0.0

    def timeout_s(self, nbytes: int, least_s: float, most_s: float) -> float:
        """The timeout of a job that has `nbytes` under way when it begins, its own included."""
        return min(most_s, max(least_s, TIMEOUT_FACTOR * nbytes / self.bytes_per_s))


class TransferEstimate:
    """How long transfers of a tier take by their size: a latency, and a time for each byte.

    A line through the last transfers by least squares. Errors are relative to what was expected: otherwise one large
    transfer would outweigh all small ones. One is the bytes that were moved in the lifetime of a job, those of other
    jobs included: many that run side by side are as many points on the line of one that moves all of them.

    A transfer that no such line explains, neither with a latency nor without, contradicts those before. By itself it is
    noise, and counts as if it had taken twice or half as long as expected. As soon as several in succession contradict
    in the same direction, the tier's speed has changed: then they count, and hardly any before them.
    """

    __slots__ = (
        "_line",
        "_odd",
        "_slower",
        "_sound",
        "_sums",
        "_witness_s",
        "_witnesses",
        "last_s",
        "latency_s",
        "one_size",
        "s_per_byte",
        "transfers",
    )

    def __init__(self) -> None:
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # of weight, x, y, xx, xy: MB and seconds
        self._sound, self._line = self._sums, (0.0, 0.0)  # those before the first of `_odd`
        self.latency_s = self.s_per_byte = 0.0
        self.one_size = True  # of about one are all that count, which does not tell the latency from the time of a byte
        self._odd: deque[_Odd] = deque(maxlen=MAX_ODD)  # that contradict, in succession
        self._slower = False  # in which direction
        self._witnesses = 0  # of them, those that did not run side by side: one stall delays all that do
        self._witness_s = 0.0  # when the last of these ended
        self.last_s: float | None = None  # when the last transfer ended
        self.transfers = 0  # that were ever recorded

    def record(self, nbytes: int, seconds: float, now: float) -> None:
        """A transfer of `nbytes` has taken `seconds`, and ended `now`."""
        x, y = nbytes / MB, max(seconds, 1e-6)
        known, self.last_s = self.known, now
        self.transfers += 1
        if not known:
            self._fit((x, y))
            return
        before_s, sums, line = self.seconds(nbytes), self._sums, (self.latency_s, self.s_per_byte)
        self._fit((x, y), before_s)
        change, times = y / self.seconds(nbytes), y / before_s
        if self._odd and not self._slower:
            # Those have moved the line by now, and may have given it a latency that seems to explain this one.
            faster = y / (self._line[0] + self._line[1] * nbytes)
            if CONTRADICTS * faster < 1:
                change = times = faster
        if 1 / CONTRADICTS <= change <= CONTRADICTS:
            self._odd.clear()
            return
        self._sums = sums
        if not self._odd or self._slower is not (change > 1):
            self._sound, self._line = sums, line
        if self._contradicts(((x, y), times), now, slower=change > 1):
            self._follow()
        else:
            self._fit((x, _near(y, before_s)), before_s)

    @property
    def known(self) -> bool:
        return self.last_s is not None

    @property
    def contradictions(self) -> int:
        """How many of the last transfers contradicted those before, if it is not decided yet whether that was noise."""
        return len(self._odd)

    def seconds(self, nbytes: int) -> float:
        """0 while unknown."""
        return self.latency_s + self.s_per_byte * nbytes

    # --- inside ------------------------------------------------------------------------------------------------

    def _contradicts(self, odd: _Odd, now: float, *, slower: bool) -> bool:
        """Note one that contradicts; whether there are enough."""
        if slower is not self._slower or not self._odd:
            self._odd.clear()
            self._slower, self._witnesses, self._witness_s = slower, 0, float("-inf")
        self._odd.append(odd)
        if now - ALONE * odd[0][1] >= self._witness_s:
            self._witnesses += 1
            self._witness_s = now
        clearly = not slower and all(CLEARLY_FASTER * change < 1 for _, change in self._odd)
        return self._witnesses >= (ENOUGH - 1 if clearly else ENOUGH)

    def _follow(self) -> None:
        """The speed has changed, by as much as all that contradict agree upon. Those before count as if they had been
        so much quicker, or slower, too: what a latency is to a byte they know better than a few transfers."""
        changes = [change for _, change in self._odd]
        times = min(changes) if self._slower else max(changes)
        w, sx, sy, sxx, sxy = self._sound  # without what these counted as while they were noise
        kept, kept_y = KEPT / (times * times), KEPT / times
        self._sums = kept * w, kept * sx, kept_y * sy, kept * sxx, kept_y * sxy
        for (x, y), change in self._odd:
            expected_s = times * y / change
            self._fit((x, _near(y, expected_s)), expected_s)
        self._odd.clear()

    def _fit(self, transfer: _Transfer, expected_s: float | None = None) -> None:
        """Add a transfer, and draw the line anew. `expected_s`: if it is not what is expected now."""
        x, y = transfer
        expected_s = expected_s or y
        one = 1 / (expected_s * expected_s)
        new = (one, one * x, one * y, one * x * x, one * x * y)
        w, sx, sy, sxx, sxy = self._sums = tuple(  # type: ignore[assignment]
            FADE * old + each for old, each in zip(self._sums, new, strict=True)
        )
        mean_x, mean_y = sx / w, sy / w
        spread, whole = sxx / w - mean_x * mean_x, sxy / sxx
        # Of sizes that are nearly the same, all of the time counts as the bytes'. Latency is never negative, and bytes
        # always take a part of the time: a line through noise would make the largest transfers the cheapest.
        self.one_size = spread <= (SAME_SIZE * mean_x) ** 2
        slope = whole if self.one_size else (sxy / w - mean_x * mean_y) / spread
        if slope >= whole:
            self.s_per_byte, self.latency_s = whole / MB, 0.0
        else:
            slope = max(LEAST_SLOPE * whole, slope)
            self.s_per_byte, self.latency_s = slope / MB, mean_y - slope * mean_x


def _near(seconds: float, expected_s: float) -> float:
    return min(CONTRADICTS * expected_s, max(expected_s / CONTRADICTS, seconds))
