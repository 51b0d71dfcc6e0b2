"""Which places of a region's rows the blocks of a transfer have."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nixl_tiers.swap.plan import CopyPlan


def places_of(plan: CopyPlan, rows: ArrayLike, first: int, count: int) -> NDArray[np.uint32]:
    """Those of `count` consecutive blocks, the first at sub-block `first` of rows[0]."""
    sub_blocks = plan.geometry.sub_blocks
    each = np.asarray(rows, np.uint32)[:, None] * np.uint32(sub_blocks) + np.arange(sub_blocks, dtype=np.uint32)
    return each.reshape(-1)[first : first + count]
