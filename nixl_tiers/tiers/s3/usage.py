"""How the movers of a shared prefix keep one capacity: the usage record, what each mover may upload, and the janitor's
account. No I/O. Why the bound holds: docs/internals/s3-tier.md.

Each mover publishes a counter: the bytes of all its uploads that have ended. Before the janitor lists, it reads all
counters. From then on the prefix holds at most what the listing finds, less the listed rows that were deleted, plus
what the counters have grown by, plus the uploads that the counters do not contain.
"""

from __future__ import annotations

import json
import threading
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

import numpy as np

WINDOW_SHARE: Final = 64  # an upload window is the capacity divided by this, and at least a row
VICTIM_SHARE: Final = 8  # the janitor keeps the names of one row of so many, the oldest
MIN_VICTIMS: Final = 1 << 16


@dataclass(frozen=True)
class Usage:
    """The usage record: at most so many bytes are below the prefix, but for uploads beyond `counted`, by mover ID.

    `oldest`: the janitor has deleted all that was last written before, in Unix seconds by the server's Last-Modified;
    0: not known, as in the records of older releases. Fields that are not known here are ignored.
    """

    nbytes: int
    counted: Mapping[str, int] = field(default_factory=dict)
    oldest: int = 0

    def encode(self) -> bytes:
        return json.dumps({"bytes": self.nbytes, "counted": dict(self.counted), "oldest": self.oldest}).encode()

    @classmethod
    def decode(cls, raw: bytes) -> Self | None:
        """None if this is not a usage record."""
        try:
            found = json.loads(raw)
            counted = {str(mover): int(n) for mover, n in found["counted"].items()}
            return cls(int(found["bytes"]), counted, max(0, int(found.get("oldest", 0))))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            return None


class UploadQuota:
    """How much this mover may upload now. The mover's loop acquires, the janitor's thread refreshes by the record."""

    def __init__(self, mover: str, capacity_bytes: int, row_bytes: int) -> None:
        """`mover`: its ID, which no other process has ever had."""
        self.mover = mover
        self.capacity_bytes = capacity_bytes
        self.window_bytes = max(row_bytes, capacity_bytes // WINDOW_SHARE)
        self.ahead_s = 0.0
        """How much the server's Date is ahead of its Last-Modified, if they come from different clocks."""
        self._lock = threading.Lock()
        self._usage: Usage | None = None
        self._valid_until = 0.0  # monotonic
        self._started = 0  # bytes of uploads since this process began
        self._ended = 0

    def try_acquire(self, nbytes: int) -> bool:
        """Count an upload that is about to start; False if there is no room for it now."""
        with self._lock:
            usage = self._usage
            if usage is None or time.monotonic() > self._valid_until or self.mover not in usage.counted:
                return False
            if usage.nbytes + self.window_bytes > self.capacity_bytes:
                return False
            if self._started - usage.counted[self.mover] + nbytes > self.window_bytes:
                return False
            self._started += nbytes
            return True

    def upload_ended(self, nbytes: int) -> None:
        """An upload has ended, successfully or not."""
        with self._lock:
            self._ended += nbytes

    @property
    def counter(self) -> int:
        """Bytes of all uploads that have ended: what this mover publishes."""
        return self._ended

    @property
    def used_bytes(self) -> int | None:
        """Bytes below the prefix by the usage record; None before there is one."""
        with self._lock:
            return None if self._usage is None else self._usage.nbytes

    @property
    def oldest(self) -> int:
        """`Usage.oldest` of that record; 0 before there is one."""
        with self._lock:
            return 0 if self._usage is None else self._usage.oldest

    @property
    def deletes_soon(self) -> bool:
        """Whether the janitor may delete for room before its next record is read: a window must stay free, and each
        mover may upload another one by then."""
        with self._lock:
            usage = self._usage
            most = 0 if usage is None else usage.nbytes + (1 + len(usage.counted)) * self.window_bytes
            return most > self.capacity_bytes

    def refresh(self, usage: Usage | None, valid_for_s: float) -> None:
        """The usage record, which is valid for `valid_for_s` from now on."""
        with self._lock:
            if usage is not None:
                self._usage = usage
                self._valid_until = time.monotonic() + valid_for_s

    def stop(self) -> None:
        """No upload begins before the next `refresh`."""
        with self._lock:
            self._valid_until = 0.0


class Account:
    """The janitor's, of one listing."""

    def __init__(self, counters: Mapping[str, int]) -> None:
        """`counters`: as read before the listing's first request."""
        self._baseline = dict(counters)
        self._counters = dict(counters)
        self._bytes = 0

    def listed(self, nbytes: int) -> None:
        self._bytes += nbytes

    def deleted(self, nbytes: int) -> None:
        """A row that this listing has found; once for each."""
        self._bytes -= nbytes
        assert self._bytes >= 0, "more was deleted than this listing has found"

    def read(self, counters: Mapping[str, int]) -> None:
        """The counters now, or those of another janitor's record: what one record has counted, no later one forgets."""
        for mover, counter in counters.items():
            if mover in self._counters:
                self._counters[mover] = max(self._counters[mover], counter)

    def unknown(self, usage: Usage) -> set[str]:
        """Movers that this record has counted and this account cannot, as they began after its listing; or whose
        counters were deleted."""
        return usage.counted.keys() - self._counters.keys()

    @property
    def landed_bytes(self) -> int:
        """Of uploads that have ended since the counters were first read; the listing may have found some of them."""
        return sum(counter - self._baseline[mover] for mover, counter in self._counters.items())

    @property
    def usage(self) -> Usage:
        """Movers that came later are not in it, and upload nothing before the next listing."""
        return Usage(self._bytes + self.landed_bytes, dict(self._counters))


class Victims:
    """The oldest rows of one listing, to be deleted between it and the next. No row that is left out is older."""

    def __init__(self, expected_rows: int) -> None:
        """`expected_rows`: about how many the listing will find."""
        self._limit = max(MIN_VICTIMS, expected_rows // VICTIM_SHARE)
        self._cut_s = float("inf")  # of rows written at this time or later, some were left out
        self._names: list[bytes] = []
        self._modified_s = array("d")
        self._nbytes = array("q")
        self._order: np.ndarray[Any, np.dtype[np.intp]] | None = None
        self._next = 0
        self._taken_from = 0  # `_next` before the last `take`

    def add(self, modified_s: float, name: bytes, nbytes: int) -> None:
        if modified_s >= self._cut_s:
            return
        self._names.append(name)
        self._modified_s.append(modified_s)
        self._nbytes.append(nbytes)
        if len(self._names) >= 2 * self._limit:
            self._prune()

    def take(self, nbytes: int, before_s: float, most: int) -> dict[bytes, int]:
        """Up to `most` more of them, the oldest first: until they have `nbytes`, and all written before `before_s`."""
        order = self._sorted()
        taken: dict[bytes, int] = {}
        self._taken_from = self._next
        while self._next < len(order) and len(taken) < most:
            number = int(order[self._next])
            if nbytes <= 0 and self._modified_s[number] >= before_s:
                break
            taken[self._names[number]] = self._nbytes[number]
            nbytes -= self._nbytes[number]
            self._next += 1
        return taken

    def put_back(self) -> None:
        """What `take` has returned last is the first to be taken again."""
        self._next = self._taken_from

    @property
    def oldest(self) -> int:
        """All that the listing has found of before was taken (Unix seconds); 0 if it has found nothing."""
        order = self._sorted()
        if not len(order):
            return 0
        if self._next == len(order) and self._cut_s < float("inf"):
            return int(self._cut_s)
        return int(self._modified_s[int(order[min(self._next, len(order) - 1)])])

    def _sorted(self) -> np.ndarray[Any, np.dtype[np.intp]]:
        if self._order is None:
            self._order = np.argsort(np.frombuffer(self._modified_s, np.float64), kind="stable")
        return self._order

    def _prune(self) -> None:
        modified_s = np.frombuffer(self._modified_s, np.float64)
        kept = np.argpartition(modified_s, self._limit)[: self._limit + 1]
        self._cut_s = float(modified_s[kept[-1]])
        numbers = kept[:-1].tolist()
        self._names = [self._names[number] for number in numbers]
        self._modified_s = array("d", [self._modified_s[number] for number in numbers])
        self._nbytes = array("q", [self._nbytes[number] for number in numbers])
