"""The journal of a shard: which key is in which slot, in columns here and in a file of records on the disk.

It is not trusted when a row is loaded: the seal decides. The journal only saves reading every seal at open. Who moves a
row writes its record, before and after (csrc/records.h), so a kill loses none of a row that was reported. What else
changes is written by a thread of its own about once a second (`step`): deletes, ticks, times. A slot whose record is
missing or damaged is unknown, and recovered from its seal.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.base.chunk import MAX_KEY_BYTES
from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.tiers.base import MAX_ENTRIES, PackedEntries
from nixl_tiers.tiers.disk import describe
from nixl_tiers.tiers.folder import Folder
from nixl_tiers.tiers.slab.journal_file import (
    CHUNK_RECORDS,
    EMPTY,
    NOTHING,
    ROW,
    SLOT,
    UNKNOWN,
    JournalFile,
    tag_of,
    tags_of,
)

logger = logging.getLogger(__name__)

WRITE_S: Final = 1.0  # between two writes of what has changed
_THREADS: Final = 2  # that may wait for the file
_NO_ROWS: Final = np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 1), np.uint8)
_KNOWN, _CHANGED = np.uint8(1), np.uint8(2)  # of `_flags`


class Journal:
    """The journal of one shard. For the mover's loop, which nothing keeps waiting; what belongs on a thread that may
    wait for the medium says so."""

    def __init__(self, folder: Folder, slots: int, allocated: NDArray[np.bool_] | None = None) -> None:
        """`allocated`: by slot, whether it has room in a slab now, as it must to hold a row; None: all have. The folder
        stays the caller's. Raises OSError if the journal cannot be opened or made here."""
        self.file = file = JournalFile(folder, slots)
        """Whose `writer` is for the worker, which records the rows that it moves."""
        if file.defect:
            reason = file.unreadable.strerror if file.unreadable else file.defect
            logger.warning("%s is damaged (%s): starting with an empty one", file.path, reason)
        self.tags = np.zeros(slots, np.uint64)
        """By slot: a hash of the key that it holds; 0: none."""
        self.sealed_at = np.zeros(slots, np.uint32)
        """By slot: when the bytes in it were sealed, in Unix seconds; 0 if no row was written there since it
        was erased. Also of slots that hold no row any more."""
        self._flags = np.zeros(slots, np.uint8)
        """By slot. _KNOWN: it holds a key or none, which the record is to say, else that nothing is known. _CHANGED:
        the record may say something else."""
        self.complete = False
        """Whether every row that was there at open is known. Set by the caller, who reads seals."""
        self._allocated = np.ones(slots, np.bool_) if allocated is None else allocated
        self._rows = _NO_ROWS  # that were there at open: slots, least recently used first; by slot, ticks and keys
        self._used = np.zeros(slots, np.int64)  # by slot: the highest tick of `touch`
        self._lock = threading.Lock()  # of what `write` takes from the loop
        self._amending = np.zeros(0, SLOT)
        self._changed = False
        self._writing: Future[bool] | None = None
        self._write_at_s = 0.0
        self._log_once = LogOnce(logger)
        self.threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="records")
        """For what waits for the file."""

    # --- at open ----------------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Once, before all else: read the file. On a thread that may wait."""
        file = self.file
        file.start()
        ticks, keys = np.zeros(file.records, np.int64), np.zeros((file.records, 1), np.uint8)
        for first in range(0, len(ticks), CHUNK_RECORDS):
            slots = slice(first, min(first + CHUNK_RECORDS, len(ticks)))
            try:
                found = file.read(first, slots.stop - first)
            except OSError as error:
                self._log_once.report("read", f"{file.path} cannot be read ({describe(error)}): reading seals instead")
                continue
            valid = found["what"] != UNKNOWN
            outside = valid & ~self._allocated[slots]
            self._change(first + np.flatnonzero(outside))  # not to count for other bytes
            found[outside] = np.zeros((), SLOT)
            self.sealed_at[slots] = found["sealed_at"]
            # An empty slot may have got a row since.
            self._flags[slots][found["what"] >= (EMPTY if file.trusted else ROW)] = _KNOWN
            self.tags[slots], ticks[slots] = found["tag"], found["tick"]
            width = 1 + max(int(found["key_bytes"].max()), keys.shape[1] - 1)
            if width > keys.shape[1]:
                narrow, keys = keys, np.zeros((len(keys), width), np.uint8)
                keys[:first, : narrow.shape[1]] = narrow[:first]
            keys[slots, 0] = found["key_bytes"]
            keys[slots, 1:] = found["key"].copy().view(np.uint8).reshape(len(found), -1)[:, : width - 1]
        rows = np.flatnonzero(self.tags)
        double = rows[older_duplicates(self.tags[rows], ticks[rows], self.sealed_at[rows])]
        self.tags[double] = 0
        self._change(double)
        rows = rows[self.tags[rows] != 0]
        self._rows = rows[np.argsort(ticks[rows], kind="stable")], ticks, keys

    def list_rows(self) -> Iterator[PackedEntries]:
        """Once: the rows that were there at open, least recently used first, in batches of up to MAX_ENTRIES."""
        (order, ticks, keys), self._rows = self._rows, _NO_ROWS
        for start in range(0, len(order), MAX_ENTRIES):
            slots = order[start : start + MAX_ENTRIES]
            slots = slots[self.tags[slots] != 0]
            yield PackedEntries(slots, ticks[slots], keys[slots])

    def unknown_slots(self) -> NDArray[np.bool_]:
        """By slot, whether its record says nothing."""
        flags: NDArray[np.bool_] = self._flags & _KNOWN == 0
        return flags

    def duplicates(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        """By place: whether a slot holds the key already, or a later one of these is the same. On any thread."""
        tags = tags_of(keys)
        _, last = np.unique(tags[::-1], return_index=True)
        again = np.isin(np.arange(len(tags)), len(tags) - 1 - last, invert=True)
        return again | np.isin(tags, self.tags)

    def mark_empty(self, slots: NDArray[np.bool_], sealed_at: int = 0) -> None:
        """These unknown slots (a flag a slot) hold no row, but bytes sealed then, if nothing else is known."""
        with self._lock:
            empty = np.flatnonzero(slots & self.unknown_slots())
            self.sealed_at[empty] = np.where(self.sealed_at[empty], self.sealed_at[empty], sealed_at)
            self._change(empty, known=True)

    # --- rows -------------------------------------------------------------------------------------------------------

    def holds(self, slot: int, key: bytes) -> bool:
        """Whether the slot holds the key."""
        return bool(self.tags[slot] == tag_of(key))

    def remove(self, slot: int, key: bytes) -> None:
        """The slot no longer holds the key."""
        with self._lock:
            if 0 <= slot < len(self.tags) and self.holds(slot, key):
                self.tags[slot] = 0
                self._change(slot)

    def touch(self, slots: Sequence[int] | NDArray[np.int64], ticks: Sequence[int] | NDArray[np.int64]) -> None:
        """The rows in these slots were used at these ticks. Slots that hold no row are skipped."""
        places, used = np.asarray(slots, np.int64), np.asarray(ticks, np.int64)
        with self._lock:
            inside = (places >= 0) & (places < len(self.tags))
            held = inside & (self.tags[places * inside] != 0)
            np.maximum.at(self._used, places[held], used[held])
            self._change(places[held])

    def clamp_times(self, slots: NDArray[np.int64], now: int) -> None:
        """Times of these slots that are later than `now` (Unix seconds) become `now`. So the file keeps when a row with
        a seal ahead of the clock was first seen."""
        with self._lock:
            self.sealed_at[slots] = np.minimum(self.sealed_at[slots], now)
            self._change(slots[self._flags[slots] & _KNOWN != 0])

    # --- stores and erasing: whoever writes to the slots records it -------------------------------------------------

    def start_overwrite(self, *slots: int) -> None:
        """The slots are about to be overwritten, whatever they hold."""
        places = [slot for slot in slots if 0 <= slot < len(self.tags)]
        with self._lock:
            self.tags[places] = self._used[places] = 0
            self._flags[places] = 0
            if len(self._amending):  # what is being written is of before
                self._amending["what"][np.isin(self._amending["slot"], places)] = NOTHING

    def forget(self, slots: Sequence[int]) -> int:
        """Before all is written to these slots: their records become unknown. 0; an errno: not all have; negative: and
        nothing may be written there. On a thread that may wait, as the next two."""
        return self.file.amend(_changes(sorted(slots), UNKNOWN))

    def record(self, rows: Sequence[tuple[int, bytes, int, int, int]]) -> int:
        """After that: (slot, key, tag, tick, sealed at) of what is there."""
        slots, keys, tags, ticks, sealed_at = zip(*sorted(rows), strict=True)
        changes = _changes(slots, ROW)
        changes["tag"], changes["tick"], changes["sealed_at"] = tags, ticks, list(map(_in_seconds, sealed_at))
        changes["key_bytes"] = list(map(len, keys))
        changes["key"] = np.array(keys, f"S{MAX_KEY_BYTES}").view(f"V{MAX_KEY_BYTES}")
        return self.file.amend(changes)

    def record_erased(self, slots: Sequence[int]) -> int:
        """Or that nothing is there."""
        return self.file.amend(_changes(sorted(slots), EMPTY))

    def stored(self, rows: Sequence[tuple[int, int, int, int]]) -> None:
        """Slots hold rows now: (slot, tag, sealed at, error), the last if the row has no record."""
        with self._lock:
            for slot, tag, sealed_at, error in rows:
                self.tags[slot], self.sealed_at[slot] = tag, _in_seconds(sealed_at)
                self._flags[slot] |= _KNOWN
                if error:
                    self._cannot_write(error, slot)

    def mark_written(self, slot: int, sealed_at: int) -> None:
        """The slot may hold bytes of a row that was sealed then, and of what was there before."""
        with self._lock:
            self.sealed_at[slot] = min(int(self.sealed_at[slot]) or _in_seconds(sealed_at), _in_seconds(sealed_at))

    def mark_garbage(self, slot: int, sealed_at: int) -> None:
        """It may, but holds no row."""
        self.mark_written(slot, sealed_at)
        with self._lock:
            self.tags[slot] = 0
            self._change(slot, known=True)

    def mark_erased(self, slots: Sequence[int]) -> None:
        """The slots hold no row, nor bytes of one. Their records say so, unless `write` is amending them or that
        failed."""
        places = np.asarray(slots, np.int64)
        with self._lock:
            self.tags[places] = self.sealed_at[places] = 0
            self._change(places[self._flags[places] & _KNOWN != 0])

    # --- the second's writes ----------------------------------------------------------------------------------------

    def step(self) -> None:
        """Write what has changed, if a second has passed since the last time."""
        if self._writing is not None and self._writing.done():
            self._writing.result()
            self._writing = None
        if self._changed and self._writing is None and time.monotonic() >= self._write_at_s:
            self._changed, self._write_at_s = False, time.monotonic() + WRITE_S
            self._writing = self.threads.submit(self.write)

    def write(self) -> bool:
        """Bring the records in the file to what the columns say; whether all are. On a thread that may wait, one at a
        time."""
        with self._lock:
            slots = np.flatnonzero(self._flags & _CHANGED)
        for start in range(0, max(1, len(slots)), CHUNK_RECORDS):
            some = slots[start : start + CHUNK_RECORDS]
            with self._lock:
                some = some[self._flags[some] & _CHANGED != 0]
                self._flags[some] &= ~_CHANGED
                changes, tags = _changes(some, UNKNOWN), self.tags[some]
                changes["tag"], changes["sealed_at"] = tags, self.sealed_at[some]
                changes["what"][self._flags[some] & _KNOWN != 0] = EMPTY
                changes["what"][tags != 0] = ROW
                changes["tick"] = np.where(tags != 0, self._used[some], 0)
                self._amending = changes
            error = self.file.amend(changes, everything=start + CHUNK_RECORDS >= len(slots))
            with self._lock:
                self._amending = changes[:0]
                if error:
                    self._cannot_write(abs(error), changes["slot"][changes["what"] != NOTHING])
                    return False
        return True

    def close(self) -> None:
        """Write what has changed, as far as the medium allows, and close the file. No row is moved, nor will be."""
        self.threads.shutdown()
        right = False
        try:
            right = self.file.writer is not None and self.write() and (self.file.trusted or self.complete)
        finally:
            self.file.close(flush=right)

    # --- inside the lock --------------------------------------------------------------------------------------------

    def _change(self, slots: int | NDArray[np.int64], *, known: bool = False) -> None:
        """The records of these slots are to say something else."""
        self._flags[slots] |= _CHANGED | (_KNOWN if known else np.uint8(0))
        self._changed = self._changed or np.size(slots) > 0

    def _cannot_write(self, error: int, slots: int | NDArray[np.int64]) -> None:
        reason = f"{self.file.path} cannot be written ({os.strerror(error)})"
        self._log_once.report("write", f"{reason}: what is stored now may be lost at a restart")
        self._change(slots)


def _in_seconds(sealed_at: int) -> int:  # 0 would say that the slot was erased
    return min(max(1, sealed_at), 0xFFFFFFFF)


def _changes(slots: Sequence[int] | NDArray[np.int64], what: int) -> NDArray[np.void]:
    changes = np.zeros(len(slots), SLOT)
    changes["slot"], changes["what"] = slots, what
    return changes


def older_duplicates(
    tags: NDArray[np.uint64], ticks: NDArray[np.int64], sealed_at: NDArray[np.uint32]
) -> NDArray[np.int64]:
    """Places of rows whose key another row has that was used later, or sealed later."""
    in_order = np.sort(tags)
    twice = in_order[1:][in_order[1:] == in_order[:-1]]
    among = np.flatnonzero(np.isin(tags, twice)) if len(twice) else np.zeros(0, np.int64)
    among = among[np.lexsort((sealed_at[among], ticks[among], tags[among]))]
    older: NDArray[np.int64] = among[:-1][tags[among[1:]] == tags[among[:-1]]]
    return older
