"""The journals of two parts against a plain model: kills at every write, clean closes, power failures, errors of the
disk and a full one at any moment, an engine of before this version in between; then they are opened again.

Records are written by the C of the package, whose writes are seen (tests/support/hooked.py), both as the native
worker's threads do it and as NIXL's way does. A power failure keeps, loses or tears any write since the last flush,
sector by sector. When the disk fails to take what the page cache holds, whole pages are again as they were flushed
last, and only the next flush is an error.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from numpy.typing import NDArray

from nixl_tiers.base.chunk import PAGE
from nixl_tiers.tiers import disk
from nixl_tiers.tiers.folder import Folder
from nixl_tiers.tiers.slab import journal as journal_module
from nixl_tiers.tiers.slab.journal import EMPTY, NAME, RECORD_BYTES, ROW, SLOT, Header, Journal, JournalFile
from tests.support.by_hand import HandPool
from tests.support.hooked import CUT, FLUSH, slab_writes
from tests.support.journals import Record, encode, overwrite_record, records_of

SLOTS = 6
SECTOR = 512
TORN = b"not a row"
KEYS = [b"key-%d" % number * (1 + number % 3) for number in range(8)]
EIO = errno.EIO

parts = st.sampled_from([0, 1])
slots = st.integers(0, SLOTS - 1)
keys = st.sampled_from(KEYS)
stores = st.dictionaries(slots, keys, min_size=1)
ways = st.sampled_from(["worker", "NIXL"])
Choose = Callable[[int], int]
"""A number below this one."""


class Disk:
    """What was written to one file, and what of it is durable."""

    def __init__(self) -> None:
        self.durable = b""
        self.writes: list[tuple[int, bytes]] = []  # since the last flush
        self.denies = ""  # "records" or "all": such writes are I/O errors
        self.denied = False  # one was
        self.lost = False  # what had been written, which no flush has reported yet

    def write(self, at: int, raw: bytes) -> int:
        if self.denies == "all" or (self.denies and at):
            self.denied = True
            return EIO
        self.writes.append((at, raw))
        return 0

    def flush(self, content: bytes) -> int:
        self.durable, self.writes = content, []
        lost, self.lost = self.lost, False
        return EIO if lost else 0

    def lose_power(self, choose: Choose) -> bytes:
        """The file afterwards."""
        content = bytearray(self.durable)
        sectors: dict[int, list[tuple[int, bytes]]] = {}
        for offset, raw in self.writes:
            for start in range(offset - offset % SECTOR, offset + len(raw), SECTOR):
                first, end = max(start, offset), min(start + SECTOR, offset + len(raw))
                sectors.setdefault(start, []).append((first, raw[first - offset : end - offset]))
        for written in sectors.values():  # each sector independently: so they are lost and reordered
            for offset, raw in written[: choose(len(written) + 1)]:
                torn = raw[: choose(len(raw))] if choose(4) == 0 else raw
                content.extend(bytes(max(0, offset + len(torn) - len(content))))
                content[offset : offset + len(torn)] = torn
        return bytes(content)

    def lose_pages(self, content: bytes, choose: Choose) -> bytes:
        """The same file after the disk has not taken some of its dirty pages."""
        after = bytearray(content)
        for at in range(0, len(content), PAGE):
            dirty = any(offset < at + PAGE and at < offset + len(raw) for offset, raw in self.writes)
            if dirty and choose(2) == 0:
                size = min(PAGE, len(content) - at)
                after[at : at + size] = self.durable[at : at + size].ljust(size, b"\0")
                self.lost = True
        return bytes(after)


class RecordedFile(JournalFile):
    """`interrupt`: what the caller does before the next amendments are written."""

    interrupt: ClassVar[list[Callable[[], None]]] = []
    disks: ClassVar[dict[Path, Disk]] = {}

    def amend(self, changes: NDArray[np.void], *, everything: bool = False) -> int:
        if self.interrupt:
            self.interrupt.pop(0)()
        return super().amend(changes, everything=everything)


class Part:
    """`bytes_in`: the key whose bytes are in each slot. `held`: what the caller knows of each slot. `overwriting`: the
    keys of stores that have not begun to be written. `room`: how many slots are allocated."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.path = path / NAME
        self.folder = Folder.base(path)
        self.disk = RecordedFile.disks[self.path] = Disk()
        self.bytes_in: dict[int, bytes] = {}
        self.bytes_before: dict[int, bytes] = {}
        self.held: dict[int, bytes] = {}
        self.overwriting: dict[int, bytes] = {}
        self.erasing: set[int] = set()  # now or by the last call: that may be gone
        self.room = SLOTS - 2
        self.right = True  # the file: all was written since the last power failure or I/O error
        self.lost = False  # what was written since it was opened, or before

    def content(self) -> bytes:
        return self.path.read_bytes()

    def has(self, descriptor: int) -> bool:
        return self.path.exists() and os.path.samestat(os.fstat(descriptor), self.path.stat())

    def open(self, tick: int) -> None:
        """Open it, list it, and recover unknown slots from the bytes in them, as a shard does."""
        self.lost = self.disk.lost
        allocated = np.arange(SLOTS) < self.room
        journal = self.journal = Journal(self.folder, SLOTS, allocated)
        journal.file.grow(self.room)
        entries = [entry for batch in journal.list_rows() for entry in batch]
        found = {entry.slot: entry.key for entry in entries}
        assert all(journal.holds(slot, key) for slot, key in found.items())
        assert [entry.tick for entry in entries] == sorted(entry.tick for entry in entries)
        assert len(set(found.values())) == len(found) == len(entries), "a key in two slots"
        unknown = ~journal.known
        assert not any(unknown[slot] for slot in found)
        seen = []
        for slot in np.flatnonzero(unknown & allocated).tolist():
            key = self.bytes_in.get(slot)
            if key and key != TORN:
                if journal.duplicates([key]).any() or key in [each for _, each, *_ in seen]:
                    journal.mark_garbage(slot, tick)
                else:
                    seen.append((slot, key, tick, tick))
        if seen:
            error = abs(journal.record(seen))
            journal.stored([(slot, key, at, error) for slot, key, _, at in seen])
            found |= {slot: key for slot, key, *_ in seen}
        # After a kill: no row over other bytes, and none that was held is lost but to a later copy.
        if self.right:
            assert all(self.bytes_in.get(slot) == key for slot, key in found.items()), "a row over other bytes"
            assert set(self.held.values()) <= set(found.values()), "a row is lost"
        journal.mark_empty(allocated, tick)
        journal.complete = True
        self.held, self.overwriting = {}, {}
        for slot, key in found.items():  # a row over other bytes is a miss
            if self.bytes_in.get(slot) == key:
                self.held[slot] = key
            else:
                journal.remove(slot, key)
        self.judge()

    def judge(self, *, written: bool = False) -> None:
        """Whether the file is right: `written`: all that was missing is there."""
        self.right = not self.lost and not self.disk.denied and (self.right or written)

    def begin(self, chosen: dict[int, bytes]) -> None:
        for slot, key in chosen.items():
            fresh = key not in (*self.held.values(), *self.overwriting.values())
            if fresh and slot < self.room and slot not in self.overwriting:
                if slot in self.held:
                    self.remove(slot)
                self.journal.start_overwrite(slot)
                self.overwriting[slot] = key

    def move(self, way: str, library: Any, tick: int) -> None:
        """All that is to be stored."""
        chosen, self.overwriting = self.overwriting, {}
        if not chosen:
            return
        journal, places = self.journal, sorted(chosen)
        made = [(slot, chosen[slot], tick, tick) for slot in places]
        if way == "worker":
            wanted = (ctypes.c_uint32 * len(places))(*places)
            forgotten = library.nixl_tiers_test_forget(ctypes.c_void_p(journal.file.writer), wanted, len(places))
        else:
            forgotten = journal.forget(places)
        self.judge()
        if forgotten < 0:  # nothing is written
            for slot in places:
                journal.mark_garbage(slot, tick)
            return
        for slot in places:
            self.bytes_before[slot] = self.bytes_in.get(slot, b"")
            self.bytes_in[slot] = chosen[slot]
        if way == "worker":
            rows = np.zeros(len(made), SLOT)
            for place, (slot, key, *_) in enumerate(made):
                rows[place] = (0, tick, slot, tick, ROW, len(key), key.ljust(112, b"\0"), b"")
            address = ctypes.c_void_p(rows.ctypes.data)
            error = library.nixl_tiers_test_record(ctypes.c_void_p(journal.file.writer), address, len(made))
        else:
            error = journal.record(made)
        self.judge()
        journal.stored([(slot, key, at, abs(error)) for slot, key, _, at in made])
        self.held |= chosen

    def remove(self, slot: int) -> None:
        if slot in self.held:
            self.journal.remove(slot, self.held.pop(slot))

    def erase(self, chosen: set[int]) -> None:
        """As a shard does it, which flushes the zeroes."""
        places = sorted(slot for slot in chosen if slot < self.room and slot not in self.overwriting)
        self.erasing = set(places)
        forgotten = self.journal.forget(places)
        self.judge()
        if forgotten < 0:
            return
        for slot in places:
            self.bytes_in[slot] = self.bytes_before[slot] = b""
        self.journal.forget(places, EMPTY)
        self.judge()
        self.journal.mark_erased(places)
        for slot in places:
            self.held.pop(slot, None)
        self.erasing = set()

    def write(self) -> None:
        self.disk.denied = self.disk.denied and bool(self.disk.denies)
        written = self.journal.write()
        # What is about to be stored into keeps its record until then, which may be wrong after a power failure.
        self.judge(written=written and not self.overwriting)

    def leaf(self) -> tuple[Any, ...]:
        """What a kill leaves now."""
        held = {slot: key for slot, key in self.held.items() if slot not in self.erasing}
        return self.content(), dict(self.bytes_in), dict(self.bytes_before), held, self.right

    def kill(self, leaf: tuple[Any, ...] | None = None) -> None:
        content, self.bytes_in, self.bytes_before, self.held, self.right = leaf or self.leaf()
        self.judge()
        self.journal.file.close()
        self.path.write_bytes(content)

    def close(self) -> None:
        self.disk.denied = self.disk.denied and bool(self.disk.denies)
        self.journal.mark_empty(np.arange(SLOTS) < self.room)  # as a shard does it
        self.journal.close()
        self.judge(written=not self.disk.denied)


class JournalModel(RuleBasedStateMachine):
    library: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp())
        self.boot = 1
        self.salts = 0
        self.tick = 1
        self.pause = -1  # hooked writes before the kill
        self.leaves: list[tuple[Any, ...]] = []
        self.stack = ExitStack()
        self.c = self.stack.enter_context(slab_writes(self.library, self.hook))
        patch = self.stack.enter_context(pytest.MonkeyPatch.context())
        RecordedFile.interrupt.clear()
        RecordedFile.disks.clear()
        patch.setattr(journal_module, "JournalFile", RecordedFile)
        patch.setattr(journal_module, "CHUNK_RECORDS", 4)
        patch.setattr(journal_module, "ThreadPoolExecutor", lambda *_, **__: HandPool(at_once=True))
        patch.setattr(journal_module, "boot_id", lambda: self.boot.to_bytes(16, "big"))
        patch.setattr(journal_module, "_EXTENT_BYTES", 2 * RECORD_BYTES)
        # The same in each run, as damage that writes what is there already is none.
        patch.setattr(journal_module, "secrets", SimpleNamespace(randbits=lambda bits: self._salt()))
        self.fallocate, self.full = disk.fallocate, False
        patch.setattr(disk, "fallocate", lambda *a: errno.ENOSPC if self.full else self.fallocate(*a))
        self.parts = [Part(self.path / name) for name in ("one", "two")]

    def _salt(self) -> int:
        self.salts += 1
        return 0x9E3779B97F4A7C15 * self.salts % 2**64

    def hook(self, what: int, descriptor: int, raw: bytes, at: int) -> int:
        self.pause -= 1
        if not self.pause:
            self.leaves = [part.leaf() for part in self.parts]
        (part,) = [part for part in self.parts if part.has(descriptor)]
        return {FLUSH: lambda: part.disk.flush(part.content()), CUT: int}.get(what, lambda: part.disk.write(at, raw))()

    def teardown(self) -> None:
        for part in self.parts:
            part.kill()
            part.folder.close()
        self.stack.close()
        shutil.rmtree(self.path)

    @initialize()
    def start(self) -> None:
        for part in self.parts:
            part.open(self.tick)

    def next_tick(self) -> int:
        self.tick += 1
        return self.tick

    # --- what a caller does -------------------------------------------------------------------------------------------

    @rule(part=parts, chosen=stores)
    def begin_stores(self, part: int, chosen: dict[int, bytes]) -> None:
        self.parts[part].begin(chosen)

    @rule(part=parts, way=ways)
    def move(self, part: int, way: str) -> None:
        self.parts[part].move(way, self.c, self.next_tick())

    @rule(part=parts, chosen=stores, way=ways, written=st.booleans())
    def store(self, part: int, chosen: dict[int, bytes], way: str, written: bool) -> None:
        self.parts[part].begin(chosen)
        self.move(part, way)
        if written:
            self.parts[part].write()

    @rule(part=parts, slot=slots)
    def remove(self, part: int, slot: int) -> None:
        self.parts[part].remove(slot)

    @rule(part=parts, chosen=st.sets(slots))
    def erase(self, part: int, chosen: set[int]) -> None:
        self.parts[part].erase(chosen)

    @rule(part=parts, touched=st.sets(slots))
    def touch(self, part: int, touched: set[int]) -> None:
        self.parts[part].journal.touch(sorted(touched), [self.next_tick()] * len(touched))

    @rule(part=parts)
    def write(self, part: int) -> None:
        self.parts[part].write()

    @rule(part=parts, full=st.booleans())
    def grow(self, part: int, full: bool) -> None:
        """As the slabs do."""
        self.full = full
        with suppress(OSError):
            self.parts[part].journal.file.grow(SLOTS)
            self.parts[part].room = SLOTS
        self.full = False

    @rule(
        part=parts,
        chosen=stores,
        acts=st.lists(
            st.sampled_from(["begin", "store", "remove", "remove and store", "erase"]), min_size=1, max_size=3
        ),
        way=ways,
    )
    def write_while_the_caller_acts(self, part: int, chosen: dict[int, bytes], acts: list[str], way: str) -> None:
        """Between what is to be written is chosen and the write of it."""
        one = self.parts[part]
        slot = min(chosen)

        def again() -> None:
            """Into the slot in which it was."""
            key = one.held.get(slot)
            one.remove(slot)
            if key is not None:
                one.begin({slot: key})
                one.move(way, self.c, self.tick)

        def erase() -> None:
            """Nothing is stored into it meanwhile."""
            later, RecordedFile.interrupt[:] = RecordedFile.interrupt[:], []
            one.erase({slot})
            RecordedFile.interrupt[:] = later

        calls = {
            "begin": lambda: one.begin(chosen),
            "store": lambda: (one.begin(chosen), one.move(way, self.c, self.tick)),
            "remove": lambda: one.remove(slot),
            "remove and store": again,
            "erase": erase,
        }
        one.journal.touch(sorted(one.held), [self.next_tick()] * len(one.held))
        RecordedFile.interrupt[:] = [partial(calls[act]) for act in acts]
        one.write()
        RecordedFile.interrupt.clear()

    # --- what happens to it -------------------------------------------------------------------------------------------

    @rule(
        part=parts,
        chosen=stores,
        what=st.sampled_from(["store", "erase", "write"]),
        way=ways,
        pause=st.integers(1, 6),
    )
    def kill_at_a_write(self, part: int, chosen: dict[int, bytes], what: str, way: str, pause: int) -> None:
        one = self.parts[part]
        if what == "write":
            for slot in chosen:
                one.remove(slot)
        self.pause, self.leaves = pause, []
        {
            "store": lambda: (one.begin(chosen), self.move(part, way)),
            "erase": lambda: one.erase(set(chosen)),
            "write": one.write,
        }[what]()
        self.pause = -1
        for each, leaf in zip(self.parts, self.leaves or [None, None], strict=True):
            each.kill(leaf)
            self._open(each)

    @rule(part=parts, what=st.sampled_from(["", "records", "all"]))
    def deny_writes(self, part: int, what: str) -> None:
        self.parts[part].disk.denies = what

    @rule(part=parts, data=st.data())
    def lose_what_was_written(self, part: int, data: st.DataObject) -> None:
        """The disk fails to take some of it from the page cache, which reads it from the disk again."""
        one = self.parts[part]
        one.path.write_bytes(one.disk.lose_pages(one.content(), _chooser(data)))
        one.lost |= one.disk.lost
        one.judge()

    @rule(part=parts, how=st.sampled_from(["closed", "killed", "power", "damaged"]), data=st.data())
    def open_again(self, part: int, how: str, data: st.DataObject) -> None:
        one = self.parts[part]
        if how in {"closed", "damaged"}:
            one.close()
        else:
            one.kill()
        if how == "damaged":  # somebody writes over a part of it
            raw = bytearray(one.content())
            at = data.draw(st.sampled_from([0, *(PAGE + 128 * slot for slot in range(SLOTS))]) | st.integers(0, 5000))
            raw[at : at + 40] = data.draw(st.binary(min_size=1, max_size=40))
            one.path.write_bytes(raw)
        if how == "power":
            one.path.write_bytes(one.disk.lose_power(_chooser(data)))
            self.boot += 1  # of both parts' machine: the other one's process ended too, but nothing of its file is lost
            one.right = False
            for slot in range(SLOTS):  # slabs are not flushed either
                lost = data.draw(st.sampled_from(["", "", "to the bytes before", "torn"]))
                if lost and one.bytes_in.get(slot):
                    one.bytes_in[slot] = one.bytes_before.get(slot, b"") if lost != "torn" else TORN
            other = self.parts[1 - part]
            other.kill()
            self._open(other)
        if how in {"power", "damaged"}:
            one.disk.durable, one.disk.writes = one.content(), []
        self._open(one)

    @rule(part=parts, chosen=stores, closed=st.booleans(), recorded=st.sets(slots))
    def run_the_version_before(self, part: int, chosen: dict[int, bytes], closed: bool, recorded: set[int]) -> None:
        """Which is killed, or closes the file."""
        one = self.parts[part]
        one.close()
        header = Header.read(one.content())
        if header is None or not one.right:
            return self._open(one)
        room = (len(one.content()) - PAGE) // RECORD_BYTES
        for slot, key in chosen.items():
            if slot < min(room, one.room) and key not in one.held.values():
                self.tick += 1
                one.bytes_in[slot] = one.held[slot] = key
                known = closed or slot in recorded  # a record that was not written before the kill
                raw = encode(slot, Record(key, self.tick, self.tick), header.salt) if known else bytes(RECORD_BYTES)
                overwrite_record(one.path, slot, raw)
        raw = header._replace(boot=journal_module.boot_id(), flushed=closed).pack()
        one.path.write_bytes(raw + one.content()[PAGE:])
        one.disk.durable, one.disk.writes = one.content(), []
        return self._open(one)

    def _open(self, one: Part) -> None:
        one.disk.denies, one.disk.denied = "", False
        one.open(self.next_tick())

    @precondition(lambda self: hasattr(self.parts[1], "journal"))
    @invariant()
    def columns_say_what_is_held(self) -> None:
        for one in self.parts:
            for slot in range(SLOTS):
                key = one.held.get(slot)
                assert one.journal.holds(slot, key) if key else not one.journal.tags[slot]
                if one.bytes_in.get(slot) and slot not in one.overwriting:
                    assert one.journal.sealed_at[slot], "bytes that nothing will erase"

    @precondition(lambda self: hasattr(self.parts[1], "journal"))
    @invariant()
    def files_are_right_for_a_kill_now(self) -> None:
        """Also for the version before, which reads them so."""
        for one in self.parts:
            raw = one.content() if one.right else b""
            header = Header.read(raw)
            trusted = header is not None and (header.flushed or header.boot == journal_module.boot_id())
            for slot, record in records_of(raw).items():
                if record.key:
                    assert one.bytes_in.get(slot) == record.key, "a row over other bytes"
                elif trusted:
                    assert slot not in one.held, "a row is lost"
                    assert record.sealed_at or not one.bytes_in.get(slot), "bytes that nothing will erase"


def _chooser(data: st.DataObject) -> Choose:
    return lambda below: data.draw(st.integers(0, below - 1))


@pytest.fixture(scope="module", autouse=True)
def _library(library: str) -> None:
    JournalModel.library = library


TestJournal = JournalModel.TestCase
TestJournal.settings = settings(max_examples=50, stateful_step_count=40)
