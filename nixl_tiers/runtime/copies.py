"""What the region says of copies between its rows and the engine: which stores are good, and that loads are open."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from nixl_tiers.base.chunk import Key

if TYPE_CHECKING:
    from nixl_tiers.core.manager import TierManager
    from nixl_tiers.core.rows import Row
    from nixl_tiers.memory.region import HostRegion

HOLD_S: Final = 0.5  # after the last load began; one that takes longer, or never ends, holds up nothing


class OpenLoads:
    """While rows of the host are copied to where a request needs them, movers start no stores.

    A store beside it takes the processors and the memory bandwidth that the copy needs. The core does not know of it:
    what it has sent to a mover would go on. So movers read from the region until when they are to wait
    (`tiers/moves.py`), and bound that themselves. Guarded by the coordinator's lock.
    """

    def __init__(self, region: HostRegion, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds, the same for the movers."""
        self._region = region
        self._clock = clock
        self._requests: set[str] = set()
        self._calls: set[str] = set()

    def begin(self, rows: int, name: str, *, call: bool = False) -> None:
        """A load of so many rows was prepared, for a request, whose workers copy them, or for a thread's `call`."""
        if rows:
            (self._calls if call else self._requests).add(name)
            self._region.stores_held_until_s = self._clock() + HOLD_S

    def end(self, request: str) -> None:
        """Workers are done with its rows."""
        self._requests.discard(request)
        self._release()

    def end_call(self, call: str) -> None:
        self._calls.discard(call)
        self._release()

    def reset(self) -> None:
        """An engine does not report the loads of before a reset."""
        self._requests.clear()
        self._release()

    def _release(self) -> None:
        if not (self._requests or self._calls):
            self._region.stores_held_until_s = 0.0


def take_memory(core: TierManager, region: HostRegion) -> None:
    """Rows whose memory has come since the last call may be used; where it ends early, windows and quotas are shares of
    those. With the lock held."""
    host = core.host
    if host.limit < host.rows:
        if (ready := region.ranks.ready_rows or 0) > host.limit:
            host.limit = ready
        host.grows = host.limit < host.rows and not region.lacks_memory
        core.fit(host.rows if host.grows or not host.limit else host.limit)


def bad_rows(region: HostRegion, rows: Sequence[Row]) -> tuple[set[Key], set[Key]]:
    """(keys of rows that were not written, keys of rows that lack sub-blocks which a load may need).

    Sets `missing` of each row: how many sub-blocks it lacks at its beginning.
    """
    failed, incomplete = set[Key](), set[Key]()
    if rows and region.geometry.sub_blocks > 1:
        for row, missing in zip(rows, region.missing([row.index for row in rows]).tolist(), strict=True):
            row.missing = missing
    for store_seq in {row.store_seq for row in rows}:
        of_job = [row for row in rows if row.store_seq == store_seq]
        places = np.array([row.index for row in of_job])
        if (written := region.written(places, store_seq)).all():
            continue
        words = zip(of_job, written.tolist(), region.copied(places, store_seq).tolist(), strict=True)
        for row, good, copied in words:
            if not good:
                (incomplete if copied else failed).add(row.key)
    return failed, incomplete


def ended_rows(region: HostRegion, rows: Sequence[Row]) -> list[Row]:
    """Those of `rows` whose job every worker has ended, successfully or not."""
    if not rows:
        return []
    ended = region.ended([row.index for row in rows], [row.store_seq for row in rows])
    return [row for row, done in zip(rows, ended.tolist(), strict=True) if done]
