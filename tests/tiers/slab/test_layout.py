"""How slots lie in slab files, namespace.json, which may be damaged in any way, and how much is in flight."""

from __future__ import annotations

import json
from typing import Any

import pytest

from nixl_tiers.base.chunk import Geometry
from nixl_tiers.tiers.base import MAX_SLOTS
from nixl_tiers.tiers.slab import in_flight
from nixl_tiers.tiers.slab.in_flight import (
    LOADS_BYTES,
    REQUEST_BYTES,
    REQUEST_ROOM,
    STORES_S,
    StoreWindow,
    request_bytes,
    rows_of_loads,
)
from nixl_tiers.tiers.slab.layout import SlabLayout, describe_layout, described

GEOMETRY = Geometry(2, 8000, 4)
LAYOUT = SlabLayout(GEOMETRY.row_bytes, 100, 30)


def test_description_says_what_was_described() -> None:
    found = json.loads(json.dumps(describe_layout(GEOMETRY, LAYOUT)))
    assert described(found) == (GEOMETRY, LAYOUT)
    assert described(found | {"journal_bytes": 1}) == (GEOMETRY, LAYOUT)


DAMAGES: dict[str, list[Any]] = {
    "format": [1, 3],
    "cells": [0, "2", 2.5, float("inf"), None],
    "sub_blocks": [3],
    "row_bytes": [4096],
    "slots": [0, -5, MAX_SLOTS + 1, 10**40],
    "slots_per_slab": [0, -1],
}


@pytest.mark.parametrize("field", DAMAGES)
def test_damaged_description_is_none(field: str) -> None:
    good = describe_layout(GEOMETRY, LAYOUT)
    assert not [value for value in DAMAGES[field] if described(good | {field: value}) is not None]
    assert described({name: value for name, value in good.items() if name != field}) is None
    for other in (None, [], {}, "text", 5, {"format": 2}, good | {"more": 1}):
        assert described(other) is None


MIB = 1 << 20
SIZES = [4096, 64 << 10, 2 * MIB, 2 * MIB + 4096, 2 * MIB + REQUEST_ROOM, 3 * MIB, 8 * MIB + 8192, 300 * MIB]


@pytest.mark.parametrize("row_bytes", SIZES)
def test_requests_are_of_two_mebibytes_and_loads_fill_fast_drives(row_bytes: int) -> None:
    size = request_bytes(row_bytes)
    assert size % 4096 == 0
    assert size <= REQUEST_BYTES + REQUEST_ROOM, "a seal is no request of its own"
    count = -(-row_bytes // size)
    assert count == max(1, -(-(row_bytes - REQUEST_ROOM) // REQUEST_BYTES))
    assert row_bytes - (count - 1) * size > size - count * 4096, "the last one is as large, but for alignment"
    rows = rows_of_loads(row_bytes)
    assert rows * row_bytes >= LOADS_BYTES > (rows - 1) * row_bytes
    assert rows * count >= 32


def test_stores_in_flight_follow_a_medium_that_has_become_slower() -> None:
    window = StoreWindow(MIB)
    window.written(10, 10 * MIB / 5e9)
    fast = window.rows
    for _ in range(in_flight._SAMPLES):
        window.written(10, 10 * MIB / 2e9)
    assert window.rows == int(2e9 * STORES_S / MIB) < fast
    window.written(10, 1.0)
    assert window.rows == int(2e9 * STORES_S / MIB), "one that was slow says little"
