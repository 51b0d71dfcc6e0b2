"""What an engine may store in a directory that several share, by what its own sweeps find: nothing is written for the
others. No I/O and no clock.

A sweep reads the names in the whole directory; files in `.incoming` count as rows. `base` is what the last one has
found, less what this engine has evicted since; `own` is what it has reserved since that sweep began, and what was being
written then. A row may be stored if afterwards own <= window and base + own <= capacity. So with n engines **the
directory never holds more than `capacity + (n - 1) * window`**, which is capacity * (1 + (n - 1) / 64) from 1,024 rows
on. n is how many processes ever lived at once: one that was killed, and one that is started after its end, are one.

Why: a row that is there was found by a sweep, or got its name after that had read its directory; then its writer had
reserved it after the sweep began, or was writing it then. A row that is evicted is one of these. So `base + own`, and
what the others have given names since the sweep began, is never below the truth. But the row that is evicted while a
sweep runs may be one that this has not found: the sweep's base must not hear of it.

Of all sweeps by which rows were ever reserved take the one begun last. Its engine had base + own <= capacity when it
reserved last, and evictions only lower that. Each other engine's sweep began earlier, so all that it has given names
since, or left in `.incoming`, is in its `own`: at most a window. Time is in no step.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Final

WINDOW_SHARE: Final = 64  # a window is the capacity divided by this,
WINDOW_ROWS: Final = 16  # and at least so many rows
SIZED_ROWS: Final = 16  # of a namespace, the largest of which tells what each of its rows takes


@dataclass
class Swept:
    """By one sweep."""

    rows: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By namespace: names, and the size of the largest of SIZED_ROWS rows that are still there, or of all that are."""
    other_bytes: int = 0

    def add_unfinished(self, nbytes: int, row_bytes: int) -> None:
        """A file in `.incoming` that stays. It may grow to a row; those of larger rows count in their writer's `own`,
        and do not grow after its end."""
        self.other_bytes += max(nbytes, row_bytes)

    @property
    def nbytes(self) -> int:
        return self.other_bytes + sum(names * row for names, row in self.rows.values())


class Budget:
    """Of one process. Thread-safe; no call waits. One thread makes the sweeps and evicts between them."""

    def __init__(self, capacity_bytes: int, row_bytes: int) -> None:
        """`row_bytes`: what a row of this engine takes, its name included."""
        self.capacity_bytes = capacity_bytes
        self.row_bytes = row_bytes
        self.window_bytes = max(WINDOW_ROWS * row_bytes, capacity_bytes // WINDOW_SHARE)
        self.room_bytes = max(row_bytes, min(self.window_bytes, capacity_bytes // 4))
        """What eviction leaves free: a window, but of a very small directory no more than a quarter."""
        self._lock = threading.Lock()
        self._found: Swept | None = None  # by the last sweep
        self._base_bytes = self._own_bytes = 0
        self._writing_bytes = 0  # of rows that were reserved and have not ended
        self._next_own_bytes: int | None = None  # `own` by the sweep that runs
        self._wanted = False  # a row was refused, and no sweep has ended since
        self._evicts = False  # the last sweep found that there is no room for it
        self.full = False
        """Nor could any be made."""
        self._grown_bytes = 0  # reserved, less what was evicted
        self._grown_limit_bytes: float = float("inf")  # of that, as the file system has no more room
        self._short = False  # it has none at all, so that each row needs the room of those that were evicted since
        self._refuses = False  # it took no row lately, whatever it says is free: a quota, or no inodes

    @property
    def used_bytes(self) -> int:
        """What is there, as far as this engine knows."""
        return max(0, self._base_bytes + self._own_bytes)

    def has_rows(self, namespace: str) -> bool:
        """Of the namespace that this engine stores to: whether any were found, or are being stored."""
        with self._lock:
            return self._own_bytes > 0 or (self._found is not None and self._found.rows.get(namespace, (0, 0))[0] > 0)

    # --- rows that are stored ---------------------------------------------------------------------------------------

    def reserve(self, rows: int = 1) -> bool:
        """Count rows that are about to be written: all of them or none. False: there is no room now."""
        nbytes = rows * self.row_bytes
        with self._lock:
            if self._may_store(nbytes):
                self._own_bytes += nbytes
                self._writing_bytes += nbytes
                self._grown_bytes += nbytes
                if self._next_own_bytes is not None:
                    self._next_own_bytes += nbytes
                return True
            self._wanted = not self._evicts
            return False

    def _may_store(self, nbytes: int) -> bool:
        return (
            self._found is not None
            and self._own_bytes + nbytes <= self.window_bytes
            and self._lacking_bytes(nbytes) <= 0
        )

    def _lacking_bytes(self, nbytes: int) -> float:
        """How much must go before there is room for so much."""
        grown = self._grown_bytes - self._grown_limit_bytes
        return max(self._base_bytes + self._own_bytes - self.capacity_bytes, grown) + nbytes

    def ended(self, *, fits: bool | None = None) -> None:
        """A row that was reserved has its name; or its file stays unfinished, or is gone. Nobody writes it any more.
        `fits`: whether the file system had room for it, if that is known."""
        with self._lock:
            self._writing_bytes -= self.row_bytes
            if fits is None:
                return
            self._refuses = not fits
            if self._refuses:
                self._grown_bytes -= self.row_bytes
                self._limit_growth(-self._writing_bytes)  # rows that are being written may not fit, either

    def limit_growth(self, spare_bytes: float) -> None:
        """So much more may be taken of the file system from now on: then a new row needs the room of an old one."""
        with self._lock:
            self._limit_growth(0 if self._refuses else max(0, spare_bytes))

    def _limit_growth(self, nbytes: float) -> None:
        short, self._short = self._short, nbytes <= 0
        if not (short and self._short):  # else what was evicted since would have to be evicted once more
            self._grown_limit_bytes = self._grown_bytes + nbytes

    # --- sweeps -----------------------------------------------------------------------------------------------------

    @property
    def sweep_due(self) -> bool:
        """A new process has made none, the directory is full and others may have made room, or half of the window is
        used up: so stores go on beside the sweep."""
        return self._found is None or self._wanted or 2 * self._own_bytes > self.window_bytes

    def begin_sweep(self) -> None:
        """Before the first directory is read. Each is opened anew: an NFS client then asks the server what is in it,
        unless it is mounted with `nocto`."""
        with self._lock:
            self._next_own_bytes = self._writing_bytes

    def end_sweep(self, found: Swept | None) -> None:
        """Every directory has been read. None: not so, and what the last sweep has found still counts."""
        with self._lock:
            own, self._next_own_bytes = self._next_own_bytes, None
            if found is None:
                return
            assert own is not None, "no sweep runs"
            self._found, self._base_bytes, self._own_bytes = found, found.nbytes, own
            self._evicts = (self._wanted or self._evicts) and self._lacking_bytes(self.room_bytes) > 0
            self._wanted = self.full = False

    # --- room -------------------------------------------------------------------------------------------------------

    @property
    def excess_bytes(self) -> int:
        """How much eviction has to delete now; 0: nothing."""
        with self._lock:
            return max(0, int(self._lacking_bytes(self.room_bytes))) if self._evicts else 0

    def evicted(self, namespace: str, nbytes: int) -> None:
        """This process, and no other, has taken a row away that took so much. Not while a sweep runs, nor of a row that
        went while one ran."""
        with self._lock:
            assert self._next_own_bytes is None, "a row was evicted while a sweep ran"
            counted = self._found.rows.get(namespace, (0, 0))[1] if self._found is not None else 0
            self._base_bytes -= min(nbytes, counted)
            self._grown_bytes -= nbytes
            self._evicts = self._evicts and self._lacking_bytes(self.room_bytes) > 0

    def no_room(self, *, others: bool) -> None:
        """Eviction finds nothing more that it can delete. `others`: they have deleted what it had found, and the next
        sweep tells how much. It comes, too, while rows are being written that can be deleted soon."""
        with self._lock:
            again = others or self._writing_bytes > 0
            self._evicts, self._wanted, self.full = False, again, not again
