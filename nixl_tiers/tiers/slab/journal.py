"""The journal of a file tier: which key the core put into which slot, in SQLite, written behind on a thread.

Nothing here is believed when a row is loaded: the seal decides. The journal only saves reading every slot at open.
So it may lag behind by a tenth of a second and lose that to a crash, and a damaged one is replaced by an empty one.
It knows whether that can have happened: then it is not `whole`, and the seals of the slots that it does not know of
(neither what they hold nor that they were emptied) tell the rest.
"""

from __future__ import annotations

import logging
import os
import queue
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh32_intdigest

from nixl_tiers.tiers.base import MAX_ENTRIES, Entry
from nixl_tiers.tiers.disk import FileIdentity
from nixl_tiers.tiers.log_once import LogOnce

logger = logging.getLogger(__name__)

NAME: Final = "manifest.sqlite"
_COMMIT_S: Final = 0.1
_COMMIT_ROWS: Final = 256
_RETRY_S: Final = 1.0
_CHECKPOINT_PAGES: Final = 64
_BATCHES_AHEAD: Final = 16
_NOTHING: Final = b""  # in place of a key: the slot was emptied, whatever its bytes look like
_EMPTIED: Final = np.dtype([("slot", "<i8"), ("sealed_at", "<i8")])
_WHOLE: Final = 1  # PRAGMA user_version of a journal that was closed with all that it had been told

_SCHEMA: Final = """
PRAGMA page_size = 4096;
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
PRAGMA journal_size_limit = 0;
PRAGMA temp_store = MEMORY;
CREATE TABLE IF NOT EXISTS rows (
    slot INTEGER PRIMARY KEY, key BLOB NOT NULL, tick INTEGER NOT NULL, sealed_at INTEGER NOT NULL
);
"""


def journal_bytes(slots: int) -> int:
    """The most that the journal of `slots` rows takes on disk: half-full pages of the longest keys, and a log that
    holds the pages of one transaction beyond its checkpoint."""
    return (2 << 20) + 300 * slots


class _Put(NamedTuple):
    """The slot holds the key now, or nothing, and bytes that were sealed then (Unix seconds; 0: none)."""

    key: bytes
    tick: int
    sealed_at: int


class _Forget(NamedTuple):
    """The slot no longer holds the key, and is empty; None: it is about to hold another, and is unknown till then."""

    key: bytes | None


class _Touch(NamedTuple):
    """The key that the slot may still hold was used at `tick`."""

    key: bytes
    tick: int


class Journal:
    """The journal of one namespace. `put`, `forget`, `touch` and `adopt` never wait; `close` writes what is pending."""

    def __init__(self, directory: Path, slots: int) -> None:
        """Raises OSError if the journal cannot be opened or made here."""
        self._path = directory / NAME
        self._lock = threading.Condition()
        self._pending: dict[int, _Put | _Forget | _Touch] = {}  # one a slot: the newest decides
        self._log_once = LogOnce(logger)
        self._closing = False
        self._urgent = False  # somebody waits for what is pending
        self._ailing = False
        self._adopted: queue.Queue[tuple[list[Entry], list[int]] | None] = queue.Queue()
        self._stored: set[int] | None = set()  # slots given to new rows while the old ones are still being listed
        self._listed = np.zeros(slots, dtype=np.bool_)
        self._emptied = np.zeros(0, dtype=_EMPTIED)
        self.tags = np.zeros(slots, dtype=np.uint32)
        """By slot: a number that stands for the key that it holds; 0: none. As `sealed_at` is."""
        self.sealed_at = np.zeros(slots, dtype=np.uint32)
        """By slot: when the bytes that stand there were sealed, in Unix seconds; 0 if no row was written there since it
        was erased. Also of slots that hold no row any more. For the caller's thread; whole after `adopt`."""
        self._ahead: tuple[int, int] | None = None  # (latest time that the file may hold, last slot that was looked at)
        self._mark: FileIdentity | None = None  # of the file that is open; None while it is being replaced
        self._lost = False  # the file was replaced while it was in use: rows were told of that it does not hold
        try:
            try:
                self._db = self._connect(slots)
            except sqlite3.Error as error:
                if not _is_damage(error):
                    raise
                self._db = self._replace(error)
        except sqlite3.Error as error:
            raise OSError(f"{self._path} cannot be opened: {error}") from error
        self._marked_whole = self.whole = self._db.execute("PRAGMA user_version").fetchone() == (_WHOLE,)
        """Whether the file holds every row; `whole` may become true by `complete`."""
        self._thread = threading.Thread(target=self._run, name="manifest", daemon=True)
        self._thread.start()

    def put(self, slot: int, key: bytes, tick: int, sealed_at: int) -> None:
        """The slot holds the key from now on, sealed then (Unix seconds)."""
        self._stamp(slot, key, sealed_at)
        with self._lock:
            self._change(slot, _Put(key, tick, int(self.sealed_at[slot])))

    def holds(self, slot: int, key: bytes) -> bool:
        """Whether that is the last that was said of the slot, here or by `adopt`."""
        return bool(self.tags[slot] == _tag(key))

    def spoil(self, slot: int, sealed_at: int) -> None:
        """The slot holds no row, but perhaps bytes of one that was sealed then."""
        self.put(slot, _NOTHING, 0, sealed_at)

    def erase(self, slot: int) -> None:
        """The slot holds no row, and its bytes have been made unreadable."""
        self.sealed_at[slot] = self.tags[slot] = 0
        with self._lock:
            self._change(slot, _Put(_NOTHING, 0, 0))

    def limit_times(self, now: int) -> None:
        """What was sealed later than `now` (Unix seconds) counts as sealed now, here and, slowly, in the file. After
        `adopt`: the file keeps what was first said of a time that the clock had not reached."""
        if (self.sealed_at > now).any():
            np.minimum(self.sealed_at, now, out=self.sealed_at)
            with self._lock:
                self._ahead = now, -1
                self._lock.notify()

    def date(self, slot: int, sealed_at: int) -> None:
        """The clock has caught up with the seal in this slot: its own time counts again."""
        self.sealed_at[slot] = sealed_at

    def forget(self, slot: int, key: bytes | None = None) -> None:
        """The slot no longer holds the key; without a key: it is about to be overwritten, whatever it held."""
        if slot < len(self.tags) and (key is None or self.holds(slot, key)):
            self.tags[slot] = 0
        with self._lock:
            if key is None and self._stored is not None:
                self._stored.add(slot)
            last = self._pending.get(slot)
            if key is None:
                self._urgent = True
                self._change(slot, _Forget(None))
                self._lock.notify()
            elif isinstance(last, _Put):
                if last.key == key:  # else the slot has gone to another key since
                    self._change(slot, _Put(_NOTHING, 0, last.sealed_at))
            elif not isinstance(last, _Forget):  # else what the file says about the slot is older than `last`
                self._change(slot, _Forget(key))

    def may_overwrite(self, slots: Iterable[int]) -> bool:
        """Whether the file no longer says what these forgotten slots held; soon, or never if it cannot be written.

        A row that is written before that would be lost to a kill: the file would name another key.
        """
        return self._ailing or not any(isinstance(self._pending.get(slot), _Forget) for slot in slots)

    def touch(self, slot: int, key: bytes, tick: int) -> None:
        """The key in the slot was used at `tick`."""
        with self._lock:
            last = self._pending.get(slot)
            if isinstance(last, _Put):
                if last.key == key:
                    self._change(slot, _Put(key, max(tick, last.tick), last.sealed_at))
            elif not isinstance(last, _Forget):
                self._change(slot, _Touch(key, tick))

    def adopt(self) -> Iterator[list[Entry]]:
        """Once: the rows that were there at open, oldest first, without slots that were stored into since.

        Batches of up to MAX_ENTRIES; an empty one means that the next is still being read.
        """
        while True:
            try:
                listed = self._adopted.get_nowait()
            except queue.Empty:
                yield []
                continue
            if listed is None:
                for slot, sealed_at in self._emptied.tolist():
                    if sealed_at and not self.was_stored(slot):
                        self._stamp(slot, _NOTHING, sealed_at)
                return
            batch, sealed = listed
            for entry, sealed_at in zip(batch, sealed, strict=True):
                if not self.was_stored(entry.slot):
                    self._stamp(entry.slot, entry.key, sealed_at)
            with self._lock:
                self._lock.notify()
            self._listed[[entry.slot for entry in batch]] = True
            yield [entry for entry in batch if not self.was_stored(entry.slot)]

    def unknown(self) -> NDArray[np.bool_]:
        """After `adopt`: by slot, whether the journal cannot say what it holds."""
        unknown = ~self._listed
        unknown[self._emptied["slot"]] = False
        unknown[list(self._stored or ())] = False
        return unknown

    def was_stored(self, slot: int) -> bool:
        """Whether the slot was stored into since open. Not to be asked after `complete`."""
        return self._stored is not None and slot in self._stored

    def complete(self) -> None:
        """Everything that the slots held at open has been told, here or by `adopt`."""
        self._stored = None
        self.whole = True

    def problem(self) -> str:
        """What somebody has done to the file, or "". On any thread. Raises OSError."""
        mark = self._mark
        return mark.problem() if mark is not None else ""

    def close(self) -> None:
        """Write what is pending, as far as the medium lets it, and close the file."""
        with self._lock:
            self._closing = True
            self._lock.notify()
        self._thread.join()

    def _stamp(self, slot: int, key: bytes, sealed_at: int) -> None:
        self.tags[slot] = _tag(key)
        self.sealed_at[slot] = min(max(1, sealed_at), 0xFFFFFFFF)  # 0 would say that nothing is there

    def _change(self, slot: int, change: _Put | _Forget | _Touch) -> None:
        self._pending[slot] = change
        if len(self._pending) == 1 or len(self._pending) >= _COMMIT_ROWS:
            self._lock.notify()

    def _connect(self, slots: int) -> sqlite3.Connection:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._path, flags, 0o600)  # SQLite would make it 0644, and follow a link
        os.close(descriptor)
        db = sqlite3.connect(self._path, timeout=5.0, isolation_level=None, check_same_thread=False)
        try:
            db.executescript(_SCHEMA)
            db.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
            db.execute("DELETE FROM rows WHERE slot >= ? OR slot < 0", (slots,))
            db.execute("SELECT key, tick, sealed_at FROM rows LIMIT 0")  # one of other columns is as good as damaged
        except sqlite3.Error:
            db.close()
            raise
        self._mark = FileIdentity(self._path)
        return db

    def _mark_whole(self) -> None:
        """The next to open it need not look at the slots."""
        if self.whole and not self._lost and not self._pending and not self._marked_whole:
            self._db.execute(f"PRAGMA user_version = {_WHOLE}")

    def _replace(self, damage: sqlite3.Error) -> sqlite3.Connection:
        self._log_once.about("damage", f"{self._path} is damaged ({damage}): starting with an empty one")
        self._mark = None
        for suffix in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                self._path.with_name(NAME + suffix).unlink()
        return self._connect(0)

    @property
    def _wanted(self) -> bool:
        """Whether the listing should go on: it is not far ahead of who reads it."""
        return self._adopted.qsize() < _BATCHES_AHEAD

    def _run(self) -> None:
        batches: Iterator[tuple[list[Entry], list[int]]] | None = self._read()
        complained = False
        while True:
            closing = self._rest(batches is not None, complained)
            try:
                if batches is not None and not closing and self._wanted:
                    batch = next(batches, None)
                    self._adopted.put(batch)
                    if batch is None:
                        batches = None
                self._commit()
                self._limit_some()
                self._ailing = complained = False
            except sqlite3.Error as error:
                if batches is not None:  # a listing that broke ends here
                    batches = None
                    self._adopted.put(None)
                self._ailing = True
                complained = self._recover(error, complained)
            if closing:
                break
        with suppress(sqlite3.Error):
            self._mark_whole()
        with suppress(sqlite3.Error):
            self._db.close()

    def _rest(self, listing: bool, complained: bool) -> bool:
        """Wait until there is something to do, and then a little more for company; whether it is time to close."""
        with self._lock:
            if complained:
                self._lock.wait_for(lambda: self._closing, _RETRY_S)
            elif not (listing and self._wanted):
                self._lock.wait_for(lambda: self._closing or self._pending or self._ahead or (listing and self._wanted))
                self._lock.wait_for(
                    lambda: self._closing or self._urgent or len(self._pending) >= _COMMIT_ROWS, _COMMIT_S
                )
            return self._closing

    def _recover(self, error: sqlite3.Error, complained: bool) -> bool:
        """Deal with a failed read or write; whether somebody was told that the journal is not being written."""
        if _is_damage(error):
            with suppress(sqlite3.Error, OSError):
                self._db.close()
                self._lost = True
                self.whole = self._marked_whole = False
                self._db = self._replace(error)
        elif not complained:
            self._log_once.about(
                "write", f"{self._path} cannot be written ({error}): what is stored now may be lost at a restart"
            )
        return True

    def _commit(self) -> None:
        """Write everything pending, _COMMIT_ROWS a transaction so that the log stays small."""
        while True:
            with self._lock:
                changes = dict(islice(self._pending.items(), _COMMIT_ROWS))
                self._urgent = False
            if not changes:
                return
            try:
                self._db.execute("BEGIN IMMEDIATE")
                for slot, change in changes.items():
                    self._apply(slot, change)
                if self._marked_whole:
                    self._db.execute("PRAGMA user_version = 0")
                self._db.execute("COMMIT")
                self._marked_whole = False
            except sqlite3.Error:
                with suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                raise
            with self._lock:
                for slot, change in changes.items():
                    if self._pending.get(slot) is change:
                        del self._pending[slot]

    def _limit_some(self) -> None:
        """Go on with `limit_times` in the file, _COMMIT_ROWS at a time."""
        with self._lock:
            ahead = self._ahead
        if ahead is None:
            return
        now, last = ahead
        wanted = "SELECT slot FROM rows WHERE slot > ? AND sealed_at > ? ORDER BY slot LIMIT ?"
        slots = [slot for (slot,) in self._db.execute(wanted, (last, now, _COMMIT_ROWS))]
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany("UPDATE rows SET sealed_at = ? WHERE slot = ?", [(now, slot) for slot in slots])
            self._db.execute("COMMIT")
        except sqlite3.Error:
            with suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise
        with self._lock:
            if self._ahead is ahead:
                self._ahead = (now, slots[-1]) if len(slots) == _COMMIT_ROWS else None

    def _apply(self, slot: int, change: _Put | _Forget | _Touch) -> None:
        if isinstance(change, _Put):
            self._db.execute("INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?)", (slot, *change))
        elif isinstance(change, _Touch):
            self._db.execute("UPDATE rows SET tick = ? WHERE slot = ? AND key = ?", (change.tick, slot, change.key))
        elif change.key is None:
            self._db.execute("DELETE FROM rows WHERE slot = ?", (slot,))
        else:
            self._db.execute(
                "UPDATE rows SET key = ?, tick = 0 WHERE slot = ? AND key = ?", (_NOTHING, slot, change.key)
            )

    def _read(self) -> Iterator[tuple[list[Entry], list[int]]]:
        """Order by 16 bytes a row, then fetch keys batch by batch: no long read that would hold up the log."""
        emptied = self._db.execute("SELECT slot, sealed_at FROM rows WHERE key = ?", (_NOTHING,))
        self._emptied = np.fromiter(emptied, dtype=_EMPTIED)
        order = np.fromiter(
            self._db.execute("SELECT tick, slot FROM rows WHERE key <> ?", (_NOTHING,)),
            dtype=np.dtype([("tick", "<i8"), ("slot", "<i8")]),
        )
        order.sort(order=("tick", "slot"))
        for start in range(0, len(order), MAX_ENTRIES):
            slots = order["slot"][start : start + MAX_ENTRIES].tolist()
            marks = ",".join("?" * len(slots))
            found = self._db.execute(
                f"SELECT slot, key, tick, sealed_at FROM rows WHERE slot IN ({marks}) ORDER BY tick",  # noqa: S608
                slots,
            )
            rows = [row for row in found if row[1] != _NOTHING]
            yield [Entry(slot, bytes(key), tick) for slot, key, tick, _ in rows], [row[3] for row in rows]


def _tag(key: bytes) -> int:
    """Tells one key from another, nearly always; not 0 for any but none."""
    return xxh32_intdigest(key) | 1 if key else 0


def _is_damage(error: sqlite3.Error) -> bool:
    """Whether the file itself is bad, rather than the medium full, unwritable or failing."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT, sqlite3.SQLITE_ERROR)
