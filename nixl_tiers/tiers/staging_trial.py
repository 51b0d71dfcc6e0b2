"""Whether staging pays here: the first moves go both ways in turns, and the choice is remembered.

It depends on the disk, its driver, the pages that the region got and the processor, so only real moves tell. The two
ways take turns in windows, because units that run together share the disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from nixl_tiers.base.cache import cache_folder, write_whole

GAIN: Final = 1.1
WINDOW_BYTES: Final = 64 << 20
WINDOW_S: Final = 0.1
WINDOWS: Final = 7  # of each way
_VERSION: Final = 1


@dataclass(frozen=True)
class Measured:
    """Bytes a second each way, of loads or stores."""

    direction: str
    path: str
    row_bytes: int
    direct: float
    staged: float

    @property
    def pays(self) -> bool:
        return self.staged >= GAIN * self.direct

    def __str__(self) -> str:
        rates = f"{self.staged / 1e9:.2f} GB/s staged, {self.direct / 1e9:.2f} GB/s direct"
        choice = "staged" if self.pays else "direct"
        return f"{self.direction} of rows of {self.row_bytes} bytes, {self.path}: {rates}; they are {choice}"


class Trial:
    """Units of one direction, in windows of one way each. Pure: times are arguments, in seconds.

    Time counts only while units run, and only while none of the other way does.
    """

    def __init__(self, *, staged: bool = False) -> None:
        """`staged`: which way comes first."""
        self.staged = staged
        """Which way the next unit goes."""
        self.rates: dict[bool, list[float]] = {False: [], True: []}
        """Bytes a second of the windows so far, direct (False) and staged."""
        self._running = {False: 0, True: 0}
        self._bytes = 0
        self._seconds = 0.0
        self._since_s = 0.0

    def begin(self, now_s: float) -> bool:
        """A unit starts; returns which way it goes."""
        if not any(self._running.values()):
            self._since_s = now_s
        self._running[self.staged] += 1
        return self.staged

    def end(self, now_s: float, nbytes: int, *, staged: bool) -> None:
        """A unit that went this way has ended and moved `nbytes`."""
        mixed = staged != self.staged or self._running[not staged] > 0
        self._running[staged] -= 1
        elapsed_s, self._since_s = now_s - self._since_s, now_s
        if mixed or not nbytes:
            return
        self._bytes += nbytes
        self._seconds += elapsed_s
        if self._bytes >= WINDOW_BYTES and self._seconds >= WINDOW_S:
            self.rates[staged].append(self._bytes / self._seconds)
            self._bytes, self._seconds = 0, 0.0
            self.staged = not staged

    @property
    def over(self) -> bool:
        return all(len(rates) >= WINDOWS for rates in self.rates.values())

    def measured(self, direction: str, path: Path, row_bytes: int) -> Measured:
        """The medians, once it is over."""
        direct, staged = (statistics.median(self.rates[staged]) for staged in (False, True))
        return Measured(direction, str(path), row_bytes, direct, staged)


def recall(direction: str, path: Path, row_bytes: int) -> Measured | None:
    """What was measured before on this file system with rows of this size, or None. May wait for the medium."""
    with contextlib.suppress(OSError):
        file = _file(direction, path, row_bytes)
        return read(file) if file else None
    return None


def remember(measured: Measured) -> None:
    """For `recall`; without a cache directory it is measured again at the next start. May wait for the medium."""
    with contextlib.suppress(OSError):
        if file := _file(measured.direction, Path(measured.path), measured.row_bytes):
            write_whole(file, json.dumps(asdict(measured), indent=1).encode())


def read(file: Path) -> Measured | None:
    """One remembered measurement, or None if it cannot be read."""
    try:
        found = json.loads(file.read_bytes())
        where = str(found["direction"]), str(found["path"]), int(found["row_bytes"])
        return Measured(*where, float(found["direct"]), float(found["staged"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def all_remembered() -> list[Measured]:
    folder = cache_folder()
    found = (read(file) for file in sorted(folder.glob("staging-*.json") if folder else ()))
    return [measured for measured in found if measured is not None]


def _file(direction: str, path: Path, row_bytes: int) -> Path | None:
    """By the file system's ID, which stays the same after a reboot, where it has one. Raises OSError."""
    folder = cache_folder()
    device = os.statvfs(path).f_fsid or path.stat().st_dev
    digest = hashlib.sha256(f"{_VERSION}:{device}:{row_bytes}".encode()).hexdigest()[:16]
    return folder / f"staging-{direction}-{digest}.json" if folder else None
