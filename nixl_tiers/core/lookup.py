"""Chains: all keys of a request, resolved in one batch at its first look-up of a step; load or recompute.

vLLM asks for one key at a time, and what it asks next depends on the answer. Here its whole chain is looked at before
the first answer: which rows are where, how much of it is worth loading, and what to promote. Later look-ups of the step
need only `Scan`. docs/internals/load-or-recompute.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final, NamedTuple

from nixl_tiers.base.chunk import Key
from nixl_tiers.core import pricing
from nixl_tiers.core.chain_rows import Chain, ChainRows, RowFinder
from nixl_tiers.core.decide import Decision, Ends, Look, Prices, Reach, decide, ready_end
from nixl_tiers.core.existence import ExistenceChecks
from nixl_tiers.core.probes import Measurements
from nixl_tiers.core.promotion import Promotion, RequestIndex
from nixl_tiers.core.requests import Request, Wait
from nixl_tiers.core.rows import LOADING, READY, Row
from nixl_tiers.core.state import CascadeState

UNPRICED: Final = float("inf")
IDLE_SHARE: Final = 0.125  # a wait is judged again when so much of what it may still last is over,
MOST_IDLE_S: Final = 0.05  # or after so long, as what it is judged by may have changed


class Scan(NamedTuple):
    """`waits`: some of the chain up to token `end` is still to come; else all of it are hits. Beyond, all are misses.
    Of a windowed group, that is so as far as its rows exist."""

    waits: bool
    end: int


class Chains:
    """Scans of chains on behalf of requests (`TierManager.look_up`): what `decide` says is done here."""

    def __init__(
        self,
        state: CascadeState,
        checks: ExistenceChecks,
        promotion: Promotion,
        measurements: Measurements,
        requests: RequestIndex,
    ) -> None:
        self._state = state
        self._host = state.host
        self._checks = checks
        self._promotion = promotion
        self._measurements = measurements
        self._requests = requests
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
        return row is not None and row.state is READY and row.worker_refs > 0

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
        if request.pinned:
            request.forget_dead(list(request.pinned))
        request.scan.position = end  # what vLLM looks up next is no longer this scan
        limit = end if request.chosen is None else min(end, request.chosen)
        found = [self._rows.find(request, group, (start, limit), first) for group in chain.full]
        known = min([each.stop * each.group.chunk_tokens for each in found])
        look = Look(
            chain, start, found, known - known % chain.step_tokens, lambda: self._reaches(request, chain, start)
        )
        undecided = request.scan.first and request.chosen is None and not request.gave_up
        costs = bool(chain.windows) or any(each.stored or each.loading for each in found)
        prices = self._prices(found, end, now) if undecided and costs and self._state.tiers else None
        return self._apply(request, look, decide(look, prices), limit, now)

    def _apply(self, request: Request, look: Look, decision: Decision, limit: int, now: float) -> Scan:
        """Have the request load what was decided, and wait for what of that is still to come."""
        chain, end = look.chain, look.chain.end
        for number, keys in decision.declined:
            tier = self._state.tiers[number]
            tier.counters.missed_slower += len(keys)
            self._measurements.declined(tier, keys, now)
        waits = self._promote(request, decision, now)
        if len(look.found) > 1:
            self._note_refused(look.found, limit)
        open_end = (
            decision.end >= look.known
            and len(look.found) == 1
            and self._ask_for_unknown(request, look.found[0], limit, now)
        )
        if request.scan.first and (waits or open_end or chain.windows):
            places = [(n, self._place_in_queue(n, queued)) for n, queued in sorted(decision.places.items())]
            request.wait = Wait(now + decision.wait_s, chain.step_tokens, end, places)
        if not (waits or open_end):
            if request.waiting and not request.pinned and not request.wanted:
                self._promotion.release(request)  # it has waited for an existence check, which found nothing
            if decision.end < look.known:
                request.chosen = decision.end
            return Scan(False, ready_end(look, decision.end))
        request.chosen = None if open_end else decision.end
        return Scan(True, end if open_end else decision.end)

    def _still_waits(self, request: Request, start: int, now: float) -> bool:
        """Whether a request waits of which `_scan` would find out nothing in this step that its last one has not: what
        it waits for is on its way, and the wait was judged a moment ago. A long queue of such requests is looked up at
        every step."""
        wait = request.wait
        if wait is None or now >= wait.idle_until_s or request.rescan or self._promotion.expire_if_due(request, now):
            return False
        if not (request.waiting and request.missing):
            return False
        place, last = request.missing[-1]
        row = self._host.index.get(last)
        return (place or 0) > start and (row.state is not READY if row is not None else last in request.wanted)

    def _prices(self, found: list[ChainRows], end: int, now: float) -> Prices:
        """Of all tiers now. The chain's own rows that are being loaded are counted with the others of the chain."""
        state = self._state
        tiers = [state.price_of(tier) for tier in state.tiers]
        for each in found:
            for number, places in each.loading.items():
                tiers[number] = tiers[number]._replace(ahead=max(0, tiers[number].ahead - len(places)))
        crowd = self._crowd()

        def compute_s(at: int) -> float | None:
            seconds = self._compute_s(at, end)
            return None if seconds is None else crowd * seconds

        measured = [tier.loads.known for tier in state.tiers]
        return Prices(tiers, state.price_of_copies(now), compute_s, state.limits.wait_s, measured)

    def _compute_s(self, at: int, end: int) -> float | None:
        """Seconds to compute a chain that ends at token `end` from token `at` on, and the token behind it, which the
        engine computes whatever is loaded: so a step is needed for a whole hit too, and none is saved by loading what
        one step computes. None while unknown."""
        return self._state.prefill.seconds(at, end + 1)

    def _crowd(self) -> int:
        """How many requests wait while one computes, itself included, as far as they count: those whose turn is
        still to come, or all that are alive. Those that wait for storage lose nothing."""
        if self._state.prefer == "throughput":
            return len(self._requests.by_name)
        return 1 + len(self._requests.before_turn)

    def _reaches(self, request: Request, chain: Chain, start: int) -> list[Reach]:
        if self._checks.tiers:  # other engines may have stored what is not known here
            return []
        reaches = []
        for group in chain.windows:
            first = start // group.chunk_tokens
            reach, here = [], 0
            for key in group.keys[first:]:
                here = here + 1 if self._rows.exists(request, key) else 0
                reach.append(here)
            reaches.append((group, first, reach))
        return reaches

    def _place_in_queue(self, number: int, queued: bool) -> int:
        """Behind which rows of all that this tier ever queued the request's last one is; not `queued`: under way."""
        tier = self._state.tiers[number]
        return tier.ever_queued - (0 if queued else tier.rows_to_load)

    def _promote(self, request: Request, decision: Decision, now: float) -> bool:
        """Promote what the request is going to load, as far as it is not in host memory; whether it has to wait. What
        is there is kept for it."""
        missing, ready = decision.missing, decision.ready
        request.missing.clear()
        if missing and self._promotion.expire_if_due(request, now):
            missing = []
        if missing:
            request.missing.extend(missing)
            self._queue(request, decision.wanted)
            self._promotion.wait(request, now)
        if not (missing and request.waiting):  # a pin ends if the request is not scheduled for long, even in this step
            self._host.hit(ready)
        if request.waiting:
            request.pin_all(ready)
        else:
            request.scan.hits += ready
        return bool(missing)

    def _queue(self, request: Request, wanted: dict[int, Ends]) -> None:
        """Have these rows, by the tier that holds them, promoted, as far as they were not asked for before."""
        for number, some in wanted.items():
            if keys := [key for _, key in some if key not in request.wanted]:
                self._state.tiers[number].queue_loads(request, keys)

    def _ask_for_unknown(self, request: Request, found: ChainRows, limit: int, now: float) -> bool:
        """The first keys that are nowhere known: whether to wait for an existence check of them, or for a listing."""
        group, waits = found.group, False
        for place in range(found.stop, limit // group.chunk_tokens):
            key = group.keys[place]
            row = self._host.index.get(key)
            if (row is not None and row.state is READY) or self._promotion.expire_if_due(request, now):
                break
            if not (
                self._promotion.enqueue(key, request)  # a circuit that is open: noted there
                or self._checks.should_wait(key, request, now)
                or (request.wishes.patient and self._promotion.may_be_listed(key, request, now))
            ):
                break
            self._promotion.wait(request, now)
            request.missing.append((group.chunk_tokens * (place + 1), key))
            waits = True
        return waits

    def _note_refused(self, found: Sequence[ChainRows], limit: int) -> None:
        """Of the first key of each group that is nowhere, the tier's circuit may be open."""
        for each in found:
            if each.stop < limit // each.group.chunk_tokens:
                self._promotion.note_refused(each.group.keys[each.stop])

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
        rest, kept = self._compute_s(have, wait.end), self._compute_s(upto, wait.end)
        if rest is None or kept is None:
            return UNPRICED
        rest_s = latency_s = 0.0
        for number, queued in wait.places:
            tier = state.tiers[number]
            rest_s = max(rest_s, tier.rows_before(queued) * tier.loads.s_per_byte * state.row_bytes)
            latency_s = max(latency_s, tier.loads.latency_s)
        return self._crowd() * (rest - kept) - pricing.left_s(now, wait.expected_s, rest_s, latency_s)


class Lookup(Enum):
    HIT = "hit"
    PENDING = "pending"
    MISS = "miss"


class KeyLookups:
    """Answers look-ups of single keys (`TierManager.look_up_keys`)."""

    def __init__(self, state: CascadeState, checks: ExistenceChecks, promotion: Promotion) -> None:
        self._host = state.host
        self._checks = checks
        self._promotion = promotion

    def lookup(  # noqa: PLR0917 - called for each key
        self,
        request: Request,
        key: Key,
        position: int | None,
        now: float,
        first: int,
        hits: list[Row],
        *,
        check: bool,
    ) -> Lookup:
        """See `TierManager.look_up_keys`. A hit's row is added to `hits`."""
        waits = request.begin(self._host.step, position)
        if request.scan.answered:
            return Lookup.MISS
        if waits and self._promotion.still_waits(request, position, first, now):
            request.scan.answered = True
            return Lookup.PENDING
        if waits:
            request.scan_anew()
        row = self._host.index.get(key)
        if row is not None and row.state is READY:
            if row.missing > first:
                return Lookup.MISS
            hits.append(row)
            if request.waiting:
                request.pin(row)
            else:
                request.scan.hits.append(row)
            return Lookup.HIT
        if self._promotion.expire_if_due(request, now):
            return Lookup.MISS
        if row is not None and row.state is LOADING and not row.mover_refs:
            self._host.invalidate(row)  # an error has ended its load
            row = None
        if (
            row is not None
            or key in request.wanted
            or self._promotion.enqueue(key, request)
            or (check and self._checks.should_wait(key, request, now))
            or (request.wishes.patient and self._promotion.may_be_listed(key, request, now))
        ):
            self._promotion.wait(request, now)
            request.note_missing(key)
            return Lookup.PENDING
        if request.waiting and not request.pinned and not request.wanted:
            self._promotion.release(request)  # it has waited for an existence check, which found nothing
        return Lookup.MISS
