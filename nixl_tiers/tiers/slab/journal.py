"""The journal of a shard: which key is in which slot, in columns here and in a file of records on the disk.

It is not trusted when a row is loaded: the seal decides. The journal only saves reading every seal at open. Changes are
made in the columns at once, and written by a thread of its own; only that a slot is unknown, because it is about to be
overwritten, is waited for (`may_overwrite`). So a kill loses at most the records of the last tenth of a second, and
their slots are unknown: they are recovered from their seals, as are slots whose record is damaged.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.tiers.base import MAX_ENTRIES, Entry, PackedEntries
from nixl_tiers.tiers.disk import describe
from nixl_tiers.tiers.folder import Folder
from nixl_tiers.tiers.slab.journal_file import (
    CHUNK_RECORDS,
    MAX_TICK,
    RECORD,
    JournalFile,
    decode,
    encode,
    tag_of,
    tags_of,
)
from nixl_tiers.tiers.slab.journal_listing import Listing, by_tick, older_duplicates, repeated

logger = logging.getLogger(__name__)

_COMMIT_S: Final = 0.1
_COMMIT_ROWS: Final = 256  # that are not waited for any longer
_REWRITE_S: Final = 1.0  # between two writes of what may wait: ticks of rows that were loaded, times
_RETRY_S: Final = 1.0


class Journal:
    """The journal of one shard. No call waits for the medium, but for `close`, which writes what is pending."""

    def __init__(self, folder: Folder, slots: int, allocated: NDArray[np.bool_] | None = None) -> None:
        """`allocated`: by slot, whether it has room in a slab now, as it must to hold a row; None: all have. The folder
        stays the caller's. Raises OSError if the journal cannot be opened or made here."""
        self._file = file = JournalFile(folder, slots)
        if isinstance(file.defect, OSError):
            logger.warning("%s cannot be read (%s): starting with an empty one", file.path, file.defect.strerror)
        elif file.defect:
            logger.warning("%s is damaged (%s): starting with an empty one", file.path, file.defect)
        self._lock = threading.Condition()
        self._log_once = LogOnce(logger)
        self._pending: dict[int, bytes | None] = {}  # slots to write -> the new key; None: as in the file, or none
        self._rewrites: list[NDArray[np.int64]] = []  # slots to write with the key that the file has
        self._rewrite_at_s = 0.0
        self._rewriting = np.zeros(0, np.int64)  # those of them whose turn it is; for the journal's thread
        self._overwriting: set[int] = set()  # slots that the file does not show as unknown yet
        self._without_room: dict[int, bytes | None] = {}  # as `_pending`, beyond the end of a file that cannot grow
        self._grow_at_s = 0.0
        self._closing = False
        self._failing = False
        self._distrusted = False  # the header says that records are missing
        self._defect = ""  # which has ended the thread
        self.tags = np.zeros(slots, np.uint64)
        """By slot: a hash of the key that it holds; 0: none. For the caller's thread, complete after `list_rows`."""
        self.sealed_at = np.zeros(slots, np.uint32)
        """By slot: when the bytes in it were sealed, in Unix seconds; 0 if no row was written there since it
        was erased. Also of slots that hold no row any more. For the caller's thread, complete after `list_rows`."""
        self._ticks = np.zeros(slots, np.int64)
        self._known = np.zeros(slots, np.bool_)  # it holds a key or none, which the record is to say
        self._recorded = np.zeros(slots, np.bool_)  # the file may have a valid record
        self._stored: NDArray[np.bool_] | None = np.zeros(slots, np.bool_)  # changed while old rows are being listed
        self._reading = True
        self._listing = Listing(np.ones(slots, np.bool_) if allocated is None else allocated)
        self.complete = False  # whether it knows every row
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    # --- changes ----------------------------------------------------------------------------------------------------

    def put(self, slot: int, key: bytes, tick: int, sealed_at: int) -> None:
        """The slot holds the key, sealed then (Unix seconds)."""
        self.put_all([(slot, key, tick, sealed_at)])

    def put_all(self, rows: Sequence[tuple[int, bytes, int, int]]) -> None:
        """`put` for each of these, whose slots differ."""
        # 0 would say that the slot was erased.
        self._put([(slot, key, tick, min(max(1, sealed_at), 0xFFFFFFFF)) for slot, key, tick, sealed_at in rows])

    def holds(self, slot: int, key: bytes) -> bool:
        """Whether the slot holds the key according to changes and listed rows."""
        return bool(self.tags[slot] == tag_of(key))

    def mark_garbage(self, slot: int, sealed_at: int) -> None:
        """The slot holds no row, but may hold bytes of one that was sealed then."""
        self.put(slot, b"", 0, sealed_at)

    def mark_erased(self, slot: int) -> None:
        """The slot holds no row, and its bytes have been erased."""
        self._put([(slot, b"", 0, 0)])

    def mark_empty(self, slots: NDArray[np.bool_], sealed_at: int = 0) -> None:
        """These unknown slots (a flag a slot) hold no row, but bytes sealed then, if nothing else is known."""
        with self._lock:
            empty = np.flatnonzero(slots & self.unknown_slots())
            self._known[empty] = True
            self.sealed_at[empty] = np.where(self.sealed_at[empty], self.sealed_at[empty], sealed_at)
            self._rewrite(empty)

    def clamp_times(self, slots: NDArray[np.int64], now: int) -> None:
        """Times of these slots that are later than `now` (Unix seconds) become `now`. After `list_rows`. So the file
        keeps when a row with a seal ahead of the clock was first seen."""
        with self._lock:
            self.sealed_at[slots] = np.minimum(self.sealed_at[slots], now)
            self._rewrite(slots[self._known[slots]])

    def restore_time(self, slot: int, sealed_at: int) -> None:
        """The clock has caught up with the seal in this slot: the seal's time counts again."""
        self.sealed_at[slot] = sealed_at

    def remove(self, slot: int, key: bytes) -> None:
        """The slot no longer holds the key."""
        with self._lock:
            if not 0 <= slot < len(self.tags):
                return
            if self._reading and not self.was_stored(slot):
                self._listing.removed.append((slot, tag_of(key)))
            elif self.holds(slot, key):
                self._drop(slot)

    def start_overwrite(self, *slots: int) -> None:
        """The slots are about to be overwritten, whatever they hold."""
        places = [slot for slot in slots if 0 <= slot < len(self.tags)]
        with self._lock:
            self.tags[places] = self._ticks[places] = 0
            self._known[places] = False
            for slot, recorded in zip(places, self._recorded[places].tolist(), strict=True):
                if recorded or slot in self._pending or self._reading:
                    self._overwriting.add(slot)
                    self._change(slot, None)
                    self._lock.notify()
            if self._stored is not None:
                self._stored[places] = True

    def may_overwrite(self, slots: Iterable[int]) -> bool:
        """Whether the file no longer records the content of these slots before `start_overwrite`. That takes a write,
        which is not waited for while writes fail and the header says so.

        A row that is written earlier would be lost to a crash, as the file has another key for its slot; or, if the
        file says that the slot is empty, be there without ever being erased.
        """
        return self._overwriting.isdisjoint(slots) or (self._failing and self._distrusted)

    def denies(self, slot: int) -> bool:
        """Whether `may_overwrite` cannot hold for this slot, as not even the header can be written."""
        return self._failing and not self._distrusted and slot in self._overwriting

    def touch(self, slots: Sequence[int] | NDArray[np.int64], ticks: Sequence[int] | NDArray[np.int64]) -> None:
        """The rows in these slots, each named once, were used at these ticks. Slots that hold no row are skipped. It is
        written within a second or so."""
        places, used = np.asarray(slots, np.int64), np.asarray(ticks, np.int64)
        inside = (places >= 0) & (places < len(self.tags))
        places, used = places[inside], used[inside]
        with self._lock:
            newer = (self.tags[places] != 0) & (used > self._ticks[places])
            self._ticks[places[newer]] = np.minimum(used[newer], MAX_TICK)
            self._rewrite(places[newer])

    # --- rows at open -----------------------------------------------------------------------------------------------

    def list_rows(self) -> Iterator[Sequence[Entry]]:
        """Once: the rows that were there at open, least recently used first, without slots stored into since.

        Batches of up to MAX_ENTRIES; an empty one means that the next is still being read.
        """
        while (order := self._listing.order) is None:
            yield []
        for start in range(0, len(order), MAX_ENTRIES):
            slots = order[start : start + MAX_ENTRIES]
            slots = slots[self.tags[slots] != 0]
            if self._stored is not None:
                slots = slots[~self._stored[slots]]
            yield PackedEntries(slots, self._ticks[slots], self._listing.keys[slots])
        self._listing.clear()

    def unknown_slots(self) -> NDArray[np.bool_]:
        """After `list_rows`: by slot, whether there is no record of it, and nothing was stored into it since open."""
        return ~self._known if self._stored is None else ~(self._known | self._stored)

    def is_unknown(self, slot: int) -> bool:
        """Whether the slot's record says nothing, as since `start_overwrite`."""
        return 0 <= slot < len(self.tags) and not self._known[slot]

    def was_stored(self, slot: int) -> bool:
        """Whether the slot was stored into since open. Not for use after `mark_complete`."""
        return self._stored is not None and bool(self._stored[slot])

    def duplicates(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        """By place: whether a slot holds the key already, or a later one of these is the same. On any thread."""
        return repeated(tags_of(keys), self.tags)

    def mark_complete(self) -> None:
        """Every row that was there at open is known, by `list_rows` or `put`."""
        self._stored = None
        self.complete = True

    def problem(self) -> str:
        """Why it cannot go on (its file has gone, its thread has failed), or "". On any thread. Raises OSError."""
        return self._defect or self._file.problem()

    def close(self) -> None:
        """Write what is pending, as far as the medium allows, and close the file."""
        with self._lock:
            self._closing = True
            self._lock.notify()
        self._thread.join()

    # --- inside the lock --------------------------------------------------------------------------------------------

    def _put(self, rows: Sequence[tuple[int, bytes, int, int]]) -> None:
        slots = [slot for slot, *_ in rows]
        with self._lock:
            self.tags[slots] = np.array([tag_of(key) for _, key, *_ in rows], np.uint64)
            self._ticks[slots] = [min(tick, MAX_TICK) for _, _, tick, _ in rows]
            self.sealed_at[slots] = [sealed_at for *_, sealed_at in rows]
            self._known[slots] = True
            if self._stored is not None:
                self._stored[slots] = True
            for slot, key, *_ in rows:
                self._change(slot, key or None)

    def _drop(self, slot: int) -> None:
        self.tags[slot] = self._ticks[slot] = 0
        self._change(slot, None)

    def _change(self, slot: int, key: bytes | None) -> None:
        self._pending[slot] = key
        if len(self._pending) == 1 or len(self._pending) >= _COMMIT_ROWS:
            self._lock.notify()

    def _rewrite(self, slots: NDArray[np.int64]) -> None:
        if len(slots):
            self._rewrites.append(slots)
            self._lock.notify()

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            closing = False
            while not closing:
                closing = self._wait()
                self._turn(closing=closing)
        except Exception as error:  # in a mover, which ends; elsewhere the tier is down
            self._defect = f"the thread of {self._file.path} has failed ({type(error).__name__}: {error})"
            raise
        finally:
            right = not self._failing and not self._defect and (self._file.trusted or self.complete)
            self._file.close(flush=right)

    def _turn(self, *, closing: bool) -> None:
        try:
            self._step(closing=closing)
            self._failing = False
        except OSError as error:
            if not self._failing:
                reason = f"{self._file.path} cannot be written ({describe(error)})"
                self._log_once.report("write", f"{reason}: what is stored now may be lost at a restart")
            with suppress(OSError):
                self._file.distrust()
                self._distrusted = True
            self._failing = True

    def _wait(self) -> bool:
        """Wait for work, and then up to _COMMIT_S for more of it, to write together; whether to close."""
        wait = self._lock.wait_for
        with self._lock:
            if self._failing and not self._reading:
                wait(lambda: self._closing, _RETRY_S)
            elif not self._reading and not len(self._rewriting):
                growing_s = max(0.0, self._grow_at_s - time.monotonic()) if self._without_room else None
                wait(lambda: self._closing or self._pending or self._rewrites, growing_s)
                if self._pending:
                    wait(lambda: self._closing or self._overwriting or len(self._pending) >= _COMMIT_ROWS, _COMMIT_S)
                else:
                    wait(lambda: self._closing or self._pending, max(0.0, self._rewrite_at_s - time.monotonic()))
            return self._closing

    def _step(self, *, closing: bool) -> None:
        """Read a part of the file, if it has not been read, and write what is pending. When closing, all that is to be
        written. Raises OSError."""
        while self._reading and (self._listing.removed or not closing):
            self._read_some()
            if not (closing or self._failing):  # else the next chunk would wait for the next attempt to write
                break
        if self._without_room and (closing or time.monotonic() >= self._grow_at_s):
            self._retry(self._without_room)
            self._without_room = {}
        while self._commit_pending():
            pass
        while self._commit_rewrites(now=closing) and closing:
            pass

    def _read_some(self) -> None:
        listing, file = self._listing, self._file
        first = listing.end
        file.check()
        if first >= file.records:
            self._end_reading()
            return
        try:
            slots, found = file.read(first)
        except OSError as error:
            self._log_once.report("read", f"{file.path} cannot be read ({describe(error)}): reading seals instead")
            slots = np.arange(first, min(first + CHUNK_RECORDS, file.records))
            found = decode(np.zeros(len(slots), RECORD), slots, file.salt)
            self._recorded[slots] = True
        listing.add(found)
        allocated = listing.allocated[slots]
        believed = found.valid & allocated
        with self._lock:
            self._recorded[slots] |= found.valid
            self._rewrite(slots[found.valid & ~allocated])  # their slabs have gone: not to count for other bytes
            if self._stored is not None:
                believed &= ~self._stored[slots]
            self.sealed_at[slots[believed]] = found.sealed_at[believed]
            if not file.trusted:
                believed &= found.tags != 0  # an empty slot may have got a row since
            places = slots[believed]
            self._known[places] = True
            self.tags[places] = found.tags[believed]
            self._ticks[places] = found.ticks[believed]

    def _end_reading(self) -> None:
        """Everything was read: no key is in two slots, and rows have an order."""
        with self._lock:
            self._reading = False
            for slot, tag in self._listing.removed:
                if self.tags[slot] == tag and not self.was_stored(slot):
                    self._drop(slot)
        rows = np.flatnonzero(self.tags != 0)  # not of the column itself: it changes meanwhile
        tags, ticks = self.tags[rows], self._ticks[rows]
        for slot in rows[older_duplicates(tags, ticks, self.sealed_at[rows])].tolist():
            with self._lock:
                if not self.was_stored(slot):
                    self._drop(slot)
        self._listing.order = rows[by_tick(ticks)]

    def _commit_pending(self) -> bool:
        """Write some of what is pending; False if there is nothing."""
        with self._lock:
            batch = dict(islice(self._pending.items(), CHUNK_RECORDS))
            for slot in batch:
                del self._pending[slot]
        slots = np.array(sorted(batch), np.int64)
        try:
            without_room = self._write(slots, [batch[slot] for slot in slots.tolist()])
        except OSError:
            self._retry(batch)
            raise
        for slot in without_room.tolist():
            self._without_room[slot] = batch[slot]
            self._grow_at_s = time.monotonic() + _RETRY_S
        with self._lock:
            self._overwriting -= batch.keys() - self._pending.keys()
        return bool(batch)

    def _retry(self, changes: Mapping[int, bytes | None]) -> None:
        with self._lock:
            for slot, key in changes.items():
                if self._pending.get(slot) is None:  # else there is a newer one
                    self._pending[slot] = key

    def _commit_rewrites(self, *, now: bool) -> bool:
        """Write some of what may wait, if it is due; whether there is more."""
        if not len(self._rewriting) and (now or time.monotonic() >= self._rewrite_at_s):
            with self._lock:
                waiting, self._rewrites = self._rewrites, []
            if waiting:
                self._rewriting = np.unique(np.concatenate(waiting))
                self._rewrite_at_s = time.monotonic() + _REWRITE_S
        slots = self._rewriting[:CHUNK_RECORDS]
        self._write(slots, [None] * len(slots))
        self._rewriting = self._rewriting[CHUNK_RECORDS:]
        return bool(len(self._rewriting)) or (now and bool(self._rewrites))

    def _write(self, slots: NDArray[np.int64], new_keys: Sequence[bytes | None]) -> NDArray[np.int64]:
        """Write the records of sorted slots as the columns have them now. `new_keys`: those that the file may lack.
        Returns the slots that lack a record because the file cannot grow."""
        file = self._file
        if not len(slots):
            return slots[:0]
        with self._lock:
            tags, ticks, sealed_at = self.tags[slots], self._ticks[slots], self.sealed_at[slots]
            known = self._known[slots]
            self._recorded[slots] = True
        keys = [key if key and tag else b"" for key, tag in zip(new_keys, tags.tolist(), strict=True)]
        found_tags = tags_of(keys)
        (lacking,) = np.nonzero(known & (found_tags != tags) & (slots < file.records))
        if len(lacking):
            found = file.read_slots(slots[lacking])
            found_tags[lacking] = found.tags
            for number, place in enumerate(lacking.tolist()):
                keys[place] = found.key(number)
        known &= found_tags == tags  # else its seal has to tell the key
        records = encode(slots, keys, found_tags, ticks, sealed_at, salt=file.salt)
        records[~known] = np.zeros((), RECORD)
        written = known | (slots < file.records)
        if full := file.write(slots[written], records[written]):
            reason = f"{file.path} cannot grow ({full})"
            self._log_once.report("full", f"{reason}: at a restart, seals are read of what is stored now")
        with self._lock:
            self._recorded[slots[~known]] = False
        return slots[known & (slots >= file.records)]
