"""What a worker says of rows that lack sub-blocks at their beginning, as csrc/swap_step.c does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nixl_tiers.base.control_words import INCOMPLETE, MISSING_AT, STORE_SEQ_AT, WRITTEN
from nixl_tiers.memory.region import HostRegion


def mark_partial(
    region: HostRegion, rows: Sequence[int], cell: int, store_seq: int, missing: int, *, whole: bool = True
) -> None:
    """`whole`: whether no load may need what is missing."""
    state = WRITTEN if whole else INCOMPLETE
    region.control[rows, cell] = np.uint64(store_seq << STORE_SEQ_AT | missing << MISSING_AT | state)
