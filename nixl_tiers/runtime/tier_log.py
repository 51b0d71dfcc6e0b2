"""What an operator reads of a storage tier: one line at its start, one when it goes down, one when it is up again.

A tier that fails, fails for every job and at every restart of its mover; a line for each would bury the one that
gives the reason. Times (`now`) are readings of the caller's clock, in seconds.

Lines are made while the coordinator's lock is held, and written after its release: standard error may be a pipe that
nobody reads, and would stop the scheduler.
"""

from __future__ import annotations

import contextlib
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Final, Literal

from nixl_tiers.base.chunk import FAILING, FULL, UNREACHABLE
from nixl_tiers.core.member import Breaker
from nixl_tiers.core.types import Direction

log = logging.getLogger(__name__)

RELAPSE_S: Final = 600.0  # an outage that begins so soon after the last one counts as its relapse
STEADY_S: Final = 60.0  # how long it must then work to count as up again; doubled up to RELAPSE_S
REASONS: Final = 3  # further reasons that are logged in one outage
LINES: Final = 64  # lines of a mover that are remembered, so that its successors do not repeat them
LISTING_S: Final = 10.0  # between two lines about a listing that is still running

_OVER: Final = {
    FULL: "what it stores may grow again",
    UNREACHABLE: "rows are stored again",
    FAILING: "rows are stored again",
}
_DIRECTIONS: Final = {Direction.LOAD: "loads from", Direction.STORE: "stores to"}


Write = Callable[[int, str], None]
"""Takes a level of `logging` and a line."""


class LogQueue:
    """Lines of all tiers, in order. `put` with the lock held, `write` without it."""

    def __init__(self) -> None:
        self._lines: deque[tuple[int, str]] = deque()

    def put(self, level: int, line: str) -> None:
        self._lines.append((level, line))

    def write(self) -> None:
        """Log what has been put. An error of a logging handler costs its line only."""
        while self._lines:
            with contextlib.suppress(Exception):
                log.log(*self._lines.popleft())


class Outage:
    """Logs when something begins to fail and when it works again; of what flaps, less and less often."""

    def __init__(self, fails: str, works: str, write: Write) -> None:
        self._write = write
        self.lasts = False
        self._fails = fails
        self._works = works
        self._reasons: set[str] = set()
        self._since = 0.0
        self._works_since: float | None = None
        self._ended_at = float("-inf")
        self._steady_s = 0.0

    def begin(self, reason: str, now: float) -> None:
        """It fails: one WARNING for each outage; while it lasts, an INFO line for each of the first further reasons."""
        self._works_since = None
        if not self.lasts:
            again = now - self._ended_at < RELAPSE_S
            self._steady_s = min(max(STEADY_S, 2 * self._steady_s), RELAPSE_S) if again else 0.0
            self.lasts, self._since, self._reasons = True, now, {reason}
            note = f" (again; not logged again until it has worked for {self._steady_s:g} s)" if again else ""
            self._write(logging.WARNING, f"nixl_tiers: {self._fails}: {reason}{note}")
        elif reason not in self._reasons and len(self._reasons) <= REASONS:
            self._reasons.add(reason)
            self._write(logging.INFO, f"nixl_tiers: {self._fails}, another reason: {reason}")

    def end(self, now: float) -> None:
        """It works. May be called as often as that is seen."""
        if self.lasts and self._works_since is None:
            self._works_since = now
        self.watch(now)

    def watch(self, now: float) -> None:
        """Log the end of an outage once it has worked for long enough. Call it periodically."""
        if self.lasts and self._works_since is not None and now - self._works_since >= self._steady_s:
            self.lasts, self._ended_at = False, now
            lasted_s = self._works_since - self._since
            self._write(logging.INFO, f"nixl_tiers: {self._works} after {lasted_s:.0f} s")


class TierLog:
    """Of one tier. `place` and `capacity` appear in the line at the start."""

    def __init__(self, name: str, place: str, capacity: str, write: Write) -> None:
        self._write = write
        self._where = f"{name} tier ({place}, {capacity})"
        self._name = name
        self._tier = Outage(f"the {self._where} is down", f"the {name} tier is up again", write)
        self._circuits = {
            direction: Outage(f"{words} the {name} tier fail", f"{words} the {name} tier work again", write)
            for direction, words in _DIRECTIONS.items()
        }
        self._episodes = dict.fromkeys(Direction, 0)
        self._reason = ""  # why the tier is down
        self.denials: Mapping[str, str] = {}
        """What the medium does not do now: kind (FULL, UNREACHABLE, FAILING, or of denied requests) -> a sentence."""
        self._listed = False
        self._listing_at = 0.0
        self._lines: OrderedDict[str, None] = OrderedDict()

    @property
    def problem(self) -> str:
        """Why the tier is down or what its medium denies, in words; empty if nothing is known to be wrong."""
        return "; ".join([*filter(None, [self._reason]), *self.denials.values()])

    @property
    def refusal(self) -> Literal["", "denied", "unreachable"]:
        """Why the medium takes no rows now, as far as it says."""
        if self.denials.keys() - {FAILING, FULL, UNREACHABLE}:
            return "denied"
        return "unreachable" if UNREACHABLE in self.denials else ""

    def listed(self, rows: int | None) -> None:
        """The tier is up and all its `rows` are listed; None: it is asked. Only the first time is logged."""
        if not self._listed:
            self._listed = True
            found = "and asked for rows when they are needed" if rows is None else f"{rows} rows found"
            self._write(logging.INFO, f"nixl_tiers: the {self._where} is up, {found}")

    def listing(self, rows: int, now: float) -> None:
        """The tier is being listed, with `rows` so far: one line every LISTING_S."""
        if now >= self._listing_at:
            self._listing_at = now + LISTING_S
            self._write(
                logging.INFO,
                f"nixl_tiers: the {self._name} tier is still being listed: {rows:,} rows so far; "
                "a row that is not listed yet is a miss",
            )

    def denied(self, denials: Mapping[str, str]) -> None:
        """What the medium denies now: one line for each kind of request when that begins, and one when it ends."""
        before, self.denials = self.denials, denials
        for kind in [kind for kind in denials if kind not in before]:
            self._write(logging.WARNING, f"nixl_tiers: the {self._name} tier: {denials[kind]}")
        for kind in [kind for kind in before if kind not in denials]:
            said = _OVER.get(kind, f"{kind} is no longer denied")
            self._write(logging.INFO, f"nixl_tiers: the {self._name} tier: {said}")

    def mover_lost(self) -> None:
        """The tier's mover is dead: the next one finds out again what is denied."""
        self.denials = {}

    def down(self, reason: str, now: float) -> None:
        """The medium or the mover cannot be used."""
        self._reason = reason
        self._tier.begin(reason, now)

    def up(self, now: float) -> None:
        """The mover has opened the medium, and begins to list it."""
        self._reason = ""
        self._listing_at = now + LISTING_S
        self._tier.end(now)

    def watch(self, breakers: Mapping[Direction, Breaker], now: float) -> None:
        """Call it periodically. A circuit that opens because the tier is down is not logged on its own."""
        self._tier.watch(now)
        for direction, breaker in breakers.items():
            circuit, opened = self._circuits[direction], breaker.episode != self._episodes[direction]
            self._episodes[direction] = breaker.episode
            if opened and not breaker.closed and not self._tier.lasts:
                circuit.begin("the circuit is open, and probed from time to time", now)
            elif breaker.closed:
                circuit.end(now)
            else:
                circuit.watch(now)

    def line(self, level: int, text: str) -> None:
        """A line of the mover's own log, unless a predecessor wrote the same in this outage: a mover in a restart loop
        repeats itself."""
        repeated = text in self._lines
        self._lines[text] = None
        self._lines.move_to_end(text)
        if len(self._lines) > LINES:
            self._lines.popitem(last=False)
        if not (repeated and self._tier.lasts):
            self._write(level, f"nixl_tiers: {self._name} mover: {text}")
