"""What is counted of a tier, the host or a storage tier."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """Monotonic, in rows unless the name says bytes.

    A row comes into a tier in one of three ways and leaves it in one of seven, so `rows` is what the tier holds. Beside
    that, `failed` counts moves, `dropped` rows that were never written, `incomplete` those that were written and are
    not whole, `late` those whose load nobody waited for any longer, `kills` and `deaths` the tier's movers.
    """

    hits: int = 0
    misses: int = 0
    bytes_read: int = 0  # whole rows that went up from here
    bytes_written: int = 0  # whole rows that came down to here
    # Come in:
    stored: int = 0  # from above: the engine, or a cascade
    promoted: int = 0  # from below
    found: int = 0  # on the medium: from before the tier was opened, or stored by others
    # Go out:
    evictions: int = 0  # for room
    corrupt: int = 0  # their seals refused them
    missing: int = 0  # were not there when they were loaded
    unreadable: int = 0  # of the host: workers could not copy them
    removed: int = 0  # are not there any more, as the medium tells: too old, taken away by others, without a place
    relisted: int = 0  # the medium tells of them anew: `found` counts them again
    reset: int = 0  # the weights are others
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
