"""What the engine uses from its own memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from nixl_tiers.base.chunk import Key
from nixl_tiers.core.deferred_free import DeferredFree
from nixl_tiers.core.promotion import RequestIndex
from nixl_tiers.core.state import CascadeState
from nixl_tiers.core.writeback import WriteBack

MAX_KEYS: Final = 1 << 18  # that wait; the uses that were reported first are forgotten


@dataclass(slots=True)
class _Hits:
    """One request's. `done`: how many of `keys` have been touched."""

    keys: Sequence[Key]
    tick: int
    host_only: bool
    done: int = 0


class EngineHits:
    """The chunks that the engine uses from its own memory are as recent here as what it loads.

    A scheduler reports the whole prefix of a request at once: `add` queues it, `work` touches some of its chunks in
    each slice.

    What the same request loads or stores is deeper, and must be evicted first, or the root of the prefix would go
    before its leaves. That may be touched before the root by now: so the root has a tick of its own, which is later.
    """

    def __init__(self, state: CascadeState, requests: RequestIndex, writeback: WriteBack) -> None:
        self._state = state
        self._requests = requests
        self._writeback = writeback
        self._queue: deque[_Hits] = deque()
        self.waiting = 0
        """How many keys are to be touched."""

    def add(self, name: str, keys: Sequence[Key]) -> None:
        """The engine used these chunks, in prefix order, for a request. Looks at none of them; nobody may change
        `keys` from now on."""
        request = self._requests.get(name)
        self._state.tick_of(request)
        tick = 0 if request.wishes.evict_first else self._state.tick
        self._state.tick += 1
        self._queue.append(_Hits(keys, tick, request.wishes.host_only))
        self.waiting += len(keys)
        while self.waiting > MAX_KEYS:
            self._drop_first()

    def work(self) -> None:
        """Touch as many of them as the slice has room for."""
        while self._queue and not self._state.slice_used_up:
            hits = self._queue[0]
            some = hits.keys[hits.done : hits.done + self._state.slice_left]
            self._state.slice_left -= len(some)
            self.waiting -= len(some)
            hits.done += len(some)
            self._touch(some, hits)
            if hits.done == len(hits.keys):
                self._queue.popleft()

    def reset(self, garbage: DeferredFree) -> None:
        """Other bytes belong to these keys from now on."""
        garbage.add(self._queue)
        self._queue = deque()
        self.waiting = 0

    def _touch(self, keys: Sequence[Key], hits: _Hits) -> None:
        rows = [row for row in map(self._state.host.index.get, keys) if row is not None]
        self._state.host.touch(rows, hits.tick)
        if not hits.host_only:
            for row in rows:
                if row.host_only:
                    self._writeback.allow(row)
        for tier in self._state.tiers:
            tier.index.touch(keys, hits.tick)

    def _drop_first(self) -> None:
        hits = self._queue.popleft()
        self.waiting -= len(hits.keys) - hits.done
