"""OpenLoads: while rows of the host are copied to where a request needs them, movers start no stores.

A store beside it takes the processors and the memory bandwidth that the copy needs. The core does not know of it: what
it has sent to a mover would go on. So movers read from the region until when they are to wait (`tiers/moves.py`), and
bound that themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from nixl_tiers.memory.region import HostRegion

HOLD_S: Final = 0.5  # after the last load began; one that takes longer, or never ends, holds up nothing


class OpenLoads:
    """The loads that were prepared and have not ended. Guarded by the coordinator's lock."""

    def __init__(self, region: HostRegion, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds, the same for the movers."""
        self._region = region
        self._clock = clock
        self._rows = 0  # that workers read
        self._calls: set[str] = set()

    def begin(self, rows: int, call: str | None = None) -> None:
        """A load of so many rows was prepared, for workers or for a thread's `call`."""
        if not rows:
            return
        if call is None:
            self._rows += rows
        else:
            self._calls.add(call)
        self._region.stores_held_until_s = self._clock() + HOLD_S

    def end(self, rows: int) -> None:
        """Workers are done with so many rows."""
        self._rows = max(0, self._rows - rows)  # some may be of before a reset
        self._release()

    def end_call(self, call: str) -> None:
        self._calls.discard(call)
        self._release()

    def reset(self) -> None:
        """An engine does not report the loads of before a reset."""
        self.end(self._rows)

    def _release(self) -> None:
        if not (self._rows or self._calls):
            self._region.stores_held_until_s = 0.0
