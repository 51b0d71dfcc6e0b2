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

    def rows_within(self, seconds: float) -> float:
        """How many more rows are in host memory after `seconds`."""
        return (seconds - self.latency_s) / self.row_s - self.ahead if self.row_s else float("inf")


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


class Costs(NamedTuple):
    """`compute_s`: seconds to compute what is beyond a token (None: unknown). `copy`: of rows from host memory to the
    engine. `most_s`: the longest wait."""

    compute_s: Callable[[int], float | None]
    copy: TierPrice
    most_s: float


def choose(
    runs: Sequence[Run], chain: Chain, tiers: Sequence[TierPrice], costs: Costs, fits: Fits = lambda end: end
) -> Choice:
    """The end of the load with the earliest first token: the seconds until its rows are in host memory (tiers load in
    parallel), plus those to copy them to the engine, plus those to compute the tokens from there on.

    Rows at the beginning that are in host memory are always loaded. Loads that take longer than the longest wait are
    not considered. Of ends within one run, the sum is least at one of the run's, or where this tier begins to take
    longer than all others, since computing a token takes the longer the more tokens are before it. While computing has
    no price, the longest load is chosen. `fits(end)`: the last end up to `end` at which all KV groups can be loaded.
    """
    at, step_tokens, step_rows, window_rows = chain
    compute_s, copy, most_s = costs
    rows = 0
    if runs and runs[0].source == HOST:
        at, rows = at + runs[0].steps * step_tokens, runs[0].steps * step_rows
        runs = runs[1:]
    end = fits(at)
    best, best_s = (end, 0.0), _sum(0.0, copy.seconds(rows), compute_s(end))
    loading, waits_s = [0] * len(tiers), [0.0] * len(tiers)  # of each tier: rows of the runs before, and their time
    for source, steps in runs:
        others_s = max([wait_s for tier, wait_s in enumerate(waits_s) if tier != source], default=0.0)
        before = 0 if source == HOST else loading[source] + window_rows
        lasts = [steps] if source == HOST else _ends(steps, tiers[source], before, step_rows, (others_s, most_s))
        for last in lasts:
            end = fits(at + last * step_tokens)
            count = -(-(end - at) // step_tokens) * step_rows
            if count <= 0:
                continue
            wait_s = others_s if source == HOST else max(others_s, tiers[source].seconds(before + count))
            if wait_s > most_s:
                continue
            sum_s = _sum(wait_s, copy.seconds(rows + count), compute_s(end))
            if sum_s is None or best_s is None or sum_s <= best_s:
                best, best_s = (end, wait_s), sum_s
        at, rows = at + steps * step_tokens, rows + steps * step_rows
        if source != HOST:
            loading[source] += steps * step_rows
            waits_s[source] = tiers[source].seconds(loading[source])
    return Choice(*best)


def _ends(steps: int, price: TierPrice, before: int, step_rows: int, limits_s: Iterable[float]) -> list[int]:
    """After how many steps of a run the load may end, in ascending order: after all, or where its rows, with `before`
    others of the tier, take as long as one of the limits."""
    ends = [steps]
    for limit_s in limits_s:
        within = (price.rows_within(limit_s) - before) // step_rows
        if 0 < within < steps:
            ends.append(int(within))
    return sorted(ends)


def _sum(wait_s: float, copy_s: float, compute_s: float | None) -> float | None:
    return None if compute_s is None else wait_s + copy_s + compute_s


def left_s(now: float, expected_s: float, rest_s: float, latency_s: float) -> float:
    """How much longer a request is going to wait for rows that were expected at `expected_s`, when the rows that are
    left take `rest_s` at the tier's speed, and `latency_s` more if none of them is under way.

    Once they are late, as long as they are late already: so a wait for rows that never come ends when computing would
    have taken as long, and has cost twice as much as that at most.
    """
    return max(rest_s, min(max(expected_s - now, 0.0), latency_s + rest_s), now - expected_s)
