"""Slab files: the slots of one shard, in files of about 1 GiB that grow by extents when slots are first used. What a
file's size covers is allocated, nothing beyond it is.

Slots that the journal does not know are recovered by their seals (`SealScan`). Only the seal block at the end of each
row is read, and only that is trusted here: a load verifies the row all the same.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.memory.seal import MAGIC, Sealer, read
from nixl_tiers.tiers.disk import (
    FULL_ERRORS,
    FileIdentity,
    check_registration,
    direct_works,
    extend,
    fallocate,
    try_out,
)
from nixl_tiers.tiers.folder import Folder, fd_path
from nixl_tiers.tiers.nixl_agent import Registrar, Registration
from nixl_tiers.tiers.slab.layout import SlabLayout, slab_name, slab_number
from nixl_tiers.tiers.slab.shards import Shards

logger = logging.getLogger(__name__)

_SAMPLES: Final = 128  # of each slab, when its layout has to be detected
_READERS: Final = 4  # a seal is one small random read: several in flight are many times as fast on flash
_READ_SLOTS: Final = 256  # between two checks of whether to stop
_KEEP_SIZE: Final = 0x01  # FALLOC_FL_KEEP_SIZE
_ZERO_RANGE: Final = 0x10  # FALLOC_FL_ZERO_RANGE


class _Slab(NamedTuple):
    slots: int  # that its file has room for
    identity: FileIdentity


class Slabs:
    """The open slab files of one shard. `grow` and `free` belong on a thread that may wait, the rest on the mover's
    own."""

    def __init__(self, folder: Folder, layout: SlabLayout, agent: Registrar, quota: Shards) -> None:
        """Opens the files that are there; what is beyond the layout's slots is cut off. The folder stays the caller's.
        Raises TierDown, OSError."""
        self.layout = layout
        self._folder = folder
        self._agent = agent
        self._quota = quota
        self._sparse = False  # whether some files could not be allocated ahead
        self._slabs: dict[int, _Slab] = {}  # growth adds to it meanwhile, so it is iterated over as a copy
        self._files: dict[int, Registration] = {}
        for name in folder.names():
            if (slab := slab_number(name)) is not None:
                self._open_existing(slab)
        self._direct = direct_works(folder)
        try_out(folder, direct=self._direct, in_place=True)
        check_registration(agent, folder)
        if not self._direct:
            logger.warning("%s does not support O_DIRECT: rows go through the page cache", folder.path)

    def is_allocated(self, slot: int) -> bool:
        """Whether the slot has room in a file; a slot that has none holds no row."""
        slab, index = divmod(slot, self.layout.slots_per_slab)
        return slab in self._slabs and index < self._slabs[slab].slots

    def locate(self, slot: int) -> tuple[int, int]:
        """Device and offset in bytes of an allocated slot. Raises AgentError, OSError if its file cannot be opened."""
        slab, index = divmod(slot, self.layout.slots_per_slab)
        if slab not in self._files:
            nbytes = self.layout.slots_per_slab * self.layout.row_bytes
            with self._folder.opened(slab_name(slab), os.O_RDWR) as descriptor:
                self._files[slab] = self._agent.register_file(fd_path(descriptor), nbytes, direct=self._direct)
        return self._files[slab].devices[0], index * self.layout.row_bytes

    def grow(self, slot: int) -> None:
        """Allocate the extent of the slot. Raises OSError, of FULL_ERRORS if there is no room."""
        slab, index = divmod(slot, self.layout.slots_per_slab)
        problem, extent = "", self.layout.extent_slots
        have = self._slabs[slab].slots if slab in self._slabs else 0
        wanted = min(-(-(index + 1) // extent) * extent, self.layout.slots_in(slab))
        for end in dict.fromkeys((wanted, index + 1)):
            if end <= have:
                return
            if not (problem := self._quota.make_room((end - have) * self.layout.row_bytes)):
                self._allocate(slab, end)
                return
        raise OSError(errno.ENOSPC, problem)

    def allocated(self) -> NDArray[np.bool_]:
        """By slot of the layout: whether it is allocated."""
        return self.layout.with_room({slab: known.slots for slab, known in self._slabs.copy().items()})

    def select(self, wanted: Sequence[int] | NDArray[np.int64]) -> Iterator[SlabSlots]:
        """The allocated ones of the wanted slots, by slab. `wanted`: in order. The result may be iterated over on any
        thread."""
        wanted = np.asarray(wanted, np.int64)
        for slab, known in sorted(self._slabs.copy().items()):
            first = slab * self.layout.slots_per_slab
            start, end = np.searchsorted(wanted, [first, first + known.slots])
            if start < end:
                yield SlabSlots(self._folder, slab_name(slab), first, wanted[start:end] - first)

    def disk_is_full(self) -> bool:
        """Whether a write may have failed for lack of space: possible only in files that are not allocated ahead."""
        if not self._sparse:
            return False
        try:
            status = os.fstatvfs(self._folder.descriptor)
        except OSError:  # it has gone
            return False
        # Some network file systems report no size.
        return status.f_blocks > 0 and status.f_bavail * status.f_frsize < self.layout.row_bytes

    @property
    def end(self) -> int:
        """One past the last allocated slot."""
        slabs = self._slabs.copy().items()
        return max((slab * self.layout.slots_per_slab + known.slots for slab, known in slabs if known.slots), default=0)

    def truncate(self, end: int) -> list[tuple[int, int]]:
        """Slots from `end` on are not allocated from now on: none of them holds a row or is in use by a job. Returns
        what `free` has to cut: (slab, slots to keep)."""
        cuts = []
        for slab, known in self._slabs.copy().items():
            keep = min(max(0, end - slab * self.layout.slots_per_slab), known.slots)
            if keep < known.slots:
                cuts.append((slab, keep))
                self._slabs[slab] = known._replace(slots=keep)
            if not keep:
                del self._slabs[slab]
                if (file := self._files.pop(slab, None)) is not None:
                    self._agent.deregister(file)
        return cuts

    def free(self, cuts: list[tuple[int, int]]) -> None:
        """Return to the file system what `truncate` returned. On the thread that `grow` is called on. Raises the last
        OSError, after all were tried; what could not be cut goes on counting as used."""
        failed: OSError | None = None
        for slab, keep in cuts:
            try:
                freed_bytes = self._folder.stat(slab_name(slab)).st_size - keep * self.layout.row_bytes
                self._shorten(slab, keep)
            except OSError as error:
                failed = error
            else:  # which may not have been measured yet
                self._quota.used_bytes = max(0, self._quota.used_bytes - max(0, freed_bytes))
        if failed is not None:
            raise failed

    def erase(self, slots: list[int]) -> None:
        """Overwrite these allocated slots, which are in order, with zeroes. On a thread that may wait. Raises
        OSError."""
        row_bytes = self.layout.row_bytes
        for selected in self.select(slots):
            with self._folder.opened(selected.name, os.O_RDWR) as descriptor:
                for run in np.split(selected.indexes, np.flatnonzero(np.diff(selected.indexes) != 1) + 1):
                    _zero(descriptor, int(run[0]) * row_bytes, len(run) * row_bytes)
                os.fdatasync(descriptor)

    def problem(self) -> str:
        """Whether a slab file was deleted, replaced or cut short, or "". On any thread. Raises OSError."""
        for slab, known in self._slabs.copy().items():
            problem = known.identity.problem(known.slots * self.layout.row_bytes)
            if problem and self._slabs.get(slab) is known:
                return problem
        return ""

    def close(self) -> None:
        """Close the files. No transfer may be pending."""
        for file in self._files.values():
            self._agent.deregister(file)
        self._files.clear()

    def _shorten(self, slab: int, slots: int) -> None:
        """Cut it, or delete it if no slot is left. Raises OSError."""
        if not slots:
            return self._folder.unlink(slab_name(slab))
        with self._folder.opened(slab_name(slab), os.O_RDWR) as descriptor:
            return os.ftruncate(descriptor, slots * self.layout.row_bytes)

    def _open_existing(self, slab: int) -> None:
        limit, status = self.layout.slots_in(slab), self._folder.stat(slab_name(slab))
        if not limit or status.st_size > limit * self.layout.row_bytes:
            self._shorten(slab, limit)
        if limit:
            slots = min(status.st_size // self.layout.row_bytes, limit)
            self._slabs[slab] = _Slab(slots, FileIdentity(self._folder.path / slab_name(slab), status))

    def _allocate(self, slab: int, end: int) -> None:
        """Make the slab's file `end` slots long and allocated; on a full disk unused shards are deleted for it."""
        row_bytes, path = self.layout.row_bytes, self._folder.path / slab_name(slab)
        with self._folder.opened(slab_name(slab), os.O_RDWR | os.O_CREAT) as descriptor:
            status = os.fstat(descriptor)
            while True:
                try:
                    if not extend(descriptor, status.st_size, end * row_bytes, path) and not self._sparse:
                        self._sparse = True
                        logger.warning(
                            "%s cannot allocate ahead: use ext4 or XFS, or keep the tier's capacity free on it",
                            self._folder.path,
                        )
                    break
                except OSError as error:
                    if error.errno not in FULL_ERRORS or not self._quota.delete_oldest():
                        raise
        identity = self._slabs[slab].identity if slab in self._slabs else FileIdentity(path, status)
        self._slabs[slab] = _Slab(end, identity)
        # The file is longer where `free` could not cut it.
        self._quota.used_bytes += max(0, end * row_bytes - status.st_size)


def _zero(descriptor: int, offset: int, nbytes: int) -> None:
    """Zero a range and keep it allocated; by writing zeroes where the file system has no call for it."""
    failed = fallocate(descriptor, offset, nbytes, _KEEP_SIZE | _ZERO_RANGE)
    if failed == errno.EOPNOTSUPP:
        zeros = bytes(min(nbytes, 1 << 20))
        at = 0
        while at < nbytes:  # a signal or a full disk cuts a write short
            at += os.pwrite(descriptor, zeros[: nbytes - at], offset + at)
    elif failed:
        raise OSError(failed, os.strerror(failed))


def detect_layout(folder: Folder, sealer: Sealer, slots: int) -> SlabLayout | None:
    """The layout of slab files whose description is lost, if a sample finds a seal where rows of the sealer's geometry,
    namespace and epoch have theirs; None otherwise. Raises OSError."""
    row_bytes = sealer.geometry.row_bytes
    lengths = {name: folder.stat(name).st_size // row_bytes for name in folder.names() if slab_number(name) is not None}
    for name, length in lengths.items():
        samples = range(0, length, max(1, length // _SAMPLES))
        if next(read_seals(SlabSlots(folder, name, 0, np.array(samples)), sealer), None) is not None:
            layout = SlabLayout.of(row_bytes, slots)
            return replace(layout, slots_per_slab=max(layout.slots_per_slab, *lengths.values()))
    return None


class SlabSlots(NamedTuple):
    """Some slots of one slab: their `indexes` in the file, whose index 0 is the slot `first`."""

    folder: Folder
    name: str
    first: int
    indexes: NDArray[np.int64]


class SealedRow(NamedTuple):
    """A valid seal in a slot. Sorts by age."""

    sealed_at: int
    slot: int
    key: bytes


class SealScan:
    """Reads the seals of many slots on its own threads. `rows` is complete once `done`."""

    def __init__(self, wanted: Iterable[SlabSlots], sealer: Sealer) -> None:
        """`wanted` is iterated over on the scan's thread. Seals count if they have the sealer's geometry, namespace and
        epoch."""
        self.rows: list[SealedRow] = []  # the oldest first
        self.failed = False
        """Whether something could not be read: there may be more rows than were found."""
        self._sealer = sealer
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(wanted,), name="seal-scan", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Cancel it, and wait until it has ended."""
        self._stop.set()
        self._thread.join()

    def _run(self, wanted: Iterable[SlabSlots]) -> None:
        with ThreadPoolExecutor(_READERS, thread_name_prefix="seals") as readers:
            parts = (
                slots._replace(indexes=slots.indexes[start : start + _READ_SLOTS])
                for slots in wanted
                for start in range(0, len(slots.indexes), _READ_SLOTS)
            )
            for rows in readers.map(self._read, parts):
                self.rows += rows
        self.rows.sort()

    def _read(self, slots: SlabSlots) -> list[SealedRow]:
        if self._stop.is_set():
            return []
        try:
            return list(read_seals(slots, self._sealer))
        except OSError as error:
            if not self.failed:
                path = slots.folder.path / slots.name
                logger.warning("%s cannot be read (%s, see dmesg): its rows may not be found", path, error.strerror)
            self.failed = True
            return []


def read_seals(slots: SlabSlots, sealer: Sealer) -> Iterator[SealedRow]:
    """The seals in these slots that have the sealer's geometry, namespace and epoch. Raises OSError."""
    geometry = sealer.geometry
    with slots.folder.opened(slots.name, os.O_RDONLY) as descriptor:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead into the payload between seals
        for index in slots.indexes.tolist():
            at = (index + 1) * geometry.row_bytes - geometry.seal_bytes
            raw = os.pread(descriptor, geometry.seal_bytes, at)
            seal = read(raw) if raw.startswith(MAGIC) else None
            if seal is not None and (seal.geometry, seal.namespace, seal.epoch) == (
                geometry, sealer.namespace, sealer.epoch,
            ):  # fmt: skip
                yield SealedRow(seal.sealed_at, slots.first + index, seal.key)
