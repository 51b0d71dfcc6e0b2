"""The file of a journal: an SQLite database with one record per slot.

Not thread-safe: it is for the journal's own thread, but for `problem`.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.tiers.base import MAX_ENTRIES, Entry
from nixl_tiers.tiers.disk import FileIdentity
from nixl_tiers.tiers.log_once import LogOnce

logger = logging.getLogger(__name__)

NAME: Final = "manifest.sqlite"  # part of the format on disk
NO_KEY: Final = b""  # in place of a key: the slot holds no row, whatever its bytes look like
EMPTY_SLOT: Final = np.dtype([("slot", "<i8"), ("sealed_at", "<i8")])
_CHECKPOINT_PAGES: Final = 64
_COMPLETE: Final = 1  # PRAGMA user_version of a file that was closed with a record of every row

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


class Put(NamedTuple):
    """The slot holds the key now, or no row, and bytes sealed then (Unix seconds; 0: none)."""

    key: bytes
    tick: int
    sealed_at: int


class Remove(NamedTuple):
    """The slot no longer holds the key, and is empty."""

    key: bytes


class Overwrite(NamedTuple):
    """The slot is about to be overwritten: what it holds is unknown until a Put."""


class Touch(NamedTuple):
    """The row, if the slot holds one, was used at `tick`."""

    tick: int


Change = Put | Remove | Overwrite | Touch


class JournalFile:
    """Calls raise sqlite3.Error unless they say otherwise; after one that `is_damage`, `replace` the file."""

    def __init__(self, directory: Path, slots: int) -> None:
        """Opens or makes it; a damaged one is replaced by an empty one. Raises OSError."""
        self.path = directory / NAME
        self._log_once = LogOnce(logger)
        self._identity: FileIdentity | None = None  # of the open file; None while it is being replaced
        self._replaced = False  # while it was in use: records may be missing
        try:
            try:
                self._db = self._connect(slots)
            except sqlite3.Error as error:
                if not is_damage(error):
                    raise
                self._db = self._make_empty(error)
        except sqlite3.Error as error:
            raise OSError(f"{self.path} cannot be opened: {error}") from error
        self.complete = self._db.execute("PRAGMA user_version").fetchone() == (_COMPLETE,)
        """Whether it was closed with a record of every row, and nothing was committed since."""

    def problem(self) -> str:
        """Whether the file was deleted or replaced, as a sentence, or "". On any thread. Raises OSError."""
        identity = self._identity
        return identity.problem() if identity is not None else ""

    def empty_slots(self) -> NDArray[np.void]:
        """The slots that are known to hold no row, as EMPTY_SLOT."""
        return np.fromiter(
            self._db.execute("SELECT slot, sealed_at FROM rows WHERE key = ?", (NO_KEY,)), dtype=EMPTY_SLOT
        )

    def rows(self) -> Iterator[tuple[list[Entry], list[int]]]:
        """Rows and their sealing times, least recently used first, in batches of up to MAX_ENTRIES.

        Slots are sorted by tick first (16 bytes each) and keys read batch by batch: a long read transaction would keep
        the write-ahead log from being checkpointed.
        """
        order = np.fromiter(
            self._db.execute("SELECT tick, slot FROM rows WHERE key <> ?", (NO_KEY,)),
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
            rows = [row for row in found if row[1] != NO_KEY]
            yield [Entry(slot, bytes(key), tick) for slot, key, tick, _ in rows], [row[3] for row in rows]

    def commit(self, changes: Mapping[int, Change]) -> None:
        """Write changes, by slot, in one transaction."""
        with self._transaction():
            for slot, change in changes.items():
                self._apply(slot, change)
            if self.complete:
                self._db.execute("PRAGMA user_version = 0")
        self.complete = False

    def clamp_times(self, latest: int, after: int, limit: int) -> int | None:
        """Set times later than `latest` (Unix seconds) to it, in up to `limit` slots after the slot `after`. Returns
        the last of them, if there may be more."""
        wanted = "SELECT slot FROM rows WHERE slot > ? AND sealed_at > ? ORDER BY slot LIMIT ?"
        slots = [slot for (slot,) in self._db.execute(wanted, (after, latest, limit))]
        with self._transaction():
            self._db.executemany("UPDATE rows SET sealed_at = ? WHERE slot = ?", [(latest, slot) for slot in slots])
        return slots[-1] if len(slots) == limit else None

    def replace(self, damage: sqlite3.Error) -> None:
        """Go on with an empty file. Raises OSError too."""
        self._db.close()
        self._replaced = True
        self.complete = False
        self._db = self._make_empty(damage)

    def close(self, *, complete: bool) -> None:
        """`complete`: it has a record of every row, so that the next open need not read the seals. Does not raise."""
        with suppress(sqlite3.Error):
            if complete and not self._replaced and not self.complete:
                self._db.execute(f"PRAGMA user_version = {_COMPLETE}")
        with suppress(sqlite3.Error):
            self._db.close()

    def _connect(self, slots: int) -> sqlite3.Connection:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.path, flags, 0o600)  # SQLite would create it with mode 0644, and follow a link
        os.close(descriptor)
        db = sqlite3.connect(self.path, timeout=5.0, isolation_level=None, check_same_thread=False)
        try:
            db.executescript(_SCHEMA)
            db.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
            db.execute("DELETE FROM rows WHERE slot >= ? OR slot < 0", (slots,))
            db.execute("SELECT key, tick, sealed_at FROM rows LIMIT 0")  # raises if the columns are others
        except sqlite3.Error:
            db.close()
            raise
        self._identity = FileIdentity(self.path)
        return db

    def _make_empty(self, damage: sqlite3.Error) -> sqlite3.Connection:
        self._log_once.report("damage", f"{self.path} is damaged ({damage}): starting with an empty one")
        self._identity = None
        for suffix in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                self.path.with_name(NAME + suffix).unlink()
        return self._connect(0)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        except sqlite3.Error:
            with suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise

    def _apply(self, slot: int, change: Change) -> None:
        if isinstance(change, Put):
            self._db.execute("INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?)", (slot, *change))
        elif isinstance(change, Touch):
            self._db.execute(
                "UPDATE rows SET tick = max(tick, ?) WHERE slot = ? AND key <> ?", (change.tick, slot, NO_KEY)
            )
        elif isinstance(change, Overwrite):
            self._db.execute("DELETE FROM rows WHERE slot = ?", (slot,))
        else:
            self._db.execute("UPDATE rows SET key = ?, tick = 0 WHERE slot = ? AND key = ?", (NO_KEY, slot, change.key))


def is_damage(error: sqlite3.Error) -> bool:
    """Whether the file itself is damaged, rather than the medium full, read-only or failing."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT, sqlite3.SQLITE_ERROR)
