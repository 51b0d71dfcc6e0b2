"""The journal of a shard: which key stands in which slot, in SQLite, written behind by a thread.

It is not trusted when a row is loaded: the seal decides. The journal only saves reading every seal at open. So it may
lag by a tenth of a second, which a crash loses, and a damaged one is replaced by an empty one. It knows whether that
can have happened: then it is not `complete`, and the slots that it has no record of are recovered from their seals.
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

NAME: Final = "manifest.sqlite"  # part of the format on disk
_COMMIT_S: Final = 0.1
_COMMIT_ROWS: Final = 256
_RETRY_S: Final = 1.0
_CHECKPOINT_PAGES: Final = 64
_BATCHES_AHEAD: Final = 16
_NO_KEY: Final = b""  # in place of a key: the slot holds no row, whatever its bytes look like
_EMPTY_SLOT: Final = np.dtype([("slot", "<i8"), ("sealed_at", "<i8")])
_COMPLETE: Final = 1  # PRAGMA user_version of a journal that was closed with a record of every row

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
    """The most that the journal of `slots` rows takes on disk: half-full pages of the longest keys, and a write-ahead
    log with the pages of one transaction beyond its checkpoint."""
    return (2 << 20) + 300 * slots


class _Put(NamedTuple):
    """The slot holds the key now, or no row, and bytes sealed then (Unix seconds; 0: none)."""

    key: bytes
    tick: int
    sealed_at: int


class _Remove(NamedTuple):
    """The slot no longer holds the key, and is empty."""

    key: bytes


class _Overwrite(NamedTuple):
    """The slot is about to be overwritten: what it holds is unknown until a _Put."""


class _Touch(NamedTuple):
    """The key, if the slot still holds it, was used at `tick`."""

    key: bytes
    tick: int


_Change = _Put | _Remove | _Overwrite | _Touch


class Journal:
    """The journal of one shard. No call waits for the medium, but for `close`, which writes what is pending."""

    def __init__(self, directory: Path, slots: int) -> None:
        """Raises OSError if the journal cannot be opened or made here."""
        self._path = directory / NAME
        self._lock = threading.Condition()
        self._pending: dict[int, _Change] = {}  # one per slot: the newest counts
        self._log_once = LogOnce(logger)
        self._closing = False
        self._urgent = False  # a store waits for what is pending
        self._failing = False
        self._rows_read: queue.Queue[tuple[list[Entry], list[int]] | None] = queue.Queue()
        self._stored: set[int] | None = set()  # slots that got new rows while the old ones are still being listed
        self._listed = np.zeros(slots, dtype=np.bool_)
        self._empty = np.zeros(0, dtype=_EMPTY_SLOT)
        self.tags = np.zeros(slots, dtype=np.uint32)
        """By slot: a hash of the key that it holds; 0: none. For the caller's thread, complete after `list_rows`."""
        self.sealed_at = np.zeros(slots, dtype=np.uint32)
        """By slot: when the bytes that stand there were sealed, in Unix seconds; 0 if no row was written there since it
        was erased. Also of slots that hold no row any more. For the caller's thread, complete after `list_rows`."""
        self._clamping: tuple[int, int] | None = None  # (latest time allowed in the file, last slot that was clamped)
        self._identity: FileIdentity | None = None  # of the open file; None while it is being replaced
        self._lost = False  # the file was replaced while it was in use: records may be missing from the new one
        try:
            try:
                self._db = self._connect(slots)
            except sqlite3.Error as error:
                if not _is_damage(error):
                    raise
                self._db = self._replace(error)
        except sqlite3.Error as error:
            raise OSError(f"{self._path} cannot be opened: {error}") from error
        self._marked_complete = self.complete = self._db.execute("PRAGMA user_version").fetchone() == (_COMPLETE,)
        """Whether it has a record of every row. `mark_complete` makes it true."""
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    # --- changes ----------------------------------------------------------------------------------------------------

    def put(self, slot: int, key: bytes, tick: int, sealed_at: int) -> None:
        """The slot holds the key, sealed then (Unix seconds)."""
        self._set(slot, key, sealed_at)
        with self._lock:
            self._change(slot, _Put(key, tick, int(self.sealed_at[slot])))

    def holds(self, slot: int, key: bytes) -> bool:
        """Whether the slot holds the key, as far as changes and listed rows say."""
        return bool(self.tags[slot] == _tag(key))

    def mark_garbage(self, slot: int, sealed_at: int) -> None:
        """The slot holds no row, but may hold bytes of one that was sealed then."""
        self.put(slot, _NO_KEY, 0, sealed_at)

    def mark_erased(self, slot: int) -> None:
        """The slot holds no row, and its bytes have been erased."""
        self.sealed_at[slot] = self.tags[slot] = 0
        with self._lock:
            self._change(slot, _Put(_NO_KEY, 0, 0))

    def clamp_times(self, now: int) -> None:
        """Times later than `now` (Unix seconds) become `now`: at once here, step by step in the file. After
        `list_rows`. So the file keeps when a row with a seal ahead of the clock was first seen."""
        if (self.sealed_at > now).any():
            np.minimum(self.sealed_at, now, out=self.sealed_at)
            with self._lock:
                self._clamping = now, -1
                self._lock.notify()

    def restore_time(self, slot: int, sealed_at: int) -> None:
        """The clock has caught up with the seal in this slot: the seal's time counts again."""
        self.sealed_at[slot] = sealed_at

    def remove(self, slot: int, key: bytes) -> None:
        """The slot no longer holds the key."""
        if slot < len(self.tags) and self.holds(slot, key):
            self.tags[slot] = 0
        with self._lock:
            last = self._pending.get(slot)
            if isinstance(last, _Put):
                if last.key == key:  # else the slot holds another key by now
                    self._change(slot, _Put(_NO_KEY, 0, last.sealed_at))
            elif not isinstance(last, _Remove | _Overwrite):  # else what the file says is older than `last`
                self._change(slot, _Remove(key))

    def start_overwrite(self, slot: int) -> None:
        """The slot is about to be overwritten, whatever it holds."""
        if slot < len(self.tags):
            self.tags[slot] = 0
        with self._lock:
            if self._stored is not None:
                self._stored.add(slot)
            self._urgent = True
            self._change(slot, _Overwrite())
            self._lock.notify()

    def may_overwrite(self, slots: Iterable[int]) -> bool:
        """Whether the file no longer says what these slots held before `start_overwrite`. That takes a commit; if the
        file cannot be written, it is not waited for.

        A row that is written earlier would be lost to a crash: the file would have another key for its slot.
        """
        return self._failing or not any(isinstance(self._pending.get(slot), _Remove | _Overwrite) for slot in slots)

    def touch(self, slot: int, key: bytes, tick: int) -> None:
        """The key in the slot was used at `tick`."""
        with self._lock:
            last = self._pending.get(slot)
            if isinstance(last, _Put):
                if last.key == key:
                    self._change(slot, _Put(key, max(tick, last.tick), last.sealed_at))
            elif not isinstance(last, _Remove | _Overwrite):
                self._change(slot, _Touch(key, tick))

    # --- rows at open -----------------------------------------------------------------------------------------------

    def list_rows(self) -> Iterator[list[Entry]]:
        """Once: the rows that were there at open, least recently used first, without slots stored into since.

        Batches of up to MAX_ENTRIES; an empty one means that the next is still being read.
        """
        while True:
            try:
                read = self._rows_read.get_nowait()
            except queue.Empty:
                yield []
                continue
            if read is None:
                for slot, sealed_at in self._empty.tolist():
                    if sealed_at and not self.was_stored(slot):
                        self._set(slot, _NO_KEY, sealed_at)
                return
            batch, times = read
            for entry, sealed_at in zip(batch, times, strict=True):
                if not self.was_stored(entry.slot):
                    self._set(entry.slot, entry.key, sealed_at)
            with self._lock:
                self._lock.notify()
            self._listed[[entry.slot for entry in batch]] = True
            yield [entry for entry in batch if not self.was_stored(entry.slot)]

    def unknown_slots(self) -> NDArray[np.bool_]:
        """After `list_rows`: by slot, whether there is no record of it."""
        unknown = ~self._listed
        unknown[self._empty["slot"]] = False
        unknown[list(self._stored or ())] = False
        return unknown

    def was_stored(self, slot: int) -> bool:
        """Whether the slot was stored into since open. Not for use after `mark_complete`."""
        return self._stored is not None and slot in self._stored

    def mark_complete(self) -> None:
        """Every row that was there at open is known, by `list_rows` or `put`."""
        self._stored = None
        self.complete = True

    def problem(self) -> str:
        """Whether the file was deleted or replaced, as a sentence, or "". On any thread. Raises OSError."""
        identity = self._identity
        return identity.problem() if identity is not None else ""

    def close(self) -> None:
        """Write what is pending, as far as the medium allows, and close the file."""
        with self._lock:
            self._closing = True
            self._lock.notify()
        self._thread.join()

    def _set(self, slot: int, key: bytes, sealed_at: int) -> None:
        self.tags[slot] = _tag(key)
        self.sealed_at[slot] = min(max(1, sealed_at), 0xFFFFFFFF)  # 0 would say that the slot was erased

    def _change(self, slot: int, change: _Change) -> None:
        self._pending[slot] = change
        if len(self._pending) == 1 or len(self._pending) >= _COMMIT_ROWS:
            self._lock.notify()

    # --- the file, on the journal's thread --------------------------------------------------------------------------

    def _connect(self, slots: int) -> sqlite3.Connection:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._path, flags, 0o600)  # SQLite would create it with mode 0644, and follow a link
        os.close(descriptor)
        db = sqlite3.connect(self._path, timeout=5.0, isolation_level=None, check_same_thread=False)
        try:
            db.executescript(_SCHEMA)
            db.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
            db.execute("DELETE FROM rows WHERE slot >= ? OR slot < 0", (slots,))
            db.execute(
                "SELECT key, tick, sealed_at FROM rows LIMIT 0"
            )  # raises if the columns are others: as bad as damaged
        except sqlite3.Error:
            db.close()
            raise
        self._identity = FileIdentity(self._path)
        return db

    def _write_complete(self) -> None:
        """The next open need not read the seals."""
        if self.complete and not self._lost and not self._pending and not self._marked_complete:
            self._db.execute(f"PRAGMA user_version = {_COMPLETE}")

    def _replace(self, damage: sqlite3.Error) -> sqlite3.Connection:
        self._log_once.report("damage", f"{self._path} is damaged ({damage}): starting with an empty one")
        self._identity = None
        for suffix in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                self._path.with_name(NAME + suffix).unlink()
        return self._connect(0)

    @property
    def _read_ahead(self) -> bool:
        """Whether to read on: not too many batches wait to be listed."""
        return self._rows_read.qsize() < _BATCHES_AHEAD

    def _run(self) -> None:
        batches: Iterator[tuple[list[Entry], list[int]]] | None = self._read()
        failing = False
        while True:
            closing = self._wait(batches is not None, failing)
            try:
                if batches is not None and not closing and self._read_ahead:
                    batch = next(batches, None)
                    self._rows_read.put(batch)
                    if batch is None:
                        batches = None
                self._commit()
                self._clamp_some()
                self._failing = failing = False
            except sqlite3.Error as error:
                if batches is not None:  # the listing ends at the error
                    batches = None
                    self._rows_read.put(None)
                self._failing = True
                failing = self._recover(error, failing)
            if closing:
                break
        with suppress(sqlite3.Error):
            self._write_complete()
        with suppress(sqlite3.Error):
            self._db.close()

    def _wait(self, listing: bool, failing: bool) -> bool:
        """Wait for work, and then up to _COMMIT_S for more of it, to commit together; whether to close."""
        with self._lock:
            if failing:
                self._lock.wait_for(lambda: self._closing, _RETRY_S)
            elif not (listing and self._read_ahead):
                self._lock.wait_for(
                    lambda: self._closing or self._pending or self._clamping or (listing and self._read_ahead)
                )
                self._lock.wait_for(
                    lambda: self._closing or self._urgent or len(self._pending) >= _COMMIT_ROWS, _COMMIT_S
                )
            return self._closing

    def _recover(self, error: sqlite3.Error, failing: bool) -> bool:
        """After a failed read or write: replace a damaged file, warn of another error. True: the file is failing."""
        if _is_damage(error):
            with suppress(sqlite3.Error, OSError):
                self._db.close()
                self._lost = True
                self.complete = self._marked_complete = False
                self._db = self._replace(error)
        elif not failing:
            self._log_once.report(
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
                if self._marked_complete:
                    self._db.execute("PRAGMA user_version = 0")
                self._db.execute("COMMIT")
                self._marked_complete = False
            except sqlite3.Error:
                with suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                raise
            with self._lock:
                for slot, change in changes.items():
                    if self._pending.get(slot) is change:
                        del self._pending[slot]

    def _clamp_some(self) -> None:
        """Go on with `clamp_times` in the file, _COMMIT_ROWS at a time."""
        with self._lock:
            clamping = self._clamping
        if clamping is None:
            return
        now, last = clamping
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
            if self._clamping is clamping:
                self._clamping = (now, slots[-1]) if len(slots) == _COMMIT_ROWS else None

    def _apply(self, slot: int, change: _Change) -> None:
        if isinstance(change, _Put):
            self._db.execute("INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?)", (slot, *change))
        elif isinstance(change, _Touch):
            self._db.execute("UPDATE rows SET tick = ? WHERE slot = ? AND key = ?", (change.tick, slot, change.key))
        elif isinstance(change, _Overwrite):
            self._db.execute("DELETE FROM rows WHERE slot = ?", (slot,))
        else:
            self._db.execute(
                "UPDATE rows SET key = ?, tick = 0 WHERE slot = ? AND key = ?", (_NO_KEY, slot, change.key)
            )

    def _read(self) -> Iterator[tuple[list[Entry], list[int]]]:
        """Sort slots by tick first (16 bytes each), then read keys batch by batch: a long read transaction would keep
        the write-ahead log from being checkpointed."""
        empty = self._db.execute("SELECT slot, sealed_at FROM rows WHERE key = ?", (_NO_KEY,))
        self._empty = np.fromiter(empty, dtype=_EMPTY_SLOT)
        order = np.fromiter(
            self._db.execute("SELECT tick, slot FROM rows WHERE key <> ?", (_NO_KEY,)),
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
            rows = [row for row in found if row[1] != _NO_KEY]
            yield [Entry(slot, bytes(key), tick) for slot, key, tick, _ in rows], [row[3] for row in rows]


def _tag(key: bytes) -> int:
    """A hash of the key; 0 only for no key."""
    return xxh32_intdigest(key) | 1 if key else 0


def _is_damage(error: sqlite3.Error) -> bool:
    """Whether the file itself is damaged, rather than the medium full, read-only or failing."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT, sqlite3.SQLITE_ERROR)
