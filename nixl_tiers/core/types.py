"""Values that the parts of the core share: bounds, a tier's specification and state, moves and jobs."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, Final, Protocol

import msgspec

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.base.policies import DEFAULT_PROBE_S, DEFAULT_WAIT_S, Write
from nixl_tiers.base.times import PRODUCTION
from nixl_tiers.core.rows import Row

PIN_MARGIN_S: Final = 20.0  # beyond `wait_s`: what a scheduler may take to load what was promoted


class BreakerState(IntEnum):
    """The numbers are those of the `breaker` gauge."""

    CLOSED = 0  # works
    HALF_OPEN = 1  # only probes are let through
    OPEN = 2  # nothing is let through until its back-off has passed


@dataclass(frozen=True)
class BreakerLimits:
    """When a circuit opens, and when it is probed. Times are in seconds. Each job, each request that expired and each
    mover that died is one result, good or a failure.

    Half of the last eight rather than a run of failures: a medium that fails every other time costs requests as much
    as one that always fails, and a single bad row in a good medium costs only requests for that row.
    """

    results: int = 8  # how many of the last results count
    failures_to_open: int = 4
    window_s: float = 60.0  # older results do not count
    min_backoff_s: float = 1.0  # the first back-off; it doubles while the circuit keeps opening
    max_backoff_s: float = 60.0
    probes_to_close: int = 2  # consecutive good probes that close it


@dataclass(frozen=True)
class Limits:
    """Seconds, rows, and shares of a tier's rows."""

    wait_s: float = DEFAULT_WAIT_S  # of the configuration: a request waits so long for promotions, then recomputes
    pin_s: float = DEFAULT_WAIT_S + PIN_MARGIN_S  # rows promoted for a request that never comes back are unpinned then
    # A job's soft deadline is a multiple of the time that the tier's throughput lets expect, at least
    # `soft_deadline_min_s`, at most `wait_s`: its requests recompute then. The hard deadline, after which the mover is
    # killed, is four times as long, with bounds of its own.
    soft_deadline_min_s: float = PRODUCTION.late_job_s
    hard_deadline_min_s: float = PRODUCTION.overdue_job_s[0]
    hard_deadline_max_s: float = PRODUCTION.overdue_job_s[1]
    assumed_bytes_per_s: float = 4e6  # of a tier without samples
    # A place is set aside for so long, and twice as long each time (`SetAside`): one whose load failed, or that was
    # being moved when a mover died for no known reason; and one that a mover hung at, or whose write failed.
    retry_s: float = PRODUCTION.set_aside_s[0]
    aside_s: float = PRODUCTION.set_aside_s[1]
    check_timeout_s: float = DEFAULT_PROBE_S  # `probe_s` of the configuration: a request waits so long for checks
    max_checks: int = 4  # open existence checks of one tier that answers at once; of a distant one
    distant_checks: int = 32  # up to so many, one for each
    check_share_s: float = 0.002  # of its round trip: beyond what that asks a second, hits are lost in silence
    keys_per_check: int = 512
    keys_at_once: int = 16  # of them, that a medium is asked for at the same time
    later_keys: int = 1024  # of one tier, unknown while it was slow, or busy, that are asked for later
    absent_s: float = 30.0  # negative cache: an absent key is not checked again sooner
    absent_keys: int = 65536  # of one tier's negative cache
    # A promotion waits so long for write-back to free a row, and then evicts unwritten ones. For half of it a mover may
    # hold up stores while the engine copies rows out of the host (`stores_held_s` of base/times.py).
    clean_wait_s: float = PRODUCTION.clean_wait_s
    store_hold_s: float = 0.5  # promotions hold up a tier's stores so long; then a window goes (`StoreThrottle`)
    hold_share: float = 0.25  # of the host rows: with more to write to a tier, promotions do not hold that up
    load_share: float = 0.10  # of the host rows: what may be under promotion at once
    store_share: float = 0.05
    loads_under_way: int = 640  # rows of one mover, whatever the share: so many its death touches at most
    stores_under_way: int = 384
    quarantine_share: float = 0.75  # of the load window: how many rows may be stuck before the mover is killed
    line_share: float = 0.5  # of the host rows: what requests may hold that wait for their turn (prefetch_queue.py)
    retain_share: float = 0.25  # of the host rows: what is kept for requests that have ended (retention.py)
    line_requests: int = 32  # of those that wait, so many are next
    ahead_s: float = 0.25  # promotions for them keep a request whose turn comes waiting no longer than about that
    reserve_share: float = 0.05  # of a tier whose evictions are written below: kept free ahead of need
    burst_s: float = 0.02  # loads that start within it are measured by the last of them to end (types.py)
    measure_s: float = 5.0  # a tier whose rows are declined for its speed is measured again so often,
    measure_share: float = 0.125  # with so much of a job's rows, or more, by turns, for which no request waits,
    measure_time: float = 0.05  # and which take so much of its time, or seldom enough for that
    measure_busy_s: float = 1.0  # later, if requests are alive until then: while none is, it takes nothing from them
    moves_per_job: int = 64
    rows_per_slice: int = 64  # work that concerns many rows is done in slices of so many, each one hold of the lock
    listed_per_step: int = 256  # rows that are listed, or looked at after a listing, in one hold of the lock
    deletes_per_turn: int = 4096  # of a tier; with more to delete nothing is stored to it
    deletes_per_batch: int = 256  # rows to delete in one message; not fewer than moves_per_job
    # Each job, and each turn of the supervisor, costs it the interpreter's lock that the engine's step needs. So a job
    # of loads is what a tier moves in `job_s`, and one of stores, for which nobody waits, four times that: at least
    # `job_bytes`, since small jobs keep a window full, and at most `moves_per_job` and a quarter of a window.
    job_s: float = 0.02
    job_bytes: int = 16 << 20
    pause_s: float = 0.2  # while only write-back is under way, turns are as seldom as this
    breaker: BreakerLimits = field(default_factory=BreakerLimits)


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
    nbytes: int  # under way in its direction when it started, its own and those of the next turns included
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
