"""Retention: what is kept in host memory for a while after the end of its request, and what is promoted again then."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from heapq import heappop, heappush
from math import ceil
from typing import Final

from nixl_tiers.base.chunk import Key
from nixl_tiers.core.deferred_free import DeferredFree
from nixl_tiers.core.prefetch_queue import PrefetchQueue
from nixl_tiers.core.state import CascadeState

LONGEST_S: Final = 3600.0  # that anything is retained, or put off


class Retention:
    """Agents say when they come back: rows that they need are kept until then (`retain`), or brought up again
    (`plan`). Both are bounded over all requests, so that the rest of the host serves everybody else."""

    def __init__(self, state: CascadeState, prefetch_queue: PrefetchQueue) -> None:
        self._state = state
        self._host = state.host
        self._prefetch_queue = prefetch_queue
        self._most_of = [int(quota * state.limits.retain_share) for quota in state.host.quotas]
        # Retained keys by the second at which that ends, those of a prefix in its order; and a heap of these seconds.
        self._until: dict[int, OrderedDict[Key, None]] = {}
        self._seconds: list[int] = []
        self._ending = (0, 0)  # such a second, and the tick of use that its keys have in the tiers below
        self._planned: list[tuple[float, int, Sequence[Key], int]] = []  # a heap of prefetches, by time; their tenants
        self._plans = 0
        self._planned_keys = 0
        self.waiting = False
        """Whether time brings work."""

    @property
    def _most(self) -> int:
        """How many rows may be kept, of those that may be used now."""
        return int(self._host.limit * self._state.limits.retain_share)

    def retain(self, keys: Sequence[Key], until_s: float) -> bool:
        """Evict those of `keys`, in prefix order, that the host has not before `until_s`; of one that is retained for
        longer already that stays. False if the share of the host, or of the tenant's quota, is full: then the front of
        them is retained. O(1) a key."""
        second = ceil(until_s)
        for key in keys:
            row = self._host.index.get(key)
            if row is None or row.retained_until >= second:
                continue
            if not row.retained_until and self._is_full(row.tenant):
                return False
            if row.retained_until:
                del self._until[row.retained_until][key]
            self._host.retain(row, second)
            if second not in self._until:
                self._until[second] = OrderedDict()
                heappush(self._seconds, second)
            self._until[second][key] = None
            self.waiting = True
        return True

    def plan(self, keys: Sequence[Key], at_s: float, tenant: int) -> bool:
        """Promote `keys` at about `at_s` (TierManager.prefetch)."""
        if self._planned_keys + len(keys) > self._host.rows:
            return False
        self._plans += 1
        self._planned_keys += len(keys)
        heappush(self._planned, (at_s, self._plans, keys, tenant))
        self.waiting = True
        return True

    def work(self, now: float) -> None:
        """End what is over by `now`, and begin what is due, as much as the slice has room for."""
        while self._seconds and (second := self._seconds[0]) <= now and not self._state.slice_used_up:
            if second != self._ending[0]:
                self._ending = second, self._state.tick
                self._state.tick += 1
            ended = []
            keys = self._until[second]
            while keys and self._state.take():
                key, _ = keys.popitem(last=False)
                ended.append(key)
                row = self._host.index.get(key)
                if row is not None and row.retained_until == second:
                    self._host.release(row)
            for tier in self._state.tiers:
                tier.index.touch(ended, self._ending[1])
            if not keys:
                del self._until[heappop(self._seconds)]
        while self._planned and self._planned[0][0] <= now and self._state.take():
            _, _, planned, tenant = heappop(self._planned)
            self._planned_keys -= len(planned)
            self._prefetch_queue.prefetch(planned, tenant)
        self.waiting = bool(self._until or self._planned)

    def reset(self, garbage: DeferredFree) -> None:
        """Other bytes belong to all keys from now on."""
        garbage.add(self._until, self._planned)
        self._until, self._seconds, self._planned = {}, [], []
        self._planned_keys = 0
        self.waiting = False

    def _is_full(self, tenant: int) -> bool:
        of_tenant = tenant and self._host.retained_of[tenant] >= self._most_of[tenant - 1]
        return bool(of_tenant or self._host.retained >= self._most)
