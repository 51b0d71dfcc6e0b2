"""S3-FIFO: Yang, Zhang, Qiu, Yue, Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023.

New keys enter a small queue, a tenth of the tier. A key that was used there moves on to the main queue; one that was
not is evicted soon, so that prefixes which are never asked for again take little room. A ghost queue remembers the keys
that the small queue evicted: one that comes back while remembered enters the main queue at once. In the main queue, a
key at the head is reinserted at the tail as long as it has uses left, of which it keeps three at most.

Two things are adapted to prefixes. A queue's element is the batch of keys that one request brought, and of a batch
the deepest chunk goes first. And the uses of one request count once, whichever calls they come from.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final

from nixl_tiers.base.chunk import Key
from nixl_tiers.core.eviction.lru import UpwardBatches

MOST_USES: Final = 3
USES_TO_STAY: Final = 2
SMALL_SHARE: Final = 0.1
MAX_STEPS: Final = 1024  # of one eviction beyond what its victims need; the next one goes on


class S3Fifo:
    """`rows`: the tier's capacity; it sets the share of the small queue and the length of the ghost queue."""

    def __init__(self, rows: int) -> None:
        self._small = UpwardBatches()  # by tick
        self._main = UpwardBatches()  # by self._lap
        self._ghosts: OrderedDict[Key, int] = OrderedDict()  # and their uses
        self._uses: dict[Key, int] = {}
        self._last_tick: dict[Key, int] = {}
        self._newest = -1  # tick
        self._lap = 0
        self._joining: tuple[UpwardBatches | None, int] = (None, -1)  # the batch whose keys the newest lap takes in
        self._small_rows = max(1, int(rows * SMALL_SHARE))
        self._most_ghosts = rows - int(rows * SMALL_SHARE)

    def __len__(self) -> int:
        return len(self._uses)

    def add(self, key: Key, tick: int) -> None:
        self._uses[key] = 0
        self._last_tick[key] = tick
        self._newest = max(self._newest, tick)
        if key in self._ghosts:
            del self._ghosts[key]
            self._main.add(key, self._lap_of(None, tick))
        else:
            self._small.add(key, tick)

    def put_back(self, key: Key, tick: int) -> None:
        uses = self._ghosts.pop(key, None)
        self._uses[key] = uses or 0
        self._last_tick[key] = tick
        if uses is None:
            lap = self._main.lowest()
            self._main.add(key, self._lap if lap is None else lap)
        else:
            self._small.add(key, tick)

    def touch(self, keys: Iterable[Key], tick: int) -> None:
        last_tick, uses = self._last_tick, self._uses
        for key in keys:
            if last_tick[key] != tick:
                last_tick[key] = tick
                if uses[key] < MOST_USES:
                    uses[key] += 1

    def remove(self, key: Key) -> None:
        (self._small if key in self._small else self._main).remove(key)
        self._forget(key)

    def evict(self, count: int, is_pinned: Callable[[Key], bool]) -> list[Key]:
        victims: list[Key] = []
        # Pinned keys are reinserted at the tail of their queue, after the loop: every key is checked once, and a tier
        # full of pinned keys is walked over once.
        pinned_small: list[Key] = []
        pinned_main: list[Key] = []
        for _ in range(MAX_STEPS + 2 * count):
            if len(victims) >= count or not (self._small or self._main):
                break
            if self._small and (not self._main or len(self._small) + len(pinned_small) >= self._small_rows):
                key, tick = self._small.pop()
                if self._uses[key] >= USES_TO_STAY:
                    self._main.add_root(key, self._lap_of(self._small, tick))
                elif is_pinned(key):
                    pinned_small.append(key)
                else:
                    victims.append(key)
                    self._ghosts[key] = self._uses[key]
                    self._forget(key)
            else:
                key, lap = self._main.pop()
                if self._uses[key]:
                    self._uses[key] -= 1
                    self._main.add_root(key, self._lap_of(self._main, lap))
                elif is_pinned(key):
                    pinned_main.append(key)
                else:
                    victims.append(key)
                    self._forget(key)
        for key in pinned_small:
            self._small.add_root(key, self._newest)
        for key in pinned_main:
            self._main.add_root(key, self._lap)
        self._trim()
        return victims

    def _lap_of(self, source: UpwardBatches | None, number: int) -> int:
        """The batch of main for a key that comes from this batch: what came together stays together."""
        if self._joining != (source, number):
            self._joining = (source, number)
            self._lap += 1
        return self._lap

    def _forget(self, key: Key) -> None:
        del self._uses[key]
        del self._last_tick[key]

    def _trim(self) -> None:
        while len(self._ghosts) > self._most_ghosts:
            self._ghosts.popitem(last=False)
