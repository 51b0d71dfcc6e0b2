"""The host tier's index: which row of the region holds which chunk, and which of them go for others."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

from nixl_tiers.base.chunk import Key
from nixl_tiers.core.deferred_free import DeferredFree
from nixl_tiers.core.rows import (
    CPU,
    FILLING,
    LOADING,
    NO_ID,
    READY,
    Found,
    Generation,
    Row,
    RowState,
    TierRows,
    room_for_victims,
)
from nixl_tiers.core.slots import Slots
from nixl_tiers.core.stats import HOST, Counters, EvictionHistory, Gone, tag_of

_EVICTED: Final = tag_of(HOST, Gone.EVICTED)
MAX_JUDGED: Final = 256  # rows from before a reset that are judged beyond what is needed


class HostTier:
    """Rows by key. A row is allocated again only when no job of a worker or mover reads or writes it. The table of its
    generation (`Generation.table`) has the order in which they go, and their pins.

    A reset ends all rows at once; `reclaim_old` frees them in slices, and those that workers still use at `flushed`.
    """

    def __init__(self, rows: int, gone: EvictionHistory | None = None, quotas: Sequence[float] = ()) -> None:
        """`quotas`: which share of the rows each tenant may have, from number 1 on."""
        self.rows = rows
        self._shares = quotas
        self.fit(rows)
        self.generation = Generation()
        self.index: dict[Key, Row] = {}
        self.counters = Counters()
        self._gone = gone or EvictionHistory()
        self.changed: Callable[[Key], None] | None = None  # the key of each row that came up or goes, but for resets
        self.retained_of = array("q", [0] * (1 + len(quotas)))
        """How many rows `retain` keeps from eviction, by tenant; 0: those of none."""
        self.step = 0
        self.grows = False
        """Whether more rows are about to be usable: their memory is being allocated."""
        self._slots = Slots(rows)
        self._inserted = 0
        self._hits: list[Sequence[Row]] = []  # of this step, not pinned yet: none has gone since
        self._pinned_hits: list[Row] = []  # of this step, until it ends
        self._old: deque[dict[int, Row] | dict[Key, Row]] = deque()  # of generations that have ended, not yet judged
        self._unflushed: OrderedDict[int, Row] = OrderedDict()  # by index: judged, and workers may still use them
        self._flushed = 0  # of so many generations, from the first, workers have ended every job

    def fit(self, rows: int) -> None:
        """So many rows there are, or will be: the quotas are shares of them."""
        self.quotas = tuple(rows_of_share(share, rows) for share in self._shares)

    @property
    def used(self) -> int:
        """Rows that are not free: found by a key, or still used by a job."""
        return len(self._slots)

    @property
    def free(self) -> int:
        return self._slots.free

    @property
    def limit(self) -> int:
        """How many of the rows may be used: those whose memory is there (memory/backing.py)."""
        return self._slots.limit

    @limit.setter
    def limit(self, rows: int) -> None:
        self._slots.limit = rows

    @property
    def retained(self) -> int:
        """How many rows `retain` keeps from eviction."""
        return sum(self.retained_of)

    @property
    def evicting(self) -> int:
        """How many rows are being evicted: written below first."""
        return self.generation.table.evicting()

    # --- what keeps a row ----------------------------------------------------------------------------------------

    def pin(self, rows: Iterable[Row]) -> None:
        """Keep these rows, which a look-up finds, from eviction until `unpin`. Pins count."""
        self.generation.table.pin_many([row.key for row in rows])

    def unpin(self, rows: Iterable[Row]) -> None:
        self.generation.unpin(rows)

    def hit(self, rows: Sequence[Row]) -> None:
        """Hits of this step must still be there when the same step prepares their load. Nobody may change `rows`."""
        if rows:
            self._hits.append(rows)

    def end_step(self) -> None:
        """What was a hit in this step may go, unless something else keeps it."""
        self.step += 1
        self._hits.clear()
        if self._pinned_hits:
            self.unpin(self._pinned_hits)
            self._pinned_hits.clear()

    def retain(self, row: Row, until: int) -> None:
        """Keep a row that a look-up finds from eviction until `release`."""
        if not row.retained_until:
            self.cancel_eviction(row, 0)
            self.pin((row,))
            self.retained_of[row.tenant] += 1
        row.retained_until = until

    def release(self, row: Row) -> None:
        """A retained row may be evicted again, as one that was used last when it was."""
        row.retained_until = 0
        self.retained_of[row.tenant] -= 1
        self.unpin((row,))

    # --- eviction ------------------------------------------------------------------------------------------------

    def make_room(self, count: int) -> list[Row]:
        """Evict until `count` rows are free, or all that are left are pinned; returns the victims."""
        if count > self._slots.free and self._old:
            self.reclaim_old(count + MAX_JUDGED)
        missing = count - self._slots.free
        return self._evicted(self._order().evict(missing)) if missing > 0 else []

    def make_quota_room(self, tenant: int, count: int) -> tuple[int, list[Row]]:
        """How many of `count` rows this tenant's quota has room for, once those of its own that were used least
        recently, and are not pinned, have been evicted; and these."""
        if not tenant:
            return count, []
        table, quota = self._order(), self.quotas[tenant - 1]
        over = table.count_of(tenant) + count - quota
        victims = self._evicted(table.evict_of(tenant, over)) if over > 0 else []
        return max(0, min(count, quota - table.count_of(tenant))), victims

    def rows_of(self, tenant: int) -> int:
        """How many rows of this tenant a look-up finds, or is about to."""
        return self.generation.table.count_of(tenant)

    def select_victims(self, count: int) -> list[Row]:
        """Start the eviction of the `count` least valuable rows, or of fewer, as only so many are being evicted at a
        time: still hits, until `finish_eviction` is called."""
        table = self._order()
        return [self.index[key] for key in table.select(room_for_victims(table, count))]

    def is_evicting(self, row: Row) -> bool:
        return not row.invalidated and self.generation.table.is_evicting(row.key)

    def finish_eviction(self, row: Row) -> None:
        """Evict a victim now, unless its eviction was cancelled. One that is pinned stays: it is selected again."""
        if self.is_evicting(row) and not self.evict(row):
            self.cancel_eviction(row, 0)

    def evict(self, row: Row) -> bool:
        """Evict a row that a look-up finds now, unless it is pinned."""
        found = self._order().get(row.key)
        if found is None or Found(*found).pins or not Found(*found).stored:
            return False
        self._evicted([(row.key, self.generation.table.remove(row.key, NO_ID))])
        return True

    def cancel_eviction(self, row: Row, tick: int) -> None:
        """A victim cannot be written below, or is used again: it stays, as a row that was used at this tick, if that is
        later than its last use."""
        if not row.invalidated and self.generation.table.cancel(row.key, tick):
            row.tick = max(row.tick, tick)

    # --- rows ----------------------------------------------------------------------------------------------------

    def insert(self, key: Key, state: RowState, tick: int, tenant: int = 0) -> Row:
        """A free row for `key`; call make_room first, and make_quota_room."""
        index = self._slots.allocate()
        assert index is not None, "insert without room"
        added = self.generation.table.add(key, index, tick, state is READY, tenant)
        assert added != NO_ID, "a key is inserted twice"
        self._inserted += 1
        row = self.index[key] = Row(key, index, self._inserted, state, self.generation)
        row.tick, row.tenant = tick, tenant
        return row

    def ready(self, rows: Sequence[Row]) -> None:
        """Rows that a look-up finds are complete: hits, and they may be evicted once nothing pins them."""
        for row in rows:
            row.state = READY
        self.generation.table.stored_many([row.key for row in rows])

    def in_slices(self, count: int) -> Iterator[list[Row]]:
        """All rows that a look-up finds, those of a prefix in its order, `count` at a time. If rows come or go between
        two slices, the next one is the last, and has all of them."""
        rows, unchanged = iter(self.index.values()), (self._inserted, len(self.index))
        while part := list(islice(rows, count)):
            yield part
            if (self._inserted, len(self.index)) != unchanged:
                yield list(self.index.values())
                return

    def allocate_scratch(self, key: Key) -> Row:
        """A row that no look-up finds; `reclaim` frees it. Call make_room first."""
        index = self._slots.allocate()
        assert index is not None, "allocate_scratch without room"
        return Row(key, index, order=0, state=LOADING, generation=self.generation, removed=True)

    def touch(self, rows: Iterable[Row], tick: int) -> None:
        """These rows, which a look-up finds, were used, in prefix order. Those that are being evicted stay."""
        rows = list(rows)
        for row in rows:
            row.tick = max(row.tick, tick)  # not older by a request that began before the last one that used it
        self.generation.table.touch_many([row.key for row in rows], tick)

    def invalidate(self, row: Row) -> None:
        """No look-up finds this row from now on; it is free once no job uses it."""
        if not row.invalidated:
            row.removed = True
            del self.index[row.key]
            self.generation.table.remove(row.key, NO_ID)
            if row.retained_until:
                self.retained_of[row.tenant] -= 1
            if self.changed is not None:
                self.changed(row.key)
        self.reclaim(row)

    def reclaim(self, row: Row) -> None:
        """Call when a job on `row` has ended: frees an invalidated row after its last job."""
        if row.invalidated and not row.referenced and row.index >= 0:
            self._slots.release(row.index)
            row.index = -1

    # --- resets ------------------------------------------------------------------------------------------------

    @property
    def has_old(self) -> bool:
        """Whether `reclaim_old` has rows to judge."""
        return bool(self._old)

    @property
    def has_unflushed(self) -> bool:
        """Whether workers may still use rows from before a reset."""
        return self._flushed < self.generation.number

    def reset(self, garbage: DeferredFree) -> None:
        """No row of before is found any more. O(1)."""
        self.counters.reset += self.counters.rows
        self.generation.end(garbage)
        self.generation = Generation(self.generation.number + 1)
        self._old.append(self.index)
        garbage.add(self._pinned_hits)
        garbage.add(self._hits)
        self.index, self._hits, self._pinned_hits = {}, [], []
        self.retained_of = array("q", [0] * len(self.retained_of))

    def reclaim_old(self, most: int) -> None:
        """Judge up to `most` rows from before a reset: free those that no job uses."""
        while self._old and most > 0:
            rows = self._old[0]
            while rows and most > 0:
                most -= 1
                row = rows.popitem()[1]
                if row.worker_refs and row.generation.number >= self._flushed:
                    self._unflushed[row.index] = row
                else:
                    row.worker_refs = 0
                    self.reclaim(row)
            if not rows:
                self._old.popleft()

    def flushed(self) -> None:
        """Workers have ended every job that was open at the last reset: frees their rows, the rest in slices."""
        self._flushed = self.generation.number
        if self._unflushed:
            self._old.append(self._unflushed)
            self._unflushed = OrderedDict()
        self.reclaim_old(MAX_JUDGED)

    def unflushed_stores(self, most: int) -> list[Row]:
        """Rows from before a reset that workers filled and may still write to. Looks at `most` rows, at others each
        time."""
        self.reclaim_old(most)
        rows = list(islice(self._unflushed.values(), most))
        for row in rows:
            self._unflushed.move_to_end(row.index)
        return [row for row in rows if row.state is FILLING]

    def release_unflushed(self, rows: Iterable[Row]) -> None:
        """Workers have turned out to be done with these."""
        for row in rows:
            if self._unflushed.pop(row.index, None) is not None:
                row.worker_refs = 0
                self.reclaim(row)

    # --- inside ------------------------------------------------------------------------------------------------

    def _order(self) -> TierRows:
        """The table, for who takes rows from it: hits of this step are pinned first, in steps that take any."""
        if self._hits:
            hits = [row for rows in self._hits for row in rows if not row.removed]
            self._hits.clear()
            self.pin(hits)
            self._pinned_hits += hits
        return self.generation.table

    def _evicted(self, victims: Iterable[tuple[Key, int]]) -> list[Row]:
        """(key, index) of rows that the table has no more: they are free."""
        rows = [self.index.pop(key) for key, _ in victims]
        for row in rows:
            self._slots.release(row.index)
            row.removed, row.index = True, -1
            self.counters.evictions += 1
            self._gone.note(row.key, _EVICTED)
            self.counters.unused += row.source != CPU  # no load has read it since it was promoted
            if self.changed is not None:
                self.changed(row.key)
        return rows


def rows_of_share(share: float, rows: int) -> int:
    """A quota, in rows: at least one, or what a tier above has evicted could never be written."""
    return max(1, int(share * rows))
