"""What loading costs: how fast tiers move rows, and how much of a request's chain to load. Pure arithmetic.

The load is chosen so that the first token comes earliest; docs/internals/load-or-recompute.md has the reasons.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

HOST: Final = -1
"""Instead of a tier's number: a row in host memory, or one that the engine is writing there now."""


class Run(NamedTuple):
    """Adjacent steps of a chain whose rows come from one place: HOST, or the number of the lowest tier they need."""

    source: int
    steps: int


class TierPrice(NamedTuple):
    """What rows of one tier cost now: `ahead` rows are queued or loading before them."""

    latency_s: float
    row_s: float
    ahead: int

    def seconds(self, rows: int) -> float:
        """Until so many more rows are in host memory."""
        return self.latency_s + self.row_s * (self.ahead + rows) if rows else 0.0


FREE: Final = TierPrice(0.0, 0.0, 0)

Fits = Callable[[int], int]


class Choice(NamedTuple):
    """Load up to token `end`, which is expected to be in host memory after `wait_s`; compute the rest."""

    end: int
    wait_s: float


class Chain(NamedTuple):
    """What is known of a request's chain, in steps of `step_tokens` tokens and `rows_per_step` rows, from token
    `start` on. A load also reads `window_rows` rows of windowed groups, whichever its end."""

    start: int
    step_tokens: int
    rows_per_step: int
    window_rows: int = 0


def choose(
    runs: Sequence[Run],
    chain: Chain,
    tiers: Sequence[TierPrice],
    compute_s: Callable[[int], float | None],
    *,
    copy: TierPrice,
    most_s: float,
    fits: Fits = lambda end: end,
) -> Choice:
    """The end of the load with the earliest first token: the seconds until its rows are in host memory (tiers load in
    parallel), plus those to copy them to the engine, plus those to compute the tokens from there on.

    Rows at the beginning that are in host memory are always loaded. Loads that take longer than the longest wait are
    not considered. Of ends within one run, the sum is least at one of the run's, or where this tier begins to take
    longer than all others, since computing a token takes the longer the more tokens are before it. While computing has
    no price, the longest load is chosen.

    `compute_s`: seconds to compute what is beyond a token (None: unknown). `copy`: of rows from host memory to the
    engine. `most_s`: the longest wait. `fits(end)`: the last end up to `end` at which all KV groups can be loaded.
    """
    at, step_tokens, step_rows, window_rows = chain
    rows = 0
    if runs and runs[0].source == HOST:
        at, rows = at + runs[0].steps * step_tokens, runs[0].steps * step_rows
        runs = runs[1:]
    best, best_wait_s = fits(at), 0.0
    rest_s = compute_s(best)
    least_s = None if rest_s is None else copy.seconds(rows) + rest_s
    prices = [*tiers, FREE]  # the last is HOST's
    loading, waits_s = [0] * len(prices), [0.0] * len(prices)  # of each: rows of the runs before, and their time
    for source, steps in runs:
        price, before = prices[source], loading[source] + window_rows
        others_s = max(waits_s[:source] + waits_s[source + 1 :])
        for last in _ends(steps, price, before, step_rows, (others_s, most_s)):
            end = fits(at + last * step_tokens)
            count = -(-(end - at) // step_tokens) * step_rows
            wait_s = max(others_s, price.seconds(before + count))
            if count <= 0 or wait_s > most_s:
                continue
            rest_s = compute_s(end)
            sum_s = None if rest_s is None else wait_s + copy.seconds(rows + count) + rest_s
            if sum_s is None or least_s is None or sum_s <= least_s:
                best, best_wait_s, least_s = end, wait_s, sum_s
        at, rows = at + steps * step_tokens, rows + steps * step_rows
        loading[source] += steps * step_rows
        waits_s[source] = price.seconds(loading[source])
    return Choice(best, best_wait_s)


def _ends(steps: int, price: TierPrice, before: int, step_rows: int, limits_s: Iterable[float]) -> list[int]:
    """After how many steps of a run the load may end, in ascending order: after all, or where its rows, with `before`
    others of the tier, take as long as one of the limits."""
    ends = [steps]
    for limit_s in limits_s if price.row_s else ():
        within = ((limit_s - price.latency_s) / price.row_s - price.ahead - before) // step_rows
        if 0 < within < steps:
            ends.append(int(within))
    return sorted(ends)


def left_s(now: float, expected_s: float, rest_s: float, latency_s: float) -> float:
    """How much longer a request is going to wait for rows that were expected at `expected_s`, when the rows that are
    left take `rest_s` at the tier's speed, and `latency_s` more if none of them is under way.

    Once they are late, as long as they are late already: so a wait for rows that never come ends when computing would
    have taken as long, and has cost twice as much as that at most.
    """
    return max(rest_s, min(max(expected_s - now, 0.0), latency_s + rest_s), now - expected_s)


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
