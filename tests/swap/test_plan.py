from __future__ import annotations

import numpy as np
import pytest

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.swap.plan import CopyPlan, Gap, Segment, Share

GEOMETRY = Geometry(cells=2, cell_payload=4 * 3000, sub_blocks=4)


def plan_of(*segments: Segment, rows: int = 8) -> CopyPlan:
    return CopyPlan([segments], GEOMETRY, Share(1), 1 << 20, rows)


def test_offsets_of_places() -> None:
    plan = plan_of(Segment(0, 3000, 3000, 0))
    assert GEOMETRY.cell_bytes == 12288
    offsets = plan.place_offsets(np.array([0, 1, 7], dtype=np.uint32))
    row = GEOMETRY.row_bytes
    assert offsets.tolist() == [12288, 12288 + 3000, row + 12288 + 9000]


def test_offsets_do_not_overflow_32_bits() -> None:
    geometry = Geometry(cells=1, cell_payload=1 << 20, sub_blocks=16)
    plan = CopyPlan([[]], geometry, Share(0), 0, 1 << 28)
    offset = plan.place_offsets(np.array([(1 << 32) - 1], dtype=np.uint32))
    assert offset.tolist() == [((1 << 28) - 1) * geometry.row_bytes + 15 * (1 << 16)]


def test_gaps_are_what_no_segment_covers() -> None:
    plan = plan_of(Segment(9000, 1000, 500, 2000), Segment(0, 1000, 1000, 100))
    assert plan.groups[0].gaps == (Gap(0, 100), Gap(1100, 900), Gap(2500, 500))
    assert [segment.offset for segment in plan.groups[0].segments] == [100, 2000]
    assert plan.groups[0].block_bytes == 1500
    assert plan_of(Segment(0, 3000, 3000, 0)).groups[0].gaps == ()
    assert plan_of(Segment(0, 3000, 2998, 1)).groups[0].gaps == (Gap(0, 1), Gap(2999, 1))
    assert plan_of().groups[0].gaps == (Gap(0, 3000),)


def test_layers_adjacent_on_both_sides_are_merged() -> None:
    together = [Segment(1000 * layer, 4000, 1000, 1000 * layer, 7) for layer in range(3)]
    assert plan_of(*together).groups[0].segments == (Segment(0, 4000, 3000, 0, 7),)
    apart = [Segment(1000 * layer, 1000, 1000, 1000 * layer, 1) for layer in range(3)]
    assert len(plan_of(*apart).groups[0].segments) == 3


@pytest.mark.parametrize(
    "second",
    [
        Segment(2000, 4000, 1000, 1000, 7),
        Segment(1000, 3000, 1000, 1000, 7),
        Segment(1000, 4000, 1000, 1001, 7),
        Segment(1000, 4000, 1000, 1000, 6),
    ],
    ids=["address", "stride", "offset", "blocks"],
)
def test_segments_that_differ_are_not_merged(second: Segment) -> None:
    first = Segment(0, 4000, 1000, 0, 7)
    assert plan_of(first, second).groups[0].segments == (first, second)


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([Segment(0, 3000, 2000, 0), Segment(0, 3000, 1001, 1999)], "segment at offset 1999: it overlaps"),
        ([Segment(0, 3000, 2000, 1001)], "ends at 3001, beyond the sub-block of 3000"),
        ([Segment(0, 3000, 2000, -1)], "offset -1"),
        ([Segment(0, 3000, 0, 0)], "0 bytes"),
        ([Segment(0, 1999, 2000, 0)], "overlap at a stride of 1999"),
        ([Segment(0, 3000, 3000, 0, 0)], "it has 0 blocks"),
    ],
)
def test_impossible_segments_are_refused(segments: list[Segment], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_of(*segments)


def test_impossible_regions_are_refused() -> None:
    with pytest.raises(ValueError, match="cell 2 is not one of the row's 2"):
        CopyPlan([], GEOMETRY, Share(2), 0, 1)
    with pytest.raises(ValueError, match="0 rows"):
        CopyPlan([], GEOMETRY, Share(0), 0, 0)
    with pytest.raises(ValueError, match="not between 1 and 4294967296 places"):
        CopyPlan([], GEOMETRY, Share(0), 0, (1 << 30) + 1)


def test_the_block_limit_is_the_smallest_of_a_group() -> None:
    plan = plan_of(Segment(0, 1000, 1000, 0, 9), Segment(9000, 1000, 1000, 1000, 7), Segment(0, 1000, 1000, 2000))
    assert plan.pairs(0, [6], [0]).tolist() == [[6, 0]]
    with pytest.raises(ValueError, match="block 7 is out of range: there are 7"):
        plan.pairs(0, [0, 7], [0, 1])
