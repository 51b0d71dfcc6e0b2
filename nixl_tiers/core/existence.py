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
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from nixl_tiers.base.chunk import Key
from nixl_tiers.core.deferred_free import DeferredFree
from nixl_tiers.core.requests import Request
from nixl_tiers.core.tier import Tier
from nixl_tiers.core.types import Limits


@dataclass(frozen=True, slots=True)
class ExistenceCheck:
    """Ask a tier's medium for `keys`; `chain`: each is worth nothing without those before it."""

    id: int
    tier: int
    keys: list[Key]
    chain: bool


@dataclass(eq=False, slots=True)
class _OpenCheck:
    """A check that was sent, and the requests that wait for its answer, which is late after `late_s`."""

    question: ExistenceCheck
    sent_s: float
    late_s: float
    requests: list[Request] = field(default_factory=list)


class _TierChecks:
    """The open checks of one tier, its negative cache, and what is to be asked later."""

    def __init__(self, tier: Tier, limits: Limits) -> None:
        self.tier = tier
        self.open: dict[int, _OpenCheck] = {}
        self.by_first: dict[Key, _OpenCheck] = {}
        self.slow = False
        self.retry_at_s = 0.0  # while slow: no check before
        self.later: OrderedDict[Key, None] = OrderedDict()  # unknown while it was slow, or had too many checks
        self._limits = limits
        self.absent: OrderedDict[Key, float] = OrderedDict()  # key -> until when, the oldest first
        self._round_trip_s = 0.0  # of the last ones

    @property
    def most(self) -> int:
        """How many checks may be open."""
        limits = self._limits
        return max(limits.max_checks, min(limits.distant_checks, math.ceil(self._round_trip_s / limits.check_share_s)))

    def is_absent(self, key: Key, now: float) -> bool:
        return self.absent.get(key, now) > now

    def is_unknown(self, key: Key, now: float) -> bool:
        """Whether it is neither known to be there nor known not to be."""
        return key not in self.tier.index and not self.is_absent(key, now)

    def has_room(self, now: float, *, ahead: bool = False) -> bool:
        """Whether one more check may be sent now; to a slow tier: one at a time, every retry_s. `ahead`: one for which
        no request waits."""
        if not self.tier.readable:
            return False
        if self.slow:
            return not self.open and now >= self.retry_at_s
        return len(self.open) < (max(1, self.most // 2) if ahead else self.most)

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
            if self.is_unknown(key, now) and key not in self.by_first:
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
        """It answered late, or about no key."""
        self.slow = True
        self.retry_at_s = now + self._limits.retry_s

    def took(self, seconds: float) -> None:
        """A check ended after one round trip."""
        self._round_trip_s = (self._round_trip_s + seconds) / 2

    def start(self, check: _OpenCheck) -> None:
        self.open[check.question.id] = self.by_first[check.question.keys[0]] = check

    def end(self, check: _OpenCheck) -> None:
        """The check was answered, or is given up."""
        del self.open[check.question.id]
        if self.by_first.get(check.question.keys[0]) is check:
            del self.by_first[check.question.keys[0]]
        for request in check.requests:
            request.open_checks -= 1

    def clear(self, garbage: DeferredFree) -> None:
        for check in list(self.open.values()):
            self.end(check)
        self.slow = False
        garbage.add(self.absent, self.later)
        self.absent, self.later = OrderedDict(), OrderedDict()


class ExistenceChecks:
    """The checks of all tiers whose medium is asked."""

    def __init__(self, tiers: Sequence[Tier], limits: Limits) -> None:
        self._limits = limits
        shared = [tier for tier in tiers if tier.spec.asked and limits.check_timeout_s > 0]
        self.tiers = {tier.number: _TierChecks(tier, limits) for tier in shared}
        self._scanning: list[Request] = []  # requests that have met unknown keys in this step
        self._asking: list[Request] = []  # the same of earlier steps
        self._ready: list[ExistenceCheck] = []
        self._id = 0

    @property
    def to_send(self) -> bool:
        """Whether there are any."""
        return bool(self._asking or self._ready)

    @property
    def busy(self) -> bool:
        """Whether there are any, or answers are awaited."""
        return self.to_send or any(shared.open for shared in self.tiers.values())

    # --- for requests ------------------------------------------------------------------------------------------

    def should_wait(self, key: Key, request: Request, now: float) -> bool:
        """Whether `request` waits for a check of `key`, which no tier index has; O(1). Notes the key for that check."""
        if not self.tiers:
            return False
        until_s = request.check_deadline_s
        if request.wishes.patient:
            until_s = float("inf")  # its own deadline ends its wait
        elif until_s is None:  # counted from when it began to wait for anything
            since_s = now if request.deadline_s is None else request.deadline_s - self._limits.wait_s
            until_s = since_s + self._limits.check_timeout_s
        if now > until_s:
            return False
        if key in request.unknown:
            return request.check_queued or request.open_checks > 0
        if request.open_checks or not request.scan.first:
            return False
        # If the first key of a chain is absent, the others need no check.
        most = 1 if request.scan.ascending and not request.first_key_found else self._limits.keys_per_check
        if request.check_queued and len(request.unknown) >= most and not request.wishes.patient:
            return False
        if not sum(self._worth(shared, key, request, now) for shared in self._open_to(request)):
            return False
        request.check_deadline_s = until_s
        if not request.check_queued:
            request.check_queued = True
            request.unknown.clear()
            self._scanning.append(request)
        request.unknown[key] = None
        return True

    def known_absent(self, tier: int, key: Key, now: float) -> bool:
        """Whether a recent check found `key` absent from the tier's medium."""
        return tier in self.tiers and self.tiers[tier].is_absent(key, now)

    def end_step(self) -> None:
        """This step's scans are complete: their checks may be sent."""
        self._asking += self._scanning
        self._scanning.clear()

    # --- ahead of requests -------------------------------------------------------------------------------------

    def is_asked(self, request: Request, key: Key) -> bool:
        """Whether a check that begins with `key` is open."""
        return any(key in shared.by_first for shared in self._open_to(request))

    def ask_ahead(self, request: Request, keys: Sequence[Key], now: float, *, chain: bool) -> bool | None:
        """Ask for keys for which no request waits yet: True. The first of them is in no index; of the others, those
        that are known are left out unless they are a `chain`. False: ask again when there is room. None: there is
        nothing to be found out now."""
        asked: bool | None = None
        for shared in self._open_to(request):
            if not shared.tier.readable or not shared.is_unknown(keys[0], now):
                continue
            if shared.slow:
                shared.ask_later(keys[0])
            elif shared.has_room(now, ahead=True):
                if chain:
                    some = list(takewhile(lambda key: not shared.is_absent(key, now), keys))  # noqa: B023
                else:
                    some = [key for key in keys if shared.is_unknown(key, now)]
                self._send(shared, some[: self._limits.keys_per_check], chain=chain, now=now)
                asked = True
            else:
                asked = asked or False
        return asked

    # --- what is sent, and answered ----------------------------------------------------------------------------

    def plan(self, now: float) -> list[ExistenceCheck]:
        """The checks to send now, within every bound."""
        asking, self._asking = self._asking, []
        for request in asking:
            asked = [request.gave_up or self._ask(shared, request, now) for shared in self._open_to(request)]
            request.check_queued = not (all(asked) or request.open_checks)
            if request.check_queued:
                self._asking.append(request)
        for shared in self.tiers.values():
            while shared.later and shared.has_room(now, ahead=True):
                if keys := shared.take_later(now):
                    self._send(shared, keys, chain=False, now=now)
        ready, self._ready = self._ready, []
        return ready

    def answered(self, tier: int, number: int, absent: Collection[Key], now: float) -> None:
        """A check was answered: what it found was listed before this; `absent` is not there."""
        shared = self.tiers.get(tier)
        check = shared.open.get(number) if shared is not None else None
        if shared is None or check is None:
            return
        shared.end(check)
        shared.remember_absent(absent, now)
        # A chain without its first key is useless; requests that share a check have the first key in common.
        asked = check.question.keys[:1] if check.question.chain else check.question.keys
        found = any(key in shared.tier.index for key in asked)
        if now - check.sent_s > check.late_s or not (found or absent):
            shared.mark_slow(now)
        else:
            shared.slow = False
            if not found and check.question.chain:
                shared.took(now - check.sent_s)
        for request in check.requests:
            if found:
                # Its next scan collects what was found, and checks what follows.
                request.first_key_found = request.rescan = True
            if request.wishes.patient and not request.check_queued:
                self._ask_on(shared, check.question, request, now)

    def mark_absent(self, tier: int, key: Key, now: float) -> None:
        """The row was corrupt, or missing after all: another check would find the same object again."""
        if tier in self.tiers:
            self.tiers[tier].remember_absent([key], now)

    def expire(self, now: float) -> None:
        for shared in self.tiers.values():
            for check in list(shared.open.values()):
                passed_s = now - check.sent_s
                if passed_s > check.late_s and not shared.slow:
                    shared.mark_slow(now)
                if passed_s > self._limits.hard_deadline_min_s:
                    shared.mark_slow(now)
                    shared.end(check)

    def lost(self, tier: int) -> None:
        """The open checks of this tier will not be answered."""
        if tier in self.tiers:
            for check in list(self.tiers[tier].open.values()):
                self.tiers[tier].end(check)

    def reset(self, garbage: DeferredFree) -> None:
        """Drop all: keys that are absent from one namespace may be in another."""
        for request in [*self._scanning, *self._asking]:
            request.check_queued = False
        self._scanning.clear()
        self._asking.clear()
        self._ready.clear()
        for shared in self.tiers.values():
            shared.clear(garbage)

    # --- inside ------------------------------------------------------------------------------------------------

    def _open_to(self, request: Request) -> Iterator[_TierChecks]:
        allowed = request.wishes.allowed
        return (s for s in self.tiers.values() if allowed is None or s.tier.number in allowed)

    def _worth(self, shared: _TierChecks, key: Key, request: Request, now: float) -> bool:
        """Whether to wait for a check of this tier. What is not waited for is asked later."""
        if not shared.tier.readable or not shared.is_unknown(key, now):
            return False
        if shared.slow and not request.wishes.patient:
            shared.ask_later(key)
            return False
        if shared.has_room(now) or key in shared.by_first or (request.wishes.patient and not shared.slow):
            return True
        shared.ask_later(key)
        return False

    def _ask(self, shared: _TierChecks, request: Request, now: float) -> bool:
        """Have the request wait for the check of what it does not know. False: there is no room, try again later."""
        first = next((key for key in request.unknown if request.scan.ascending or not shared.is_absent(key, now)), None)
        if first is None or shared.is_absent(first, now):
            return True
        waits = request.wishes.patient or not shared.slow
        check = shared.by_first.get(first) if waits else None
        if check is None and waits and shared.has_room(now):
            keys: list[Key] = []
            for key in request.unknown:
                if not shared.is_absent(key, now):
                    keys.append(key)
                elif request.scan.ascending:
                    break
            check = self._send(shared, keys[: self._limits.keys_per_check], chain=request.scan.ascending, now=now)
        if check is not None:
            check.requests.append(request)
            request.open_checks += 1
        elif request.wishes.patient and shared.tier.readable and not shared.slow:
            return False
        else:
            shared.ask_later(first)
        return True

    def _ask_on(self, shared: _TierChecks, question: ExistenceCheck, request: Request, now: float) -> None:
        """Go on with what a patient request does not know and the check that has ended was not about."""
        asked = set(question.keys)
        if rest := [key for key in request.unknown if key not in asked and shared.is_unknown(key, now)]:
            request.unknown = dict.fromkeys(rest)
            request.check_queued = True
            self._asking.append(request)

    def _send(self, shared: _TierChecks, keys: list[Key], *, chain: bool, now: float) -> _OpenCheck:
        self._id += 1
        waves = 1 if chain else -(-len(keys) // self._limits.keys_at_once)  # a chain's are few, and most end with one
        late_s = self._limits.check_timeout_s * waves
        check = _OpenCheck(ExistenceCheck(self._id, shared.tier.number, keys, chain), now, late_s)
        shared.start(check)
        shared.tier.counters.probes += 1
        self._ready.append(check.question)
        return check
