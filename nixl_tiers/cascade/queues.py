"""What waits for the movers: rows to be written down, rows to be brought up, rows to be cleaned ahead of need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from nixl_tiers.cascade.existence import ExistenceChecks
from nixl_tiers.cascade.host import HostTier, Row, RowState
from nixl_tiers.cascade.limits import Limits
from nixl_tiers.cascade.requests import Request
from nixl_tiers.cascade.tier_index import TierIndex
from nixl_tiers.cascade.types import Direction, TierState, Write
from nixl_tiers.chunk import Key

CLEANED_AT_ONCE: Final = 256


class Queues:
    """Queues and windows between the host tier and the storage tiers."""

    def __init__(self, host: HostTier, storage: Sequence[TierIndex], limits: Limits, row_bytes: int) -> None:
        self.limits = limits
        self.row_bytes = row_bytes
        self.host = host
        self.tiers = list(storage)
        self.generation = 0
        self._tick = 0
        self._job_id = 0
        self.checks = ExistenceChecks(self.tiers, limits)
        self._short_since_s: float | None = None  # when promotions began to wait for a row that is written below
        self._holding: dict[str, Request] = {}  # requests that wait, or for which rows were promoted
        few = max(1, min(4, host.rows // 4))  # so that a small host tier still moves
        tiers = max(1, len(self.tiers))
        self._load_window = max(few, int(host.rows * limits.load_share) // tiers)
        self._store_window = max(few, int(host.rows * limits.store_share) // tiers)
        # Of each tier, rows that have come up, or are coming, only to be written further down: they stay in the host
        # until they are, however slow that is.
        self._demote_window = max(1, min(self._store_window, self._load_window // 2))
        self._job_rows = max(1, min(limits.moves_per_job, limits.job_bytes // row_bytes))

    def demote_all(self) -> None:
        """Queue every row of the host that a tier written on eviction does not hold yet: the engine is leaving."""
        below = self._below(None)
        if below is not None and self.tiers[below].writable:
            target = self.tiers[below]
            for key, row in self.host.index.items():
                if row.state is RowState.READY and key not in target:
                    target.to_store.setdefault(key, row.tick)

    def backlog(self) -> int:
        """Rows queued for or being written to the tier that is furthest behind."""
        return max((len(storage.to_store) + storage.rows_storing for storage in self.tiers), default=0)

    def pressure(self) -> int:
        """The backlog of the tiers that are written to now: to wait for any other is in vain."""
        return max((len(s.to_store) + s.rows_storing for s in self.tiers if s.writable), default=0)

    @property
    def busy(self) -> bool:
        """Whether deadlines run or jobs could be planned without anything else happening."""
        return (
            bool(self._holding)
            or self.checks.busy
            or any(
                storage.jobs
                or storage.to_delete
                or storage.to_delete_cold
                or (storage.readable and (storage.to_load or storage.trials or storage.to_demote))
                or (storage.writable and (storage.to_store or self._to_clean(tier) > 0))
                for tier, storage in enumerate(self.tiers)
            )
        )

    # --- inside ------------------------------------------------------------------------------------------------

    def _ask(self, key: Key, request: Request, now: float) -> bool:
        """Queue a stored key for promotion on the request's behalf; False where no tier can give it (now)."""
        if request.expired or (key in request.asked and not request.asked[key]):
            return False
        for tier, storage in enumerate(self.tiers):
            if (request.allowed is None or tier in request.allowed) and storage.can_load(key, now):
                storage.to_load.append((request, key))
                request.asked[key] = True
                return True
            if key in storage:
                if storage.denylist.trial_due(key, now):
                    storage.trials[key] = None
                elif not storage.breakers[Direction.LOAD].closed:
                    storage.last_refused = key
        request.asked.pop(key, None)
        return False

    def _cascade(self, row: Row, storages: Iterable[TierIndex]) -> None:
        for storage in storages:
            if storage.spec.write is Write.THROUGH and row.key not in storage:
                open_ = storage.state is TierState.DOWN or not storage.breakers[Direction.STORE].closed
                if open_ or len(storage.to_store) >= self.host.rows:
                    storage.counters.dropped += 1
                else:
                    storage.to_store[row.key] = row.tick

    def _below(self, tier: int | None) -> int | None:
        """The tier that is written when `tier` (None: the host) evicts, if there is one."""
        for below in range(0 if tier is None else tier + 1, len(self.tiers)):
            write = self.tiers[below].spec.write
            if write is not Write.OFF:
                return below if write is Write.ON_EVICT else None
        return None

    def _above(self, tier: int) -> int | None:
        """The tier (None: the host) whose evictions are written to `tier`."""
        return next((above for above in reversed(range(tier)) if self.tiers[above].spec.write is not Write.OFF), None)

    def _to_clean(self, tier: int) -> int:
        """How many more rows must leave the tier above `tier` so that its reserve stays free."""
        if self.tiers[tier].spec.write is not Write.ON_EVICT:
            return 0
        above = self._above(tier)
        share = self.limits.reserve_share
        if above is None:
            return max(1, int(self.host.rows * share)) - self.host.free - len(self.host.evicting)
        source = self.tiers[above]
        if source.state is not TierState.UP or not source.readable:
            return 0
        # More than all of the host cannot come down at once.
        reserve = max(1, min(int(source.slots.limit * share), self.host.rows))
        return reserve - source.slots.free - len(source.evicting)

    def _make_room(self, count: int) -> int:
        """Free host rows for `count` chunks, as far as that goes; what is evicted unwritten is counted."""
        below = self._below(None)
        gone = self.host.make_room(count)
        if below is not None:
            target = self.tiers[below]
            for key in gone:
                target.to_store.pop(key, None)
                target.counters.dropped += key not in target
        return min(count, self.host.free)

    def _lost_unwritten(self, tier: int, evicted: Iterable[Key]) -> None:
        """Count what a tier had to evict before it was written below, if that is what the tier below is for."""
        below = self._below(tier)
        if below is not None:
            target = self.tiers[below]
            target.counters.dropped += sum(key not in target and key not in target.to_store for key in evicted)

    def _clean_all(self) -> None:
        for tier, storage in enumerate(self.tiers):
            if storage.spec.write is Write.ON_EVICT and storage.writable:
                self._clean(tier, storage)

    def _clean(self, tier: int, target: TierIndex) -> None:
        """Keep a reserve free in the tier above `target`, so that nobody who needs room waits for a write."""
        missing = min(self._to_clean(tier), CLEANED_AT_ONCE)
        if missing <= 0:
            return
        above = self._above(tier)
        if above is None:
            for row in self.host.select_victims(missing):
                if row.key in target:
                    self.host.finish_eviction(row)
                else:
                    target.to_store[row.key] = row.tick
            return
        source = self.tiers[above]
        for key in source.select_victims(missing):
            if not self._written_from_here(source, target, key):
                source.to_demote.append(key)

    def _written_from_here(self, source: TierIndex, target: TierIndex, key: Key) -> bool:
        """Whether a row that leaves `source` need not come up to be written to `target`."""
        host_row = self.host.index.get(key)
        if key in target:
            source.release(key)
        elif host_row is not None and host_row.state is RowState.READY:
            target.to_store[key] = host_row.tick
        else:
            return False
        return True

    def _tick_of(self, request: Request) -> int:
        if request.tick is None:
            request.tick = self._tick
            self._tick += 1
        return request.tick
