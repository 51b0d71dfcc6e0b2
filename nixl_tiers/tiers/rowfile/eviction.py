"""Which rows of a directory are deleted: the least recently used ones when room is requested, and expired ones."""

from __future__ import annotations

import heapq
import os
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Final

from nixl_tiers.chunk import PAGE
from nixl_tiers.memory.seal import read as read_seal
from nixl_tiers.tiers.expiry import has_expired
from nixl_tiers.tiers.log_once import LogOnce
from nixl_tiers.tiers.rowfile.directory import RowDirectory
from nixl_tiers.tiers.rowfile.quota import DirQuota, FileStat, RowPath, age_from

_MIN_CANDIDATES: Final = 256
_CANDIDATE_SHARE: Final = 16  # of all rows, this fraction is sorted at a time
_EXPIRED_BATCH: Final = 64  # submitted to the workers at a time
_MAX_AHEAD_S: Final = 60.0  # no file is ahead of its server's clock by more, unless that was put back
_TAIL_BYTES: Final = (PAGE, 64 << 10)  # in which a seal is looked for: nearly always the first, in any case the second


class _Eviction(Enum):
    """What became of a victim."""

    DELETED = "deleted"
    USED = "used"  # since it was selected
    MISSING = "missing"  # another process has deleted it
    FAILED = "failed"


class Evictor:
    """`make_room` runs on the scanner's thread, `expire` on the tier's sweeper; both delete on the workers."""

    def __init__(self, directory: RowDirectory, quota: DirQuota, log_once: LogOnce) -> None:
        self._directory = directory
        self._quota = quota
        self._log_once = log_once
        self._candidates: deque[tuple[int, RowPath]] = deque()

    def make_room(self, rescan: Callable[[], None]) -> None:
        """Delete the least recently used rows, of whichever namespace, until the requested room is there."""
        while excess_bytes := self._quota.excess_bytes():
            victims = self._select_victims(excess_bytes)
            if not victims:
                self._quota.refuse_room()
                return
            evictions = [self._directory.submit(path, self._evict, path, mtime_ns) for mtime_ns, path in victims]
            ends = {eviction.result() for eviction in evictions}
            if _Eviction.MISSING in ends:
                rescan()  # another process makes room too: what is there now?
            elif ends == {_Eviction.FAILED}:
                self._quota.refuse_room()
                return

    def _select_victims(self, excess_bytes: int) -> list[tuple[int, RowPath]]:
        """The least recently used rows, of at least so many bytes if there are enough: (modification time, path).

        A sixteenth of all rows is sorted at a time. Any row beside those was used later than they were, and stays so.
        """
        victims = list[tuple[int, RowPath]]()
        for refill in (False, True):
            if refill and not victims:
                count = max(_MIN_CANDIDATES, self._quota.row_count // _CANDIDATE_SHARE)
                rows = ((stat.mtime_ns, path) for stat, path in self._quota.rows())
                self._candidates.extend(heapq.nsmallest(count, rows))
            while self._candidates and excess_bytes > 0:
                mtime_ns, path = self._candidates.popleft()
                stat = self._quota.stat(path)
                if stat is not None and stat.mtime_ns <= mtime_ns:
                    victims.append((mtime_ns, path))
                    excess_bytes -= stat.disk_bytes
        return victims

    def _evict(self, path: RowPath, mtime_ns: int) -> _Eviction:
        """On a worker: delete the row unless it was used since then."""
        try:
            status = self._directory.stat(path)
            if status is None:
                return _Eviction.MISSING
            if status.st_mtime_ns > mtime_ns:
                self._quota.record(path, FileStat.of(status))
                return _Eviction.USED
            self._directory.delete(path)
        except OSError as error:
            name = self._directory.absolute(path)
            self._log_once.report("evict", f"{name} cannot be deleted ({error.strerror or error})")
            return _Eviction.FAILED
        if not self._quota.has_rows_beside(path):
            self._directory.remove_if_empty(path)
        return _Eviction.DELETED

    def expire(self, now_s: float, max_age_s: float) -> None:
        """Delete the rows of all namespaces that are too old at `now_s` by the server's clock, and wait for that. Each
        seal is read before its row is deleted."""
        candidates = [
            path
            for stat, path in self._quota.rows()
            if not stat.age_from or has_expired(stat.age_from, now_s, max_age_s) or stat.age_from > now_s + _MAX_AHEAD_S
        ]
        for start in range(0, len(candidates), _EXPIRED_BATCH):
            if self._quota.closing:
                return
            batch = candidates[start : start + _EXPIRED_BATCH]
            for checked in [self._directory.submit(path, self._expire, path, now_s, max_age_s) for path in batch]:
                checked.result()

    def _expire(self, path: RowPath, now_s: float, max_age_s: float) -> None:
        """On a worker."""
        try:
            descriptor = self._directory.open_row(path)
            if descriptor is None:
                return
            with os.fdopen(descriptor, "rb") as file:
                status = os.fstat(file.fileno())
                seal = None
                for tail in _TAIL_BYTES:
                    file.seek(max(0, status.st_size - tail))
                    seal = seal or read_seal(file.read(tail))
            begins = age_from(seal.sealed_at if seal is not None else None, status)
            if has_expired(begins, now_s, max_age_s):
                self._directory.delete_unless_replaced(path, status)
            elif begins > now_s + _MAX_AHEAD_S:  # so is the file's time: the server's clock was ahead
                self._directory.touch(path)
            else:
                self._quota.record(path, FileStat.of(status)._replace(age_from=begins))
        except OSError as error:
            name = self._directory.absolute(path)
            self._log_once.report("expire", f"{name} cannot be checked ({error.strerror or error})")
