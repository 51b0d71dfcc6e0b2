"""The host tier's index: which row of the region holds which chunk, and which of them go for others."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

from nixl_tiers.base.chunk import Key
from nixl_tiers.core.deferred_free import DeferredFree
from nixl_tiers.core.eviction import EvictionPolicy
from nixl_tiers.core.eviction.lru import LeafFirstLru
from nixl_tiers.core.rows import CPU, Generation, Row, RowState
from nixl_tiers.core.slots import Slots
from nixl_tiers.core.stats import HOST, Counters, EvictionHistory, Gone, tag_of

_EVICTED: Final = tag_of(HOST, Gone.EVICTED)
MAX_LOOKS: Final = 256  # pinned rows that one search for victims passes over
MAX_JUDGED: Final = 256  # rows from before a reset that are judged beyond what is needed


class HostTier:
    """Rows by key. A row is allocated again only when no job of a worker or mover reads or writes it.

    A reset ends all rows at once; `reclaim_old` frees them in slices, and those that workers still use at `flushed`.
    """

    def __init__(
        self,
        rows: int,
        policy: Callable[[], EvictionPolicy],
        gone: EvictionHistory | None = None,
        quotas: Sequence[float] = (),
    ) -> None:
        """`quotas`: which share of the rows each tenant may have, from number 1 on."""
        self.rows = rows
        self._shares = quotas
        self.fit(rows)
        self._own = [LeafFirstLru() for _ in quotas]  # the rows of each tenant, by their last use
        self.generation = Generation()
        self.index: dict[Key, Row] = {}
        self.counters = Counters()
        self._gone = gone or EvictionHistory()
        self.changed: Callable[[Key], None] | None = None  # the key of each row that came up or goes, but for resets
        self.evicting: dict[Key, Row] = {}
        self.retained_of = array("q", [0] * (1 + len(quotas)))
        """How many rows `retain` keeps from eviction, by tenant; 0: those of none."""
        self.step = 0
        self.grows = False
        """Whether more rows are about to be usable: their memory is being allocated."""
        self._make_policy = policy
        self._policy = policy()
        self._slots = Slots(rows)
        self._inserted = 0
        self._old: deque[dict[int, Row] | dict[Key, Row]] = deque()  # of generations that have ended, not yet judged
        self._unflushed: OrderedDict[int, Row] = OrderedDict()  # by index: judged, and workers may still use them
        self._flushed = 0  # of so many generations, from the first, workers have ended every job
        self._unseen = 0  # rows that a search for victims has not looked at
        self.no_victims = False  # a search through all rows has just ended without any: do not begin the next at once
        self._gave_up = False  # whether the last one looked at some of the rows only

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

    def make_room(self, count: int) -> list[Row]:
        """Evict until `count` rows are free, or all that are left are pinned, or `searching`; returns the victims."""
        if count > self._slots.free and self._old:
            self.reclaim_old(count + MAX_JUDGED)
        missing = count - self._slots.free
        victims: list[Row] = []
        if missing > 0:
            victims = self._unpinned_evicting(missing)
            victims += self._take_victims(missing - len(victims))
            for row in victims:
                self._remove(row)
            if len(victims) == missing or not (self._gave_up or len(self.evicting) > MAX_LOOKS):
                self._unseen = 0
                self.no_victims = False
            elif not self._unseen and not self.no_victims:
                self._unseen = max(len(self._policy), len(self.evicting))
        return victims

    def make_quota_room(self, tenant: int, count: int) -> tuple[int, list[Row]]:
        """How many of `count` rows this tenant's quota has room for, once those of its own that were used least
        recently, and are not pinned, have been evicted; and these."""
        if not tenant:
            return count, []
        own, quota = self._own[tenant - 1], self.quotas[tenant - 1]
        over = len(own) + count - quota
        victims = self._take_victims(over, own) if over > 0 else []
        for row in victims:
            if not row.evicting:
                self._policy.remove(row.key)
            self._remove(row)
        return max(0, min(count, quota - len(own))), victims

    def rows_of(self, tenant: int) -> int:
        """How many rows of this tenant a look-up finds, or is about to."""
        return len(self._own[tenant - 1])

    @property
    def searching(self) -> bool:
        """Whether there may be victims among rows that the last `make_room` has not looked at; `look_on` does."""
        return self._unseen > 0

    def look_on(self) -> bool:
        """Pass over some of the pinned rows that are next to be evicted, so that an eviction need not; whether one is
        behind them that can be evicted."""
        self._unseen = max(0, self._unseen - MAX_LOOKS)
        found = self._take_victims(1)
        for row in found:
            self._policy.put_back(row.key, row.tick)
        if found or self._unpinned_evicting(1):
            self._unseen = 0
            return True
        return False

    def select_victims(self, count: int) -> list[Row]:
        """Start the eviction of the `count` least valuable rows: still hits, until `finish_eviction` is called."""
        rows = self._take_victims(count)
        for row in rows:
            row.evicting = True
            self.evicting[row.key] = row
        return rows

    def finish_eviction(self, row: Row) -> None:
        """Evict a victim now, unless its eviction was cancelled. One that is pinned stays: it is selected again."""
        if row.evicting and self._is_pinned(row.key):
            self.cancel_eviction(row, row.tick)
        elif row.evicting:
            self._remove(row)

    def evict(self, row: Row) -> None:
        """Evict a row that a look-up finds now, unless it is pinned."""
        if not self._is_pinned(row.key):
            if not row.evicting:
                self._policy.remove(row.key)
            self._remove(row)

    def cancel_eviction(self, row: Row, tick: int) -> None:
        """A victim cannot be written below, or is used again: it stays, as a row that was used at this tick."""
        if row.evicting:
            row.evicting = False
            del self.evicting[row.key]
            self._policy.put_back(row.key, tick)

    def insert(self, key: Key, state: RowState, tick: int, tenant: int = 0) -> Row:
        """A free row for `key`; call make_room first, and make_quota_room."""
        index = self._slots.allocate()
        assert index is not None, "insert without room"
        self._inserted += 1
        row = self.index[key] = Row(key, index, self._inserted, state, self.generation)
        row.tick = tick
        self._policy.add(key, tick)
        if tenant:
            row.tenant = tenant
            self._own[tenant - 1].add(key, tick)
        return row

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
        return Row(key, index, order=0, state=RowState.LOADING, generation=self.generation, removed=True)

    def touch(self, rows: Iterable[Row], tick: int) -> None:
        """These rows, which a look-up finds, were used, in prefix order."""
        keys: list[Key] = []
        for row in rows:
            if row.evicting:
                self._policy.touch(keys, tick)  # before it in the order of its batch
                keys = []
                self.cancel_eviction(row, row.tick)
            row.tick = max(row.tick, tick)  # not older by a request that began before the last one that used it
            if not row.retained_until:
                keys.append(row.key)
            if row.tenant:
                self._own[row.tenant - 1].touch((row.key,), tick)
        self._policy.touch(keys, tick)

    def retain(self, row: Row, until: int) -> None:
        """Keep a row that a look-up finds from eviction until `release`. It leaves the order, so that no search for
        victims passes over it."""
        if not row.retained_until:
            self.cancel_eviction(row, row.tick)
            self._policy.remove(row.key)
            self.retained_of[row.tenant] += 1
        row.retained_until = until

    def release(self, row: Row) -> None:
        """A retained row may be evicted again: next after what was used last when it was, as that may be the rest of
        its prefix."""
        row.retained_until = 0
        self.retained_of[row.tenant] -= 1
        self._policy.add(row.key, row.tick + 1)

    def invalidate(self, row: Row) -> None:
        """No look-up finds this row from now on; it is free once no job uses it."""
        if not row.invalidated:
            row.removed = True
            del self.index[row.key]
            if row.evicting:
                del self.evicting[row.key]
            elif row.retained_until:
                self.retained_of[row.tenant] -= 1
            else:
                self._policy.remove(row.key)
            self._leave_quota(row)
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
        self.generation.ended = True
        self.generation = Generation(self.generation.number + 1)
        self._old.append(self.index)
        garbage.add(self.evicting, self._policy, self._own)
        self.index, self.evicting, self._policy = {}, {}, self._make_policy()
        self._own = [LeafFirstLru() for _ in self._own]
        self.retained_of = array("q", [0] * len(self.retained_of))
        self._unseen = 0
        self.no_victims = False

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
        return [row for row in rows if row.state is RowState.FILLING]

    def release_unflushed(self, rows: Iterable[Row]) -> None:
        """Workers have turned out to be done with these."""
        for row in rows:
            if self._unflushed.pop(row.index, None) is not None:
                row.worker_refs = 0
                self.reclaim(row)

    # --- inside ------------------------------------------------------------------------------------------------

    def _remove(self, row: Row) -> None:
        del self.index[row.key]
        self.evicting.pop(row.key, None)
        self._leave_quota(row)
        self._slots.release(row.index)
        self.counters.evictions += 1
        self._gone.note(row.key, _EVICTED)
        self.counters.unused += row.source != CPU  # no load has read it since it was promoted
        if self.changed is not None:
            self.changed(row.key)

    def _leave_quota(self, row: Row) -> None:
        if row.tenant and row.key in self._own[row.tenant - 1]:
            self._own[row.tenant - 1].remove(row.key)

    def _unpinned_evicting(self, count: int) -> list[Row]:
        """Up to `count` victims that can leave before they are written below. Passes over so many pinned ones, which
        are the last to be looked at again, and no more."""
        found: list[Row] = []
        for row in list(islice(self.evicting.values(), MAX_LOOKS + count)):
            if len(found) == count:
                break
            if self._is_pinned(row.key):
                self.evicting[row.key] = self.evicting.pop(row.key)
            else:
                found.append(row)
        return found

    def _take_victims(self, count: int, policy: EvictionPolicy | None = None) -> list[Row]:
        """Up to `count` rows that the policy evicts; looks at so many rows that are pinned, and no more."""
        policy = self._policy if policy is None else policy
        before, most = len(policy), MAX_LOOKS + count
        left = most

        def is_pinned(key: Key) -> bool:
            nonlocal left
            left -= 1
            return left >= 0 and self._is_pinned(key)  # give up: the policy takes the next ones for victims

        rows = [self.index[key] for key in policy.evict(count, is_pinned)]
        self._gave_up = left < 0 or (len(rows) < count and most - left < before)
        if left >= 0:
            return rows
        pinned = {row.key for row in rows if self._is_pinned(row.key)}
        for row in reversed(rows):
            if row.key in pinned:
                policy.put_back(row.key, row.tick)
        return [row for row in rows if row.key not in pinned]

    def _is_pinned(self, key: Key) -> bool:
        row = self.index[key]
        # A hit of this step must still be there when the same step prepares its load.
        in_use = row.referenced or row.request_pins or row.state is not RowState.READY or row.step == self.step
        return bool(in_use or row.retained_until)


def rows_of_share(share: float, rows: int) -> int:
    """A quota, in rows: at least one, or what a tier above has evicted could never be written."""
    return max(1, int(share * rows))
