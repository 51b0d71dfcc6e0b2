"""Existence checks: asking a medium that engines share whether it has keys that are not known here.

Nothing of such a medium is listed (`TierSpec.asked`): this is how an engine finds what others have stored, and what it
had stored itself before a restart.

A request that meets an unknown key waits for the answer, for a fraction of a second in all its life. Only that key is
checked first: an entirely new prompt costs one more look-up and one round trip. If the key is there, the next scan
collects the rest of the chain, which is checked at once. Absent keys are remembered for a while (a negative cache) and
cost nothing. No request waits for a tier that answered late, or about no key, until it has answered again: what is
unknown meanwhile is remembered, and asked for then. A `patient` request, a store's `get`, waits for checks as long as
for rows. Of requests that wait for their turn, and of prefetches, nobody waits yet (`ask_ahead`): they take half of the
checks at most.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import Final

from nixl_tiers.base.chunk import Key
from nixl_tiers.core.deferred_free import DeferredFree
from nixl_tiers.core.requests import Request
from nixl_tiers.core.tier import Tier
from nixl_tiers.core.types import Limits

ASKED: Final = float("inf")  # as the step after which a request may be asked for: its check is open


@dataclass(eq=False, slots=True)
class ExistenceCheck:
    """Ask a tier's medium for `keys`; `chain`: each is worth nothing without those before it. The answer, for which
    `requests` wait, is late after `late_s`."""

    id: int
    tier: int
    keys: list[Key]
    chain: bool
    sent_s: float
    late_s: float
    requests: list[Request] = field(default_factory=list, repr=False)


class _TierChecks:
    """The open checks of one tier, its negative cache, who wants it to be asked, and what is to be asked later."""

    def __init__(self, tier: Tier, limits: Limits) -> None:
        self.tier = tier
        self.open: dict[Key, ExistenceCheck] = {}  # by the first key
        self.askers: dict[Request, float] = {}  # that wait for a check: the step that has met what they do not know
        self.retry_at_s: float | None = None  # of a slow tier: it answered late, or about no key; no check before
        self.later: OrderedDict[Key, None] = OrderedDict()  # unknown while it was slow, or had too many checks
        self.absent: OrderedDict[Key, float] = OrderedDict()  # key -> until when, the oldest first
        self.round_trip_s = 0.0  # of the last ones
        self._limits = limits

    @property
    def slow(self) -> bool:
        return self.retry_at_s is not None

    def is_absent(self, key: Key, now: float) -> bool:
        return self.absent.get(key, now) > now

    def is_unknown(self, key: Key, now: float) -> bool:
        """Whether it is neither known to be there nor known not to be."""
        return key not in self.tier.index and not self.is_absent(key, now)

    def worth_asking(self, keys: Iterable[Key], now: float, *, chain: bool) -> Iterator[Key]:
        """Which of `keys` are to be asked for: of a chain all up to the first that is known to be absent."""
        if chain:
            return takewhile(lambda key: not self.is_absent(key, now), keys)
        return (key for key in keys if self.is_unknown(key, now))

    def has_room(self, now: float, *, ahead: bool = False) -> bool:
        """Whether one more check may be sent now; to a slow tier: one at a time, every retry_s. `ahead`: one for which
        no request waits."""
        if not self.tier.readable:
            return False
        if self.retry_at_s is not None:
            return not self.open and now >= self.retry_at_s
        limits = self._limits
        most = max(limits.max_checks, min(limits.distant_checks, math.ceil(self.round_trip_s / limits.check_share_s)))
        return len(self.open) < (max(1, most // 2) if ahead else most)

    def ask_later(self, key: Key) -> None:
        """An unknown key about which nothing can be asked now."""
        self.later[key] = None
        if len(self.later) > self._limits.later_keys:
            self.later.popitem(last=False)

    def take_later(self, now: float) -> list[Key]:
        """The next keys of `later` that are still unknown, as many as one check takes."""
        keys: list[Key] = []
        while self.later and len(keys) < self._limits.keys_at_once:
            key = self.later.popitem(last=False)[0]
            if self.is_unknown(key, now) and key not in self.open:
                keys.append(key)
        return keys

    def remember_absent(self, absent: Collection[Key], now: float) -> None:
        for key in absent:
            self.absent.pop(key, None)
            self.absent[key] = now + min(self._limits.absent_s, self.tier.spec.absent_s)
        for _ in range(2 * len(absent)):  # a bounded part of what is too old
            oldest = next(iter(self.absent))
            if len(self.absent) <= self._limits.absent_keys and self.absent[oldest] > now:
                return
            del self.absent[oldest]

    def mark_slow(self, now: float) -> None:
        self.retry_at_s = now + self._limits.retry_s

    def end(self, check: ExistenceCheck) -> None:
        """The check was answered, or is given up."""
        del self.open[check.keys[0]]
        for request in check.requests:
            del self.askers[request]

    def lose(self) -> None:
        """Nothing that was asked will be answered."""
        self.open.clear()
        self.askers.clear()


class ExistenceChecks:
    """The checks of all tiers whose medium is asked."""

    def __init__(self, tiers: Sequence[Tier], limits: Limits) -> None:
        self._limits = limits
        shared = [tier for tier in tiers if tier.spec.asked and limits.check_timeout_s > 0]
        self.tiers = {tier.number: _TierChecks(tier, limits) for tier in shared}
        self._ready: list[ExistenceCheck] = []
        self._id = self._step = 0
        self._met = self._unsent = False  # whether requests met unknown keys in this step; and in steps before

    @property
    def to_send(self) -> bool:
        """Whether some are to be sent that the last turn did not know of."""
        return self._unsent or bool(self._ready)

    @property
    def busy(self) -> bool:
        """Whether any are to be sent, or answers are awaited."""
        return any(shared.open or shared.askers for shared in self.tiers.values())

    # --- for requests ------------------------------------------------------------------------------------------

    def should_wait(self, key: Key, request: Request, now: float) -> bool:
        """Whether `request` waits for a check of `key`, which no tier index has; O(1). Notes the key for that check."""
        if not self.tiers:
            return False
        until_s, patient = request.check_deadline_s, request.wishes.patient
        if until_s is None:  # counted from when it began to wait for anything
            since_s = now if request.deadline_s is None else request.deadline_s - self._limits.wait_s
            until_s = since_s + self._limits.check_timeout_s
        if now > until_s and not patient:  # whose own deadline ends its wait
            return False
        steps = self._steps(request)
        if key in request.unknown:
            return bool(steps)
        if ASKED in steps or not request.scan.first:
            return patient and bool(steps)  # it asks for more when it has got an answer
        # If the first key of a chain is absent, the others need no check.
        most = 1 if request.scan.ascending and not request.first_key_found else self._limits.keys_per_check
        if steps and len(request.unknown) >= most and not patient:
            return False
        worth = [s for s in self._open_to(request) if s.is_unknown(key, now) and self._worth(s, key, request, now)]
        if not worth:
            return False
        if not steps:
            request.unknown.clear()
        request.unknown[key] = None
        request.check_deadline_s = until_s
        for shared in worth:
            shared.askers.setdefault(request, self._step)
        self._met = True
        return True

    def known_absent(self, tier: int, key: Key, now: float) -> bool:
        """Whether a recent check found `key` absent from the tier's medium."""
        return tier in self.tiers and self.tiers[tier].is_absent(key, now)

    def end_step(self) -> None:
        """This step's scans are complete: their checks may be sent."""
        self._step += 1
        self._unsent |= self._met
        self._met = False

    # --- ahead of requests -------------------------------------------------------------------------------------

    def is_asked(self, request: Request, key: Key) -> bool:
        """Whether a check that begins with `key` is open."""
        return any(key in shared.open for shared in self._open_to(request))

    def ask_ahead(self, request: Request, keys: Sequence[Key], now: float) -> bool | None:
        """Ask for keys for which no request waits yet: True. The first of them is in no index; of the others, those
        that are known are left out unless they are a chain. False: ask again when there is room. None: there is
        nothing to be found out now."""
        asked: bool | None = None
        for shared in self._open_to(request):
            if not shared.is_unknown(keys[0], now):
                continue
            if shared.slow:
                shared.ask_later(keys[0])
            elif shared.has_room(now, ahead=True):
                chain = request.scan.ascending
                self._send(shared, [*shared.worth_asking(keys, now, chain=chain)], chain=chain, now=now)
                asked = True
            else:
                asked = asked or False
        return asked

    # --- what is sent, and answered ----------------------------------------------------------------------------

    def plan(self, now: float) -> list[ExistenceCheck]:
        """The checks to send now, within every bound."""
        for shared in self.tiers.values():
            for request in [each for each, step in shared.askers.items() if step < self._step]:
                self._ask(shared, request, now)
            while shared.later and shared.has_room(now, ahead=True):
                if keys := shared.take_later(now):
                    self._send(shared, keys, chain=False, now=now)
        ready, self._ready, self._unsent = self._ready, [], False  # who got no room waits for an answer
        return ready

    def answered(self, tier: int, number: int, absent: Collection[Key], now: float) -> None:
        """A check was answered: what it found was listed before this; `absent` is not there."""
        shared = self.tiers.get(tier)
        check = None if shared is None else next((each for each in shared.open.values() if each.id == number), None)
        if shared is None or check is None:
            return
        shared.end(check)
        shared.remember_absent(absent, now)
        # A chain without its first key is useless; requests that share a check have the first key in common.
        found = any(key in shared.tier.index for key in (check.keys[:1] if check.chain else check.keys))
        took_s = now - check.sent_s
        if took_s > check.late_s or not (found or absent):
            shared.mark_slow(now)
        else:
            shared.retry_at_s = None
            if not found and check.chain:  # which took one round trip
                shared.round_trip_s = (shared.round_trip_s + took_s) / 2
        for request in check.requests:
            # Its next scan collects what was found, and checks what follows, or what one check had no room for.
            request.first_key_found |= found
            request.rescan |= found or request.wishes.patient
            if request.wishes.patient:
                request.unknown = dict.fromkeys(check.keys)

    def mark_absent(self, tier: int, key: Key, now: float) -> None:
        """The row was corrupt, or missing after all: another check would find the same object again."""
        if tier in self.tiers:
            self.tiers[tier].remember_absent([key], now)

    def expire(self, now: float) -> None:
        for shared in self.tiers.values():
            for check in list(shared.open.values()):
                passed_s = now - check.sent_s
                if given_up := passed_s > self._limits.hard_deadline_min_s:
                    shared.end(check)
                if given_up or (passed_s > check.late_s and not shared.slow):
                    shared.mark_slow(now)

    def lost(self, tier: int) -> None:
        """The open checks of this tier will not be answered."""
        if tier in self.tiers:
            self.tiers[tier].lose()

    def reset(self, garbage: DeferredFree) -> None:
        """Drop all: keys that are absent from one namespace may be in another."""
        self._ready.clear()
        self._unsent = False
        for shared in self.tiers.values():
            shared.lose()
            shared.retry_at_s = None
            garbage.add(shared.absent, shared.later)
            shared.absent, shared.later = OrderedDict(), OrderedDict()

    # --- inside ------------------------------------------------------------------------------------------------

    def _open_to(self, request: Request) -> list[_TierChecks]:
        """The tiers that can be asked now on the request's behalf."""
        allowed = request.wishes.allowed
        return [s for n, s in self.tiers.items() if s.tier.readable and (allowed is None or n in allowed)]

    def _steps(self, request: Request) -> list[float]:
        """Of each tier that is to be asked on the request's behalf the step after which it may be, or ASKED."""
        return [shared.askers[request] for shared in self.tiers.values() if request in shared.askers]

    def _worth(self, shared: _TierChecks, key: Key, request: Request, now: float) -> bool:
        """Whether to wait for a check of this tier. What is not waited for is asked later."""
        in_time, room = not shared.slow, shared.has_room(now) or key in shared.open
        if (in_time or room) if request.wishes.patient else (in_time and room):
            return True
        shared.ask_later(key)
        return False

    def _ask(self, shared: _TierChecks, request: Request, now: float) -> None:
        """Have the request, which is among the tier's `askers`, wait for the check of what it does not know, or not at
        all; a patient one until there is room."""
        chain = request.scan.ascending
        keys = shared.worth_asking(request.unknown, now, chain=chain)
        first = None if request.gave_up or not shared.tier.readable else next(keys, None)
        if first is None or not self._worth(shared, first, request, now):
            del shared.askers[request]
            return
        check = shared.open.get(first)
        if check is None and shared.has_room(now):
            check = self._send(shared, [first, *islice(keys, self._limits.keys_per_check - 1)], chain=chain, now=now)
        if check is not None:
            check.requests.append(request)
            shared.askers[request] = ASKED

    def _send(self, shared: _TierChecks, keys: list[Key], *, chain: bool, now: float) -> ExistenceCheck:
        self._id += 1
        waves = 1 if chain else -(-len(keys) // self._limits.keys_at_once)  # a chain's are few, and most end with one
        late_s = self._limits.check_timeout_s * waves
        check = ExistenceCheck(self._id, shared.tier.number, keys, chain, now, late_s)
        shared.open[keys[0]] = check
        shared.tier.counters.probes += 1
        self._ready.append(check)
        return check
