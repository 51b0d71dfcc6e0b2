"""A storage tier as the core sees it: which slot holds which key, what is queued for it, what is under way."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from nixl_tiers.cascade.host import Row
from nixl_tiers.cascade.policies.base import EvictionPolicy
from nixl_tiers.cascade.policies.lru import LeafFirstLru
from nixl_tiers.cascade.requests import Request
from nixl_tiers.cascade.slots import Slots
from nixl_tiers.chunk import Key


class TierState(Enum):
    DOWN = "down"  # no mover, or its medium does not answer: every look-up misses, cascades are dropped
    ADOPTING = "adopting"  # serves what it has already told of; stores wait until all of it is known
    UP = "up"


class Direction(Enum):
    STORE = "store"
    LOAD = "load"


@dataclass(frozen=True)
class TierSpec:
    """What the core must know of a storage tier. `physical_slots`: a slot is a place on the medium, not a count."""

    name: str
    writes: bool
    physical_slots: bool


class Entry:
    """A key's place in a storage tier. `stored` is False while its first write is under way."""

    __slots__ = ("readers", "retry_at", "slot", "stored")

    def __init__(self, slot: int, stored: bool) -> None:
        self.slot = slot
        self.stored = stored
        self.readers = 0
        self.retry_at = 0.0


@dataclass(frozen=True, slots=True)
class PlannedMove:
    row: Row
    entry: Entry
    key: Key
    tick: int = 0
    seal: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """One batch of row moves of one direction, to end by `deadline_s` (the caller's monotonic clock)."""

    id: int
    tier: int
    direction: Direction
    moves: list[PlannedMove]
    deadline_s: float


@dataclass
class Counters:
    """Monotonic, in rows unless the name says bytes; `dropped` counts cascades that were never written."""

    hits: int = 0
    misses: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    evictions: int = 0
    corrupt: int = 0
    failed: int = 0
    dropped: int = 0


@dataclass
class Storage:
    """The book of one storage tier. Every change of who holds a slot happens here."""

    spec: TierSpec
    state: TierState = TierState.DOWN
    index: dict[Key, Entry] = field(default_factory=dict)
    policy: EvictionPolicy = field(default_factory=LeafFirstLru)
    slots: Slots = field(default_factory=lambda: Slots(0))
    jobs: dict[int, Job] = field(default_factory=dict)
    to_store: OrderedDict[Key, int] = field(default_factory=OrderedDict)  # key -> tick, first come first written
    to_load: deque[tuple[Request, Key]] = field(default_factory=deque)
    to_drop: list[tuple[int, Key]] = field(default_factory=list)
    rows_storing: int = 0
    rows_loading: int = 0
    counters: Counters = field(default_factory=Counters)

    @property
    def readable(self) -> bool:
        return self.state is not TierState.DOWN

    def find(self, key: Key, now: float) -> Entry | None:
        """The entry of a row that can be loaded now."""
        if self.state is TierState.DOWN:
            return None
        entry = self.index.get(key)
        return entry if entry is not None and entry.stored and entry.retry_at <= now else None

    def reserve(self, key: Key, tick: int) -> Entry | None:
        """A slot for a row about to be written, evicting the least valuable row if the tier is full."""
        slot = self.slots.take()
        if slot is None:
            for victim in self.policy.evict(1, self._spare):
                self._release(victim)
                self.counters.evictions += 1
            slot = self.slots.take()
            if slot is None:
                return None
        entry = self.index[key] = Entry(slot, stored=False)
        self.policy.add(key, tick)
        return entry

    def adopt(self, slot: int, key: Key, tick: int) -> None:
        """A row that the medium held before we came. What we know better, or have no place for, is dropped there."""
        if key in self.index:
            if self.index[key].slot != slot and self.spec.physical_slots:
                self.to_drop.append((slot, key))
            return
        if not self.spec.physical_slots:
            taken = self.slots.take()
            if taken is None:
                self.to_drop.append((slot, key))
                return
            slot = taken
        elif not self.slots.claim(slot):
            self.to_drop.append((slot, key))
            return
        self.index[key] = Entry(slot, stored=True)
        self.policy.add(key, tick)

    def resize(self, limit: int) -> None:
        """A new number of slots; rows that stand beyond it, or are too many, are evicted, the least valuable first."""
        self.slots.limit = limit
        if self.spec.physical_slots:
            for key in [key for key, entry in self.index.items() if entry.slot >= limit and not self._spare(key)]:
                self.policy.remove(key)
                self._release(key)
                self.counters.evictions += 1
        elif len(self.slots) > limit:
            for key in self.policy.evict(len(self.slots) - limit, self._spare):
                self._release(key)
                self.counters.evictions += 1

    def forget(self, key: Key, entry: Entry) -> None:
        """This row is no good (any more). Does nothing if the key has another entry by now."""
        if self.index.get(key) is entry:
            self.policy.remove(key)
            self._release(key)

    def clear(self) -> None:
        """Another epoch: nothing that was here may be found. Jobs under way end as strangers."""
        self.index = {}
        self.policy = type(self.policy)()
        self.slots = Slots(0)
        self.to_store.clear()
        self.to_load.clear()
        self.to_drop.clear()
        self.state = TierState.DOWN

    def drops(self, most: int) -> Iterator[list[tuple[int, Key]]]:
        """What the medium must forget, in batches of at most `most`."""
        pending, self.to_drop = self.to_drop, []
        for start in range(0, len(pending), most):
            yield pending[start : start + most]

    def _release(self, key: Key) -> None:
        entry = self.index.pop(key)
        self.slots.give(entry.slot)
        self.to_drop.append((entry.slot, key))

    def _spare(self, key: Key) -> bool:
        entry = self.index[key]
        return bool(entry.readers) or not entry.stored
