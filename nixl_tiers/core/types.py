"""Values that the parts of the core share: a tier's specification and state, entries, moves and jobs."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import msgspec

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.base.policies import Write
from nixl_tiers.core.rows import Row


class TierState(Enum):
    DOWN = "down"  # no mover, or its medium does not answer: every look-up misses, stores are dropped; its rows stay
    LISTING = "listing"  # hits: rows listed so far, and of before if they may still be listed; stores wait for the end
    UP = "up"


class Direction(Enum):
    STORE = "store"
    LOAD = "load"


@dataclass(frozen=True)
class TierSpec:
    """What the core must know of a storage tier. `physical_slots`: a slot is a place on the medium, no mere count.

    `asked`: other engines store to it too, and nothing is listed: whether a key exists is asked (existence.py). What is
    known of such a tier stays known when its mover is restarted. A row's tick is the time by the medium's clock when
    it was written last, so the order of the index is that in which rows vanish (`TierIndex.gone_before`); or when it
    was last known to be there, and then it is asked for again after a time. `absent_s`: for so long at most a key that
    was absent is not asked for again.

    `members`: how many movers it has, each with slots of its own.

    `quotas`: which share of it each tenant may have, from number 1 on, if no other engine stores to it."""

    name: str
    write: Write
    physical_slots: bool
    asked: bool = False
    absent_s: float = math.inf
    quotas: tuple[float, ...] = ()
    members: int = 1


class Columns(Protocol):
    """Rows that a medium lists: `count` uint32 slots, uint64 ticks, and records of `width` bytes: a byte of length, the
    key, padding. They may hold anything; buffers, which stay as they are until `close`."""

    count: int
    width: int
    slots: Any
    ticks: Any
    records: Any

    def close(self) -> None:
        """They are not used any more."""


class PlannedMove(msgspec.Struct, frozen=True, gc=False, eq=False):
    """One row's part of a job: in which `slot` of the tier, and the `id` of its row there. Hidden from the garbage
    collector, as what it refers to is."""

    row: Row
    slot: int
    id: int
    key: Key
    tick: int = 0
    seal: bool = False


@dataclass(slots=True)
class Burst:
    """Loads of one tier that started at about the same time. Where they share the medium, the first to end looks
    several times as slow as it is: what the others have got meanwhile is in none of the tier's books. `rows`: of those
    that still run; `ended`: whether some have ended, so that none joins any more."""

    began_s: float
    rows: int = 0
    ended: bool = False


@dataclass(slots=True)
class Job:
    """One batch of row moves of one direction; `moves` that have not ended. Times are of the caller's monotonic clock,
    in seconds."""

    id: int
    tier: int
    mover: int
    direction: Direction
    moves: list[PlannedMove]
    nbytes: int  # under way in its direction when it started, its own included
    started_s: float
    soft_deadline_s: float  # no request waits for it after that
    hard_deadline_s: float  # its mover is killed then
    probe_episode: int | None = None  # of one row that no request waits for: the breaker's number of its probe
    abandoned: bool = False
    reported: Counter[Outcome] = field(default_factory=Counter)  # of rows that ended while it ran, no longer in `moves`
    loaded_before: int = 0  # rows of its tier whose loads had ended when it started
    burst: Burst | None = None  # of a load, until it is abandoned or has ended


@dataclass(slots=True)
class OrphanedJobs:
    """Open jobs of a mover that was killed or has died, which are worked off in slices: first requests cease to wait
    for them, then, once their mover is reaped, their rows are free."""

    to_abandon: deque[Job]
    to_end: deque[Job]
    reaped: bool

    @property
    def idle(self) -> bool:
        """Whether nothing can be done now: its mover may still write to the rows."""
        return not (self.to_abandon or self.reaped)
