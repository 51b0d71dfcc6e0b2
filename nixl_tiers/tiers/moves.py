"""The one way in which a move lives, whatever the medium.

`store` or `load` accepts a batch of moves -> they wait in order, in units that are moved together -> a unit starts when
its direction has room for one more, loads do not hold up stores, and the tier admits it -> the tier's steps run:
prepare, transfer, verify -> each move ends with an outcome -> the batch is reported when its last move has ended.

A tier says only what differs, for each direction: `MoveQueue`. Its steps are a generator, so that the whole way of a
move is read from top to bottom in one function; it never blocks, but yields what it waits for. Every load goes through
`MovePipeline.verify`: nothing else makes a row a hit.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final

from nixl_tiers.base.chunk import Key, Outcome
from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.base.times import PRODUCTION
from nixl_tiers.memory.seal import Sealer, Verdict
from nixl_tiers.tiers.base import EndedMoves, FinishedBatch, Move
from nixl_tiers.tiers.move_queue import Batch, MoveQueue, Steps, T, Unit
from nixl_tiers.tiers.nixl_agent import Transfer, TransferState

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

HELD_POLL_S: Final = 0.002  # while stores are held up or not admitted, and nothing runs: how often to look again
STORE_POLL_S: Final = 0.001  # while nothing but stores runs, for which no request waits: a look costs 0.1 ms


def finished(work: Future[T]) -> Steps[T]:
    """Wait for what a thread does, and return its result."""
    yield work.done
    return work.result()


def transferred(transfer: Transfer) -> Steps[bool]:
    """Wait for a NIXL transfer and release it. False: it failed, and may have moved any part of its bytes."""
    yield lambda: transfer.state() is not TransferState.PENDING
    transfer.release()
    return transfer.state() is TransferState.DONE


class MovePipeline:
    """All moves of one tier, for the tier's own thread.

    Requests wait for loads. So no store starts while loads wait or run, or the engine copies rows out of the region
    (`held_until_s`); for at most `hold_s`, and then they do for as long, in turns: stores that starved would time out.
    """

    def __init__(
        self,
        loads: MoveQueue,
        stores: MoveQueue,
        *,
        may_start: Callable[[], bool],
        held_until_s: Callable[[], float] = float,
        wakes: bool = False,
        clock: Callable[[], float] = time.monotonic,
        hold_s: float = PRODUCTION.stores_held_s,
    ) -> None:
        """`may_start`: whether anything may start now, on the medium as it is. `held_until_s`: by `clock`, until when
        no store is to start (`HostRegion.stores_held_until_s`). `wakes`: whether the caller of `poll` learns by itself
        that what a unit waits for has happened. `clock`: seconds."""
        self.loads = loads
        self.stores = stores
        self._may_start = may_start
        self._held_until_s = held_until_s
        self._wakes = wakes
        self._hold_s = hold_s
        self._clock = clock
        self._held_since_s: float | None = None  # when loads began to hold up stores
        self._last_id = 0
        self._finished: list[FinishedBatch] = []
        self._partly_ended: dict[int, Batch] = {}
        self._log_once = LogOnce(logger)

    def load(self, moves: Sequence[Move]) -> int:
        """Accept a batch and start what may start; returns its ID."""
        return self._accept(self.loads, moves)

    def store(self, moves: Sequence[Move]) -> int:
        """Accept a batch and start what may start; returns its ID."""
        return self._accept(self.stores, moves)

    def start(self) -> None:
        """Start what waits, as far as there is room for it."""
        self._start(self.loads)
        self._start(self.stores)

    def poll(self) -> int:
        """Go on with what runs; returns how many steps that were. Starts nothing."""
        return self.loads.poll() + self.stores.poll()

    def give_up(self) -> None:
        """End what has not been started as FAILED."""
        self.loads.give_up()
        self.stores.give_up()

    def verify(
        self,
        sealer: Sealer,
        key: Key,
        row: NDArray[np.uint8],
        copy: NDArray[np.uint8] | None = None,
        *,
        name: Callable[[], str],
        expire_if_due: Callable[[int], bool],
        forget: Callable[[Outcome], None],
        last_try: bool = True,
    ) -> Outcome | None:
        """What a load has brought. OK: the region holds the bytes whose seal was verified, and they are not too old.

        `row`: uint8, (row_bytes,), where the medium put it; `copy`: the region's row, if that is another: it is copied
        in the same pass. `name`: of the row, for the log. `expire_if_due`: whether a row that was sealed then (Unix
        seconds) is too old. `forget` has the medium drop it, lest it is loaded again and again: it is CORRUPT, or
        expired, which is MISSING. A corrupt one before the `last_try` stays, and has no outcome yet.
        """
        expired = expire_if_due(sealer.sealed_at(row))
        verdict = sealer.verify(row, key, None if expired else copy)
        return self.judge(verdict, expired=expired, name=name, forget=forget, last_try=last_try)

    def judge(
        self,
        verdict: Verdict,
        *,
        expired: bool,
        name: Callable[[], str],
        forget: Callable[[Outcome], None],
        last_try: bool = True,
    ) -> Outcome | None:
        """The same for a row whose seal was verified where it was moved."""
        if verdict is Verdict.OK and not expired:
            return Outcome.OK
        outcome = Outcome.MISSING if verdict is Verdict.OK else Outcome.CORRUPT
        if outcome is Outcome.CORRUPT:
            if not last_try:
                return None
            self._log_once.report("corrupt", f"{name()} is not the expected row ({verdict.name})")
        forget(outcome)
        return outcome

    def make_way(self, unit: Unit) -> None:
        """For the last step of a running unit: let others of its direction start before it goes on."""
        unit.queue.running.remove(unit)
        self._start(unit.queue)

    def take(self) -> list[FinishedBatch]:
        """The batches that have ended since the last call."""
        finished = [*self._finished]
        self._finished.clear()
        return finished

    def take_ended(self) -> list[EndedMoves]:
        """The moves that have ended since the last call, of batches that have not."""
        ended = [EndedMoves(batch.id, batch.ended) for batch in self._partly_ended.values()]
        for batch in self._partly_ended.values():
            batch.ended = {}
        self._partly_ended.clear()
        return ended

    def unfinished(self) -> Iterator[Move]:
        """Every move that waits or runs."""
        for queue in (self.loads, self.stores):
            for unit in (*queue.waiting, *queue.running):
                yield from unit.moves

    @property
    def busy(self) -> bool:
        """Whether anything waits, runs, or is still to be taken."""
        return bool(self.loads.waiting or self.stores.waiting) or not self.quiet

    @property
    def quiet(self) -> bool:
        """Whether nothing runs, and every batch that has ended was taken."""
        return not (self.loads.running or self.stores.running or self._finished)

    @property
    def poll_s(self) -> float:
        """In how many seconds `poll` and `start` may find something to do, at the earliest."""
        if self._wakes:
            return HELD_POLL_S if self.loads.held or self.stores.held else math.inf
        if self.loads.waiting or self.loads.running:
            return 0.0
        if self.stores.running:
            return STORE_POLL_S
        return HELD_POLL_S if self.stores.waiting else 0.0  # for what the tier waits to admit them is not known

    def _start(self, queue: MoveQueue) -> None:
        if self._may_start() and (queue is self.loads or not self._holds_stores()):
            queue.start((lambda: True) if queue is self.loads else lambda: not self._holds_stores())

    def _holds_stores(self) -> bool:
        now = self._clock()
        in_the_way = self.loads.waiting or self.loads.running or now < self._held_until_s()
        if not (self.stores.waiting and in_the_way):
            self._held_since_s = None
            return False
        if self._held_since_s is None or now - self._held_since_s >= 2 * self._hold_s:
            self._held_since_s = now
        return now - self._held_since_s < self._hold_s

    def _accept(self, queue: MoveQueue, moves: Sequence[Move]) -> int:
        self._last_id += 1
        if moves:
            queue.add(Batch(self._last_id, len(moves), self._moves_ended), moves)
        else:
            self._finished.append(FinishedBatch(self._last_id, []))
        self.start()
        return self._last_id

    def _moves_ended(self, batch: Batch) -> None:
        if batch.left:
            self._partly_ended[batch.id] = batch
        else:
            self._partly_ended.pop(batch.id, None)
            self._finished.append(FinishedBatch(batch.id, batch.outcomes))
