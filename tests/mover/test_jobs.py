"""What a mover reports of the jobs that it runs, and when."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator, Sequence

import pytest

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.memory.seal import Sealer
from nixl_tiers.mover.jobs import REPORT_S, RunningJobs
from nixl_tiers.mover.loop import Mover
from nixl_tiers.mover.protocol import Configure, Finished, Load, RowsEnded
from nixl_tiers.tiers.base import EndedMoves, FinishedBatch, Move
from tests.mover.harness import NAMESPACE, key_of
from tests.mover.stub_tiers import InstantTier, StubConfig

OK, FAILED = Outcome.OK, Outcome.FAILED
GEOMETRY = Geometry(2, 4096, sub_blocks=2)


class Rig(InstantTier):
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
def rig() -> Iterator[Rig]:
    with HostRegion.create(GEOMETRY, 8) as region:
        rig, sealer = Rig(region), Sealer(GEOMETRY, NAMESPACE, 0)
        for row in range(region.rows):
            sealer.seal(region.rows_view[row], key_of(row), sealed_at=1)
        rig.jobs.begin(Load(7, [Move(row, row, key_of(row)) for row in (5, 4, 3, 2)]), 10.0)
        yield rig


def test_a_job_that_ends_in_its_time_has_one_report(rig: Rig) -> None:
    assert rig.report(10.0, _0=OK, _1=OK) == []
    assert rig.jobs.report_at_s == 10.0 + REPORT_S
    assert rig.report(10.01, FinishedBatch(1, [OK, OK, FAILED, OK])) == [
        Finished(7, bytes([OK, OK, FAILED, OK]), 10.01 - 10.0)
    ]
    assert not len(rig.jobs)


def test_rows_are_reported_once_a_while_after_they_have_ended(rig: Rig) -> None:
    rig.report(11.0, _1=OK)
    rig.report(11.01, _3=FAILED)
    assert rig.report(11.0 + REPORT_S) == [RowsEnded(7, [4, 2], bytes([OK, FAILED]))]
    assert rig.jobs.report_at_s == math.inf
    assert rig.report(12.0) == []
    rig.report(13.0, _0=OK)
    assert rig.report(13.0 + REPORT_S) == [RowsEnded(7, [5], bytes([OK]))]
    assert rig.report(14.0, FinishedBatch(1, [OK, OK, OK, FAILED])) == [Finished(7, bytes([OK]), 4.0)]


def test_the_loop_wakes_to_report_them(rig: Rig) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        mover = Mover(rig, ours, rig.jobs._region, Configure({}, 1, 1, 1, 4))
        mover.step(100.0)  # a heartbeat
        mover._jobs.begin(Load(1, [Move(row, row, key_of(row)) for row in (0, 1)]), 100.0)
        rig.moves_ended.append(EndedMoves(2, {0: OK}))
        mover._jobs.report([], 100.0)
        assert mover.wait_s(100.0) == pytest.approx(REPORT_S)


def test_missing_sub_blocks_are_named_by_their_place_in_each_report(rig: Rig) -> None:
    sealer = Sealer(GEOMETRY, NAMESPACE, 0)
    region = rig.jobs._region
    for row in (4, 2):
        sealer.seal(region.rows_view[row], key_of(row), present=GEOMETRY.present(1), sealed_at=1)
    rig.report(10.0, _0=OK, _1=OK)
    assert rig.report(11.0) == [RowsEnded(7, [5, 4], bytes([OK, OK]), [(1, 1)])]
    assert rig.report(12.0, FinishedBatch(1, [OK] * 4)) == [Finished(7, bytes([OK, OK]), 2.0, [(1, 1)])]


def test_a_job_with_rows_outside_the_region_is_refused(rig: Rig) -> None:
    with pytest.raises(ValueError, match="outside the region"):
        rig.jobs.begin(Load(9, [Move(8, 0, b"key")]), 10.0)
