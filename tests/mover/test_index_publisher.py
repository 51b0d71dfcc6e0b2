"""What a tier holds on its way to the engine: a few rows one by one, the others in tables."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from nixl_tiers.memory.cold_index import ColdIndexError, SharedColdIndex, key_digest
from nixl_tiers.mover import index_builder as module
from nixl_tiers.mover.child import _read
from nixl_tiers.mover.index_builder import IndexBuilder, PublishedIndex
from nixl_tiers.mover.index_publisher import LOOK_S, MAX_TABLES, PAUSE_S, IndexPublisher
from nixl_tiers.mover.protocol import MAX_PACKET, Finished, Listed, ListedIndex, ToCoordinator, encode
from nixl_tiers.mover.send_queue import SendQueue
from nixl_tiers.tiers.base import Entry
from tests.mover.toys import Quick
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOLD_ROWS", 2)


@pytest.fixture
def nothing_leaks() -> Iterator[None]:
    gc.collect()  # what other tests have left
    before, mapped = descriptors(), tables()
    yield
    assert descriptors() <= before
    assert tables() <= mapped


def descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def tables() -> int:
    """How many are mapped."""
    return sum("nixl_tiers_index" in line for line in Path("/proc/self/maps").read_text().splitlines())


def entries(first: int, end: int) -> list[Entry]:
    return [Entry(n, b"%d" % n, 10 * n) for n in range(first, end)]


def built(adoption: IndexBuilder) -> PublishedIndex:
    adoption.build()
    table: list[PublishedIndex] = []
    until(lambda: table.extend(filter(None, [adoption.built()])) or table, "the table")
    assert not adoption.building
    return table[0]


@pytest.mark.usefixtures("nothing_leaks")
class TestAdoption:
    def test_the_first_rows_are_told_and_the_others_come_as_a_table(self) -> None:
        adoption = IndexBuilder(10, named=False)
        assert adoption.take(entries(0, 2)) == entries(0, 2)
        assert adoption.take(entries(2, 5)) == adoption.take(entries(5, 8)) == []
        assert adoption.collected == 6
        told = built(adoption)
        assert (told.newest, told.left_out, adoption.collected, adoption.tables) == (70, [], 0, 1)
        with SharedColdIndex.attach(told.fd) as table:
            assert [table.find(b"%d" % n) for n in range(9)] == [None, None, *((n, 10 * n) for n in range(2, 8)), None]
        assert adoption.keys([(n, key_digest(b"%d" % n)) for n in range(9)]) == [(n, b"%d" % n) for n in range(2, 8)]
        adoption.close()

    def test_every_table_can_be_asked_for_its_keys(self) -> None:
        adoption = IndexBuilder(10, named=False)
        adoption.take(entries(0, 2))
        for first in (2, 4, 6):
            adoption.take(entries(first, first + 2))
            os.close(built(adoption).fd)
        assert [key for _, key in adoption.keys([(n, key_digest(b"%d" % n)) for n in (7, 2, 5)])] == [b"7", b"2", b"5"]
        adoption.close()

    def test_keys_of_any_length_may_be_asked_for(self) -> None:
        adoption = IndexBuilder(10, named=True)
        adoption.take(entries(0, 2))
        keys = [b"\0", b"a" * 112, b"bc\0", b"\xff"]
        adoption.take([Entry(n, key, n) for n, key in enumerate(keys)])
        with SharedColdIndex.attach(built(adoption).fd) as table:
            assert table.named
            assert table.coldest(9) == [(key, n) for n, key in enumerate(keys)]
        adoption.close()

    def test_rows_that_have_no_place_are_for_the_medium_to_forget(self) -> None:
        adoption = IndexBuilder(4, named=False)
        adoption.take(entries(0, 2))
        adoption.take([*entries(2, 6), Entry(3, b"again", 99), Entry(1 << 40, b"far", 1)])
        told = built(adoption)
        assert sorted(key for _, key in told.left_out) == [b"3", b"4", b"5", b"far"]
        os.close(told.fd)
        adoption.close()

    def test_what_is_gone_is_told_at_once(self) -> None:
        adoption = IndexBuilder(10, named=False)
        adoption.take(entries(0, 2))
        gone = Entry(-1, b"gone", 0)
        assert adoption.take([*entries(2, 4), gone]) == [gone]
        assert adoption.collected == 2
        adoption.close()

    def test_a_table_that_nobody_waits_for_any_more_is_closed(self) -> None:
        adoption = IndexBuilder(10, named=False)
        adoption.take(entries(0, 2))
        adoption.take(entries(2, 4))
        adoption.build()
        adoption.close()
        adoption._worker.shutdown(wait=True)
        for table, _, _ in adoption._kept:  # it was ready before it was told to close, or after
            table.close()


class ListedQuick(Quick):
    """Lists these batches."""

    def __init__(self, *batches: list[Entry]) -> None:
        self.batches = list(batches)
        self.dropped: list[tuple[int, bytes]] = []

    def list_rows(self) -> Iterator[list[Entry]]:
        while self.batches:
            yield self.batches.pop(0)

    def delete(self, entries: object) -> None:
        self.dropped += entries  # type: ignore[operator]


class Line:
    """A teller on a socket, and a clock."""

    def __init__(self, tier: ListedQuick, slots: int = 100) -> None:
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.setblocking(False)
        self.theirs = theirs
        self.outbox = SendQueue(theirs)
        self.adoption = IndexBuilder(slots, named=False)
        self.teller = IndexPublisher(tier, self.outbox, 7, self.adoption, lambda: None)
        self.now = 100.0

    def hear(self, patience_s: float = 0.0) -> list[ToCoordinator | SharedColdIndex]:
        """Step for `patience_s` of its clock, which stands still while a table is built; what it said, or the table."""
        heard: list[ToCoordinator | SharedColdIndex] = []
        end = self.now + patience_s
        self.ours.setblocking(False)
        while self.now <= end:
            self.teller.step(self.now)
            self.now += LOOK_S
            end += LOOK_S * self.adoption.building
            try:
                packet, fds, _, _ = socket.recv_fds(self.ours, MAX_PACKET, 1)
            except BlockingIOError:
                continue
            message, table = _read(packet, fds)
            heard.append(message if table is None else table)
        return heard

    def close(self) -> None:
        self.teller.close()
        self.outbox.hang_up()
        self.ours.close()
        self.theirs.close()


def kinds(heard: list[ToCoordinator | SharedColdIndex]) -> list[object]:
    """Numbers of rows told; of tables, negative; "end"."""
    found: list[object] = []
    for each in heard:
        if isinstance(each, SharedColdIndex):
            found.append(-len(each))
            each.close()
        else:
            assert isinstance(each, Listed)
            assert each.epoch == 7
            found.append("end" if each.last else len(each.entries))
    return found


@pytest.mark.usefixtures("nothing_leaks")
class TestTeller:
    def test_a_short_listing_is_told_row_by_row(self) -> None:
        line = Line(ListedQuick(entries(0, 1), [], entries(1, 2)))
        assert kinds(line.hear(1.0)) == [1, 1, "end"]
        line.close()

    def test_a_long_one_ends_with_a_table(self) -> None:
        line = Line(ListedQuick(entries(0, 2), entries(2, 5), [], entries(5, 9)))
        assert kinds(line.hear(1.0)) == [2, -7, "end"]
        assert line.teller.keys([(0, key_digest(b"8"))]) == [(0, b"8")]
        line.close()

    def test_a_listing_that_pauses_tells_what_it_has(self) -> None:
        wait = [[]] * int(2 * PAUSE_S / LOOK_S)
        line = Line(ListedQuick(entries(0, 2), entries(2, 5), *wait, entries(5, 9)))
        assert kinds(line.hear(4 * PAUSE_S)) == [2, -3, -4, "end"]
        line.close()

    def test_the_engine_gets_no_more_than_a_few_tables(self) -> None:
        wait = [[]] * int(2 * PAUSE_S / LOOK_S)
        parts = [part for n in range(2, 12) for part in (entries(n, n + 1), *wait)]
        line = Line(ListedQuick(entries(0, 2), *parts))
        heard = kinds(line.hear(25 * PAUSE_S))
        assert heard == [2, *[-1] * (MAX_TABLES - 1), -(10 - MAX_TABLES + 1), "end"]
        line.close()

    def test_rows_without_a_place_are_dropped(self) -> None:
        tier = ListedQuick(entries(0, 2), entries(2, 9))
        line = Line(tier, slots=7)
        assert kinds(line.hear(1.0)) == [2, -5, "end"]
        assert sorted(tier.dropped) == [(7, b"7"), (8, b"8")]
        line.close()

    def test_changes_are_told_one_by_one(self) -> None:
        tier = ListedQuick(entries(0, 2), entries(2, 9))
        tier.__class__ = type("Shared", (ListedQuick,), {"relist_s": 5.0})
        line = Line(tier)
        assert kinds(line.hear(1.0)) == [2, -7, "end"]
        tier.batches = [entries(20, 24)]
        assert kinds(line.hear(6.0)) == [4]
        line.close()

    def test_a_table_waits_for_an_engine_that_does_not_read(self) -> None:
        line = Line(ListedQuick(entries(0, 2), entries(2, 9)))
        line.teller.step(line.now)
        while not line.outbox:
            line.outbox.send(Finished(1, bytes(1000), 0.0))
        line.adoption.take(entries(2, 4))
        told = built(line.adoption)
        line.outbox.send(ListedIndex(7, told.newest), told.fd)
        waiting = len(line.outbox)
        assert waiting >= 2
        found = []
        line.ours.setblocking(False)
        while not found:
            line.outbox.flush()
            packet, fds, _, _ = socket.recv_fds(line.ours, MAX_PACKET, 1)
            message, table = _read(packet, fds)
            if table is not None:
                found.append((message, len(table)))
                table.close()
        assert found == [(ListedIndex(7, 30), 2)]
        line.close()

    def test_a_table_for_an_engine_that_has_gone_is_closed(self) -> None:
        line = Line(ListedQuick())
        while not line.outbox:
            line.outbox.send(Finished(1, bytes(1000), 0.0))
        line.adoption.take(entries(0, 2))
        line.adoption.take(entries(2, 4))
        told = built(line.adoption)
        line.outbox.send(ListedIndex(7, told.newest), told.fd)
        line.close()
        late = os.dup(0)
        line.outbox.send(ListedIndex(7, 0), late)
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(late)


@pytest.mark.usefixtures("nothing_leaks")
class TestReading:
    @pytest.mark.parametrize("packet", [b"nonsense", encode(ListedIndex(1, 2))])
    def test_a_descriptor_that_is_no_table_is_closed(self, packet: bytes) -> None:
        with pytest.raises(Exception, match=r"not a memfd|decode|Expected|malformed|Input|trailing"):
            _read(packet, [os.open("/dev/null", os.O_RDONLY)])

    def test_a_descriptor_that_nobody_asked_for_is_closed(self) -> None:
        _read(encode(Finished(1, b"", 0.0)), [os.open("/dev/null", os.O_RDONLY)])

    def test_a_table_without_a_descriptor(self) -> None:
        with pytest.raises(ColdIndexError, match="no descriptor"):
            _read(encode(ListedIndex(1, 2)), [])
