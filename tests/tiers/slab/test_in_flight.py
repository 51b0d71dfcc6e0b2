"""How much a slab tier has in flight, by bytes and requests, and what follows from how fast it writes."""

from __future__ import annotations

import pytest

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

MIB = 1 << 20
SIZES = [4096, 64 << 10, 2 * MIB, 2 * MIB + 4096, 2 * MIB + REQUEST_ROOM, 3 * MIB, 8 * MIB + 8192, 300 * MIB]


@pytest.mark.parametrize("row_bytes", SIZES)
def test_requests_are_of_two_mebibytes_at_most_and_of_one_size(row_bytes: int) -> None:
    size = request_bytes(row_bytes)
    assert size % 4096 == 0
    assert size <= REQUEST_BYTES + REQUEST_ROOM, "a seal is no request of its own"
    count = -(-row_bytes // size)
    assert count == max(1, -(-(row_bytes - REQUEST_ROOM) // REQUEST_BYTES))
    assert row_bytes - (count - 1) * size > size - count * 4096, "the last one is as large, but for alignment"


@pytest.mark.parametrize("row_bytes", SIZES)
def test_loads_fill_fast_drives(row_bytes: int) -> None:
    rows, requests = rows_of_loads(row_bytes), -(-row_bytes // request_bytes(row_bytes))
    assert rows * row_bytes >= LOADS_BYTES
    assert rows * requests >= 32
    assert (rows - 1) * row_bytes < LOADS_BYTES, "no more than that"


def test_stores_in_flight_follow_a_medium_that_has_become_slower() -> None:
    window = StoreWindow(MIB)
    window.written(10, 10 * MIB / 5e9)
    fast = window.rows
    for _ in range(in_flight._SAMPLES):
        window.written(10, 10 * MIB / 2e9)
    assert window.rows == int(2e9 * STORES_S / MIB) < fast
    window.written(10, 1.0)
    assert window.rows == int(2e9 * STORES_S / MIB), "one that was slow says little"
