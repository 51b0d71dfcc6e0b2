"""The region's words of rows and limits of streams, as the core writes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nixl_tiers.base.row_words import WAITING

if TYPE_CHECKING:
    from nixl_tiers.memory.region import HostRegion


class RegionWords:
    """Implements `StreamWords`."""

    def __init__(self, region: HostRegion) -> None:
        self._region = region  # and none of its arrays, which would keep it mapped

    def waits(self, row: int) -> None:
        self._region.words[row] = WAITING

    def limit(self, slot: int, stream: int, place: int) -> None:
        self._region.limits[slot] = stream << 32 | place
