"""Slab files: the slots of one namespace, in files of about 1 GiB that grow by extents when slots are first used.

Slot s stands in slab s // slots_per_slab at (s % slots_per_slab) * row_bytes. What a file's size covers is allocated;
nothing beyond is. Space is taken with fallocate(2) itself: the emulation in libc would write the zeroes out.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.memory.seal import Sealer
from nixl_tiers.tiers.disk import FileIdentity, direct_works, fallocate
from nixl_tiers.tiers.folder import Folder, through
from nixl_tiers.tiers.nixl_agent import Agent, Registration
from nixl_tiers.tiers.slab.quota import SlabQuota
from nixl_tiers.tiers.slab.recovery import Stretch, seals

logger = logging.getLogger(__name__)

SLAB_BYTES: Final = 1 << 30
MAX_SLABS: Final = 1024  # each is an open file
_LOOKS: Final = 128
_ASKED_STEPS: Final = 4  # extents that are asked of others at a time
_NAME: Final = re.compile(r"slab-(\d{5})\.kv")
_KEEP_SIZE: Final = 0x01  # FALLOC_FL_KEEP_SIZE
_ZERO_RANGE: Final = 0x10  # FALLOC_FL_ZERO_RANGE


class NoSpace(Exception):
    """The budget or the medium has no room for the row. One sentence."""


@dataclass(frozen=True)
class Plan:
    """How `slots` rows of `row_bytes` are spread over files; fixed for a namespace when it is made."""

    row_bytes: int
    slots: int
    slots_per_slab: int

    @classmethod
    def of(cls, row_bytes: int, slots: int) -> Plan:
        slab_bytes = max(SLAB_BYTES, -(-slots * row_bytes // MAX_SLABS))
        return cls(row_bytes, slots, max(1, slab_bytes // row_bytes))

    @property
    def slabs(self) -> int:
        return -(-self.slots // self.slots_per_slab)

    def slots_of(self, slab: int) -> int:
        return max(0, min(self.slots_per_slab, self.slots - slab * self.slots_per_slab))

    @property
    def step_slots(self) -> int:
        """Slots that are allocated together: a slab, and less where the whole tier is small."""
        return max(1, min(self.slots_per_slab, self.slots // 32))


class Slabs:
    """The open slab files of one namespace. `grow` belongs on a thread that may wait, the rest to the mover's own."""

    def __init__(self, folder: Folder, plan: Plan, agent: Agent, ledger: SlabQuota) -> None:
        """Take over the files that are there; what the plan has no place for is given back. The folder stays the
        caller's. Raises OSError."""
        self.plan = plan
        self._folder = folder
        self._directory = directory = folder.path
        self._agent = agent
        self._quota = ledger
        self._direct = direct_works(folder)
        if not self._direct:
            logger.warning("%s does not support O_DIRECT: rows go through the page cache", directory)
        self._sparse = False
        self._allocated: dict[int, int] = {}  # slab -> slots that its file has room for
        self._files: dict[int, Registration] = {}
        self._marks: dict[int, FileIdentity] = {}
        for name in folder.names():
            if match := _NAME.fullmatch(name):
                self._take_over(int(match[1]))

    def has_room(self, slot: int) -> bool:
        """Whether the slot's place is allocated; a slot that is not holds nothing."""
        slab, place = divmod(slot, self.plan.slots_per_slab)
        return place < self._allocated.get(slab, 0)

    def place(self, slot: int) -> tuple[int, int]:
        """Device and offset in bytes of an allocated slot. Raises AgentError, OSError if its file cannot be opened."""
        slab, place = divmod(slot, self.plan.slots_per_slab)
        file = self._files.get(slab)
        if file is None:
            nbytes = self.plan.slots_per_slab * self.plan.row_bytes
            descriptor = self._open(slab)
            try:
                file = self._agent.register_file(through(descriptor), nbytes, direct=self._direct)
            finally:
                os.close(descriptor)
            self._files[slab] = file
        return file.devices[0], place * self.plan.row_bytes

    def grow(self, slot: int) -> None:
        """Allocate the extent that the slot stands in, once the ledger has room. Raises NoSpace, OSError."""
        slab, place = divmod(slot, self.plan.slots_per_slab)
        with self._quota.locked():
            have = self._allocated.get(slab, 0)
            step = self.plan.step_slots
            wanted = min(-(-(place + 1) // step) * step, self.plan.slots_of(slab))
            for end in dict.fromkeys((wanted, place + 1)):
                nbytes = (end - have) * self.plan.row_bytes
                if end > have and self._quota.may_take(self._directory, nbytes) and self._quota.make_room(nbytes):
                    self._allocate(slab, end)
                    return
            self._quota.ask(self._directory, _ASKED_STEPS * step * self.plan.row_bytes)
        raise NoSpace(f"{self._quota.path} is full: what other live movers hold leaves no room below its capacity")

    def stretches(self, wanted: NDArray[np.bool_]) -> list[Stretch]:
        """Where the wanted ones of the allocated slots stand; one flag for each of the plan's slots."""
        found = []
        for slab, slots in sorted(self._allocated.items()):
            first = slab * self.plan.slots_per_slab
            places = np.flatnonzero(wanted[first : first + slots]).tolist()
            if places:
                found.append(Stretch(self._folder, _name(slab), first, places))
        return found

    def medium_is_full(self) -> bool:
        """Whether a failed write may be for want of space: only files that could not be allocated ahead can be."""
        if not self._sparse:
            return False
        try:
            status = os.fstatvfs(self._folder.descriptor)
        except OSError:  # it has gone
            return False
        return status.f_bavail * status.f_frsize < self.plan.row_bytes

    @property
    def end(self) -> int:
        """One past the last allocated slot."""
        ends = [slab * self.plan.slots_per_slab + slots for slab, slots in self._allocated.items() if slots]
        return max(ends, default=0)

    def lower(self, end: int) -> list[tuple[int, int]]:
        """From now on slots from `end` on have no room: nothing stands there, and no job has hands on them. Returns
        what is to be given back."""
        cuts = []
        for slab, slots in list(self._allocated.items()):
            keep = min(max(0, end - slab * self.plan.slots_per_slab), slots)
            if keep < slots:
                cuts.append((slab, keep))
                self._allocated[slab] = keep
            if not keep:
                del self._allocated[slab], self._marks[slab]
                if (file := self._files.pop(slab, None)) is not None:
                    self._agent.deregister(file)
        return cuts

    def give_back(self, cuts: list[tuple[int, int]]) -> None:
        """Return to the file system what `lower` told. On the thread that `grow` is called on. Raises OSError."""
        with self._quota.locked():
            for slab, keep in cuts:
                left = keep * self.plan.row_bytes
                self._quota.used_bytes -= max(0, self._folder.stat(_name(slab)).st_size - left)
                if keep:
                    self._cut(slab, left)
                else:
                    self._folder.unlink(_name(slab))

    def erase(self, slots: list[int]) -> None:
        """Make the bytes of these allocated slots unreadable. On a thread that may wait. Raises OSError."""
        row_bytes = self.plan.row_bytes
        for slab, places in _by_file(slots, self.plan.slots_per_slab):
            descriptor = self._open(slab)
            try:
                for first, last in _runs(places):
                    _zero(descriptor, first * row_bytes, (last - first) * row_bytes)
                os.fdatasync(descriptor)
            finally:
                os.close(descriptor)

    def problem(self) -> str:
        """What somebody has done to a file of ours, or "". On any thread. Raises OSError."""
        for slab, mark in list(self._marks.items()):
            slots = self._allocated.get(slab, 0)
            problem = mark.problem(slots * self.plan.row_bytes)
            if problem and self._marks.get(slab) is mark and self._allocated.get(slab, 0) == slots:
                return problem
        return ""

    def close(self) -> None:
        """Let NIXL close the files. No transfer may be pending."""
        for file in self._files.values():
            self._agent.deregister(file)
        self._files.clear()

    def _path(self, slab: int) -> Path:
        return self._directory / _name(slab)

    def _open(self, slab: int, flags: int = 0) -> int:
        """Raises OSError."""
        return self._folder.open(_name(slab), os.O_RDWR | flags)

    def _cut(self, slab: int, nbytes: int) -> None:
        descriptor = self._open(slab)
        try:
            os.ftruncate(descriptor, nbytes)
        finally:
            os.close(descriptor)

    def _take_over(self, slab: int) -> None:
        limit, status = self.plan.slots_of(slab), self._folder.stat(_name(slab))
        size = status.st_size
        if not limit:
            self._folder.unlink(_name(slab))
        elif size > limit * self.plan.row_bytes:
            self._cut(slab, limit * self.plan.row_bytes)
        if limit:
            self._marks[slab] = FileIdentity(self._path(slab), status)
            self._allocated[slab] = min(size // self.plan.row_bytes, limit)

    def _allocate(self, slab: int, end: int) -> None:
        """Make the slab's file `end` slots long, with room behind them; unheld replicas make way on a full medium."""
        row_bytes = self.plan.row_bytes
        descriptor = self._open(slab, os.O_CREAT)
        try:
            status = os.fstat(descriptor)
            size = status.st_size
            while failed := fallocate(descriptor, size, end * row_bytes - size):
                # What was taken before it failed is given back: it would be in the account and hold no row.
                os.ftruncate(descriptor, size)
                if failed == errno.EOPNOTSUPP:
                    self._note_sparse()
                    os.ftruncate(descriptor, end * row_bytes)
                    break
                if failed not in (errno.ENOSPC, errno.EDQUOT):
                    raise OSError(failed, os.strerror(failed), str(self._path(slab)))
                if not self._quota.forget_oldest():
                    raise NoSpace(f"the file system of {self._directory} is full")
        finally:
            os.close(descriptor)
        if slab not in self._marks:
            self._marks[slab] = FileIdentity(self._path(slab), status)
        self._allocated[slab] = end
        self._quota.used_bytes += end * row_bytes - size

    def _note_sparse(self) -> None:
        if not self._sparse:
            self._sparse = True
            logger.warning("%s cannot allocate ahead: the disk may fill up below the tier's capacity", self._directory)


def _name(slab: int) -> str:
    return f"slab-{slab:05d}.kv"


def _by_file(slots: list[int], slots_per_slab: int) -> Iterator[tuple[int, list[int]]]:
    """Slab -> places in it, in order."""
    for slab, found in groupby(sorted(slots), lambda slot: slot // slots_per_slab):
        yield slab, [slot % slots_per_slab for slot in found]


def _runs(places: list[int]) -> Iterator[tuple[int, int]]:
    """Runs of sorted numbers as (first, one past the last)."""
    start = 0
    for end in range(1, len(places) + 1):
        if end == len(places) or places[end] != places[end - 1] + 1:
            yield places[start], places[end - 1] + 1
            start = end


def _zero(descriptor: int, offset: int, nbytes: int) -> None:
    """Where the file system cannot forget a range and keep its room, zeroes are written."""
    failed = fallocate(descriptor, offset, nbytes, _KEEP_SIZE | _ZERO_RANGE)
    if failed == errno.EOPNOTSUPP:
        zeros = bytes(min(nbytes, 1 << 20))
        for at in range(0, nbytes, len(zeros)):
            os.pwrite(descriptor, zeros[: nbytes - at], offset + at)
    elif failed:
        raise OSError(failed, os.strerror(failed))


def guess_plan(folder: Folder, sealer: Sealer, slots: int) -> Plan | None:
    """The plan of slab files whose description is lost, if a seal in them stands where rows of the sealer's geometry,
    namespace and epoch have theirs; None if there is none among some hundred looks. Raises OSError."""
    row_bytes = sealer.geometry.row_bytes
    sizes = {name: folder.stat(name).st_size // row_bytes for name in folder.names() if _NAME.fullmatch(name)}
    for name, places in sizes.items():
        looks = range(0, places, max(1, places // _LOOKS))
        if next(seals(Stretch(folder, name, 0, list(looks)), sealer), None) is not None:
            plan = Plan.of(row_bytes, slots)
            return replace(plan, slots_per_slab=max(plan.slots_per_slab, *sizes.values()))
    return None
