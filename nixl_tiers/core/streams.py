"""Streams: loads that are prepared while some of their rows are still to come (docs/internals/streams.md).

A request is told early that it hits (`accepts`), its load is prepared with what is there or can come (`begin`), and
what turns out not to come in time is cut off (`cut`): workers copy what is before, and the engine computes the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol

from nixl_tiers.base.chunk import Key
from nixl_tiers.base.row_words import MAX_STREAMS
from nixl_tiers.core import pricing
from nixl_tiers.core.chain_rows import ChainRows, below
from nixl_tiers.core.requests import Early, Request
from nixl_tiers.core.rows import Row, RowState
from nixl_tiers.core.state import CascadeState
from nixl_tiers.core.worth import Worth

MAX_ROWS: Final = 512  # to come of one stream: they are inserted in one hold of the lock
MOST_WAIT_S: Final = 0.5  # that is expected for the last of them
WATCH_S: Final = 0.04  # between two judgements of the open streams: a little less than the supervisor's tick
GRACE_S: Final = 0.25  # beyond its deadline, after which workers end a stream that the core has not cut
_READY: Final = RowState.READY
Reason = Literal["failed", "late", "gone", "slower", "waited", "aborted", "reset"]
"""Why a stream was cut, as counted: `streams_cut_*` of core/stats.py."""


class StreamWords(Protocol):
    """The words of rows and the limits of streams, which workers read while they copy."""

    def waits(self, row: int) -> None:
        """The host row of this number waits for the mover that loads it."""

    def limit(self, slot: int, stream: int, place: int) -> None:
        """From this place of the stream's rows on, nothing will come."""


class StreamPlan(NamedTuple):
    """Of a load that is a stream: its number, and that of the slot for its limit; `coming`: the places in the load's
    rows of those that are still to come, or will not, ascending; workers end it at `deadline_s`, in the core's time."""

    slot: int
    stream: int
    coming: tuple[int, ...]
    deadline_s: float


@dataclass(slots=True, eq=False)
class Stream:
    """`rows` of its load, of which those at the places `coming` were to come; those from `limit` on will not. `seen`:
    so many of `coming` have arrived, from the first."""

    request: str
    plan: StreamPlan
    rows: list[Row]
    coming: list[int]
    limit: int
    early: Early
    deadline_s: float
    seen: int = 0

    @property
    def first_to_come(self) -> int | None:
        """The place of the first row that has not arrived; None if none is to come any more."""
        coming = self.coming
        while self.seen < len(coming) and self.rows[coming[self.seen]].state is _READY:
            self.seen += 1
        place = coming[self.seen] if self.seen < len(coming) else self.limit
        return place if place < self.limit else None


class Streams:
    """The open streams, of a request one at a time."""

    def __init__(self, state: CascadeState, worth: Worth, words: StreamWords | None) -> None:
        """`words`: None if there are to be no streams."""
        self._state = state
        self._host = state.host
        self._worth = worth
        self._words = words
        self._open: dict[int, Stream] = {}  # by number
        self._of_row: dict[int, tuple[Stream, int]] = {}  # by Row.order, of rows to come: and their places
        self._slots = [*range(MAX_STREAMS)]
        self._number = 0
        self._told = (-1, 0)  # the last step in which requests were told early, and how many
        self._watch_at_s = float("-inf")
        if words is not None:
            self._host.waits = words.waits

    # --- of requests -------------------------------------------------------------------------------------------

    def accepts(self, request: Request, found: ChainRows, early: Early) -> int:
        """Whether to tell the request early that it hits up to token `early.chosen`: how many rows of that are still
        to come. 0: no, or it need not be told early."""
        told = self._told[1] if self._told[0] == self._host.step else 0
        if (
            self._words is None
            or request.told_early
            or early.expected_s - early.told_s > MOST_WAIT_S
            or len(self._open) + told >= MAX_STREAMS
        ):
            return 0
        stop = early.chosen // early.chunk_tokens
        stored = {number: len(below(places, stop)) for number, places in found.stored.items()}
        coming = below(found.coming, stop)
        rows, fresh = [self._host.index[found.group.keys[place]] for place in coming], sum(stored.values())
        count = len(coming) + fresh
        if not 0 < count <= MAX_ROWS:
            return 0
        for number, new in stored.items():
            tier = self._state.tiers[number]
            if tier.rows_loading + len(tier.to_stream) + new > self._state.load_window:
                return 0
        here = found.rows[: stop - found.first]
        if not all(map(_comes, rows)) or any(row is not None and row.worker_refs for row in here):
            return 0
        for row in filter(None, here):
            row.step = self._host.step  # so that it is not evicted
        if fresh > self._room(fresh, request.tenant):
            return 0
        self._told = (self._host.step, told + 1)
        _, first = min(
            (places[0], number) for lists in (found.stored, found.loading) for number, places in lists.items()
        )
        request.early, request.told_early = early._replace(tier=self._state.tiers[first].spec.name), True
        request.rescan = True  # should its load not be prepared, it begins anew
        return count

    def begin(self, keys: Sequence[Key], request: Request, tick: int) -> tuple[list[Row], Stream | None]:
        """The load of a request that was told early is prepared: the rows of `keys` that are there or can come, up to
        the first that is not. All of them may be there by now: then it is no stream."""
        early, request.early = request.early, None
        assert early is not None, "load of a row that is not ready"
        rows: list[Row] = []
        coming: list[int] = []
        for key in keys:
            row = self._host.index.get(key)
            if row is None:
                row = self._insert(key, request, tick, early.told_s)
            elif row.state is not _READY and not _comes(row):
                break
            if row is None:
                break
            if row.state is not _READY:
                coming.append(len(rows))
            rows.append(row)
        whole = len(rows) == len(keys)
        if whole and not coming:
            return rows, None
        self._number = (self._number + 1) % (1 << 32)
        deadline_s = early.told_s + self._state.limits.wait_s
        never = range(len(rows), len(keys))
        plan = StreamPlan(self._slots.pop(), self._number, (*coming, *never), deadline_s + GRACE_S)
        stream = self._open[self._number] = Stream(request.name, plan, rows, coming, len(rows), early, deadline_s)
        self._of_row.update({rows[place].order: (stream, place) for place in coming})
        self._write(stream)
        counters = self._state.counters_of(early.tier)
        counters.streams += 1
        counters.streams_cut_gone += not whole
        self._state.turn_due = True
        return rows, stream

    def ended(self, stream: Stream) -> None:
        """Workers are done with its load: its slot may be used again."""
        del self._open[stream.plan.stream]
        self._slots.append(stream.plan.slot)
        for place in stream.coming:
            self._of_row.pop(stream.rows[place].order, None)

    # --- of rows -----------------------------------------------------------------------------------------------

    def wants(self, row: Row) -> bool:
        """Whether a row that is queued for a stream is still to be loaded for it."""
        stream, place = self._of_row.get(row.order, (None, 0))
        return stream is not None and place < stream.limit and not row.invalidated

    def arrived(self, row: Row) -> None:
        """A row is READY, and whole unless it lacks sub-blocks, with which workers have not heard of it."""
        if row.missing:
            self.lost(row, "failed")
        else:
            self._of_row.pop(row.order, None)

    def lost(self, row: Row, reason: Reason) -> None:
        """A row will not come: if it is one of a stream's, that is cut there."""
        stream, place = self._of_row.pop(row.order, (None, 0))
        if stream is not None:
            self._cut(stream, place, reason)

    # --- cuts --------------------------------------------------------------------------------------------------

    def cut(self, name: str, place: int = 0, reason: Reason = "aborted") -> None:
        """Of this request's stream, if it has one, nothing comes from `place` on."""
        for stream in self._open.values():
            if stream.request == name:
                self._cut(stream, place, reason)

    def cut_all(self, reason: Reason = "reset") -> None:
        """The same of all streams, from their beginning on, as the bytes may no longer match the weights."""
        for stream in self._open.values():
            self._cut(stream, 0, reason)

    def reset(self) -> list[Row]:
        """The loads of before are not reported as ended. Another number in a slot cuts, too. Returns their rows that
        were given up, which only they still hold."""
        self.cut_all()
        rows = (stream.rows[place] for stream in self._open.values() for place in stream.coming)
        held = [row for row in rows if row.removed]
        self._open, self._of_row, self._slots = {}, {}, [*range(MAX_STREAMS)]
        return held

    def watch(self, now: float) -> None:
        """Call at every turn: cuts what is late, and what to compute is quicker by now than to wait for it."""
        if not self._open or now < self._watch_at_s:
            return
        self._watch_at_s = now + WATCH_S
        for stream in self._open.values():
            if (place := stream.first_to_come) is None:
                continue
            if now > stream.deadline_s:
                self._blame(stream, now)
                self._cut(stream, place, "waited")
            elif self._margin_s(stream, place, now) < 0:
                self._cut(stream, place, "slower")

    # --- inside ------------------------------------------------------------------------------------------------

    def _room(self, count: int, tenant: int) -> int:
        """How many of so many host rows are free, once some were evicted: none that waits to be written."""
        room = self._host.room_of(tenant)
        if count > room and self._state.below_host is None:
            if not any(tier.rows_to_write for tier in self._state.tiers):
                room = self._state.make_room(count, tenant)
            elif not tenant:
                room = self._state.make_written_room(count)
        return room

    def _insert(self, key: Key, request: Request, tick: int, now: float) -> Row | None:
        """A row for a key that a tier can load now, queued to be loaded; None if there is no room, or no such tier."""
        if self._host.room_of(request.tenant) <= 0:
            return None
        for tier in self._state.tiers:
            if (request.allowed is None or tier.number in request.allowed) and tier.can_load(key, now):
                row = self._host.insert(key, RowState.LOADING, tick, request.tenant)
                row.source = tier.spec.name
                tier.to_stream.append(row)
                return row
        return None

    def _cut(self, stream: Stream, place: int, reason: Reason) -> None:
        if place >= stream.limit:
            return
        row = stream.rows[place]
        stream.limit = place
        self._write(stream)
        counters = self._state.counters_of(stream.early.tier if row.state is _READY else row.source)
        name = f"streams_cut_{reason}"
        setattr(counters, name, getattr(counters, name) + 1)

    def _write(self, stream: Stream) -> None:
        assert self._words is not None
        self._words.limit(stream.plan.slot, stream.plan.stream, stream.limit)

    def _margin_s(self, stream: Stream, place: int, now: float) -> float:
        """How much longer what is to come may take for that to be as quick as to compute it."""
        early = stream.early
        have, upto = (early.start + each * early.chunk_tokens for each in (place, stream.limit))
        saved_s = self._worth.saved_s(have, upto, early.end)
        if saved_s is None:
            return 0.0
        left = below(stream.coming, stream.limit)[stream.seen :]
        sources = {stream.rows[each].source for each in left}
        prices = [self._state.price_of(tier) for tier in self._state.tiers if tier.spec.name in sources]
        rest_s = len(left) * max((price.row_s for price in prices), default=0.0)
        latency_s = max((price.latency_s for price in prices), default=0.0)
        return saved_s - pricing.left_s(now, early.expected_s, rest_s, latency_s)

    def _blame(self, stream: Stream, now: float) -> None:
        """The stream is late: a failure for the breakers of the movers that it waits for."""
        late = [stream.rows[place] for place in stream.coming[stream.seen :]]
        for tier in self._state.tiers:
            keys = [row.key for row in late if row.source == tier.spec.name and row.state is RowState.LOADING]
            for mover in self._state.movers_that_move(tier, keys):
                mover.loads.record(False, now)


def _comes(row: Row) -> bool:
    """Whether a mover is loading a row that no load reads already."""
    return row.state is RowState.LOADING and row.mover_refs > 0 and not row.worker_refs
