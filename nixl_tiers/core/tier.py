"""A storage tier as the core sees it: its state, its circuits, what is queued for it, and what is under way."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Final

from nixl_tiers.base.chunk import Key
from nixl_tiers.base.policies import Write
from nixl_tiers.core.breaker import Breaker, BreakerState, Denylist
from nixl_tiers.core.deferred_free import DeferredFree
from nixl_tiers.core.host import Row
from nixl_tiers.core.limits import Limits
from nixl_tiers.core.pricing import ThroughputEstimate, TransferEstimate
from nixl_tiers.core.requests import Request
from nixl_tiers.core.stats import Counters, EvictionHistory
from nixl_tiers.core.tier_index import TierIndex
from nixl_tiers.core.types import Burst, Direction, Job, OrphanedJobs, PlannedMove, TierSpec, TierState

UNLIMITED: Final = 1 << 62
# Members of an enum are found by a slow attribute look-up before Python 3.12.
_DOWN: Final = TierState.DOWN
_CLOSED: Final = BreakerState.CLOSED


@dataclass
class Tier:
    """One storage tier. `index` has its rows."""

    spec: TierSpec
    number: int  # its place in the cascade, from 0
    limits: Limits = field(default_factory=Limits)
    garbage: DeferredFree = field(default_factory=DeferredFree)
    gone: EvictionHistory = field(default_factory=EvictionHistory)
    state: TierState = TierState.DOWN
    jobs: dict[int, Job] = field(default_factory=dict)
    ending_moves: list[PlannedMove] = field(default_factory=list)  # they pin rows and are in no job: only in a call
    dead: deque[OrphanedJobs] = field(
        default_factory=deque
    )  # of movers that were killed or have died, the oldest first
    trials_running: int = 0  # open jobs that are trials of a suspect, or probes
    quarantined: int = 0  # host rows of abandoned loads, until the mover is done with them or reaped
    # Key -> tick, first in, first out. Not pinned in host memory; what is dropped is not queued again.
    to_store: OrderedDict[Key, int] = field(default_factory=OrderedDict)
    waiting_for_seal: dict[Key, int] = field(default_factory=dict)  # the same while another tier's mover seals the row
    to_load: deque[tuple[Request, Key]] = field(default_factory=deque)
    queued: int = 0  # rows that were ever put there
    loaded: int = 0  # rows whose load has ended, however
    burst: Burst | None = None  # the last one
    to_demote: deque[Key] = field(default_factory=deque)  # victims to load, for the tier below
    staged: dict[Key, Row] = field(default_factory=dict)  # their host rows until they are written there
    trials: OrderedDict[Key, None] = field(default_factory=OrderedDict)  # suspects that were asked for
    last_refused: Key | None = None  # the last key asked for while its circuit was not closed
    looked_at: int = 0  # up to which place of its rows one was sought that may be tried
    send_credits: int = UNLIMITED  # how many more messages its mover takes now
    rows_storing: int = 0
    rows_loading: int = 0
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        self.index = TierIndex(self.spec, self.number, self.counters, self.gone, self.garbage)
        self.denylist = Denylist(self.limits.retry_s, self.limits.retry_max_s)
        # One for each direction: a disk on which writes fail, or a read-only bucket, can still be read.
        self.breakers = {direction: Breaker(self.limits.breaker) for direction in Direction}
        self._loads = self.breakers[Direction.LOAD]
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

    def can_load(self, key: Key, now: float) -> bool:
        """Whether the key's row can be loaded now. Called for each key of each prompt."""
        if self.state is _DOWN or self._loads.state is not _CLOSED:  # as `readable`
            return False
        return self.index.rows.is_stored(key) and not (self.denylist.keys and self.denylist.is_denied(key, now))

    def can_load_many(self, keys: list[Key], now: float) -> list[bool]:
        """`can_load` of each key."""
        if self.state is _DOWN or self._loads.state is not _CLOSED:  # as `readable`
            return [False] * len(keys)
        found = self.index.rows.has_many(keys, True)
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

    def start_load(self, row: Row) -> PlannedMove:
        """Pin a row's own row here and its host row for a load."""
        pinned = self.index.rows.pin(row.key)
        assert pinned is not None, "load of a key that the tier does not hold"
        move = PlannedMove(row, *pinned, row.key)
        row.mover_refs = 1
        self.rows_loading += 1
        self.ending_moves.append(move)
        return move

    def end_load(self, move: PlannedMove) -> None:
        """Unpin both: the mover is done with them. The move is the last of `ending_moves`."""
        self.ending_moves.pop()
        self.index.rows.unpin(move.key, move.id)
        move.row.mover_refs -= 1
        self.rows_loading -= 1
        self.loaded += 1

    def drop_queues(self) -> None:
        """Drop all that is queued for this tier, so that nobody writes its victims below. O(1)."""
        self.garbage.add(self.to_load, self.to_store, self.waiting_for_seal, self.to_demote, self.staged)
        self.to_load, self.to_store, self.waiting_for_seal = deque(), OrderedDict(), {}
        self.to_demote, self.staged = deque(), {}
        self.index.drop_victims()

    def clear(self) -> None:
        """A new epoch: no row of before it is found. Jobs under way end as usual, for rows that are not here."""
        self.counters.reset += self.counters.rows
        self.drop_queues()
        self.index.clear()
        self.trials.clear()
        self.denylist.reset()
        for dead in self.dead:
            dead.to_suspect = deque()  # rows of before
        self.last_refused = None
        self.state = TierState.DOWN

    @property
    def store_credits(self) -> int:
        """How many store jobs may be planned now. Deletes are sent before stores, or they would delete rows that have
        just been written; and each store may evict, and so delete, as many rows as it writes."""
        if len(self.index.to_delete) > self.limits.deletes_per_turn:
            return 0
        size = self.limits.deletes_per_batch
        return (self.send_credits + len(self.index.to_delete) // -size - 1) // 2 - 1

    def delete_batches(self, most: int) -> list[list[tuple[int, Key]]]:
        """(slot, key) to delete, in batches of at most `most`, as many as there are credits for and a turn has room
        for; the rest waits."""
        batches: list[list[tuple[int, Key]]] = []
        waiting, turn = len(self.index.to_delete), self.limits.deletes_per_turn
        # Where stores were planned, there was room for them all, and what these have evicted is sent before them.
        left = waiting - turn if waiting > 2 * turn else 0
        while self.send_credits > 0 and len(self.index.to_delete) > left:
            batches.append(self.index.take_deletes(most))
            self.send_credits -= 1
        return batches
