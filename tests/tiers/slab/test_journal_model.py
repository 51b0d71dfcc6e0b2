"""The journal against a plain model: kills, clean closes and power failures at any moment, then it is opened again.

The journal's thread is run step by step, so that a step is the same each time. Every write since the last flush is
recorded; a power failure keeps, loses or tears any of them, sector by sector. When the disk fails to take what the page
cache holds, whole pages are again as they were flushed last, and only the next flush is an error.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nixl_tiers.base.chunk import PAGE
from nixl_tiers.tiers.folder import Folder
from nixl_tiers.tiers.slab import journal as journal_module
from nixl_tiers.tiers.slab import journal_file
from nixl_tiers.tiers.slab.journal import Journal
from nixl_tiers.tiers.slab.journal_file import NAME, Header, JournalFile
from tests.support.journals import records, records_of

SLOTS = 6
SECTOR = 512
TORN = b"not a row"
KEYS = [b"key-%d" % number * (1 + number % 3) for number in range(8)]

slots = st.integers(0, SLOTS - 1)
keys = st.sampled_from(KEYS)


class Disk:
    """What was written to one file, and what of it is durable."""

    def __init__(self) -> None:
        self.durable = b""
        self.writes: list[tuple[int, bytes]] = []  # since the last flush
        self.denies = ""  # "records" or "all": such writes are I/O errors
        self.lost = False  # what had been written, which no flush has reported yet

    def lose_power(self, choose: Callable[[int], int]) -> bytes:
        """The file afterwards. `choose(n)`: a number below n."""
        content = bytearray(self.durable)
        sectors: dict[int, list[tuple[int, bytes]]] = {}
        for offset, raw in self.writes:
            for start in range(offset, offset + len(raw), SECTOR):
                at = start - start % SECTOR
                part = raw[max(at, offset) - offset : at + SECTOR - offset]
                sectors.setdefault(at, []).append((max(at, offset), part))
        for parts in sectors.values():  # each sector independently: so they are lost and reordered
            for offset, raw in parts[: choose(len(parts) + 1)]:
                torn = raw[: choose(len(raw))] if choose(4) == 0 else raw
                content.extend(bytes(max(0, offset + len(torn) - len(content))))
                content[offset : offset + len(torn)] = torn
        return bytes(content)

    def lose_pages(self, content: bytes, choose: Callable[[int], int]) -> bytes:
        """The same file after the disk has not taken some of its dirty pages. `choose` as above."""
        after = bytearray(content)
        for at in range(0, len(content), PAGE):
            dirty = any(offset < at + PAGE and at < offset + len(raw) for offset, raw in self.writes)
            if dirty and choose(2) == 0:
                size = min(PAGE, len(content) - at)
                after[at : at + size] = self.durable[at : at + size].ljust(size, b"\0")
                self.lost = True
        return bytes(after)


class RecordedFile(JournalFile):
    """Keeps what it writes in `disk`, which may deny it."""

    disk: Disk

    def _write_at(self, raw: bytes, offset: int) -> None:
        if self.disk.denies == "all" or (self.disk.denies == "records" and offset):
            raise OSError(5, "Input/output error")
        super()._write_at(raw, offset)
        self.disk.writes.append((offset, raw))


class StepThread:
    """In place of the journal's thread: `join` is its end; the test runs its steps."""

    def __init__(self, target: Callable[[], None], **_: Any) -> None:
        self._target = target

    def start(self) -> None:
        pass

    def join(self) -> None:
        self._target()


class JournalModel(RuleBasedStateMachine):
    """`bytes_in`: the key whose bytes are in each slot. `held`: what the caller knows of each slot.

    While the journal's thread runs, the caller may act whenever that thread is about to take the lock (`interrupt`).
    """

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp())
        self.folder = Folder.base(self.path)
        self.boot = 1
        self.salts = 0
        self.disk = Disk()
        self.bytes_in: dict[int, bytes] = {}
        self.bytes_before: dict[int, bytes] = {}
        self.held: dict[int, bytes] = {}
        self.tick = 1
        self.ticks: dict[int, int] = {}
        self.overwriting: dict[int, bytes] = {}
        self.right = True  # the file: all was written since the last power failure or I/O error
        self.lost = False  # what was written since it was opened, or before
        self.interrupts: list[tuple[int, Callable[[], None]]] = []
        RecordedFile.disk = self.disk
        self.patches = pytest.MonkeyPatch()
        model = self

        class Lock(threading.Condition):  # type: ignore[misc]  # named so to be the model's
            def __enter__(self) -> bool:
                model._before_lock()
                return super().__enter__()

        threads = SimpleNamespace(Thread=StepThread, Condition=Lock)
        self.patches.setattr(journal_module, "threading", threads)
        self.patches.setattr(journal_module, "JournalFile", RecordedFile)
        self.patches.setattr(journal_file, "boot_id", lambda: self.boot.to_bytes(16, "big"))
        # The same in each run, as damage that writes what is there already is none.
        self.patches.setattr(journal_file, "secrets", SimpleNamespace(randbits=lambda bits: self._salt()))
        self.patches.setattr(os, "fdatasync", self._flushed)

    def _salt(self) -> int:
        self.salts += 1
        return 0x9E3779B97F4A7C15 * self.salts % 2**64

    def _flushed(self, descriptor: int) -> None:
        self.disk.durable, self.disk.writes = (self.path / NAME).read_bytes(), []
        lost, self.disk.lost = self.disk.lost, False
        if lost:
            raise OSError(5, "Input/output error")

    def _before_lock(self) -> None:
        if self.interrupts:
            (count, act), *later = self.interrupts
            self.interrupts = [] if not count else [(count - 1, act), *later]
            if not count:
                act()
                self.interrupts = later

    def teardown(self) -> None:
        self.patches.undo()
        self.folder.close()
        shutil.rmtree(self.path)

    @initialize()
    def start(self) -> None:
        self._open()

    def _open(self) -> None:
        """Open it, list it, and recover unknown slots from the bytes in them, as a shard does."""
        self.lost = self.disk.lost
        self.journal = Journal(self.folder, SLOTS)
        listing = self.journal.list_rows()
        found: dict[int, bytes] = {}
        ticks = []
        while (batch := next(listing, None)) is not None:
            self.journal._turn(closing=False)  # a flush may report here what the disk has lost before
            for entry in batch:
                assert entry.slot not in found
                found[entry.slot] = entry.key
                ticks.append(entry.tick)
                assert self.journal.holds(entry.slot, entry.key)
        assert ticks == sorted(ticks)
        assert len(set(found.values())) == len(found)  # no key in two slots
        unknown = self.journal.unknown_slots()
        assert not any(unknown[slot] for slot in found)
        for slot in np.flatnonzero(unknown).tolist():
            key = self.bytes_in.get(slot)
            if key and key != TORN:
                if self.journal.duplicates([key]).any():
                    self.journal.mark_garbage(slot, self.tick)
                else:
                    found[slot] = key
                    self.journal.put(slot, key, self.tick, self.tick)
        # After a kill: no row over other bytes, and none that was held is lost but to a later copy. A row may still be
        # recorded that was erased just before.
        if self.right:
            assert all(self.bytes_in[slot] in (key, b"") for slot, key in found.items())
            assert set(self.held.values()) <= set(found.values())
        self.journal.mark_empty(np.ones(SLOTS, np.bool_), self.tick)
        self.journal.mark_complete()
        self.held = {}
        for slot, key in found.items():  # a row over other bytes is a miss
            if self.bytes_in.get(slot) == key:
                self.held[slot] = key
            else:
                self.journal.remove(slot, key)
        self.overwriting.clear()
        self.tick += 1

    @rule(chosen=st.dictionaries(slots, keys, min_size=1))
    def begin_stores(self, chosen: dict[int, bytes]) -> None:
        for slot, key in chosen.items():
            if slot not in self.overwriting and key not in (*self.held.values(), *self.overwriting.values()):
                if slot in self.held:
                    self.journal.remove(slot, self.held.pop(slot))
                self.journal.start_overwrite(slot)
                self.overwriting[slot] = key

    @rule(chosen=st.dictionaries(slots, keys, min_size=1), written=st.booleans())
    def store(self, chosen: dict[int, bytes], written: bool) -> None:
        """From begin to end."""
        self.begin_stores(chosen)
        self.write()
        self.finish_stores()
        if written:
            self.write()

    @rule()
    def transfer(self) -> None:
        """Of all that may be made now."""
        for slot, key in self.overwriting.items():
            if self.journal.may_overwrite([slot]):
                assert self.lost or self.journal._failing or slot not in records(self.path / NAME)
                self.bytes_before[slot] = self.bytes_in.get(slot, b"")
                self.bytes_in[slot] = key

    @rule()
    def end_stores(self) -> None:
        for slot, key in [*self.overwriting.items()]:
            if self.bytes_in.get(slot) == key and self.journal.may_overwrite([slot]):
                del self.overwriting[slot]
                self.journal.put(slot, key, self.tick, self.tick)
                self.held[slot] = key
                self.tick += 1

    def finish_stores(self) -> None:
        self.transfer()
        self.end_stores()

    @rule(slot=slots)
    def remove(self, slot: int) -> None:
        if slot in self.held:
            self.journal.remove(slot, self.held.pop(slot))

    @rule(slot=slots)
    def erase(self, slot: int) -> None:
        if slot not in self.overwriting:
            self.held.pop(slot, None)
            self.bytes_in[slot] = self.bytes_before[slot] = b""  # and flushed
            self.journal.mark_erased(slot)

    @rule(touched=st.sets(slots))
    def touch(self, touched: set[int]) -> None:
        self.journal.touch(sorted(touched), [self.tick] * len(touched))
        self.tick += 1

    @rule(
        acts=st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["begin", "finish", "remove"])), max_size=4),
        data=st.data(),
    )
    def write_while_the_caller_acts(self, acts: list[tuple[int, str]], data: st.DataObject) -> None:
        """A turn of the journal's thread, interrupted: (how often it takes the lock before, what the caller does)."""
        chosen = data.draw(st.dictionaries(slots, keys, min_size=1))
        calls = {
            "begin": lambda: self.begin_stores(chosen),
            "finish": self.finish_stores,
            "remove": lambda: self.remove(min(chosen)),
        }
        self.interrupts = [(pause, calls[act]) for pause, act in acts]
        self.write()
        self.interrupts = []

    @rule(chosen=st.dictionaries(slots, keys, min_size=1), pauses=st.tuples(st.integers(0, 4), st.integers(0, 6)))
    def store_in_one_turn(self, chosen: dict[int, bytes], pauses: tuple[int, int]) -> None:
        """Of the journal's thread: over rows that it is about to write."""
        self.touch(set(chosen))
        self.interrupts = [(pauses[0], lambda: self.begin_stores(chosen)), (pauses[1], self.finish_stores)]
        self.write()
        self.interrupts = []

    def write(self) -> None:
        self.journal._rewrite_at_s = 0.0
        self.journal._turn(closing=False)
        self._judge()

    def _judge(self) -> None:
        self.right = not self.journal._failing and not self.lost and (self.right or not self.disk.denies)

    @rule(what=st.sampled_from(["", "records", "all"]))
    def deny_writes(self, what: str) -> None:
        self.disk.denies = what

    @rule(data=st.data())
    def lose_what_was_written(self, data: st.DataObject) -> None:
        """The disk fails to take some of it from the page cache, which reads it from the disk again."""
        file = self.path / NAME
        if file.exists():
            file.write_bytes(self.disk.lose_pages(file.read_bytes(), lambda n: data.draw(st.integers(0, n - 1))))
            self.lost |= self.disk.lost
            self.right &= not self.lost

    @rule(chosen=st.dictionaries(slots, keys, min_size=1), how=st.sampled_from(["closed", "killed"]), data=st.data())
    def store_over_erased_slots_and_lose_it(self, chosen: dict[int, bytes], how: str, data: st.DataObject) -> None:
        for slot in chosen:
            self.erase(slot)
        self.write()
        if how == "closed":
            self.open_again(how, data)
            self.touch(set(chosen))
        self.store(chosen, written=True)
        self.lose_what_was_written(data)
        self.open_again(how, data)

    @rule(
        chosen=st.dictionaries(slots, keys, min_size=1),
        what=st.sampled_from(["records", "all"]),
        how=st.sampled_from(["closed", "killed"]),
        data=st.data(),
    )
    def store_over_erased_slots_and_fail(
        self, chosen: dict[int, bytes], what: str, how: str, data: st.DataObject
    ) -> None:
        for slot in chosen:
            self.erase(slot)
        self.write()
        self.deny_writes(what)
        self.begin_stores(chosen)
        self.write()
        self.finish_stores()
        self.open_again(how, data)

    @rule(how=st.sampled_from(["closed", "killed", "power", "damaged"]), data=st.data())
    def open_again(self, how: str, data: st.DataObject) -> None:
        if how in {"closed", "damaged"}:
            self.journal.close()
            self._judge()
        else:
            os.close(self.journal._file._descriptor)
        self.disk.denies = ""
        file = self.path / NAME
        if how == "damaged":  # somebody writes over a part of it
            raw = bytearray(file.read_bytes())
            at = data.draw(st.sampled_from([0, *(4096 + 128 * slot for slot in range(SLOTS))]) | st.integers(0, 5000))
            raw[at : at + 40] = data.draw(st.binary(min_size=1, max_size=40))
            file.write_bytes(raw)
        if how == "power" and file.exists():
            file.write_bytes(self.disk.lose_power(lambda n: data.draw(st.integers(0, n - 1))))
            self.boot += 1
            self.right = False
            for slot in range(SLOTS):  # slabs are not flushed either
                lost = data.draw(st.sampled_from(["", "", "to the bytes before", "torn"]))
                if lost and self.bytes_in.get(slot):
                    self.bytes_in[slot] = self.bytes_before.get(slot, b"") if lost != "torn" else TORN
        if how in {"power", "damaged"} and file.exists():
            self.disk.durable, self.disk.writes = file.read_bytes(), []
        self._open()

    @precondition(lambda self: hasattr(self, "journal"))
    @invariant()
    def columns_say_what_is_held(self) -> None:
        for slot in range(SLOTS):
            key = self.held.get(slot)
            assert self.journal.holds(slot, key) if key else not self.journal.tags[slot]
            if self.bytes_in.get(slot) and slot not in self.overwriting:
                assert self.journal.sealed_at[slot], "bytes that nothing will erase"

    @precondition(lambda self: self.right)
    @invariant()
    def file_is_right_for_a_kill_now(self) -> None:
        raw = (self.path / NAME).read_bytes()
        header = Header.read(raw)
        if header is None:
            return
        trusted = header.flushed or header.boot == journal_file.boot_id()
        for slot, record in records_of(raw).items():
            there = self.bytes_in.get(slot, b"")
            if record.key:
                assert there in (record.key, b"")
            elif trusted:
                assert slot not in self.held
                assert record.sealed_at or not there, "bytes that nothing will erase"


TestJournal = JournalModel.TestCase
TestJournal.settings = settings(max_examples=50, stateful_step_count=40)
