"""The scanner of a directory of row files: one thread that finds what other processes wrote and deleted."""

from __future__ import annotations

import logging
import os
import re
import threading
from contextlib import suppress
from typing import Final

from nixl_tiers.tiers.disk import INCOMING
from nixl_tiers.tiers.folder import Folder, NotOwned, fd_path
from nixl_tiers.tiers.log_once import LogOnce
from nixl_tiers.tiers.rowfile.directory import RowDirectory
from nixl_tiers.tiers.rowfile.eviction import Evictor
from nixl_tiers.tiers.rowfile.quota import DirQuota, FileStat, allocated_bytes

logger = logging.getLogger(__name__)

ORPHAN_S: Final = 900.0  # an unfinished file that is older has lost its writer, on whichever machine that was
_SETTLED_NS: Final = 2_000_000_000  # a directory changed longer ago gets another modification time with its next change
_TRUST_SCANS: Final = 12  # every so many scans, modification times of directories are not trusted
_NAMESPACE: Final = re.compile(r"[0-9a-f]{32}")
_FANOUT: Final = re.compile(r"[0-9a-f]{2}")
_ROW: Final = re.compile(r"(?:[0-9a-f]{2}){1,112}\.row")


class DirScanner:
    """Scans when the quota requests it, and then has room made if that is requested."""

    def __init__(self, directory: RowDirectory, quota: DirQuota, evictor: Evictor, log_once: LogOnce) -> None:
        self._directory = directory
        self._quota = quota
        self._evictor = evictor
        self._log_once = log_once
        self._thread: threading.Thread | None = None

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
                self._evictor.make_room(self._scan)

    def _scan(self) -> None:
        number, added_bytes = self._quota.begin_scan()
        overhead_bytes, found = 0, set[tuple[str, str]]()
        try:
            with self._directory.base() as base:
                overhead_bytes = allocated_bytes(os.fstat(base.descriptor))
                for entry in os.scandir(self._directory.path):
                    if _NAMESPACE.fullmatch(entry.name) and base.has_folder(entry.name):
                        overhead_bytes += self._scan_namespace(base, entry.name, found, number)
                    elif entry.name == INCOMING:
                        self._directory.refresh_time()
                        overhead_bytes += self._delete_orphans(base)
                    else:  # foreign files, also directories that others can write to
                        overhead_bytes += _disk_bytes(entry)
        except OSError as error:
            path = error.filename or self._directory.path
            self._log_once.report("scan", f"{path} cannot be scanned ({error.strerror or error})")
            self._quota.fail_scan(number)
        else:
            self._quota.end_scan(number, added_bytes, found, overhead_bytes)

    def _scan_namespace(self, base: Folder, namespace: str, found: set[tuple[str, str]], number: int) -> int:
        """Bytes of everything in it but rows."""
        overhead_bytes = 0
        with suppress(FileNotFoundError, NotOwned), base.folder(namespace) as home:
            overhead_bytes += allocated_bytes(os.fstat(home.descriptor))
            for entry in os.scandir(fd_path(home.descriptor)):
                if not (_FANOUT.fullmatch(entry.name) and home.has_folder(entry.name)):
                    overhead_bytes += _disk_bytes(entry)
                    continue
                name = (namespace, entry.name)
                with suppress(FileNotFoundError, NotOwned), home.folder(entry.name) as fanout:
                    overhead_bytes += self._scan_fanout(name, fanout, trust=number % _TRUST_SCANS != 0)
                    found.add(name)
        return overhead_bytes

    def _scan_fanout(self, name: tuple[str, str], fanout: Folder, *, trust: bool) -> int:
        """Bytes of everything in it but rows. Only rows that are new cost a stat."""
        status = os.fstat(fanout.descriptor)
        directory, known = self._quota.begin_dir(name, status.st_mtime_ns, trust=trust)
        if known is None:
            return directory.overhead_bytes
        found, overhead_bytes = dict[str, FileStat](), allocated_bytes(status)
        try:
            for entry in os.scandir(fd_path(fanout.descriptor)):
                if not _ROW.fullmatch(entry.name):
                    overhead_bytes += _disk_bytes(entry)
                elif entry.name in known:
                    found[entry.name] = known[entry.name]
                else:
                    with suppress(FileNotFoundError):
                        found[entry.name] = FileStat.of(entry.stat(follow_symlinks=False))
        except OSError:
            self._quota.fail_dir(directory)
            raise
        settled = 1e9 * self._directory.server_time.now_s() - status.st_mtime_ns > _SETTLED_NS
        self._quota.end_dir(directory, found, overhead_bytes, status.st_mtime_ns if settled else -1)
        return overhead_bytes

    def _delete_orphans(self, base: Folder) -> int:
        """Delete unfinished files whose writers are gone. Bytes of those that others are writing."""
        total = 0
        with suppress(FileNotFoundError), base.folder(INCOMING) as incoming:
            total += allocated_bytes(os.fstat(incoming.descriptor))
            for name in incoming.names():
                if self._directory.temp_names.is_own(name):
                    continue
                with suppress(FileNotFoundError):
                    status = incoming.stat(name)
                    age_s = self._directory.server_time.now_s() - status.st_mtime
                    if self._directory.temp_names.is_orphan(name) or age_s > ORPHAN_S:
                        incoming.unlink(name)
                        logger.info("deleted %s, an orphan: its writer is gone", incoming.path / name)
                    else:
                        total += max(allocated_bytes(status), status.st_size)
        return total


def _disk_bytes(entry: os.DirEntry[str]) -> int:
    """Bytes of a file, or of everything below a directory, that is no row."""
    try:
        status = entry.stat(follow_symlinks=False)
        if not entry.is_dir(follow_symlinks=False):
            return max(allocated_bytes(status), status.st_size)
        return allocated_bytes(status) + sum(map(_disk_bytes, os.scandir(entry.path)))
    except OSError:  # it has gone
        return 0
