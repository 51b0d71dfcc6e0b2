"""What the core counts: rows that come and go, durations, what loads have brought, and why keys have left a tier.

Nothing in the core is decided by these numbers. What each means as a metric: `base/metrics.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from operator import attrgetter
from typing import Final, NamedTuple

from nixl_tiers.base.chunk import Key
from nixl_tiers.base.zeroed import zeroed
from nixl_tiers.core.prefill import PrefillEstimate
from nixl_tiers.core.types import BreakerState


@dataclass
class Counters:
    """Monotonic, in rows unless the name says otherwise; what each one means as a metric: `nixl_tiers/base/metrics.py`.

    A row comes into a tier in one of three ways and leaves it in one of six, so `rows` is what it holds. Besides,
    `dropped_*` are rows that were never written, `failed_*` moves, `incomplete` rows that were written without their
    first sub-blocks, `late` rows whose load was abandoned, `missed_*` rows that requests had to compute, by reason,
    `kills` and `deaths` the tier's movers.
    """

    hits: int = 0
    hit_tokens: int = 0
    bytes_read: int = 0  # whole rows that went up from here
    bytes_written: int = 0  # whole rows that came down to here
    # Come in:
    stored: int = 0  # from above: the engine, or another tier
    promoted: int = 0  # from below
    unused: int = 0  # of `evictions`, host only: promoted, and not loaded since
    found: int = 0  # on the medium: from before the tier was opened, or stored by other engines
    # Go out:
    evictions: int = 0  # for room
    corrupt: int = 0  # the seal did not verify
    missing: int = 0  # not there when they were loaded
    unreadable: int = 0  # host only: workers could not copy them
    removed: int = 0  # the medium lists them as removed: expired, deleted by others, without a slot
    reset: int = 0  # the weights have changed
    # Are not written:
    dropped_full: int = 0  # every row is in use, or the medium has no room
    dropped_slow: int = 0  # the queue is full, or the tier above has evicted them first
    dropped_denied: int = 0  # the medium denies requests
    dropped_unreachable: int = 0  # the tier is down, or its circuit is not closed
    dropped_failed: int = 0  # the write has failed, or a move did before
    # Are moved in vain:
    failed_loads: int = 0
    failed_stores: int = 0
    incomplete: int = 0
    late: int = 0
    # Have to be computed (misses.py):
    missed_never_stored: int = 0  # host only: of no tier
    missed_evicted: int = 0
    missed_expired: int = 0
    missed_listing: int = 0
    missed_down: int = 0
    missed_open: int = 0
    missed_failed: int = 0
    missed_slower: int = 0
    missed_late: int = 0
    missed_no_room: int = 0  # host only
    missed_excluded: int = 0
    # What loads brought, in seconds (`Savings`):
    saved_prefill_s: float = 0.0
    saved_first_token_s: float = 0.0
    lost_slower_s: float = 0.0  # loading took longer than computing would have
    lost_vain_s: float = 0.0  # waits after which nothing was loaded
    kills: int = 0
    deaths: int = 0
    probes: int = 0

    @property
    def dropped(self) -> int:
        return (
            self.dropped_full + self.dropped_slow + self.dropped_denied + self.dropped_unreachable + self.dropped_failed
        )

    @property
    def failed(self) -> int:
        return self.failed_loads + self.failed_stores

    @property
    def missed(self) -> int:
        return sum(_missed(self))

    @property
    def rows(self) -> int:
        """How many rows the tier holds that a look-up can hit."""
        forgotten = self.corrupt + self.missing + self.unreadable + self.removed + self.reset
        return self.stored + self.promoted + self.found - self.evictions - forgotten


MISSED: Final = tuple(field.name for field in fields(Counters) if field.name.startswith("missed_"))
_missed: Final = attrgetter(*MISSED)


class TierStats(NamedTuple):
    """A tier's numbers: running totals; rows that can be hit; slots in use, including those being written; whether
    its medium is open; the state of its circuit; host rows in quarantine, which its mover may still write to; rows that
    wait to be loaded and stored, and that are being loaded and stored; whether its medium is still being listed."""

    counters: Counters
    rows: int
    used: int
    up: bool
    circuit: BreakerState
    quarantined: int
    queued_loads: int = 0
    queued_stores: int = 0
    loading: int = 0
    storing: int = 0
    listing: bool = False

    def numbers(self) -> dict[str, float]:
        """By the names of `base/metrics.py`."""
        counters = self.counters
        return {
            **vars(counters),
            "dropped": counters.dropped,
            "failed": counters.failed,
            "missed": counters.missed,
            "rows": self.rows,
            "up": float(self.up),
            "listing": float(self.listing),
            "breaker": float(self.circuit),
            "quarantined": float(self.quarantined),
            "queued_loads": float(self.queued_loads),
            "queued_stores": float(self.queued_stores),
            "loading": float(self.loading),
            "storing": float(self.storing),
        }


MAX_SAMPLES: Final = 256  # of one series between two reports: an engine that is idle, or without metrics, takes none


class Samples:
    """Samples of the histograms, until they are reported: durations and sizes of jobs and waits, by (tier, number).
    Of more than MAX_SAMPLES between two reports, the first ones are kept: so an idle engine's
    background writes, reported at its next step, cannot grow without bound."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], list[float]] = {}

    def observe(self, tier: str, number: str, value: float) -> None:
        values = self._values.setdefault((tier, number), [])
        if len(values) < MAX_SAMPLES:
            values.append(value)

    def take(self) -> dict[tuple[str, str], list[float]]:
        """Those since the last call."""
        values, self._values = self._values, {}
        return values


@dataclass
class Load:
    """Of one request: from token `start` to `end`, copied to the engine since `began_s`. `tokens`: by the tier that
    they came from. `waited`: for which tier, and how long."""

    start: int
    end: int
    began_s: float
    waited: tuple[str, float] | None = None
    tokens: dict[str, int] = field(default_factory=dict)


class Savings:
    """Adds what each load brought to the counters of its tiers: seconds of prefill saved, seconds until first tokens
    saved, and seconds lost. `counters`: of a tier, by its name.

    Prefill not spent is what computing the loaded tokens would have taken, by the prefill estimate. Of that, a first
    token comes earlier by what loading them did not take: the wait for their promotion and the copy to the engine. A
    load that took longer than computing would have counts as lost, as does a wait that ends without a load.
    """

    def __init__(self, prefill: PrefillEstimate, counters: Callable[[str], Counters]) -> None:
        self._prefill = prefill
        self._counters = counters
        self._loads: dict[str, Load] = {}  # by request, which has one load at a time

    def load_began(self, request: str, load: Load) -> None:
        self._loads[request] = load

    def load_ended(self, request: str, now: float) -> None:
        """The engine has what it loaded. Nothing is counted while the speed of prefill is unknown."""
        load = self._loads.pop(request, None)
        # A step is needed in either case, for the token behind the load at least.
        with_load = None if load is None else self._prefill.seconds(load.end, load.end + 1)
        without = None if load is None else self._prefill.seconds(load.start, load.end + 1)
        if load is None or with_load is None or without is None or not load.tokens:
            return
        total = sum(load.tokens.values()) or 1
        took = dict.fromkeys(load.tokens, 0.0)
        if load.waited is not None:
            took[load.waited[0]] = load.waited[1]
        for name, took_s in took.items():
            share = load.tokens.get(name, 0) / total
            saved_s = (without - with_load) * share
            earlier_s = saved_s - took_s - (now - load.began_s) * share
            counters = self._counters(name)
            counters.saved_prefill_s += saved_s
            counters.saved_first_token_s += max(0.0, earlier_s)
            counters.lost_slower_s += max(0.0, -earlier_s)

    def load_failed(self, request: str, now: float) -> None:
        """It computes what it loaded."""
        load = self._loads.pop(request, None)
        if load is not None:
            if load.waited is not None:
                self._counters(load.waited[0]).lost_vain_s += load.waited[1]
            for name, tokens in load.tokens.items():
                share = tokens / (sum(load.tokens.values()) or 1)
                self._counters(name).lost_vain_s += (now - load.began_s) * share

    def forget(self, request: str) -> None:
        """It has ended."""
        self._loads.pop(request, None)

    def reset(self) -> None:
        """No load of before a reset is reported as ended."""
        self._loads = {}


TABLE_BITS: Final = 20
_MASK: Final = (1 << TABLE_BITS) - 1
HOST: Final = -1
"""In place of a tier's number."""
_MOST_TIERS: Final = 61


class Gone(IntEnum):
    """Why a key is in a tier no more."""

    EVICTED = 0
    EXPIRED = 1  # or deleted by another engine
    LOST = 2  # corrupt, missing, or it could not be copied


class EvictionHistory:
    """The tier that each key has left last, and why: 4 bytes a key, 4 MiB for a million keys, which the kernel gives
    when they are touched. O(1), and no object for Python's garbage collector.

    A table of fingerprints, one place a key: a newer key takes the place of an older one, so that of the keys that left
    before the last n, a share of 1 - exp(-n / 2^20) is forgotten. A key that never was there is taken for another with
    odds of 1 in 2^24. Which key takes whose place goes by Python's hash of bytes, another one in each process: nothing
    but the counters of misses may go by this table.
    """

    def __init__(self) -> None:
        self._table = memoryview(zeroed(4 << TABLE_BITS)).cast("I")
        self._salt = 0

    def note(self, key: Key, tag: int) -> None:
        """`key` has left a tier: see `tag_of`."""
        mixed = hash(key) ^ self._salt
        self._table[mixed & _MASK] = (mixed >> 12) & 0xFFFFFF00 | tag

    def find(self, key: Key) -> int:
        """The tag of the tier that the key has left last; 0 if that is not known."""
        mixed = hash(key) ^ self._salt
        noted = self._table[mixed & _MASK]
        return noted & 0xFF if not (noted ^ mixed >> 12) & 0xFFFFFF00 else 0

    def find_many(self, keys: Sequence[Key]) -> list[int]:
        """`find` of each key."""
        table, salt, found = self._table, self._salt, []
        for hashed in map(hash, keys):
            mixed = hashed ^ salt
            noted = table[mixed & _MASK]  # 0 at most places
            found.append(noted & 0xFF if noted and not (noted ^ mixed >> 12) & 0xFFFFFF00 else 0)
        return found

    def clear(self) -> None:
        """Forget all. O(1)."""
        self._salt = hash((self._salt, 1))


def tag_of(tier: int, why: Gone) -> int:
    """What is noted of a key that has left this tier (its number, or HOST) for this reason; 0 (nothing) for a number
    that is too high."""
    return (tier + 2) << 2 | int(why) if tier <= _MOST_TIERS else 0


def tier_and_reason(tag: int) -> tuple[int, Gone]:
    """The inverse of tag_of, for what is not 0."""
    return (tag >> 2) - 2, Gone(tag & 3)
