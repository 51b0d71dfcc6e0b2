"""A request that waits for promotions: what it asked for, what it has pinned, how long it may wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from nixl_tiers.base.chunk import Key
from nixl_tiers.core.rows import Generation, Row

NEVER: Final = float("-inf")


@dataclass(slots=True)
class Wait:
    """What a request that waits for a part of its chain goes by. Positions are in tokens of the request."""

    began_s: float
    expected_s: float  # when all that it waits for is expected to be in host memory
    step_tokens: int
    end: int  # of its chain
    places: list[tuple[int, int]]  # the tiers, by number, and the place of its last row in the queue of each


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


class Request:
    """Scheduler-side state of one request, from its first look-up to its end.

    Its scan of a step goes up the prefix, key by key. The first scan that meets stored rows collects all of them, so
    that they can be promoted together; later scans of the same wait stop at the first key that is not there yet.
    """

    __slots__ = (
        "_counted_as_waiting",
        "answered",
        "ascending",
        "asked",
        "check_deadline_s",
        "check_queued",
        "chosen",
        "deadline_s",
        "expired",
        "first_key_found",
        "first_scan",
        "generation",
        "hit_end",
        "idle_until_s",
        "in_prefetch_queue",
        "load_failed",
        "lost",
        "lowest",
        "missing",
        "name",
        "open_checks",
        "pending",
        "pinned",
        "position",
        "rescan",
        "rows_awaited",
        "rows_come",
        "scan_hits",
        "seen_s",
        "step",
        "stopped",
        "tick",
        "unknown",
        "wait",
        "waited_since_s",
        "wishes",
    )

    def __init__(self, name: str, generation: Generation, wishes: RequestWishes = NO_WISHES) -> None:
        self.name = name
        self.generation = generation
        self.wishes = wishes
        self.tick = 0 if wishes.evict_first else None
        # One deadline for all that it waits for: armed at its first PENDING, and again only after a load was prepared.
        self.deadline_s: float | None = None
        # For metrics: when its wait began, when it last looked up while it waited, and the lowest tier that it asked.
        self.waited_since_s: float | None = None
        self.seen_s = 0.0
        self.lowest = 0
        self.pending = False  # it waits for promotions, or has rows pinned
        self.in_prefetch_queue = False  # and it was not looked up yet (prefetch_queue.py)
        self.expired = False  # nothing is promoted for it any more: too late, computing is quicker, or it has ended
        self.lost: int | None = None  # the tier that lacked one of its rows: what is behind it there is not loaded
        self.load_failed = False  # one of its loads failed: it computes everything itself
        # Keys queued for promotion on its behalf: True until they have come, False once the host had no room.
        self.asked: dict[Key, bool] = {}
        self.rows_awaited = 0  # how many of them are True
        self.rows_come = 0  # how many have come, of all that it has ever asked for
        self.pinned: dict[Key, Row] = {}
        self._counted_as_waiting = 0  # what of Generation.pinned_by_waiting it accounts for
        self.scan_hits: list[Row] = []  # hits of the scan so far, to be pinned if the request turns out to wait
        self.step = -1
        self.position: int | None = None
        self.ascending = True
        self.first_scan = True
        self.stopped = False
        self.answered = False  # this step's scan had its answer at its first key
        self.missing: deque[tuple[int | None, Key]] = deque()  # positions and keys that it waits for, in prefix order
        # Existence checks (existence.py): the unknown keys, and how many open checks it waits for.
        self.unknown: dict[Key, None] = {}
        self.check_queued = False
        self.open_checks = 0
        self.check_deadline_s: float | None = None
        self.first_key_found = False
        self.rescan = False
        # Load or recompute (lookup.py): nothing is loaded beyond this token, whatever turns up there meanwhile.
        self.chosen: int | None = None
        self.hit_end = 0  # up to which token its last look-up of its chain found everything, if that waits for nothing
        self.wait: Wait | None = None  # what its wait is judged by
        self.idle_until_s = NEVER  # its wait need not be judged before, unless its last row comes

    @property
    def waiting(self) -> bool:
        return self.pending and not self.expired

    def begin(self, step: int, position: int | None) -> bool:
        """A look-up at `position` (the key's end token) in `step`; a new step is a new scan. Returns whether it is the
        first look-up of a scan that only has to find out whether all that it waits for is there."""
        new = step != self.step
        if new:
            if self.step >= 0:
                self.first_scan = not self.pending or self.rescan
                self.rescan = False
            self.step = step
            self.stopped = self.answered = False
            self.scan_hits.clear()
            if self.first_scan:
                self.missing.clear()
        elif position is None or (self.position is not None and position <= self.position):
            # A windowed group is scanned from its end: stopping early would lose the hit.
            self.ascending = False
        self.position = position
        return new and self.ascending and not self.first_scan and self.waiting

    def ask(self, keys: Collection[Key]) -> None:
        """Rows of `keys` are queued to be promoted on its behalf. It asks for none of them already."""
        self.asked.update(dict.fromkeys(keys, True))
        self.rows_awaited += len(keys)
        self._count()

    def row_arrived(self, key: Key) -> None:
        """This row is in host memory: it asks for it no more."""
        self.rows_come += self.asked.get(key, False)
        self._ask_no_more(key)

    def withdraw(self, key: Key) -> None:
        """It asks for this row no more: its tier cannot load it now."""
        self._ask_no_more(key)
        self.idle_until_s = NEVER

    def refuse(self, key: Key) -> None:
        """The host has no room for a row that it asked for, and will not have any."""
        self.withdraw(key)
        self.asked[key] = False

    def begin_wait(self) -> None:
        """From now on rows are pinned for it."""
        self.pending = True
        self._count()

    def expire(self) -> None:
        """Nothing is promoted on its behalf any more."""
        self.expired = True
        self._count()

    def join_prefetch_queue(self) -> None:
        self.in_prefetch_queue = True
        self._count()

    def leave_prefetch_queue(self) -> None:
        self.in_prefetch_queue = False
        self._count()

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

    def unpin(self, row: Row) -> None:
        """The row that it waited for will not be ready."""
        self.generation.unpin((row,))
        del self.pinned[row.key]
        self.idle_until_s = NEVER
        self._count()

    def rearm(self) -> None:
        """Its load is prepared: if it comes back after a preemption, it may wait again."""
        self.deadline_s = None
        self.expired = False
        self.chosen = self.wait = self.lost = None
        self.hit_end = 0
        self._count()

    def note_missing(self, key: Key) -> None:
        """A look-up of `key` was answered with PENDING."""
        if self.first_scan or not self.missing:
            self.missing.append((self.position, key))

    def belongs_to(self, generation: Generation) -> None:
        """If there was a reset since its last use, it waits for nothing, and no row of before needs to be unpinned."""
        if self.generation is not generation:
            self.generation = generation
            self.pending = False
            self.chosen = self.wait = self.lost = None
            self.hit_end = 0
            for collection in (self.pinned, self.scan_hits, self.asked):
                collection.clear()
            self.rows_awaited = self._counted_as_waiting = 0

    def release(self) -> None:
        """It waits no longer: unpin its rows, forget what it asked for."""
        self.pending = False
        self.lost = None
        self.generation.unpin(self.pinned.values())
        self.pinned.clear()
        self.scan_hits.clear()
        self.asked.clear()
        self.rows_awaited = 0
        self._count()

    def _ask_no_more(self, key: Key) -> None:
        self.rows_awaited -= self.asked.pop(key, False)
        self._count()

    def _count(self) -> None:
        """What it pins counts as pinned by a waiting request for as long as it waits for more."""
        counted = len(self.pinned) if self.rows_awaited and self.waiting and not self.in_prefetch_queue else 0
        if counted != self._counted_as_waiting:
            self.generation.pinned_by_waiting += counted - self._counted_as_waiting
            self._counted_as_waiting = counted
