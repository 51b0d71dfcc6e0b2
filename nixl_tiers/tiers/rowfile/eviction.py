"""Which rows of a directory are deleted: the least recently used ones when room is requested, and expired ones."""

from __future__ import annotations

import os
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Final

import numpy as np

from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.memory.seal import TAILS
from nixl_tiers.memory.seal import read as read_seal
from nixl_tiers.tiers.base import expired, has_expired
from nixl_tiers.tiers.rowfile.directory import RowDirectory
from nixl_tiers.tiers.rowfile.names import RowPath
from nixl_tiers.tiers.rowfile.packed_rows import PRESENT, KnownRow, decoded
from nixl_tiers.tiers.rowfile.quota import DirQuota, age_from

_CANDIDATES: Final = 4096  # rows sorted at a time
_EXPIRED_BATCH: Final = 64  # submitted to the workers at a time
_MAX_AHEAD_S: Final = 60.0  # no file is ahead of its server's clock by more, unless that was put back


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

    def drop_candidates(self) -> None:
        """A scan may have found rows that are colder: of a namespace that it had not read, restored from elsewhere, or
        stored by a clock that is behind."""
        self._candidates.clear()

    def make_room(self, rescan: Callable[[], None]) -> None:
        """Delete the least recently used rows, of whichever namespace, until the requested room is there."""
        while excess_bytes := self._quota.excess_bytes():
            victims = self._select_victims(excess_bytes)
            if not victims:
                self._quota.refuse_room()
                return
            evictions = [self._directory.submit(path, self._evict, path, mtime_ns) for mtime_ns, path in victims]
            ended = [(path, eviction.result()) for (_, path), eviction in zip(victims, evictions, strict=True)]
            self._put_back(path for path, end in ended if end is _Eviction.USED)
            ends = {end for _, end in ended}
            if _Eviction.MISSING in ends:
                rescan()  # another process makes room too: what is there now?
            elif ends == {_Eviction.FAILED}:
                self._quota.refuse_room()
                return

    def _put_back(self, used: Iterable[RowPath]) -> None:
        """These were used later than it seemed, and may still be colder than the candidates that are left."""
        for path in used:
            row = self._quota.get(path)
            if row is not None and self._candidates and row.mtime_ns <= self._candidates[-1][0]:
                insort(self._candidates, (row.mtime_ns, path))

    def _select_victims(self, excess_bytes: int) -> list[tuple[int, RowPath]]:
        """The least recently used rows, of at least so many bytes if there are enough: (modification time, path).

        Some thousands are sorted at a time. Any row beside those was used later than they were, and stays so until a
        scan finds others.
        """
        victims = list[tuple[int, RowPath]]()
        for refill in (False, True):
            if refill and not victims:
                self._candidates.extend(self._coldest(_CANDIDATES))
            while self._candidates and excess_bytes > 0:
                mtime_ns, path = self._candidates.popleft()
                row = self._quota.get(path)
                if row is not None and row.mtime_ns <= mtime_ns:
                    victims.append((mtime_ns, path))
                    excess_bytes -= row.disk_bytes
        return victims

    def _coldest(self, count: int) -> list[tuple[int, RowPath]]:
        """The least recently used rows of all namespaces, the coldest first, in one pass to find how cold they are, and
        one to get them."""
        directories = self._quota.directories()
        times = np.empty(0, np.int64)
        for _, directory in directories:
            with self._quota.lock:
                present = directory.rows.flags & PRESENT != 0
                times = np.concatenate((times, directory.rows.columns["mtime_ns"][present]))
            if len(times) > count:
                times = np.partition(times, count - 1)[:count]
        if not len(times):
            return []
        warmest_ns = int(times.max())
        ties = int(np.count_nonzero(times == warmest_ns))
        coldest = list[tuple[int, RowPath]]()
        for name, directory in directories:
            with self._quota.lock:
                rows, mtimes_ns = directory.rows, directory.rows.columns["mtime_ns"]
                present = rows.flags & PRESENT != 0
                tied = np.flatnonzero(present & (mtimes_ns == warmest_ns))[:ties]
                places = np.concatenate((np.flatnonzero(present & (mtimes_ns < warmest_ns)), tied))
                found = zip(mtimes_ns[places].tolist(), rows.keys[places].tolist(), strict=True)
            ties -= len(tied)
            coldest += ((mtime_ns, RowPath(*name, decoded(raw))) for mtime_ns, raw in found)
        coldest.sort()
        return coldest

    def _evict(self, path: RowPath, mtime_ns: int) -> _Eviction:
        """On a worker: delete the row unless it was used since then."""
        try:
            status = self._directory.stat(path)
            if status is None:
                return _Eviction.MISSING
            if KnownRow.of(status).mtime_ns > mtime_ns:
                self._quota.record(path, status)
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
        for path_batch in self._old_or_unread(now_s, max_age_s):
            for start in range(0, len(path_batch), _EXPIRED_BATCH):
                if self._quota.closing:
                    return
                batch = path_batch[start : start + _EXPIRED_BATCH]
                for checked in [self._directory.submit(path, self._expire, path, now_s, max_age_s) for path in batch]:
                    checked.result()

    def _old_or_unread(self, now_s: float, max_age_s: float) -> Iterator[list[RowPath]]:
        """Rows that may have expired, or whose seals have not been read, a directory at a time."""
        for name, directory in self._quota.directories():
            with self._quota.lock:
                rows, age_from = directory.rows, directory.rows.columns["age_from"]
                due = (age_from == 0) | expired(age_from, now_s, max_age_s) | (age_from > now_s + _MAX_AHEAD_S)
                keys = rows.keys[due & (rows.flags & PRESENT != 0)].tolist()
            yield [RowPath(*name, decoded(raw)) for raw in keys]

    def _expire(self, path: RowPath, now_s: float, max_age_s: float) -> None:
        """On a worker."""
        try:
            descriptor = self._directory.open_row(path)
            if descriptor is None:
                return
            with os.fdopen(descriptor, "rb") as file:
                status = os.fstat(file.fileno())
                seal = None
                for tail in TAILS:
                    file.seek(max(0, status.st_size - tail))
                    seal = seal or read_seal(file.read(tail))
            begins = age_from(seal.sealed_at if seal is not None else None, status)
            if has_expired(begins, now_s, max_age_s):
                self._directory.delete_unless_replaced(path, status)
            elif begins > now_s + _MAX_AHEAD_S:  # so is the file's time: the server's clock was ahead
                self._directory.touch(path)
            else:
                self._quota.record(path, status, begins)
        except OSError as error:
            name = self._directory.absolute(path)
            self._log_once.report("expire", f"{name} cannot be checked ({error.strerror or error})")
