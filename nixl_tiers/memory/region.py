"""The host region: one memfd that every process of a node maps, holding the rows and their control words.

The memory has no name in any file system: it is freed with the last process that maps it. What lies where:
region_layout.py.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import secrets
import struct
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from nixl_tiers.base.chunk import PAGE, Geometry
from nixl_tiers.base.policies import HugePages
from nixl_tiers.memory.backing import Backing, Mapping
from nixl_tiers.memory.cgroup import Room, shortage
from nixl_tiers.memory.cgroup import rooms as rooms_of_this_process
from nixl_tiers.memory.control import ControlWords
from nixl_tiers.memory.memfd import SIZE_SEALS, memfd
from nixl_tiers.memory.pages import (
    HUGE_PAGE_BYTES,
    advice,
    found,
    hugetlb_memfd,
    hugetlb_rooms,
    is_hugetlb,
    transparent_bytes,
)
from nixl_tiers.memory.region_layout import (
    HELD_UNTIL_AT,
    HUGE_BYTES_AT,
    STEPS_AT,
    Header,
    Layout,
    RankRecords,
    RegionError,
    checked,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

_HUGE_BYTES: Final = struct.Struct("<QB")  # how many, and what is known of it:
_PREFAULTED: Final = 1
_NOT_PREFAULTED: Final = 2  # it has failed

STEPS_KEPT: Final = 64  # of the last steps, each at step % STEPS_KEPT
_STEP: Final = np.dtype([("step", "<i8"), ("seconds", "<f8")])  # step + 1; 0: none yet

_OFF: Final = "`huge_pages` is off"

_log = logging.getLogger(__name__)


_regions: weakref.WeakSet[HostRegion] = weakref.WeakSet()


class HostRegion(ControlWords):
    """Rows in shared memory. `create` makes one, `attach` maps one, `rendezvous.rendezvous` does either.

    geometry    how a row is laid out
    rows        number of rows
    fd          the memfd, close-on-exec; hand it to a child with pass_fds
    identity    16 random bytes that identify this region
    address     of row 0 in this process
    nbytes      of all rows
    control     uint64 (rows, cells): control words
    rows_view   uint8 (rows, row_bytes), writable
    ranks       what the ranks of the engine let each other know
    hugetlb     whether it lies in a pool of huge pages, and so has all its pages
    """

    def __init__(self, fd: int, says: Header) -> None:
        """Map `fd`. Not for callers: use create or attach, which check it."""
        self.hugetlb = is_hugetlb(fd)
        self.geometry = geometry = says.geometry
        self.rows = rows = says.rows
        layout = Layout(geometry, rows, says.ranks, hugetlb=self.hugetlb)
        self.fd = fd
        self.identity = says.identity
        self.nbytes = rows * geometry.row_bytes
        self._map = mmap.mmap(fd, layout.total)
        self._transparent = says.transparent
        self._advise(mmap.MADV_HUGEPAGE if says.transparent else mmap.MADV_NOHUGEPAGE)
        self._advise(mmap.MADV_DONTDUMP)  # a core file must not hold gigabytes of prompts
        self.rows_view: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8, self.nbytes, layout.rows)
        self.rows_view = self.rows_view.reshape(rows, -1)
        self.control = np.frombuffer(self._map, np.uint64, rows * geometry.cells, layout.control).reshape(rows, -1)
        self._held_until_s: NDArray[np.float64] = np.frombuffer(self._map, np.float64, 1, HELD_UNTIL_AT)
        self._steps: NDArray[np.void] = np.frombuffer(self._map, _STEP, STEPS_KEPT, STEPS_AT)
        self.ranks = RankRecords(self._map, fd, layout.records, says.ranks)
        self._rows_at = layout.rows
        self.address = int(self.rows_view.ctypes.data)
        self._at_close: list[Callable[[], object]] = []
        self._closing = threading.Lock()
        self._closed = False
        _regions.add(self)

    @classmethod
    def create(
        cls,
        geometry: Geometry,
        rows: int,
        bounds: Iterable[Room] | None = None,
        huge_pages: HugePages = HugePages.AUTO,
        *,
        copies: int = 1,
    ) -> HostRegion:
        """Make a region of `rows` rows. RegionError names what is short: the cgroup's memory, the machine's, a limit.

        `bounds`: how much memory is available; None reads it from the system (cgroup.rooms). No page is touched
        yet: pages are allocated at first use, or by `prefault`. Only with HugePages.HUGETLB all are allocated now;
        where that fails, a warning says why, and the region is made as with HugePages.AUTO. `copies`: how many ranks
        share each cell.
        """
        if rows < 1:
            raise RegionError(f"a region needs at least one row, not {rows}")
        ranks = geometry.cells * copies
        says = Header(geometry, rows, ranks, huge_pages is not HugePages.OFF, secrets.token_bytes(16))
        if huge_pages is HugePages.HUGETLB:
            size = Layout(geometry, rows, ranks, hugetlb=True).total
            problem = shortage(size, hugetlb_rooms())
            try:
                if problem is None:
                    return cls._made(hugetlb_memfd("nixl_tiers", size), says)
            except OSError as error:
                problem = f"{error.strerror} while {size >> 21} pages of 2 MiB were taken"
            _log.warning("huge_pages: hugetlb is not possible, other pages are used: %s", problem)
        size = Layout(geometry, rows, ranks, hugetlb=False).total
        problem = shortage(size, rooms_of_this_process() if bounds is None else bounds)
        if problem:
            raise RegionError(problem)
        try:
            return cls._made(_memfd(size), says)
        except OSError as error:
            raise RegionError(f"cannot make a region of {size} bytes: {error.strerror}") from error

    @classmethod
    def _made(cls, fd: int, says: Header) -> HostRegion:
        """The region in this memfd, which has its size; closed if that raises OSError."""
        try:
            first = HUGE_PAGE_BYTES if is_hugetlb(fd) else PAGE
            with mmap.mmap(fd, first) as page:  # hugetlbfs has no write()
                start = says.packed()
                page[: len(start)] = start
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_SEALS | fcntl.F_SEAL_SEAL)
            return cls(fd, says)
        except OSError:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int) -> HostRegion:
        """Map the region behind `fd`, which belongs to the region from now on and is closed if it is refused.

        RegionError unless it is a memfd whose size is sealed and is what its header says: a file that could shrink
        would turn any access into a SIGBUS.
        """
        try:
            os.set_inheritable(fd, False)
            return cls(fd, checked(fd))
        except (OSError, RegionError) as error:
            with contextlib.suppress(OSError):
                os.close(fd)
            if isinstance(error, RegionError):
                raise
            raise RegionError(f"cannot map the region behind descriptor {fd}: {error.strerror}") from error

    def publish_step(self, step: int, seconds: float) -> None:
        """Publish how long a step of the engine took on this worker; for one rank, as all of them wait for each
        other."""
        entry = self._steps[step % STEPS_KEPT : step % STEPS_KEPT + 1]
        if len(entry):  # else it is closed
            # A reader that comes in between sees no step.
            entry["step"], entry["seconds"] = 0, seconds
            entry["step"] = step + 1

    def step_seconds(self, step: int) -> float | None:
        """How long this step took; None if that is not published yet, or was long ago."""
        entry = self._steps[step % STEPS_KEPT : step % STEPS_KEPT + 1]
        if not len(entry) or entry["step"][0] != step + 1:
            return None
        seconds = float(entry["seconds"][0])
        return seconds if entry["step"][0] == step + 1 else None

    @property
    def stores_held_until_s(self) -> float:
        """Until when movers are to start no stores (`time.monotonic`, the same in all processes of a machine); 0: they
        may. Written by the scheduler's process, and read by each mover before it starts a store: a message would come
        too late."""
        return float(self._held_until_s[0])

    @stores_held_until_s.setter
    def stores_held_until_s(self, until_s: float) -> None:
        self._held_until_s[0] = until_s

    @property
    def copies(self) -> int:
        """How many ranks share each cell."""
        return self.ranks.count // self.geometry.cells

    def prefault(self, threads: int = 4, rank: int = 0) -> Backing:
        """Allocate all rows' memory: of the first piece now, so that what comes first has a place, and the rest in the
        background; ends early when the region is closed. No rank waits for another."""
        backing = Backing(self, rank, threads=threads)
        backing.back_first(0.0)
        backing.go_on()
        return backing

    def map_pages(self) -> Mapping:
        """In a process that did not allocate the rows' pages: map them when others have, in the background. Ends early
        when the region is closed.

        Otherwise the first move of each row does: with 4 KiB pages that takes twice as long as to copy the row.
        """
        return Mapping(self)

    @property
    def wants_huge_pages(self) -> bool:
        """Whether the kernel gives it pages of 2 MiB, as far as it finds free memory in one piece."""
        return self.hugetlb or (self._transparent and not advice())

    @property
    def huge_bytes(self) -> int | None:
        """How much of the region lies in pages of 2 MiB; None until a process has prefaulted it, and when it is
        closed."""
        nbytes, state = self._pages()
        return nbytes if state == _PREFAULTED else None

    def _pages(self) -> tuple[int, int]:
        try:
            nbytes, state = _HUGE_BYTES.unpack_from(self._map, HUGE_BYTES_AT)
        except ValueError:  # unmapped
            return 0, 0
        return nbytes, state

    @property
    def lacks_memory(self) -> bool:
        """Whether a process has failed to allocate pages ahead of use."""
        return self._pages()[1] == _NOT_PREFAULTED

    def note_pages(self, *, prefaulted: bool) -> None:
        """All pages are allocated, or will not be ahead of use: of which kind they are, for all processes."""
        if not prefaulted:
            _HUGE_BYTES.pack_into(self._map, HUGE_BYTES_AT, 0, _NOT_PREFAULTED)
            return
        size = len(self._map)
        start = self.address - self._rows_at
        huge_bytes = size if self.hugetlb else transparent_bytes(start, size)
        _HUGE_BYTES.pack_into(self._map, HUGE_BYTES_AT, huge_bytes, _PREFAULTED)
        _log.info("the host region: %s", found(size, huge_bytes, advice() if self._transparent else _OFF))

    def _advise(self, advice: int) -> None:
        with contextlib.suppress(OSError):
            self._map.madvise(advice)

    def at_close(self, call: Callable[[], object]) -> None:
        """Have `call` made when the region is closed, before it is unmapped."""
        self._at_close.append(call)

    def close(self) -> None:
        """Stop what runs in the background, close the descriptor and unmap. May be called again.

        Arrays that others still hold keep the mapping alive until they are gone. Raw addresses do not: memory that was
        registered or pinned must be released first.
        """
        with self._closing:
            if self._closed:
                return
            self._closed = True
        for call in self._at_close:
            call()
        self._release()

    def leave_to_parent(self) -> None:
        """In a forked child: unmap and close what is the parent's, so that this process does not keep the memory."""
        self._closing = threading.Lock()
        if not self._closed:
            self._closed = True
            self._release()

    def _release(self) -> None:
        self._at_close.clear()
        os.close(self.fd)
        self.rows_view = np.empty((0, self.geometry.row_bytes), np.uint8)
        self.control = np.empty((0, self.geometry.cells), np.uint64)
        self._held_until_s = np.zeros(1)
        self._steps = np.empty(0, _STEP)
        with contextlib.suppress(BufferError):
            self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _memfd(size: int) -> int:
    try:
        fd = memfd("nixl_tiers")
    except OSError as error:
        raise RegionError(f"the kernel gives no memfd for the region: {error.strerror}") from error
    try:
        os.ftruncate(fd, size)
    except OSError:
        os.close(fd)
        raise
    return fd


def _leave_to_parent() -> None:
    for region in list(_regions):
        region.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
