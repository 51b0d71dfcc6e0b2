"""The quota of a directory of row files that several processes share: the rows that are known, and bytes taken.

There is no lock between processes, since shared file systems often have none that works: each counts its own changes
exactly, and those of others by scanning. So one process alone never exceeds the capacity, and several exceed it only by
what each may write between two scans. Nothing here is trusted when a row is loaded.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple

from nixl_tiers.chunk import PAGE, Key, align, key_of_object, object_name

MARGIN_BYTES: Final = 256 << 10  # what a file system may add by itself before the next scan
NAME_BYTES: Final = 512  # of a directory, for one more name in it
FANOUT: Final = 256  # directories in a namespace
SCAN_SHARE: Final = 64  # a process scans again when it has written this fraction of the capacity
SCAN_ROWS: Final = 16  # but not before it has written so many rows
FULL_S: Final = 0.5  # how long reservations are refused after no room could be made


class RowPath(NamedTuple):
    """Where a row's file is below the tier's path: `<namespace>/<fan-out directory>/<name>`."""

    namespace: str
    fanout: str
    name: str

    @classmethod
    def of(cls, namespace: str, key: Key) -> RowPath:
        fanout, _, digits = object_name(key).partition("/")
        return cls(namespace, fanout, f"{digits}.row")

    @property
    def key(self) -> Key | None:
        return key_of_object(f"{self.fanout}/{self.name.removesuffix('.row')}")


class FileStat(NamedTuple):
    """A row file when this process first saw it, or last wrote or touched it."""

    mtime_ns: int
    size: int
    disk_bytes: int
    age_from: int = 0  # Unix seconds (see `age_from`); 0: its seal has not been read yet

    @classmethod
    def of(cls, status: os.stat_result) -> FileStat:
        return cls(status.st_mtime_ns, status.st_size, max(allocated_bytes(status), align(status.st_size)))


def age_from(sealed_at: int | None, status: os.stat_result) -> int:
    """When the age of a row file begins, in Unix seconds: at its sealing. Its modification time is when it was last
    used, and counts only without a seal (None). But a seal that is ahead of the modification time was made by a clock
    that is ahead of the file server's: then that time is when the row was written, and is kept (see `touch`)."""
    return int(status.st_mtime) if sealed_at is None else min(sealed_at, int(status.st_mtime))


def allocated_bytes(status: os.stat_result) -> int:
    return status.st_blocks * 512


class Reservation(Enum):
    GRANTED = "granted"
    WAIT = "wait"  # until a scan has ended, or room has been made
    REFUSED = "refused"


@dataclass(slots=True)
class FanoutDir:
    """The rows of one fan-out directory. `changes`: by this process while it is being read (None: deleted)."""

    rows: dict[str, FileStat] = field(default_factory=dict)
    changes: dict[str, FileStat | None] | None = None
    mtime_ns: int = -1  # of the directory, when it was read; -1: read it again in any case
    overhead_bytes: int = 0  # everything in it but rows
    added_in: int = -1  # the scan during which this process last added a row


class DirQuota:
    """Thread-safe. No call waits, but for `wait_for_scan` and `wait_for_request`."""

    def __init__(self, capacity_bytes: int, row_bytes: int) -> None:
        self._limit_bytes = capacity_bytes - MARGIN_BYTES
        self._row_bytes = row_bytes
        self._max_unscanned_bytes = max(SCAN_ROWS * row_bytes, capacity_bytes // SCAN_SHARE)
        self._lock = threading.Condition()
        self._dirs: dict[tuple[str, str], FanoutDir] = {}
        self._rows_bytes = self._overhead_bytes = 0  # by the last scan, and this process's changes since
        self._added_bytes = 0  # of directories and names in them, since the last scan began
        self._reserved_bytes = self._pending_delete_bytes = 0
        self._unscanned_bytes = 0  # reserved since the last scan began
        self._requested_bytes = 0  # of room that has to be made
        self._full_until_s = 0.0
        self._scans_requested = self._scans_begun = self._scans_ended = 0
        self.closing = False

    @property
    def used_bytes(self) -> int:
        return self._rows_bytes + self._overhead_bytes + self._added_bytes + self._reserved_bytes

    # --- the rows that are known ------------------------------------------------------------------------------------

    def stat(self, path: RowPath) -> FileStat | None:
        """The row's file, if the last scan found it or this process wrote it since."""
        with self._lock:
            directory = self._dirs.get(path[:2])
            return directory.rows.get(path.name) if directory is not None else None

    def rows(self, namespace: str | None = None) -> Iterator[tuple[FileStat, RowPath]]:
        """All known rows, or those of one namespace, in no order. Rows may change meanwhile."""
        with self._lock:
            names = [name for name in self._dirs if namespace in (None, name[0])]
        for name in names:
            with self._lock:
                directory = self._dirs.get(name)
                rows = list(directory.rows.items()) if directory is not None else []
            yield from ((stat, RowPath(*name, row)) for row, stat in rows)

    @property
    def row_count(self) -> int:
        with self._lock:
            return sum(len(directory.rows) for directory in self._dirs.values())

    def has_rows_beside(self, path: RowPath) -> bool:
        """Whether its fan-out directory has any rows, or is not known."""
        with self._lock:
            directory = self._dirs.get(path[:2])
            return directory is None or bool(directory.rows)

    def record(self, path: RowPath, stat: FileStat | None) -> None:
        """What this process did to a row's file, or found there; None: it is gone."""
        with self._lock:
            directory = self._dirs.get(path[:2])
            if directory is None:
                if stat is None:
                    return
                directory = self._dirs[path[:2]] = FanoutDir()
            before = directory.rows.pop(path.name, None)
            if before is not None:
                self._rows_bytes -= before.disk_bytes
                if stat is not None and not stat.age_from:
                    # Too old if the row was replaced, which does no harm: the seal is read again before it is deleted.
                    stat = stat._replace(age_from=before.age_from)
            if stat is not None:
                directory.rows[path.name] = stat
                self._rows_bytes += stat.disk_bytes
                directory.added_in = self._scans_begun
            if directory.changes is not None:
                directory.changes[path.name] = stat

    def record_age(self, path: RowPath, age_from: int) -> None:
        """When the age of a known row begins, in Unix seconds."""
        stat = self.stat(path)
        if stat is not None:
            self.record(path, stat._replace(age_from=age_from))

    # --- room for new rows ------------------------------------------------------------------------------------------

    def reserve(self, waiting: int) -> Reservation:
        """Room for one of `waiting` rows that are about to be written. GRANTED counts it until `release`."""
        with self._lock:
            if not self._scans_ended:
                return Reservation.WAIT
            need = self._row_bytes
            if self._unscanned_bytes + need > self._max_unscanned_bytes:
                self._request_scan()
                return Reservation.WAIT
            if self.used_bytes + need <= self._limit_bytes:
                self._reserved_bytes += need
                self._unscanned_bytes += need
                self._added_bytes += NAME_BYTES
                return Reservation.GRANTED
            if self.used_bytes - self._pending_delete_bytes + need <= self._limit_bytes:
                return Reservation.WAIT
            if time.monotonic() < self._full_until_s:
                return Reservation.REFUSED
            self._requested_bytes = waiting * need
            self._lock.notify_all()
            return Reservation.WAIT

    def release(self) -> None:
        """A reserved row has been written and recorded, or its temporary file is gone."""
        with self._lock:
            self._reserved_bytes -= self._row_bytes

    def add_directories(self, count: int) -> None:
        """This process has made new directories."""
        with self._lock:
            self._added_bytes += count * PAGE

    def begin_delete(self) -> None:
        """A row is about to be deleted: stores wait for its room."""
        with self._lock:
            self._pending_delete_bytes += self._row_bytes

    def end_delete(self) -> None:
        """That row has been deleted, or stays."""
        with self._lock:
            self._pending_delete_bytes -= self._row_bytes

    # --- scans and eviction, served by the scanner's thread ---------------------------------------------------------

    def wait_for_scan(self) -> bool:
        """Request a scan that begins after now, and wait for its end. False if it is closed instead."""
        with self._lock:
            self._request_scan()
            number = self._scans_requested
            self._lock.wait_for(lambda: self.closing or self._scans_ended >= number)
            return not self.closing

    def _request_scan(self) -> None:
        self._scans_requested = max(self._scans_requested, self._scans_begun + 1)
        self._lock.notify_all()

    def wait_for_request(self) -> bool:
        """Wait for a request for a scan or for room. Whether it includes a scan; see `closing` first."""
        with self._lock:
            self._lock.wait_for(
                lambda: self.closing or self._requested_bytes or self._scans_requested > self._scans_begun
            )
            return self._scans_requested > self._scans_begun

    def close(self) -> None:
        """Wake all that wait; no scan follows."""
        with self._lock:
            self.closing = True
            self._lock.notify_all()

    def excess_bytes(self) -> int:
        """How much has to be deleted for the requested room; 0 ends the request."""
        with self._lock:
            excess = self.used_bytes - self._pending_delete_bytes + self._requested_bytes - self._limit_bytes
            if excess <= 0 or self.closing:
                self._requested_bytes = 0
                return 0
            return excess

    def refuse_room(self) -> None:
        """The requested room cannot be made."""
        with self._lock:
            self._requested_bytes = 0
            self._full_until_s = time.monotonic() + FULL_S

    def begin_scan(self) -> tuple[int, int]:
        """The number of the scan, and a value for `end_scan`."""
        with self._lock:
            self._scans_begun += 1
            self._unscanned_bytes = 0
            return self._scans_begun, self._added_bytes

    def end_scan(self, number: int, added_bytes: int, found: set[tuple[str, str]], overhead_bytes: int) -> None:
        """`found`: the fan-out directories that are there; `overhead_bytes`: everything but rows."""
        with self._lock:
            self._overhead_bytes = overhead_bytes
            self._added_bytes -= added_bytes
            for name in [name for name in self._dirs if name not in found]:
                if self._dirs[name].added_in < number:
                    self._rows_bytes -= sum(stat.disk_bytes for stat in self._dirs.pop(name).rows.values())
            self._scan_ended(number)

    def fail_scan(self, number: int) -> None:
        """The scan ended early: what was known stays."""
        with self._lock:
            self._scan_ended(number)

    def _scan_ended(self, number: int) -> None:
        self._scans_ended = number
        self._lock.notify_all()

    def begin_dir(
        self, name: tuple[str, str], mtime_ns: int, *, trust: bool
    ) -> tuple[FanoutDir, dict[str, FileStat] | None]:
        """A fan-out directory is about to be read: the rows known in it. None: it need not be read, as times are
        trusted in this scan, and its modification time is that of the last one."""
        with self._lock:
            directory = self._dirs.setdefault(name, FanoutDir())
            if trust and directory.mtime_ns == mtime_ns:
                return directory, None
            directory.changes = {}
            return directory, dict(directory.rows)

    def end_dir(self, directory: FanoutDir, found: dict[str, FileStat], overhead_bytes: int, mtime_ns: int) -> None:
        """It has been read; what this process changed meanwhile counts instead of what was found."""
        with self._lock:
            changes, directory.changes = directory.changes or {}, None
            for name, change in changes.items():
                found.pop(name, None)
                if change is not None:
                    found[name] = change
            self._rows_bytes += sum(stat.disk_bytes for stat in found.values())
            self._rows_bytes -= sum(stat.disk_bytes for stat in directory.rows.values())
            directory.rows = found
            directory.overhead_bytes = overhead_bytes
            directory.mtime_ns = mtime_ns

    def fail_dir(self, directory: FanoutDir) -> None:
        """It could not be read: what was known stays."""
        with self._lock:
            directory.changes = None
