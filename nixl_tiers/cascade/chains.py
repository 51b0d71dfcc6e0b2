"""Chains: all keys of a request, resolved in one batch at its first look-up of a step; load or recompute.

vLLM asks for one key at a time, and what it asks next depends on the answer. Here its whole chain is looked at before
the first answer: which rows are where, how much of it is worth loading, and what to promote. Later look-ups of the step
need only `Scan`. docs/internals/load-or-recompute.md.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import lcm
from typing import Final, NamedTuple

from nixl_tiers.cascade import pricing
from nixl_tiers.cascade.existence import ExistenceChecks
from nixl_tiers.cascade.host import Row, RowState
from nixl_tiers.cascade.pricing import HOST, Run
from nixl_tiers.cascade.promotion import Promotion
from nixl_tiers.cascade.request_index import RequestIndex
from nixl_tiers.cascade.requests import Request, Wait
from nixl_tiers.cascade.state import CascadeState
from nixl_tiers.chunk import Key

FIRST_BATCH: Final = 16  # keys that are looked up first: most prompts without any hit end there
BATCH: Final = 1024
MAX_RUNS: Final = 64
_READY: Final = RowState.READY
_LOADING: Final = RowState.LOADING


@dataclass(frozen=True, slots=True)
class Group:
    """The keys of one KV group, from the request's first chunk on: `keys[i]` ends at token `chunk_tokens * (i + 1)`.
    `window`: a load needs so many of them before its end; None: all (full attention)."""

    keys: Sequence[Key]
    chunk_tokens: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Chain:
    """The keys of a request. At least one group has full attention."""

    groups: tuple[Group, ...]
    full: list[Group] = field(init=False)  # those with full attention
    end: int = field(init=False)  # the last token up to which all of them have keys
    step_tokens: int = field(init=False)  # of which all of them have whole chunks

    def __post_init__(self) -> None:
        full = [group for group in self.groups if group.window is None]
        object.__setattr__(self, "full", full)
        object.__setattr__(self, "end", min(len(group.keys) * group.chunk_tokens for group in full))
        object.__setattr__(self, "step_tokens", lcm(*(group.chunk_tokens for group in full)))


class Scan(NamedTuple):
    """`waits`: some of the chain up to token `end` is still to come; else all of it are hits. Beyond, all are misses.
    Of a windowed group, that is so as far as its rows exist."""

    waits: bool
    end: int


@dataclass(slots=True)
class _Found:
    """The rows of one full-attention group from a request's start on, as far as they are known to exist: in the host's
    index, or the tier that holds them."""

    group: Group
    first: int  # of `group.keys`
    keys: Sequence[Key] = ()
    rows: list[Row | None] = field(default_factory=list)
    tiers: list[int] = field(default_factory=list)  # HOST where `rows` has one
    unready: list[int] = field(default_factory=list)  # places in `rows` of those that are not in host memory


@dataclass(slots=True)
class _Look:
    """One scan. Positions are in tokens of the request; `known`: up to there, all rows are known to exist."""

    request: Request
    chain: Chain
    start: int
    end: int
    step_tokens: int  # of which every full-attention group has whole chunks
    first: int  # sub-block
    now: float
    found: list[_Found] = field(default_factory=list)
    known: int = 0


class Chains:
    """Scans of chains on behalf of requests (`TierManager.scan`)."""

    def __init__(
        self, state: CascadeState, checks: ExistenceChecks, promotion: Promotion, requests: RequestIndex
    ) -> None:
        self._state = state
        self._host = state.host
        self._checks = checks
        self._promotion = promotion
        self._requests = requests

    def scan(self, request: Request, chain: Chain, start: int, first: int, now: float) -> Scan:
        """One step's look-ups of a request's chain from token `start` on."""
        rescan = request.rescan
        request.begin(self._host.step, start)
        full, end = chain.full, chain.end
        if request.waiting and not request.first_scan:
            if self._promotion.still_waits(request, start + 1, first, now):
                if not self._is_late(request, chain, start, now):
                    return Scan(True, end if request.chosen is None else request.chosen)
                self._promotion.give_up_waiting(request)
        elif rescan:
            request.chosen = None
        look = _Look(request, chain, start, end, chain.step_tokens, first, now)
        request.position = end  # what vLLM looks up next is no longer this scan
        limit = end if request.chosen is None else min(end, request.chosen)
        look.found = [self._find(look, group, limit) for group in full]
        look.known = min((each.first + len(each.keys)) * each.group.chunk_tokens for each in look.found)
        look.known -= look.known % look.step_tokens
        if request.first_scan and request.chosen is None and not request.expired and self._state.tiers:
            chosen, expected_s = self._choose(look)
        else:
            chosen, expected_s = max(start, look.known), now
        waits = self._ask(look, chosen)
        open_end = chosen >= look.known and len(look.found) == 1 and self._ask_for_unknown(look, limit)
        if request.first_scan and (waits or open_end or len(full) < len(chain.groups)):
            request.wait = Wait(now, expected_s, look.step_tokens, end, self._places(look))
        if not (waits or open_end):
            if request.waiting and not request.pinned and not request.asked:
                self._promotion.release(request)  # it has waited for an existence check, which found nothing
            if chosen < look.known:
                request.chosen = chosen
            return Scan(False, self._ready_end(look, chosen))
        request.chosen = None if open_end else chosen
        return Scan(True, end if open_end else chosen)

    # --- inside ------------------------------------------------------------------------------------------------

    def _find(self, look: _Look, group: Group, limit: int) -> _Found:
        """Where the group's rows are from the start on, up to token `limit` or the first that is nowhere."""
        found = _Found(group, look.start // group.chunk_tokens)
        at, stop, size = found.first, limit // group.chunk_tokens, FIRST_BATCH
        while at < stop:
            keys = group.keys[at : min(at + size, stop)]
            before = len(found.rows)
            rows, tiers, unready = self._find_batch(look, keys)
            found.rows += rows
            found.tiers += tiers
            found.unready += [before + place for place in unready] if before else unready
            at += len(rows)
            if len(rows) < len(keys):
                break
            size = BATCH
        found.keys = group.keys[found.first : at]
        return found

    def _find_batch(self, look: _Look, keys: Sequence[Key]) -> tuple[list[Row | None], list[int], list[int]]:
        """The same of some keys: rows, tiers, and which are not in host memory."""
        request, host = look.request, self._host
        rows: list[Row | None] = list(map(host.index.get, keys))
        absent, coming = [], []
        stop = len(keys)
        for place, row in enumerate(rows):
            if row is None:
                absent.append(place)
            elif row.state is _READY:
                if row.missing > look.first:
                    stop = place
                    break
            elif row.state is _LOADING and not row.mover_refs:
                host.invalidate(row)  # an error has ended its load
                rows[place] = None
                absent.append(place)
            else:
                coming.append(place)
        unready = sorted(absent + coming) if coming else absent
        tiers = [HOST] * stop
        if request.asked:  # where the host had no room for a row that was asked for, the chain ends
            refused = [place for place in absent if not request.asked.get(keys[place], True)]
            stop = min([stop, *refused])
        for tier in self._state.tiers:
            if not absent:
                break
            if request.allowed is not None and tier.number not in request.allowed:
                continue
            left = []
            can_load = tier.can_load_many([keys[place] for place in absent], look.now)
            for place, loadable in zip(absent, can_load, strict=True):
                if loadable:
                    tiers[place] = tier.number
                else:
                    left.append(place)
            absent = left
        stop = min([stop, *absent[:1]])
        return rows[:stop], tiers[:stop], unready[: bisect_left(unready, stop)]

    def _choose(self, look: _Look) -> tuple[int, float]:
        """Up to which token to load, and when that is expected to be in host memory."""
        state, prefill = self._state, self._state.prefill
        sources = self._sources(look)
        runs = [Run(source, len(list(run))) for source, run in groupby(sources)]
        unmeasured = any(run.source >= 0 and not state.tiers[run.source].loads.known for run in runs)
        if len(runs) > MAX_RUNS:  # no prefix is scattered like that for long: the rest is taken as one
            rest = runs[MAX_RUNS - 1 :]
            runs[MAX_RUNS - 1 :] = [Run(max(run.source for run in rest), sum(run.steps for run in rest))]
        windows = [group for group in look.chain.groups if group.window is not None]
        if not windows and len(runs) < 2 and (not runs or runs[0].source == HOST):
            return max(look.start, look.known), look.now
        rows_per_step = sum(look.step_tokens // each.group.chunk_tokens for each in look.found)
        first = look.start - look.start % look.step_tokens
        known = pricing.Chain(first, look.step_tokens, rows_per_step, sum(group.window or 0 for group in windows))
        crowd = self._crowd()

        def compute_s(at: int) -> float | None:
            seconds = prefill.seconds(at, look.end)
            return None if seconds is None else crowd * seconds

        choice = pricing.choose(
            runs,
            known,
            [state.price_of(tier) for tier in state.tiers],
            pricing.Costs(compute_s, self._copy_s, state.limits.wait_s),
            self._fits(look, windows),
        )
        chosen = max(look.start, choice.end)
        if chosen < look.known:
            self._decline(look, chosen)
        return chosen, look.now if unmeasured else look.now + choice.wait_s

    def _sources(self, look: _Look) -> list[int]:
        """Of each step from the start on: the lowest tier that it needs a row of."""
        first = look.start // look.step_tokens
        steps = max(0, look.known // look.step_tokens - first)
        if len(look.found) == 1:
            return look.found[0].tiers[:steps]
        sources = [HOST] * steps
        for each in look.found:
            per_step = look.step_tokens // each.group.chunk_tokens
            for place, tier in enumerate(each.tiers, each.first):
                if (step := place // per_step - first) < steps:
                    sources[step] = max(sources[step], tier)
        return sources

    def _copy_s(self, rows: int) -> float:
        return self._state.copies.seconds(rows * self._state.row_bytes) if rows else 0.0

    def _crowd(self) -> int:
        """How many requests wait while one computes, itself included, as far as they count: those whose turn is
        still to come, or all that are alive. Those that wait for storage lose nothing."""
        if self._state.prefer == "throughput":
            return len(self._requests.by_name)
        return 1 + len(self._requests.queued)

    def _fits(self, look: _Look, windows: Sequence[Group]) -> pricing.Fits:
        """Up to a token, the last one at which all windowed groups have their rows."""
        if not windows or self._checks.tiers:  # other engines may have stored what is not known here
            return lambda end: end
        reaches = []  # by group: of each chunk, how many up to it are there without a gap
        for group in windows:
            first = look.start // group.chunk_tokens
            reach, here = [], 0
            for key in group.keys[first:]:
                here = here + 1 if self._exists(look, key) else 0
                reach.append(here)
            reaches.append((group, first, reach))

        def has_window(group: Group, first: int, reach: list[int], end: int) -> bool:
            place = -(-end // group.chunk_tokens) - 1 - first
            return place < len(reach) and reach[place] >= min(group.window or 0, place + 1)

        def fits(end: int) -> int:
            while end > look.start and not all(has_window(*each, end) for each in reaches):
                end -= look.step_tokens
            return max(end, look.start)

        return fits

    def _exists(self, look: _Look, key: Key) -> bool:
        allowed = look.request.allowed
        return key in self._host.index or any(
            (allowed is None or tier.number in allowed) and tier.can_load(key, look.now) for tier in self._state.tiers
        )

    def _decline(self, look: _Look, chosen: int) -> None:
        """What is beyond token `chosen` is not loaded, because that would take longer than to compute it."""
        for each in look.found:
            place = max(0, chosen // each.group.chunk_tokens - each.first)
            keys, tiers = each.keys[place:], each.tiers[place:]
            for tier in self._state.tiers:
                if declined := [key for key, source in zip(keys, tiers, strict=True) if source == tier.number]:
                    tier.counters.missed_slower += len(declined)
                    self._promotion.measure(tier, declined, look.now)

    def _ask(self, look: _Look, chosen: int) -> bool:
        """Promote what the request is going to load, as far as it is not in host memory; whether it has to wait. What
        is there is kept for it."""
        request = look.request
        missing: list[tuple[int, Key, int]] = []
        ready: list[Row] = []
        for each in look.found:
            tokens = each.group.chunk_tokens
            stop = max(0, chosen // tokens - each.first)
            rows, unready = each.rows[:stop], each.unready[: bisect_left(each.unready, stop)]
            ready += [row for row in rows if row is not None and row.state is _READY]
            ends = [tokens * (each.first + place + 1) for place in unready]
            keys, tiers = map(each.keys.__getitem__, unready), map(each.tiers.__getitem__, unready)
            missing += zip(ends, keys, tiers, strict=True)
        request.missing.clear()
        if missing and self._promotion.has_expired(request, look.now):
            missing.clear()
        if len(look.found) > 1:
            missing.sort()
        request.missing.extend([(end, key) for end, key, _ in missing])
        asked = request.asked
        fresh = {key: tier for _, key, tier in missing if tier != HOST and key not in asked}
        if fresh:
            request.ask(fresh)
        for number in set(fresh.values()):
            request.lowest = max(request.lowest, number)
            self._state.tiers[number].queue_loads(request, [key for key, tier in fresh.items() if tier == number])
        if missing:
            self._promotion.wait(request, look.now)
        if not (missing and request.waiting):  # a pin ends if the request is not scheduled for long, even in this step
            step = self._host.step
            for row in ready:
                row.step = step
        if request.waiting:
            request.pin_all(ready)
        else:
            request.scan_hits += ready
        return bool(missing)

    def _ask_for_unknown(self, look: _Look, limit: int) -> bool:
        """The first keys that are nowhere known: whether to wait for an existence check of them, or for a listing."""
        (found,) = look.found
        request, group, now = look.request, found.group, look.now
        waits = False
        for place in range(found.first + len(found.keys), limit // group.chunk_tokens):
            key = group.keys[place]
            row = self._host.index.get(key)
            if (row is not None and row.state is _READY) or self._promotion.has_expired(request, now):
                break
            if not (
                self._promotion.enqueue(key, request, now)  # a suspect, a circuit that is open: noted there
                or self._checks.should_wait(key, request, now)
                or (request.waits_for_listing and self._promotion.may_be_listed(key, request, now))
            ):
                break
            self._promotion.wait(request, now)
            request.missing.append((group.chunk_tokens * (place + 1), key))
            waits = True
        return waits

    def _ready_end(self, look: _Look, chosen: int) -> int:
        """Up to which token all rows are in host memory."""
        end = chosen
        for each in look.found:
            if each.unready:
                end = min(end, (each.first + each.unready[0]) * each.group.chunk_tokens)
        return max(look.start, end - end % look.step_tokens)

    def _places(self, look: _Look) -> list[tuple[int, int]]:
        """The tiers that the request waits for, and its last row's place in the queue of each."""
        used = set().union(*(each.tiers for each in look.found))
        coming = [each.rows[place] for each in look.found for place in each.unready]
        loading = {row.source for row in coming if row is not None and row.state is _LOADING}
        return [
            (tier.number, tier.queued if tier.number in used else tier.queued - len(tier.to_load))
            for tier in self._state.tiers
            if tier.number in used or tier.spec.name in loading
        ]

    def _is_late(self, request: Request, chain: Chain, start: int, now: float) -> bool:
        """Whether to compute what the request waits for is quicker than to wait on. O(1)."""
        wait, state = request.wait, self._state
        if wait is None or not request.missing:
            return False
        have = start
        if len(chain.full) == len(chain.groups):  # what has come is of use without the rest
            have = max(have, (request.missing[0][0] or 0) - wait.step_tokens)
        upto = wait.end if request.chosen is None else request.chosen
        rest, kept = state.prefill.seconds(have, wait.end), state.prefill.seconds(upto, wait.end)
        if rest is None or kept is None:
            return False
        rest_s = latency_s = 0.0
        for number, queued in wait.places:
            tier = state.tiers[number]
            rest_s = max(rest_s, tier.rows_before(queued) * tier.loads.s_per_byte * state.row_bytes)
            latency_s = max(latency_s, tier.loads.latency_s)
        return pricing.left_s(now, wait.expected_s, rest_s, latency_s) > self._crowd() * (rest - kept)
