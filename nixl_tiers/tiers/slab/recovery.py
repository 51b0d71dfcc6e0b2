"""Recovery by seals: which key is in which slot, for slots that the journal does not know.

Only the seal block at the end of each row is read, and only that is trusted here: a load verifies the row all the same.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.memory.seal import MAGIC, Sealer, read
from nixl_tiers.tiers.folder import Folder

logger = logging.getLogger(__name__)

_READERS: Final = 4  # a seal is one small random read: several in flight are many times as fast on flash
_READ_SLOTS: Final = 256  # between two checks of whether to stop


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
                logger.warning("%s cannot be read (%s): rows in it may not be found", path, error.strerror)
            self.failed = True
            return []


def read_seals(slots: SlabSlots, sealer: Sealer) -> Iterator[SealedRow]:
    """The seals in these slots that have the sealer's geometry, namespace and epoch. Raises OSError."""
    geometry = sealer.geometry
    descriptor = slots.folder.open(slots.name, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead into the payload between seals
        for index in slots.indexes.tolist():
            at = (index + 1) * geometry.row_bytes - geometry.seal_bytes
            raw = os.pread(descriptor, geometry.seal_bytes, at)
            seal = read(raw) if raw.startswith(MAGIC) else None
            if seal is not None and (seal.geometry, seal.namespace, seal.epoch) == (
                geometry, sealer.namespace, sealer.epoch,
            ):  # fmt: skip
                yield SealedRow(seal.sealed_at, slots.first + index, seal.key)
    finally:
        os.close(descriptor)
