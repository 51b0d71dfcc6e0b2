"""The file of a journal: a header page, then one record a slot, at the place that the slot's number gives it.

Records are read in chunks at open and written with `pwrite`: once that has returned they survive the process, however
it ends. It is not memory-mapped: an I/O error would be a SIGBUS, and a disk that hangs a stopped process. Only the
header is flushed, and the whole file when it is closed. So after a power failure any older version of a record may be
back; the header shows that this may have happened (`trusted`). Not thread-safe: it is for the journal's own thread, but
for `problem`.

A record has 128 bytes and is encoded and checked, with many others, by numpy. It never straddles a 512-byte sector, so
a power failure usually leaves the old or the new one; the checksum decides all the same. It covers the key, the times,
the slot number and the file's salt: a record that was moved to another slot, or comes from another file, is not valid.
A record that is not valid says nothing: its slot is unknown.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from nixl_tiers.base.chunk import MAX_KEY_BYTES, PAGE
from nixl_tiers.tiers.disk import FileIdentity, fallocate
from nixl_tiers.tiers.folder import Folder

logger = logging.getLogger(__name__)

NAME: Final = "manifest.journal"  # part of the format on disk
CHUNK_RECORDS: Final = 4096  # that are read and decoded at a time
_HEADER: Final = struct.Struct("<8sIIQ16sQ")  # magic, version, bytes a record, salt, boot, 1: closed and flushed
_MAGIC: Final = b"nixljrnl"
_VERSION: Final = 1
_BESIDE_BYTES: Final = 64 << 10  # the header, and what a file system adds
_EXTENT_BYTES: Final = 1 << 20  # by which the file grows
_NO_BOOT: Final = bytes(16)  # no machine's
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
RECORD: Final = np.dtype(
    [
        ("check_low", "<u4"),
        ("check_high", "<u2"),
        ("key_bytes", "u1"),  # 0: the slot is empty
        ("tick_high", "u1"),
        ("tick_low", "<u4"),
        ("sealed_at", "<u4"),
        ("key", f"V{MAX_KEY_BYTES}"),  # zero-padded
    ]
)
RECORD_BYTES: Final = RECORD.itemsize
MAX_TICK: Final = (1 << 40) - 1
"""Ticks count requests; a higher one, which only a defect can make, is recorded as this."""

_CHECK_BITS: Final = np.uint64((1 << 48) - 1)
_MULTIPLIERS: Final = tuple(map(np.uint64, (0x9FB21C651E98DF25, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)))  # odd
_FOLD: Final = np.uint64(32)


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
        magic, version, record_bytes, salt, boot, flushed = _HEADER.unpack(head)
        return (
            cls(salt, boot, flushed == 1)
            if (magic, version, record_bytes) == (_MAGIC, _VERSION, RECORD_BYTES)
            else None
        )

    def pack(self) -> bytes:
        head = _HEADER.pack(_MAGIC, _VERSION, RECORD_BYTES, self.salt, self.boot, int(self.flushed))
        return (head + xxh3_64_intdigest(head).to_bytes(8, "little")).ljust(PAGE, b"\0")


class JournalFile:
    """Calls raise OSError. Slots are below `slots`."""

    def __init__(self, folder: Folder, slots: int, *, writes: bool = True) -> None:
        """Opens or makes it. A damaged header makes every record invalid. Without `writes` it must be there, and is
        only read."""
        self.path = folder.path / NAME
        self._slots = slots
        self.defect: OSError | str = ""
        """Why it has no header that says which records are valid; "": it has one, or is new."""
        self._descriptor = folder.open(NAME, os.O_RDWR | os.O_CREAT if writes else os.O_RDONLY)
        try:
            status = os.fstat(self._descriptor)
            self._identity = FileIdentity(self.path, status)
            header = self._read_header(status)
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
        `check` no I/O error either."""
        self.is_open = header is not None and not header.flushed
        """Whether a process has it open to write, or has ended without closing it."""
        self._unflushed = header is not None and not header.flushed and self.trusted
        # Until it is flushed by `close`, another process must not trust it either.
        self._header = Header(self.salt, boot if header is None or self.trusted else header.boot, flushed=False)
        self._marked_open = False
        self._lost = False  # a flush has failed since records were read: those that are not written again may be gone

    @property
    def records(self) -> int:
        """How many slots have room for their record in the file now."""
        return max(0, self._bytes - PAGE) // RECORD_BYTES

    def problem(self) -> str:
        """Whether the file was deleted, replaced or cut short, as a sentence, or "". On any thread."""
        return self._identity.problem(self._bytes)

    def check(self) -> None:
        """Call it before the first `read`. A write that has returned is in the page cache; if the disk does not take it
        later, the cache may drop it, and an older record is back. The next flush reports that, in this process too: so
        what a killed one has written is trusted only if it can be flushed now."""
        if self._unflushed:
            self._unflushed = False
            try:
                os.fdatasync(self._descriptor)
            except OSError as error:
                self.trusted = False
                reason = os.strerror(error.errno or 0)
                logger.warning("%s: the disk has lost records (%s): reading seals instead", self.path, reason)
                with suppress(OSError):  # no later flush reports it, so the next process could not know
                    self.distrust()

    def read(self, first: int) -> tuple[NDArray[np.int64], Records]:
        """Slots from `first` on, up to CHUNK_RECORDS of them, and their records."""
        slots = np.arange(first, min(first + CHUNK_RECORDS, self.records))
        return slots, decode(self._read_run(first, len(slots)), slots, self.salt)

    def read_slots(self, slots: NDArray[np.int64]) -> Records:
        """The records of these slots, which are sorted and have records in the file."""
        runs = [self._read_run(int(run[0]), len(run)) for run in _runs(slots)]
        return decode(np.concatenate([np.zeros(0, RECORD), *runs]), slots, self.salt)

    def write(self, slots: NDArray[np.int64], records: NDArray[np.void]) -> str:
        """Write the records of these slots, which are sorted; neighbours together. Makes room for them; where there is
        none (a full disk), those from `self.records` on are not written. Returns why, or ""."""
        if not len(slots):
            return ""
        if not self._marked_open:
            self._mark_open()
        full = self._extend(PAGE + RECORD_BYTES * (int(slots[-1]) + 1))
        start = 0
        for run in _runs(slots[slots < self.records]):
            self._write_at(records[start : start + len(run)].tobytes(), PAGE + RECORD_BYTES * int(run[0]))
            start += len(run)
        return full

    def distrust(self) -> None:
        """Not all changes can be written: the next open is to treat the file as after a power failure."""
        self._header = self._header._replace(boot=_NO_BOOT)
        if self._marked_open:
            self._write_header(self._header)
        else:
            self._mark_open()

    def close(self, *, flush: bool) -> None:
        """`flush`: its records are right, and all were written; make them durable, and say so in the header, unless an
        earlier flush has failed: this one would not report again what was lost then. Does not raise."""
        try:
            if flush and self._marked_open and not self._lost:
                os.fdatasync(self._descriptor)
                self._write_header(self._header._replace(flushed=True))
        except OSError:  # the page cache may forget what the disk has not taken
            with suppress(OSError):
                self.distrust()
        os.close(self._descriptor)

    def _read_header(self, status: os.stat_result) -> Header | None:
        try:
            header = Header.read(os.pread(self._descriptor, PAGE, 0))
        except OSError as error:
            self.defect = error
            return None
        if header is None and status.st_size:
            self.defect = "its header is not valid"
        return header

    def _mark_open(self) -> None:
        self._write_header(self._header)
        try:
            os.fdatasync(self._descriptor)  # else a power failure could leave the old header over new records
        except OSError:
            self._lost = True
            raise
        self._marked_open = True

    def _write_header(self, header: Header) -> None:
        self._write_at(header.pack(), 0)
        self._bytes = max(self._bytes, PAGE)

    def _extend(self, nbytes: int) -> str:
        """Allocate the file up to here, and some more, as slots are used in ascending order. Returns why that is not
        possible, or ""."""
        if nbytes <= self._bytes:
            return ""
        end = min(-(-nbytes // _EXTENT_BYTES) * _EXTENT_BYTES, PAGE + RECORD_BYTES * self._slots)
        failed = fallocate(self._descriptor, self._bytes, end - self._bytes)
        if failed == errno.EOPNOTSUPP:
            os.ftruncate(self._descriptor, end)
        elif failed:
            return os.strerror(failed)
        self._bytes = end
        return ""

    def _read_run(self, first: int, count: int) -> NDArray[np.void]:
        raw = os.pread(self._descriptor, count * RECORD_BYTES, PAGE + first * RECORD_BYTES)
        return np.frombuffer(raw.ljust(count * RECORD_BYTES, b"\0"), RECORD)  # cut short by somebody: no records there

    def _write_at(self, raw: bytes, offset: int) -> None:
        while raw:
            written = os.pwrite(self._descriptor, raw, offset)
            raw, offset = raw[written:], offset + written


def _runs(slots: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Sorted slots, in runs of neighbours."""
    return iter(np.split(slots, np.flatnonzero(np.diff(slots) != 1) + 1)) if len(slots) else iter(())


class Records(NamedTuple):
    """Decoded records, by place. Of invalid ones and of empty slots, tags, ticks and lengths are 0."""

    valid: NDArray[np.bool_]
    tags: NDArray[np.uint64]
    ticks: NDArray[np.int64]
    sealed_at: NDArray[np.uint32]
    lengths: NDArray[np.uint8]
    keys: NDArray[np.void]

    def key(self, place: int) -> bytes:
        """The key of a valid record; b"" if its slot is empty."""
        return bytes(self.keys[place].tobytes()[: int(self.lengths[place])])


def tag_of(key: bytes) -> int:
    """A hash of the key, 64 bits; 0 only for no key."""
    return max(1, xxh3_64_intdigest(key.ljust(MAX_KEY_BYTES, b"\0"), len(key))) if key else 0


def tags_of(keys: Sequence[bytes]) -> NDArray[np.uint64]:
    """`tag_of` each key."""
    return np.fromiter(map(tag_of, keys), np.uint64, len(keys))


def encode(
    slots: NDArray[np.int64],
    keys: Sequence[bytes],
    tags: NDArray[np.uint64],
    ticks: NDArray[np.int64],
    sealed_at: NDArray[np.uint32],
    *,
    salt: int,
) -> NDArray[np.void]:
    """Records for these slots. A key b"": the slot is empty. `tags`: of the keys. Times in Unix seconds; ticks within
    MAX_TICK."""
    records = np.zeros(len(slots), RECORD)
    records["key"] = np.array(keys, f"S{MAX_KEY_BYTES}").view(RECORD["key"])
    records["key_bytes"] = list(map(len, keys))
    records["tick_low"] = ticks & 0xFFFFFFFF
    records["tick_high"] = ticks >> 32
    records["sealed_at"] = sealed_at
    check = _check(records, tags, slots, salt)
    records["check_low"] = check & np.uint64(0xFFFFFFFF)
    records["check_high"] = check >> _FOLD
    return records


def decode(records: NDArray[np.void], slots: NDArray[np.int64], salt: int) -> Records:
    """The records found at these slots' places. About 0.3 us each; several thousand at a time, as some of it holds the
    interpreter lock."""
    lengths = records["key_bytes"].copy()
    lengths[lengths > MAX_KEY_BYTES] = 0  # not valid then: the checksum covers the byte itself
    tags = np.zeros(len(records), np.uint64)
    keyed = np.flatnonzero(lengths)
    keys = np.ascontiguousarray(records["key"])
    raw = keys[keyed].tolist()
    hashes = np.fromiter(map(xxh3_64_intdigest, raw, lengths[keyed].tolist()), np.uint64, len(raw))
    tags[keyed] = np.maximum(hashes, 1)  # as `tag_of`
    found = records["check_low"] | records["check_high"].astype(np.uint64) << _FOLD
    valid = found == _check(records, tags, slots, salt)
    ticks = records["tick_low"] | records["tick_high"].astype(np.int64) << 32
    bad = ~valid
    for column in (tags, ticks, lengths):
        column[bad] = 0
    return Records(valid, tags, ticks, np.where(valid, records["sealed_at"], 0), lengths, keys)


def _check(
    records: NDArray[np.void], tags: NDArray[np.uint64], slots: NDArray[np.int64], salt: int
) -> NDArray[np.uint64]:
    """48 bits: the key's tag, which is XXH3, mixed with everything else. Never 0, which is a record of zeroes."""
    words = (
        slots.astype(np.uint64),
        records["tick_low"] | records["tick_high"].astype(np.uint64) << _FOLD,
        records["sealed_at"] | records["key_bytes"].astype(np.uint64) << _FOLD,
    )
    check = tags ^ np.uint64(salt)
    for word, multiplier in zip(words, _MULTIPLIERS, strict=True):
        check = (check ^ word) * multiplier
        check ^= check >> _FOLD
    return (check & _CHECK_BITS) | np.uint64(1)
