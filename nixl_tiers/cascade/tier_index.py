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
from nixl_tiers.cascade.types import Direction, Entry, Job, PlannedMove, TierSpec, TierState
from nixl_tiers.chunk import Key

MAX_SAMPLED: Final = 64
UNLIMITED: Final = 1 << 62


@dataclass
class TierIndex:
    """The book of one storage tier. Every change of who holds a slot happens here.

    A row stands in `index`, or among the `adopted`: rows that nobody has used since the tier was opened, which the
    medium tells of by the million. They are colder than all others, so they go first.
    """

    spec: TierSpec
    number: int  # its place in the cascade, from 0
    limits: Limits = field(default_factory=Limits)
    state: TierState = TierState.DOWN
    index: dict[Key, Entry] = field(default_factory=dict)
    cold: list[ColdIndex] = field(default_factory=list)  # the coldest first
    stale_cold: int = 0  # how many of these are from before the tier was opened again; they serve until it has told
    rows_at_open: int = 0  # how many rows the book had when the tier was opened
    policy: EvictionPolicy = field(init=False)
    slots: Slots = field(default_factory=lambda: Slots(0))
    jobs: dict[int, Job] = field(default_factory=dict)
    to_store: OrderedDict[Key, int] = field(default_factory=OrderedDict)  # key -> tick, first come first written
    to_load: deque[tuple[Request, Key]] = field(default_factory=deque)
    to_demote: deque[Key] = field(default_factory=deque)  # leaving, to be brought up and written below
    staged: dict[Key, Row] = field(default_factory=dict)  # the host rows of those that were, until that has ended
    to_delete: list[tuple[int, Key]] = field(default_factory=list)
    to_delete_cold: list[tuple[int, bytes]] = field(default_factory=list)  # (slot, digest of the key)
    trials: OrderedDict[Key, None] = field(default_factory=OrderedDict)  # suspects that somebody asked for
    last_refused: Key | None = None  # what was asked for last while its circuit was not closed
    evicting: set[Key] = field(default_factory=set)
    retired: list[ColdIndex] = field(default_factory=list)
    send_credits: int = UNLIMITED  # how many more messages its mover takes now
    rows_storing: int = 0
    rows_loading: int = 0
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        self.policy = make_policy(self.spec.policy, self.slots.limit)
        self.denylist = Denylist(self.limits.retry_s, self.limits.retry_max_s)
        # Each direction has its own: a disk that is full of errors for writers, or a bucket that may only be read,
        # still gives what it holds.
        self.breakers = {way: Breaker(self.limits.breaker) for way in Direction}
        self.throughput = {way: ThroughputEstimate(self.limits.assumed_bytes_per_s) for way in Direction}

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
    def trial_running(self) -> bool:
        """Whether a suspect or a probe is under way."""
        return any(job.is_trial for job in self.jobs.values())

    @property
    def quarantined(self) -> int:
        """Host rows that belong to nobody and that its mover may still write to."""
        return sum(len(job.moves) for job in self.jobs.values() if job.abandoned and job.direction is Direction.LOAD)

    def __contains__(self, key: Key) -> bool:
        return key in self.index or any(rows.find(key) is not None for rows in self.cold)

    def can_load(self, key: Key, now: float) -> bool:
        """Whether the key's row can be loaded now."""
        if not self.readable:
            return False
        entry = self.index.get(key)
        stored = entry.stored if entry is not None else any(rows.find(key) is not None for rows in self.cold)
        return stored and not self.denylist.is_denied(key, now)

    def open_for_load(self, key: Key, now: float) -> Entry | None:
        """The entry of a row that can be loaded now, and is going to be."""
        if not self.can_load(key, now):
            return None
        return self.index.get(key) or self._warm(key)

    def open_for_trial(self, key: Key) -> Entry | None:
        """The entry of a stored row that is going to be tried, whatever speaks against it."""
        entry = self.index.get(key) or self._warm(key)
        return entry if entry is not None and entry.stored else None

    def probe_candidate(self) -> Key | None:
        """A stored row that is not under suspicion, to see whether loads work: the one that was asked for last while
        they did not, or one of the newest."""
        if (
            self.last_refused is not None
            and self.last_refused in self
            and not self.denylist.is_suspect(self.last_refused)
        ):
            return self.last_refused
        newest = islice(reversed(self.index.items()), MAX_SAMPLED)
        return next(
            (key for key, e in newest if e.stored and not e.evicting and not self.denylist.is_suspect(key)), None
        )

    def make_room(self, count: int) -> list[Key]:
        """Evict the least valuable rows until `count` slots are free, or until nothing more may go; returns what had to
        go (of rows whose keys nobody knows, their digests)."""
        missing = count - self.slots.free
        if missing <= 0:
            return []
        # Those that leave were to go anyway, and are lost if they were not written below yet.
        victims = [key for key in self.evicting if not self._is_pinned(key)][:missing]
        adopted = self._evict_cold(missing - len(victims))
        victims += self.policy.evict(missing - len(victims) - len(adopted), self._is_pinned)
        for key in victims:
            self._count_evicted(key)
        return victims + adopted

    def reserve(self, key: Key, tick: int) -> Entry | None:
        """A slot for a row about to be written, or None if there is none; call make_room first."""
        slot = self.slots.allocate()
        if slot is None:
            return None
        entry = self.index[key] = Entry(slot, stored=False)
        self.policy.add(key, tick)
        return entry

    def add_listed(self, slot: int, key: Key, tick: int) -> None:
        """A row that the medium held before we came, or has got from others; a negative slot: one that others took
        away. What we know better, or have no place for, is dropped there."""
        entry = self.index.get(key) or self._warm(key)
        if slot < 0:
            if entry is not None and not self._is_pinned(key):
                self.invalidate(key, entry)
                self.counters.removed += 1
            return
        if entry is not None:
            if entry.slot != slot and self.spec.physical_slots:
                self.to_delete.append((slot, key))
            return
        if not self.spec.physical_slots:
            taken = self.slots.allocate()
            if taken is None:
                self.to_delete.append((slot, key))
                return
            slot = taken
        elif not self.slots.claim(slot):
            self.to_delete.append((slot, key))
            return
        self.index[key] = Entry(slot, stored=True)
        self.policy.add(key, tick)
        self.counters.found += 1

    def add_cold(self, rows: ColdIndex) -> None:
        """Many rows that the medium held before we came, colder than any that was adopted or used since."""
        self.retire_stale()
        self.cold.append(rows)
        if self.spec.physical_slots:
            self.slots.claim_rows(rows)
            self.counters.found += len(rows)
            self._retire_empty()
        else:
            self.slots.adjust_used(len(rows))
            self.counters.found += len(rows)
            self._evict_cold(-self.slots.free)

    def retire_stale(self) -> None:
        """What the tier told before it was opened again has been told again, or is about to be."""
        while self.stale_cold:
            self._retire(0)

    def resize(self, limit: int) -> None:
        """A new number of slots; rows that stand beyond it, or are too many, are evicted, the least valuable first."""
        self.rows_at_open = len(self.index)
        self.stale_cold = len(self.cold)
        if limit < self.slots.limit:
            self.retire_stale()
        self.slots.limit = limit
        self.policy.resize(limit)
        if self.spec.physical_slots:
            for key in [key for key, entry in self.index.items() if entry.slot >= limit and not self._is_pinned(key)]:
                self.evict(key)
        elif len(self.slots) > limit:
            for key in self.policy.evict(len(self.slots) - limit, self._is_pinned):
                self._count_evicted(key)

    def set_limit(self, limit: int) -> None:
        """From now on no slot from `limit` on is given out; what stands there stays until it is said to be gone."""
        self.slots.limit = limit
        self.policy.resize(limit)

    def touch(self, key: Key, tick: int) -> None:
        """A row of this tier was used, here or above."""
        entry = self.index.get(key) or self._warm(key)
        if entry is None:
            return
        if entry.evicting:
            self.cancel_eviction(key, tick)
        else:
            self.policy.touch(key, tick)

    def select_victims(self, count: int) -> list[Key]:
        """The `count` least valuable rows, from now on leaving: still there, until `release` is called for them."""
        keys: list[Key] = []
        for rows in self.cold:
            for key, slot in rows.coldest(count - len(keys)) if rows.named else ():
                if key in self.index:
                    self._drop_duplicate(key, slot)
                elif (entry := self._insert(key, slot)) is not None:
                    keys.append(key)
                    entry.evicting = True
        self._retire_empty()
        for key in self.policy.evict(count - len(keys), self._is_pinned):
            self.index[key].evicting = True
            keys.append(key)
        self.evicting.update(keys)
        return keys

    def cancel_eviction(self, key: Key, tick: int) -> None:
        """A leaving row is wanted again, or cannot be written below: it takes its turn anew."""
        if key in self.evicting:
            self.evicting.remove(key)
            self.index[key].evicting = False
            self.policy.add(key, tick)

    def evict(self, key: Key) -> None:
        """Evict this row now, unless a job has hands on it."""
        entry = self.index.get(key)
        if entry is not None and not self._is_pinned(key):
            if not entry.evicting:
                self.policy.remove(key)
            self._count_evicted(key)

    def invalidate(self, key: Key, entry: Entry) -> bool:
        """This row is no good (any more). Does nothing, and returns False, if the key has another entry by now."""
        if self.index.get(key) is not entry:
            return False
        if not entry.evicting:
            self.policy.remove(key)
        self._remove(key)
        return True

    def start_load(self, row: Row) -> PlannedMove:
        """Pin a row's entry and its host row for a load."""
        entry = self.index[row.key]
        entry.readers += 1
        row.mover_refs = 1
        self.rows_loading += 1
        return PlannedMove(row, entry, row.key)

    def end_load(self, move: PlannedMove) -> None:
        """Undo that: the mover is done with both."""
        move.entry.readers -= 1
        move.row.mover_refs -= 1
        self.rows_loading -= 1

    def drop_queues(self, tick: int) -> None:
        """Nothing that waits for this tier is wanted any more; its victims stay."""
        self.to_load.clear()
        self.to_store.clear()
        self.to_demote.clear()
        self.staged.clear()
        for key in list(self.evicting):
            self.cancel_eviction(key, tick)

    def clear(self) -> None:
        """Another epoch: nothing that was here may be found. Jobs under way end as strangers."""
        self.counters.reset += self.counters.rows
        self.index = {}
        self.retired += self.cold
        self.cold = []
        self.stale_cold = 0
        self.slots = Slots(0)
        self.policy = make_policy(self.spec.policy, 0)
        self.evicting.clear()
        self.to_store.clear()
        self.to_load.clear()
        self.to_demote.clear()
        self.staged.clear()
        self.clear_deletes()
        self.trials.clear()
        self.denylist.reset()
        self.last_refused = None
        self.state = TierState.DOWN

    def clear_deletes(self) -> None:
        """What stands on the medium is told anew when it is opened, and so is what was to go."""
        self.to_delete.clear()
        self.to_delete_cold.clear()

    @property
    def store_credits(self) -> int:
        """How many store jobs may be planned now. A store must not overtake what goes before it, lest a row be
        forgotten that has just been written; and each may cost as many rows as it writes."""
        size = self.limits.deletes_per_batch
        return (self.send_credits + len(self.to_delete) // -size + len(self.to_delete_cold) // -size - 2) // 2 - 1

    def delete_batches(self, most: int) -> list[list[tuple[int, Key]]]:
        """What the medium must forget, in batches of at most `most`, as many as there is room for. The rest stays."""
        return self._batches(self.to_delete, most)

    def cold_delete_batches(self, most: int) -> list[list[tuple[int, bytes]]]:
        """The same of adopted rows, by the digests of their keys, since nobody here knows these."""
        return self._batches(self.to_delete_cold, most)

    def take_retired(self) -> list[ColdIndex]:
        """Adopted rows that are not used any more. Closing them gives much memory back: not while anybody waits."""
        closing, self.retired = self.retired, []
        return closing

    def _batches(self, pending: list[Any], most: int) -> list[list[Any]]:
        starts = range(0, len(pending), most)[: max(0, self.send_credits)]
        batches = [pending[start : start + most] for start in starts]
        del pending[: most * len(batches)]
        self.send_credits -= len(batches)
        return batches

    def _warm(self, key: Key) -> Entry | None:
        """The entry of a row that stood among the adopted until now; it is used, or is to be judged by itself."""
        for rows in self.cold:
            found = rows.remove(key)
            if found is not None:
                slot, tick = found
                entry = self._insert(key, slot)
                if entry is not None:
                    self.policy.add(key, tick)
                self._retire_empty()
                return entry
        return None

    def _insert(self, key: Key, slot: int) -> Entry | None:
        """Put a row that is no longer among the adopted into the index. None if the tier has no room for it by now."""
        if not self.spec.physical_slots:
            self.slots.adjust_used(-1)
            number = self.slots.allocate()
            if number is None:
                self.to_delete.append((slot, key))
                self.counters.evictions += 1
                return None
            slot = number
        entry = self.index[key] = Entry(slot, stored=True)
        return entry

    def _drop_duplicate(self, key: Key, slot: int) -> None:
        """A row that is no longer among the adopted has an entry of its own, which is the one that counts."""
        self.counters.relisted += 1
        if self.spec.physical_slots:
            self.slots.release(slot)
            self.to_delete.append((slot, key))
        else:
            self.slots.adjust_used(-1)

    def _evict_cold(self, count: int) -> list[bytes]:
        """Evict up to `count` adopted rows, the coldest first; returns their keys, or digests where these are all that
        is known."""
        evicted: list[bytes] = []
        for rows in self.cold:
            victims = rows.coldest(count - len(evicted)) if len(evicted) < count else []
            evicted += (name for name, _ in victims)
            if self.spec.physical_slots:
                for _, slot in victims:
                    self.slots.release(slot)
            else:
                self.slots.adjust_used(-len(victims))
            drops = self.to_delete if rows.named else self.to_delete_cold
            drops += [(slot, name) for name, slot in victims]
        self.counters.evictions += len(evicted)
        self._retire_empty()
        return evicted

    def _retire_empty(self) -> None:
        for number in reversed(range(len(self.cold))):
            if not len(self.cold[number]):
                self._retire(number)

    def _retire(self, number: int) -> None:
        rows = self.cold.pop(number)
        self.stale_cold -= number < self.stale_cold
        self.counters.relisted += len(rows)
        if self.spec.physical_slots:
            self.slots.release_rows(rows)
        else:
            self.slots.adjust_used(-len(rows))
        self.retired.append(rows)

    def _count_evicted(self, key: Key) -> None:
        self._remove(key)
        self.counters.evictions += 1

    def _remove(self, key: Key) -> None:
        entry = self.index.pop(key)
        self.evicting.discard(key)
        self.slots.release(entry.slot)
        self.to_delete.append((entry.slot, key))

    def _is_pinned(self, key: Key) -> bool:
        entry = self.index[key]
        return bool(entry.readers) or not entry.stored
