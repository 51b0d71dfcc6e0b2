"""The journal: the newest change of a slot decides, and it survives what files survive."""

from __future__ import annotations

import shutil
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from nixl_tiers.tiers.base import MAX_ENTRIES, Entry
from nixl_tiers.tiers.slab.journal import Journal, journal_bytes

SLOTS = 10_000
NOW = 1_795_000_000


def listed(manifest: Journal) -> list[Entry]:
    return [entry for batch in manifest.adopt() for entry in batch]


def reopened(folder: Path, slots: int = SLOTS) -> dict[int, tuple[bytes, int]]:
    manifest = Journal(folder, slots)
    try:
        return {entry.slot: (entry.key, entry.tick) for entry in listed(manifest)}
    finally:
        manifest.close()


def test_the_newest_change_of_a_slot_decides(tmp_path: Path) -> None:
    manifest = Journal(tmp_path, SLOTS)
    manifest.put(1, b"a", 1, NOW)
    manifest.put(1, b"b", 2, NOW)
    manifest.put(2, b"c", 3, NOW)
    manifest.forget(2, b"c")
    manifest.put(3, b"d", 4, NOW)
    manifest.forget(3, b"not d")
    manifest.put(4, b"e", 5, NOW)
    manifest.touch(4, b"e", 9)
    manifest.touch(3, b"not d", 9)
    manifest.close()
    assert reopened(tmp_path) == {1: (b"b", 2), 3: (b"d", 4), 4: (b"e", 9)}


def test_changes_meet_what_is_already_in_the_file(tmp_path: Path) -> None:
    manifest = Journal(tmp_path, SLOTS)
    for slot in range(8):
        manifest.put(slot, b"k%d" % slot, slot, NOW)
    manifest.close()
    manifest = Journal(tmp_path, SLOTS)
    manifest.forget(0, b"k0")
    manifest.forget(1, b"other")
    manifest.forget(2)
    manifest.forget(3)
    manifest.put(3, b"new", 50, NOW)
    manifest.touch(4, b"k4", 60)
    manifest.touch(5, b"other", 61)
    manifest.put(6, b"brief", 70, NOW)
    manifest.forget(6, b"brief")  # nor may the older row of that slot come back
    manifest.close()
    found = reopened(tmp_path)
    assert found == {1: (b"k1", 1), 3: (b"new", 50), 4: (b"k4", 60), 5: (b"k5", 5), 7: (b"k7", 7)}


def test_what_is_pending_is_written_at_close(tmp_path: Path) -> None:
    manifest = Journal(tmp_path, SLOTS)
    assert listed(manifest) == []
    manifest.put(1, b"a", 1, NOW)
    manifest.close()
    assert reopened(tmp_path) == {1: (b"a", 1)}


def test_a_listing_is_ordered_and_leaves_out_what_was_stored_since(tmp_path: Path) -> None:
    rows = 3 * MAX_ENTRIES + 5
    manifest = Journal(tmp_path, SLOTS)
    for slot in range(rows):
        manifest.put(slot, b"key%d" % slot, rows - slot, NOW)
    manifest.close()
    manifest = Journal(tmp_path, SLOTS)
    batches = manifest.adopt()
    first = next(batch for batch in batches if batch)
    assert [entry.slot for entry in first] == list(range(rows - 1, rows - 1 - MAX_ENTRIES, -1))
    manifest.forget(0)  # about to be overwritten
    manifest.forget(1)
    manifest.put(1, b"new", 10**6, NOW)
    rest = [entry for batch in batches for entry in batch]
    assert [entry.slot for entry in rest] == list(range(rows - 1 - MAX_ENTRIES, 1, -1))
    manifest.close()


def test_it_knows_whether_it_can_have_missed_anything(tmp_path: Path) -> None:
    manifest = Journal(tmp_path, 8)
    assert not manifest.whole  # a new file beside old slabs
    assert listed(manifest) == []
    assert manifest.unknown().all()
    manifest.complete()
    for slot in range(4):
        manifest.put(slot, b"k%d" % slot, slot + 1, NOW)
    manifest.forget(1, b"k1")
    manifest.close()
    manifest = Journal(tmp_path, 8)
    assert manifest.whole
    assert [entry.slot for entry in listed(manifest)] == [0, 2, 3]
    manifest.forget(0, b"k0")
    manifest.forget(2)
    deadline = time.monotonic() + 120
    while _version(tmp_path):
        assert time.monotonic() < deadline
    killed = tmp_path / "killed"  # what a mover that is killed now leaves behind
    killed.mkdir()
    for name in ("manifest.sqlite", "manifest.sqlite-wal"):
        shutil.copy(tmp_path / name, killed / name)
    manifest.close()
    assert Journal(tmp_path, 8).whole
    manifest = Journal(killed, 8)
    assert not manifest.whole
    assert [entry.slot for entry in listed(manifest)] == [3]
    manifest.forget(5)
    assert manifest.unknown().nonzero()[0].tolist() == [2, 4, 6, 7]
    manifest.close()
    assert not Journal(killed, 8).whole  # nobody completed it


def _version(folder: Path) -> int:
    with closing(sqlite3.connect(folder / "manifest.sqlite")) as db:
        return int(db.execute("PRAGMA user_version").fetchone()[0])


def test_slots_beyond_the_tier_are_not_listed(tmp_path: Path) -> None:
    manifest = Journal(tmp_path, SLOTS)
    manifest.put(5, b"five", 1, NOW)
    manifest.put(6, b"six", 2, NOW)
    manifest.close()
    assert reopened(tmp_path, slots=6) == {5: (b"five", 1)}


def test_it_stays_within_what_it_is_accounted_for(tmp_path: Path) -> None:
    """The longest keys, slots in the order that is worst for a b-tree, everything rewritten: looked at all the time."""
    slots = 4000
    manifest = Journal(tmp_path, slots)
    most = [0]
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.001):
            most[0] = max(most[0], sum(file.stat().st_size for file in tmp_path.iterdir()))

    thread = threading.Thread(target=look)
    thread.start()
    for lap in range(3):
        for step in range(slots):
            manifest.put(step * 1103 % slots, bytes([lap]) * 112, 2**55 + step, NOW)
    manifest.close()
    ended.set()
    thread.join()
    assert 0 < most[0] <= journal_bytes(slots)
    assert len(reopened(tmp_path, slots)) == slots


def test_a_place_that_cannot_be_written_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "manifest.sqlite").mkdir()
    with pytest.raises(OSError, match=r"manifest\.sqlite"):
        Journal(tmp_path, SLOTS)


def test_it_remembers_when_what_stands_in_a_slot_was_sealed_also_after_it_was_dropped(tmp_path: Path) -> None:
    manifest = Journal(tmp_path, 8)
    for slot in range(5):
        manifest.put(slot, b"k%d" % slot, slot, NOW + slot)
    manifest.forget(1, b"k1")
    manifest.forget(2, b"another")
    manifest.spoil(3, NOW + 33)
    manifest.erase(4)
    manifest.put(5, b"k5", 5, 0)  # a seal without a time
    assert [manifest.holds(slot, b"k%d" % slot) for slot in range(6)] == [True, False, True, False, False, True]
    stamps = [NOW, NOW + 1, NOW + 2, NOW + 33, 0, 1, 0, 0]
    assert manifest.sealed_at.tolist() == stamps
    for _ in range(2):
        manifest.close()
        manifest = Journal(tmp_path, 8)
        assert [entry.slot for entry in listed(manifest)] == [0, 2, 5]
        assert manifest.sealed_at.tolist() == stamps
        assert [manifest.holds(slot, b"k%d" % slot) for slot in range(6)] == [True, False, True, False, False, True]
        manifest.complete()
    manifest.close()


def test_a_journal_of_other_columns_is_replaced(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "manifest.sqlite")) as db:
        db.execute("CREATE TABLE rows (slot INTEGER PRIMARY KEY, key BLOB NOT NULL, tick INTEGER NOT NULL)")
    manifest = Journal(tmp_path, 8)
    assert not manifest.whole
    manifest.put(1, b"a", 1, NOW)
    manifest.close()
    assert reopened(tmp_path) == {1: (b"a", 1)}
