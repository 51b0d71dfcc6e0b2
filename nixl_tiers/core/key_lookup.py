"""The look-up of one key for one request; chains are looked up at once (`lookup.py`)."""

from __future__ import annotations

from enum import Enum

from nixl_tiers.base.chunk import Key
from nixl_tiers.core.existence import ExistenceChecks
from nixl_tiers.core.promotion import Promotion
from nixl_tiers.core.requests import Request
from nixl_tiers.core.rows import LOADING, READY, Row
from nixl_tiers.core.state import CascadeState


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
        if self._promotion.has_expired(request, now):
            return Lookup.MISS
        if row is not None and row.state is LOADING and not row.mover_refs:
            self._host.invalidate(row)  # an error has ended its load
            row = None
        if (
            row is not None
            or key in request.asked
            or self._promotion.enqueue(key, request)
            or (check and self._checks.should_wait(key, request, now))
            or (request.wishes.patient and self._promotion.may_be_listed(key, request, now))
        ):
            self._promotion.wait(request, now)
            request.note_missing(key)
            return Lookup.PENDING
        if request.waiting and not request.pinned and not request.asked:
            self._promotion.release(request)  # it has waited for an existence check, which found nothing
        return Lookup.MISS
