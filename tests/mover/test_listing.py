"""Publishing the rows that a tier holds to the coordinator: a few one by one, the others in row tables."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nixl_tiers.memory.key_hash import KeyHash
from nixl_tiers.memory.row_table import RowTable, RowTableError
from nixl_tiers.mover import listing as module
from nixl_tiers.mover.child import _read
from nixl_tiers.mover.listing import IDLE_S, MAX_TABLES, POLL_S, BuiltTable, IndexBuilder, IndexPublisher
from nixl_tiers.mover.protocol import MAX_PACKET, Finished, Listed, ListedTable, SendQueue, ToCoordinator, encode
from nixl_tiers.tiers.base import GONE, Entry, PackedEntries
from tests.mover.stub_tiers import InstantTier
from tests.support.waiting import until

HASH = KeyHash.random()


@pytest.fixture(autouse=True)
def few_single_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SINGLE_ROWS", 2)


@pytest.fixture
def no_leaks() -> Iterator[None]:
    gc.collect()  # garbage of other tests
    before, mapped = descriptors(), mapped_tables()
    yield
    assert descriptors() <= before
    assert mapped_tables() <= mapped


def descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def mapped_tables() -> int:
    return sum("nixl_tiers_rows" in line for line in Path("/proc/self/maps").read_text().splitlines())


def entries(first: int, end: int) -> list[Entry]:
    return [Entry(n, b"%d" % n, 10 * n) for n in range(first, end)]


def built(builder: IndexBuilder) -> BuiltTable:
    builder.build()
    tables: list[BuiltTable] = []
    until(lambda: tables.extend(filter(None, [builder.built()])) or tables, "the table")
    assert not builder.building
    return tables[0]


@pytest.mark.usefixtures("no_leaks")
class TestIndexBuilder:
    def test_the_first_rows_are_sent_singly_and_the_others_in_a_table(self) -> None:
        builder = IndexBuilder(HASH, 10)
        assert builder.add(entries(0, 2)) == entries(0, 2)
        assert builder.add(entries(2, 5)) == builder.add(entries(5, 8)) == []
        assert builder.pending == 6
        table = built(builder)
        assert (table.newest, table.left_out, builder.pending, builder.tables) == (70, [], 0, 1)
        with RowTable.attach(table.fd) as attached:
            assert [attached.find(b"%d" % n) for n in range(9)] == [
                None,
                None,
                *((n, 10 * n) for n in range(2, 8)),
                None,
            ]
        builder.close()

    def test_keys_may_have_any_length(self) -> None:
        builder = IndexBuilder(HASH, 10)
        builder.add(entries(0, 2))
        keys = [b"\0", b"a" * 112, b"bc\0", b"\xff"]
        builder.add([Entry(n, key, n) for n, key in enumerate(keys)])
        with RowTable.attach(built(builder).fd) as attached:
            assert attached.coldest(9) == [(key, n) for n, key in enumerate(keys)]
        builder.close()

    def test_packed_entries_are_as_good_as_a_list(self) -> None:
        rows = [*entries(2, 40), Entry(40, b"a" * 112, 1 << 33), Entry(41, b"bc\0", 3)]
        records = np.zeros((len(rows), 113), np.uint8)
        for record, entry in zip(records, rows, strict=True):
            record[: 1 + len(entry.key)] = np.frombuffer(bytes([len(entry.key)]) + entry.key, np.uint8)
        packed = PackedEntries(np.array([row.slot for row in rows]), np.array([row.tick for row in rows]), records)
        assert [*packed] == rows
        assert [*packed[3:5], packed[-1]] == [*rows[3:5], rows[-1]]
        builder = IndexBuilder(HASH, 100)
        assert builder.add(packed[:2]) == rows[:2]  # sent one by one
        for place in range(2, len(rows)):
            assert builder.add(packed[place : place + 1]) == []
        builder.add([Entry(50, b"in a list", 3)])
        assert builder.pending == len(rows) - 1
        table = built(builder)
        assert table.newest == 1 << 33
        with RowTable.attach(table.fd) as attached:
            expected = sorted([*rows[2:], Entry(50, b"in a list", 3)], key=lambda row: row.tick)
            assert attached.coldest(99) == [(row.key, row.slot) for row in expected]
        builder.close()

    def test_rows_without_a_free_slot_are_left_out(self) -> None:
        builder = IndexBuilder(HASH, 4)
        builder.add(entries(0, 2))
        builder.add([*entries(2, 6), Entry(3, b"again", 99), Entry(1 << 40, b"far", 1)])
        table = built(builder)
        assert sorted(key for _, key in table.left_out) == [b"3", b"4", b"5", b"far"]
        os.close(table.fd)
        builder.close()

    def test_removed_rows_are_sent_at_once(self) -> None:
        builder = IndexBuilder(HASH, 10)
        builder.add(entries(0, 2))
        gone = Entry(-1, b"gone", 0)
        assert builder.add([*entries(2, 4), gone]) == [gone]
        assert builder.pending == 2
        builder.close()

    def test_close_while_a_table_is_built_leaks_nothing(self) -> None:
        builder = IndexBuilder(HASH, 10)
        builder.add(entries(0, 2))
        builder.add(entries(2, 4))
        builder.build()
        builder.close()
        builder._worker.shutdown(wait=True)


class ListingTier(InstantTier):
    """Its listing consists of these batches."""

    def __init__(self, *batches: list[Entry]) -> None:
        self.batches = list(batches)
        self.dropped: list[tuple[int, bytes]] = []

    def list_rows(self) -> Iterator[list[Entry]]:
        while self.batches:
            yield self.batches.pop(0)

    def delete(self, entries: object) -> None:
        self.dropped += entries  # type: ignore[operator]


class PublisherRig:
    """A publisher on a socket, with a clock of its own."""

    def __init__(self, tier: ListingTier, slots: int = 100) -> None:
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.setblocking(False)
        self.theirs = theirs
        self.send_queue = SendQueue(theirs)
        self.builder = IndexBuilder(HASH, slots)
        self.publisher = IndexPublisher(tier, self.send_queue, 7, self.builder, lambda: None)
        self.now = 100.0

    def run(self, duration_s: float = 0.0) -> list[ToCoordinator | RowTable]:
        """Step for `duration_s` of its clock, which stands still while a table is built. Returns the messages, and
        the tables in place of theirs."""
        received: list[ToCoordinator | RowTable] = []
        end = self.now + duration_s
        self.ours.setblocking(False)
        while self.now <= end:
            self.publisher.step(self.now)
            self.now += POLL_S
            end += POLL_S * self.builder.building
            try:
                packet, fds, _, _ = socket.recv_fds(self.ours, MAX_PACKET, 1)
            except BlockingIOError:
                continue
            message, table = _read(packet, fds)
            received.append(message if table is None else table)
        return received

    def close(self) -> None:
        self.publisher.close()
        self.send_queue.close()
        self.ours.close()
        self.theirs.close()


def row_counts(received: list[ToCoordinator | RowTable]) -> list[object]:
    """Rows in each message; negative for tables; "end" for the last."""
    found: list[object] = []
    for each in received:
        if isinstance(each, RowTable):
            found.append(-len(each))
            each.close()
        else:
            assert isinstance(each, Listed)
            assert each.epoch == 7
            found.append("end" if each.last else len(each.entries))
    return found


@pytest.mark.usefixtures("no_leaks")
class TestIndexPublisher:
    def test_a_short_listing_is_sent_row_by_row(self) -> None:
        rig = PublisherRig(ListingTier(entries(0, 1), [], entries(1, 2)))
        assert row_counts(rig.run(1.0)) == [1, 1, "end"]
        rig.close()

    def test_a_long_listing_ends_with_a_table(self) -> None:
        rig = PublisherRig(ListingTier(entries(0, 2), entries(2, 5), [], entries(5, 9)))
        assert row_counts(rig.run(1.0)) == [2, -7, "end"]
        rig.close()

    def test_an_idle_listing_sends_a_table_of_pending_rows(self) -> None:
        pause = [[]] * int(2 * IDLE_S / POLL_S)
        rig = PublisherRig(ListingTier(entries(0, 2), entries(2, 5), *pause, entries(5, 9)))
        assert row_counts(rig.run(4 * IDLE_S)) == [2, -3, -4, "end"]
        rig.close()

    def test_the_number_of_tables_is_bounded(self) -> None:
        pause = [[]] * int(2 * IDLE_S / POLL_S)
        parts = [part for n in range(2, 12) for part in (entries(n, n + 1), *pause)]
        rig = PublisherRig(ListingTier(entries(0, 2), *parts))
        counts = row_counts(rig.run(25 * IDLE_S))
        assert counts == [2, *[-1] * (MAX_TABLES - 1), -(10 - MAX_TABLES + 1), "end"]
        rig.close()

    def test_rows_without_a_free_slot_are_deleted(self) -> None:
        tier = ListingTier(entries(0, 2), entries(2, 9))
        rig = PublisherRig(tier, slots=7)
        assert row_counts(rig.run(1.0)) == [2, -5, "end"]
        assert sorted(tier.dropped) == [(7, b"7"), (8, b"8")]
        rig.close()

    def test_changes_are_sent_one_by_one(self) -> None:
        tier = ListingTier(entries(0, 2), entries(2, 9))
        tier.__class__ = type("Shared", (ListingTier,), {"relist_s": 5.0})
        rig = PublisherRig(tier)
        assert row_counts(rig.run(1.0)) == [2, -7, "end"]
        tier.batches = [entries(20, 24)]
        assert row_counts(rig.run(6.0)) == [4]
        rig.close()

    def test_upkeep_follows_the_listing_and_what_it_removes_is_sent(self) -> None:
        tier = ListingTier(entries(0, 2))
        rounds: list[float] = []

        def maintain(_: ListingTier) -> Iterator[list[Entry]]:
            rounds.append(rig.now)
            yield []
            yield [Entry(GONE, b"%d" % len(rounds), 0)]

        tier.__class__ = type("Maintained", (ListingTier,), {"maintain": maintain, "maintain_s": 5.0})
        rig = PublisherRig(tier)
        assert row_counts(rig.run(4.0)) == [2, "end"]
        assert rounds == []
        assert row_counts(rig.run(8.0)) == [1, 1]
        assert rounds[1] - rounds[0] == pytest.approx(5.0, abs=4 * POLL_S)
        rig.close()

    def test_a_table_is_queued_while_the_coordinator_does_not_read(self) -> None:
        rig = PublisherRig(ListingTier(entries(0, 2), entries(2, 9)))
        rig.publisher.step(rig.now)
        while not rig.send_queue:
            rig.send_queue.send(Finished(1, bytes(1000), 0.0))
        rig.builder.add(entries(2, 4))
        table = built(rig.builder)
        rig.send_queue.send(ListedTable(7, table.newest), table.fd)
        waiting = len(rig.send_queue)
        assert waiting >= 2
        found = []
        rig.ours.setblocking(False)
        while not found:
            rig.send_queue.flush()
            packet, fds, _, _ = socket.recv_fds(rig.ours, MAX_PACKET, 1)
            message, attached = _read(packet, fds)
            if attached is not None:
                found.append((message, len(attached)))
                attached.close()
        assert found == [(ListedTable(7, 30), 2)]
        rig.close()

    def test_a_queued_table_is_closed_when_the_coordinator_is_gone(self) -> None:
        rig = PublisherRig(ListingTier())
        while not rig.send_queue:
            rig.send_queue.send(Finished(1, bytes(1000), 0.0))
        rig.builder.add(entries(0, 2))
        rig.builder.add(entries(2, 4))
        table = built(rig.builder)
        rig.send_queue.send(ListedTable(7, table.newest), table.fd)
        rig.close()
        late = os.dup(0)
        rig.send_queue.send(ListedTable(7, 0), late)
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(late)


@pytest.mark.usefixtures("no_leaks")
class TestReading:
    @pytest.mark.parametrize("packet", [b"nonsense", encode(ListedTable(1, 2))])
    def test_a_descriptor_that_is_no_table_is_closed(self, packet: bytes) -> None:
        with pytest.raises(Exception, match=r"not a memfd|decode|Expected|malformed|Input|trailing"):
            _read(packet, [os.open("/dev/null", os.O_RDONLY)])

    def test_an_unexpected_descriptor_is_closed(self) -> None:
        _read(encode(Finished(1, b"", 0.0)), [os.open("/dev/null", os.O_RDONLY)])

    def test_a_table_without_a_descriptor_is_an_error(self) -> None:
        with pytest.raises(RowTableError, match="no descriptor"):
            _read(encode(ListedTable(1, 2)), [])
