"""The usage record of a prefix, what a mover may upload by it, and the account of the mover that writes it. No I/O and
no clock. Who writes it: takeover.py.

Each mover publishes a counter: the bytes of all its uploads that have ended. The record says how many bytes there are
at most, and how much of each counter that includes. With W, a window: a mover starts an upload only if the record
counts it, `bytes + W <= capacity`, and what it has ever started, this row included, is at most W beyond what was
counted. So **the prefix never holds more than `capacity + (movers - 1) * W`**, where a killed mover and the one in its
place are one. Why:

A record is *valid* if the prefix holds at most `bytes`, plus `started - counted` of each mover that it counts, plus W
for each mover whose present process it does not count.

- A sweep's record is valid. It reads the counters B and then lists, so what it finds is in `bytes`, and what it misses
  has ended later, so is beyond B: `bytes = found + sum(counted - B)`. A confirmed delete of a row that was found lowers
  both sides. Counting more of a counter moves bytes from one term to another.
- A counter that is new is added with W, for what its killed predecessor has left uncounted. A sweep that begins later
  finds that, as uploads end with their process; so W goes with that sweep, and with no earlier one. The counter is 0,
  as nobody uploads who is not counted; or at most W, if the record that counted it was replaced by the copy of an older
  one (below): then it is added too. One above W, of a mover that slept for hours, waits for a sweep.
- A mover that takes the record over goes on from a copy, or, where there is none, from `bytes = capacity`: then nobody
  uploads, and no delete is subtracted, before a sweep has ended.
- A record replaces one that its writer has read, and counters are read after that, so no count falls. A server that
  tests conditions and writes in two steps may let two writes through: then one of them is a copy, whose counts are not
  above the other's, or its writer reads that it was replaced, and withdraws (takeover.py).

- A counter may arrive damaged. One that is too high for its mover is not counted, and a mover starts nothing by a
  record that counts more than it has ever started.

Take the record with the highest counts by which an upload was ever started. Each mover's last upload used that one or a
lower one, so `started <= counted + W`, and that record had `bytes + W <= capacity`: the sum is the bound. No step uses
time, nor how many movers believe that they write: that only saves rows and work.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

WINDOW_SHARE: Final = 64  # an upload window is the capacity divided by this, and at least a row
FAILED_ENDS_S: Final = 60.0  # an upload that was reported as failed may arrive so long after that
MAX_WINDOWS: Final = 4  # of added movers, before a sweep precedes deletes for room


class Counter(NamedTuple):
    """Of one mover."""

    ended: int  # bytes of its uploads that have ended
    failed: int = 0  # of which so many are in uploads that have failed


@dataclass(frozen=True)
class Record:
    """The usage record. Fields that are not known here are ignored, those that are missing are 0 or ""."""

    nbytes: int
    counted: Mapping[str, int] = field(default_factory=dict)  # by mover
    oldest: int = 0  # all that was last written before was deleted: Unix seconds by Last-Modified; 0: not known
    writer: str = ""  # the mover that keeps it; "": it was released
    write: str = ""  # another one in each write, as equal contents have equal ETags
    swept: int = 0  # Unix time of the server when the last complete sweep began; 0: there was none
    windows: int = 0  # how many `nbytes` has for movers that were added since that began
    failed: int = 0  # bytes of uploads that have failed since

    def encode(self) -> bytes:
        named = {"bytes": self.nbytes, **vars(self), "counted": dict(self.counted)}
        del named["nbytes"]
        return json.dumps(named).encode()

    @classmethod
    def decode(cls, raw: bytes) -> Self | None:
        """None if this is no usage record."""
        try:
            found = json.loads(raw)
            counted = {str(mover): int(n) for mover, n in found["counted"].items()}
            oldest, swept, windows, failed = (
                max(0, int(found.get(name, 0))) for name in ("oldest", "swept", "windows", "failed")
            )
            writer, write = (str(found.get(name, ""))[:128] for name in ("writer", "write"))
            return cls(int(found["bytes"]), counted, oldest, writer, write, swept, windows, failed)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            return None


class UploadQuota:
    """How much this mover may upload. The mover's loop acquires, the budget's thread refreshes by the record."""

    def __init__(self, mover: str, capacity_bytes: int, row_bytes: int) -> None:
        """`mover`: its ID, which no other process has ever had."""
        self.mover = mover
        self.capacity_bytes = capacity_bytes
        self.window_bytes = max(row_bytes, capacity_bytes // WINDOW_SHARE)
        self.ahead_s = 0.0
        """How much the server's Date is ahead of its Last-Modified, if they come from different clocks."""
        self.half_used: Callable[[], None] = lambda: None
        """Called by the mover's loop when half a window has ended that was not published."""
        self.alone = False
        """Whether only the mover that the record names may store: the server has no conditional writes."""
        self.failing = False
        """Whether an upload has failed since the counter was written: the answer to the next write may say why."""
        self.others_stored = 0
        """In how many records another mover had stored, since this one began."""
        self.record = Record(0)
        """As it was read or written last; before, one that counts nobody."""
        self._may_start = False  # as far as that says
        self._lock = threading.Lock()
        self._started = self._ended = self._failed = self._published = 0
        self._may_arrive: deque[tuple[float, int]] = deque()  # failed uploads, and until when
        self._too_high = 0  # records in a row that count more of this mover than it has started
        self._active = 1  # movers whose counts have risen between the last two records

    def try_acquire(self, nbytes: int) -> bool:
        """Count an upload that is about to start; False if there is no room for it now."""
        with self._lock:
            record = self.record
            if not self._may_start or record.nbytes + self.window_bytes > self.capacity_bytes:
                return False
            if self._started - record.counted[self.mover] + nbytes > self.window_bytes:
                return False
            self._started += nbytes
            return True

    def upload_ended(self, nbytes: int, now: float, *, done: bool = True) -> None:
        """An upload has ended. Not `done`: it has failed, as far as is known."""
        with self._lock:
            if done:
                self._ended += nbytes
            else:
                self._may_arrive.append((now + FAILED_ENDS_S, nbytes))
                self.failing = True
            half = 2 * (self._ended - self._published) >= self.window_bytes
        if half:
            self.half_used()

    def counter(self, now: float) -> Counter:
        """What this mover publishes."""
        with self._lock:
            while self._may_arrive and self._may_arrive[0][0] <= now:
                _, nbytes = self._may_arrive.popleft()
                self._ended += nbytes
                self._failed += nbytes
            return Counter(self._ended, self._failed)

    def published(self, counter: Counter) -> None:
        self._published = counter.ended

    @property
    def ready(self) -> bool:
        """Whether uploads wait for nothing but room."""
        return self._may_start and self.record.swept > 0

    @property
    def counts_itself(self) -> bool:
        """Whether there is room, and this mover soon counts what it has uploaded, as it writes the record."""
        return self.record.writer == self.mover and self.record.nbytes + self.window_bytes <= self.capacity_bytes

    @property
    def has_others(self) -> bool:
        """Whether others store too. One that was killed may be counted once more."""
        return self.others_stored > 1

    @property
    def deletes_soon(self) -> bool:
        """Whether rows may be deleted for room before the record is read again: a window must stay free, and each mover
        that stores may upload another one by then."""
        return self.record.nbytes + (1 + self._active) * self.window_bytes > self.capacity_bytes

    def refresh(self, record: Record) -> None:
        with self._lock:
            if record != self.record:
                before = self.record.counted
                rising = {mover for mover, n in record.counted.items() if n > before.get(mover, n)}
                self._active = max(1, len(rising))
                self.others_stored += not rising <= {self.mover}
                self._go_on_from(record.counted.get(self.mover, 0))
            self.record = record
            is_counted = 0 <= record.counted.get(self.mover, -1) <= self._started
            self._may_start = is_counted and (not self.alone or record.writer == self.mover)

    def _go_on_from(self, counted: int) -> None:
        """If this is more than was ever started, what has arrived of the counter was damaged. A record that was damaged
        says so once; if another one does, the writer's account has it."""
        if counted <= self._started:
            self._too_high = 0
        elif self._too_high > 1:
            self._started, self._ended = self._started + counted - self._ended, counted
        else:
            self._too_high += 1

    def stop(self) -> None:
        """No upload begins before the next `refresh`."""
        self._may_start = False


@dataclass
class _Sweep:
    """A listing of the whole prefix that has not ended yet, and what was when it began."""

    began_s: int
    baseline: dict[str, int]  # what was counted, and the counters that wait for a sweep
    gone: set[str]  # the movers whose counters were deleted
    windows: int
    failed: int
    found_bytes: int = 0


class Account:
    """The writer's: what its next record says."""

    def __init__(self, record: Record, window_bytes: int) -> None:
        """It goes on from this record."""
        self.nbytes = record.nbytes
        self.counted = dict(record.counted)
        self.oldest, self.swept, self.windows, self.failed = record.oldest, record.swept, record.windows, record.failed
        self.sweep: _Sweep | None = None  # the one that runs
        self.ended: int | None = None
        """That has listed everything, and all that was written before this was deleted: it ends with the next write."""
        self._window_bytes = window_bytes
        self._failed: dict[str, int] = {}  # of each mover, as last read
        self._counters: Mapping[str, Counter] = {}  # as last read

    def record(self, writer: str, write: str) -> Record:
        return Record(
            self.nbytes, dict(self.counted), self.oldest, writer, write, self.swept, self.windows, self.failed
        )

    @property
    def sweep_first(self) -> bool:
        """Whether a sweep must precede deletes for room: too much of what is counted may not be there."""
        return not self.swept or self.windows > MAX_WINDOWS or self.failed > self._window_bytes

    @property
    def has_uncounted(self) -> bool:
        """Whether a mover stores nothing until a sweep has begun that counts it."""
        return not self._counters.keys() <= self.counted.keys()

    def read(self, counters: Mapping[str, Counter]) -> None:
        """The counters, read after the record that the next one replaces."""
        self._counters = counters
        for mover, counter in counters.items():
            before, known = self.counted.get(mover), self._failed.get(mover)
            self._failed[mover] = counter.failed
            if before is None:
                if counter.ended <= self._window_bytes:  # else it waits for a sweep
                    self._add(mover, counter.ended)
                continue
            if counter.ended > before + 2 * self._window_bytes:
                continue  # nobody may have uploaded so much, so it is damaged: its mover writes it again
            risen = max(0, counter.ended - before)
            failed = counter.failed - known if known is not None else min(counter.failed, risen)
            self.nbytes += risen
            self.counted[mover] = before + risen
            self.failed += max(0, failed)

    def _add(self, mover: str, ended: int) -> None:
        self.counted[mover] = ended
        self.nbytes += ended + self._window_bytes
        self.windows += 1
        if self.sweep is not None:  # what it had of this counter may have been damaged
            self.sweep.baseline[mover] = ended

    def begin_sweep(self, began_s: int) -> None:
        """Before the listing's first request is sent: the counters as last read are the baseline. `began_s`: the
        server's time."""
        baseline = {mover: counter.ended for mover, counter in self._counters.items()} | self.counted
        self.sweep = _Sweep(began_s, baseline, baseline.keys() - self._counters.keys(), self.windows, self.failed)

    def found(self, nbytes: int) -> None:
        """A row, by the listing of the sweep that runs."""
        assert self.sweep is not None
        self.sweep.found_bytes += nbytes

    def deleted(self, nbytes: int, *, by_running: bool) -> None:
        """The server has confirmed the delete of rows that an own listing has found, once for each: the sweep that
        runs, or the last one."""
        if self.swept:
            self.nbytes -= nbytes
        if by_running:
            assert self.sweep is not None
            self.sweep.found_bytes -= nbytes
            assert self.sweep.found_bytes >= 0, "more was deleted than this listing has found"

    def end_sweep(self, counters: Mapping[str, Counter], oldest: int) -> None:
        """The listing is complete. `counters`: as of `read`."""
        sweep = self.sweep
        assert sweep is not None
        self.read(counters)
        for mover, ended in sweep.baseline.items():
            if mover not in self.counted:
                self.counted[mover] = max(ended, counters[mover].ended if mover in counters else 0)
        for mover in sweep.gone - counters.keys():
            if self.counted[mover] == sweep.baseline[mover]:
                del self.counted[mover]
        self.windows -= sweep.windows
        self.failed -= sweep.failed
        since = sum(n - sweep.baseline.get(mover, 0) for mover, n in self.counted.items())
        self.nbytes = sweep.found_bytes + since + self.windows * self._window_bytes
        self.swept, self.oldest = max(1, sweep.began_s), oldest
        self.sweep = self.ended = None
