"""The file of a journal: a header page, then one record a slot, at the place that the slot's number gives it.

Records are read in chunks at open, and written by csrc/records.h, by whichever thread moves the row. What `pwrite` has
taken survives the process, however it ends. The file is not memory-mapped: an I/O error would be a SIGBUS, and a disk
that hangs a stopped process. Only the header is flushed, and the whole file when it is closed. So after a power failure
any older version of a record may be back; the header shows that this may have happened (`trusted`).

A record has 128 bytes, and never straddles a 512-byte sector. Its checksum covers the key, the times, the slot number
and the file's salt: one that was moved to another slot, or comes from another file, is not valid. A record that is not
valid says nothing: its slot is unknown.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import secrets
import struct
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from nixl_tiers.base import native
from nixl_tiers.base.chunk import MAX_KEY_BYTES, PAGE
from nixl_tiers.tiers.disk import FileIdentity, fallocate
from nixl_tiers.tiers.folder import Folder

logger = logging.getLogger(__name__)

NAME: Final = "manifest.journal"  # part of the format on disk
CHUNK_RECORDS: Final = 4096  # that are read or written at a time
_HEADER: Final = struct.Struct("<8sIIQ16sQ")  # magic, version, bytes a record, salt, boot, 1: closed and flushed
_MAGIC: Final = b"nixljrnl"
_VERSION: Final = 1
_BESIDE_BYTES: Final = 64 << 10  # the header, and what a file system adds
_EXTENT_BYTES: Final = 1 << 20  # by which the file grows
_NO_BOOT: Final = bytes(16)  # no machine's
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
RECORD_BYTES: Final = 128
NOTHING, UNKNOWN, EMPTY, ROW = range(4)  # `what` a record says: that nothing is known; that no row is there; which one
SLOT: Final = np.dtype(
    [("tag", "<u8"), ("tick", "<u8"), ("slot", "<u4"), ("sealed_at", "<u4"), ("what", "<u4"), ("key_bytes", "u1"),
     ("key", f"V{MAX_KEY_BYTES}"), ("reserved", "V3")]
)  # fmt: skip
"""A record as csrc/records.h takes and gives it. `tag`: of the key. Of what is no row all is 0 but `sealed_at`."""
MAX_TICK: Final = (1 << 40) - 1
"""Ticks count requests; a higher one, which only a defect can make, is recorded as this."""


def journal_bytes(slots: int) -> int:
    """The most that the journal of `slots` rows takes on disk."""
    return _BESIDE_BYTES + RECORD_BYTES * slots


def boot_id() -> bytes:
    """16 bytes that are the same until the machine boots again; random where that is not known."""
    try:
        return bytes.fromhex(_BOOT_ID.read_text().strip().replace("-", ""))[:16].ljust(16, b"\0")
    except (OSError, ValueError):
        return secrets.token_bytes(16)


class Header(NamedTuple):
    salt: int
    boot: bytes
    flushed: bool

    @classmethod
    def read(cls, raw: bytes) -> Header | None:
        """The header in the first bytes of a file, or None if there is no valid one."""
        head, check = raw[: _HEADER.size], raw[_HEADER.size : _HEADER.size + 8]
        if len(check) < 8 or xxh3_64_intdigest(head) != int.from_bytes(check, "little"):
            return None
        *kind, salt, boot, flushed = _HEADER.unpack(head)
        return cls(salt, boot, flushed == 1) if kind == [_MAGIC, _VERSION, RECORD_BYTES] else None

    def pack(self) -> bytes:
        head = _HEADER.pack(_MAGIC, _VERSION, RECORD_BYTES, self.salt, self.boot, int(self.flushed))
        return (head + xxh3_64_intdigest(head).to_bytes(8, "little")).ljust(PAGE, b"\0")


class JournalFile:
    """Calls raise OSError, and belong on a thread that may wait. Slots are below `slots`."""

    def __init__(self, folder: Folder, slots: int, *, writes: bool = True) -> None:
        """Opens or makes it. A damaged header makes every record invalid. Without `writes` it must be there, and is
        only read."""
        self.path = folder.path / NAME
        self._slots = slots
        self.defect = ""
        """Why it has no header that says which records are valid; "": it has one, or is new."""
        self.unreadable: OSError | None = None
        self._descriptor = folder.open(NAME, os.O_RDWR | os.O_CREAT if writes else os.O_RDONLY)
        try:
            status = os.fstat(self._descriptor)
            self._identity = FileIdentity(self.path, status)
            header = self._read_header()
            most = PAGE + RECORD_BYTES * slots if header else 0
            self._bytes = min(status.st_size, most)
            self._bytes -= max(0, self._bytes - PAGE) % RECORD_BYTES
            if status.st_size > self._bytes and writes:
                # What is cut off must not come back with more slots; nor a record of which a part is there, as the rest
                # of it may be zeroes, which growing appends.
                os.ftruncate(self._descriptor, self._bytes)
        except BaseException:
            os.close(self._descriptor)
            raise
        boot = boot_id()
        self.salt = header.salt if header else secrets.randbits(64)
        self.trusted = header is None or header.flushed or header.boot == boot
        """Whether its records are those written last: no power failure can have brought back older ones, and after
        `start` no I/O error either."""
        self.is_open = header is not None and not header.flushed
        """Whether a process has it open to write, or has ended without closing it."""
        # Until it is flushed by `close`, another process must not trust it either.
        self._header = Header(self.salt, boot if header is None or self.trusted else header.boot, flushed=False)
        self.writer: int | None = None
        """What writes the records (csrc/records.h), from `start` to `close`."""

    @property
    def records(self) -> int:
        """How many slots have room for their record in the file now."""
        return max(0, self._bytes - PAGE) // RECORD_BYTES

    def problem(self) -> str:
        """Whether the file was deleted, replaced or cut short, as a sentence, or "". On any thread."""
        return self._identity.problem(self._bytes)

    def start(self) -> None:
        """Before the first `read`: it is to be written from now on."""
        distrusted = self._header._replace(boot=_NO_BOOT)
        if self.is_open and self.trusted:
            # A write that has returned is in the page cache; if the disk does not take it later, the cache may drop it,
            # and an older record is back. The next flush reports that, in this process too: so what a killed one has
            # written is trusted only if it can be flushed now.
            try:
                os.fdatasync(self._descriptor)
            except OSError as error:
                self.trusted, self._header = False, distrusted
                reason = os.strerror(error.errno or 0)
                logger.warning("%s: the disk has lost records (%s): reading seals instead", self.path, reason)
                self._distrust()
        new, headers = _library().nixl_tiers_records_new, (self._header.pack(), distrusted.pack())
        self.writer = new(self._descriptor, self.salt, *headers)
        assert self.writer, "no memory"
        _library().nixl_tiers_records_room(self.writer, self.records)

    def grow(self, slots: int) -> None:
        """Have room for the records of so many slots, and some more, as slots are used in ascending order."""
        most = PAGE + RECORD_BYTES * self._slots
        wanted = min(PAGE + RECORD_BYTES * slots, most)
        if wanted > self._bytes:
            end = min(-(-wanted // _EXTENT_BYTES) * _EXTENT_BYTES, most)
            failed = fallocate(self._descriptor, self._bytes, end - self._bytes)
            if failed == errno.EOPNOTSUPP:
                os.ftruncate(self._descriptor, end)
            elif failed:
                raise OSError(failed, os.strerror(failed), str(self.path))
            self._bytes = end
            _library().nixl_tiers_records_room(self.writer, self.records)

    def mark_open(self) -> None:
        """Have the header say that it is, and flush it, which the first record does otherwise."""
        _library().nixl_tiers_records_mark(self.writer)

    def amend(self, changes: NDArray[np.void], *, everything: bool = False) -> int:
        """Write what changes say, of SLOT and in order of slots; `everything`: nothing is missing then. 0; an errno:
        some are not written, which the header says; negative: not even that could be written."""
        error: int = _library().nixl_tiers_records_amend(self.writer, changes.ctypes.data, len(changes), everything)
        return error

    def read(self, first: int, count: int) -> NDArray[np.void]:
        """What the records of these slots say, of SLOT."""
        raw = os.pread(self._descriptor, count * RECORD_BYTES, PAGE + first * RECORD_BYTES)
        return decode(raw.ljust(count * RECORD_BYTES, b"\0"), first, self.salt)  # where the file ends are none

    def close(self, *, flush: bool) -> None:
        """`flush`: its records are right, and all were written; make them durable, and say so in the header, unless an
        earlier flush has failed: this one would not report again what was lost then. Does not raise."""
        whole = self.writer is not None and _library().nixl_tiers_records_close(self.writer)
        self.writer = None
        try:
            if flush and whole:
                os.fdatasync(self._descriptor)
                self._write_header(self._header._replace(flushed=True))
        except OSError:  # the page cache may forget what the disk has not taken
            self._distrust()
        os.close(self._descriptor)

    def _read_header(self) -> Header | None:
        try:
            raw = os.pread(self._descriptor, PAGE, 0)
        except OSError as error:
            self.unreadable, self.defect = error, "its header cannot be read"
            return None
        header = Header.read(raw)
        if header is None and any(raw):  # zeroes: it has grown, and nothing was written yet
            self.defect = "its header is not valid"
        return header

    def _distrust(self) -> None:
        """A flush has failed, which no later one reports: have the next process know it."""
        try:
            self._write_header(self._header._replace(boot=_NO_BOOT))
        except OSError:
            self._bytes = 0
            with suppress(OSError):
                os.ftruncate(self._descriptor, 0)

    def _write_header(self, header: Header) -> None:
        os.pwrite(self._descriptor, header.pack(), 0)


def tag_of(key: bytes) -> int:
    """A hash of the key, 64 bits; 0 only for no key."""
    return max(1, xxh3_64_intdigest(key.ljust(MAX_KEY_BYTES, b"\0"), len(key))) if key else 0


def tags_of(keys: Sequence[bytes]) -> NDArray[np.uint64]:
    """`tag_of` each key."""
    return np.fromiter(map(tag_of, keys), np.uint64, len(keys))


def decode(raw: bytes, first: int, salt: int) -> NDArray[np.void]:
    """Of SLOT: what the records from that of slot `first` on say."""
    found = np.zeros(len(raw) // RECORD_BYTES, SLOT)
    _library().nixl_tiers_records_decode(raw, first, len(found), salt, found.ctypes.data)
    return found


@cache
def _library() -> ctypes.CDLL:
    found = native.opened(native.ROW_WORKER)
    pointer, whole = ctypes.c_void_p, ctypes.c_uint64
    found.nixl_tiers_records_new.argtypes = [ctypes.c_int, whole, ctypes.c_char_p, ctypes.c_char_p]
    found.nixl_tiers_records_new.restype = pointer
    found.nixl_tiers_records_room.argtypes = [pointer, whole]
    found.nixl_tiers_records_mark.argtypes = [pointer]
    found.nixl_tiers_records_amend.argtypes = [pointer, pointer, ctypes.c_uint32, ctypes.c_int]
    found.nixl_tiers_records_decode.argtypes = [ctypes.c_char_p, ctypes.c_uint32, ctypes.c_uint32, whole, pointer]
    found.nixl_tiers_records_close.argtypes = [pointer]
    return found
