"""Clearing: what an operator has evicted of a running engine, in slices, on a thread of its own."""

from __future__ import annotations

import time
from typing import Final

import msgspec

from nixl_tiers.core.manager import CLEARED_AT_ONCE, TierManager
from nixl_tiers.core.types import TierState
from nixl_tiers.runtime.coordinator import Coordinator

ROUNDS: Final = 3  # rows move between tiers meanwhile, and those in use are free a moment later
ROUND_S: Final = 0.2  # between two of them
PAUSE_S: Final = 0.0005  # between two holds of the lock, so that a thread that waits for it gets it
DRAIN_S: Final = 30.0  # for the medium to delete what is left to delete


class Cleared(msgspec.Struct):
    """One tier. `rows`: how many have gone, or would; `left`: those that are still there; `unknown`: how many rows
    belong to no quota, where one was asked for; `problem`: why it may not be clear, in words. `shared`: what other
    engines use too, or this one only reads, stays."""

    tier: str
    rows: int = 0
    left: int = 0
    unknown: int = 0
    problem: str = ""
    shared: bool = False


class Clearing:
    """One command. `tenant`: 0: all rows. Holds the coordinator's lock for 128 rows at a time."""

    def __init__(self, coordinator: Coordinator, tenant: int, until_s: float) -> None:
        self._coordinator = coordinator
        self._tenant = tenant
        self._until_s = until_s
        with coordinator.core() as core:
            self._most = core.limits.deletes_per_turn
            self._tiers = {place: Cleared(tier.spec.name) for place, tier in enumerate(core.tiers) if tier.spec.own}
            self._shared = [Cleared(tier.spec.name, shared=True) for tier in core.tiers if not tier.spec.own]
        self._host = Cleared("cpu")

    def look(self) -> list[Cleared]:
        """What would be cleared."""
        answer = self._counted()
        for each in answer:
            each.rows, each.left = each.left, 0
        return answer

    def run(self) -> list[Cleared]:
        """Clear: host memory first, since its rows go down and not up while nobody asks for them."""
        for number in range(ROUNDS):
            if number:
                time.sleep(ROUND_S)
            for place in (None, *self._tiers):
                self._clear(place)
            if not any(each.left for each in self._counted()):
                break
        for place in self._tiers:
            self._drain(place, 0, time.monotonic() + DRAIN_S)
        return self._counted()

    # --- inside ------------------------------------------------------------------------------------------------

    def _clear(self, place: int | None) -> None:
        cleared = self._host if place is None else self._tiers[place]
        steps = self._steps(place)
        while steps > 0 and not self._ended(cleared):
            steps -= 1
            with self._coordinator.core() as core:
                if place is not None and self._is_away(core, place, cleared):
                    return
                count, more = core.clear_some(place, self._tenant)
            cleared.rows += count
            if not more:
                return
            if place is not None:
                self._drain(place, self._most, self._until_s)
            time.sleep(PAUSE_S)

    def _steps(self, place: int | None) -> int:
        """Enough for all rows that are there now, and for those that come meanwhile; an engine stores for ever."""
        with self._coordinator.core() as core:
            return 8 + 2 * (core.rows_of(place) // CLEARED_AT_ONCE)

    def _drain(self, place: int, most: int, until_s: float) -> None:
        """Wait until the medium has no more rows to delete than this; what is not deleted would be found again."""
        cleared = self._tiers[place]
        while not cleared.problem:
            with self._coordinator.core() as core:
                if self._is_away(core, place, cleared) or core.tiers[place].rows_to_delete <= most:
                    return
            if time.monotonic() > until_s or self._coordinator.closed:
                cleared.problem = "its medium has not deleted all of them yet"
                return
            time.sleep(PAUSE_S)

    @staticmethod
    def _is_away(core: TierManager, place: int, cleared: Cleared) -> bool:
        """Whether the tier cannot be cleared now. Call it with the lock held."""
        state = core.tiers[place].state
        if state is TierState.LISTING:
            cleared.problem = "it is being listed: clear it again once that has ended"
        elif state is TierState.DOWN:
            cleared.problem = "it is down: what it holds is found again when it is back"
        return state is not TierState.UP

    def _ended(self, cleared: Cleared) -> bool:
        if time.monotonic() > self._until_s or self._coordinator.closed:
            cleared.problem = cleared.problem or "it took too long: clear it again"
        return bool(cleared.problem)

    def _counted(self) -> list[Cleared]:
        with self._coordinator.core() as core:
            for place, cleared in ((None, self._host), *self._tiers.items()):
                cleared.left = core.rows_of(place, self._tenant)
                if self._tenant:
                    cleared.unknown = core.rows_of(place) - sum(
                        core.rows_of(place, tenant) for tenant in range(1, len(core.host.quotas) + 1)
                    )
                if place is not None and not cleared.problem:
                    self._is_away(core, place, cleared)
        return [self._host, *self._tiers.values(), *self._shared]
