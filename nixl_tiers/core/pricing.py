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
    """What is known of a request's chain, in steps of `step_tokens` tokens and `step_rows` rows, from token
    `start` on. A load also reads `window_rows` rows of windowed groups, whichever its end."""

    start: int
    step_tokens: int
    step_rows: int
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
FADE: Final = 0.9  # the weight of a transfer after the next one: the last ten or so count
SAME_SIZE: Final = 0.1  # sizes that differ by less than this share say nothing about latency
LEAST_SLOPE: Final = 0.2  # of the time: what is the bytes'
CONTRADICTS: Final = 2.0  # times as long as expected, or a part of it: no noise, if most of the last ones agree
CLEARLY: Final = 3.0  # times: two that agree are enough, while fewer than ENOUGH count
ENOUGH: Final = 3
LAST: Final = 5
ALONE: Final = 0.9  # of its time: what a transfer has for itself that does not run beside another
NOISE: Final = 0.3  # of the weight of others: what contradicts them
KEPT: Final = 0.3  # of the weight of transfers before the speed has changed

_Sums = tuple[float, float, float, float, float]


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
    noise, and counts little, as if it had taken twice or half as long as expected. As soon as most of the last ones
    contradict in the same direction, the tier's speed has changed, and hardly any before them count.
    """

    __slots__ = ("_last", "_odd_s", "_sums", "last_s", "latency_s", "one_size", "s_per_byte", "transfers")

    def __init__(self) -> None:
        self._sums: _Sums = (0.0, 0.0, 0.0, 0.0, 0.0)  # of weight, x, y, xx, xy: bytes and seconds
        self.latency_s = self.s_per_byte = 0.0
        self.one_size = True  # of about one are all that count, which does not tell the latency from the time of a byte
        self._last: deque[tuple[int, float]] = deque(maxlen=LAST)
        self._odd_s = float("-inf")  # when the last of these that contradicted ended
        self.last_s: float | None = None  # when the last transfer ended
        self.transfers = 0  # that were ever recorded

    def record(self, nbytes: int, seconds: float, now: float) -> None:
        """A transfer of `nbytes` has taken `seconds`, and ended `now`."""
        seconds = max(seconds, 1e-6)
        expected_s, before = self.seconds(nbytes) or seconds, self._sums
        self.last_s = now
        self.transfers += 1
        self._add(nbytes, seconds, expected_s)
        if 1 / CONTRADICTS <= seconds / self.seconds(nbytes) <= CONTRADICTS:
            self._last.append((nbytes, seconds))
            return
        self._draw(before)
        if now - ALONE * seconds >= self._odd_s:  # or one stall, which delays all that run side by side, would be many
            self._last.append((nbytes, seconds))
            self._odd_s = now
            if times := self._change():
                self._follow(times)
                return
        self._add(nbytes, min(CONTRADICTS * expected_s, max(expected_s / CONTRADICTS, seconds)), expected_s, NOISE)

    def doubt(self) -> None:
        """Requests decline the tier for what this expects. So the next transfers decide, and of those before the last
        one at most, if it was `surprising`."""
        if not self.surprising:
            self._last.clear()

    @property
    def known(self) -> bool:
        return self.last_s is not None

    @property
    def surprising(self) -> bool:
        """Whether the last transfer was much faster than is expected: by accident, unless the next ones agree."""
        return bool(self._last) and CONTRADICTS * self._last[-1][1] < self.seconds(self._last[-1][0])

    def seconds(self, nbytes: int) -> float:
        """0 while unknown."""
        return self.latency_s + self.s_per_byte * nbytes

    # --- inside ------------------------------------------------------------------------------------------------

    def _change(self) -> float | None:
        """How many times as long as before transfers take now, if enough of the last ones agree."""
        changes = sorted(seconds / self.seconds(nbytes) for nbytes, seconds in self._last)
        less, more = changes[(len(changes) - 1) // 2], changes[len(changes) // 2]  # of an even number, both medians
        times = less if less * more > 1 else more
        clear = CONTRADICTS if len(changes) >= ENOUGH else CLEARLY
        return None if len(changes) == 1 or 1 / clear <= times <= clear else times

    def _follow(self, times: float) -> None:
        """The speed has changed. Those before count as if they had been so much quicker, or slower, too: what a latency
        is to a byte they know better than a few transfers."""
        w, x, y, xx, xy = (KEPT / (times * times) * each for each in self._sums)
        self._draw((w, x, times * y, xx, times * xy))
        for nbytes, seconds in self._last:
            expected_s = self.seconds(nbytes)
            if 1 / CONTRADICTS <= seconds / expected_s <= CONTRADICTS:
                self._add(nbytes, seconds, expected_s)

    def _add(self, x: int, y: float, expected_s: float, weight: float = 1.0) -> None:
        """Count a transfer of `x` bytes in `y` seconds, with this part of the weight of others."""
        one, kept = weight / (expected_s * expected_s), 1 - weight * (1 - FADE)
        new = (one, one * x, one * y, one * x * x, one * x * y)
        w, sx, sy, sxx, sxy = (kept * old + each for old, each in zip(self._sums, new, strict=True))
        self._draw((w, sx, sy, sxx, sxy))

    def _draw(self, sums: _Sums) -> None:
        """The line through what these are the sums of."""
        self._sums = w, x, y, xx, xy = sums
        mean_x, mean_y = x / w, y / w
        spread, whole = xx / w - mean_x * mean_x, xy / xx
        # Of sizes that are nearly the same, all of the time counts as the bytes'. Latency is never negative, and bytes
        # always take a part of the time: a line through noise would make the largest transfers the cheapest.
        self.one_size = spread <= (SAME_SIZE * mean_x) ** 2
        slope = whole if self.one_size else (xy / w - mean_x * mean_y) / spread
        self.s_per_byte = min(whole, max(LEAST_SLOPE * whole, slope))
        self.latency_s = mean_y - self.s_per_byte * mean_x if slope < whole else 0.0
