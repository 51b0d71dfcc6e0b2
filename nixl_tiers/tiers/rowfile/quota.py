"""The account of a path that several engines share, and what is done to the rows below it.

Rows are `<path>/<namespace>/<2 hex>/<key>.row`; what is being written stands in `<path>/.incoming`. Nobody holds a
lock, since shared file systems often have none that work: whoever writes counts itself exactly, and the others by
looking. So one engine alone never exceeds the capacity, and several only by what each may write between two looks.
Nothing here is believed when a row is loaded. The thread that looks and makes room: `shelves.py`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple, ParamSpec, TypeVar

from nixl_tiers.chunk import PAGE, Key, align, key_of_object, object_name
from nixl_tiers.memory.seal import read as read_seal
from nixl_tiers.tiers.disk import INCOMING
from nixl_tiers.tiers.expiry import has_expired
from nixl_tiers.tiers.folder import Folder, NotOurs
from nixl_tiers.tiers.rowfile.server_time import ServerTime
from nixl_tiers.tiers.rowfile.temp_names import TempNames

logger = logging.getLogger(__name__)

MARGIN_BYTES: Final = 256 << 10  # what a file system may add of its own accord before the next look
NAME_BYTES: Final = 512  # of a directory, for one more name in it
FANS: Final = 256
LOOK_SHARE: Final = 64  # an engine looks again when it has written this part of the capacity
LOOK_ROWS: Final = 16  # but not for less than these
_HANDS: Final = 4
_LOOKED_AT_ONCE: Final = 64
_AHEAD_S: Final = 60.0  # no file is ahead of its server's clock by so much, unless that was put back
_TAILS: Final = (PAGE, 64 << 10)  # in which a seal is looked for: nearly always the first, in any case the second

P = ParamSpec("P")
T = TypeVar("T")


class Place(NamedTuple):
    """Where a row stands: `<namespace>/<fan>/<name>`."""

    namespace: str
    fan: str
    name: str

    @classmethod
    def of(cls, namespace: str, key: Key) -> Place:
        fan, _, digits = object_name(key).partition("/")
        return cls(namespace, fan, f"{digits}.row")

    @property
    def key(self) -> Key | None:
        return key_of_object(f"{self.fan}/{self.name.removesuffix('.row')}")


class Room(Enum):
    YES = "yes"
    WAIT = "wait"  # being made, or looked for
    NO = "no"


class Seen(NamedTuple):
    """A row file as it was when this process first saw it, or last wrote or touched it."""

    modified_ns: int
    size: int
    cost: int  # bytes on the medium
    sealed_at: int = 0  # what its age counts from, in Unix seconds (`counts_from`); 0: not looked at yet


@dataclass(slots=True)
class FanoutDir:
    """One fan-out directory. `changes`: what we did to it while it is being read (None: taken away)."""

    rows: dict[str, Seen] = field(default_factory=dict)
    changes: dict[str, Seen | None] | None = None
    modified_ns: int = -1  # of the directory, when it was read; -1: read it again in any case
    overhead: int = 0
    added_in: int = -1  # the scan during which we last put a row here


class DirQuota:
    """The account of one shared path. `reserve`, `has` and `ask_room` never wait; what is named so runs `on_hand`."""

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
        self.path = path
        self._uid: int | None = None
        self.server_time = server_time or ServerTime()
        self._writes = writes
        self.writer = TempNames()
        self._limit_bytes = capacity_bytes - MARGIN_BYTES
        self._row_bytes = row_bytes
        self._look_bytes = max(LOOK_ROWS * row_bytes, capacity_bytes // LOOK_SHARE)
        self._lock = threading.Condition()
        self._shelves: dict[tuple[str, str], FanoutDir] = {}
        self._rows_bytes = self._overhead_bytes = 0  # as last seen, our own changes included
        self._made_bytes = 0  # of directories, since they were last looked at
        self._reserved_bytes = self._leaving_bytes = 0
        self._unseen_bytes = 0  # written since the last scan began
        self._wanted_bytes = 0
        self._full_until_s = 0.0
        self._scans_asked = self._scans_begun = self._scans_ended = 0
        self._complained = ""
        self._closing = False
        self._hands = [ThreadPoolExecutor(1, thread_name_prefix=f"hand-{n}") for n in range(_HANDS)]

    def on_hand(self, place: Place, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call this on a thread that may wait; calls for one place in the order in which they were asked for."""
        return self._hands[zlib.crc32(place.name.encode()) % _HANDS].submit(call, *args, **kwargs)

    def where(self, place: Place) -> Path:
        return self.path.joinpath(*place)

    # --- the account ----------------------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        return self._rows_bytes + self._overhead_bytes + self._made_bytes + self._reserved_bytes

    def has(self, place: Place) -> bool:
        """Whether a row stood there when we last looked."""
        with self._lock:
            shelf = self._shelves.get(place[:2])
            return shelf is not None and place.name in shelf.rows

    def sealed_at(self, place: Place) -> int:
        """What the age of the row there counts from, in Unix seconds; 0 if that was not looked at."""
        with self._lock:
            shelf = self._shelves.get(place[:2])
            seen = shelf.rows.get(place.name) if shelf is not None else None
        return seen.sealed_at if seen is not None else 0

    def note(self, place: Place, sealed_at: int) -> None:
        """What its age counts from."""
        with self._lock:
            shelf = self._shelves.get(place[:2])
            seen = shelf.rows.get(place.name) if shelf is not None else None
        if seen is not None:
            self._record(place, seen._replace(sealed_at=sealed_at))

    def rows_of(self, namespace: str) -> list[tuple[Seen, Place]]:
        """Every row of a namespace that was seen, in no order."""
        with self._lock:
            shelves = [(fan, shelf) for (owner, fan), shelf in self._shelves.items() if owner == namespace]
        found = []
        for fan, shelf in shelves:
            with self._lock:
                rows = list(shelf.rows.items())
            found += [(seen, Place(namespace, fan, name)) for name, seen in rows]
        return found

    def reserve(self, waiting: int) -> Room:
        """Room for one of `waiting` rows that are about to be written. YES counts it: until `take_in` or `give_up`."""
        with self._lock:
            if not self._scans_ended:
                return Room.WAIT
            need = self._row_bytes
            if self._unseen_bytes + need > self._look_bytes:
                self._ask_scan()
                return Room.WAIT
            if self.used_bytes + need <= self._limit_bytes:
                self._reserved_bytes += need
                self._unseen_bytes += need
                self._made_bytes += NAME_BYTES
                return Room.YES
            if self.used_bytes - self._leaving_bytes + need <= self._limit_bytes:
                return Room.WAIT
            if time.monotonic() < self._full_until_s:
                return Room.NO
            self._wanted_bytes = waiting * need
            self._lock.notify_all()
            return Room.WAIT

    def give_up(self) -> None:
        """A reserved row has not been written, and its temporary file is gone."""
        with self._lock:
            self._reserved_bytes -= self._row_bytes

    def leaving(self, place: Place, sign: int) -> None:
        """A row is about to be taken away (+1); it has been, or stays (-1)."""
        with self._lock:
            self._leaving_bytes += sign * self._row_bytes

    # --- on hands: they wait for the file system --------------------------------------------------------------------

    def prepare(self, namespace: str) -> None:
        """Make what is missing, and see whether it is ours and what time it is there. Raises NotOurs, OSError."""
        self._uid = None  # the path may be on another file system now
        with self._base() as base:
            base.folder(namespace, make=True).close()
            base.folder(INCOMING, make=True).close()
        self.ask_time()

    def problem(self, namespace: str) -> str:
        """What somebody has put in place of our directories, or "". Raises OSError."""
        with self._base() as base:
            for name in (INCOMING, namespace):
                try:
                    base.folder(name).close()
                except NotOurs as error:
                    return str(error)
                except FileNotFoundError:  # it is made anew when it is needed
                    pass
        return ""

    @contextmanager
    def _base(self) -> Iterator[Folder]:
        with Folder.base(self.path, self._uid) as base:
            self._uid = base.uid
            yield base

    @contextmanager
    def incoming(self) -> Iterator[Folder]:
        """Where files stand that are being written."""
        with self._base() as base, base.folder(INCOMING) as folder:
            yield folder

    @contextmanager
    def _fan(self, place: Place) -> Iterator[Folder]:
        with self._base() as base, base.folder(place.namespace) as home, home.folder(place.fan) as fan:
            yield fan

    def ask_time(self) -> None:
        """See what time it is by the clock of the file server. Raises OSError."""
        with self.incoming() as incoming:
            self.server_time.ask(incoming.descriptor)

    def fresh(self) -> tuple[Path, int]:
        """A file of its own to write a row into, and a descriptor of it that the caller closes. Raises OSError."""
        name, flags = self.writer.name(), os.O_RDWR | os.O_CREAT | os.O_EXCL
        with self._base() as base:
            try:
                incoming = base.folder(INCOMING)
            except FileNotFoundError:
                incoming = base.folder(INCOMING, make=True)
            with incoming:
                return incoming.path / name, incoming.open(name, flags)

    def discard(self, temporary: Path) -> None:
        """Delete a file that holds no row. Raises OSError."""
        with self.incoming() as incoming:
            incoming.unlink(temporary.name)

    def take_in(self, temporary: Path, place: Place, sealed_at: int) -> None:
        """Give a written file its name, all at once; what stood there before is replaced. `sealed_at`: Unix seconds.
        Raises OSError."""
        try:
            status = self._name_it(temporary, place)
        except FileNotFoundError:
            with self._base() as base:
                made = int(base.make(place.namespace))
                with base.folder(place.namespace) as home:
                    made += home.make(place.fan)
            with self._lock:
                self._made_bytes += made * PAGE
            status = self._name_it(temporary, place)
        if status is not None:
            self._record(place, seen_as(status)._replace(sealed_at=counts_from(sealed_at, status)))
        with self._lock:
            self._reserved_bytes -= self._row_bytes

    def _name_it(self, temporary: Path, place: Place) -> os.stat_result | None:
        with (
            self._base() as base,
            base.folder(INCOMING) as incoming,
            base.folder(place.namespace) as home,
            home.folder(place.fan) as fan,
        ):
            incoming.rename(temporary.name, fan, place.name)
            try:
                return fan.stat(place.name)
            except OSError:  # gone again: somebody was short of room
                return None

    def look(self, place: Place) -> os.stat_result | None:
        """The row's file, or None if it is not there. Raises OSError."""
        try:
            with self._fan(place) as fan:
                return fan.stat(place.name)
        except FileNotFoundError:
            self._record(place, None)
            return None

    def open_row(self, place: Place) -> int | None:
        """A descriptor of the row's file, to read it, that the caller closes; None if it is not there. Raises
        OSError."""
        try:
            with self._fan(place) as fan:
                return fan.open(place.name, os.O_RDONLY)
        except FileNotFoundError:
            self._record(place, None)
            return None

    def expire(self, now_s: float, max_age_s: float) -> None:
        """Delete the rows of all namespaces whose seals say that they are too old at `now_s`, by the server's clock,
        and wait for that. Not on a hand."""
        candidates = []
        with self._lock:
            places = list(self._shelves)
        for place in places:
            with self._lock:
                shelf = self._shelves.get(place)
                rows = list(shelf.rows.items()) if shelf is not None else []
            candidates += [
                Place(*place, name)
                for name, seen in rows
                if not seen.sealed_at
                or has_expired(seen.sealed_at, now_s, max_age_s)
                or seen.sealed_at > now_s + _AHEAD_S
            ]
        for start in range(0, len(candidates), _LOOKED_AT_ONCE):
            if self._closing:
                return
            part = candidates[start : start + _LOOKED_AT_ONCE]
            for looked in [self.on_hand(place, self._expire, place, now_s, max_age_s) for place in part]:
                looked.result()

    def _expire(self, place: Place, now_s: float, max_age_s: float) -> None:
        """On a hand."""
        path = self.where(place)
        try:
            descriptor = self.open_row(place)
            if descriptor is None:
                return
            with os.fdopen(descriptor, "rb") as file:
                status = os.fstat(file.fileno())
                seal = None
                for tail in _TAILS:
                    file.seek(max(0, status.st_size - tail))
                    seal = seal or read_seal(file.read(tail))
            sealed_at = counts_from(seal.sealed_at if seal is not None else None, status)
            if has_expired(sealed_at, now_s, max_age_s):
                self.condemn(place, status)
            elif sealed_at > now_s + _AHEAD_S:  # as its time is too: the server's clock was ahead
                self.touch(place)
            else:
                self._record(place, seen_as(status)._replace(sealed_at=sealed_at))
        except OSError as error:
            self._complain(f"{path} cannot be looked at ({error.strerror or error})")

    def touch(self, place: Place) -> None:
        """The row was used now, for everybody to see. Not before the server's time has reached its seal."""
        with suppress(OSError), self._fan(place) as fan:
            self.server_time.mark(place.name, fan.descriptor)
            self._record(place, seen_as(fan.stat(place.name)))

    def take_away(self, place: Place) -> None:
        """Delete a row that we need no longer, unless somebody else has used it since we last did."""
        with self._lock:
            shelf = self._shelves.get(place[:2])
            seen = shelf.rows.get(place.name) if shelf is not None else None
        with suppress(OSError):
            status = self.look(place)
            if self._writes and status is not None and (seen is None or status.st_mtime_ns <= seen.modified_ns):
                self._unlink(place)

    def condemn(self, place: Place, was: os.stat_result) -> None:
        """Delete a file whose bytes are wrong, unless it has been replaced meanwhile."""
        with suppress(OSError):
            status = self.look(place)
            if status is not None and (status.st_ino, status.st_mtime_ns) == (was.st_ino, was.st_mtime_ns):
                self._unlink(place)

    def _unlink(self, place: Place) -> None:
        with suppress(FileNotFoundError), self._fan(place) as fan:
            fan.unlink(place.name)
        self._record(place, None)

    def _record(self, place: Place, seen: Seen | None) -> None:
        """What we did to a place, or found there."""
        with self._lock:
            shelf = self._shelves.get(place[:2])
            if shelf is None:
                if seen is None:
                    return
                shelf = self._shelves[place[:2]] = FanoutDir()
            before = shelf.rows.pop(place.name, None)
            if before is not None:
                self._rows_bytes -= before.cost
                if seen is not None and not seen.sealed_at:
                    # Wrong if the row was replaced, and then soon put right: the seal is read again before it goes.
                    seen = seen._replace(sealed_at=before.sealed_at)
            if seen is not None:
                shelf.rows[place.name] = seen
                self._rows_bytes += seen.cost
                shelf.added_in = self._scans_begun
            if shelf.changes is not None:
                shelf.changes[place.name] = seen

    def _ask_scan(self) -> None:
        self._scans_asked = max(self._scans_asked, self._scans_begun + 1)
        self._lock.notify_all()

    def _complain(self, problem: str) -> None:
        """Once for each problem that lasts."""
        if problem and problem != self._complained:
            logger.warning("%s", problem)
        self._complained = problem


def counts_from(sealed_at: int | None, status: os.stat_result) -> int:
    """What the age of a row file counts from, in Unix seconds. Its time is when it was last used, so only the seal
    tells its age (None: it has none, and ages by its time). But a seal that is ahead of the file's time was made by a
    clock that is ahead of the server's: then the time is when the row was written, and stays that (`touch`)."""
    return int(status.st_mtime) if sealed_at is None else min(sealed_at, int(status.st_mtime))


def seen_as(status: os.stat_result) -> Seen:
    return Seen(status.st_mtime_ns, status.st_size, max(taken_bytes(status), align(status.st_size)))


def taken_bytes(status: os.stat_result) -> int:
    return status.st_blocks * 512


def weigh(entry: os.DirEntry[str]) -> int:
    """Bytes of a file, or of everything below a directory, that is no row of ours."""
    try:
        status = entry.stat(follow_symlinks=False)
        if not entry.is_dir(follow_symlinks=False):
            return max(taken_bytes(status), status.st_size)
        return taken_bytes(status) + sum(map(weigh, os.scandir(entry.path)))
    except OSError:  # it went away
        return 0
