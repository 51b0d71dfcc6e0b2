"""File tiers of both layouts inside the test's process, without a mover."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.base.times import Times
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.base import Move
from nixl_tiers.tiers.rowfile.tier import RowFileTier
from nixl_tiers.tiers.slab.tier import SlabTier
from tests.mover.harness import key_of, payload
from tests.support.file_tier import file_config

GEOMETRY = Geometry(1, 50_000)

FileTier = SlabTier | RowFileTier


def make_tier(
    layout: str, path: Path, region: HostRegion, *, times: Times, replicas: int = 1, **fields: Any
) -> FileTier:
    config = file_config(path, 16 << 20, layout=layout, **fields)
    if layout == "files":
        return RowFileTier(config, GEOMETRY, region, times=times)
    return SlabTier(config, GEOMETRY, region, replicas=replicas, times=times)


def run_until(tier: FileTier, condition: Callable[[], bool]) -> None:
    """As a mover's loop would."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        tier.poll()
        for _ in tier.maintain():
            time.sleep(0.001)
        time.sleep(0.002)


def _outcomes(tier: FileTier, batch_id: int) -> list[Outcome]:
    found: dict[int, list[Outcome]] = {}
    deadline = time.monotonic() + 120
    while batch_id not in found:
        assert time.monotonic() < deadline
        found.update({batch.batch_id: list(batch.outcomes) for batch in tier.poll()})
        time.sleep(0.0003)
    assert not tier.busy
    return found[batch_id]


def store(tier: FileTier, region: HostRegion, numbers: range) -> list[Outcome]:
    for row, number in enumerate(numbers):
        region.rows_view[row] = payload(number, GEOMETRY)
    return _outcomes(
        tier, tier.store([Move(row, number, key_of(number), seal=True) for row, number in enumerate(numbers)])
    )


def load(tier: FileTier, region: HostRegion, numbers: range) -> list[Outcome]:
    """Compares what is OK with what `store` wrote."""
    region.rows_view[:] = 0
    ended = _outcomes(tier, tier.load([Move(row, number, key_of(number)) for row, number in enumerate(numbers)]))
    for row, number in enumerate(numbers):
        if ended[row] is Outcome.OK:
            wanted = payload(number, GEOMETRY)[: GEOMETRY.cell_payload]
            assert (region.rows_view[row, : GEOMETRY.cell_payload] == wanted).all()
    return ended
