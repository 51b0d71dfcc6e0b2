"""The core's index of one storage tier: which key holds which slot, what is queued for it, what is under way."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, repeat
from operator import or_
from typing import Final

from nixl_tiers.base.chunk import Key
from nixl_tiers.base.policies import Write
from nixl_tiers.core.breaker import Breaker, BreakerState, Denylist
from nixl_tiers.core.cold_rows import ColdRows, Spill
from nixl_tiers.core.deferred_free import DeferredFree
from nixl_tiers.core.eviction import EvictionPolicy, make_policy
from nixl_tiers.core.eviction.lru import LeafFirstLru
from nixl_tiers.core.host import Row
from nixl_tiers.core.limits import Limits
from nixl_tiers.core.pricing import ThroughputEstimate, TransferEstimate
from nixl_tiers.core.recent_uses import RecentUses
from nixl_tiers.core.requests import Request
from nixl_tiers.core.slots import SlotCount, Slots
from nixl_tiers.core.stats import Counters, EvictionHistory, Gone, tag_of
from nixl_tiers.core.types import Burst, Direction, Entry, Job, OrphanedJobs, PlannedMove, TierSpec, TierState

UNLIMITED: Final = 1 << 62
# Members of an enum are found by a slow attribute look-up before Python 3.12.
_DOWN: Final = TierState.DOWN
_CLOSED: Final = BreakerState.CLOSED


@dataclass
class TierIndex:
    """The rows of one storage tier. Slots are allocated and released here only.

    A row is in `index`, or in `cold` until it is used: those that the medium listed at the start, and the coldest ones
    of an index that has become too large (spill.py).
    """

    spec: TierSpec
    number: int  # its place in the cascade, from 0
    limits: Limits = field(default_factory=Limits)
    garbage: DeferredFree = field(default_factory=DeferredFree)
    gone: EvictionHistory = field(default_factory=EvictionHistory)
    state: TierState = TierState.DOWN
    index: dict[Key, Entry] = field(default_factory=dict)
    policy: EvictionPolicy = field(init=False)
    slots: SlotCount = field(init=False)
    spill: Spill | None = None  # the one that is under way
    moved_from_cold: list[Key] | None = None  # into `index`, while a listed table is added
    jobs: dict[int, Job] = field(default_factory=dict)
    ending_moves: list[PlannedMove] = field(default_factory=list)  # they pin rows and are in no job: only in a call
    dead: deque[OrphanedJobs] = field(
        default_factory=deque
    )  # of movers that were killed or have died, the oldest first
    trials_running: int = 0  # open jobs that are trials of a suspect, or probes
    quarantined: int = 0  # host rows that cannot be allocated since its mover may still write to them
    to_store: OrderedDict[Key, int] = field(default_factory=OrderedDict)  # key -> tick, first in, first out
    waiting_for_seal: dict[Key, int] = field(default_factory=dict)  # the same while another tier's mover seals the row
    to_load: deque[tuple[Request, Key]] = field(default_factory=deque)
    queued: int = 0  # rows that were ever put there
    loaded: int = 0  # rows whose load has ended, however
    burst: Burst | None = None  # the last one
    to_demote: deque[Key] = field(default_factory=deque)  # victims to load, for the tier below
    staged: dict[Key, Row] = field(default_factory=dict)  # their host rows until they are written there
    to_delete: list[tuple[int, Key]] = field(default_factory=list)
    trials: OrderedDict[Key, None] = field(default_factory=OrderedDict)  # suspects that were asked for
    recent_uses: RecentUses = field(default_factory=RecentUses)  # of rows in physical slots, for the journal
    newest_listed: int = 0  # the highest tick that the medium listed: all uses in this process are later
    last_refused: Key | None = None  # the last key asked for while its circuit was not closed
    evicting: dict[Key, None] = field(default_factory=dict)  # victims, the first selected first; hits until they leave
    former: deque[dict[Key, None]] = field(default_factory=deque)  # `evicting` of before resets, for `return_victims`
    send_credits: int = UNLIMITED  # how many more messages its mover takes now
    rows_storing: int = 0
    rows_loading: int = 0
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        self.policy = make_policy(self.spec.policy, 0)
        self.slots = Slots(0) if self.spec.physical_slots else SlotCount(0)
        self.cold = ColdRows(self.slots, self.counters)
        self.denylist = Denylist(self.limits.retry_s, self.limits.retry_max_s)
        # One for each direction: a disk on which writes fail, or a read-only bucket, can still be read.
        self.breakers = {direction: Breaker(self.limits.breaker) for direction in Direction}
        self._loads = self.breakers[Direction.LOAD]
        self._evicted = tag_of(self.number, Gone.EVICTED)
        self.loads = TransferEstimate()
        self.throughput = {direction: ThroughputEstimate(self.limits.assumed_bytes_per_s) for direction in Direction}

    @property
    def readable(self) -> bool:
        """Whether loads may be planned."""
        return self.state is not TierState.DOWN and self._loads.closed

    @property
    def writable(self) -> bool:
        """Whether stores may be planned."""
        return self.state is TierState.UP and self.breakers[Direction.STORE].closed

    @property
    def refuses_stores(self) -> bool:
        """Whether what is queued to be written is dropped."""
        return self.state is TierState.DOWN or not self.breakers[Direction.STORE].closed

    @property
    def circuit(self) -> BreakerState:
        """The worse of both breakers. A tier that is down is an open circuit, whatever opened it."""
        if self.state is TierState.DOWN:
            return BreakerState.OPEN
        if self.spec.write is Write.OFF:  # what a kill has opened for stores, no store ever closes
            return self._loads.state
        return max(breaker.state for breaker in self.breakers.values())

    @property
    def rows_to_write(self) -> int:
        """Rows queued for or being written to this tier."""
        return len(self.to_store) + len(self.waiting_for_seal) + self.rows_storing

    def __contains__(self, key: Key) -> bool:
        return key in self.index or (bool(self.cold.tables) and key in self.cold)

    def has_many(self, keys: Sequence[Key]) -> list[bool]:
        """`in`, of each key."""
        found = list(map(self.index.__contains__, keys))
        return list(map(or_, found, self.cold.has_many(keys))) if self.cold.tables else found

    def can_load(self, key: Key, now: float) -> bool:
        """Whether the key's row can be loaded now. Called for each key of each prompt."""
        if self.state is _DOWN or self._loads.state is not _CLOSED:  # as `readable`
            return False
        entry = self.index.get(key)
        stored = entry.stored if entry is not None else self.cold.has(key)
        return stored and not (self.denylist.keys and self.denylist.is_denied(key, now))

    def can_load_many(self, keys: Sequence[Key], now: float) -> list[bool]:
        """`can_load` of each key."""
        if self.state is _DOWN or self._loads.state is not _CLOSED:  # as `readable`
            return [False] * len(keys)
        entries = list(map(self.index.get, keys))
        absent = entries.count(None)
        if absent == len(keys):
            found = self.cold.has_many(keys)
        else:
            found = [entry is not None and entry.stored for entry in entries]
            if absent and self.cold.tables:
                places = [place for place, entry in enumerate(entries) if entry is None]
                for place, cold in zip(places, self.cold.has_many([keys[place] for place in places]), strict=True):
                    found[place] = cold
        if self.denylist.keys:
            return [each and not self.denylist.is_denied(key, now) for key, each in zip(keys, found, strict=True)]
        return found

    def queue_load(self, request: Request, key: Key) -> None:
        """Queue a row to be promoted for a request."""
        self.to_load.append((request, key))
        self.queued += 1

    def queue_loads(self, request: Request, keys: Sequence[Key]) -> None:
        """The same of many rows."""
        self.to_load.extend(zip(repeat(request), keys))
        self.queued += len(keys)

    def rows_before(self, queued: int) -> int:
        """How many rows are queued or being loaded of those before the place `queued` of its queue of all times."""
        return max(0, queued - (self.queued - len(self.to_load) - self.rows_loading))

    def open_for_load(self, key: Key, now: float) -> Entry | None:
        """The entry of a row that is about to be loaded; None if it cannot be loaded now."""
        if not self.can_load(key, now):
            return None
        return self._entry(key)

    def open_for_trial(self, key: Key) -> Entry | None:
        """The entry of a stored row that is about to be tried, even if it is a suspect or the circuit is open."""
        entry = self._entry(key)
        return entry if entry is not None and entry.stored else None

    def make_room(self, count: int) -> list[Key]:
        """Evict the least valuable rows until `count` slots are free, or all that are left are pinned. Returns the
        victims' keys; none of a tier that is only read."""
        missing = count - self.slots.free
        if missing <= 0 or self.spec.write is Write.OFF:
            return []
        self.return_victims(missing)
        # Victims that were selected before go first; they are lost if they were not written below yet.
        victims = list(islice((key for key in self.evicting if not self.is_pinned(key)), missing))
        victims += self._take_next_victims(missing - len(victims))
        for key in victims:
            self._evict(key)
        return victims

    def reserve(self, key: Key, tick: int) -> Entry | None:
        """A slot for a row about to be written, or None if there is none; call make_room first."""
        slot = self.slots.allocate()
        if slot is None:
            return None
        entry = self.index[key] = Entry(slot, stored=False)
        self.policy.add(key, tick)
        return entry

    def add_listed(self, slot: int, key: Key, tick: int) -> None:
        """A row that the medium lists: it held it at the start, or another engine has stored it; a negative slot: one
        that was removed. One that is known in another slot, or finds no slot, is deleted there."""
        entry = self._entry(key)
        if slot < 0:
            if entry is not None and not self.is_pinned(key):
                self.invalidate(key, entry)
                self.gone.note(key, tag_of(self.number, Gone.EXPIRED))
                self.counters.removed += 1
            return
        if entry is not None:
            if entry.slot != slot and self.spec.physical_slots:
                self.queue_delete(slot, key)
            return
        if not self.slots.claim(slot):
            self.queue_delete(slot, key)
            return
        self.index[key] = Entry(slot, stored=True)
        self.policy.add(key, tick)
        self.counters.found += 1

    def set_limit(self, limit: int) -> None:
        """Allocate no slot from `limit` on any more; rows in them stay until they are listed as removed."""
        self.slots.limit = limit
        self.policy.resize(limit)

    def touch(self, key: Key, tick: int) -> None:
        """A row of this tier was used, here or in a tier above."""
        entry = self._entry(key)
        if entry is None:
            return
        if entry.evicting:
            self.cancel_eviction(key, tick)
        else:
            self.policy.touch(key, tick)
        if self.spec.physical_slots:
            self.recent_uses.add(key, tick)

    def take_recent_uses(self, count: int) -> list[tuple[int, int]]:
        """(slot, tick) of up to `count` rows used since this was last called, for the medium's journal."""
        if self.state is not TierState.UP:
            return []  # its slots may not be those of the index
        return [(slot, max(tick, self.newest_listed)) for slot, tick in self.recent_uses.take(count, self.index)]

    def select_victims(self, count: int) -> list[Key]:
        """Start the eviction of the `count` least valuable rows: still hits, until `evict` is called for them."""
        keys = self._take_next_victims(count)
        for key in keys:
            self.index[key].evicting = True
        self.evicting.update(dict.fromkeys(keys))
        return keys

    def cancel_eviction(self, key: Key, tick: int) -> None:
        """A victim was used again, or cannot be written below: the policy gets it back."""
        entry = self.index.get(key)
        if entry is not None and entry.evicting:
            self.evicting.pop(key, None)  # it may be one of `former`
            entry.evicting = False
            self.policy.add(key, tick)

    def evict(self, key: Key) -> None:
        """Evict this row now, unless it is pinned."""
        entry = self.index.get(key)
        if entry is not None and not self.is_pinned(key):
            self._leave_order(key, entry)
            self._evict(key)

    def finish_eviction(self, key: Key, tick: int) -> None:
        """Evict a victim now, unless its eviction was cancelled. One that is pinned stays: it is selected again."""
        if key not in self.evicting:
            return
        if self.is_pinned(key):
            self.cancel_eviction(key, tick)
        else:
            self._evict(key)

    def invalidate(self, key: Key, entry: Entry) -> bool:
        """This row cannot be used. Does nothing, and returns False, if the key has another entry by now."""
        if self.index.get(key) is not entry:
            return False
        self._leave_order(key, entry)
        self._remove(key)
        return True

    def start_load(self, row: Row) -> PlannedMove:
        """Pin a row's entry and its host row for a load."""
        entry = self.index[row.key]
        move = PlannedMove(row, entry, row.key)
        entry.readers += 1
        row.mover_refs = 1
        self.rows_loading += 1
        self.ending_moves.append(move)
        return move

    def end_load(self, move: PlannedMove) -> None:
        """Unpin both: the mover is done with them. The move is the last of `ending_moves`."""
        self.ending_moves.pop()
        move.entry.readers -= 1
        move.row.mover_refs -= 1
        self.rows_loading -= 1
        self.loaded += 1

    def drop_queues(self) -> None:
        """Drop all that is queued for this tier. So nobody writes its victims: `return_victims` to the policy. O(1)."""
        self.garbage.add(self.to_load, self.to_store, self.waiting_for_seal, self.to_demote, self.staged)
        self.to_load, self.to_store, self.waiting_for_seal = deque(), OrderedDict(), {}
        self.to_demote, self.staged = deque(), {}
        if self.evicting:
            self.former.append(self.evicting)
            self.evicting = {}

    def return_victims(self, most: int) -> None:
        """Give up to `most` victims from before a reset back to the policy, which selects them again before others."""
        while self.former and most > 0:
            most -= 1
            keys = self.former[0]
            key = keys.popitem()[0]
            if not keys:
                self.former.popleft()
            if key not in self.evicting:  # else it was selected again
                self.cancel_eviction(key, 0)

    def clear(self) -> None:
        """A new epoch: no row of before it is found. Jobs under way end as usual, for entries that are not indexed."""
        self.counters.reset += self.counters.rows
        self.garbage.add(self.index, self.policy)
        if self.spill is not None:
            self.spill.cancelled = True
            self.spill = None
        self.index = {}
        self.policy = make_policy(self.spec.policy, 0)
        self.slots.clear()
        self.cold.clear()
        self.garbage.add(self.evicting, self.former)
        self.evicting, self.former = {}, deque()
        self.drop_queues()
        self.clear_deletes()
        self.garbage.add(self.recent_uses)
        self.recent_uses = RecentUses()
        self.newest_listed = 0
        self.trials.clear()
        self.denylist.reset()
        for dead in self.dead:
            dead.to_suspect = deque()  # rows of before
        self.last_refused = None
        self.state = TierState.DOWN

    def queue_delete(self, slot: int, key: Key) -> None:
        """Have the medium delete a row, unless this engine only reads it: its tier forgets by itself what it cannot
        load."""
        if self.spec.write is not Write.OFF:
            self.to_delete.append((slot, key))

    def clear_deletes(self) -> None:
        """The medium lists its rows when it is opened again, including those that were to be deleted."""
        self.garbage.add(self.to_delete)
        self.to_delete = []

    @property
    def needs_spill(self) -> bool:
        """Whether `index` has become too large without the victims that wait for the tier below, which only LRU has a
        remedy for; or there are too many tables, or nearly empty ones."""
        most = self.limits.hot_rows - self.limits.hot_rows // 4
        wanted = (len(self.policy) > most and isinstance(self.policy, LeafFirstLru)) or self.cold.needs_merge
        return wanted and self.state is TierState.UP and self.spill is None

    def _entry(self, key: Key) -> Entry | None:
        """The entry of a row that is used or judged by itself: it is in `index`, and the policy has it, from now on."""
        entry = self.index.get(key)
        if entry is None:
            return self._take_from_cold(key)
        if entry.spilled_at >= 0 and self.spill is not None:
            self.policy.add(key, self.spill.keep(key, entry))
        return entry

    def _leave_order(self, key: Key, entry: Entry) -> None:
        """A row of `index` goes for another reason than eviction."""
        if entry.spilled_at >= 0 and self.spill is not None:
            self.spill.keep(key, entry)
        elif not entry.evicting:
            self.policy.remove(key)

    @property
    def store_credits(self) -> int:
        """How many store jobs may be planned now. Deletes are sent before stores, or they would delete rows that have
        just been written; and each store may evict, and so delete, as many rows as it writes."""
        size = self.limits.deletes_per_batch
        return (self.send_credits + len(self.to_delete) // -size - 1) // 2 - 1

    def delete_batches(self, most: int) -> list[list[tuple[int, Key]]]:
        """(slot, key) to delete, in batches of at most `most`, as many as there are credits for; the rest waits."""
        starts = range(0, len(self.to_delete), most)[: max(0, self.send_credits)]
        batches = [self.to_delete[start : start + most] for start in starts]
        del self.to_delete[: most * len(batches)]
        self.send_credits -= len(batches)
        return batches

    def _take_from_cold(self, key: Key) -> Entry | None:
        """Move a cold row into `index`, because it is used or judged by itself; returns its entry."""
        found = self.cold.remove(key) if self.cold.tables else None
        if found is None:
            return None
        slot, tick = found
        if self.moved_from_cold is not None:
            self.moved_from_cold.append(key)
        entry = self.index[key] = Entry(slot, stored=True)
        self.policy.add(key, tick)
        return entry

    def _evict(self, key: Key) -> None:
        self._remove(key)
        self.gone.note(key, self._evicted)
        self.counters.evictions += 1

    def _remove(self, key: Key) -> None:
        entry = self.index.pop(key)
        self.evicting.pop(key, None)
        self.slots.release(entry.slot)
        self.queue_delete(entry.slot, key)

    def is_pinned(self, key: Key) -> bool:
        """Whether a row of `index` is being loaded or stored."""
        entry = self.index[key]
        return bool(entry.readers) or not entry.stored

    # --- order of eviction: cold tables, a spill and the policy ---------------------------------------------------

    def _take_next_victims(self, count: int) -> list[Key]:
        """Take up to `count` rows, the least valuable first, out of the order of eviction; they are in `index` then."""
        keys: list[Key] = []
        before = self._next_victims_tick()
        while (missing := count - len(keys)) > 0:
            cold = self.cold.coldest(missing, before)
            keys += self._out_of_tables(cold)
            hot = [] if cold else self._take_hot(1 if self.cold.tables else missing)
            keys += hot
            if not (cold or hot or before is not None):
                break
            before = self._next_victims_tick() if cold or hot else None  # None: all others are pinned
        return keys

    def take_cold(self, count: int) -> list[Key]:
        """Take up to `count` rows out of cold tables, the coldest first; they are in `index` then."""
        return self._out_of_tables(self.cold.coldest(count))

    def _out_of_tables(self, rows: list[tuple[Key, int]]) -> list[Key]:
        """Rows (key, slot) that have left their tables are in `index` from now on; returns those that count."""
        keys: list[Key] = []
        for key, slot in rows:
            entry = self.index.get(key)
            if entry is None:
                self.index[key] = Entry(slot, stored=True)
                keys.append(key)
            elif entry.spilled_at >= 0 and self.spill is not None:
                self.spill.keep(key, entry)
                keys.append(key)
            else:  # it was listed twice: the row in `index` is the newer one
                self.counters.relisted += 1
                self.slots.release(slot)
                if self.spec.physical_slots:
                    self.queue_delete(slot, key)
        return keys

    def _next_victims_tick(self) -> int | None:
        """When the next victim of those in `index` was last used."""
        hot = self.policy.coldest_tick(self.is_pinned)
        leaving = None if self.spill is None else self.spill.coldest()
        return hot if leaving is None else leaving[1] if hot is None else min(hot, leaving[1])

    def _take_hot(self, count: int) -> list[Key]:
        """Up to `count` rows of those that are in no table, the least valuable first."""
        keys: list[Key] = []
        while self.spill is not None and len(keys) < count and (leaving := self.spill.coldest()) is not None:
            hot = self.policy.coldest_tick(self.is_pinned)
            taken = self.policy.evict(1, self.is_pinned) if hot is not None and hot < leaving[1] else []
            if not taken:
                taken = [leaving[0]]
                self.spill.keep(leaving[0], self.index[leaving[0]])
            keys += taken
        return keys + self.policy.evict(count - len(keys), self.is_pinned)
