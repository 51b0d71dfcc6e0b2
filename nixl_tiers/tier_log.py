"""What an operator reads of a storage tier: one line at its start, one when it goes down, one when it is back.

A tier that fails, fails for every job and with every restart of its mover; a line for each would bury the one that
tells why. Times are moments of the caller's clock, in seconds.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

from nixl_tiers.cascade.breaker import Breaker
from nixl_tiers.cascade.types import Direction

log = logging.getLogger(__name__)

RELAPSE_S: Final = 600.0  # what fails again so soon has not been mended
STEADY_S: Final = 60.0  # for so long it must work then to count as back; doubled up to RELAPSE_S
REASONS: Final = 3  # other reasons that are told in one outage
LINES: Final = 64  # lines of a mover that are remembered, so that its successors do not repeat them

_WAYS: Final = {Direction.LOAD: "loads from", Direction.STORE: "stores to"}


class Outage:
    """Whether something works, told when that changes. What goes to and fro is told ever more seldom."""

    def __init__(self, fails: str, works: str) -> None:
        self.lasts = False
        self._fails = fails
        self._works = works
        self._reasons: set[str] = set()
        self._since = 0.0
        self._works_since: float | None = None
        self._ended_at = float("-inf")
        self._steady_s = 0.0

    def begin(self, reason: str, now: float) -> None:
        """It fails. Told once; while that lasts, another `reason` is, too, as something less urgent."""
        self._works_since = None
        if not self.lasts:
            again = now - self._ended_at < RELAPSE_S
            self._steady_s = min(max(STEADY_S, 2 * self._steady_s), RELAPSE_S) if again else 0.0
            self.lasts, self._since, self._reasons = True, now, {reason}
            note = f" (again; said no more until it has worked for {self._steady_s:g} s)" if again else ""
            log.warning("nixl_tiers: %s: %s%s", self._fails, reason, note)
        elif reason not in self._reasons and len(self._reasons) <= REASONS:
            self._reasons.add(reason)
            log.info("nixl_tiers: %s, now because: %s", self._fails, reason)

    def end(self, now: float) -> None:
        """It works; called as often as that is seen."""
        if self.lasts and self._works_since is None:
            self._works_since = now
        self.watch(now)

    def watch(self, now: float) -> None:
        """Call now and then."""
        if self.lasts and self._works_since is not None and now - self._works_since >= self._steady_s:
            self.lasts, self._ended_at = False, now
            log.warning("nixl_tiers: %s after %.0f s", self._works, self._works_since - self._since)


class TierLog:
    """Of one tier. `place` and `capacity` are said at the start."""

    def __init__(self, name: str, place: str, capacity: str) -> None:
        self._where = f"{name} tier ({place}, {capacity})"
        self._name = name
        self._tier = Outage(f"the {self._where} is down", f"the {name} tier is up again")
        self._circuits = {
            way: Outage(f"{words} the {name} tier fail", f"{words} the {name} tier work again")
            for way, words in _WAYS.items()
        }
        self._episodes = dict.fromkeys(Direction, 0)
        self._listed = False
        self._lines: OrderedDict[str, None] = OrderedDict()

    def listed(self, rows: int) -> None:
        """The tier is up and has told of all `rows` that it holds; only the first time is news."""
        if not self._listed:
            self._listed = True
            log.info("nixl_tiers: the %s is up, %d rows found", self._where, rows)

    def down(self, reason: str, now: float) -> None:
        """Neither its medium nor its mover can be used."""
        self._tier.begin(reason, now)

    def up(self, now: float) -> None:
        self._tier.end(now)

    def watch(self, breakers: Mapping[Direction, Breaker], now: float) -> None:
        """Call now and then. A circuit that opens because the tier is down is no news of its own."""
        self._tier.watch(now)
        for way, breaker in breakers.items():
            circuit, opened = self._circuits[way], breaker.episode != self._episodes[way]
            self._episodes[way] = breaker.episode
            if opened and not breaker.closed and not self._tier.lasts:
                circuit.begin("the circuit is open, and tried again now and then", now)
            elif breaker.closed:
                circuit.end(now)
            else:
                circuit.watch(now)

    def line(self, level: int, text: str) -> None:
        """Something that its mover says. A mover that is started again and again says the same again and again."""
        repeated = text in self._lines
        self._lines[text] = None
        self._lines.move_to_end(text)
        if len(self._lines) > LINES:
            self._lines.popitem(last=False)
        if not (repeated and self._tier.lasts):
            log.log(level, "nixl_tiers: %s mover: %s", self._name, text)
