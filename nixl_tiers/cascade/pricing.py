"""Load or recompute: how much of a request's chain to load, so that its first token comes earliest. Pure arithmetic.

docs/internals/load-or-recompute.md has the reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

HOST: Final = -1
"""Instead of a tier's number: a row in host memory, or one that the engine is writing there."""


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


@dataclass(frozen=True)
class Chain:
    """What is known of a request's chain, in steps of `step_tokens` tokens and `rows_per_step` rows, from token
    `start` on. A load also reads `window_rows` rows of windowed groups, whichever its end."""

    start: int
    step_tokens: int
    rows_per_step: int
    window_rows: int = 0


class Costs(NamedTuple):
    """Seconds: to compute what is beyond a token (None: unknown), to copy rows to the engine; the longest wait."""

    compute_s: Callable[[int], float | None]
    copy_s: Callable[[int], float]
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
    runs = list(runs)
    at, rows = chain.start, 0
    if runs and runs[0].source == HOST:
        steps = runs.pop(0).steps
        at, rows = at + steps * chain.step_tokens, steps * chain.rows_per_step
    end = fits(at)
    best, best_s = Choice(end, 0.0), _sum(0.0, rows, costs.compute_s(end), costs.copy_s)
    loading = [0] * len(tiers)
    for run in runs:
        for last in _ends(run, chain, tiers, loading, costs.most_s):
            end = fits(at + last * chain.step_tokens)
            steps = -(-(end - at) // chain.step_tokens)
            if steps <= 0:
                continue
            counts = list(loading)
            if run.source != HOST:
                counts[run.source] += steps * chain.rows_per_step + chain.window_rows
            wait_s = max(map(TierPrice.seconds, tiers, counts), default=0.0)
            if wait_s > costs.most_s:
                continue
            sum_s = _sum(wait_s, rows + steps * chain.rows_per_step, costs.compute_s(end), costs.copy_s)
            if sum_s is None or best_s is None or sum_s <= best_s:
                best, best_s = Choice(end, wait_s), sum_s
        if run.source != HOST:
            loading[run.source] += run.steps * chain.rows_per_step
        rows += run.steps * chain.rows_per_step
        at += run.steps * chain.step_tokens
    return best


def _ends(run: Run, chain: Chain, tiers: Sequence[TierPrice], loading: Sequence[int], most_s: float) -> list[int]:
    """After how many steps of `run` the load may end, in ascending order."""
    ends = {run.steps}
    if run.source != HOST:
        waits = map(TierPrice.seconds, tiers, loading)
        others = max((wait_s for number, wait_s in enumerate(waits) if number != run.source), default=0.0)
        price, rows = tiers[run.source], loading[run.source] + chain.window_rows
        for limit_s in (others, most_s):
            steps = (price.rows_within(limit_s) - rows) // chain.rows_per_step
            if 0 < steps < run.steps:
                ends.add(int(steps))
    return sorted(ends)


def _sum(wait_s: float, rows: int, compute_s: float | None, copy_s: Callable[[int], float]) -> float | None:
    return None if compute_s is None else wait_s + copy_s(rows) + compute_s


def left_s(now: float, expected_s: float, rest_s: float, latency_s: float) -> float:
    """How much longer a request is going to wait for rows that were expected at `expected_s`, when the rows that are
    left take `rest_s` at the tier's speed, and `latency_s` more if none of them is under way.

    Once they are late, as long as they are late already: so a wait for rows that never come ends when computing would
    have taken as long, and has cost twice as much as that at most.
    """
    return max(rest_s, min(max(expected_s - now, 0.0), latency_s + rest_s), now - expected_s)
