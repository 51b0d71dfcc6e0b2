"""NIXL's GDS plugins themselves, on NVIDIA's cuFile: run by test_short_reads.py in a pytest of their own.

cuFile compatibility mode, no GPU: says nothing about GPU-direct speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.nixl_agent import Agent, TransferState
from tests.support.no_gpu import counters
from tests.support.transfers import end

GEOMETRY = Geometry(1, 8192 - 1024)
ROW = GEOMETRY.row_bytes
ROWS = 8


@pytest.fixture
def region() -> Iterator[HostRegion]:
    with HostRegion.create(GEOMETRY, ROWS) as region:
        yield region


@pytest.fixture
def path(cufile_place: Path) -> Path:
    """Of as many rows as the region has, of which the last one is cut short."""
    path = cufile_place / "rows"
    path.write_bytes(b"\1" * (ROWS * ROW - 4096))
    return path


def short_read(agent: Agent, region: HostRegion, path: Path) -> TransferState:
    region.rows_view[:] = 7
    memory = agent.register_region(region)
    file = agent.register_file(str(path), ROWS * ROW, direct=True)
    spans = [(region.address + row * ROW, ROW, row * ROW, file.devices[0]) for row in range(ROWS)]
    assert end(agent.read(spans[:-1])) is TransferState.DONE
    assert (region.rows_view[:-1] == 1).all()
    outcome = end(agent.read(spans))
    assert (region.rows_view[-1] != 1).any()
    agent.deregister(file)
    agent.deregister(memory)
    return outcome


def test_gds_mt_ends_a_short_read_as_failed(region: HostRegion, path: Path) -> None:
    agent = Agent.gds_mt()
    assert short_read(agent, region, path) is TransferState.FAILED
    assert counters().read >= (ROWS - 1) * ROW


def test_plain_gds_ends_a_short_read_as_done(region: HostRegion, path: Path) -> None:
    """Why `backend: gds` is refused. If this fails, NIXL has mended it: think again."""
    assert short_read(Agent("GDS", {}, "FILE"), region, path) is TransferState.DONE
