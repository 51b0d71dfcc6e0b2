"""The journal: the newest change of a slot counts, and changes survive a restart."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nixl_tiers.base.chunk import MAX_KEY_BYTES, PAGE
from nixl_tiers.testing.medium import folder_bytes
from nixl_tiers.tiers.base import MAX_ENTRIES, Entry
from nixl_tiers.tiers.folder import Folder, NotOwned
from nixl_tiers.tiers.slab import journal as journal_module
from nixl_tiers.tiers.slab import journal_file, journal_listing
from nixl_tiers.tiers.slab.journal import Journal
from nixl_tiers.tiers.slab.journal_file import (
    MAX_TICK,
    NAME,
    RECORD,
    RECORD_BYTES,
    Header,
    JournalFile,
    decode,
    encode,
    journal_bytes,
    tags_of,
)
from tests.mover.harness import wait_until
from tests.support.journals import overwrite_record, records, rows

SLOTS = 10_000
NOW = 1_795_000_000


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    with Folder.base(tmp_path) as folder:
        yield folder


def listed(journal: Journal) -> list[Entry]:
    return [entry for batch in journal.list_rows() for entry in batch]


def opened(folder: Folder, slots: int = SLOTS) -> Journal:
    """With everything in its file read."""
    journal = Journal(folder, slots)
    assert wait_until(lambda: journal._listing.order is not None)
    return journal


def reopened(folder: Folder, slots: int = SLOTS) -> dict[int, tuple[bytes, int]]:
    journal = Journal(folder, slots)
    try:
        return {entry.slot: (entry.key, entry.tick) for entry in listed(journal)}
    finally:
        journal.close()


def test_newest_change_of_a_slot_counts(folder: Folder) -> None:
    journal = opened(folder)
    journal.put(1, b"a", 1, NOW)
    journal.put(1, b"b", 2, NOW)
    journal.put(2, b"c", 3, NOW)
    journal.remove(2, b"c")
    journal.put(3, b"d", 4, NOW)
    journal.remove(3, b"not d")
    journal.put(4, b"e", 5, NOW)
    journal.touch([4, 2], [9, 9])
    journal.close()
    assert reopened(folder) == {1: (b"b", 2), 3: (b"d", 4), 4: (b"e", 9)}


@pytest.mark.parametrize("read", [True, False])
def test_changes_apply_to_rows_already_in_the_file(folder: Folder, read: bool) -> None:
    journal = Journal(folder, SLOTS)
    for slot in range(8):
        journal.put(slot, b"k%d" % slot, slot, NOW)
    journal.close()
    journal = opened(folder) if read else Journal(folder, SLOTS)
    journal.remove(0, b"k0")
    journal.remove(1, b"other")
    journal.start_overwrite(2)
    journal.start_overwrite(3)
    journal.put(3, b"new", 50, NOW)
    journal.put(6, b"brief", 70, NOW)
    journal.remove(6, b"brief")  # and the older row of that slot does not come back
    journal.close()
    assert reopened(folder) == {1: (b"k1", 1), 3: (b"new", 50), 4: (b"k4", 4), 5: (b"k5", 5), 7: (b"k7", 7)}


def test_touched_rows_are_recent_after_a_restart(folder: Folder) -> None:
    journal = Journal(folder, SLOTS)
    for slot in range(6):
        journal.put(slot, b"k%d" % slot, slot, NOW)
    journal.close()
    journal = opened(folder)
    journal.touch([0, 3, 7, SLOTS], [60, 2, 60, 60])  # an older tick, an empty slot, one beyond the end
    journal.touch(np.array([1]), np.array([70]))
    journal.start_overwrite(1)
    assert wait_until(lambda: records(folder.path / NAME)[0].tick == 60)
    journal.close()
    assert reopened(folder) == {0: (b"k0", 60), 2: (b"k2", 2), 3: (b"k3", 3), 4: (b"k4", 4), 5: (b"k5", 5)}


def test_tick_beyond_the_record_is_clamped(folder: Folder) -> None:
    journal = opened(folder)
    journal.put(1, b"a", 2**62, NOW)
    journal.put(2, b"b", 1, NOW)
    journal.touch([2], [2**62])
    journal.close()
    assert reopened(folder) == {1: (b"a", MAX_TICK), 2: (b"b", MAX_TICK)}


def test_listing_is_ordered_and_omits_slots_stored_into_since(folder: Folder) -> None:
    count = 3 * MAX_ENTRIES + 5
    journal = Journal(folder, SLOTS)
    for slot in range(count):
        journal.put(slot, b"key%d" % slot, count - slot, NOW)
    journal.close()
    journal = Journal(folder, SLOTS)
    batches = journal.list_rows()
    first = next(batch for batch in batches if batch)
    assert [entry.slot for entry in first] == list(range(count - 1, count - 1 - MAX_ENTRIES, -1))
    journal.start_overwrite(0)  # about to be overwritten
    journal.start_overwrite(1)
    journal.put(1, b"new", 10**6, NOW)
    rest = [entry for batch in batches for entry in batch]
    assert [entry.slot for entry in rest] == list(range(count - 1 - MAX_ENTRIES, 1, -1))
    journal.close()


def test_slot_is_unknown_in_the_file_before_it_may_be_overwritten(folder: Folder) -> None:
    journal = opened(folder)
    journal.put(1, b"a", 1, NOW)
    journal.start_overwrite(2)
    assert journal.may_overwrite([2])  # the file never had a record of it
    assert wait_until(lambda: 1 in rows(folder.path / NAME))
    journal.start_overwrite(1)
    assert wait_until(lambda: journal.may_overwrite([1]))
    assert rows(folder.path / NAME) == {}
    journal.close()


def test_killed_mover_leaves_overwritten_slots_unknown(folder: Folder, tmp_path: Path) -> None:
    journal = opened(folder)
    assert journal.unknown_slots().all()
    for slot in range(4):
        journal.put(slot, b"k%d" % slot, slot + 1, NOW)
    journal.remove(1, b"k1")
    assert wait_until(lambda: len(records(folder.path / NAME)) == 4)
    journal.start_overwrite(2)
    assert wait_until(lambda: journal.may_overwrite([2]))
    (tmp_path / "killed").mkdir()
    shutil.copy(tmp_path / NAME, tmp_path / "killed")  # what a mover killed now leaves behind
    journal.close()
    with Folder.base(tmp_path / "killed") as killed:
        journal = Journal(killed, 8)
        assert not journal.complete
        assert [entry.slot for entry in listed(journal)] == [0, 3]
        journal.start_overwrite(5)
        assert journal.unknown_slots().nonzero()[0].tolist() == [2, 4, 6, 7]
        journal.close()


def test_slots_marked_as_empty_are_known_after_a_restart(folder: Folder) -> None:
    journal = opened(folder, 8)
    journal.put(1, b"a", 1, NOW)
    journal.mark_empty(np.arange(8) < 6, NOW + 1)
    journal.close()
    journal = opened(folder, 8)
    assert [entry.slot for entry in listed(journal)] == [1]
    assert journal.unknown_slots().nonzero()[0].tolist() == [6, 7]
    assert journal.sealed_at.tolist() == [NOW + 1, NOW, *[NOW + 1] * 4, 0, 0]
    journal.close()


def test_slots_beyond_the_capacity_do_not_come_back(folder: Folder) -> None:
    journal = Journal(folder, SLOTS)
    journal.put(5, b"five", 1, NOW)
    journal.put(6, b"six", 2, NOW)
    journal.close()
    assert reopened(folder, slots=6) == {5: (b"five", 1)}
    assert reopened(folder) == {5: (b"five", 1)}


def test_record_that_was_cut_in_two_does_not_come_back(folder: Folder) -> None:
    """By a power failure. That of an empty slot ends with zeroes, which is what a file grows by."""
    path = folder.path / NAME
    journal = opened(folder)
    journal.put(5, b"five", 1, NOW)
    journal.mark_erased(6)
    journal.close()
    os.truncate(path, PAGE + 6 * RECORD_BYTES + 20)
    journal = opened(folder)
    journal.start_overwrite(6)
    assert journal.may_overwrite([6])
    journal.put(9, b"nine", 2, NOW)
    assert wait_until(lambda: 9 in rows(path))
    assert 6 not in records(path)
    journal.close()


def test_rows_without_room_in_a_slab_are_not_listed(folder: Folder) -> None:
    journal = Journal(folder, 4)
    for slot in range(4):
        journal.put(slot, b"k%d" % slot, slot, NOW)
    journal.close()
    journal = Journal(folder, 4, np.arange(4) < 2)
    assert [entry.slot for entry in listed(journal)] == [0, 1]
    journal.close()
    assert reopened(folder, 4).keys() == {0, 1}  # also when new slabs have room for the others


def test_journal_stays_within_journal_bytes(folder: Folder, tmp_path: Path) -> None:
    slots = 4000
    journal = Journal(folder, slots)
    most = [0]
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.001):
            most[0] = max(most[0], folder_bytes(tmp_path))

    thread = threading.Thread(target=look)
    thread.start()
    for lap in range(3):
        for step in range(slots):
            journal.put(step * 1103 % slots, bytes([lap]) * 100 + step.to_bytes(12, "big"), 2**35 + step, NOW)
    journal.close()
    ended.set()
    thread.join()
    assert 0 < most[0] <= journal_bytes(slots)
    assert len(reopened(folder, slots)) == slots


def test_file_grows_with_the_slots_in_use(folder: Folder, tmp_path: Path) -> None:
    journal = Journal(folder, 1 << 22)
    journal.put(0, b"a", 1, NOW)
    assert wait_until(lambda: 0 in rows(tmp_path / NAME))
    assert (tmp_path / NAME).stat().st_size <= 2 << 20
    journal.close()


def test_unwritable_file_is_an_os_error(folder: Folder, tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    with pytest.raises(OSError, match=r"manifest\.journal"):
        Journal(folder, SLOTS)


def test_link_in_place_of_the_file_is_refused(folder: Folder, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_bytes(b"x" * 100_000)
    (tmp_path / NAME).symlink_to(target)
    with pytest.raises(NotOwned):
        Journal(folder, SLOTS)
    assert target.read_bytes() == b"x" * 100_000


def test_sealing_times_are_kept_for_deleted_rows(folder: Folder) -> None:
    journal = opened(folder, 8)
    for slot in range(5):
        journal.put(slot, b"k%d" % slot, slot, NOW + slot)
    journal.remove(1, b"k1")
    journal.remove(2, b"another")
    journal.mark_garbage(3, NOW + 33)
    journal.mark_erased(4)
    journal.put(5, b"k5", 5, 0)  # a seal without a time
    assert [journal.holds(slot, b"k%d" % slot) for slot in range(6)] == [True, False, True, False, False, True]
    stamps = [NOW, NOW + 1, NOW + 2, NOW + 33, 0, 1, 0, 0]
    assert journal.sealed_at.tolist() == stamps
    for _ in range(2):
        journal.close()
        journal = Journal(folder, 8)
        assert [entry.slot for entry in listed(journal)] == [0, 2, 5]
        assert journal.sealed_at.tolist() == stamps
        assert [journal.holds(slot, b"k%d" % slot) for slot in range(6)] == [True, False, True, False, False, True]
        journal.mark_complete()
    journal.close()


def test_clamped_times_are_in_the_file(folder: Folder, tmp_path: Path) -> None:
    journal = opened(folder, 8)
    for slot in range(3):
        journal.put(slot, b"k%d" % slot, slot, NOW + slot)
    journal.close()
    journal = opened(folder, 8)
    journal.clamp_times(np.arange(8), NOW + 1)
    journal.close()
    assert [record.sealed_at for record in records(tmp_path / NAME).values()] == [NOW, NOW + 1, NOW + 1]
    assert rows(tmp_path / NAME) == {slot: b"k%d" % slot for slot in range(3)}


# --- damage -------------------------------------------------------------------------------------------------------


def test_damaged_record_costs_only_its_slot(folder: Folder, tmp_path: Path) -> None:
    journal = Journal(folder, 8)
    for slot in range(4):
        journal.put(slot, b"k%d" % slot, slot, NOW)
    journal.close()
    raw = (tmp_path / NAME).read_bytes()[4096:]
    overwrite_record(tmp_path / NAME, 0, raw[128:256])  # the record of another slot
    overwrite_record(tmp_path / NAME, 2, os.urandom(128))
    journal = Journal(folder, 8)
    assert [entry.slot for entry in listed(journal)] == [1, 3]
    assert journal.unknown_slots().nonzero()[0].tolist() == [0, 2, 4, 5, 6, 7]
    journal.close()


def test_record_of_another_file_is_not_valid(folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with Folder.base(tmp_path / "other") as other:
        for where in (folder, other):
            journal = Journal(where, 8)
            journal.put(1, b"a", 1, NOW)
            journal.close()
    overwrite_record(tmp_path / NAME, 1, (tmp_path / "other" / NAME).read_bytes()[4096 + 128 : 4096 + 256])
    assert reopened(folder) == {}


@pytest.mark.parametrize("header", [b"", b"\xa5" * 4096])
def test_damaged_header_makes_every_slot_unknown(folder: Folder, tmp_path: Path, header: bytes) -> None:
    journal = Journal(folder, 8)
    journal.put(1, b"a", 1, NOW)
    journal.close()
    with (tmp_path / NAME).open("r+b") as file:
        file.write(header) if header else file.truncate(10)
    journal = Journal(folder, 8)
    assert listed(journal) == []
    assert journal.unknown_slots().all()
    journal.put(1, b"b", 1, NOW)
    journal.close()
    assert reopened(folder) == {1: (b"b", 1)}


def test_every_flipped_bit_of_a_record_is_noticed() -> None:
    slots = np.array([7])
    record = encode(slots, [b"k" * 36], tags_of([b"k" * 36]), np.array([5]), np.array([NOW], np.uint32), salt=99)
    assert decode(record, slots, 99).valid.all()
    for bit in range(1024):
        raw = bytearray(record.tobytes())
        raw[bit // 8] ^= 1 << bit % 8
        if bit:  # the lowest bit of a checksum is always 1
            assert not decode(np.frombuffer(bytes(raw), RECORD), slots, 99).valid.any()


def test_key_of_any_length_survives_its_record() -> None:
    keys = [bytes(length) for length in range(MAX_KEY_BYTES + 1)]  # also such as end in zeroes
    slots = np.arange(len(keys))
    found = decode(encode(slots, keys, tags_of(keys), slots, slots.astype(np.uint32), salt=3), slots, 3)
    assert found.valid.all()
    assert [found.key(place) for place in slots] == keys
    assert len(set(found.tags.tolist())) == len(keys)
    assert found.ticks.tolist() == found.sealed_at.tolist() == slots.tolist()


def test_key_in_two_slots_is_listed_where_it_was_used_last(folder: Folder) -> None:
    journal = Journal(folder, 8)
    for slot, (key, tick) in enumerate([(b"a", 5), (b"b", 6), (b"a", 7), (b"a", 2)]):
        journal.put(slot, key, tick, NOW)
    journal.close()
    for _ in range(2):
        assert reopened(folder, 8) == {1: (b"b", 6), 2: (b"a", 7)}


@pytest.mark.parametrize("place_bits", [24, 1])
def test_rows_are_ordered_by_tick_and_place(monkeypatch: pytest.MonkeyPatch, place_bits: int) -> None:
    monkeypatch.setattr(journal_listing, "_PLACE_BITS", place_bits)
    ticks = np.array([5, MAX_TICK, 0, 5, 1, MAX_TICK, 0])
    assert journal_listing.by_tick(ticks).tolist() == [2, 6, 4, 0, 3, 1, 5]
    assert journal_listing.by_tick(ticks[:0]).tolist() == []


def test_duplicates_of_held_and_of_later_keys_are_found(folder: Folder) -> None:
    journal = opened(folder, 8)
    journal.put(3, b"a", 1, NOW)
    assert journal.duplicates([b"b", b"a", b"c", b"b"]).tolist() == [True, True, False, False]
    assert journal.duplicates([]).tolist() == []
    journal.close()


def test_empty_slots_are_unknown_after_a_power_failure(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the listing is complete, whatever happens; and never after a clean close."""
    journal = opened(folder, 4)
    journal.put(0, b"a", 1, NOW)
    journal.mark_erased(1)
    journal.mark_garbage(2, NOW)
    journal.close()
    journal = opened(folder, 4)
    assert journal.unknown_slots().nonzero()[0].tolist() == [3]
    journal.put(0, b"b", 2, NOW)
    assert wait_until(lambda: rows(folder.path / NAME) == {0: b"b"})
    raw = (folder.path / NAME).read_bytes()
    journal.close()
    (folder.path / NAME).write_bytes(raw)
    monkeypatch.setattr(journal_file, "boot_id", lambda: bytes(16))
    for _ in range(2):
        journal = opened(folder, 4)
        assert journal.unknown_slots().nonzero()[0].tolist() == [1, 2, 3]
        journal.put(0, b"c", 3, NOW)
        journal.close()
    journal = opened(folder, 4)
    journal.mark_empty(np.ones(4, np.bool_), NOW)
    journal.mark_complete()
    journal.close()
    journal = opened(folder, 4)
    assert not journal.unknown_slots().any()
    assert journal.sealed_at.tolist() == [NOW] * 4
    journal.close()


# --- I/O errors ---------------------------------------------------------------------------------------------------


def failing(*_: object) -> int:
    raise OSError(5, "Input/output error")


def test_unreadable_records_are_unknown(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(folder, SLOTS)
    for slot in (1, 9_000):
        journal.put(slot, b"k%d" % slot, slot, NOW)
    journal.close()
    read = os.pread
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", lambda fd, n, at: failing() if 0 < at < 10_000 else read(fd, n, at))
        journal = Journal(folder, SLOTS)
        assert [entry.slot for entry in listed(journal)] == [9_000]
        journal.start_overwrite(1)  # the record may be valid on the disk
        assert 1 in journal._overwriting or rows(folder.path / NAME).keys() == {9_000}
        journal.close()
    assert reopened(folder).keys() == {9_000}


def test_journal_that_cannot_be_written_stops_no_store(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(journal_module, "_RETRY_S", 0.01)
    journal = opened(folder)
    journal.put(1, b"a", 1, NOW)
    assert wait_until(lambda: 1 in rows(folder.path / NAME))
    write = os.pwrite
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda fd, raw, at: failing() if at else write(fd, raw, at))
        journal.start_overwrite(1)
        assert wait_until(lambda: journal.may_overwrite([1]))
        journal.put(1, b"b", 2, NOW)
        time.sleep(0.05)  # several retries
        journal.touch([1], [3])
    journal.close()
    assert reopened(folder) == {1: (b"b", 3)}
    assert caplog.text.count("what is stored now may be lost at a restart") == 1


def test_listing_does_not_wait_for_a_file_that_cannot_be_written(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(folder)
    for slot in (1, SLOTS - 1):
        journal.put(slot, b"k%d" % slot, slot, NOW)
    journal.close()
    monkeypatch.setattr(journal_module, "_RETRY_S", 600.0)
    gate = threading.Event()
    read = JournalFile.read
    monkeypatch.setattr(JournalFile, "read", lambda *args: (gate.wait(60), read(*args))[1])
    monkeypatch.setattr(JournalFile, "write", failing)
    journal = Journal(folder, SLOTS)
    journal.start_overwrite(1)
    gate.set()
    assert wait_until(lambda: journal._failing)
    assert wait_until(lambda: journal._listing.order is not None)
    journal.close()


@pytest.mark.parametrize("end", ["closed", "killed", "flush fails"])
def test_empty_slots_are_unknown_after_an_io_error(folder: Folder, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """In the same boot: the file says that a slot is empty which has got a row since."""
    monkeypatch.setattr(journal_module, "_RETRY_S", 0.01)
    write = os.pwrite
    journal = opened(folder, 4)
    journal.mark_complete()
    journal.mark_erased(1)
    assert wait_until(lambda: 1 in records(folder.path / NAME))
    if end == "flush fails":
        journal.put(2, b"a", 1, NOW)
        assert wait_until(lambda: 2 in records(folder.path / NAME))
        monkeypatch.setattr(os, "fdatasync", failing)
    else:
        monkeypatch.setattr(os, "pwrite", lambda fd, raw, at: failing() if at else write(fd, raw, at))
        journal.start_overwrite(1)
        assert wait_until(lambda: journal.may_overwrite([1]))
        journal.put(1, b"a", 1, NOW)
    raw = (folder.path / NAME).read_bytes()
    journal.close()
    monkeypatch.undo()
    if end == "killed":
        (folder.path / NAME).write_bytes(raw)
    journal = opened(folder, 4)
    assert journal.unknown_slots()[1]
    journal.close()


def test_empty_slots_are_unknown_if_the_disk_has_lost_what_a_killed_process_wrote(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The page cache took the record of a row, the disk did not: that the slot is empty, and erased, is back."""
    file = folder.path / NAME
    journal = opened(folder, 4)
    journal.mark_complete()
    journal.put(0, b"old", 1, NOW)
    journal.mark_erased(1)
    assert wait_until(lambda: {0, 1} <= records(file).keys())
    raw = file.read_bytes()
    journal.close()
    file.write_bytes(raw)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", failing)  # the kernel reports the failed write-back to the next flush
        journal = opened(folder, 4)
        assert "has lost records" in caplog.text
        assert journal.unknown_slots()[1]
        assert journal.holds(0, b"old")  # its seal decides
        journal.close()
    journal = opened(folder, 4)
    assert not journal.unknown_slots()[0]
    journal.close()


def test_records_that_the_disk_has_lost_stay_untrusted_after_a_kill(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reports a failed write-back to one flush only. The process that saw it may be killed before it has
    written anything, and the next one would take the old records for those written last."""
    file = folder.path / NAME
    journal = opened(folder, 4)
    journal.mark_complete()
    journal.mark_erased(1)
    assert wait_until(lambda: 1 in records(file))
    raw = file.read_bytes()
    journal.close()
    file.write_bytes(raw)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", failing)
        journal = opened(folder, 4)
    raw = file.read_bytes()
    journal.close()
    file.write_bytes(raw)  # as a kill leaves it
    for _ in range(2):
        journal = opened(folder, 4)
        assert journal.unknown_slots()[1]
        raw = file.read_bytes()
        journal.close()
        file.write_bytes(raw)


def test_slot_is_not_overwritten_while_not_even_the_header_can_be_written(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "_RETRY_S", 0.01)
    journal = opened(folder, 4)
    journal.put(1, b"a", 1, NOW)
    assert wait_until(lambda: 1 in rows(folder.path / NAME))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing)
        journal.start_overwrite(1)
        assert wait_until(lambda: journal.denies(1))
        assert not journal.may_overwrite([1])
        assert journal.may_overwrite([2])  # of which the file has no record
    assert wait_until(lambda: journal.may_overwrite([1]))
    assert not journal.denies(1)
    journal.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_defect_of_the_thread_is_a_problem(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the listing would never end."""
    monkeypatch.setattr(JournalFile, "read", lambda *_: 1 // 0)
    journal = Journal(folder, 4)
    journal.put(1, b"a", 1, NOW)
    journal.close()
    journal = Journal(folder, 4)
    assert wait_until(lambda: bool(journal.problem()))
    assert "ZeroDivisionError" in journal.problem()
    journal.close()
    monkeypatch.undo()
    assert reopened(folder, 4) == {1: (b"a", 1)}


def test_journal_that_cannot_grow_records_what_has_room(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk: slots beyond the end of the file are unknown, and those before it must not keep old keys."""
    monkeypatch.setattr(journal_module, "_RETRY_S", 0.01)
    journal = opened(folder)
    journal.put(1, b"a", 1, NOW)
    assert wait_until(lambda: 1 in rows(folder.path / NAME))
    with monkeypatch.context() as patch:
        patch.setattr(journal_file, "fallocate", lambda *_: errno.ENOSPC)
        journal.put(9_000, b"far", 1, NOW)
        journal.start_overwrite(1)
        assert wait_until(lambda: 1 not in records(folder.path / NAME))
        journal.put(1, b"b", 2, NOW)
        assert wait_until(lambda: rows(folder.path / NAME) == {1: b"b"})
    assert wait_until(lambda: rows(folder.path / NAME) == {1: b"b", 9_000: b"far"})
    journal.close()


def test_a_record_lost_after_it_was_read_is_not_trusted_at_the_next_open(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk drops a page that a process before had written. That is reported once, by the flush before the first
    write, and the record is not written again: a later flush that succeeds says nothing of it."""
    path = folder.path / NAME
    journal = opened(folder, 8)
    journal.mark_erased(1)
    journal.mark_empty(np.ones(8, np.bool_), NOW)
    journal.mark_complete()
    journal.close()
    at = PAGE + RECORD_BYTES
    erased = path.read_bytes()[at : at + RECORD_BYTES]

    journal = opened(folder, 8)
    journal.put(1, b"key", 1, NOW)
    journal.close()
    header = Header.read(path.read_bytes())
    assert header is not None
    with path.open("r+b") as file:  # that process ended after a failed write: nothing was flushed
        file.write(header._replace(boot=bytes(16), flushed=False).pack())

    journal = opened(folder, 8)
    assert [entry.key for entry in listed(journal)] == [b"key"]
    journal.mark_empty(np.zeros(8, np.bool_), NOW)
    journal.mark_complete()
    overwrite_record(path, 1, erased)
    flush, errors = os.fdatasync, [errno.EIO]

    def fdatasync(descriptor: int) -> None:
        flush(descriptor)
        if errors:
            raise OSError(errors.pop(), "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    journal.put(0, b"other", 2, NOW)
    assert wait_until(lambda: not errors)
    journal.close()  # which writes what could not be

    journal = opened(folder, 8)
    assert [entry.key for entry in listed(journal)] == [b"other"]
    assert journal.unknown_slots()[1], "bytes that nothing will erase"
    journal.close()
