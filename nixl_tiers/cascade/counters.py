"""Counters of one tier, the host or a storage tier."""

from __future__ import annotations

from dataclasses import dataclass

from nixl_tiers.cascade.breaker import BreakerState


@dataclass
class Counters:
    """Monotonic, in rows unless the name says bytes.

    A row comes into a tier in one of three ways and leaves it in one of seven, so `rows` is what it holds. Besides,
    `failed` counts moves, `dropped` rows that were never written, `incomplete` rows that were written without their
    first sub-blocks, `late` rows whose load was abandoned, `kills` and `deaths` the tier's movers.
    """

    hits: int = 0
    misses: int = 0
    bytes_read: int = 0  # whole rows that went up from here
    bytes_written: int = 0  # whole rows that came down to here
    # Come in:
    stored: int = 0  # from above: the engine, or another tier
    promoted: int = 0  # from below
    found: int = 0  # on the medium: from before the tier was opened, or stored by other engines
    # Go out:
    evictions: int = 0  # for room
    corrupt: int = 0  # the seal did not verify
    missing: int = 0  # not there when they were loaded
    unreadable: int = 0  # host only: workers could not copy them
    removed: int = 0  # the medium lists them as removed: expired, deleted by others, without a slot
    relisted: int = 0  # the medium lists them again: `found` counts them again
    reset: int = 0  # the weights have changed
    failed: int = 0
    incomplete: int = 0
    dropped: int = 0
    late: int = 0
    kills: int = 0
    deaths: int = 0
    probes: int = 0

    @property
    def rows(self) -> int:
        """How many rows the tier holds that a look-up can hit."""
        forgotten = self.corrupt + self.missing + self.unreadable + self.removed + self.relisted + self.reset
        return self.stored + self.promoted + self.found - self.evictions - forgotten


@dataclass(frozen=True)
class TierStats:
    """A tier's numbers: running totals; rows that can be hit; slots in use, including those being written; whether it
    serves; the state of its circuit; host rows in quarantine, which its mover may still write to."""

    counters: Counters
    rows: int
    used: int
    up: bool
    circuit: BreakerState
    quarantined: int
