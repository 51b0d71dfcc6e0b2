"""What became of the rows of a store job, by the control words that the workers wrote into the region."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from nixl_tiers.base.chunk import Key

if TYPE_CHECKING:
    from nixl_tiers.core.host import Row
    from nixl_tiers.memory.region import HostRegion


def bad_rows(region: HostRegion, rows: Sequence[Row]) -> tuple[set[Key], set[Key]]:
    """(keys of rows that were not written, keys of rows that lack sub-blocks which a load may need).

    Sets `missing` of each row: how many sub-blocks it lacks at its beginning.
    """
    failed, incomplete = set[Key](), set[Key]()
    if rows and region.geometry.sub_blocks > 1:
        for row, missing in zip(rows, region.missing([row.index for row in rows]).tolist(), strict=True):
            row.missing = missing
    for store_seq in {row.store_seq for row in rows}:
        of_job = [row for row in rows if row.store_seq == store_seq]
        places = np.array([row.index for row in of_job])
        if (written := region.written(places, store_seq)).all():
            continue
        words = zip(of_job, written.tolist(), region.copied(places, store_seq).tolist(), strict=True)
        for row, good, copied in words:
            if not good:
                (incomplete if copied else failed).add(row.key)
    return failed, incomplete


def ended_rows(region: HostRegion, rows: Sequence[Row]) -> list[Row]:
    """Those of `rows` whose job every worker has ended, successfully or not."""
    if not rows:
        return []
    ended = region.ended([row.index for row in rows], [row.store_seq for row in rows])
    return [row for row, done in zip(rows, ended.tolist(), strict=True) if done]
