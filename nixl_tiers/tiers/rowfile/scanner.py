"""Looking through a directory of row files, and who goes first when room is short: one thread of an account."""

from __future__ import annotations

import heapq
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Final

from nixl_tiers.tiers.disk import INCOMING
from nixl_tiers.tiers.folder import Folder, NotOurs, through
from nixl_tiers.tiers.rowfile.quota import DirQuota, FanoutDir, Place, Seen, seen_as, taken_bytes, weigh
from nixl_tiers.tiers.rowfile.server_time import ServerTime

logger = logging.getLogger(__name__)

OLD_S: Final = 900.0  # what is being written for longer has lost its writer, wherever that was
FULL_S: Final = 0.5  # how long a lack of space is believed
_SETTLED_NS: Final = 2_000_000_000  # a directory that was changed this long ago has a time that the next change moves
_TRUST_SCANS: Final = 12  # directory times are believed between these
_NAMESPACE: Final = re.compile(r"[0-9a-f]{32}")
_FAN: Final = re.compile(r"[0-9a-f]{2}")
_ROW: Final = re.compile(r"(?:[0-9a-f]{2}){1,112}\.row")


class _End(Enum):
    """What became of a row that was to make room."""

    GONE = "gone"
    KEPT = "kept"  # it was used since
    MISSING = "missing"  # somebody else was faster
    STUCK = "stuck"


class DirScanner(DirQuota):
    """The account, and the thread that keeps it: it looks through the directory, and makes room."""

    def __init__(
        self,
        path: Path,
        capacity_bytes: int,
        row_bytes: int,
        *,
        writes: bool = True,
        server_time: ServerTime | None = None,
    ) -> None:
        """Without `writes`, only look: whoever reads has no say in what is kept."""
        super().__init__(path, capacity_bytes, row_bytes, writes=writes, server_time=server_time)
        self._victims: deque[tuple[int, Place]] = deque()
        self._keeper: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look, and go on whenever somebody asks."""
        if self._keeper is None:
            self._keeper = threading.Thread(target=self._keep, name="keeper", daemon=True)
            self._keeper.start()

    def close(self) -> None:
        """End what is queued."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        if self._keeper is not None:
            self._keeper.join()
        for hand in self._hands:
            hand.shutdown()

    def scan(self) -> bool:
        """Ask for a look that begins after now, and wait for its end. False if there will be none."""
        with self._lock:
            self._ask_scan()
            number = self._scans_asked
            self._lock.wait_for(lambda: self._closing or self._scans_ended >= number)
            return not self._closing

    def _keep(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(
                    lambda: self._closing or self._wanted_bytes or self._scans_asked > self._scans_begun
                )
                if self._closing:
                    return
                look = self._scans_asked > self._scans_begun
            if look:
                self._scan_once()
            if self._writes:
                self._make_room()

    def _scan_once(self) -> None:
        with self._lock:
            self._scans_begun += 1
            number, made = self._scans_begun, self._made_bytes
            self._unseen_bytes = 0
        problem, overhead, seen = "", 0, set[tuple[str, str]]()
        try:
            with self._base() as base:
                overhead = taken_bytes(os.fstat(base.descriptor))
                for entry in os.scandir(self.path):
                    if _NAMESPACE.fullmatch(entry.name) and base.has_folder(entry.name):
                        overhead += self._read_namespace(base, entry, seen, number)
                    elif entry.name == INCOMING:
                        self.ask_time()
                        overhead += self._sweep(base)
                    else:  # also what others can write to
                        overhead += weigh(entry)
        except OSError as error:  # what was known stays
            problem = f"{error.filename or self.path} cannot be looked through ({error.strerror or error})"
            self._complain(problem)
        with self._lock:
            if not problem:
                self._overhead_bytes = overhead
                self._made_bytes -= made
                for place in [place for place in self._shelves if place not in seen]:
                    if self._shelves[place].added_in < number:
                        self._rows_bytes -= sum(row.cost for row in self._shelves.pop(place).rows.values())
            self._scans_ended = number
            self._lock.notify_all()

    def _read_namespace(self, base: Folder, entry: os.DirEntry[str], seen: set[tuple[str, str]], number: int) -> int:
        """Bytes of everything but the rows in it."""
        overhead = 0
        with suppress(FileNotFoundError, NotOurs), base.folder(entry.name) as home:
            overhead += taken_bytes(os.fstat(home.descriptor))
            for inside in os.scandir(through(home.descriptor)):
                if not (_FAN.fullmatch(inside.name) and home.has_folder(inside.name)):
                    overhead += weigh(inside)
                    continue
                place = (entry.name, inside.name)
                with suppress(FileNotFoundError, NotOurs), home.folder(inside.name) as fan:
                    overhead += self._read_shelf(place, fan, trust=number % _TRUST_SCANS != 0)
                    seen.add(place)
        return overhead

    def _read_shelf(self, place: tuple[str, str], fan: Folder, *, trust: bool) -> int:
        """Rows that we know already are not looked at again: only those that are new cost more than their name."""
        status = os.fstat(fan.descriptor)
        with self._lock:
            shelf = self._shelves.setdefault(place, FanoutDir())
            if trust and shelf.modified_ns == status.st_mtime_ns:
                return shelf.overhead
            known = dict(shelf.rows)
            shelf.changes = {}
        found, overhead = dict[str, Seen](), taken_bytes(status)
        try:
            for entry in os.scandir(through(fan.descriptor)):
                if not _ROW.fullmatch(entry.name):
                    overhead += weigh(entry)
                elif entry.name in known:
                    found[entry.name] = known[entry.name]
                else:
                    with suppress(FileNotFoundError):
                        found[entry.name] = seen_as(entry.stat(follow_symlinks=False))
        except OSError:
            with self._lock:
                shelf.changes = None
            raise
        with self._lock:
            changes, shelf.changes = shelf.changes, None
            for name, change in changes.items():
                found.pop(name, None)
                if change is not None:
                    found[name] = change
            self._rows_bytes += sum(row.cost for row in found.values()) - sum(row.cost for row in shelf.rows.values())
            shelf.rows = found
            shelf.overhead = overhead
            settled = 1e9 * self.server_time.now_s() - status.st_mtime_ns > _SETTLED_NS
            shelf.modified_ns = status.st_mtime_ns if settled else -1
        return overhead

    def _sweep(self, base: Folder) -> int:
        """Delete what nobody writes any more; bytes of what others are writing."""
        total = 0
        with suppress(FileNotFoundError), base.folder(INCOMING) as incoming:
            total += taken_bytes(os.fstat(incoming.descriptor))
            for name in incoming.names():
                if self.writer.is_mine(name):
                    continue
                with suppress(FileNotFoundError):
                    status = incoming.stat(name)
                    if self.writer.is_gone(name) or self.server_time.now_s() - status.st_mtime > OLD_S:
                        incoming.unlink(name)
                        logger.info("swept %s, which nobody writes any more", incoming.path / name)
                    else:
                        total += max(taken_bytes(status), status.st_size)
        return total

    def _make_room(self) -> None:
        """Take the oldest rows away, of whatever namespace, until what is wanted fits."""
        while True:
            with self._lock:
                excess = self.used_bytes - self._leaving_bytes + self._wanted_bytes - self._limit_bytes
                if excess <= 0 or self._closing:
                    self._wanted_bytes = 0
                    return
            victims = self._oldest(excess)
            if not victims:
                self._no_room()
                return
            ended = [self.on_hand(place, self._evict, place, modified_ns) for modified_ns, place in victims]
            ends = {future.result() for future in ended}
            if _End.MISSING in ends:
                self._scan_once()  # somebody else makes room too: what is there now?
            elif ends == {_End.STUCK}:
                self._no_room()
                return

    def _no_room(self) -> None:
        with self._lock:
            self._wanted_bytes = 0
            self._full_until_s = time.monotonic() + FULL_S

    def _oldest(self, excess_bytes: int) -> list[tuple[int, Place]]:
        """The least recently used rows, enough of them, as far as there are any.

        Sorted out a sixteenth of all at a time. What is not among those is younger than they are, and stays so.
        """
        chosen = list[tuple[int, Place]]()
        for fresh in (False, True):
            if fresh and not chosen:
                self._victims.extend(self._sort_out())
            while self._victims and excess_bytes > 0:
                modified_ns, place = self._victims.popleft()
                with self._lock:
                    shelf = self._shelves.get(place[:2])
                    seen = shelf.rows.get(place.name) if shelf is not None else None
                if seen is not None and seen.modified_ns <= modified_ns:
                    chosen.append((modified_ns, place))
                    excess_bytes -= seen.cost
        return chosen

    def _sort_out(self) -> list[tuple[int, Place]]:
        with self._lock:
            places = list(self._shelves)
            count = sum(len(shelf.rows) for shelf in self._shelves.values())

        def rows() -> Iterable[tuple[int, Place]]:
            for place in places:
                with self._lock:
                    shelf = self._shelves.get(place)
                    found = list(shelf.rows.items()) if shelf is not None else []
                yield from ((seen.modified_ns, Place(*place, name)) for name, seen in found)

        return heapq.nsmallest(max(256, count // 16), rows())

    def _evict(self, place: Place, modified_ns: int) -> _End:
        """On a hand: delete the row unless it was used since."""
        try:
            status = self.look(place)
            if status is None:
                return _End.MISSING
            if status.st_mtime_ns > modified_ns:
                self._record(place, seen_as(status))
                return _End.KEPT
            self._unlink(place)
        except OSError as error:
            self._complain(f"{self.where(place)} cannot be deleted ({error.strerror or error})")
            return _End.STUCK
        with self._lock:
            shelf = self._shelves.get(place[:2])
            empty = shelf is not None and not shelf.rows
        if empty:
            with suppress(OSError), self._base() as base:  # not empty after all
                with base.folder(place.namespace) as home:
                    home.rmdir(place.fan)
                base.rmdir(place.namespace)
        return _End.GONE
