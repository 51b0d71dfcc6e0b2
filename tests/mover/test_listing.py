"""What a mover tells the coordinator: the rows that its tier holds, and how its jobs end."""

from __future__ import annotations

import gc
import math
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.seal import Sealer
from nixl_tiers.mover import listing as module
from nixl_tiers.mover.child import _read
from nixl_tiers.mover.jobs import REPORT_S, RunningJobs
from nixl_tiers.mover.listing import POLL_S, IndexPublisher
from nixl_tiers.mover.protocol import (
    MAX_PACKET,
    Finished,
    Listed,
    ListedColumns,
    Load,
    RowsEnded,
    SendQueue,
    decode_to_coordinator,
    encode,
)
from nixl_tiers.tiers.base import GONE, EndedMoves, Entry, FinishedBatch, Move, PackedEntries
from tests.mover.harness import NAMESPACE, entries_in, key_of
from tests.mover.stub_tiers import InstantTier, StubConfig


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
    def test_keys_may_have_any_length_and_slots_and_ticks_any_value(self) -> None:
        rows = [Entry(n, key, 1 << 33) for n, key in enumerate([b"\0", b"a" * 112, b"bc\0", b"\xff"])]
        far = Entry(1 << 40, b"far", -1)
        rig = PublisherRig(ListingTier(rows[:1], packed(rows[1:], 120), [far]))
        beyond = Entry((1 << 32) - 1, b"far", 0)  # no slot that any tier has: the core has it deleted
        assert rig.run(1.0) == [("columns", [*rows, beyond]), ("end", [])]
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


def test_packed_entries_are_as_good_as_a_list() -> None:
    rows = [*entries(2, 40), Entry(40, b"a" * 112, 1 << 33), Entry(41, b"bc\0", 3)]
    assert [*packed(rows)] == [*PackedEntries.of(rows)] == rows
    assert [*packed(rows)[3:5], packed(rows)[-1]] == [*rows[3:5], rows[-1]]
    assert [*PackedEntries.joined([packed(rows[:3], 20), packed(rows[3:])])] == rows
    assert [*PackedEntries.of([])] == []


# --- what it reports of the jobs that it runs, and when

OK, FAILED = Outcome.OK, Outcome.FAILED
GEOMETRY = Geometry(2, 4096, sub_blocks=2)


class JobsRig(InstantTier):
    """A tier whose moves end as the test says, and what is reported of its jobs."""

    def __init__(self, region: HostRegion) -> None:
        super().__init__(StubConfig(type="stub", stub="InstantTier"), region.geometry, region)
        self.moves_ended: list[EndedMoves] = []
        self.sent: list[RowsEnded | Finished] = []
        self.jobs = RunningJobs(self, region, self.sent.append)

    def ended_moves(self) -> Sequence[EndedMoves]:
        ended, self.moves_ended = self.moves_ended, []
        return ended

    def report(self, now: float, *finished: FinishedBatch, **ended: Outcome) -> list[RowsEnded | Finished]:
        """`ended`: of the first batch, by place."""
        if ended:
            self.moves_ended.append(EndedMoves(1, {int(place[1:]): outcome for place, outcome in ended.items()}))
        self.sent.clear()
        self.jobs.report(finished, now)
        return [*self.sent]


@pytest.fixture
def rig() -> Iterator[JobsRig]:
    with HostRegion.create(GEOMETRY, 8) as region:
        rig, sealer = JobsRig(region), Sealer(GEOMETRY, NAMESPACE, 0)
        for row in range(region.rows):
            sealer.seal(region.rows_view[row], key_of(row), sealed_at=1)
        rig.jobs.begin(Load(7, [Move(row, row, key_of(row)) for row in (5, 4, 3, 2)]), 10.0)
        yield rig


def test_rows_are_reported_once_a_while_after_they_have_ended(rig: JobsRig) -> None:
    rig.report(11.0, _1=OK)
    rig.report(11.01, _3=FAILED)
    assert rig.report(11.0 + REPORT_S) == [RowsEnded(7, [4, 2], bytes([OK, FAILED]))]
    assert rig.jobs.report_at_s == math.inf
    assert rig.report(12.0) == []
    rig.report(13.0, _0=OK)
    assert rig.report(13.0 + REPORT_S) == [RowsEnded(7, [5], bytes([OK]))]
    assert rig.report(14.0, FinishedBatch(1, [OK, OK, OK, FAILED])) == [Finished(7, bytes([OK]), 4.0)]


def test_missing_sub_blocks_are_named_by_their_place_in_each_report(rig: JobsRig) -> None:
    sealer = Sealer(GEOMETRY, NAMESPACE, 0)
    region = rig.jobs._region
    for row in (4, 2):
        sealer.seal(region.rows_view[row], key_of(row), present=GEOMETRY.present(1), sealed_at=1)
    rig.report(10.0, _0=OK, _1=OK)
    assert rig.report(11.0) == [RowsEnded(7, [5, 4], bytes([OK, OK]), [(1, 1)])]
    assert rig.report(12.0, FinishedBatch(1, [OK] * 4)) == [Finished(7, bytes([OK, OK]), 2.0, [(1, 1)])]


def test_a_job_with_rows_outside_the_region_is_refused(rig: JobsRig) -> None:
    with pytest.raises(ValueError, match="outside the region"):
        rig.jobs.begin(Load(9, [Move(8, 0, b"key")]), 10.0)
