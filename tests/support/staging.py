"""Which way a file tier's rows go, without the trial that finds it out."""

from __future__ import annotations

from nixl_tiers.tiers.rowfile.tier import RowFileTier
from nixl_tiers.tiers.slab.tier import SlabTier
from nixl_tiers.tiers.staging_trial import Measured


def decide(tier: SlabTier | RowFileTier, *, staged: bool) -> None:
    """Have a tier that has not been opened stage all rows, or none, as if that had been measured."""
    for direction in (tier._staging.loads, tier._staging.stores):
        direction._measured = Measured("", "", 0, direct=1.0, staged=2.0 if staged else 0.5)
        direction._advice = "of small pages"
