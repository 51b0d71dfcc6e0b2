"""Counters of one tier, the host or a storage tier."""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Final, NamedTuple

from nixl_tiers.core.breaker import BreakerState


@dataclass
class Counters:
    """Monotonic, in rows unless the name says otherwise; what each one means as a metric: `nixl_tiers/base/metrics.py`.

    A row comes into a tier in one of three ways and leaves it in one of seven, so `rows` is what it holds. Besides,
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
    relisted: int = 0  # the medium lists them again: `found` counts them again
    reset: int = 0  # the weights have changed
    # Are not written:
    dropped_no_room: int = 0  # every row is in use
    dropped_behind: int = 0  # the queue is full
    dropped_evicted: int = 0  # the tier above has evicted them first
    dropped_refused: int = 0  # the tier is down, or its circuit is not closed
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
    # What loads brought, in seconds (savings.py):
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
            self.dropped_no_room
            + self.dropped_behind
            + self.dropped_evicted
            + self.dropped_refused
            + self.dropped_failed
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
        forgotten = self.corrupt + self.missing + self.unreadable + self.removed + self.relisted + self.reset
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
