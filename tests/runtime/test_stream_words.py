"""A stream over a real mover: what the core says in the region, and what the mover answers there."""

from __future__ import annotations

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.base.row_words import WAITING
from nixl_tiers.memory.region import HostRegion
from nixl_tiers.runtime.stream_words import RegionWords

GEOMETRY = Geometry(cells=1, cell_payload=8192, sub_blocks=1)


def test_the_core_writes_what_workers_read() -> None:
    with HostRegion.create(GEOMETRY, 4) as region:
        words = RegionWords(region)
        words.waits(2)
        words.limit(3, (1 << 32) - 1, 512)
        assert region.words.tolist() == [0, 0, WAITING, 0]
        assert int(region.limits[3]) == ((1 << 32) - 1) << 32 | 512
