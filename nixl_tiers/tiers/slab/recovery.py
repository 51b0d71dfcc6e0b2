"""Seals read back from slab files: which key stands in which slot, when the journal cannot say.

Only the seal block at the end of each row is read, and only it is believed here: a load verifies the row all the same.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

from nixl_tiers.memory.seal import MAGIC, Sealer, read
from nixl_tiers.tiers.folder import Folder

logger = logging.getLogger(__name__)

_READERS: Final = 4  # a seal is one small random read: a few at once are many times as fast on flash
_READ_SLOTS: Final = 256  # between two looks at whether to stop


class Stretch(NamedTuple):
    """Slots of one slab: `places` within the file, whose place 0 is the slot `first`."""

    folder: Folder
    name: str
    first: int
    places: list[int]


class Found(NamedTuple):
    """A seal that belongs where it stands. Found ones sort by age."""

    sealed_at: int
    slot: int
    key: bytes


class Scan:
    """Reads the seals of many slots on threads of its own. `found` is whole once `done`."""

    def __init__(self, stretches: Iterable[Stretch], sealer: Sealer) -> None:
        """Seals count if they are of the sealer's geometry, namespace and epoch."""
        self.found: list[Found] = []  # the oldest first
        self.failed = False
        """Whether something could not be read: there may be more rows than were found."""
        self._sealer = sealer
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(list(stretches),), name="scan", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Give up, soon."""
        self._stop.set()
        self._thread.join()

    def _run(self, stretches: list[Stretch]) -> None:
        with ThreadPoolExecutor(_READERS, thread_name_prefix="seals") as readers:
            pieces = (
                stretch._replace(places=stretch.places[start : start + _READ_SLOTS])
                for stretch in stretches
                for start in range(0, len(stretch.places), _READ_SLOTS)
            )
            for part in readers.map(self._read, pieces):
                self.found += part
        self.found.sort()

    def _read(self, stretch: Stretch) -> list[Found]:
        if self._stop.is_set():
            return []
        try:
            return list(seals(stretch, self._sealer))
        except OSError as error:
            if not self.failed:
                path = stretch.folder.path / stretch.name
                logger.warning("%s cannot be read (%s): its rows may stay unknown", path, error.strerror)
            self.failed = True
            return []


def seals(stretch: Stretch, sealer: Sealer) -> Iterator[Found]:
    """The seals of these slots that the sealer could have written. Raises OSError."""
    geometry = sealer.geometry
    descriptor = stretch.folder.open(stretch.name, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # the payload in between stays where it is
        for place in stretch.places:
            at = (place + 1) * geometry.row_bytes - geometry.seal_bytes
            raw = os.pread(descriptor, geometry.seal_bytes, at)
            seal = read(raw) if raw.startswith(MAGIC) else None
            if seal is not None and (seal.geometry, seal.namespace, seal.epoch) == (
                geometry, sealer.namespace, sealer.epoch,
            ):  # fmt: skip
                yield Found(seal.sealed_at, stretch.first + place, seal.key)
    finally:
        os.close(descriptor)
