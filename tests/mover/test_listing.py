"""Publishing the rows that a tier holds to the coordinator: in columns at first, what changes one by one."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nixl_tiers.memory.columns import ColumnsError
from nixl_tiers.mover import listing as module
from nixl_tiers.mover.child import _read
from nixl_tiers.mover.listing import IDLE_S, POLL_S, IndexPublisher
from nixl_tiers.mover.protocol import (
    MAX_PACKET,
    Finished,
    Listed,
    ListedColumns,
    SendQueue,
    decode_to_coordinator,
    encode,
)
from nixl_tiers.tiers.base import GONE, Entry, PackedEntries
from tests.mover.harness import entries_in
from tests.mover.stub_tiers import InstantTier


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    gc.collect()  # garbage of other tests
    before, mapped = descriptors(), mapped_columns()
    yield
    assert descriptors() <= before
    assert mapped_columns() <= mapped


def descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def mapped_columns() -> int:
    return sum("nixl_tiers_listing" in line for line in Path("/proc/self/maps").read_text().splitlines())


def entries(first: int, end: int) -> list[Entry]:
    return [Entry(n, b"%d" % n, 10 * n) for n in range(first, end)]


def packed(rows: list[Entry], width: int = 113) -> PackedEntries:
    records = np.zeros((len(rows), width), np.uint8)
    for record, entry in zip(records, rows, strict=True):
        record[: 1 + len(entry.key)] = np.frombuffer(bytes([len(entry.key)]) + entry.key, np.uint8)
    return PackedEntries(np.array([row.slot for row in rows]), np.array([row.tick for row in rows]), records)


class ListingTier(InstantTier):
    """Its listing consists of these batches."""

    def __init__(self, *batches: list[Entry] | PackedEntries) -> None:
        self.batches = list(batches)

    def list_rows(self) -> Iterator[list[Entry] | PackedEntries]:  # type: ignore[override]
        while self.batches:
            yield self.batches.pop(0)


class PublisherRig:
    """A publisher on a socket, with a clock of its own."""

    def __init__(self, tier: ListingTier) -> None:
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.setblocking(False)
        self.theirs = theirs
        self.send_queue = SendQueue(theirs)
        self.publisher = IndexPublisher(tier, self.send_queue, 7, lambda: None)
        self.now = 100.0

    def run(self, duration_s: float = 0.0) -> list[tuple[str, list[Entry]]]:
        """Step for `duration_s` of its clock. Returns the messages: ("columns", "single" or "end", rows)."""
        received: list[tuple[str, list[Entry]]] = []
        end = self.now + duration_s
        self.ours.setblocking(False)
        while self.now <= end:
            self.publisher.step(self.now)
            self.now += POLL_S
            try:
                packet, fds, _, _ = socket.recv_fds(self.ours, MAX_PACKET, 1)
            except BlockingIOError:
                continue
            message = decode_to_coordinator(packet)
            assert isinstance(message, Listed | ListedColumns)
            assert message.epoch == 7
            if isinstance(message, ListedColumns):
                received.append(("columns", entries_in(fds[0])))
            else:
                received.append(("end" if message.last else "single", message.entries))
        return received

    def close(self) -> None:
        self.publisher.close()
        self.send_queue.close()
        self.ours.close()
        self.theirs.close()


class TestIndexPublisher:
    @pytest.mark.parametrize("batches", [[entries(0, 1), entries(1, 9)], [packed(entries(0, 4)), entries(4, 9)]])
    def test_a_listing_is_sent_in_columns(self, batches: list[list[Entry] | PackedEntries]) -> None:
        rig = PublisherRig(ListingTier(*batches))
        assert rig.run(1.0) == [("columns", entries(0, 9)), ("end", [])]
        rig.close()

    def test_keys_may_have_any_length_and_slots_and_ticks_any_value(self) -> None:
        rows = [Entry(n, key, 1 << 33) for n, key in enumerate([b"\0", b"a" * 112, b"bc\0", b"\xff"])]
        far = Entry(1 << 40, b"far", -1)
        rig = PublisherRig(ListingTier(rows[:1], packed(rows[1:], 120), [far]))
        beyond = Entry((1 << 32) - 1, b"far", 0)  # no slot that any tier has: the core has it deleted
        assert rig.run(1.0) == [("columns", [*rows, beyond]), ("end", [])]
        rig.close()

    def test_an_idle_listing_sends_what_it_has(self) -> None:
        pause: list[list[Entry] | PackedEntries] = [[]] * int(2 * IDLE_S / POLL_S)
        rig = PublisherRig(ListingTier(entries(0, 5), *pause, entries(5, 9)))
        assert rig.run(4 * IDLE_S) == [("columns", entries(0, 5)), ("columns", entries(5, 9)), ("end", [])]
        rig.close()

    def test_a_long_listing_is_sent_in_parts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "ROWS_AT_ONCE", 4)
        rig = PublisherRig(ListingTier(*(entries(n, n + 2) for n in range(0, 10, 2))))
        parts = [("columns", entries(0, 4)), ("columns", entries(4, 8)), ("columns", entries(8, 10)), ("end", [])]
        assert rig.run(1.0) == parts
        rig.close()

    def test_rows_that_have_gone_are_sent_at_once(self) -> None:
        gone = Entry(GONE, b"gone", 0)
        rig = PublisherRig(ListingTier([*entries(0, 2), gone], entries(2, 3)))
        assert rig.run(1.0) == [("single", [gone]), ("columns", entries(0, 3)), ("end", [])]
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
        assert [kind for kind, _ in rig.run(4.0)] == ["columns", "end"]
        assert rounds == []
        assert [kind for kind, _ in rig.run(8.0)] == ["single", "single"]
        assert rounds[1] - rounds[0] == pytest.approx(5.0, abs=4 * POLL_S)
        rig.close()

    def test_columns_are_queued_while_the_coordinator_does_not_read_and_nothing_is_listed_meanwhile(self) -> None:
        tier = ListingTier(entries(0, 5))
        rig = PublisherRig(tier)
        while not rig.send_queue:
            rig.send_queue.send(Finished(1, bytes(1000), 0.0))
        waiting = len(rig.send_queue)
        rig.publisher.step(rig.now)
        assert (len(rig.send_queue), len(tier.batches)) == (waiting, 1)
        rig.publisher._collected = [packed(entries(0, 5))]
        rig.publisher._send_collected()
        found: list[list[Entry]] = []
        rig.ours.setblocking(False)
        while not found:
            rig.send_queue.flush()
            _, fds, _, _ = socket.recv_fds(rig.ours, MAX_PACKET, 1)
            found += [entries_in(fd) for fd in fds]
        assert found == [entries(0, 5)]
        rig.close()

    def test_queued_columns_are_closed_when_the_coordinator_is_gone(self) -> None:
        rig = PublisherRig(ListingTier())
        while not rig.send_queue:
            rig.send_queue.send(Finished(1, bytes(1000), 0.0))
        rig.publisher._collected = [packed(entries(0, 5))]
        rig.publisher._send_collected()
        rig.close()
        late = os.dup(0)
        rig.send_queue.send(ListedColumns(7), late)
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(late)


class TestReading:
    @pytest.mark.parametrize("packet", [b"nonsense", encode(ListedColumns(1))])
    def test_a_descriptor_that_holds_no_columns_is_closed(self, packet: bytes) -> None:
        with pytest.raises(Exception, match=r"not a memfd|decode|Expected|malformed|Input|trailing"):
            _read(memoryview(packet), [os.open("/dev/null", os.O_RDONLY)])

    def test_columns_without_a_descriptor_are_an_error(self) -> None:
        with pytest.raises(ColumnsError, match="no descriptor"):
            _read(memoryview(encode(ListedColumns(1))), [])


def test_packed_entries_are_as_good_as_a_list() -> None:
    rows = [*entries(2, 40), Entry(40, b"a" * 112, 1 << 33), Entry(41, b"bc\0", 3)]
    assert [*packed(rows)] == [*PackedEntries.of(rows)] == rows
    assert [*packed(rows)[3:5], packed(rows)[-1]] == [*rows[3:5], rows[-1]]
    assert [*PackedEntries.joined([packed(rows[:3], 20), packed(rows[3:])])] == rows
    assert [*PackedEntries.of([])] == []
