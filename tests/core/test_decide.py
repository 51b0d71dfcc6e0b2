"""What to load of a chain, and what to wait for, beside every end that there is."""

from __future__ import annotations

from typing import Final

from hypothesis import given, settings
from hypothesis import strategies as st

from nixl_tiers.core.chain_rows import Chain, ChainRows, Group
from nixl_tiers.core.decide import Decision, Look, Prices, decide, ready_end
from nixl_tiers.core.pricing import HOST, TierPrice
from nixl_tiers.core.rows import Generation, Row, RowState

STEP: Final = 64
TIERS: Final = 2
GENERATION: Final = Generation()
# Of each row: in host memory, being written there by the engine, or by the number of its tier being loaded, or stored.
READY, FILLING = "ready", "filling"
WHERE: Final = [
    READY,
    READY,
    FILLING,
    *(("loading", tier) for tier in range(TIERS)),
    *(("stored", 0), ("stored", 1)) * 3,
]
groups = st.lists(st.sampled_from(WHERE), max_size=14)
seconds = st.floats(0, 0.05)
prices = st.builds(TierPrice, seconds, seconds, st.integers(0, 8))


def look_of(places: list[list[object]], more: int, start: int) -> Look:
    """A chain of these groups, whose chunks have one and two steps' tokens, and `more` steps that nobody knows."""
    end = max(len(each) * (1 + number) for number, each in enumerate(places)) + more
    full = [
        Group([b"%d %d" % (number, place) for place in range(end // (1 + number))], STEP * (1 + number))
        for number in range(len(places))
    ]
    chain, found = Chain(full), []
    for group, where in zip(full, places, strict=True):
        first = start // group.chunk_tokens
        rows = ChainRows(group, first, [], {}, [], {})
        for place, each in list(enumerate(where))[first : len(group.keys)]:
            key = group.keys[place]
            ready = each == READY
            rows.rows.append(Row(key, place, place, RowState.READY, GENERATION) if ready else None)
            if isinstance(each, tuple):
                kind, tier = each
                (rows.loading if kind == "loading" else rows.stored).setdefault(tier, []).append(place)
            if each == FILLING or (isinstance(each, tuple) and each[0] == "loading"):
                rows.coming.append(place)
        found.append(rows)
    known = min(each.stop * each.group.chunk_tokens for each in found)
    return Look(chain, start, found, known - known % chain.step_tokens, list)


def first_token_s(look: Look, prices: Prices, end: int) -> tuple[float, float]:
    """Until the first token, if the chain is loaded up to `end`, and how much of that is waiting."""
    loads, rows = [0] * TIERS, 0
    for step in range(look.start, end, look.chain.step_tokens):
        sources = [
            each.sources()[place - each.first]
            for each in look.found
            for place in range(
                step // each.group.chunk_tokens, (step + look.chain.step_tokens) // each.group.chunk_tokens
            )
        ]
        rows += len(sources)
        if max(sources) != HOST:  # a step waits for the lowest tier that it needs a row of
            loads[max(sources)] += len(sources)
    wait_s = max(price.seconds(count) for price, count in zip(prices.tiers, loads, strict=True))
    return wait_s + prices.copy.seconds(rows) + (prices.compute_s(end) or 0.0), wait_s


@settings(max_examples=400, deadline=None)
@given(
    places=st.lists(groups, min_size=1, max_size=2),
    more=st.integers(0, 3),
    skipped=st.integers(0, 3),
    tiers=st.tuples(prices, prices),
    copy=st.builds(TierPrice, seconds, seconds, st.just(0)),
    token_s=st.floats(0, 0.002),
    context_s=st.floats(0, 1e-6),
    most_s=st.floats(0, 0.5),
)
def test_no_other_end_brings_the_first_token_sooner(  # noqa: PLR0917
    places: list[list[object]],
    more: int,
    skipped: int,
    tiers: tuple[TierPrice, TierPrice],
    copy: TierPrice,
    token_s: float,
    context_s: float,
    most_s: float,
) -> None:
    step = STEP * len(places)
    look = look_of(places, more, skipped * step)
    end = look.chain.end

    def compute_s(at: int) -> float:
        return token_s * (end - at) + context_s * (end * end - at * at)

    given = Prices(tiers, copy, compute_s, most_s, [True] * TIERS)
    waits = any(each.stored or each.loading for each in look.found)
    decision = decide(look, given if waits else None)
    ends = range(look.start, max(look.start, look.known) + 1, step)
    assert decision.end in ends
    begins = ready_end_of_host(look)
    if waits:
        best = [
            total
            for total, wait_s in (first_token_s(look, given, at) for at in ends if at >= begins)
            if wait_s <= most_s
        ]
        mine, wait_s = first_token_s(look, given, decision.end)
        assert wait_s <= most_s + 1e-9
        assert decision.end >= begins, "what host memory has is always loaded"
        step_s = compute_s(look.start) - compute_s(look.start + step)
        last_s = compute_s(end - step) if end >= step else 0.0
        assert mine <= min(best) + max(step_s, last_s) + 1e-9, "another end would be better by more than a step"
        assert abs(decision.wait_s - wait_s) < 1e-9
    else:
        assert decision.end == max(look.start, look.known)
    check_parts(look, decision)


def ready_end_of_host(look: Look) -> int:
    """Up to which token all that is known comes from no tier."""
    at = look.start
    while at < look.known:
        for each in look.found:
            per = range(at // each.group.chunk_tokens, (at + look.chain.step_tokens) // each.group.chunk_tokens)
            if any(each.sources()[place - each.first] != HOST for place in per):
                return at
        at += look.chain.step_tokens
    return at


def check_parts(look: Look, decision: Decision) -> None:
    """Each row up to the end is there, or waited for; and what tiers have behind it is declined."""
    keys = {key for each in look.found for key in each.group.keys[each.first : decision.end // each.group.chunk_tokens]}
    here = {row.key for row in decision.ready}
    missing = {key for _, key in decision.missing}
    assert here | missing == keys
    assert not here & missing
    assert decision.missing == sorted(decision.missing)
    wanted = {key for some in decision.wanted.values() for _, key in some}
    stored = {each.group.keys[place] for each in look.found for some in each.stored.values() for place in some}
    declined = {key for _, some in decision.declined for key in some}
    assert wanted == stored & missing
    assert declined <= stored - wanted
    assert decision.end < look.known or not declined
    assert set(decision.wanted) == {tier for tier, queued in decision.places.items() if queued}
    assert ready_end(look, decision.end) == decision.end or missing
