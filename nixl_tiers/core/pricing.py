"""Load or recompute: how much of a request's chain to load, so that its first token comes earliest. Pure arithmetic.

docs/internals/load-or-recompute.md has the reasons.
"""

from __future__ import annotations

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
