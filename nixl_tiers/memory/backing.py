"""Memory behind the region's rows: allocated near the GPU that uses it, and page-locked, a piece at a time, while the
engine starts and serves.

No row is handed out before its memory is there: a first use would wait for page faults, with 4 KiB pages twice as long
as the copy itself takes. Each rank publishes how many rows are (`RankRecords.publish_ready`), and the core hands out
the fewest that any rank names.

Pages lie where the thread runs that touches them first. So each rank touches its own cells of a piece, on the
processors of its GPU's NUMA node, and nobody locks a piece before all ranks have: locking would place the rest. A
policy for each cell (`mbind`) would split the mapping into one for each, of which a process has few
(`vm.max_map_count`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

from nixl_tiers.base.chunk import PAGE, PIECE_BYTES, align, pieces_of
from nixl_tiers.memory.pages import HUGE_PAGE_BYTES, populate_part

if TYPE_CHECKING:
    from nixl_tiers.memory.region import HostRegion

PART_BYTES: Final = 32 << 20  # what a thread asks for at once, which bounds how long a stop takes
PAUSE_S: Final = 0.01  # after each piece: others want the same locks of the kernel and of the driver
POLL_S: Final = 0.05
LOOK_S: Final = 0.2  # between two looks of a mover at how far the ranks have come, for as long as they have not
MAP_PAUSE_S: Final = 0.004  # after each part that is only mapped, which takes 2 ms
PROGRESS_S: Final = 10.0
NICE: Final = 10  # of the threads that allocate what the start does not wait for

log = logging.getLogger(__name__)

Lock = Callable[[int, int], bool]  # page-locks rows from the first number to before the second; False: it cannot


class Backing:
    """Gives a rank's process all rows of its region, in order.

    ready    so many rows have their memory, as far as this rank is concerned
    """

    def __init__(self, region: HostRegion, rank: int = 0, cpus: Collection[int] = (), threads: int = 4) -> None:
        """`cpus`: the processors near this rank's GPU, of those that this process may use; none: any will do."""
        self._region = region
        self._rank = rank
        self._cpus = frozenset(cpus)
        self._pieces = pieces_of(region.rows, region.geometry.row_bytes, PIECE_BYTES)
        self._touched = self._backed = 0  # pieces
        self._lock: Lock | None = None
        self._stopping = threading.Event()
        self._may_lock = threading.Event()
        self._under_way = threading.Lock()  # held while a piece is allocated or locked
        self._threads = max(1, min(threads, len(os.sched_getaffinity(0))))
        self._thread = threading.Thread(target=self._run, name="nixl_tiers memory", daemon=True)
        self._told_s = time.monotonic()
        self.ready = 0
        region.ranks.publish_ready(rank, 0)
        region.at_close(self.stop)

    def back_first(self, timeout_s: float) -> int:
        """Allocate the first piece now, after waiting for other ranks to touch theirs, at most `timeout_s`; how many
        rows have their memory: none if there is none for them."""
        if self._touch_next():
            until_s = time.monotonic() + timeout_s
            while not self._all_touched(0) and time.monotonic() < until_s and not self._stopping.wait(0.001):
                pass
            self._map(0)
        return 0 if self._region.lacks_memory else self._pieces[0][1]

    def go_on(self, lock: Lock | None = None, *, at_first_step: bool = False) -> None:
        """Go on in the background. `lock`: page-locks a piece; of the first the caller has seen to. `at_first_step`:
        pieces are locked from `allow_locking` on."""
        self._lock = lock
        if not at_first_step:
            self._may_lock.set()
        if self._touched and (lock is not None or not self._region.lacks_memory):
            self._backed = 1
            self._publish(self._pieces[0][1])
        self._thread.start()

    def allow_locking(self) -> None:
        """The engine has captured its graphs: a capture forbids what locking calls, on any thread."""
        self._may_lock.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it has ended; False after `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def drain(self) -> None:
        """Return when the piece that is under way now has ended."""
        with self._under_way:
            pass

    def stop(self) -> None:
        """End after the piece under way. When this returns, no thread touches the memory any more."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    # --- inside ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._work()
        except Exception:
            log.exception("nixl_tiers: the memory of the host region is not allocated any further")
            self._end_for_all()

    def _work(self) -> None:
        while self._backed < len(self._pieces) and not (self._stopping.is_set() or self._region.lacks_memory):
            waits = self._lock is not None and not self._may_lock.is_set()
            touches = self._touched < len(self._pieces) and (waits or self._touched == self._backed)
            if not touches and (waits or not self._all_touched(self._backed)):
                self._stopping.wait(POLL_S)
                continue
            with self._under_way:
                good = self._touch_next() if touches else self._back_next()
            if not good:
                return
            self._tell()
            self._stopping.wait(PAUSE_S)
        if self._backed == len(self._pieces):
            if self._rank == 0:
                self._region.note_pages(prefaulted=True)
        elif self._region.lacks_memory:
            self._end_early()

    def _touch_next(self) -> bool:
        """Touch this rank's own cells of a piece."""
        begin, end = self._pieces[self._touched]
        if error := self._populate(own_spans(self._region, self._rank, begin, end)):
            return self._give_up(error)
        if self._stopping.is_set():
            return False
        self._touched += 1
        self._region.ranks.publish_touched(self._rank, self._touched)
        return True

    def _back_next(self) -> bool:
        begin, end = self._pieces[self._backed]
        if not self._map(self._backed) or self._stopping.is_set():
            return False
        if self._lock is not None and not self._lock(begin, end):
            self._end_for_all()
            return False
        self._backed += 1
        self._publish(end)
        return True

    def _map(self, piece: int) -> bool:
        """All cells of a piece: what other ranks have allocated is only mapped, which is fast."""
        if self._region.ranks.count == 1:  # it has touched all of it
            return True
        begin, end = (row * self._region.geometry.row_bytes for row in self._pieces[piece])
        error = self._populate([(begin, end)])
        return not error or self._give_up(error)

    def _all_touched(self, piece: int) -> bool:
        return self._region.ranks.fewest_touched > piece

    def _publish(self, rows: int) -> None:
        self.ready = rows
        self._region.ranks.publish_ready(self._rank, rows)

    def _give_up(self, error: int) -> bool:
        """Rows that need no lock are used all the same: their memory is allocated then, if it can be."""
        log.warning(
            "nixl_tiers: prefaulting ends at %d of %d rows: %s; lower capacity (with a GPU the others are not used)",
            self._pieces[self._backed - 1][1] if self._backed else 0,
            self._region.rows,
            os.strerror(error),
        )
        self._end_for_all()
        return False

    def _end_for_all(self) -> None:
        """No rank goes on, and nobody waits for what is missing."""
        self._region.note_pages(prefaulted=False)
        self._end_early()

    def _end_early(self) -> None:
        self._region.ranks.publish_touched(self._rank, len(self._pieces))
        if self._lock is None:  # else no row may be used that is not locked as those before are
            self._publish(self._region.rows)

    def _populate(self, spans: Sequence[tuple[int, int]]) -> int:
        """Allocate and map these bytes of the rows, on some threads; returns 0 or an errno."""
        parts, errors = SimpleQueue[tuple[int, int]](), list[int]()
        for part in _cut(spans):
            parts.put(part)

        def work() -> None:
            with contextlib.suppress(OSError):
                if self._cpus:
                    os.sched_setaffinity(0, self._cpus)  # of this thread
                if self._touched:  # requests come first
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
            with contextlib.suppress(Empty):
                while not (errors or self._stopping.is_set()):
                    begin, end = parts.get_nowait()
                    if error := populate_part(self._region.address + begin, end - begin):
                        errors.append(error)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(self._threads, parts.qsize()))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return errors[0] if errors else 0

    def _tell(self) -> None:
        now = time.monotonic()
        if now - self._told_s > PROGRESS_S:
            self._told_s = now
            log.info(
                "nixl_tiers: rank %d has the memory of %d of %d rows, and goes on beside the engine",
                self._rank,
                self.ready,
                self._region.rows,
            )


class Mapping:
    """Maps the rows' memory in a process that allocates none of it, as far as others have."""

    def __init__(self, region: HostRegion) -> None:
        self._region = region
        self._stopping = threading.Event()
        self.mapped_bytes = 0
        self._thread = threading.Thread(target=self._run, name="nixl_tiers mapping", daemon=True)
        region.at_close(self.stop)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it has ended; False after `timeout_s`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """End early. When this returns, its thread touches the memory no more."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        region = self._region
        while self.mapped_bytes < region.nbytes and not self._stopping.is_set():
            if region.lacks_memory:
                log.info("nixl_tiers: not all pages of the host region were allocated: they are mapped at first use")
                return
            ready = (region.ranks.ready_rows or 0) * region.geometry.row_bytes
            size = min(PART_BYTES, ready - self.mapped_bytes)
            if size > 0:
                if populate_part(region.address + self.mapped_bytes, size):
                    return  # the same at the first use
                self.mapped_bytes += size
            self._stopping.wait(MAP_PAUSE_S if size > 0 else LOOK_S)


def own_spans(region: HostRegion, rank: int, begin: int, end: int) -> list[tuple[int, int]]:
    """What of rows `begin` to `end` a rank touches first, as offsets from row 0: the pages of its own cells; where
    these are smaller than a page, and where several ranks share a cell, an equal part of the rows."""
    geometry = region.geometry
    page = HUGE_PAGE_BYTES if region.wants_huge_pages else PAGE
    row, cell = geometry.row_bytes, geometry.cell_bytes
    if region.copies > 1 or geometry.cells == 1 or cell < page:
        first, size = begin * row, (end - begin) * row
        share_begin, share_end = (first + size * part // region.ranks.count for part in (rank, rank + 1))
        return [(share_begin // PAGE * PAGE, min(region.nbytes, align(share_end)))]
    spans = []
    for at in range(begin * row + rank * cell, end * row, row):
        inside = align(at, page), (at + cell) // page * page
        if inside[0] < inside[1]:
            spans.append(inside)
    return spans


def _cut(spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The spans, in parts of PART_BYTES at most."""
    for begin, end in spans:
        for at in range(begin, end, PART_BYTES):
            yield at, min(end, at + PART_BYTES)
