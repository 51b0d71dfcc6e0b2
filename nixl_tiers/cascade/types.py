"""What is said of a storage tier and of the moves of its rows: values that its book, queues and jobs share."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import msgspec

from nixl_tiers import policies
from nixl_tiers.cascade.eviction import PolicyName
from nixl_tiers.cascade.host import Row
from nixl_tiers.chunk import Key


class TierState(Enum):
    DOWN = "down"  # no mover, or its medium does not answer: every look-up misses, cascades are dropped
    LISTING = "listing"  # serves what it has already told of; stores wait until all of it is known
    UP = "up"


class Direction(Enum):
    STORE = "store"
    LOAD = "load"


Write = policies.Write


@dataclass(frozen=True)
class TierSpec:
    """What the core must know of a storage tier. `physical_slots`: a slot is a place on the medium, not a count."""

    name: str
    write: Write
    physical_slots: bool
    policy: PolicyName = "lru"
    shared: bool = False  # others store to it too, and its medium may be asked for keys that are not known here


class Entry(msgspec.Struct, gc=False, eq=False):
    """A key's place in a storage tier. `stored` is False while its first write is under way; `evicting`: chosen for
    eviction, and to be written to the tier below first. Hidden from the garbage collector, as Row is."""

    slot: int
    stored: bool
    evicting: bool = False
    readers: int = 0


@dataclass(frozen=True, slots=True)
class PlannedMove:
    row: Row
    entry: Entry
    key: Key
    tick: int = 0
    seal: bool = False


@dataclass(slots=True)
class Job:
    """One batch of row moves of one direction. Moments are the caller's monotonic clock, in seconds."""

    id: int
    tier: int
    direction: Direction
    moves: list[PlannedMove]
    nbytes: int  # under way in its direction when it began, its own included
    started_s: float
    soft_deadline_s: float  # nobody waits for it after that
    hard_deadline_s: float  # its mover dies then
    is_trial: bool = False  # of one row, for nobody: to try a suspect, or a tier that failed
    probe_episode: int | None = None  # of the breaker, if it is that one's probe
    abandoned: bool = False
