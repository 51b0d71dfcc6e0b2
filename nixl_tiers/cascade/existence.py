"""Asking a shared medium for keys that nobody here knows: what another engine has stored a moment ago.

A request that meets an unknown key waits for the answer, a fraction of a second at most in all its life. First only
that key is asked for: a prompt that nobody has seen costs one look-up more and one round trip. If it is there, the
next scan collects the rest of the chain, and all of that is asked for at once. What is absent is remembered for a
while and costs nothing. A tier that was late, or did not say, is waited for by nobody until it has answered again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from nixl_tiers.cascade.limits import Limits
from nixl_tiers.cascade.requests import Request
from nixl_tiers.cascade.tier_index import TierIndex
from nixl_tiers.chunk import Key


@dataclass(frozen=True, slots=True)
class ExistenceCheck:
    """Ask a tier's medium for `keys`; `chain`: each is worth nothing without those before it."""

    id: int
    tier: int
    keys: list[Key]
    chain: bool


@dataclass(eq=False, slots=True)
class _Flight:
    probe: ExistenceCheck
    sent_s: float
    requests: list[Request] = field(default_factory=list)


class _Shared:
    """What is asked of one tier, and what is known to be absent there."""

    def __init__(self, number: int, storage: TierIndex, limits: Limits) -> None:
        self.number = number
        self.storage = storage
        self.flights: dict[int, _Flight] = {}
        self.by_first: dict[Key, _Flight] = {}
        self.slow = False
        self.try_at_s = 0.0  # not before, while slow
        self._limits = limits
        self._absent: dict[Key, float] = {}  # until when; the first to be forgotten comes first

    @property
    def known_absent(self) -> int:
        return len(self._absent)

    def is_absent(self, key: Key, now: float) -> bool:
        return self._absent.get(key, now) > now

    def has_room(self, now: float) -> bool:
        """Whether one more may be asked now; of a slow tier, one at a time and rarely."""
        if not self.storage.readable:
            return False
        return len(self.flights) < self._limits.probes if not self.slow else not self.flights and now >= self.try_at_s

    def learn(self, absent: Collection[Key], now: float) -> None:
        for key in absent:
            self._absent.pop(key, None)
            self._absent[key] = now + self._limits.absent_s
        while self._absent:
            oldest = next(iter(self._absent))
            if len(self._absent) <= self._limits.absent_keys and self._absent[oldest] > now:
                return
            del self._absent[oldest]

    def was_no_help(self, now: float) -> None:
        """Late, or without a word about any key."""
        self.slow = True
        self.try_at_s = now + self._limits.retry_s

    def take_off(self, flight: _Flight) -> None:
        self.flights[flight.probe.id] = self.by_first[flight.probe.keys[0]] = flight

    def land(self, flight: _Flight) -> None:
        """Nobody waits for this answer any more."""
        del self.flights[flight.probe.id]
        if self.by_first.get(flight.probe.keys[0]) is flight:
            del self.by_first[flight.probe.keys[0]]
        for request in flight.requests:
            request.probes -= 1

    def clear(self) -> None:
        for flight in list(self.flights.values()):
            self.land(flight)
        self.slow = False
        self._absent.clear()


class ExistenceChecks:
    """The probes of all tiers whose medium others store to as well."""

    def __init__(self, storage: Sequence[TierIndex], limits: Limits) -> None:
        self._limits = limits
        self.tiers = {n: _Shared(n, s, limits) for n, s in enumerate(storage) if s.spec.shared and limits.probe_s > 0}
        self._scanning: list[Request] = []  # have met unknown keys in this step
        self._asking: list[Request] = []  # in an earlier step
        self._ready: list[ExistenceCheck] = []
        self._id = 0

    @property
    def busy(self) -> bool:
        return bool(self._asking or self._ready) or any(shared.flights for shared in self.tiers.values())

    def waits(self, key: Key, request: Request, now: float) -> bool:
        """Whether `request` waits to hear about `key`, which no tier has here; O(1). Notes what is to be asked for."""
        if not self.tiers:
            return False
        until_s = request.probe_until_s
        if until_s is None:  # counted from when it began to wait, for whatever it was
            since_s = now if request.deadline_s is None else request.deadline_s - self._limits.wait_s
            until_s = since_s + self._limits.probe_s
        if now > until_s:
            return False
        if key in request.unknown:
            return request.asking or request.probes > 0
        if request.probes or not request.first_scan:
            return False
        # The first key of a chain tells whether the others are worth a look.
        most = 1 if request.ascending and not request.sounded else self._limits.probe_keys
        if request.asking and len(request.unknown) >= most:
            return False
        if not sum(self._worth(shared, key, now) for shared in self._open_to(request)):
            return False
        request.probe_until_s = until_s
        if not request.asking:
            request.asking = True
            request.unknown.clear()
            self._scanning.append(request)
        request.unknown[key] = None
        return True

    def surely_absent(self, tier: int, key: Key, now: float) -> bool:
        """Whether the tier's medium has said a moment ago that it does not hold `key`."""
        return tier in self.tiers and self.tiers[tier].is_absent(key, now)

    def end_step(self) -> None:
        """This step's scans have met all that they will."""
        self._asking += self._scanning
        self._scanning.clear()

    def plan(self, now: float) -> list[ExistenceCheck]:
        """What to ask now, within every bound."""
        for request in self._asking:
            request.asking = False
            if not request.given_up:
                for shared in self._open_to(request):
                    self._ask(shared, request, now)
        self._asking.clear()
        ready, self._ready = self._ready, []
        return ready

    def answered(self, tier: int, number: int, absent: Collection[Key], now: float) -> None:
        """A probe has ended: what it has found was adopted before this, and `absent` is surely not there."""
        shared = self.tiers.get(tier)
        flight = shared.flights.get(number) if shared is not None else None
        if shared is None or flight is None:
            return
        shared.land(flight)
        shared.learn(absent, now)
        # A chain without its first key is of no use; the requests that share a probe have that one in common.
        asked = flight.probe.keys[:1] if flight.probe.chain else flight.probe.keys
        found = any(key in shared.storage for key in asked)
        if now - flight.sent_s > self._limits.probe_s or not (found or absent):
            shared.was_no_help(now)
        else:
            shared.slow = False
        if found:
            for request in flight.requests:
                # Collect what has been found, and ask for what follows it.
                request.sounded = request.scan_again = True

    def was_bad(self, tier: int, key: Key, now: float) -> None:
        """What is there under this key was no row, or had gone: to ask for it again would find the same again."""
        if tier in self.tiers:
            self.tiers[tier].learn([key], now)

    def expire(self, now: float) -> None:
        for shared in self.tiers.values():
            for flight in list(shared.flights.values()):
                late_s = now - flight.sent_s
                if late_s > self._limits.probe_s and not shared.slow:
                    shared.was_no_help(now)
                if late_s > self._limits.overdue_least_s:
                    shared.was_no_help(now)
                    shared.land(flight)

    def lost(self, tier: int) -> None:
        """Nothing that was asked of this tier will be answered."""
        if tier in self.tiers:
            for flight in list(self.tiers[tier].flights.values()):
                self.tiers[tier].land(flight)

    def reset(self) -> None:
        """What is absent from one namespace may stand in another."""
        for request in [*self._scanning, *self._asking]:
            request.asking = False
        self._scanning.clear()
        self._asking.clear()
        self._ready.clear()
        for shared in self.tiers.values():
            shared.clear()

    # --- inside ------------------------------------------------------------------------------------------------

    def _open_to(self, request: Request) -> Iterator[_Shared]:
        return (s for s in self.tiers.values() if request.allowed is None or s.number in request.allowed)

    def _worth(self, shared: _Shared, key: Key, now: float) -> bool:
        """Whether waiting for this tier's answer may be worth it. Of a slow tier one asks without waiting."""
        if not shared.storage.readable or key in shared.storage or shared.is_absent(key, now):
            return False
        if shared.slow:
            if shared.has_room(now):
                self._send(shared, [key], chain=True, now=now)
            return False
        return shared.has_room(now) or key in shared.by_first

    def _ask(self, shared: _Shared, request: Request, now: float) -> None:
        keys: list[Key] = []
        for key in request.unknown:
            if not shared.is_absent(key, now):
                keys.append(key)
            elif request.ascending:
                break
        if not keys or shared.slow:
            return
        flight = shared.by_first.get(keys[0])
        if flight is None and shared.has_room(now):
            flight = self._send(shared, keys, chain=request.ascending, now=now)
        if flight is not None:
            flight.requests.append(request)
            request.probes += 1

    def _send(self, shared: _Shared, keys: list[Key], *, chain: bool, now: float) -> _Flight:
        self._id += 1
        flight = _Flight(ExistenceCheck(self._id, shared.number, keys, chain), now)
        shared.take_off(flight)
        shared.storage.counters.probes += 1
        self._ready.append(flight.probe)
        return flight
