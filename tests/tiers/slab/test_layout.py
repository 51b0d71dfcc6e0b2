"""How slots lie in slab files, and namespace.json, which may be damaged in any way."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.tiers.base import MAX_SLOTS
from nixl_tiers.tiers.slab.layout import SlabLayout, describe_layout, described

GEOMETRY = Geometry(2, 8000, 4)
LAYOUT = SlabLayout(GEOMETRY.row_bytes, 100, 30)


def test_layout_spreads_slots_over_files() -> None:
    small = SlabLayout.of(4096, 1000)
    assert (small.slabs, small.extent_slots, small.slots_in(0), small.slots_in(1)) == (1, 31, 1000, 0)
    large = SlabLayout.of(2 << 20, 2000)
    assert (large.slabs, large.slots_per_slab, large.slots_in(3)) == (4, 512, 2000 - 3 * 512)
    assert SlabLayout.of(5 << 30, 3).slots_per_slab == 1
    huge = SlabLayout.of(1 << 20, 100 << 20)  # 100 TiB
    assert huge.slabs <= 1024


def test_slots_have_room_as_far_as_their_files_go() -> None:
    flags = SlabLayout(4096, 10, 4).with_room({0: 2, 1: 9, 2: 4, 7: 4})
    assert np.flatnonzero(flags).tolist() == [0, 1, 4, 5, 6, 7, 8, 9]


def test_description_says_what_was_described() -> None:
    found = json.loads(json.dumps(describe_layout(GEOMETRY, LAYOUT)))
    assert described(found) == (GEOMETRY, LAYOUT)
    assert described(found | {"journal_bytes": 1}) == (GEOMETRY, LAYOUT)


@pytest.mark.parametrize("found", [None, [], {}, "text", 5, {"format": 2}])
def test_other_json_is_no_description(found: Any) -> None:
    assert described(found) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", 1),
        ("format", 3),
        ("cells", 0),
        ("cells", "2"),
        ("cells", 2.5),
        ("cells", float("inf")),
        ("cells", None),
        ("sub_blocks", 3),
        ("row_bytes", 4096),
        ("slots", 0),
        ("slots", -5),
        ("slots", MAX_SLOTS + 1),
        ("slots", 10**40),
        ("slots_per_slab", 0),
        ("slots_per_slab", -1),
        ("more", 1),
    ],
)
def test_damaged_description_is_none(field: str, value: Any) -> None:
    found = describe_layout(GEOMETRY, LAYOUT) | {field: value}
    assert described(found) is None
    del found[field]
    assert field == "more" or described(found) is None
