"""A row of the host region: what it holds, and what keeps it there."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

import msgspec

from nixl_tiers.base.chunk import Key
from nixl_tiers.core.deferred_free import DeferredFree
from nixl_tiers.core.tier_rows import make_rows

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
