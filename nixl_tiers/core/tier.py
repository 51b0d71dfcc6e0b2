"""A storage tier as the core sees it: its members, what is queued for it, and what is under way."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final, Literal

from nixl_tiers.base.chunk import Key
from nixl_tiers.base.policies import Write
from nixl_tiers.core.deferred_free import DeferredFree
from nixl_tiers.core.member import Member
from nixl_tiers.core.pricing import TransferEstimate
from nixl_tiers.core.requests import Request
from nixl_tiers.core.rows import Row
from nixl_tiers.core.slots import slots_each
from nixl_tiers.core.stats import Counters, EvictionHistory
from nixl_tiers.core.tier_index import TierIndex
from nixl_tiers.core.types import BreakerState, Burst, Job, Limits, PlannedMove, TierSpec, TierState

_READABLE, _WRITABLE, _REFUSES_STORES = map(attrgetter, ("readable", "writable", "refuses_stores"))
# Members of an enum are found by a slow attribute look-up before Python 3.12.
_DOWN: Final = TierState.DOWN
_CLOSED: Final = BreakerState.CLOSED


@dataclass
class Tier:
    """One storage tier. `index` has its rows, `members` are its movers."""

    spec: TierSpec
    number: int  # its place in the cascade, from 0
    limits: Limits = field(default_factory=Limits)
    garbage: DeferredFree = field(default_factory=DeferredFree)
    gone: EvictionHistory = field(default_factory=EvictionHistory)
    first_mover: int | None = None  # the number of its first member's; None: its own
    ending_moves: list[PlannedMove] = field(default_factory=list)
    """Moves that a call is starting or ending, in no job meanwhile: what an error leaves here ends with its mover."""
    # Key -> tick, first in, first out. Not pinned in host memory; what is dropped is not queued again.
    to_store: OrderedDict[Key, int] = field(default_factory=OrderedDict)
    waiting_for_seal: dict[Key, int] = field(default_factory=dict)  # the same while another tier's mover seals the row
    to_load: OrderedDict[Request, deque[Key]] = field(default_factory=OrderedDict)  # for each, first in, first out
    rows_to_load: int = 0  # in all of these
    ever_queued: int = 0  # rows that were ever put there
    loaded: int = 0  # rows whose load has ended, however
    burst: Burst | None = None  # the last one
    to_demote: dict[Key, None] = field(default_factory=dict)  # victims to load, for the tier below
    staged: dict[Key, Row] = field(default_factory=dict)  # their host rows until they are written there
    last_refused: Key | None = None  # the last key asked for while its circuit was not closed
    looked_at: int = 0  # up to which place of its rows one was sought that may be tried
    rows_storing: int = 0
    rows_loading: int = 0
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        first = self.number if self.first_mover is None else self.first_mover
        span, writes = slots_each(self.spec.members), self.spec.write is not Write.OFF
        self.members = [
            Member(
                self.number, first + place, place, (place * span, (place + 1) * span), self.limits, writes, self.garbage
            )
            for place in range(self.spec.members)
        ]
        self._only = self.members[0] if len(self.members) == 1 else None
        self.index = TierIndex(self.spec, self.number, self.counters, self.gone, self.garbage, self.members)
        self.loads = TransferEstimate()

    @property
    def state(self) -> TierState:
        """UP if any member is and none is being listed: what a member that is down holds is no hit."""
        if self._only is not None:
            return self._only.state
        states = {member.state for member in self.members}
        return next((each for each in (TierState.LISTING, TierState.UP) if each in states), TierState.DOWN)

    @property
    def jobs(self) -> list[Job]:
        """The open ones of all members."""
        return [job for member in self.members for job in member.jobs.values()]

    @property
    def readable(self) -> bool:
        """Whether loads from some member may be planned."""
        return any(map(_READABLE, self.members))

    @property
    def writable(self) -> bool:
        """Whether stores to some member may be planned."""
        return any(map(_WRITABLE, self.members))

    @property
    def refuses_stores(self) -> bool:
        """Whether what is queued to be written is dropped."""
        return all(map(_REFUSES_STORES, self.members))

    def unwritten(self, count: int) -> None:
        """So many chunks had no time to be written here, or no place in the queue."""
        if self.refuses_stores:
            self.refused("unreachable", count)
        else:
            self.counters.dropped_slow += count

    def refused(self, why: Literal["full", "unreachable"], count: int = 1) -> None:
        """So many chunks are not written here; what the medium itself says explains it better."""
        said = next((each.refusal for each in self.members if each.refusal and each.state is not _DOWN), why)
        if said == "full":
            self.counters.dropped_full += count
        elif said == "denied":
            self.counters.dropped_denied += count
        else:
            self.counters.dropped_unreachable += count

    @property
    def circuit(self) -> BreakerState:
        """The worst of its members'."""
        return max(member.circuit for member in self.members)

    @property
    def quarantined(self) -> int:
        """Host rows of abandoned loads, until their movers are done with them or reaped."""
        return sum(member.quarantined for member in self.members)

    @property
    def recovered(self) -> bool:
        """Whether some member has no jobs any more that died with its mover."""
        return not all(member.dead for member in self.members)

    @property
    def free_slots(self) -> int:
        """How many more rows fit; of several members into those that take any now."""
        if self._only is not None:
            return self.index.slots.free
        return sum(self.index.slots_of(member).free for member in self.members if member.takes_rows)

    @property
    def rows_to_write(self) -> int:
        """Rows queued for or being written to this tier."""
        return len(self.to_store) + len(self.waiting_for_seal) + self.rows_storing

    def member_of(self, key: Key) -> Member:
        """The member that has the key's row; any, if there is none."""
        if self._only is not None:
            return self._only
        return self.members[self.index.member_place_of(key) or 0]

    def has_room(self, key: Key, rooms: list[int] | None) -> bool:
        """Whether the member that has the key's row takes one more (`rooms`); if so, this is it."""
        if rooms is None:
            return True
        place = self.member_of(key).place
        rooms[place] -= 1
        return rooms[place] >= 0

    def can_load(self, key: Key) -> bool:
        """Whether the key's row can be loaded now. Called for each key of each prompt."""
        only = self._only
        if only is None:
            return self.can_load_many([key])[0]
        if only.state is _DOWN or only.loads.state is not _CLOSED:  # as `readable`
            return False
        return self.index.rows.is_stored(key) and not (self.index.aside.until_s and self.index.is_aside(key))

    def can_load_many(self, keys: list[Key]) -> list[bool]:
        """`can_load` of each key."""
        only = self._only
        if only is None:
            found = self.index.can_read_many(keys)
        elif not only.readable:
            return [False] * len(keys)
        else:
            found = self.index.rows.has_many(keys, True)
        if self.index.aside.until_s:
            return [each and not self.index.is_aside(key) for key, each in zip(keys, found, strict=True)]
        return found

    def queue_loads(self, request: Request, keys: Sequence[Key]) -> None:
        """Queue rows to be promoted for a request, which has not asked for them yet."""
        request.want(keys, self.number)
        self.to_load.setdefault(request, deque()).extend(keys)
        self.rows_to_load += len(keys)
        self.ever_queued += len(keys)

    def next_load(self) -> tuple[Request, Key]:
        """Take the first row out of the queue, which is not empty."""
        request, keys = next(iter(self.to_load.items()))
        key = keys.popleft()
        self.rows_to_load -= 1
        if not keys:
            del self.to_load[request]
        return request, key

    def put_back(self, loads: Sequence[tuple[Request, Key]]) -> None:
        """These, in this order, are the first of the queue again."""
        for request, key in reversed(loads):
            self.to_load.setdefault(request, deque()).appendleft(key)
            self.to_load.move_to_end(request, last=False)
        self.rows_to_load += len(loads)

    def drop_loads(self, request: Request) -> None:
        """Nothing that is queued for this request is loaded, nor asked for any more."""
        keys = self.to_load.pop(request)
        self.rows_to_load -= len(keys)
        request.withdraw(keys)

    def rows_before(self, queued: int) -> int:
        """How many rows are queued or being loaded of those before the place `queued` of its queue of all times."""
        return max(0, queued - (self.ever_queued - self.rows_to_load - self.rows_loading))

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
        """Drop all that is queued for this tier, so that nobody writes its victims below."""
        self.garbage.add(self.to_load, self.to_store, self.waiting_for_seal, self.to_demote, self.staged)
        self.to_load, self.rows_to_load = OrderedDict(), 0
        self.to_store, self.waiting_for_seal = OrderedDict(), {}
        self.to_demote, self.staged = {}, {}
        self.index.drop_victims()

    def clear(self) -> None:
        """A new epoch: no row of before it is found. Jobs under way end as usual, for rows that are not here."""
        self.counters.reset += self.counters.rows
        self.drop_queues()
        self.index.clear()
        for member in self.members:
            member.shut()
        self.last_refused = None

    @property
    def send_credits(self) -> int:
        """How many more messages its movers take now."""
        return sum(max(0, member.send_credits) for member in self.members)

    @property
    def store_credits(self) -> int:
        """How many store jobs may be planned now."""
        return sum(max(0, member.store_credits) for member in self.members)
