"""The journal: the newest change of a slot counts, and changes survive a restart."""

from __future__ import annotations

import shutil
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from nixl_tiers.testing.medium import folder_bytes
from nixl_tiers.tiers.base import MAX_ENTRIES, Entry
from nixl_tiers.tiers.slab.journal import Journal
from nixl_tiers.tiers.slab.journal_file import journal_bytes

SLOTS = 10_000
NOW = 1_795_000_000


def listed(journal: Journal) -> list[Entry]:
    return [entry for batch in journal.list_rows() for entry in batch]


def reopened(folder: Path, slots: int = SLOTS) -> dict[int, tuple[bytes, int]]:
    journal = Journal(folder, slots)
    try:
        return {entry.slot: (entry.key, entry.tick) for entry in listed(journal)}
    finally:
        journal.close()


def test_newest_change_of_a_slot_counts(tmp_path: Path) -> None:
    journal = Journal(tmp_path, SLOTS)
    journal.put(1, b"a", 1, NOW)
    journal.put(1, b"b", 2, NOW)
    journal.put(2, b"c", 3, NOW)
    journal.remove(2, b"c")
    journal.put(3, b"d", 4, NOW)
    journal.remove(3, b"not d")
    journal.put(4, b"e", 5, NOW)
    journal.touch([4, 2], [9, 9])
    journal.close()
    assert reopened(tmp_path) == {1: (b"b", 2), 3: (b"d", 4), 4: (b"e", 9)}


def test_changes_apply_to_rows_already_in_the_file(tmp_path: Path) -> None:
    journal = Journal(tmp_path, SLOTS)
    for slot in range(8):
        journal.put(slot, b"k%d" % slot, slot, NOW)
    journal.close()
    journal = Journal(tmp_path, SLOTS)
    journal.remove(0, b"k0")
    journal.remove(1, b"other")
    journal.start_overwrite(2)
    journal.start_overwrite(3)
    journal.put(3, b"new", 50, NOW)
    journal.touch([4, 5, 2], [60, 1, 61])
    journal.put(6, b"brief", 70, NOW)
    journal.remove(6, b"brief")  # and the older row of that slot does not come back
    journal.close()
    found = reopened(tmp_path)
    assert found == {1: (b"k1", 1), 3: (b"new", 50), 4: (b"k4", 60), 5: (b"k5", 5), 7: (b"k7", 7)}


def test_pending_changes_are_written_at_close(tmp_path: Path) -> None:
    journal = Journal(tmp_path, SLOTS)
    assert listed(journal) == []
    journal.put(1, b"a", 1, NOW)
    journal.close()
    assert reopened(tmp_path) == {1: (b"a", 1)}


def test_listing_is_ordered_and_omits_slots_stored_into_since(tmp_path: Path) -> None:
    rows = 3 * MAX_ENTRIES + 5
    journal = Journal(tmp_path, SLOTS)
    for slot in range(rows):
        journal.put(slot, b"key%d" % slot, rows - slot, NOW)
    journal.close()
    journal = Journal(tmp_path, SLOTS)
    batches = journal.list_rows()
    first = next(batch for batch in batches if batch)
    assert [entry.slot for entry in first] == list(range(rows - 1, rows - 1 - MAX_ENTRIES, -1))
    journal.start_overwrite(0)  # about to be overwritten
    journal.start_overwrite(1)
    journal.put(1, b"new", 10**6, NOW)
    rest = [entry for batch in batches for entry in batch]
    assert [entry.slot for entry in rest] == list(range(rows - 1 - MAX_ENTRIES, 1, -1))
    journal.close()


def test_journal_is_complete_only_after_a_clean_close(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 8)
    assert not journal.complete  # a new file beside old slabs
    assert listed(journal) == []
    assert journal.unknown_slots().all()
    journal.mark_complete()
    for slot in range(4):
        journal.put(slot, b"k%d" % slot, slot + 1, NOW)
    journal.remove(1, b"k1")
    journal.close()
    journal = Journal(tmp_path, 8)
    assert journal.complete
    assert [entry.slot for entry in listed(journal)] == [0, 2, 3]
    journal.remove(0, b"k0")
    journal.start_overwrite(2)
    deadline = time.monotonic() + 120
    while _version(tmp_path):
        assert time.monotonic() < deadline
    killed = tmp_path / "killed"  # the files that a mover killed now leaves behind
    killed.mkdir()
    for name in ("manifest.sqlite", "manifest.sqlite-wal"):
        shutil.copy(tmp_path / name, killed / name)
    journal.close()
    assert Journal(tmp_path, 8).complete
    journal = Journal(killed, 8)
    assert not journal.complete
    assert [entry.slot for entry in listed(journal)] == [3]
    journal.start_overwrite(5)
    assert journal.unknown_slots().nonzero()[0].tolist() == [2, 4, 6, 7]
    journal.close()
    assert not Journal(killed, 8).complete  # not marked as complete


def _version(folder: Path) -> int:
    with closing(sqlite3.connect(folder / "manifest.sqlite")) as db:
        return int(db.execute("PRAGMA user_version").fetchone()[0])


def test_slots_beyond_the_capacity_are_not_listed(tmp_path: Path) -> None:
    journal = Journal(tmp_path, SLOTS)
    journal.put(5, b"five", 1, NOW)
    journal.put(6, b"six", 2, NOW)
    journal.close()
    assert reopened(tmp_path, slots=6) == {5: (b"five", 1)}


def test_journal_stays_within_journal_bytes(tmp_path: Path) -> None:
    """With the longest keys, slots in the worst order for a b-tree, everything rewritten; sampled all the time."""
    slots = 4000
    journal = Journal(tmp_path, slots)
    most = [0]
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.001):
            most[0] = max(most[0], folder_bytes(tmp_path))

    thread = threading.Thread(target=look)
    thread.start()
    for lap in range(3):
        for step in range(slots):
            journal.put(step * 1103 % slots, bytes([lap]) * 112, 2**55 + step, NOW)
    journal.close()
    ended.set()
    thread.join()
    assert 0 < most[0] <= journal_bytes(slots)
    assert len(reopened(tmp_path, slots)) == slots


def test_unwritable_file_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "manifest.sqlite").mkdir()
    with pytest.raises(OSError, match=r"manifest\.sqlite"):
        Journal(tmp_path, SLOTS)


def test_sealing_times_are_kept_for_deleted_rows(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 8)
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
        journal = Journal(tmp_path, 8)
        assert [entry.slot for entry in listed(journal)] == [0, 2, 5]
        assert journal.sealed_at.tolist() == stamps
        assert [journal.holds(slot, b"k%d" % slot) for slot in range(6)] == [True, False, True, False, False, True]
        journal.mark_complete()
    journal.close()


def test_journal_with_other_columns_is_replaced(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "manifest.sqlite")) as db:
        db.execute("CREATE TABLE rows (slot INTEGER PRIMARY KEY, key BLOB NOT NULL, tick INTEGER NOT NULL)")
    journal = Journal(tmp_path, 8)
    assert not journal.complete
    journal.put(1, b"a", 1, NOW)
    journal.close()
    assert reopened(tmp_path) == {1: (b"a", 1)}
