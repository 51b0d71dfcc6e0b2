"""A request: its state, what it waits for, what it has pinned, and how long it may wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple

from nixl_tiers.base.chunk import Key
from nixl_tiers.core.rows import LOADING, Generation, Row

NEVER: Final = float("-inf")


@dataclass(slots=True)
class Wait:
    """What a request that waits for a part of its chain goes by. Positions are in tokens of the request."""

    expected_s: float  # when all that it waits for is expected to be in host memory
    step_tokens: int
    end: int  # of its chain
    places: list[tuple[int, int]]  # the tiers, by number, and the place of its last row in the queue of each
    idle_until_s: float = NEVER  # it need not be judged before, unless its last row comes


class RequestWishes(NamedTuple):
    """What a front end wishes for a request, until it is finished.

    `tenant`: whose quota its rows count against; 0: none. Requests of different tenants must have no key in common.
    `allowed`: the storage tiers that it may load from; None: all. Host memory is always a hit. `host_only`: nothing
    that it stores is written to storage tiers on its behalf; a chunk that another request, without this, stores or uses
    too is written like any other from then on. `evict_first`: what it stores, or has promoted, is evicted first, until
    another request uses it, in host memory and in tiers of this engine's own; what it uses of others' rows makes these
    no younger. `patient`: it waits for unknown keys as long as for any rows, while a tier may turn out to hold them:
    one that is being listed, or that is asked and has not answered yet.
    """

    tenant: int = 0
    allowed: frozenset[int] | None = None
    host_only: bool = False
    evict_first: bool = False
    patient: bool = False


NO_WISHES: Final = RequestWishes()


class RequestState(Enum):
    QUEUED = "queued"  # its turn is to come: rows come up for it in the line (prefetch_queue.py)
    OPEN = "open"  # it waits for nothing
    WAITING = "waiting"  # for rows, or for a check, or all has come and is not loaded yet; its deadline runs
    GAVE_UP = "gave up"  # too late, or computing is quicker: it gets nothing more, and keeps its pins; or it has ended
    RUNNING = "running"  # it loads what it found, or it computes
    FAILED = "failed"  # a copy to the engine failed: it computes everything itself

    __hash__ = object.__hash__  # that of an enum takes as long as all that a request's end does


# Members of an enum are found by a slow attribute look-up before Python 3.12.
QUEUED, OPEN, WAITING, GAVE_UP, RUNNING, FAILED = RequestState
_NEXT: Final = {
    QUEUED: {OPEN, WAITING},
    OPEN: {*RequestState} - {OPEN},
    WAITING: {*RequestState} - {WAITING, QUEUED},
    GAVE_UP: {OPEN, RUNNING, FAILED},
    RUNNING: {OPEN, GAVE_UP, FAILED},
    FAILED: set[RequestState](),
}


@dataclass(slots=True)
class Waited:
    """For metrics: when a wait began, when it was last looked up, and the lowest tier that was asked."""

    since_s: float | None = None
    seen_s: float = 0.0
    lowest: int = 0


@dataclass(slots=True)
class KeyScan:
    """A step's look-ups, which go up the prefix, key by key. The `first` scan that meets stored rows collects all of
    them, so that they can be promoted together; later scans of the same wait only ask whether the first of them that
    was not there yet is. `answered`: it is not, and the scan is over. `hits`: so far, to be pinned if the request turns
    out to wait."""

    step: int = -1
    position: int | None = None
    ascending: bool = True
    first: bool = True
    answered: bool = False
    hits: list[Row] = field(default_factory=list)


class Request:
    """Scheduler-side state of one request, from its first look-up to its end."""

    __slots__ = (
        "_counted_as_waiting",
        "check_deadline_s",
        "chosen",
        "deadline_s",
        "first_key_found",
        "generation",
        "hit_end",
        "lost",
        "missing",
        "name",
        "pinned",
        "refused",
        "rescan",
        "rows_come",
        "scan",
        "state",
        "tick",
        "unknown",
        "wait",
        "waited",
        "wanted",
        "wishes",
    )

    def __init__(self, name: str, generation: Generation, wishes: RequestWishes = NO_WISHES) -> None:
        self.name = name
        self.generation = generation
        self.wishes = wishes
        self.state = OPEN
        self.tick = 0 if wishes.evict_first else None
        # One deadline for all that it waits for: armed at its first PENDING, and again only after a load was prepared.
        self.deadline_s: float | None = None
        self.waited = Waited()
        self.lost: int | None = None  # the tier that lacked one of its rows: what is behind it there is not loaded
        self.wanted: dict[Key, None] = {}  # keys queued for promotion on its behalf, until their loads begin
        self.refused: set[Key] = set()  # keys for whose rows the host had no room
        self.rows_come = 0  # how many have come, of all that it has ever asked for
        self.pinned: dict[Key, Row] = {}
        self._counted_as_waiting = 0  # what of Generation.pinned_by_waiting it accounts for
        self.scan = KeyScan()
        self.missing: deque[tuple[int | None, Key]] = deque()  # positions and keys that it waits for, in prefix order
        # Existence checks (existence.py): the unknown keys that they are, or were last, asked about.
        self.unknown: dict[Key, None] = {}
        self.check_deadline_s: float | None = None  # once in its life
        self.first_key_found = False
        self.rescan = True  # the next scan collects all that is stored
        # Load or recompute (lookup.py): nothing is loaded beyond this token, whatever turns up there meanwhile.
        self.chosen: int | None = None
        self.hit_end = 0  # up to which token its last look-up of its chain found everything, if that waits for nothing
        self.wait: Wait | None = None  # what its wait is judged by

    @property
    def waiting(self) -> bool:
        return self.state is WAITING

    @property
    def gave_up(self) -> bool:
        return self.state is GAVE_UP

    @property
    def queued(self) -> bool:
        return self.state is QUEUED

    # --- states ------------------------------------------------------------------------------------------------

    def become(self, state: RequestState) -> None:
        """It is in this state from now on; a request that has FAILED stays so."""
        if state is self.state or self.state is FAILED:
            return
        assert state in _NEXT[self.state], f"a request that is {self.state.value} is to be {state.value}"
        self.state = state
        self._count()

    def leave_line(self) -> None:
        """Its turn has come, or it has ended: it waits for what it has asked for meanwhile."""
        self.become(WAITING if self.wanted or self.pinned else OPEN)

    def weigh_anew(self, state: RequestState) -> None:
        """Its load is prepared (RUNNING), or it has lost what it had computed (OPEN): when it comes back after that, it
        may wait again."""
        self.become(state)
        self.deadline_s = None
        self._forget_choice()

    def belongs_to(self, generation: Generation) -> None:
        """If there was a reset since its last use, it waits for nothing, and no row of before needs to be unpinned."""
        if self.generation is not generation:
            self.generation = generation
            self._counted_as_waiting = 0
            self.pinned.clear()
            self.release()
            self._forget_choice()

    def release(self) -> None:
        """It waits no longer: unpin its rows, forget what it wanted."""
        self.lost = None
        if self.pinned:
            self.generation.unpin(self.pinned.values())
        for collection in (self.pinned, self.wanted, self.refused, self.scan.hits):
            collection.clear()
        if self.waiting:
            self.become(OPEN)

    # --- scans -------------------------------------------------------------------------------------------------

    def begin(self, step: int, position: int | None) -> bool:
        """A look-up at `position` (the key's end token) in `step`; a new step is a new scan. Returns whether it is the
        first look-up of a scan that only has to find out whether all that it waits for is there."""
        scan = self.scan
        new = step != scan.step
        if new:
            scan.first = self.rescan or not (self.waiting or self.gave_up)
            self.rescan = False
            scan.step = step
            scan.answered = False
            scan.hits.clear()
            if scan.first:
                self.missing.clear()
        elif position is None or (scan.position is not None and position <= scan.position):
            # A windowed group is scanned from its end: stopping early would lose the hit.
            scan.ascending = False
        scan.position = position
        return new and scan.ascending and not scan.first and self.waiting

    def scan_anew(self) -> None:
        """Not all that it waits for is on its way: this scan collects what is missing as the first one did."""
        self.scan.first = True
        self.missing.clear()

    def note_missing(self, key: Key) -> None:
        """A look-up of `key` was answered with PENDING."""
        if self.scan.first or not self.missing:
            self.missing.append((self.scan.position, key))

    # --- rows --------------------------------------------------------------------------------------------------

    def wants(self, key: Key) -> bool:
        """Whether a row that was queued for it is still to be loaded."""
        return key in self.wanted and (self.waiting or self.queued)

    def want(self, keys: Collection[Key], tier: int) -> None:
        """Rows of `keys` are queued to be promoted on its behalf from this tier."""
        self.wanted.update(dict.fromkeys(keys))
        self.waited.lowest = max(self.waited.lowest, tier)
        self._count()

    def begin_load(self, row: Row) -> None:
        """A row that it has asked for is on its way, or is in host memory by now."""
        self.wanted.pop(row.key, None)
        self.pin(row)
        self._count()

    def row_came(self, row: Row) -> None:
        """This row, which was loaded for it, is in host memory."""
        self.rows_come += self.pinned.get(row.key) is row

    @property
    def rows_to_come(self) -> int:
        """For how many rows it waits that are queued or loaded for it."""
        coming = [row for row in self.pinned.values() if row.state is LOADING and not row.removed]
        return len(self.wanted) + len(coming)

    def withdraw(self, keys: Iterable[Key]) -> None:
        """It asks for these rows no more: their tier cannot load them now."""
        for key in keys:
            self.wanted.pop(key, None)
        self._count()
        self.judge_again()

    def refuse(self, key: Key) -> None:
        """The host has no room for a row that it asked for, and will not have any."""
        self.withdraw((key,))
        self.refused.add(key)

    def judge_again(self) -> None:
        """What it waits for has changed: its next look-up finds out."""
        if self.wait is not None:
            self.wait.idle_until_s = NEVER

    def pin(self, row: Row) -> None:
        """Keep `row` from eviction until the request loads it, ends, or expires."""
        if (old := self.pinned.get(row.key)) is None or old.invalidated:
            self.pinned[row.key] = row
            self.generation.table.pin_many([row.key])
            self._count()

    def pin_all(self, rows: Sequence[Row]) -> None:
        """The same of many rows, none of which is invalidated."""
        if self.pinned:
            for row in rows:
                self.pin(row)
            return
        keys = [row.key for row in rows]
        self.pinned.update(zip(keys, rows, strict=True))
        self.generation.table.pin_many(keys)
        self._count()

    def forget_dead(self, keys: Iterable[Key]) -> None:
        """Rows of these keys that no look-up finds any more, as their loads have failed, are asked for anew."""
        for key in keys:
            if (row := self.pinned.get(key)) is not None and row.removed:
                del self.pinned[key]
        self._count()

    # --- inside ------------------------------------------------------------------------------------------------

    def _forget_choice(self) -> None:
        self.chosen = self.wait = self.lost = None
        self.hit_end = 0

    def _count(self) -> None:
        """What it pins counts as pinned by a waiting request for as long as it asks for more."""
        counted = len(self.pinned) if self.wanted and self.waiting else 0
        if counted != self._counted_as_waiting:
            self.generation.pinned_by_waiting += counted - self._counted_as_waiting
            self._counted_as_waiting = counted
