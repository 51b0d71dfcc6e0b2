"""The quota of a directory of row files that several processes share: the rows that are known, and bytes taken.

There is no lock between processes, since shared file systems often have none that works: each counts its own changes
exactly, and those of others by scanning. So one process alone never exceeds the capacity, and several exceed it only by
what each may write between two scans. Nothing here is trusted when a row is loaded.
"""

from __future__ import annotations

import heapq
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final

from nixl_tiers.base.chunk import PAGE, align
from nixl_tiers.base.manifest import MAX_MANIFEST_BYTES
from nixl_tiers.tiers.rowfile.names import RowPath
from nixl_tiers.tiers.rowfile.packed_rows import (
    MAX_AGE_FROM,
    SERVABLE,
    KnownRow,
    PackedRows,
    encoded,
    key_array,
    without,
)

if TYPE_CHECKING:
    from nixl_tiers.tiers.rowfile.packed_rows import Columns, Flags, Keys

MANIFEST_BYTES: Final = 2 * align(MAX_MANIFEST_BYTES) + PAGE  # of a manifest, while it is replaced
MARGIN_BYTES: Final = (256 << 10) + MANIFEST_BYTES
"""What a file system may add by itself before the next scan, and a manifest, which must find room beside the rows."""
NAME_BYTES: Final = 512  # of a directory, for one more name in it
FANOUT: Final = 256  # directories in a namespace
SCAN_SHARE: Final = 64  # a process scans again when it has written this fraction of the capacity
SCAN_ROWS: Final = 16  # but not before it has written so many rows
FULL_S: Final = 0.5  # how long reservations are refused after no room could be made, or none could be looked for


def age_from(sealed_at: int | None, status: os.stat_result) -> int:
    """When the age of a row file begins, in Unix seconds: at its sealing. Its modification time is when it was last
    used, and counts only without a seal (None). But a seal that is ahead of the modification time was made by a clock
    that is ahead of the file server's: then that time is when the row was written, and is kept (see `touch`)."""
    mtime_s = max(0, min(int(status.st_mtime), MAX_AGE_FROM))
    return mtime_s if sealed_at is None else min(sealed_at, mtime_s)


class Reservation(Enum):
    GRANTED = "granted"
    WAIT = "wait"  # until a scan has ended, or room has been made
    REFUSED = "refused"


@dataclass(slots=True)
class FanoutDir:
    """The rows of one fan-out directory. `changes`: encoded keys of rows that this process changed while the directory
    was read; `storing`: of rows that it is storing, which count as reserved until then."""

    rows: PackedRows = field(default_factory=PackedRows)
    changes: set[bytes] | None = None
    storing: set[bytes] = field(default_factory=set)
    mtime_ns: int = -1  # of the directory, when it was read; -1: read it again in any case
    overhead_bytes: int = 0  # everything in it but rows
    added_in: int = -1  # the scan during which this process last added a row
    read_in: int = -1  # the scan during which it was last read


@dataclass(frozen=True)
class FoundRows:
    """Rows in a fan-out directory that were not known."""

    keys: Keys  # sorted
    columns: Columns
    flags: Flags


class DirQuota:
    """Thread-safe. No call waits, but for `wait_for_scan` and `wait_for_request`."""

    def __init__(self, capacity_bytes: int, row_bytes: int) -> None:
        self._limit_bytes = capacity_bytes - MARGIN_BYTES
        self._own_bytes = 0  # that this process has added by itself, less what it has deleted
        self._own_limit_bytes = math.inf  # of those, to keep `min_free`
        self.row_bytes = row_bytes
        self._max_unscanned_bytes = max(SCAN_ROWS * row_bytes, capacity_bytes // SCAN_SHARE)
        self.lock = threading.Condition()
        """Held for the rows of `directories`."""
        self._dirs: dict[tuple[str, str], FanoutDir] = {}
        self._rows_bytes = self._overhead_bytes = 0  # by the last scan, and this process's changes since
        self._added_bytes = 0  # of directories and names in them, since the last scan began
        self._reserved_bytes = self._pending_delete_bytes = 0
        self._unscanned_bytes = self._max_unscanned_bytes  # reserved since the last scan that ended began
        self._covered_bytes = 0  # of those, before the scan that is under way began
        self._requested_bytes = 0  # of room that has to be made
        self._full_until_s = 0.0
        self._scans_requested = self._scans_begun = self._scans_ended = 0
        self._rescan_at_s = 0.0  # after a scan that failed; 0: the last one did not
        self.scan_all = True
        """Whether the next scan includes all namespaces, not only the one that this process serves."""
        self.closing = False

    @property
    def used_bytes(self) -> int:
        return self._rows_bytes + self._overhead_bytes + self._added_bytes + self._reserved_bytes

    # --- the rows that are known ------------------------------------------------------------------------------------

    def get(self, path: RowPath) -> KnownRow | None:
        """The row's file, if the last scan found it or this process wrote it since."""
        with self.lock:
            directory = self._dirs.get(path[:2])
            return directory.rows.get(path.key) if directory is not None else None

    def record(
        self,
        path: RowPath,
        status: os.stat_result | None,
        age_from: int = 0,
        *,
        stored: bool = False,
        deleted: bool = False,
    ) -> None:
        """What is known of a row's file; None: it is gone. `age_from`: 0 if its seal was not read. `stored`: by this
        process, for the core, whose index has it from now on. `deleted`: by this process, which has made room."""
        with self.lock:
            directory = self._dirs.get(path[:2])
            if directory is None:
                if status is None and not stored:
                    return
                directory = self._dirs[path[:2]] = FanoutDir()
            rows, before = directory.rows, directory.rows.disk_bytes
            if status is not None:
                # A row that was replaced may seem too old: its seal is read again before it is deleted.
                rows.put(path.key, KnownRow.of(status, age_from), self.flags_of(status))
                directory.added_in = self._scans_begun
            else:
                rows.remove(path.key)
            if stored:
                rows.set_indexed(path.key, True)
            self._rows_bytes += rows.disk_bytes - before
            if stored or deleted:  # else another process did it, and may have written as much since
                self._own_bytes += rows.disk_bytes - before
            if directory.changes is not None:
                directory.changes.add(encoded(path.key))

    def record_age(self, path: RowPath, age_from: int) -> None:
        """When the age of a known row begins, in Unix seconds."""
        with self.lock:
            if (directory := self._dirs.get(path[:2])) is not None:
                directory.rows.set_age(path.key, age_from)

    def hide(self, path: RowPath) -> None:
        """The row's file stays, and is not to be listed."""
        with self.lock:
            directory = self._dirs.get(path[:2])
            row = directory.rows.get(path.key) if directory is not None else None
            if directory is not None and row is not None:
                directory.rows.put(path.key, row)

    def has_rows_beside(self, path: RowPath) -> bool:
        """Whether its fan-out directory has any rows, or is not known."""
        with self.lock:
            directory = self._dirs.get(path[:2])
            return directory is None or directory.rows.present > 0

    def forget(self, path: RowPath) -> bool:
        """The core's index has no such row from now on; whether it had."""
        with self.lock:
            directory = self._dirs.get(path[:2])
            return directory is not None and directory.rows.set_indexed(path.key, False)

    def directories(self, namespace: str | None = None) -> list[tuple[tuple[str, str], FanoutDir]]:
        """Those that are known, of all namespaces or of one: ((namespace, fan-out directory), its rows). Their rows are
        used with `lock` held, one directory at a time."""
        with self.lock:
            return [item for item in self._dirs.items() if namespace in (None, item[0][0])]

    def bytes_by_namespace(self) -> Counter[str] | None:
        """What the known rows take; None before a scan has ended."""
        nbytes: Counter[str] = Counter()
        with self.lock:
            for (namespace, _), directory in self._dirs.items():
                nbytes[namespace] += directory.rows.disk_bytes
            return nbytes if self._scans_ended else None

    def flags_of(self, status: os.stat_result) -> int:
        """SERVABLE or 0."""
        return SERVABLE if status.st_size == self.row_bytes else 0

    # --- room for new rows ------------------------------------------------------------------------------------------

    def reserve(self, waiting: int, rows: int = 1) -> Reservation:
        """Room for `rows` of `waiting` rows that are about to be written: for all of them or for none. GRANTED counts
        each until `release`."""
        with self.lock:
            if not self._scans_ended:
                return Reservation.WAIT
            need = rows * self.row_bytes
            covered_bytes = 0 if self._rescan_at_s else self._covered_bytes  # if it will end as the last one did
            if self._unscanned_bytes - covered_bytes + need > self._max_unscanned_bytes:
                if time.monotonic() < self._rescan_at_s:
                    return Reservation.REFUSED
                self.scan_all = True
                self._request_scan()
                return Reservation.WAIT
            if self._lacking(need) <= 0:
                self._reserved_bytes += need
                self._requested_bytes = max(0, self._requested_bytes - need)  # it was part of what was requested
                self._unscanned_bytes += need
                self._added_bytes += rows * NAME_BYTES
                return Reservation.GRANTED
            if self._lacking(need - self._pending_delete_bytes) <= 0:
                return Reservation.WAIT
            if time.monotonic() < self._full_until_s:
                return Reservation.REFUSED
            self._requested_bytes = max(waiting, rows) * self.row_bytes
            self.lock.notify_all()
            return Reservation.WAIT

    def limit_growth(self, spare_bytes: float) -> None:
        """So much more may be taken of the file system from now on: then a new row needs the room of an old one."""
        with self.lock:
            self._own_limit_bytes = self._own_bytes + max(0, spare_bytes)

    def _lacking(self, nbytes: int) -> float:
        """By how much `nbytes` more would exceed the capacity, or what may be taken of the file system; 0 or less: not
        at all."""
        own = self._own_bytes + self._reserved_bytes - self._own_limit_bytes
        return max(self.used_bytes - self._limit_bytes, own) + nbytes

    def add_manifest(self) -> bool:
        """Count a manifest that is about to be written; False if there is no room for it now."""
        with self.lock:
            fits = bool(self._scans_ended) and self._lacking(0) <= 0
            self._added_bytes += MANIFEST_BYTES * fits
            return fits

    def begin_stores(self, paths: Iterable[RowPath]) -> None:
        """Reserved rows get these names now: a scan that finds them leaves them to `record`."""
        with self.lock:
            for path in paths:
                self._dirs.setdefault(path[:2], FanoutDir()).storing.add(encoded(path.key))

    def release(self, path: RowPath) -> None:
        """A reserved row has been written and recorded, or its temporary file is gone."""
        with self.lock:
            self._reserved_bytes -= self.row_bytes
            directory = self._dirs[path[:2]]
            directory.storing.discard(encoded(path.key))
            directory.mtime_ns = -1  # another engine may have stored it meanwhile

    def add_directories(self, count: int) -> None:
        """This process has made new directories."""
        with self.lock:
            self._added_bytes += count * PAGE

    def begin_delete(self) -> None:
        """A row is about to be deleted: stores wait for its room."""
        with self.lock:
            self._pending_delete_bytes += self.row_bytes

    def end_delete(self) -> None:
        """That row has been deleted, or stays."""
        with self.lock:
            self._pending_delete_bytes -= self.row_bytes

    # --- scans and eviction, served by the scanner's thread ---------------------------------------------------------

    def wait_for_scan(self) -> bool:
        """Request a scan that begins after now, and wait for its end. False if it is closed instead."""
        with self.lock:
            self._request_scan()
            number = self._scans_requested
            self.lock.wait_for(lambda: self.closing or self._scans_ended >= number)
            return not self.closing

    def _request_scan(self) -> None:
        self._scans_requested = max(self._scans_requested, self._scans_begun + 1)
        self.lock.notify_all()

    def wait_for_request(self) -> bool:
        """Wait for a request for a scan or for room. Whether it includes a scan; see `closing` first."""
        with self.lock:
            self.lock.wait_for(
                lambda: self.closing or self._requested_bytes or self._scans_requested > self._scans_begun
            )
            return self._scans_requested > self._scans_begun

    def close(self) -> None:
        """Wake all that wait; no scan follows."""
        with self.lock:
            self.closing = True
            self.lock.notify_all()

    def excess_bytes(self) -> int:
        """How much has to be deleted for the requested room; 0 ends the request."""
        with self.lock:
            excess = int(self._lacking(self._requested_bytes - self._pending_delete_bytes))
            if excess <= 0 or self.closing:
                self._requested_bytes = 0
                return 0
            return excess

    def refuse_room(self) -> None:
        """The requested room cannot be made."""
        with self.lock:
            self._requested_bytes = 0
            self._full_until_s = time.monotonic() + FULL_S

    def begin_scan(self) -> tuple[int, int, bool]:
        """The number of the scan, a value for `end_scan`, and whether to scan all namespaces."""
        with self.lock:
            self._scans_begun += 1
            everything, self.scan_all = self.scan_all, False
            self._covered_bytes = self._unscanned_bytes if everything else 0
            return self._scans_begun, self._added_bytes, everything

    def end_scan(self, number: int, added_bytes: int, found: set[tuple[str, str]], overhead_bytes: int) -> None:
        """`found`: the fan-out directories that are there; `overhead_bytes`: everything but rows."""
        with self.lock:
            self._overhead_bytes = overhead_bytes
            self._added_bytes -= added_bytes
            for name in [name for name in self._dirs if name not in found]:
                directory = self._dirs[name]
                if directory.added_in < number:
                    self._rows_bytes -= directory.rows.disk_bytes
                    directory.rows.remove_many(directory.rows.present_keys())
                    directory.mtime_ns = -1
                    if directory.rows.empty and not directory.storing:
                        del self._dirs[name]
            self._unscanned_bytes -= self._covered_bytes
            self._scan_ended(number, 0.0)

    def fail_scan(self, number: int) -> None:
        """The scan ended early: what was known stays, and what was reserved is not scanned yet."""
        with self.lock:
            self.scan_all = True
            self._scan_ended(number, time.monotonic() + FULL_S)

    def _scan_ended(self, number: int, rescan_at_s: float) -> None:
        self._scans_ended, self._covered_bytes, self._rescan_at_s = number, 0, rescan_at_s
        self.lock.notify_all()

    def least_recently_read(self, namespace: str, dirs: int, rows: int) -> tuple[set[tuple[str, str]], int]:
        """Fan-out directories of a namespace: up to `dirs`, up to the one that exceeds `rows` in total; and what is
        left of `rows`, negative if they exceed it."""
        names = set[tuple[str, str]]()
        for name, directory in heapq.nsmallest(dirs, self.directories(namespace), key=lambda item: item[1].read_in):
            if rows <= 0:
                break
            names.add(name)
            rows -= directory.rows.present
        return names, rows

    def begin_dir(self, name: tuple[str, str], mtime_ns: int, *, trust: bool) -> tuple[FanoutDir, Keys | None]:
        """A fan-out directory is about to be read: the rows known in it, as encoded keys, sorted. None: it need not be
        read, as times are trusted, and its modification time is that of the last reading."""
        with self.lock:
            directory = self._dirs.setdefault(name, FanoutDir())
            if trust and directory.mtime_ns == mtime_ns:
                return directory, None
            directory.changes = set()
            return directory, directory.rows.present_keys()

    def end_dir(self, directory: FanoutDir, new: FoundRows, gone: Keys, overhead_bytes: int, mtime_ns: int) -> None:
        """It has been read; what this process changed meanwhile counts instead of what was found. `gone`: encoded keys
        of rows that are there no more, sorted."""
        with self.lock:
            changes, directory.changes = key_array((directory.changes or set()) | directory.storing), None
            rows, before = directory.rows, directory.rows.disk_bytes
            if len(new.keys):
                unchanged = without(new.keys, changes)
                rows.add_many(new.keys[unchanged], new.columns[unchanged], new.flags[unchanged])
            if len(gone):
                rows.remove_many(gone[without(gone, changes)])
            self._rows_bytes += rows.disk_bytes - before
            directory.overhead_bytes = overhead_bytes
            directory.mtime_ns = mtime_ns
            directory.read_in = self._scans_begun

    def fail_dir(self, name: tuple[str, str]) -> int:
        """It could not be read: what was known stays. Bytes of everything in it but rows, as far as known."""
        with self.lock:
            directory = self._dirs.setdefault(name, FanoutDir())
            directory.changes, directory.mtime_ns, directory.read_in = None, -1, self._scans_begun
            return directory.overhead_bytes
