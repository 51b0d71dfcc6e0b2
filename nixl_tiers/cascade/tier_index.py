"""A storage tier as the core sees it: which slot holds which key, what is queued for it, what is under way."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from nixl_tiers.cascade.breaker import Breaker, BreakerState
from nixl_tiers.cascade.cold_index import ColdIndex
from nixl_tiers.cascade.counters import Counters
from nixl_tiers.cascade.denylist import Denylist
from nixl_tiers.cascade.eviction import make_policy
from nixl_tiers.cascade.eviction.base import EvictionPolicy
from nixl_tiers.cascade.host import Row
from nixl_tiers.cascade.limits import Limits
from nixl_tiers.cascade.requests import Request
from nixl_tiers.cascade.slots import Slots
from nixl_tiers.cascade.throughput import ThroughputEstimate
from nixl_tiers.cascade.types import Direction, Entry, Job, TierSpec, TierState
from nixl_tiers.chunk import Key

SAMPLED: Final = 64
ENDLESS: Final = 1 << 62


@dataclass
class TierIndex:
    """The book of one storage tier. Every change of who holds a slot happens here.

    A row stands in `index`, or among the `adopted`: rows that nobody has used since the tier was opened, which the
    medium tells of by the million. They are colder than all others, so they go first.
    """

    spec: TierSpec
    limits: Limits = field(default_factory=Limits)
    state: TierState = TierState.DOWN
    index: dict[Key, Entry] = field(default_factory=dict)
    adopted: list[ColdIndex] = field(default_factory=list)  # the coldest first
    told_before: int = 0  # how many of these are from before the tier was opened again; they serve until it has told
    opened_with: int = 0  # how many rows the book had when the tier was opened
    policy: EvictionPolicy = field(init=False)
    slots: Slots = field(default_factory=lambda: Slots(0))
    jobs: dict[int, Job] = field(default_factory=dict)
    to_store: OrderedDict[Key, int] = field(default_factory=OrderedDict)  # key -> tick, first come first written
    to_load: deque[tuple[Request, Key]] = field(default_factory=deque)
    to_demote: deque[Key] = field(default_factory=deque)  # leaving, to be brought up and written below
    staged: dict[Key, Row] = field(default_factory=dict)  # the host rows of those that were, until that has ended
    to_drop: list[tuple[int, Key]] = field(default_factory=list)
    to_drop_adopted: list[tuple[int, bytes]] = field(default_factory=list)  # (slot, digest of the key)
    trials: OrderedDict[Key, None] = field(default_factory=OrderedDict)  # suspects that somebody asked for
    wanted: Key | None = None  # what was asked for last while its circuit was not closed
    leaving: set[Key] = field(default_factory=set)
    closing: list[ColdIndex] = field(default_factory=list)
    room: int = ENDLESS  # how many more messages its mover takes now
    rows_storing: int = 0
    rows_loading: int = 0
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        self.policy = make_policy(self.spec.policy, self.slots.limit)
        self.suspects = Denylist(self.limits.retry_s, self.limits.retry_most_s)
        # Each direction has its own: a disk that is full of errors for writers, or a bucket that may only be read,
        # still gives what it holds.
        self.breakers = {way: Breaker(self.limits.breaker) for way in Direction}
        self.paces = {way: ThroughputEstimate(self.limits.assumed_bytes_per_s) for way in Direction}

    @property
    def readable(self) -> bool:
        """Whether loads may be asked of it."""
        return self.state is not TierState.DOWN and self.breakers[Direction.LOAD].closed

    @property
    def writable(self) -> bool:
        """Whether cascades are written to it."""
        return self.state is TierState.UP and self.breakers[Direction.STORE].closed

    @property
    def circuit(self) -> BreakerState:
        """The worse of both breakers. A tier that is down is an open circuit, whatever opened it."""
        if self.state is TierState.DOWN:
            return BreakerState.OPEN
        return max(breaker.state for breaker in self.breakers.values())

    @property
    def trying(self) -> bool:
        """Whether a suspect or a probe is under way."""
        return any(job.alone for job in self.jobs.values())

    @property
    def quarantined(self) -> int:
        """Host rows that belong to nobody and that its mover may still write to."""
        return sum(len(job.moves) for job in self.jobs.values() if job.late and job.direction is Direction.LOAD)

    def __contains__(self, key: Key) -> bool:
        return key in self.index or any(rows.find(key) is not None for rows in self.adopted)

    def find(self, key: Key, now: float) -> bool:
        """Whether the key's row can be loaded now."""
        if not self.readable:
            return False
        entry = self.index.get(key)
        stored = entry.stored if entry is not None else any(rows.find(key) is not None for rows in self.adopted)
        return stored and not self.suspects.barred(key, now)

    def fetch(self, key: Key, now: float) -> Entry | None:
        """The entry of a row that can be loaded now, and is going to be."""
        if not self.find(key, now):
            return None
        return self.index.get(key) or self._bring_over(key)

    def inspect(self, key: Key) -> Entry | None:
        """The entry of a stored row that is going to be tried, whatever speaks against it."""
        entry = self.index.get(key) or self._bring_over(key)
        return entry if entry is not None and entry.stored else None

    def sample(self) -> Key | None:
        """A stored row that is not under suspicion, to see whether loads work: the one that was asked for last while
        they did not, or one of the newest."""
        if self.wanted is not None and self.wanted in self and not self.suspects.accused(self.wanted):
            return self.wanted
        newest = islice(reversed(self.index.items()), SAMPLED)
        return next((key for key, e in newest if e.stored and not e.leaving and not self.suspects.accused(key)), None)

    def make_room(self, count: int) -> list[Key]:
        """Evict the least valuable rows until `count` slots are free, or until nothing more may go; returns what had to
        go (of rows whose keys nobody knows, their digests)."""
        missing = count - self.slots.free
        if missing <= 0:
            return []
        # Those that leave were to go anyway, and are lost if they were not written below yet.
        victims = [key for key in self.leaving if not self._spare(key)][:missing]
        adopted = self._evict_adopted(missing - len(victims))
        victims += self.policy.evict(missing - len(victims) - len(adopted), self._spare)
        for key in victims:
            self._evicted(key)
        return victims + adopted

    def reserve(self, key: Key, tick: int) -> Entry | None:
        """A slot for a row about to be written, or None if there is none; call make_room first."""
        slot = self.slots.take()
        if slot is None:
            return None
        entry = self.index[key] = Entry(slot, stored=False)
        self.policy.add(key, tick)
        return entry

    def adopt(self, slot: int, key: Key, tick: int) -> None:
        """A row that the medium held before we came, or has got from others; a negative slot: one that others took
        away. What we know better, or have no place for, is dropped there."""
        entry = self.index.get(key) or self._bring_over(key)
        if slot < 0:
            if entry is not None and not self._spare(key):
                self.forget(key, entry)
                self.counters.removed += 1
            return
        if entry is not None:
            if entry.slot != slot and self.spec.physical_slots:
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
        self.counters.found += 1

    def adopt_rows(self, rows: ColdIndex) -> None:
        """Many rows that the medium held before we came, colder than any that was adopted or used since."""
        self.forget_told_before()
        self.adopted.append(rows)
        if self.spec.physical_slots:
            self.slots.admit(rows)
            self.counters.found += len(rows)
            self._close_emptied()
        else:
            self.slots.lend(len(rows))
            self.counters.found += len(rows)
            self._evict_adopted(-self.slots.free)

    def forget_told_before(self) -> None:
        """What the tier told before it was opened again has been told again, or is about to be."""
        while self.told_before:
            self._close_adopted(0)

    def resize(self, limit: int) -> None:
        """A new number of slots; rows that stand beyond it, or are too many, are evicted, the least valuable first."""
        self.opened_with = len(self.index)
        self.told_before = len(self.adopted)
        if limit < self.slots.limit:
            self.forget_told_before()
        self.slots.limit = limit
        self.policy.resize(limit)
        if self.spec.physical_slots:
            for key in [key for key, entry in self.index.items() if entry.slot >= limit and not self._spare(key)]:
                self.release(key)
        elif len(self.slots) > limit:
            for key in self.policy.evict(len(self.slots) - limit, self._spare):
                self._evicted(key)

    def limit_to(self, limit: int) -> None:
        """From now on no slot from `limit` on is given out; what stands there stays until it is said to be gone."""
        self.slots.limit = limit
        self.policy.resize(limit)

    def touch(self, key: Key, tick: int) -> None:
        """A row of this tier was used, here or above."""
        entry = self.index.get(key) or self._bring_over(key)
        if entry is None:
            return
        if entry.leaving:
            self.stay(key, tick)
        else:
            self.policy.touch(key, tick)

    def choose(self, count: int) -> list[Key]:
        """The `count` least valuable rows, from now on leaving: still there, until `release` is called for them."""
        keys: list[Key] = []
        for rows in self.adopted:
            for key, slot in rows.coldest(count - len(keys)) if rows.named else ():
                if key in self.index:
                    self._told_twice(key, slot)
                elif (entry := self._enter(key, slot)) is not None:
                    keys.append(key)
                    entry.leaving = True
        self._close_emptied()
        for key in self.policy.evict(count - len(keys), self._spare):
            self.index[key].leaving = True
            keys.append(key)
        self.leaving.update(keys)
        return keys

    def stay(self, key: Key, tick: int) -> None:
        """A leaving row is wanted again, or cannot be written below: it takes its turn anew."""
        if key in self.leaving:
            self.leaving.remove(key)
            self.index[key].leaving = False
            self.policy.add(key, tick)

    def release(self, key: Key) -> None:
        """Evict this row now, unless a job has hands on it."""
        entry = self.index.get(key)
        if entry is not None and not self._spare(key):
            if not entry.leaving:
                self.policy.remove(key)
            self._evicted(key)

    def forget(self, key: Key, entry: Entry) -> bool:
        """This row is no good (any more). Does nothing, and returns False, if the key has another entry by now."""
        if self.index.get(key) is not entry:
            return False
        if not entry.leaving:
            self.policy.remove(key)
        self._give_back(key)
        return True

    def clear(self) -> None:
        """Another epoch: nothing that was here may be found. Jobs under way end as strangers."""
        self.counters.reset += self.counters.rows
        self.index = {}
        self.closing += self.adopted
        self.adopted = []
        self.told_before = 0
        self.slots = Slots(0)
        self.policy = make_policy(self.spec.policy, 0)
        self.leaving.clear()
        self.to_store.clear()
        self.to_load.clear()
        self.to_demote.clear()
        self.staged.clear()
        self.forget_drops()
        self.trials.clear()
        self.suspects.clear()
        self.wanted = None
        self.state = TierState.DOWN

    def forget_drops(self) -> None:
        """What stands on the medium is told anew when it is opened, and so is what was to go."""
        self.to_drop.clear()
        self.to_drop_adopted.clear()

    @property
    def room_for_stores(self) -> int:
        """How many store jobs may be planned now. A store must not overtake what goes before it, lest a row be
        forgotten that has just been written; and each may cost as many rows as it writes."""
        size = self.limits.drops_per_batch
        return (self.room + len(self.to_drop) // -size + len(self.to_drop_adopted) // -size - 2) // 2 - 1

    def drops(self, most: int) -> list[list[tuple[int, Key]]]:
        """What the medium must forget, in batches of at most `most`, as many as there is room for. The rest stays."""
        return self._batches(self.to_drop, most)

    def adopted_drops(self, most: int) -> list[list[tuple[int, bytes]]]:
        """The same of adopted rows, by the digests of their keys, since nobody here knows these."""
        return self._batches(self.to_drop_adopted, most)

    def take_closing(self) -> list[ColdIndex]:
        """Adopted rows that are not used any more. Closing them gives much memory back: not while anybody waits."""
        closing, self.closing = self.closing, []
        return closing

    def _batches(self, pending: list[Any], most: int) -> list[list[Any]]:
        starts = range(0, len(pending), most)[: max(0, self.room)]
        batches = [pending[start : start + most] for start in starts]
        del pending[: most * len(batches)]
        self.room -= len(batches)
        return batches

    def _bring_over(self, key: Key) -> Entry | None:
        """The entry of a row that stood among the adopted until now; it is used, or is to be judged by itself."""
        for rows in self.adopted:
            found = rows.remove(key)
            if found is not None:
                slot, tick = found
                entry = self._enter(key, slot)
                if entry is not None:
                    self.policy.add(key, tick)
                self._close_emptied()
                return entry
        return None

    def _enter(self, key: Key, slot: int) -> Entry | None:
        """Put a row that is no longer among the adopted into the index. None if the tier has no room for it by now."""
        if not self.spec.physical_slots:
            self.slots.lend(-1)
            number = self.slots.take()
            if number is None:
                self.to_drop.append((slot, key))
                self.counters.evictions += 1
                return None
            slot = number
        entry = self.index[key] = Entry(slot, stored=True)
        return entry

    def _told_twice(self, key: Key, slot: int) -> None:
        """A row that is no longer among the adopted has an entry of its own, which is the one that counts."""
        self.counters.relisted += 1
        if self.spec.physical_slots:
            self.slots.give(slot)
            self.to_drop.append((slot, key))
        else:
            self.slots.lend(-1)

    def _evict_adopted(self, count: int) -> list[bytes]:
        """Evict up to `count` adopted rows, the coldest first; returns their keys, or digests where these are all that
        is known."""
        evicted: list[bytes] = []
        for rows in self.adopted:
            victims = rows.coldest(count - len(evicted)) if len(evicted) < count else []
            evicted += (name for name, _ in victims)
            if self.spec.physical_slots:
                for _, slot in victims:
                    self.slots.give(slot)
            else:
                self.slots.lend(-len(victims))
            drops = self.to_drop if rows.named else self.to_drop_adopted
            drops += [(slot, name) for name, slot in victims]
        self.counters.evictions += len(evicted)
        self._close_emptied()
        return evicted

    def _close_emptied(self) -> None:
        for number in reversed(range(len(self.adopted))):
            if not len(self.adopted[number]):
                self._close_adopted(number)

    def _close_adopted(self, number: int) -> None:
        rows = self.adopted.pop(number)
        self.told_before -= number < self.told_before
        self.counters.relisted += len(rows)
        if self.spec.physical_slots:
            self.slots.dismiss(rows)
        else:
            self.slots.lend(-len(rows))
        self.closing.append(rows)

    def _evicted(self, key: Key) -> None:
        self._give_back(key)
        self.counters.evictions += 1

    def _give_back(self, key: Key) -> None:
        entry = self.index.pop(key)
        self.leaving.discard(key)
        self.slots.give(entry.slot)
        self.to_drop.append((entry.slot, key))

    def _spare(self, key: Key) -> bool:
        entry = self.index[key]
        return bool(entry.readers) or not entry.stored
