"""Which way a file tier's rows go, whatever the pages of the region and the size of its rows."""

from __future__ import annotations

from nixl_tiers.tiers.rowfile.tier import RowFileTier
from nixl_tiers.tiers.slab.tier import SlabTier


def decide(tier: SlabTier | RowFileTier, *, staged: bool) -> None:
    """Have a tier that has not been opened stage all rows, or none but where they can go no other way. Row files always
    go through buffers of the threads that move them."""
    if isinstance(tier, RowFileTier):
        return
    for direction in (tier._staging.loads, tier._staging.stores):
        direction._advice = "of small pages"
        if not (staged or direction._always):  # without a buffer
            direction.open = lambda: None  # type: ignore[method-assign]
