"""Hold: the core, for as long as the coordinator's lock is held."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final

from nixl_tiers.base.lifetime import ForkedLock
from nixl_tiers.core.manager import TierManager
from nixl_tiers.core.turn import NO
from nixl_tiers.runtime.mover_link import DROPPED_PER_TURN, MoverLink

TURNS_A_STEP: Final = 8  # of a core without storage tiers, which no supervisor turns


class Hold:
    """The core while the coordinator's lock is held: a context manager, to be held for microseconds.

    Leaving it wakes the supervisor if the core has work for it. Holds of one thread may be nested.
    """

    def __init__(self, core: TierManager, link: MoverLink, lock: threading.RLock, clock: Callable[[], float]) -> None:
        self.lock: threading.RLock | ForkedLock = lock
        self._core = core
        self._link = link
        self._clock = clock
        self.entered = 0
        """How often it was entered: as long as it stays, there is no step for the core to end."""

    def __enter__(self) -> TierManager:
        self.lock.__enter__()
        self.entered += 1
        return self._core

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        core, due = self._core, NO
        try:
            due = core.events.take_due()
            if due is not NO and not core.tiers:
                self._turns()
        finally:
            self.lock.__exit__(kind, error, trace)
        if due is NO:
            return
        if core.tiers:
            self._link.wake(due)
        else:
            core.garbage.drop(DROPPED_PER_TURN)

    def _turns(self) -> None:
        now = self._clock()
        for _ in range(TURNS_A_STEP):
            self._core.turn(now, now)
            if not self._core.events.unfinished:
                break
