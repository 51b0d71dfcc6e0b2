"""What of a chain to load, and what to wait for: pure, from where its rows are and what they cost.

docs/internals/load-or-recompute.md has the reasons.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Final, NamedTuple

from nixl_tiers.base.chunk import Key
from nixl_tiers.core import pricing
from nixl_tiers.core.chain_rows import Chain, ChainRows, Group, below
from nixl_tiers.core.pricing import HOST, Run, TierPrice
from nixl_tiers.core.rows import Row

MAX_RUNS: Final = 64

Reach = tuple[Group, int, list[int]]
"""Of a windowed group from its chunk of this number on: of each chunk, how many up to it are there without a gap."""

Ends = list[tuple[int, Key]]
"""Keys by the tokens at which they end."""


class Look(NamedTuple):
    """Where a chain's rows are from token `start` on. `found`: of each full-attention group; up to token `known`, the
    rows of all of them are known to exist. `reaches`: of the windowed groups; none where others may have stored what is
    not known here."""

    chain: Chain
    start: int
    found: Sequence[ChainRows]
    known: int
    reaches: Callable[[], list[Reach]]


class Prices(NamedTuple):
    """What a choice goes by. `tiers`: of each, with the chain's own rows that are being loaded among those ahead.
    `compute_s`: seconds to compute what is beyond a token, for all that wait; None while unknown. `most_s`: the longest
    wait. `measured`: of each tier whether it ever was."""

    tiers: Sequence[TierPrice]
    copy: TierPrice
    compute_s: Callable[[int], float | None]
    most_s: float
    measured: Sequence[bool]


class Decision(NamedTuple):
    """The chain is loaded up to token `end`, which is expected to be in host memory after `wait_s`. Of that, `ready` is
    there, `missing` is to come, of which `wanted` has what is to be promoted, by the tier that has it. `declined`: what
    tiers have behind that, and computing is quicker. `places`: the tiers that it is to come from, and whether some of
    it is not under way yet."""

    end: int
    wait_s: float
    ready: list[Row]
    missing: Ends
    wanted: dict[int, Ends]
    declined: list[tuple[int, list[Key]]]
    places: dict[int, bool]


def decide(look: Look, prices: Prices | None) -> Decision:
    """`prices`: None if there is nothing to weigh, or that was done before: all that is known is loaded."""
    if prices is None and look.known <= look.start:  # most prompts that nobody has sent before
        return Decision(look.start, 0.0, [], [], {}, [], {})
    end, wait_s, declined = max(look.start, look.known), 0.0, list[tuple[int, list[Key]]]()
    if prices is not None:
        end, wait_s = _choose(look, prices)
    if end < look.known:
        for each in look.found:
            keys, first = each.group.keys, end // each.group.chunk_tokens
            for tier, places in each.stored.items():
                if behind := [keys[place] for place in places[bisect_left(places, first) :]]:
                    declined.append((tier, behind))
    ready: list[Row] = []
    missing: Ends = []
    wanted: dict[int, Ends] = {}
    queued: dict[int, bool] = {}
    for each in look.found:
        tokens, keys = each.group.chunk_tokens, each.group.keys
        stop = end // tokens
        ready += filter(None, each.rows[: stop - each.first])
        if each.coming:
            missing += [(tokens * (place + 1), keys[place]) for place in below(each.coming, stop)]
        for tier, places in each.loading.items():
            if places[0] < stop:
                queued.setdefault(tier, False)
        for tier, places in each.stored.items():
            if some := [(tokens * (place + 1), keys[place]) for place in below(places, stop)]:
                missing += some
                wanted.setdefault(tier, []).extend(some)
                queued[tier] = True
    if missing and (len(look.found) > 1 or len(wanted) > 1 or look.found[0].coming):
        for part in (missing, *wanted.values()):
            part.sort()
    return Decision(end, wait_s, ready, missing, wanted, declined, queued)


def ready_end(look: Look, end: int) -> int:
    """Up to which token of those before `end` all rows are in host memory."""
    if end <= look.start:
        return look.start
    for each in look.found:
        if (place := each.first_unready) < each.stop:
            end = min(end, place * each.group.chunk_tokens)
    return max(look.start, end - end % look.chain.step_tokens)


# --- inside -------------------------------------------------------------------------------------------------------


def _choose(look: Look, prices: Prices) -> tuple[int, float]:
    chain = look.chain
    runs = _runs(look)
    choice = pricing.choose(
        runs,
        pricing.Chain(
            look.start - look.start % chain.step_tokens, chain.step_tokens, chain.step_rows, chain.window_rows
        ),
        prices.tiers,
        prices.compute_s,
        copy=prices.copy,
        most_s=prices.most_s,
        fits=_fits(look),
    )
    measured = all(run.source == HOST or prices.measured[run.source] for run in runs)
    return max(look.start, choice.end), choice.wait_s if measured else 0.0


def _runs(look: Look) -> list[Run]:
    """The chain from the start on, by where its rows are: of each step, the lowest tier that it needs a row of."""
    step_tokens = look.chain.step_tokens
    first = look.start // step_tokens
    steps = max(0, look.known // step_tokens - first)
    if len(look.found) == 1:
        sources = look.found[0].sources()[:steps]
    else:
        sources = [HOST] * steps
        for each in look.found:
            per_step = step_tokens // each.group.chunk_tokens
            for place, tier in enumerate(each.sources(), each.first):
                if (step := place // per_step - first) < steps:
                    sources[step] = max(sources[step], tier)
    runs = [Run(source, len(list(run))) for source, run in groupby(sources)]
    if len(runs) > MAX_RUNS:  # no prefix is scattered like that for long: the rest is taken as one
        rest = runs[MAX_RUNS - 1 :]
        runs[MAX_RUNS - 1 :] = [Run(max(run.source for run in rest), sum(run.steps for run in rest))]
    return runs


def _fits(look: Look) -> pricing.Fits:
    """Up to a token, the last one at which all windowed groups have their rows."""
    if not (reaches := look.reaches()):
        return lambda end: end

    def has_window(group: Group, first: int, reach: list[int], end: int) -> bool:
        place = -(-end // group.chunk_tokens) - 1 - first
        return place < len(reach) and reach[place] >= min(group.window or 0, place + 1)

    def fits(end: int) -> int:
        while end > look.start and not all(has_window(*each, end) for each in reaches):
            end -= look.chain.step_tokens
        return max(end, look.start)

    return fits
