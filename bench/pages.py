"""Host regions with pages of a chosen kind: they decide how many requests a row becomes, and so a file tier's speed."""

from __future__ import annotations

from typing import Final

import numpy as np

from nixl_tiers.base.chunk import PAGE, Geometry
from nixl_tiers.base.policies import HugePages
from nixl_tiers.memory.pages import advice, mostly_huge
from nixl_tiers.memory.region import HostRegion

PAGES: Final = {
    "4k": "4 KiB, as the kernel gives them",
    "scattered": "4 KiB, touched in random order, as they lie in memory after a long time",
    "huge": "2 MiB, from a pool or transparent, where the machine gives them",
}


class Unavailable(Exception):
    """What was asked for is not possible on this machine; the text says why."""


def make_region(geometry: Geometry, rows: int, pages: str) -> HostRegion:
    """A region whose pages are allocated. `pages` is a key of PAGES. Raises Unavailable."""
    region = HostRegion.create(geometry, rows, huge_pages=HugePages.HUGETLB if pages == "huge" else HugePages.OFF)
    if pages == "scattered":
        flat = region.rows_view.reshape(-1)
        flat[np.random.default_rng(3).permutation(len(flat) // PAGE) * PAGE] = 0
    region.prefault().wait()
    if pages == "huge" and not mostly_huge(region.nbytes, region.huge_bytes or 0):
        region.close()
        raise Unavailable(f"no huge pages: {advice() or 'the kernel found no more free memory in one piece'}")
    return region
