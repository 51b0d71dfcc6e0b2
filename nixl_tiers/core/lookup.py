"""Chains: all keys of a request, resolved in one batch at its first look-up of a step; load or recompute.

vLLM asks for one key at a time, and what it asks next depends on the answer. Here its whole chain is looked at before
the first answer: which rows are where, how much of it is worth loading, and what to promote. Later look-ups of the step
need only `Scan`. docs/internals/load-or-recompute.md.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import groupby
from typing import Final, NamedTuple

from nixl_tiers.base.chunk import Key
from nixl_tiers.core import pricing
from nixl_tiers.core.chain_rows import Chain, ChainRows, Group, RowFinder, below
from nixl_tiers.core.existence import ExistenceChecks
from nixl_tiers.core.measurements import Measurements
from nixl_tiers.core.pricing import HOST, Run
from nixl_tiers.core.promotion import Promotion
from nixl_tiers.core.requests import Request, Wait
from nixl_tiers.core.rows import Row, RowState
from nixl_tiers.core.state import CascadeState
from nixl_tiers.core.worth import Worth

MAX_RUNS: Final = 64
UNPRICED: Final = float("inf")
IDLE_SHARE: Final = 0.125  # a wait is judged again when so much of what it may still last is over,
MOST_IDLE_S: Final = 0.05  # or after so long, as what it is judged by may have changed
_READY: Final = RowState.READY


class Scan(NamedTuple):
    """`waits`: some of the chain up to token `end` is still to come; else all of it are hits. Beyond, all are misses.
    Of a windowed group, that is so as far as its rows exist."""

    waits: bool
    end: int


@dataclass(slots=True)
class _Look:
    """One scan, from token `start` on. `found`: of each full-attention group; up to token `known`, the rows of all of
    them are known to exist."""

    request: Request
    chain: Chain
    start: int
    now: float
    found: list[ChainRows]
    known: int


class Chains:
    """Scans of chains on behalf of requests (`TierManager.look_up`)."""

    def __init__(
        self,
        state: CascadeState,
        checks: ExistenceChecks,
        promotion: Promotion,
        measurements: Measurements,
        *,
        worth: Worth,
    ) -> None:
        self._state = state
        self._host = state.host
        self._checks = checks
        self._promotion = promotion
        self._measurements = measurements
        self._worth = worth
        self._rows = RowFinder(state)

    def scan(self, request: Request, chain: Chain, start: int, first: int, now: float) -> Scan:
        """One step's look-ups of a request's chain from token `start` on, which is before the chain's end."""
        if request.wait is not None and request.wait.end != chain.end:
            # The engine has more of it than before, of a request that may load only so much: it is chosen anew.
            request.wait, request.rescan = None, True
        elif self._still_waits(request, start, now):
            return Scan(True, chain.end if request.chosen is None else request.chosen)
        scan = self._scan(request, chain, start, first, now)
        request.hit_end = 0 if scan.waits else scan.end
        return scan

    def shares(self, request: Request, chain: Chain, start: int) -> bool:
        """Whether a worker is copying to the engine what its last look-up has found at token `start`: the engine keeps
        the request back until that load has ended, to share its blocks."""
        keys, tokens, _ = chain.groups[0]
        if request.hit_end < start + tokens or request.generation is not self._host.generation:
            return False
        row = self._host.index.get(keys[start // tokens])
        return row is not None and row.state is _READY and row.worker_refs > 0

    # --- inside ------------------------------------------------------------------------------------------------

    def _scan(self, request: Request, chain: Chain, start: int, first: int, now: float) -> Scan:
        rescan = request.rescan
        request.begin(self._host.step, start)
        request.judge_again()
        end = chain.end
        if request.waiting and not request.scan.first:
            if self._promotion.still_waits(request, start + 1, first, now):
                if (margin_s := self._margin_s(request, chain, start, now)) >= 0:
                    if request.wait is not None and request.missing and not chain.windows:
                        request.wait.idle_until_s = now + min(MOST_IDLE_S, margin_s * IDLE_SHARE)
                    return Scan(True, end if request.chosen is None else request.chosen)
                self._promotion.give_up_waiting(request)
        elif rescan:
            request.chosen = None
        request.scan.position = end  # what vLLM looks up next is no longer this scan
        limit = end if request.chosen is None else min(end, request.chosen)
        found = [self._rows.find(request, group, (start, limit), first, now) for group in chain.full]
        known = min([each.stop * each.group.chunk_tokens for each in found])
        look = _Look(request, chain, start, now, found, known - known % chain.step_tokens)
        chosen, expected_s = max(start, look.known), now
        if request.scan.first and request.chosen is None and not request.gave_up and self._state.tiers:
            chosen, expected_s = self._choose(look)
        waits = self._ask(look, chosen)
        if len(found) > 1:
            self._note_refused(look, limit)
        open_end = chosen >= look.known and len(found) == 1 and self._ask_for_unknown(look, limit)
        if request.scan.first and (waits or open_end or chain.windows):
            request.wait = Wait(now, expected_s, chain.step_tokens, end, self._places(look, chosen))
        if not (waits or open_end):
            if request.waiting and not request.pinned and not request.asked:
                self._promotion.release(request)  # it has waited for an existence check, which found nothing
            if chosen < look.known:
                request.chosen = chosen
            return Scan(False, self._ready_end(look, chosen))
        request.chosen = None if open_end else chosen
        return Scan(True, end if open_end else chosen)

    def _still_waits(self, request: Request, start: int, now: float) -> bool:
        """Whether a request waits of which `_scan` would find out nothing in this step that its last one has not: what
        it waits for is on its way, and the wait was judged a moment ago. A long queue of such requests is looked up at
        every step."""
        wait = request.wait
        if wait is None or now >= wait.idle_until_s or request.rescan or self._promotion.has_expired(request, now):
            return False
        if not request.waiting:
            return False
        place, last = request.missing[-1]
        row = self._host.index.get(last)
        return (place or 0) > start and (row.state is not _READY if row is not None else last in request.asked)

    def _choose(self, look: _Look) -> tuple[int, float]:
        """Up to which token to load, and when that is expected to be in host memory."""
        state, chain = self._state, look.chain
        if not chain.windows and not [each for each in look.found if each.stored or each.loading]:
            return max(look.start, look.known), look.now
        runs = self._runs(look)
        unmeasured = [run for run in runs if run.source != HOST and not state.tiers[run.source].loads.known]
        first = look.start - look.start % chain.step_tokens
        crowd, end = self._worth.crowd(), chain.end

        def compute_s(at: int) -> float | None:
            seconds = self._worth.compute_s(at, end)
            return None if seconds is None else crowd * seconds

        choice = pricing.choose(
            runs,
            pricing.Chain(first, chain.step_tokens, chain.step_rows, chain.window_rows),
            self._prices(look),
            compute_s,
            copy=state.price_of_copies(look.now),
            most_s=state.limits.wait_s,
            fits=self._fits(look),
        )
        chosen = max(look.start, choice.end)
        if chosen < look.known:
            self._decline(look, chosen)
        return chosen, look.now if unmeasured else look.now + choice.wait_s

    def _prices(self, look: _Look) -> list[pricing.TierPrice]:
        """Of the tiers now. The chain's own rows that are being loaded are counted with the others of the chain."""
        prices = [self._state.price_of(tier) for tier in self._state.tiers]
        for each in look.found:
            for number, places in each.loading.items():
                price = prices[number]
                prices[number] = price._replace(ahead=max(0, price.ahead - len(places)))
        return prices

    def _runs(self, look: _Look) -> list[Run]:
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

    def _fits(self, look: _Look) -> pricing.Fits:
        """Up to a token, the last one at which all windowed groups have their rows."""
        windows, step_tokens = look.chain.windows, look.chain.step_tokens
        if not windows or self._checks.tiers:  # other engines may have stored what is not known here
            return lambda end: end
        reaches = []  # by group: of each chunk, how many up to it are there without a gap
        for group in windows:
            first = look.start // group.chunk_tokens
            reach, here = [], 0
            for key in group.keys[first:]:
                here = here + 1 if self._rows.exists(look.request, key, look.now) else 0
                reach.append(here)
            reaches.append((group, first, reach))

        def has_window(group: Group, first: int, reach: list[int], end: int) -> bool:
            place = -(-end // group.chunk_tokens) - 1 - first
            return place < len(reach) and reach[place] >= min(group.window or 0, place + 1)

        def fits(end: int) -> int:
            while end > look.start and not all(has_window(*each, end) for each in reaches):
                end -= step_tokens
            return max(end, look.start)

        return fits

    def _decline(self, look: _Look, chosen: int) -> None:
        """What is beyond token `chosen` is not loaded, because that would take longer than to compute it."""
        for each in look.found:
            keys, first = each.group.keys, chosen // each.group.chunk_tokens
            for number, places in each.stored.items():
                if declined := [keys[place] for place in places[bisect_left(places, first) :]]:
                    tier = self._state.tiers[number]
                    tier.counters.missed_slower += len(declined)
                    self._measurements.declined(tier, declined, look.now)

    def _ask(self, look: _Look, chosen: int) -> bool:
        """Promote what the request is going to load, as far as it is not in host memory; whether it has to wait. What
        is there is kept for it."""
        request = look.request
        ready: list[Row] = []
        missing: list[tuple[int, Key]] = []  # by their ends
        wanted: dict[int, list[tuple[int, Key]]] = {}  # those of each tier
        for each in look.found:
            tokens, keys = each.group.chunk_tokens, each.group.keys
            stop = chosen // tokens
            ready += filter(None, each.rows[: stop - each.first])
            if each.coming:
                missing += [(tokens * (place + 1), keys[place]) for place in below(each.coming, stop)]
            for number, places in each.stored.items():
                if some := [(tokens * (place + 1), keys[place]) for place in below(places, stop)]:
                    missing += some
                    wanted.setdefault(number, []).extend(some)
        request.missing.clear()
        if missing and self._promotion.has_expired(request, look.now):
            missing.clear()
        if missing:
            if len(look.found) > 1 or len(wanted) > 1 or look.found[0].coming:
                for some in (missing, *wanted.values()):
                    some.sort()
            request.missing.extend(missing)
            self._queue(request, wanted)
            self._promotion.wait(request, look.now)
        if not (missing and request.waiting):  # a pin ends if the request is not scheduled for long, even in this step
            self._host.hit(ready)
        if request.waiting:
            request.pin_all(ready)
        else:
            request.scan.hits += ready
        return bool(missing)

    def _queue(self, request: Request, wanted: dict[int, list[tuple[int, Key]]]) -> None:
        """Have these rows, by the tier that holds them, promoted, as far as they were not asked for before."""
        asked = request.asked
        for number, some in wanted.items():
            if keys := [key for _, key in some if key not in asked]:
                request.ask(keys)
                request.waited.lowest = max(request.waited.lowest, number)
                self._state.tiers[number].queue_loads(request, keys)

    def _ask_for_unknown(self, look: _Look, limit: int) -> bool:
        """The first keys that are nowhere known: whether to wait for an existence check of them, or for a listing."""
        (found,) = look.found
        request, group, now = look.request, found.group, look.now
        waits = False
        for place in range(found.stop, limit // group.chunk_tokens):
            key = group.keys[place]
            row = self._host.index.get(key)
            if (row is not None and row.state is _READY) or self._promotion.has_expired(request, now):
                break
            if not (
                self._promotion.enqueue(key, request, now)  # a suspect, a circuit that is open: noted there
                or self._checks.should_wait(key, request, now)
                or (request.wishes.patient and self._promotion.may_be_listed(key, request, now))
            ):
                break
            self._promotion.wait(request, now)
            request.missing.append((group.chunk_tokens * (place + 1), key))
            waits = True
        return waits

    def _note_refused(self, look: _Look, limit: int) -> None:
        """The first key of each group that is nowhere may be a suspect, or the tier's circuit is open."""
        for each in look.found:
            if each.stop < limit // each.group.chunk_tokens:
                self._promotion.note_refused(each.group.keys[each.stop], look.now)

    def _ready_end(self, look: _Look, chosen: int) -> int:
        """Up to which token all rows are in host memory."""
        end = chosen
        for each in look.found:
            if (place := each.first_unready) < each.stop:
                end = min(end, place * each.group.chunk_tokens)
        return max(look.start, end - end % look.chain.step_tokens)

    def _places(self, look: _Look, chosen: int) -> list[tuple[int, int]]:
        """The tiers that the request waits for up to token `chosen`, and its last row's place in the queue of each."""
        queued: dict[int, bool] = {}  # of those tiers, whether some of its rows are, and not all under way
        for each in look.found:
            stop = chosen // each.group.chunk_tokens
            for rows, is_queued in ((each.loading, False), (each.stored, True)):
                for number, places in rows.items():
                    if places[0] < stop:
                        queued[number] = is_queued or queued.get(number, False)
        tiers = self._state.tiers
        return [(n, tiers[n].queued - (0 if queued[n] else len(tiers[n].to_load))) for n in sorted(queued)]

    def _margin_s(self, request: Request, chain: Chain, start: int, now: float) -> float:
        """How much longer what the request waits for may take for that to be as quick as to compute it; less than 0 if
        computing is quicker by now. O(1)."""
        wait, state = request.wait, self._state
        if wait is None or not request.missing:
            return UNPRICED
        have = start
        if not chain.windows:  # what has come is of use without the rest
            have = max(have, (request.missing[0][0] or 0) - wait.step_tokens)
        upto = wait.end if request.chosen is None else request.chosen
        if (saved_s := self._worth.saved_s(have, upto, wait.end)) is None:
            return UNPRICED
        rest_s = latency_s = 0.0
        for number, queued in wait.places:
            tier = state.tiers[number]
            rest_s = max(rest_s, tier.rows_before(queued) * tier.loads.s_per_byte * state.row_bytes)
            latency_s = max(latency_s, tier.loads.latency_s)
        return saved_s - pricing.left_s(now, wait.expected_s, rest_s, latency_s)
