"""The host region: one memfd that every process of a node maps, holding the rows and their control words.

Layout: a header page (identity, sizes, what pages there are, the times of the last steps), one fingerprint record per
cell and one for all, one control word per (row, cell), and from a 2 MiB boundary on the rows. The memory has no name in
any file system: it is freed with the last process that maps it.
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
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
from xxhash import xxh3_64_intdigest

from nixl_tiers.chunk import NAMESPACE_BYTES, PAGE, Geometry, align
from nixl_tiers.memory.cgroup import Room, shortage
from nixl_tiers.memory.cgroup import rooms as rooms_of_this_process
from nixl_tiers.memory.huge_pages import (
    HUGE_PAGE_BYTES,
    advice,
    found,
    hugetlb_memfd,
    hugetlb_rooms,
    is_hugetlb,
    transparent_bytes,
)
from nixl_tiers.memory.memfd import CHECK, SIZE_SEALS, header_of, memfd
from nixl_tiers.memory.prefault import Prefault
from nixl_tiers.policies import HugePages

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAGIC: Final = b"nixlregn"
_VERSION: Final = 1
# magic, version, cells, cell_payload, sub_blocks, rows, whether transparent huge pages are wanted, identity
_HEADER: Final = struct.Struct("<8sQQQQQ?16s")
_HUGE_BYTES_AT: Final = PAGE - 16  # of the header page: how many bytes lie in huge pages, and whether that is known
_HUGE_BYTES: Final = struct.Struct("<Q?")
_HELD_UNTIL_AT: Final = PAGE - 24  # of the header page: until when movers start no stores, a float64

# Of the header page: the times of the last steps, each at step % STEPS_KEPT.
_STEPS_AT: Final = 1024
STEPS_KEPT: Final = 64
_STEP: Final = np.dtype([("step", "<i8"), ("seconds", "<f8")])  # step + 1; 0: none yet

_RECORD_BYTES: Final = 512  # of one fingerprint: check word, length of the note, digest, note; and a NUMA node
_RECORD: Final = struct.Struct("<H16s")
_NODE: Final = struct.Struct("<H")  # 0: not published, 1: not known, else the node's number + 2
_NODE_AT: Final = _RECORD_BYTES - _NODE.size
MAX_NOTE_BYTES: Final = 400
_OFF: Final = "`huge_pages` is off"

WRITTEN: Final = 1
FAILED: Final = 2
INCOMPLETE: Final = 3  # copied, but a load may need what was not there to be copied
# A control word: the job's store_seq in the upper 40 bits, how many sub-blocks are missing at the cell's beginning in
# the next 16, and the state.
_STORE_SEQ_AT: Final = 24
_MISSING_AT: Final = 8
MAX_MISSING: Final = (1 << _STORE_SEQ_AT - _MISSING_AT) - 1


_log = logging.getLogger(__name__)


class RegionError(RuntimeError):
    """The host region cannot be created or attached as asked. One sentence that says why."""


_regions: weakref.WeakSet[HostRegion] = weakref.WeakSet()


class _Layout:
    """Where the parts are, in bytes from the start: a function of geometry and rows, so that it can be checked."""

    def __init__(self, geometry: Geometry, rows: int, *, hugetlb: bool) -> None:
        self.records = PAGE
        self.control = self.records + align((geometry.cells + 2) * _RECORD_BYTES)
        self.rows = align(self.control + rows * geometry.cells * 8, HUGE_PAGE_BYTES)
        end = self.rows + rows * geometry.row_bytes
        self.total = align(end, HUGE_PAGE_BYTES) if hugetlb else end


class HostRegion:
    """Rows in shared memory. `create` makes one, `attach` maps one, `rendezvous.rendezvous` does either.

    geometry    how a row is laid out
    rows        number of rows
    fd          the memfd, close-on-exec; hand it to a child with pass_fds
    identity    16 random bytes that identify this region
    address     of row 0 in this process
    nbytes      of all rows
    rows_view   uint8 (rows, row_bytes), writable
    hugetlb     whether it lies in a pool of huge pages, and so has all its pages
    """

    def __init__(self, fd: int, geometry: Geometry, rows: int, identity: bytes, *, transparent: bool) -> None:
        """Map `fd`. Not for callers: use create or attach, which check it."""
        self.hugetlb = is_hugetlb(fd)
        layout = _Layout(geometry, rows, hugetlb=self.hugetlb)
        self.geometry = geometry
        self.rows = rows
        self.fd = fd
        self.identity = identity
        self.nbytes = rows * geometry.row_bytes
        self._map = mmap.mmap(fd, layout.total)
        self._transparent = transparent
        self._advise(mmap.MADV_HUGEPAGE if transparent else mmap.MADV_NOHUGEPAGE)
        self._advise(mmap.MADV_DONTDUMP)  # a core file must not hold gigabytes of prompts
        self.rows_view: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8, self.nbytes, layout.rows).reshape(
            rows, geometry.row_bytes
        )
        self._control: NDArray[np.uint64] = np.frombuffer(
            self._map, np.uint64, rows * geometry.cells, layout.control
        ).reshape(rows, geometry.cells)
        self._held_until_s: NDArray[np.float64] = np.frombuffer(self._map, np.float64, 1, _HELD_UNTIL_AT)
        self._steps: NDArray[np.void] = np.frombuffer(self._map, _STEP, STEPS_KEPT, _STEPS_AT)
        self._records = layout.records
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
    ) -> HostRegion:
        """Make a region of `rows` rows. RegionError names what is short: the cgroup's memory, the machine's, a limit.

        `bounds`: how much memory is available; None reads it from the system (cgroup.rooms). No page is touched
        yet: pages are allocated at first use, or by `prefault`. Only with HugePages.HUGETLB all are allocated now;
        where that fails, a warning says why, and the region is made as with HugePages.AUTO.
        """
        if rows < 1:
            raise RegionError(f"a region needs at least one row, not {rows}")
        if huge_pages is HugePages.HUGETLB:
            size = _Layout(geometry, rows, hugetlb=True).total
            problem = shortage(size, hugetlb_rooms())
            try:
                if problem is None:
                    return cls._made(hugetlb_memfd("nixl_tiers", size), geometry, rows, transparent=True)
            except OSError as error:
                problem = f"{error.strerror} while {size >> 21} pages of 2 MiB were taken"
            _log.warning("huge_pages: hugetlb is not possible, other pages are used: %s", problem)
        size = _Layout(geometry, rows, hugetlb=False).total
        problem = shortage(size, rooms_of_this_process() if bounds is None else bounds)
        if problem:
            raise RegionError(problem)
        try:
            fd = _memfd(size)
            return cls._made(fd, geometry, rows, transparent=huge_pages is not HugePages.OFF)
        except OSError as error:
            raise RegionError(f"cannot make a region of {size} bytes: {error.strerror}") from error

    @classmethod
    def _made(cls, fd: int, geometry: Geometry, rows: int, *, transparent: bool) -> HostRegion:
        """The region in this memfd, which has its size; closed if that raises OSError."""
        try:
            identity = secrets.token_bytes(16)
            sizes = (geometry.cells, geometry.cell_payload, geometry.sub_blocks, rows)
            header = _HEADER.pack(_MAGIC, _VERSION, *sizes, transparent, identity)
            first = HUGE_PAGE_BYTES if is_hugetlb(fd) else PAGE
            with mmap.mmap(fd, first) as page:  # hugetlbfs has no write()
                page[: len(header) + CHECK.size] = header + CHECK.pack(xxh3_64_intdigest(header))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_SEALS | fcntl.F_SEAL_SEAL)
            return cls(fd, geometry, rows, identity, transparent=transparent)
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
            geometry, rows, transparent, identity = _checked(fd)
            return cls(fd, geometry, rows, identity, transparent=transparent)
        except (OSError, RegionError) as error:
            with contextlib.suppress(OSError):
                os.close(fd)
            if isinstance(error, RegionError):
                raise
            raise RegionError(f"cannot map the region behind descriptor {fd}: {error.strerror}") from error

    def mark(self, rows: NDArray[np.integer[Any]] | Sequence[int], cell: int, store_seq: int,
             ok: NDArray[np.bool_] | bool, missing: NDArray[np.integer[Any]] | int = 0, *,
             whole: NDArray[np.bool_] | bool = True) -> None:  # fmt: skip
        """Record that store job `store_seq` has written its cell of these rows, or failed to; `ok` for all or one a
        row.

        `missing`: how many sub-blocks at the cell's beginning were not written, for all or one a row; `whole`: False
        where a load may need them (always assumed of more than MAX_MISSING), which makes the row useless.

        Called by the rank that owns the cell, after its bytes are in memory (streaming stores fenced). A late word of
        an older job is never taken for a newer one's: store_seqs (0 to 2**40 - 1) are never reused in a region.
        """
        counts = np.asarray(missing, np.uint64)
        good = np.where(np.logical_and(whole, counts <= MAX_MISSING), np.uint64(WRITTEN), np.uint64(INCOMPLETE))
        states = np.where(ok, good, np.uint64(FAILED))
        counts = np.minimum(counts, MAX_MISSING) << np.uint64(_MISSING_AT)
        self._control[rows, cell] = np.uint64(store_seq << _STORE_SEQ_AT) | counts | states

    def written(self, rows: NDArray[np.integer[Any]] | Sequence[int], store_seq: int) -> NDArray[np.bool_]:
        """bool (len(rows),): True where every cell's word says that job `store_seq` has written it."""
        word = np.uint64(store_seq << _STORE_SEQ_AT | WRITTEN)
        words = self._control[rows] & ~np.uint64(MAX_MISSING << _MISSING_AT)
        good: NDArray[np.bool_] = (words == word).all(axis=1)
        return good

    def ended(self, rows: NDArray[np.integer[Any]] | Sequence[int], store_seqs: Sequence[int]) -> NDArray[np.bool_]:
        """bool (len(rows),): True where every cell's word says that its row's job has ended, well or not."""
        words = self._control[rows]
        of_job = words >> np.uint64(_STORE_SEQ_AT) == np.asarray(store_seqs, np.uint64)[:, None]
        done: NDArray[np.bool_] = (of_job & (words & np.uint64((1 << _MISSING_AT) - 1) != 0)).all(axis=1)
        return done

    def copied(self, rows: NDArray[np.integer[Any]] | Sequence[int], store_seq: int) -> NDArray[np.bool_]:
        """bool (len(rows),): True where every cell's word says that job `store_seq` has copied what was there to copy,
        whole or not."""
        words = self._control[rows] & ~np.uint64(MAX_MISSING << _MISSING_AT)
        known = np.array([store_seq << _STORE_SEQ_AT | WRITTEN, store_seq << _STORE_SEQ_AT | INCOMPLETE], np.uint64)
        good: NDArray[np.bool_] = np.isin(words, known)
        return np.asarray(good.all(axis=1))

    def missing(self, rows: NDArray[np.integer[Any]] | Sequence[int]) -> NDArray[np.uint64]:
        """(len(rows),): how many sub-blocks at the beginning some cell of a written row lacks."""
        words: NDArray[np.uint64] = self._control[rows] >> np.uint64(_MISSING_AT) & np.uint64(MAX_MISSING)
        most: NDArray[np.uint64] = words.max(axis=1, initial=0)
        return most

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

    def publish(self, cell: int, digest: bytes, note: str = "") -> None:
        """Publish the fingerprint of this cell's rank (16 bytes) to the scheduler, with a note cut to 400 bytes."""
        self._write_record(self._record(cell), digest, note)

    def published(self) -> list[tuple[bytes, str] | None]:
        """(fingerprint, note) of each cell, None where its rank has not published yet."""
        return [self._read_record(self._record(cell)) for cell in range(self.geometry.cells)]

    def publish_node(self, cell: int, node: int | None) -> None:
        """Publish the NUMA node of this rank's GPU to the other ranks; None: not known."""
        _NODE.pack_into(self._map, self._record(cell) + _NODE_AT, 1 if node is None else node + 2)

    def wait_for_nodes(self, timeout_s: float) -> set[int]:
        """The NUMA nodes of all ranks' GPUs, as far as they are known; after `timeout_s` those of some."""
        deadline = time.monotonic() + timeout_s
        while True:
            at = (self._record(cell) + _NODE_AT for cell in range(self.geometry.cells))
            words = [_NODE.unpack_from(self._map, place)[0] for place in at]
            if all(words) or time.monotonic() >= deadline:
                return {word - 2 for word in words if word >= 2}
            time.sleep(0.005)

    def shared_by_ranks(self, find: Callable[[], tuple[bytes, str]], timeout_s: float) -> tuple[bytes, str]:
        """What `find` (a digest of 16 bytes, a note) returns in the rank that comes first. The others wait for its
        result, and one of them takes over if that rank dies. RegionError if this takes longer than `timeout_s`."""
        at = self._records + self.geometry.cells * _RECORD_BYTES
        deadline = time.monotonic() + timeout_s
        while (found := self._read_record(at)) is None:
            # A POSIX lock, because the kernel takes it from a process that dies. Its byte is never written to.
            try:
                fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
            except OSError:
                if time.monotonic() > deadline:
                    raise RegionError(f"another rank did not publish it within {timeout_s:g} s") from None
                time.sleep(0.01)
                continue
            try:
                if self._read_record(at) is None:
                    self._write_record(at, *find())
            finally:
                fcntl.lockf(self.fd, fcntl.LOCK_UN, 1)
        return found

    @property
    def stores_held_until_s(self) -> float:
        """Until when movers are to start no stores (`time.monotonic`, the same in all processes of a machine); 0: they
        may. Written by the scheduler's process, and read by each mover before it starts a store: a message would come
        too late."""
        return float(self._held_until_s[0])

    @stores_held_until_s.setter
    def stores_held_until_s(self, until_s: float) -> None:
        self._held_until_s[0] = until_s

    def publish_revision(self, revision: str) -> None:
        """Publish the model's revision to the scheduler, whose process is not told it."""
        self._write_record(self._revision, bytes(NAMESPACE_BYTES), revision)

    @property
    def revision(self) -> str:
        """What a rank has published; empty: nothing."""
        found = self._read_record(self._revision)
        return "" if found is None else found[1]

    def prefault(self, threads: int = 4, cell: int = 0) -> Prefault:
        """Allocate and map all rows' pages now, in the background. Each rank begins with its own share of them; the
        first logs at the end which pages they are. Ends early when the region is closed."""
        begin = self.nbytes * cell // self.geometry.cells
        prefault = Prefault(self.address, self.nbytes, threads, None if cell else self._note_pages, begin)
        self.at_close(prefault.stop)
        return prefault

    @property
    def huge_bytes(self) -> int | None:
        """How much of the region lies in pages of 2 MiB; None until a process has prefaulted it, and when it is
        closed."""
        try:
            nbytes, known = _HUGE_BYTES.unpack_from(self._map, _HUGE_BYTES_AT)
        except ValueError:  # unmapped
            return None
        return nbytes if known else None

    def _note_pages(self) -> None:
        size = len(self._map)
        start = self.address - self._rows_at
        huge_bytes = size if self.hugetlb else transparent_bytes(start, size)
        _HUGE_BYTES.pack_into(self._map, _HUGE_BYTES_AT, huge_bytes, True)
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
        self._control = np.empty((0, self.geometry.cells), np.uint64)
        self._held_until_s = np.zeros(1)
        self._steps = np.empty(0, _STEP)
        with contextlib.suppress(BufferError):
            self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _record(self, cell: int) -> int:
        if not 0 <= cell < self.geometry.cells:
            raise ValueError(f"cell {cell} is not one of the {self.geometry.cells} of a row")
        return self._records + cell * _RECORD_BYTES

    @property
    def _revision(self) -> int:
        return self._records + (self.geometry.cells + 1) * _RECORD_BYTES

    def _write_record(self, at: int, digest: bytes, note: str) -> None:
        if len(digest) != NAMESPACE_BYTES:
            raise ValueError(f"a fingerprint has {NAMESPACE_BYTES} bytes, this one has {len(digest)}")
        text = note.encode()[:MAX_NOTE_BYTES].decode(errors="ignore").encode()
        record = _RECORD.pack(len(text), digest) + text
        # The check word last: a half-written record does not pass for one.
        self._map[at + 8 : at + 8 + len(record)] = record
        self._map[at : at + 8] = CHECK.pack(xxh3_64_intdigest(record))

    def _read_record(self, at: int) -> tuple[bytes, str] | None:
        raw = self._map[at : at + _RECORD_BYTES]
        (check,) = CHECK.unpack_from(raw)
        length, digest = _RECORD.unpack_from(raw, CHECK.size)
        note = raw[CHECK.size + _RECORD.size :][:length]
        if not check or check != xxh3_64_intdigest(raw[CHECK.size : CHECK.size + _RECORD.size] + note):
            return None
        return digest, note.decode(errors="replace")


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


def _checked(fd: int) -> tuple[Geometry, int, bool, bytes]:
    """Geometry, rows, whether it asks for transparent huge pages, and identity of the region behind `fd`. RegionError
    names what is wrong with it."""
    try:
        fields = header_of(fd, _HEADER, _MAGIC, _VERSION, "region")
        _, _, cells, cell_payload, sub_blocks, rows, transparent, identity = fields
    except ValueError as error:
        raise RegionError(str(error)) from error
    try:
        geometry = Geometry(cells, cell_payload, sub_blocks)
    except ValueError as error:
        raise RegionError(f"the region behind descriptor {fd} has an impossible geometry: {error}") from error
    size = os.fstat(fd).st_size
    expected = _Layout(geometry, rows, hugetlb=is_hugetlb(fd)).total
    if rows < 1 or size != expected:
        raise RegionError(f"the region behind descriptor {fd} has {size} bytes where its header needs {expected}")
    return geometry, rows, transparent, identity


def _leave_to_parent() -> None:
    for region in list(_regions):
        region.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)
