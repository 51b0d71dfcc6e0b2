"""The journal: the newest change of a slot counts, and changes survive a restart."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from nixl_tiers.base.chunk import PAGE
from nixl_tiers.tiers.base import Entry
from nixl_tiers.tiers.folder import Folder
from nixl_tiers.tiers.slab import journal as journal_module
from nixl_tiers.tiers.slab.journal import (
    EMPTY,
    NAME,
    RECORD_BYTES,
    ROW,
    UNKNOWN,
    Header,
    Journal,
    JournalFile,
    decode,
    tag_of,
)
from tests.support.hooked import CUT, FLUSH, WRITE, slab_writes
from tests.support.journals import Record, encode, overwrite_record, records, rows

SLOTS = 10_000
MAX_TICK = (1 << 40) - 1
NOW = 1_795_000_000


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    with Folder.base(tmp_path) as folder:
        yield folder


def opened(folder: Folder, slots: int = SLOTS, allocated: Any = None) -> Journal:
    journal = Journal(folder, slots, allocated)
    journal.file.grow(slots)
    return journal


def listed(journal: Journal) -> list[Entry]:
    return [entry for batch in journal.list_rows() for entry in batch]


def reopened(folder: Folder, slots: int = SLOTS) -> dict[int, tuple[bytes, int]]:
    journal = opened(folder, slots)
    try:
        return {entry.slot: (entry.key, entry.tick) for entry in listed(journal)}
    finally:
        journal.close()


def put(journal: Journal, *rows: tuple[int, bytes, int, int]) -> list[int]:
    """Store rows (slot, key, tick, sealed at) as NIXL's way does. The errors, as `forget` and `record` return them."""
    slots = [slot for slot, *_ in rows]
    journal.start_overwrite(*slots)
    forgotten = journal.forget(slots)
    recorded = journal.record(rows)
    journal.stored([(slot, key, at, abs(recorded)) for slot, key, _, at in rows])
    return [forgotten, recorded]


def filled(folder: Folder, keys: Sequence[bytes], slots: int = SLOTS) -> None:
    journal = opened(folder, slots)
    put(journal, *((slot, key, slot, NOW + slot) for slot, key in enumerate(keys)))
    journal.close()


def k(count: int) -> list[bytes]:
    return [b"k%d" % slot for slot in range(count)]


def test_a_delete_that_is_being_written_spares_what_is_stored_meanwhile(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the same key, in the same slot, with the same seal."""
    journal = opened(folder)
    put(journal, (1, b"a", 1, NOW), (2, b"b", 1, NOW), (3, b"c", 1, NOW))
    for slot, key in enumerate([b"a", b"b", b"c"], 1):
        journal.remove(slot, key)
    amend = JournalFile.amend

    def store_first(file: JournalFile, *arguments: Any, **named: Any) -> int:
        monkeypatch.setattr(JournalFile, "amend", amend)
        put(journal, (1, b"a", 1, NOW), (2, b"new", 1, NOW))
        return amend(file, *arguments, **named)

    monkeypatch.setattr(JournalFile, "amend", store_first)
    assert journal.write()
    assert rows(folder.path / NAME) == {1: b"a", 2: b"new"}
    assert records(folder.path / NAME)[3].key == b""
    journal.close()


def test_a_record_that_has_another_key_than_is_expected_becomes_unknown(folder: Folder) -> None:
    """As after an I/O error. The row is found by its seal then."""
    file = folder.path / NAME
    journal = opened(folder)
    put(journal, (1, b"a", 1, NOW), (2, b"b", 1, NOW))
    header = Header.read(file.read_bytes())
    assert header is not None
    overwrite_record(file, 1, encode(1, Record(b"older", 1, NOW), header.salt))
    journal.touch([1, 2], [5, 5])
    assert journal.write()
    assert {slot: record.tick for slot, record in records(file).items()} == {2: 5}
    journal.close()


def test_record_that_was_cut_in_two_does_not_come_back(folder: Folder) -> None:
    """By a power failure. That of an empty slot ends with zeroes, which is what a file grows by."""
    path = folder.path / NAME
    journal = opened(folder)
    put(journal, (5, b"five", 1, NOW))
    assert journal.forget([6], EMPTY) == 0
    journal.close()
    os.truncate(path, PAGE + 6 * RECORD_BYTES + 20)
    journal = opened(folder)
    put(journal, (9, b"nine", 2, NOW))
    assert records(path).keys() == {5, 9}
    journal.close()


def test_rows_without_room_in_a_slab_are_not_listed(folder: Folder) -> None:
    filled(folder, k(4), 4)
    journal = opened(folder, 4, np.arange(4) < 2)
    assert [entry.slot for entry in listed(journal)] == [0, 1]
    journal.close()
    assert reopened(folder, 4).keys() == {0, 1}  # also when new slabs have room for the others


# --- damage -------------------------------------------------------------------------------------------------------


def test_damaged_record_costs_only_its_slot(folder: Folder, tmp_path: Path) -> None:
    filled(folder, k(4), 8)
    raw = (tmp_path / NAME).read_bytes()[4096:]
    overwrite_record(tmp_path / NAME, 0, raw[128:256])  # the record of another slot
    overwrite_record(tmp_path / NAME, 2, os.urandom(128))
    journal = opened(folder, 8)
    assert [entry.slot for entry in listed(journal)] == [1, 3]
    assert (~journal.known).nonzero()[0].tolist() == [0, 2, 4, 5, 6, 7]
    journal.close()


def test_record_of_another_file_is_not_valid(folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with Folder.base(tmp_path / "other") as other:
        for where in (folder, other):
            filled(where, k(2), 8)
    overwrite_record(tmp_path / NAME, 1, (tmp_path / "other" / NAME).read_bytes()[4096 + 128 : 4096 + 256])
    assert reopened(folder).keys() == {0}


def test_key_in_two_slots_is_listed_where_it_was_used_last(folder: Folder) -> None:
    journal = opened(folder, 8)
    put(journal, *((s, key, tick, NOW) for s, (key, tick) in enumerate([(b"a", 5), (b"b", 6), (b"a", 7), (b"a", 2)])))
    journal.close()
    for _ in range(2):
        assert reopened(folder, 8) == {1: (b"b", 6), 2: (b"a", 7)}


def killed(folder: Folder, journal: Journal) -> None:
    raw = (folder.path / NAME).read_bytes()
    journal.close()
    (folder.path / NAME).write_bytes(raw)


def test_empty_slots_are_unknown_after_a_power_failure(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the listing is complete, whatever happens; and never after a clean close."""
    journal = opened(folder, 4)
    put(journal, (0, b"a", 1, NOW))
    assert journal.forget([1, 2], EMPTY) == 0
    journal.close()
    journal = opened(folder, 4)
    assert (~journal.known).nonzero()[0].tolist() == [3]
    put(journal, (0, b"b", 2, NOW))
    killed(folder, journal)
    monkeypatch.setattr(journal_module, "boot_id", lambda: bytes(16))
    for _ in range(2):
        journal = opened(folder, 4)
        assert (~journal.known).nonzero()[0].tolist() == [1, 2, 3]
        put(journal, (0, b"c", 3, NOW))
        journal.close()
    journal = opened(folder, 4)
    journal.mark_empty(np.ones(4, np.bool_), NOW)
    journal.complete = True
    journal.close()
    journal = opened(folder, 4)
    assert journal.known.all()
    assert journal.sealed_at.tolist() == [NOW] * 4
    journal.close()


# --- I/O errors ---------------------------------------------------------------------------------------------------


class Errors:
    """`records`, `header`, `flush`, `cut`: whether such writes are errors."""

    def __init__(self) -> None:
        self.records = self.header = self.flush = self.cut = False

    def __call__(self, what: int, _: int, __: bytes, at: int) -> int:
        written = self.records if at else self.header
        return errno.EIO if {FLUSH: self.flush, WRITE: written, CUT: self.cut}[what] else 0


@pytest.fixture
def errors(library: str) -> Iterator[Errors]:
    errors = Errors()
    with slab_writes(library, errors):
        yield errors


@pytest.mark.parametrize("end", ["closed", "killed", "flush fails"])
def test_empty_slots_are_unknown_after_an_io_error(folder: Folder, errors: Errors, end: str) -> None:
    """In the same boot: the file says that a slot is empty which has got a row since."""
    journal = opened(folder, 4)
    journal.complete = True
    assert journal.forget([1], EMPTY) == 0
    if end == "flush fails":
        put(journal, (2, b"a", 1, NOW))
        errors.flush = True
    else:
        errors.records = True
        assert put(journal, (1, b"a", 1, NOW))[0] > 0
    killed(folder, journal) if end == "killed" else journal.close()
    errors.records = errors.flush = False
    journal = opened(folder, 4)
    assert not journal.known[1]
    journal.close()


def test_empty_slots_are_unknown_if_the_disk_has_lost_what_a_killed_process_wrote(
    folder: Folder, errors: Errors, caplog: pytest.LogCaptureFixture
) -> None:
    """The page cache took the record of a row, the disk did not: that the slot is empty, and erased, is back. The
    kernel reports the failed write-back to one flush only, and the process that saw it may be killed, too."""
    journal = opened(folder, 4)
    journal.complete = True
    put(journal, (0, b"old", 1, NOW))
    assert journal.forget([1], EMPTY) == 0
    killed(folder, journal)
    errors.flush = True
    journal = opened(folder, 4)
    assert "has lost records" in caplog.text
    assert not journal.known[1]
    assert journal.holds(0, b"old")  # its seal decides
    killed(folder, journal)
    errors.flush = False
    for _ in range(2):
        journal = opened(folder, 4)
        assert not journal.known[1]
        assert journal.known[0]
        killed(folder, journal)


@pytest.mark.parametrize("first", ["open", "store"])
def test_a_record_lost_after_it_was_read_is_not_trusted_at_the_next_open(
    folder: Folder, errors: Errors, first: str
) -> None:
    """The disk drops a page that a process before had written. That is reported once, by the flush at open or, if the
    header could not be written then, before the first write; the record may be read from the cache until later, and is
    not written again: a flush after that succeeds, and says nothing of it."""
    path, at = folder.path / NAME, PAGE + RECORD_BYTES
    journal = opened(folder, 8)
    assert journal.forget([1], EMPTY) == 0
    journal.mark_empty(np.ones(8, np.bool_), NOW)
    journal.complete = True
    journal.close()
    erased = path.read_bytes()[at : at + RECORD_BYTES]

    journal = opened(folder, 8)
    put(journal, (1, b"key", 1, NOW))
    journal.close()
    header = Header.read(path.read_bytes())
    assert header is not None
    with path.open("r+b") as file:  # that process ended after a failed write: nothing was flushed
        file.write(header._replace(boot=bytes(16), flushed=False).pack())

    errors.flush, errors.header = first == "open", first == "store"
    journal = opened(folder, 8)
    assert [entry.key for entry in listed(journal)] == [b"key"]
    journal.mark_empty(np.zeros(8, np.bool_), NOW)
    journal.complete = True
    overwrite_record(path, 1, erased)
    errors.header = False
    if first == "store":
        errors.flush = True
        assert put(journal, (0, b"other", 2, NOW))[0] < 0
    errors.flush = False
    assert put(journal, (0, b"other", 2, NOW)) == [0, 0]
    journal.close()

    journal = opened(folder, 8)
    assert [entry.key for entry in listed(journal)] == [b"other"]
    assert not journal.known[1], "bytes that nothing will erase"
    journal.close()


def test_the_header_is_flushed_before_the_first_record_is_written(folder: Folder, library: str) -> None:
    """Else a power failure could leave the old header over new records."""
    calls: list[tuple[int, int]] = []
    with slab_writes(library, lambda what, _, __, at: calls.append((what, at)) or 0):
        journal = opened(folder)
        put(journal, (1, b"a", 1, NOW))
        journal.close()
    assert calls[1:4] == [(WRITE, 0), (FLUSH, 0), (WRITE, PAGE + RECORD_BYTES)]


# --- the bytes of docs/reference/formats.md: to change them takes another version number there ------------------------

SALT = 0x0123456789ABCDEF
BOOT = bytes(range(16))


def test_header_is_as_documented() -> None:
    head = b"nixljrnl" + struct.pack("<IIQ", 1, 128, SALT) + BOOT + struct.pack("<Q", 1)
    page = (head + struct.pack("<Q", xxh3_64_intdigest(head))).ljust(4096, b"\0")
    assert Header(SALT, BOOT, flushed=True).pack() == page
    assert Header.read(page) == Header(SALT, BOOT, flushed=True)
    later = head.replace(struct.pack("<I", 1), struct.pack("<I", 2), 1)
    assert Header.read(later + struct.pack("<Q", xxh3_64_intdigest(later))) is None


def test_record_is_as_documented() -> None:
    key, tick, sealed_at = b"key of this chunk", 0x12_3456_789A, 1_790_000_000
    checksum = bytes.fromhex("819ad66b86a4")  # of version 1
    rest = bytes([len(key), 0x12]) + struct.pack("<II", 0x3456789A, sealed_at) + key.ljust(112, b"\0")
    assert encode(5, Record(key, tick, sealed_at), SALT) == checksum + rest
    (found,) = decode(checksum + rest, 5, SALT)
    assert found.tolist()[:7] == (tag_of(key), tick, 5, sealed_at, ROW, len(key), key.ljust(112, b"\0"))


def test_every_flipped_bit_of_a_record_is_noticed() -> None:
    raw = encode(7, Record(b"k" * 36, 5, 1_795_000_000), 99)
    assert decode(raw, 7, 99)["what"] == ROW
    for bit in range(1, 1024):  # the lowest one of a checksum is always 1
        changed = bytearray(raw)
        changed[bit // 8] ^= 1 << bit % 8
        assert decode(bytes(changed), 7, 99)["what"] == UNKNOWN
