"""The journal of a shard: which key is in which slot, written behind by a thread.

It is not trusted when a row is loaded: the seal decides. The journal only saves reading every seal at open. So it may
lag by a tenth of a second, which a crash loses, and a damaged one is replaced by an empty one. It knows whether that
can have happened: then it is not `complete`, and the slots that it has no record of are recovered from their seals.
"""

from __future__ import annotations

import logging
import queue
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh32_intdigest

from nixl_tiers.tiers.base import Entry
from nixl_tiers.tiers.log_once import LogOnce
from nixl_tiers.tiers.slab.journal_file import (
    EMPTY_SLOT,
    NO_KEY,
    Change,
    JournalFile,
    Overwrite,
    Put,
    Remove,
    Touch,
    is_damage,
)

logger = logging.getLogger(__name__)

_COMMIT_S: Final = 0.1
_COMMIT_ROWS: Final = 256
_RETRY_S: Final = 1.0
_BATCHES_AHEAD: Final = 16


class Journal:
    """The journal of one shard. No call waits for the medium, but for `close`, which writes what is pending."""

    def __init__(self, directory: Path, slots: int) -> None:
        """Raises OSError if the journal cannot be opened or made here."""
        self._lock = threading.Condition()
        self._pending: dict[int, Change] = {}  # one per slot: the newest counts
        self._log_once = LogOnce(logger)
        self._closing = False
        self._urgent = False  # a store waits for what is pending
        self._failing = False
        self._rows_read: queue.Queue[tuple[list[Entry], list[int]] | None] = queue.Queue()
        self._stored: set[int] | None = set()  # slots that got new rows while the old ones are still being listed
        self._listed = np.zeros(slots, dtype=np.bool_)
        self._empty = np.zeros(0, dtype=EMPTY_SLOT)
        self.tags = np.zeros(slots, dtype=np.uint32)
        """By slot: a hash of the key that it holds; 0: none. For the caller's thread, complete after `list_rows`."""
        self.sealed_at = np.zeros(slots, dtype=np.uint32)
        """By slot: when the bytes in it were sealed, in Unix seconds; 0 if no row was written there since it
        was erased. Also of slots that hold no row any more. For the caller's thread, complete after `list_rows`."""
        self._clamping: tuple[int, int] | None = None  # (latest time allowed in the file, last slot that was clamped)
        self._file = JournalFile(directory, slots)
        self.complete = self._file.complete
        """Whether it has a record of every row. `mark_complete` makes it true."""
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    # --- changes ----------------------------------------------------------------------------------------------------

    def put(self, slot: int, key: bytes, tick: int, sealed_at: int) -> None:
        """The slot holds the key, sealed then (Unix seconds)."""
        self._set(slot, key, sealed_at)
        with self._lock:
            self._change(slot, Put(key, tick, int(self.sealed_at[slot])))

    def holds(self, slot: int, key: bytes) -> bool:
        """Whether the slot holds the key according to changes and listed rows."""
        return bool(self.tags[slot] == _tag(key))

    def mark_garbage(self, slot: int, sealed_at: int) -> None:
        """The slot holds no row, but may hold bytes of one that was sealed then."""
        self.put(slot, NO_KEY, 0, sealed_at)

    def mark_erased(self, slot: int) -> None:
        """The slot holds no row, and its bytes have been erased."""
        self.sealed_at[slot] = self.tags[slot] = 0
        with self._lock:
            self._change(slot, Put(NO_KEY, 0, 0))

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
            if isinstance(last, Put):
                if last.key == key:  # else the slot holds another key by now
                    self._change(slot, Put(NO_KEY, 0, last.sealed_at))
            elif not isinstance(last, Remove | Overwrite):  # else the file's record is older than `last`
                self._change(slot, Remove(key))

    def start_overwrite(self, slot: int) -> None:
        """The slot is about to be overwritten, whatever it holds."""
        if slot < len(self.tags):
            self.tags[slot] = 0
        with self._lock:
            if self._stored is not None:
                self._stored.add(slot)
            self._urgent = True
            self._change(slot, Overwrite())
            self._lock.notify()

    def may_overwrite(self, slots: Iterable[int]) -> bool:
        """Whether the file no longer records the content of these slots before `start_overwrite`. That takes a commit;
        if the file cannot be written, it is not waited for.

        A row that is written earlier would be lost to a crash: the file would have another key for its slot.
        """
        return self._failing or not any(isinstance(self._pending.get(slot), Remove | Overwrite) for slot in slots)

    def touch(self, slots: Sequence[int], ticks: Sequence[int]) -> None:
        """The rows in these slots were used at these ticks. Slots that hold no row are left out."""
        with self._lock:
            for slot, tick in zip(slots, ticks, strict=True):
                last = self._pending.get(slot)
                if isinstance(last, Put):
                    if last.key:
                        self._change(slot, last._replace(tick=max(tick, last.tick)))
                elif not isinstance(last, Remove | Overwrite):
                    self._change(slot, Touch(tick))

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
                        self._set(slot, NO_KEY, sealed_at)
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
        """Whether its file was deleted or replaced, as a sentence, or "". On any thread. Raises OSError."""
        return self._file.problem()

    def close(self) -> None:
        """Write what is pending, as far as the medium allows, and close the file."""
        with self._lock:
            self._closing = True
            self._lock.notify()
        self._thread.join()

    def _set(self, slot: int, key: bytes, sealed_at: int) -> None:
        self.tags[slot] = _tag(key)
        self.sealed_at[slot] = min(max(1, sealed_at), 0xFFFFFFFF)  # 0 would say that the slot was erased

    def _change(self, slot: int, change: Change) -> None:
        self._pending[slot] = change
        if len(self._pending) == 1 or len(self._pending) >= _COMMIT_ROWS:
            self._lock.notify()

    # --- the journal's thread ---------------------------------------------------------------------------------------

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
        self._file.close(complete=self.complete and not self._pending)

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
        if is_damage(error):
            self.complete = False
            with suppress(sqlite3.Error, OSError):
                self._file.replace(error)
        elif not failing:
            self._log_once.report(
                "write", f"{self._file.path} cannot be written ({error}): what is stored now may be lost at a restart"
            )
        return True

    def _read(self) -> Iterator[tuple[list[Entry], list[int]]]:
        self._empty = self._file.empty_slots()
        yield from self._file.rows()

    def _commit(self) -> None:
        """Write everything pending, _COMMIT_ROWS per transaction so that the write-ahead log stays small."""
        while True:
            with self._lock:
                changes = dict(islice(self._pending.items(), _COMMIT_ROWS))
                self._urgent = False
            if not changes:
                return
            self._file.commit(changes)
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
        latest, after = clamping
        last = self._file.clamp_times(latest, after, _COMMIT_ROWS)
        with self._lock:
            if self._clamping is clamping:
                self._clamping = None if last is None else (latest, last)


def _tag(key: bytes) -> int:
    """A hash of the key; 0 only for no key."""
    return xxh32_intdigest(key) | 1 if key else 0
