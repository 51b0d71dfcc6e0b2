"""The scanner of a directory of row files: one thread that finds what other processes wrote and deleted."""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import numpy as np

from nixl_tiers.base.chunk import MAX_KEY_BYTES, NAMESPACE_NAME
from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.base.manifest import MANIFEST_NAME
from nixl_tiers.tiers.disk import INCOMING
from nixl_tiers.tiers.folder import Folder, NotOwned, fd_path
from nixl_tiers.tiers.rowfile.directory import RowDirectory
from nixl_tiers.tiers.rowfile.eviction import Evictor
from nixl_tiers.tiers.rowfile.names import FANOUT_NAME, RowPath, TempNames, fanout_of
from nixl_tiers.tiers.rowfile.packed_rows import (
    BLOCK_BYTES,
    COLUMNS,
    KnownRow,
    allocated_bytes,
    decoded,
    encoded,
    key_array,
    without,
)
from nixl_tiers.tiers.rowfile.quota import DirQuota, FoundRows

if TYPE_CHECKING:
    from nixl_tiers.tiers.rowfile.packed_rows import Keys

logger = logging.getLogger(__name__)

ORPHAN_S: Final = 900.0  # an unfinished file that is older has lost its writer, on whichever machine that was
_SETTLED_NS: Final = 2_000_000_000  # a directory changed longer ago gets another modification time with its next change
_DISTRUSTED_DIRS: Final = 22  # read in a scan although their modification times have not changed: all 256 in a minute,
_DISTRUSTED_ROWS: Final = 4096  # but no more than so many rows, to stay below one percent of a core


class DirScanner:
    """Scans when the quota requests it, and then has room made if that is requested."""

    def __init__(self, directory: RowDirectory, quota: DirQuota, evictor: Evictor, log_once: LogOnce) -> None:
        self._directory = directory
        self._quota = quota
        self._evictor = evictor
        self._log_once = log_once
        self._thread: threading.Thread | None = None
        self._seen: dict[str, tuple[int, set[tuple[str, str]]]] = {}  # what the last scan of each namespace returned
        self._turn = 0
        self._credits: dict[str, int] = {}  # how many rows may be read by distrust, less those that were read
        self.served = ""
        """The namespace that this process serves."""
        self.cpu_s = 0.0
        """Of the last scan but for the first."""

    def start(self) -> None:
        """Start the thread, unless it runs."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="scanner", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._quota.close()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            scan = self._quota.wait_for_request()
            if self._quota.closing:
                return
            if scan:
                self._scan()
            if self._directory.writes:
                self._evictor.make_room(self._scan_all)

    def _scan_all(self) -> None:
        self._quota.scan_all = True
        self._scan()

    def _scan(self) -> None:
        began_s = time.thread_time()
        number, added_bytes, everything = self._quota.begin_scan()
        overhead_bytes, namespaces = 0, list[str]()
        try:
            with self._directory.base() as base:
                overhead_bytes = allocated_bytes(os.fstat(base.descriptor))
                for entry in os.scandir(self._directory.path):
                    if NAMESPACE_NAME.fullmatch(entry.name) and _may_be_folder(base, entry.name):
                        namespaces.append(entry.name)
                    elif entry.name == INCOMING:
                        self._directory.refresh_time()
                        overhead_bytes += self._delete_orphans(base)
                skipped = set() if everything else self._skipped(namespaces)
                seen = {name: self._seen[name] for name in skipped}
                seen |= {name: self._scan_namespace(base, name) for name in namespaces if name not in skipped}
        except OSError as error:
            self._unreadable(error)
            self._quota.fail_scan(number)
        else:
            self._seen = seen
            overhead_bytes += sum(overhead for overhead, _ in seen.values())
            self._quota.end_scan(number, added_bytes, set().union(*(dirs for _, dirs in seen.values())), overhead_bytes)
        self._evictor.drop_candidates()
        if number > 1:
            self.cpu_s = time.thread_time() - began_s

    def _unreadable(self, error: OSError) -> None:
        path = error.filename or self._directory.path
        self._log_once.report("scan", f"{path} cannot be scanned ({error.strerror or error})")

    def _skipped(self, namespaces: list[str]) -> set[str]:
        """The namespaces to skip: of those that are not served here, a scan takes one in turn."""
        others = [name for name in sorted(namespaces) if name != self.served]
        self._turn += 1
        return {name for number, name in enumerate(others) if number != self._turn % len(others) and name in self._seen}

    def _scan_namespace(self, base: Folder, namespace: str) -> tuple[int, set[tuple[str, str]]]:
        """Bytes of everything in it but rows, and its fan-out directories. What was known of one that cannot be read
        stays: it must not hide all others."""
        credit = min(_DISTRUSTED_ROWS, self._credits.get(namespace, 0) + _DISTRUSTED_ROWS)
        distrusted, self._credits[namespace] = self._quota.least_recently_read(namespace, _DISTRUSTED_DIRS, credit)
        overhead_bytes, found = 0, set[tuple[str, str]]()
        try:
            with base.folder(namespace) as home:
                overhead_bytes += allocated_bytes(os.fstat(home.descriptor))
                for entry in os.scandir(fd_path(home.descriptor)):
                    name = (namespace, entry.name)
                    if FANOUT_NAME.fullmatch(entry.name):
                        nbytes = self._scan_fanout(home, name, trust=name not in distrusted)
                        if nbytes is not None:
                            found.add(name)
                            overhead_bytes += nbytes
                    elif entry.name == MANIFEST_NAME:
                        with suppress(FileNotFoundError):  # purged meanwhile
                            overhead_bytes += allocated_bytes(entry.stat(follow_symlinks=False))
        except (FileNotFoundError, NotOwned):
            pass
        except OSError as error:
            self._unreadable(error)
            before_bytes, _ = self._seen.get(namespace, (0, set()))
            return before_bytes, {name for name, _ in self._quota.directories(namespace)}
        return overhead_bytes, found

    def _scan_fanout(self, home: Folder, name: tuple[str, str], *, trust: bool) -> int | None:
        """Bytes of everything in it but rows; None if it is no directory for rows."""
        try:
            # Opened each time: that makes an NFS client ask the server for the modification time.
            with home.folder(name[1]) as fanout:
                return self._read_fanout(name, fanout, trust=trust)
        except (FileNotFoundError, NotOwned):
            return None
        except OSError as error:
            self._unreadable(error)
            return self._quota.fail_dir(name)

    def _read_fanout(self, name: tuple[str, str], fanout: Folder, *, trust: bool) -> int:
        """Bytes of everything in it but rows. Only rows that are new cost a stat."""
        status = os.fstat(fanout.descriptor)
        directory, known = self._quota.begin_dir(name, status.st_mtime_ns, trust=trust)
        if known is None:
            return directory.overhead_bytes
        overhead_bytes = allocated_bytes(status)
        try:
            found = key_array(_keys_of(fanout.names()))
            new, foreign_bytes, unreadable = self._stat_rows(name, fanout, found[without(found, known)])
        except FileNotFoundError:
            self._quota.fail_dir(name)
            raise
        overhead_bytes += foreign_bytes + unreadable * self._quota.row_bytes
        settled = 1e9 * self._directory.server_time.now_s() - status.st_mtime_ns > _SETTLED_NS and not unreadable
        gone = known[without(known, found)]
        self._quota.end_dir(directory, new, gone, overhead_bytes, status.st_mtime_ns if settled else -1)
        return overhead_bytes

    def _stat_rows(self, name: tuple[str, str], fanout: Folder, keys: Keys) -> tuple[FoundRows, int, int]:
        """Those that are still there; bytes of files that are no rows, as a tier makes them in another directory; and
        how many others cannot be read: these may be found later."""
        there, columns, flags = list[bool](), list[tuple[int, int, int]](), list[int]()
        foreign_bytes = unreadable = 0
        for raw in keys.tolist():
            path = RowPath(*name, decoded(raw))
            there.append(False)
            try:
                status = fanout.stat(path.name)
            except FileNotFoundError:
                continue
            except OSError as error:
                self._unreadable(error)
                unreadable += 1
                continue
            row = KnownRow.of(status)
            if fanout_of(path.key) != name[1]:
                foreign_bytes += row.disk_bytes
                continue
            there[-1] = True
            columns.append((row.mtime_ns, row.disk_bytes // BLOCK_BYTES, row.age_from))
            flags.append(self._quota.flags_of(status))
        rows = FoundRows(keys[np.array(there, np.bool_)], np.array(columns, COLUMNS), np.array(flags, np.uint8))
        return rows, foreign_bytes, unreadable

    def _delete_orphans(self, base: Folder) -> int:
        """Delete unfinished files that nobody writes any more, unless this is a reader. Bytes of those that others are
        writing, or that cannot be deleted."""
        total = 0
        with suppress(FileNotFoundError), base.folder(INCOMING) as incoming:
            total += allocated_bytes(os.fstat(incoming.descriptor))
            for name in incoming.names():
                if self._directory.temp_names.is_in_use(name):
                    continue
                try:
                    total += self._unfinished_bytes(incoming, name)
                except FileNotFoundError:
                    pass
                except OSError as error:
                    self._unreadable(error)
                    total += self._quota.row_bytes
        return total

    def _unfinished_bytes(self, incoming: Folder, name: str) -> int:
        """0 if it was an orphan, which is deleted. Raises OSError."""
        status = incoming.stat(name)
        age_s = self._directory.server_time.now_s() - status.st_mtime
        orphan = TempNames.matches(name) and (self._directory.temp_names.is_orphan(name) or age_s > ORPHAN_S)
        if orphan and self._directory.writes:
            incoming.unlink(name)
            logger.info("deleted %s, an orphan: nobody writes it any more", incoming.path / name)
            return 0
        return max(allocated_bytes(status), status.st_size)


def _may_be_folder(base: Folder, name: str) -> bool:
    try:
        return base.has_folder(name)
    except OSError:  # it cannot be read now
        return True


def _keys_of(names: list[str]) -> list[bytes]:
    """The encoded keys of files that have a row's name."""
    keys = list[bytes]()
    for name in names:
        with suppress(ValueError):
            key = bytes.fromhex(name[:-4])
            if name == f"{key.hex()}.row" and 0 < len(key) <= MAX_KEY_BYTES:
                keys.append(encoded(key))
    return keys
