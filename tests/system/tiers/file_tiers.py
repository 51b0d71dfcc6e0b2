"""File tiers of both layouts inside the test's process, without a mover."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nixl_tiers.base.chunk import Geometry, Outcome
from nixl_tiers.base.times import PRODUCTION, Times
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.tiers.base import GONE, Entry, Move
from nixl_tiers.tiers.rowfile.tier import RowFileTier
from nixl_tiers.tiers.slab.tier import SlabTier
from tests.mover.harness import key_of, payload
from tests.support.file_tier import file_config
from tests.support.staging import decide

GEOMETRY = Geometry(1, 50_000)
ROWS = 16
CAPACITY = 16 << 20

FileTier = SlabTier | RowFileTier


def make_tier(
    layout: str,
    path: Path,
    region: HostRegion,
    capacity: int = CAPACITY,
    *,
    replicas: int = 1,
    staged: bool | None = None,
    times: Times = PRODUCTION,
    **fields: Any,
) -> FileTier:
    """`layout`: "slabs", "slabs by NIXL" or "files"; `replicas`: of slabs; `staged`: all rows, or none; None: as
    a trial finds it."""
    layout, _, by = layout.partition(" by ")
    fields = {"backend": "posix", **fields} if by else fields
    config = file_config(path, capacity, layout=layout, **fields)
    tier: FileTier
    if layout == "files":
        tier = RowFileTier(config, GEOMETRY, region, times=times)
    else:
        tier = SlabTier(config, GEOMETRY, region, replicas=replicas, times=times)
    if staged is not None:
        decide(tier, staged=staged)
    return tier


def run_until(tier: FileTier, condition: Callable[[], bool]) -> None:
    """As a mover's loop would."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        tier.poll()
        for _ in tier.maintain():
            time.sleep(0.001)
        time.sleep(0.002)


def outcomes(tier: FileTier, *batch_ids: int) -> list[Sequence[Outcome]]:
    """The outcomes of these batches, once all have ended."""
    found: dict[int, Sequence[Outcome]] = {}
    deadline = time.monotonic() + 120
    while set(found) != set(batch_ids):
        assert time.monotonic() < deadline
        found.update({batch.batch_id: batch.outcomes for batch in tier.poll()})
        time.sleep(0.0003)
    assert not tier.busy
    return [found[batch_id] for batch_id in batch_ids]


def store(tier: FileTier, region: HostRegion, numbers: range) -> list[Outcome]:
    for row, number in enumerate(numbers):
        region.rows_view[row] = payload(number, GEOMETRY)
    moves = [Move(row, number, key_of(number), seal=True) for row, number in enumerate(numbers)]
    return list(outcomes(tier, tier.store(moves))[0])


def load(tier: FileTier, region: HostRegion, numbers: range) -> list[Outcome]:
    """Compares what is OK with what `store` wrote."""
    region.rows_view[:] = 0
    moves = [Move(row, number, key_of(number)) for row, number in enumerate(numbers)]
    ended = list(outcomes(tier, tier.load(moves))[0])
    for row, number in enumerate(numbers):
        if ended[row] is Outcome.OK:
            wanted = payload(number, GEOMETRY)[: GEOMETRY.cell_payload]
            assert (region.rows_view[row, : GEOMETRY.cell_payload] == wanted).all()
    return ended


def gone(entries: list[Entry]) -> list[int]:
    """The numbers of keys that are reported as gone."""
    assert {entry.slot for entry in entries} <= {GONE}
    return sorted(int(entry.key[4:]) for entry in entries)
