"""The journal of a shard: which key is in which slot, in columns (`Journal`) and in a file of records (`JournalFile`).

It is not trusted when a row is loaded: the seal decides. The journal only saves reading every seal at open. Who moves a
row writes its record, before and after (csrc/records.h), so a kill loses none of a row that was reported. What else
changes is written by a thread of its own about once a second (`step`): deletes, ticks, times. A slot whose record is
missing or damaged is unknown, and recovered from its seal.

The file is a header page, then one record a slot, at the place that the slot's number gives it. What `pwrite` has taken
survives the process, however it ends. It is not memory-mapped: an I/O error would be a SIGBUS, and a disk that hangs a
stopped process. It is flushed when it is opened and closed. So after a power failure any older version of a record may
be back; the header shows that this may have happened (`trusted`).

A record has 128 bytes, and never straddles a 512-byte sector. Its checksum covers the key, the times, the slot number
and the file's salt: one that was moved to another slot, or comes from another file, is not valid, and says nothing.
"""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from xxhash import xxh3_64_intdigest

from nixl_tiers.base import native
from nixl_tiers.base.chunk import MAX_KEY_BYTES, PAGE
from nixl_tiers.base.log_once import LogOnce
from nixl_tiers.tiers.base import MAX_ENTRIES, PackedEntries
from nixl_tiers.tiers.disk import FileIdentity, describe, extend
from nixl_tiers.tiers.folder import Folder

logger = logging.getLogger(__name__)

NAME: Final = "manifest.journal"  # part of the format on disk
WRITE_S: Final = 1.0  # between two writes of what has changed
CHUNK_RECORDS: Final = 4096  # that are read or written at a time
_THREADS: Final = 2  # that may wait for the file
_HEADER: Final = struct.Struct("<8sIIQ16sQ")  # magic, version, bytes a record, salt, boot, 1: closed and flushed
_HEADER_BYTES: Final = 64  # with its checksum, and zeroes
_BESIDE_BYTES: Final = 64 << 10  # the header, and what a file system adds
_EXTENT_BYTES: Final = 1 << 20  # by which the file grows
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
RECORD_BYTES: Final = 128
_KIND: Final = b"nixljrnl", 1, RECORD_BYTES
NOTHING, UNKNOWN, EMPTY, ROW = range(4)  # `what` a record says: that nothing is known; that no row is there; which one
SLOT: Final = np.dtype(
    [("tag", "<u8"), ("tick", "<u8"), ("slot", "<u4"), ("sealed_at", "<u4"), ("what", "<u4"), ("key_bytes", "u1"),
     ("key", f"V{MAX_KEY_BYTES}"), ("reserved", "V3")]
)  # fmt: skip
"""A record as csrc/records.h takes and gives it. `tag`: of the key. Of what is no row all is 0 but `sealed_at`."""
_KEY_AT: Final = 28  # where its length is, and the key behind it


class Journal:
    """The columns of one shard. For the mover's loop, which nothing keeps waiting; what belongs on a thread that may
    wait for the medium says so."""

    def __init__(self, folder: Folder, slots: int, allocated: NDArray[np.bool_] | None = None) -> None:
        """Reads the file, so on a thread that may wait. `allocated`: by slot, whether it has room in a slab now, as it
        must to hold a row; None: all have. The folder stays the caller's. Raises OSError if there can be no file."""
        self.file = JournalFile(folder, slots)
        self.tags = np.zeros(slots, np.uint64)
        """By slot: a hash of the key that it holds; 0: none."""
        self.sealed_at = np.zeros(slots, np.uint32)
        """By slot: when the bytes in it were sealed, in Unix seconds; 0 if no row was written there since it
        was erased. Also of slots that hold no row any more."""
        self.complete = False
        """Whether every row that was there at open is known. Set by the caller, who reads seals."""
        self.known = np.zeros(slots, np.bool_)
        """By slot: it holds a key or none, which the record is to say; else the record says nothing."""
        self._changed = np.zeros(slots, np.bool_)  # by slot: the record may say something else
        self._used = np.zeros(slots, np.int64)  # by slot: the highest tick of `touch`
        self._lock = threading.Lock()  # of what `write` takes from the loop
        self._amending = np.zeros(0, SLOT)
        self._log_once = LogOnce(logger)
        self.threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="records")
        """For what waits for the file."""
        self._writing: Future[bool] = self.threads.submit(bool)
        self._write_at_s = 0.0
        self._rows = self._read(np.ones(slots, np.bool_) if allocated is None else allocated)

    # --- at open ----------------------------------------------------------------------------------------------------

    def _read(self, allocated: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]]:
        """The rows that are there: slots, least recently used first; by slot, ticks and keys as PackedEntries has
        them."""
        file = self.file
        ticks, keys = np.zeros(file.records, np.int64), np.zeros((file.records, 1), np.uint8)
        for first in range(0, file.records, CHUNK_RECORDS):
            slots = slice(first, min(first + CHUNK_RECORDS, file.records))
            try:
                found = file.read(first, slots.stop - first)
            except OSError as error:
                self._log_once.report("read", f"{file.path} cannot be read ({describe(error)}): reading seals instead")
                continue
            outside = (found["what"] != UNKNOWN) & ~allocated[slots]
            self._changed[found["slot"][outside]] = True  # not to count for other bytes
            found[outside] = np.zeros((), SLOT)
            # An empty slot may have got a row since.
            self.known[slots] = found["what"] >= (EMPTY if file.trusted else ROW)
            self.sealed_at[slots], self.tags[slots], ticks[slots] = found["sealed_at"], found["tag"], found["tick"]
            if (more := 1 + int(found["key_bytes"].max()) - keys.shape[1]) > 0:
                keys = np.pad(keys, ((0, 0), (0, more)))
            raw = found.view(np.uint8).reshape(len(found), -1)
            keys[slots] = raw[:, _KEY_AT : _KEY_AT + keys.shape[1]]
        rows = np.flatnonzero(self.tags)
        rows = rows[np.lexsort((self.sealed_at[rows], ticks[rows]))]
        double = rows[_has_later(self.tags[rows])]
        self.tags[double] = 0
        self._changed[double] = True
        return rows, ticks, keys

    def list_rows(self) -> Iterator[PackedEntries]:
        """Once: the rows that were there at open, least recently used first, in batches of up to MAX_ENTRIES."""
        order, ticks, keys = self._rows
        del self._rows
        for start in range(0, len(order), MAX_ENTRIES):
            slots = order[start : start + MAX_ENTRIES]
            slots = slots[self.tags[slots] != 0]
            yield PackedEntries(slots, ticks[slots], keys[slots])

    def duplicates(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        """By place: whether a slot holds the key already, or a later one of these is the same. On any thread."""
        tags = np.fromiter(map(tag_of, keys), np.uint64, len(keys))
        return _has_later(tags) | np.isin(tags, self.tags)

    def mark_empty(self, slots: NDArray[np.bool_], sealed_at: int = 0) -> None:
        """These unknown slots (a flag a slot) hold no row, but bytes sealed then, if nothing else is known."""
        with self._lock:
            empty = np.flatnonzero(slots & ~self.known)
            self.sealed_at[empty] = np.where(self.sealed_at[empty], self.sealed_at[empty], sealed_at)
            self.known[empty] = True
            self._changed[empty] = True

    def holds(self, slot: int, key: bytes) -> bool:
        """Whether the slot holds the key."""
        return bool(self.tags[slot] == tag_of(key))

    def remove(self, slot: int, key: bytes) -> None:
        """The slot no longer holds the key."""
        with self._lock:
            if 0 <= slot < len(self.tags) and self.holds(slot, key):
                self.tags[slot] = 0
                self._changed[slot] = True

    def touch(self, slots: ArrayLike, ticks: ArrayLike) -> None:
        """The rows in these slots were used at these ticks. Slots that hold no row are skipped."""
        places, used = np.asarray(slots, np.int64), np.asarray(ticks, np.int64)
        with self._lock:
            inside = (places >= 0) & (places < len(self.tags))
            held = inside & (self.tags[places * inside] != 0)
            np.maximum.at(self._used, places[held], used[held])
            self._changed[places[held]] = True

    def clamp_times(self, slots: NDArray[np.int64], now: int) -> None:
        """Times of these slots that are later than `now` (Unix seconds) become `now`. So the file keeps when a row with
        a seal ahead of the clock was first seen."""
        with self._lock:
            self.sealed_at[slots] = np.minimum(self.sealed_at[slots], now)
            self._changed[slots] |= self.known[slots]

    # --- stores and erasing: whoever writes to the slots records it -------------------------------------------------

    def start_overwrite(self, *slots: int) -> None:
        """The slots are about to be overwritten, whatever they hold."""
        places = [slot for slot in slots if 0 <= slot < len(self.tags)]
        with self._lock:
            self.tags[places] = self._used[places] = 0
            self.known[places] = self._changed[places] = False
            if len(self._amending):  # what is being written is of before
                self._amending["what"][np.isin(self._amending["slot"], places)] = NOTHING

    def forget(self, slots: Sequence[int], what: int = UNKNOWN) -> int:
        """Before all is written to these slots: their records become unknown; or EMPTY, after zeroes were. 0; an errno:
        not all have; negative: and nothing may be written there. On a thread that may wait, as the next one."""
        return self.file.amend(_changes(sorted(slots), what))

    def record(self, rows: Sequence[tuple[int, bytes, int, int]]) -> int:
        """After that: (slot, key, tick, sealed at) of what is there."""
        made = [
            (0, tick, slot, _in_seconds(at), ROW, len(key), key.ljust(MAX_KEY_BYTES, b"\0"), b"")
            for slot, key, tick, at in sorted(rows)
        ]
        return self.file.amend(np.array(made, SLOT))

    def stored(self, rows: Sequence[tuple[int, bytes, int, int]]) -> None:
        """Slots hold rows now: (slot, key, sealed at, error), the last if the row has no record."""
        with self._lock:
            for slot, key, sealed_at, error in rows:
                self.tags[slot], self.sealed_at[slot], self.known[slot] = tag_of(key), _in_seconds(sealed_at), True
                if error:
                    self._cannot_write(error, slot)

    def mark_garbage(self, slot: int, sealed_at: int, *, ended: bool = True) -> None:
        """The slot may hold bytes of a row that was sealed then, and of what was there before; `ended`: but no row."""
        with self._lock:
            self.sealed_at[slot] = min(int(self.sealed_at[slot]) or _in_seconds(sealed_at), _in_seconds(sealed_at))
            if ended:
                self.tags[slot], self.known[slot], self._changed[slot] = 0, True, True

    def mark_erased(self, slots: Sequence[int]) -> None:
        """The slots hold no row, nor bytes of one. Their records say so, unless `write` is amending them or that
        failed."""
        places = np.asarray(slots, np.int64)
        with self._lock:
            self.tags[places] = self.sealed_at[places] = 0
            self._changed[places] |= self.known[places]

    # --- the second's writes ----------------------------------------------------------------------------------------

    def step(self) -> None:
        """Once a second, write what has changed."""
        if self._writing.done() and time.monotonic() >= self._write_at_s:
            self._writing.result()
            self._write_at_s = time.monotonic() + WRITE_S
            if self._changed.any():
                self._writing = self.threads.submit(self.write)

    def write(self) -> bool:
        """Bring the records in the file to what the columns say; whether all are. On a thread that may wait, one at a
        time."""
        with self._lock:
            slots = np.flatnonzero(self._changed)
        for start in range(0, max(1, len(slots)), CHUNK_RECORDS):
            some = slots[start : start + CHUNK_RECORDS]
            with self._lock:
                some = some[self._changed[some]]
                self._changed[some] = False
                what = np.where(self.tags[some], ROW, np.where(self.known[some], EMPTY, UNKNOWN))
                self._amending = changes = _changes(some, what)
                changes["tag"], changes["sealed_at"] = self.tags[some], self.sealed_at[some]
                changes["tick"] = self._used[some] * (what == ROW)
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
        self.file.close(right=self.write() and (self.file.trusted or self.complete))

    def _cannot_write(self, error: int, slots: int | NDArray[np.integer]) -> None:
        reason = f"{self.file.path} cannot be written ({os.strerror(error)})"
        self._log_once.report("write", f"{reason}: what is stored now may be lost at a restart")
        self._changed[slots] = True


class JournalFile:
    """Calls raise OSError, and belong on a thread that may wait. Slots are below `slots`."""

    def __init__(self, folder: Folder, slots: int, *, writes: bool = True) -> None:
        """Opens or makes it. A damaged header makes every record invalid. Without `writes` it must be there, and is
        only read."""
        self.path = folder.path / NAME
        self._slots = slots
        self.writer: int | None = None
        """What writes the records (csrc/records.h), until `close`: also for the worker."""
        self._descriptor = folder.open(NAME, os.O_RDWR | os.O_CREAT if writes else os.O_RDONLY)
        with ExitStack() as undo:
            undo.callback(os.close, self._descriptor)
            self._open(writes=writes)
            undo.pop_all()

    def _open(self, *, writes: bool) -> None:
        raw, defect = b"", ""
        try:
            raw = os.pread(self._descriptor, PAGE, 0)
        except OSError as error:
            if not writes:
                raise
            defect = describe(error)
        status, boot, header = os.fstat(self._descriptor), boot_id(), Header.read(raw)
        if header is None and any(raw):  # zeroes: it has grown, and nothing was written yet
            defect = "its header is not valid"
        self.salt = header.salt if header else secrets.randbits(64)
        self.trusted = header is None or header.flushed or header.boot == boot
        """Whether its records are those written last: no power failure, nor I/O error, can have brought back older
        ones."""
        self.closed = not defect if header is None else header.flushed
        """Whether it is new, or who last had it open to write has closed it."""
        self._identity = FileIdentity(self.path, status)
        self._bytes = min(status.st_size, PAGE + RECORD_BYTES * self._slots if header else 0)
        self._bytes -= max(0, self._bytes - PAGE) % RECORD_BYTES
        if not writes:
            return
        if defect:
            logger.warning("%s is damaged (%s): starting with an empty one", self.path, defect)
        # What is cut off must not come back with more slots; nor a record of which a part is there, as the rest of it
        # may be zeroes, which growing appends.
        if status.st_size > self._bytes:
            os.ftruncate(self._descriptor, self._bytes)
        # Until it is flushed by `close`, another process must not trust it either.
        opened = Header(self.salt, boot if header is None or self.trusted else header.boot, flushed=False)
        headers = opened, opened._replace(boot=bytes(16)), opened._replace(flushed=True)
        packed, lost = b"".join(each.pack()[:_HEADER_BYTES] for each in headers), ctypes.c_int()
        self.writer = _library().nixl_tiers_records_new(self._descriptor, self.salt, packed, ctypes.byref(lost))
        assert self.writer, "no memory"
        # A write that has returned is in the page cache; if the disk does not take it later, the cache may drop it, and
        # an older record is back. The next flush reports that, in this process too: so what a killed one has written is
        # trusted only if it can be flushed now.
        if lost.value:
            reason = os.strerror(lost.value)
            logger.warning("%s: the disk has lost records (%s): reading seals instead", self.path, reason)
            self.trusted = False
        self._bytes = os.fstat(self._descriptor).st_size
        _library().nixl_tiers_records_room(self.writer, self.records)

    @property
    def records(self) -> int:
        """How many slots have room for their record in the file now."""
        return max(0, self._bytes - PAGE) // RECORD_BYTES

    def problem(self) -> str:
        """Whether the file was deleted, replaced or cut short, as a sentence, or "". On any thread."""
        return self._identity.problem(self._bytes)

    def grow(self, slots: int) -> None:
        """Have room for the records of so many slots, and some more, as slots are used in ascending order."""
        wanted, most = (PAGE + RECORD_BYTES * min(count, self._slots) for count in (slots, self._slots))
        if wanted > self._bytes:
            end = min(-(-wanted // _EXTENT_BYTES) * _EXTENT_BYTES, most)
            begin = os.fstat(self._descriptor).st_size  # the header may have been written since it was opened
            extend(self._descriptor, begin, end, self.path)
            self._bytes = end
            _library().nixl_tiers_records_room(self.writer, self.records)

    def amend(self, changes: NDArray[np.void], *, everything: bool = False) -> int:
        """Write what changes say, of SLOT and in order of slots; `everything`: nothing is missing then. 0; an errno:
        some are not written, which the header says; negative: not even that could be written."""
        return int(_library().nixl_tiers_records_amend(self.writer, changes.ctypes.data, len(changes), everything))

    def read(self, first: int, count: int) -> NDArray[np.void]:
        """What the records of these slots say, of SLOT."""
        raw = os.pread(self._descriptor, count * RECORD_BYTES, PAGE + first * RECORD_BYTES)
        return decode(raw.ljust(count * RECORD_BYTES, b"\0"), first, self.salt)  # where the file ends are none

    def close(self, *, right: bool = False) -> None:
        """`right`: its records are, and all were written: make them durable, and have the header say so. Does not
        raise."""
        writer, self.writer = self.writer, None
        if writer is not None:
            _library().nixl_tiers_records_close(writer, right)
        os.close(self._descriptor)


class Header(NamedTuple):
    salt: int
    boot: bytes
    flushed: bool

    @classmethod
    def read(cls, raw: bytes) -> Header | None:
        """The header in the first bytes of a file, or None if there is no valid one."""
        *_, salt, boot, flushed = _HEADER.unpack(raw[: _HEADER.size].ljust(_HEADER.size, b"\0"))
        header = cls(salt, boot, flushed == 1)
        return header if raw.startswith(header.pack()[: _HEADER.size + 8]) else None

    def pack(self) -> bytes:
        head = _HEADER.pack(*_KIND, self.salt, self.boot, int(self.flushed))
        return (head + xxh3_64_intdigest(head).to_bytes(8, "little")).ljust(PAGE, b"\0")


def boot_id() -> bytes:
    """16 bytes that are the same until the machine boots again; random where that is not known."""
    try:
        return bytes.fromhex(_BOOT_ID.read_text().strip().replace("-", ""))[:16].ljust(16, b"\0")
    except (OSError, ValueError):
        return secrets.token_bytes(16)


def journal_bytes(slots: int) -> int:
    """The most that the journal of `slots` rows takes on disk."""
    return _BESIDE_BYTES + RECORD_BYTES * slots


def tag_of(key: bytes) -> int:
    """A hash of the key, 64 bits; 0 only for no key."""
    return max(1, xxh3_64_intdigest(key.ljust(MAX_KEY_BYTES, b"\0"), len(key))) if key else 0


def decode(raw: bytes, first: int, salt: int) -> NDArray[np.void]:
    """Of SLOT: what the records from that of slot `first` on say."""
    found = np.zeros(len(raw) // RECORD_BYTES, SLOT)
    _library().nixl_tiers_records_decode(raw, first, len(found), salt, found.ctypes.data)
    return found


def _in_seconds(sealed_at: int) -> int:  # 0 would say that the slot was erased
    return min(max(1, sealed_at), 0xFFFFFFFF)


def _changes(slots: Sequence[int] | NDArray[np.int64], what: ArrayLike) -> NDArray[np.void]:
    changes = np.zeros(len(slots), SLOT)
    changes["slot"], changes["what"] = slots, what
    return changes


def _has_later(tags: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """By place: whether a later one is the same."""
    again = np.ones(len(tags), np.bool_)
    again[len(tags) - 1 - np.unique(tags[::-1], return_index=True)[1]] = False
    return again


@cache
def _library() -> ctypes.CDLL:
    found = native.opened(native.ROW_WORKER)
    pointer, whole, number = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32
    found.nixl_tiers_records_new.argtypes = [ctypes.c_int, whole, ctypes.c_char_p, pointer]
    found.nixl_tiers_records_new.restype = pointer
    found.nixl_tiers_records_room.argtypes = [pointer, whole]
    found.nixl_tiers_records_amend.argtypes = [pointer, pointer, number, ctypes.c_int]
    found.nixl_tiers_records_decode.argtypes = [ctypes.c_char_p, number, number, whole, pointer]
    found.nixl_tiers_records_close.argtypes = [pointer, ctypes.c_int]
    return found
