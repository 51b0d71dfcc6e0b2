"""Rows: `TierRows` is the table of a tier's, the host's too: which keys it has, and what goes next. `Row` is one of the
host region, and what keeps it there."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from functools import cache
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from nixl_tiers.base import native
from nixl_tiers.base.chunk import Key
from nixl_tiers.core.deferred_free import DeferredFree

ALL_SLOTS: Final = 1 << 63
NO_ID: Final = 0
MAX_USES: Final = 16384  # rows whose uses wait to be taken; of more, those used last are not noted
MAX_VICTIMS: Final = 1024  # of a table, that are being evicted at a time
MOST_TICK: Final = 1 << 39  # a higher one, which only a defect makes, must not be the newest for ever


class Found(NamedTuple):
    """What is known of a key's row. `id`: another one each time that a row is added. `tenant`: 0: none with a quota."""

    slot: int
    tick: int
    id: int
    pins: int
    stored: bool
    evicting: bool
    tenant: int = 0


class TierRows(Protocol):
    """Every call takes microseconds, and where it is given many keys, or a count, about one for each.

    Not thread-safe; it is freed without the interpreter's lock. Keys have at most 255 bytes, slots are below 2^32 - 1.
    """

    def __len__(self) -> int: ...

    def __contains__(self, key: Key) -> bool: ...

    def add(self, key: Key, slot: int, tick: int, stored: bool, tenant: int = 0, /) -> int:
        """A new row; its id, or NO_ID if the key is known: its row is confirmed then (`begin_listing`)."""

    def get(self, key: Key, /) -> tuple[int, int, int, int, bool, bool, int] | None:
        """As `Found`."""

    def is_stored(self, key: Key, /) -> bool:
        """Whether the key has a row whose first write has ended."""

    def has_many(self, keys: list[Key], stored: bool, /) -> list[bool]:
        """`in`, or `is_stored`, of each key."""

    def touch_many(self, keys: list[Key], tick: int, /) -> None:
        """Rows are used, in prefix order: those that are being evicted stay. A tick that is not later than the last one
        changes nothing else."""

    def take_used(self, most: int, /) -> list[tuple[int, int]]:
        """(slot, tick) of up to so many rows that were touched since they were taken last, the first ones first. Those
        that are still being stored stay."""

    def pin(self, key: Key, /) -> tuple[int, int] | None:
        """(slot, id): the row is not evicted before `unpin`. Pins count. None if the key is unknown."""

    def unpin(self, key: Key, row: int, /) -> None:
        """Does nothing if the key has not the row of this id any more. NO_ID: whichever."""

    def pin_many(self, keys: list[Key], /) -> None:
        """`pin` of those that are known."""

    def unpin_many(self, keys: list[Key], /) -> None:
        """The same, whichever rows they have."""

    def stored(self, key: Key, row: int, /) -> bool:
        """The row's first write has ended; False if the key has not the row of this id any more."""

    def stored_many(self, keys: list[Key], /) -> None:
        """The same of those that are known, whichever rows they have."""

    def select(self, count: int, /) -> list[Key]:
        """The next victims are being evicted from now on: they leave the order, and stay."""

    def cancel(self, key: Key, tick: int, /) -> bool:
        """A row that is being evicted stays, as one used at this tick if that is later. False if it is none."""

    def cancel_all(self) -> None:
        """All rows that are being evicted are back in their places."""

    def evicting(self) -> int:
        """How many rows are being evicted."""

    def is_evicting(self, key: Key, /) -> bool: ...

    def evict(self, count: int, /) -> list[tuple[Key, int]]:
        """(key, slot) of rows that are gone: of those that are being evicted, and then of the next victims."""

    def evict_of(self, tenant: int, count: int, /) -> list[tuple[Key, int]]:
        """The same of this tenant's rows."""

    def count_of(self, tenant: int, /) -> int:
        """How many rows of this tenant there are, in whatever state."""

    def remove(self, key: Key, row: int, /) -> int:
        """Whatever its state: its slot, or -1 if the key has not the row of this id. NO_ID stands for any."""

    def begin_listing(self) -> None:
        """Every row is to be confirmed: by `list_columns`, or by being added. Else `sweep` removes it."""

    def list_columns(  # noqa: PLR0917 - as the native table is called
        self,
        slots: Any,
        ticks: Any,
        records: Any,
        width: int,
        start: int,
        stop: int,
        taken: Any,
        limit: int,
        base: int = 0,
        /,
    ) -> tuple[int, int, int, list[tuple[int, Key]]]:
        """Rows that the medium lists, from place `start` to `stop` of these columns: uint32 slots, uint64 ticks, and
        records of `width` bytes, each a byte of length, the key and padding. They may hold anything.

        `taken`: a byte for each slot, 1 if it is in use, which is kept up to date; None where slots only count. Not
        added is what is in a taken slot, or not below `limit`, or known in another slot. Returns how many were added,
        one more than their highest slot, the highest tick of all, and (slot, key) of what was not added. `base`: what
        the medium calls slot 0 is known here as this, and so in (slot, key)."""

    def sweep(self, start: int, count: int, limit: int, low: int, high: int, /) -> tuple[int, list[tuple[Key, int]]]:
        """Remove stored rows in slots from `low` to `high` that are not confirmed, or in slots not below `limit`, but
        not those that are pinned. Looks at `count` places from `start` on; returns where to go on, or -1 at the end,
        and (key, slot) of what was removed."""

    def some(self, start: int, count: int, /) -> tuple[int, list[Key]]:
        """Where to go on, and the keys of the rows in `count` places from `start` downwards, and round, each once."""

    def oldest(self) -> int | None:
        """The tick of the next victim."""


def room_for_victims(rows: TierRows, count: int) -> int:
    """How many of `count` more rows may be selected."""
    return max(0, min(count, MAX_VICTIMS - rows.evicting()))


@cache
def _table() -> Any:
    native.opened(native.TIER_ROWS)
    from nixl_tiers.core import _tier_rows  # type: ignore[attr-defined]

    return _tier_rows.TierRows


def make_rows(uses: bool) -> TierRows:
    """Without rows. `uses`: whether `take_used` is going to be called. Raises NotBuilt."""
    rows: TierRows = _table()(MAX_USES if uses else 0)
    return rows


CPU = "cpu"


class RowState(IntEnum):
    FILLING = 0  # workers are writing it
    LOADING = 1  # a mover is writing it
    READY = 2


FILLING, LOADING, READY = RowState  # members of an enum are found by a slow attribute look-up before Python 3.12


class Generation:
    """The rows that were inserted between two resets: it ends for all of them at once.

    `table`: which keys they have, the order in which they go, and their pins. `pinned_by_waiting`: how many rows are
    pinned by requests that wait for more; one of two requests counts twice. `number`: of how many resets there were
    before.
    """

    __slots__ = ("ended", "number", "pinned_by_waiting", "table")

    def __init__(self, number: int = 0) -> None:
        self.ended = False
        self.pinned_by_waiting = 0
        self.number = number
        self.table = make_rows(uses=False)

    def end(self, garbage: DeferredFree) -> None:
        """None of its rows is found any more: it has none, however long some of them are still used."""
        self.ended = True
        garbage.add(self.table)
        self.table = make_rows(uses=False)

    def unpin(self, rows: Iterable[Row]) -> None:
        """Take a pin from each of its own that a look-up still finds: what it does not find is in no order."""
        self.table.unpin_many([row.key for row in rows if row.generation is self and not row.removed])


class Row(msgspec.Struct, gc=False, eq=False):
    """One chunk in the host region. Refcounts: `worker_refs`, `mover_refs`: open jobs of workers and movers on its
    bytes; `call_refs`: calls of threads that use the store without an engine. Each of them pins it in the table of its
    generation, if it is READY, as requests do that wait and need it. `retained_until`: it is not evicted before this
    second. `host_only`: not written below, since only requests that forbid it have used it. `invalidated`: no look-up
    finds it any more, since it was `removed` or its generation has ended, and it is free as soon as no job uses it.

    Hidden from Python's garbage collector, which would otherwise traverse hundreds of thousands of rows at a time in
    the scheduler's thread. So a row must never refer to anything that may refer to a row.
    """

    key: Key
    index: int
    order: int  # rows of one prefix are inserted in its order
    state: RowState
    generation: Generation
    worker_refs: int = 0
    mover_refs: int = 0
    call_refs: int = 0
    store_seq: int = 0
    tick: int = 0  # of its last use: lower copies are as recent as that
    sealed: bool = False
    sealing: bool = False
    removed: bool = False
    retained_until: int = 0
    host_only: bool = False
    source: str = CPU
    missing: int = 0  # sub-blocks at its beginning that hold nothing
    tenant: int = 0  # whose quota it counts against; 0: none

    @property
    def invalidated(self) -> bool:
        return self.removed or self.generation.ended

    @property
    def referenced(self) -> bool:
        """Whether a job or a call reads or writes it."""
        return bool(self.worker_refs or self.mover_refs or self.call_refs)
