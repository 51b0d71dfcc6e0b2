"""ARC: Megiddo, Modha, "ARC: A self-tuning, low overhead replacement cache", FAST 2003.

T1 holds what one request used, T2 what several did; both forget their least recently used. The ghost lists B1 and
B2 remember the names of what T1 and T2 let go. A key that comes back while B1 remembers it says that T1 is too
short, one that B2 remembers says that T2 is: `_recent_rows`, the room that T1 may have (the paper's p), follows.

Three things are adapted. Within the keys of one request the deepest chunk of the prefix goes first. The uses of one
request count once. And a tier makes room for several keys before it says which: so the target moves when a key comes
and not before the eviction for it, and the paper's tie between T1 and T2 always goes to T2.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from nixl_tiers.base.chunk import Key
from nixl_tiers.core.eviction.lru import LeafFirstLru

Ghosts = OrderedDict[Key, None]


class Arc:
    """`rows`: the tier's capacity (the paper's c). T1 with B1, and B1 with B2, name at most that many keys."""

    def __init__(self, rows: int) -> None:
        self._once = LeafFirstLru()  # T1
        self._often = LeafFirstLru()  # T2
        self._once_ghosts: Ghosts = OrderedDict()  # B1
        self._often_ghosts: Ghosts = OrderedDict()  # B2
        self._last_tick: dict[Key, int] = {}  # of T1: whose use it was
        self._recent_rows = 0.0
        self._rows = rows

    def __len__(self) -> int:
        return len(self._once) + len(self._often)

    def add(self, key: Key, tick: int) -> None:
        once, often = len(self._once_ghosts), len(self._often_ghosts)
        if key in self._once_ghosts:
            self._recent_rows = min(self._rows, self._recent_rows + max(1.0, often / once))
            del self._once_ghosts[key]
            self._often.add(key, tick)
        elif key in self._often_ghosts:
            self._recent_rows = max(0.0, self._recent_rows - max(1.0, once / often))
            del self._often_ghosts[key]
            self._often.add(key, tick)
        else:
            self._once.add(key, tick)
            self._last_tick[key] = tick
        self._trim()

    def put_back(self, key: Key, tick: int) -> None:
        if key in self._often_ghosts:
            del self._often_ghosts[key]
            self._often.add(key, tick)
        else:
            self._once_ghosts.pop(key, None)
            self._once.add(key, tick)
            self._last_tick[key] = tick
            self._trim()

    def touch(self, keys: Iterable[Key], tick: int) -> None:
        often: list[Key] = []
        for key in keys:
            last_tick = self._last_tick.get(key)
            if last_tick is None:
                often.append(key)
            elif last_tick != tick:
                self._often.touch(often, tick)  # before it in the order of their batch
                often = []
                del self._last_tick[key]
                self._once.remove(key)
                self._often.add(key, tick)
        self._often.touch(often, tick)

    def remove(self, key: Key) -> None:
        if self._last_tick.pop(key, None) is None:
            self._often.remove(key)
        else:
            self._once.remove(key)

    def evict(self, count: int, is_pinned: Callable[[Key], bool]) -> list[Key]:
        over = min(count, max(0, len(self._once) - int(self._recent_rows)))
        once = self._once.evict(over, is_pinned) if over else []
        often = self._often.evict(count - len(once), is_pinned) if len(once) < count else []
        missing = count - len(once) - len(often)
        if missing and len(once) == over:
            once += self._once.evict(missing, is_pinned)  # T2 has nothing more to give: T1 goes below its target
        for key in once:
            del self._last_tick[key]
        self._remember(self._once_ghosts, once)
        self._remember(self._often_ghosts, often)
        return once + often

    def _remember(self, ghosts: Ghosts, victims: Iterable[Key]) -> None:
        for key in victims:
            ghosts[key] = None
        self._trim()

    def _trim(self) -> None:
        while self._once_ghosts and len(self._once) + len(self._once_ghosts) > self._rows:
            self._once_ghosts.popitem(last=False)
        while self._often_ghosts and len(self._once_ghosts) + len(self._often_ghosts) > self._rows:
            self._often_ghosts.popitem(last=False)
