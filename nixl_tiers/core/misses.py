"""Reasons of misses: why a request has to compute a chunk that some tier might have held."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from nixl_tiers.base.chunk import Key
from nixl_tiers.core.requests import FAILED, Request
from nixl_tiers.core.state import CascadeState
from nixl_tiers.core.stats import HOST, Gone, tier_and_reason
from nixl_tiers.core.types import TierState

Reason = tuple[int, str]
"""The number of the tier that it is about, or HOST, and the counter."""

Cause = Reason | int | None
"""Of one chunk: a reason, a tag of `EvictionHistory` (0: not known there), or None: it is not to be counted."""

_NEVER_STORED: Final[Reason] = (HOST, "missed_never_stored")
_OF_GONE: Final = {
    Gone.EVICTED: "missed_evicted",
    Gone.EXPIRED: "missed_expired",
    Gone.LOST: "missed_failed",
}


class Misses:
    """Counts misses by reason, at the tier that the reason is about (`Counters.missed_*`)."""

    def __init__(self, state: CascadeState) -> None:
        self._state = state

    def count(self, keys: Iterable[Key], request: Request, now: float, last: Cause) -> Cause:
        """`request` has to compute the chunks of `keys`, in prefix order from its first miss. What is there behind a
        miss is worth nothing: it has the reason of that miss. What was declined or came too late was counted then.
        `last`: what this returned of the keys before."""
        keys, tiers = list(keys), self._state.tiers
        holds = [list(map(self._state.host.index.__contains__, keys))]
        holds += [tier.index.rows.has_many(keys, False) for tier in tiers]
        listing = next((tier.number for tier in tiers if tier.state is TierState.LISTING), None)
        unknown = _NEVER_STORED if listing is None else (listing, "missed_listing")
        reasons: Sequence[Cause] = self._state.gone.find_many(keys)  # tags; 0 if not known
        if any(True in each for each in holds):
            reasons = list(self._along(zip(keys, reasons, zip(*holds, strict=True), strict=True), request, now, last))
        for reason in set(reasons):  # few
            if reason is None:
                continue
            tier, name = reason if isinstance(reason, tuple) else _of_tag(reason) if reason else unknown
            if tier < len(tiers):
                counters = self._state.host.counters if tier == HOST else tiers[tier].counters
                setattr(counters, name, getattr(counters, name) + reasons.count(reason))
        return reasons[-1] if reasons else last

    def _along(
        self, chunks: Iterable[tuple[Key, Cause, Sequence[bool]]], request: Request, now: float, last: Cause
    ) -> Iterator[Cause]:
        """The reasons of `chunks`: (key, its reason if nobody holds it, whether the host and each tier do). What is
        held has the reason of what is before it, if it could be loaded."""
        for key, reason, holds in chunks:
            if True not in holds:
                last = reason
            elif (found := self._held(key, holds[1:], request)) is not None:
                last = found
            elif request.gave_up:
                last = None
            yield last

    def _held(self, key: Key, holds: Sequence[bool], request: Request) -> Reason | None:
        """Why a chunk that some tier holds is a miss; None if it could be loaded."""
        reason: Reason | None = None
        for tier, is_held in zip(self._state.tiers, holds, strict=True):
            if not is_held:
                continue
            if request.wishes.allowed is not None and tier.number not in request.wishes.allowed:
                reason = reason or (tier.number, "missed_excluded")
            elif not (member := tier.member_of(key)).readable:
                reason = (tier.number, "missed_down" if member.state is TierState.DOWN else "missed_open")
            elif request.state is FAILED or tier.index.is_aside(key):
                reason = (tier.number, "missed_failed")
            elif key in request.refused:
                return HOST, "missed_no_room"
            elif tier.index.rows.is_stored(key):
                return None
        return (HOST, "missed_failed") if reason is None and request.state is FAILED else reason


def _of_tag(tag: int) -> Reason:
    tier, why = tier_and_reason(tag)
    return tier, _OF_GONE[why]
